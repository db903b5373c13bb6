"""What old releases of onnxruntime end the process on is not in a training model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.training.graphs.decomposition import divide_at_once
from onnxtool.training.onnxblock.loss import CrossEntropyLoss
from tests.graphs import of_text
from tests.training.small_models import make, perceptron

ONE = np.array(1, np.float32)


def product(one: Any, *, swapped: bool = False, read_twice: bool = False) -> onnx.ModelProto:
    """Make y = x * (one / count) and, where it is read twice, the factor as an output as well."""
    factors, outputs = "each, x" if swapped else "x, each", "float y, float each" if read_twice else "float y"
    body = f"[each] each = Div(one, count) [product] y = Mul({factors})"
    return of_text(f"graph (float[3] x, float[3] count) => ({outputs}) {{ {body} }}", {"one": one}, 20)


def divided(model: onnx.ModelProto) -> onnx.ModelProto:
    read: ir.Model = ir.from_proto(model)
    divide_at_once(read.graph)
    return ir.to_proto(read)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_with_one_over_a_count_is_a_division(swapped: bool) -> None:
    """With the same values but for the last digit."""
    model = product(ONE, swapped=swapped)
    changed = divided(model)
    assert [node.op_type for node in changed.graph.node] == ["Div"]
    feeds = {"x": np.array([1, 2, 3], np.float32), "count": np.array([3, 5, 7], np.float32)}
    before, after = (
        ort.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for one in (model, changed)
    )
    np.testing.assert_allclose(after, before, rtol=1e-6)


@pytest.mark.parametrize(
    "model",
    [product(np.array(2, np.float32)), product(np.ones((2, 3), np.float32)), product(ONE, read_twice=True)],
    ids=["another number", "ones that make the result larger", "a factor that is read twice"],
)
def test_other_products_stay(model: onnx.ModelProto) -> None:
    """Those that onnxruntime itself leaves, and those of another result."""
    assert [node.op_type for node in divided(model).graph.node] == ["Div", "Mul"]


@pytest.mark.parametrize("ignore_index", [None, -100])
def test_no_training_model_has_one(ignore_index: int | None, tmp_path: Path) -> None:
    """Onnxruntime 1.17 to 1.20 die while they load it."""
    make(tmp_path, perceptron(), loss=CrossEntropyLoss(ignore_index=ignore_index))
    for name in ("training_model", "eval_model", "optimizer_model"):
        model = onnx.load(tmp_path / f"{name}.onnx")
        assert divided(model).graph.node == model.graph.node
