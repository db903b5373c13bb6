"""Products with transposed weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize.passes.products import transposed_weights
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    count,
    normal,
    operators,
    ragged_feeds,
)
from tests.optimize.passes.properties import Row
from tests.workshop import Workshop

WEIGHTS = {"w": normal(4, 8)}
SIGNATURE = "g (float[B, S, 8] x) => (float[B, S, 4] y)"
BODY = "t = Transpose <perm=[1, 0]> (w) y = MatMul(x, t)"
TIED = "g (int64[B, S] ids) => (float[B, S, 4] y) { x = Gather(w, ids) t = Transpose(w) y = MatMul(x, t) }"


def test_a_weight_of_its_own_is_stored_transposed() -> None:
    """And the original is dropped."""
    model = build(f"{SIGNATURE} {{ {BODY} }}", WEIGHTS)
    assert_same_numbers(transposed_weights, model)
    assert operators(model) == ["MatMul"]
    assert list(model.graph.initializers) == ["w_transposed"]


def test_two_products_share_the_transposed_weight() -> None:
    """It is made once."""
    body = "t = Transpose(w) p = MatMul(x, t) q = MatMul(x, t) y = Add(p, q)"
    model = build(f"{SIGNATURE} {{ {body} }}", WEIGHTS)
    assert apply(transposed_weights, model).num_changes == 2
    assert operators(model) == ["MatMul", "MatMul", "Add"]
    assert list(model.graph.initializers) == ["w_transposed"]


def test_a_tied_weight_stays_one_tensor() -> None:
    """The product transposes while it multiplies."""
    model = build(TIED, WEIGHTS)
    assert_same_numbers(transposed_weights, model, {"ids": np.array([[0, 3, 1]])})
    assert operators(model) == ["Gather", "FusedMatMul"]
    assert list(model.graph.initializers) == ["w"]


@pytest.mark.parametrize(
    "text",
    [
        f"g (float[B, 4, 8] x) => (float[B, 4, 8] y) {{ {BODY.replace('[1, 0]', '[0, 1]')} }}",
        "g (float[S, 4] x) => (float[S, 8] y) { t = Transpose(w) z = MatMul(t, x) y = Identity(z) }",
        "g (float[B, S, 8] x, float[4, 8] v) => (float[B, S, 4] y) { t = Transpose(v) y = MatMul(x, t) }",
        f"{SIGNATURE} {{ t = Transpose(w) y = Add(x, t) }}",
    ],
    ids=["not transposed", "from the left", "no weight", "no product"],
)
def test_other_transpositions_are_left_alone(text: str) -> None:
    """Each is something else."""
    weights = {"w": normal(8, 8)} if "[0, 1]" in text else WEIGHTS
    assert_left_alone(transposed_weights, build(text, weights))


def test_three_axes_are_left_alone() -> None:
    """A weight of the third rank is no matrix."""
    weights = {"w": normal(2, 4, 8)}
    model = build("g (float[2, 3, 2] x) => (float y) { t = Transpose <perm=[1, 2, 0]> (w) y = MatMul(x, t) }", weights)
    assert_left_alone(transposed_weights, model)


def test_a_transposed_weight_that_is_an_output_keeps_the_weight() -> None:
    """It has to be there, and no second copy of the weight is stored."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 4] y, float[8, 4] t) {{ {BODY} }}", WEIGHTS)
    assert_same_numbers(transposed_weights, model)
    assert sorted(operators(model)) == ["FusedMatMul", "Transpose"]


def test_a_vector_and_a_tied_weight_are_left_alone() -> None:
    """FusedMatMul takes two axes or more."""
    text = "g (float[8] x) => (float[4] y, float[8] z) { t = Transpose(w) y = MatMul(x, t) z = MatMul(y, w) }"
    assert_left_alone(transposed_weights, build(text, WEIGHTS), "two axes or more")


def test_a_weight_that_a_branch_reads_stays_one_tensor() -> None:
    """The branch keeps its own transposition."""
    branches = (
        "then_branch = a () => (float[B, S, 4] p) { u = Transpose(w) p = MatMul(x, u) }, "
        "else_branch = e () => (float[B, S, 4] q) { q = Identity(y) }"
    )
    text = f"g (float[B, S, 8] x, bool c) => (float[B, S, 4] y, float[B, S, 4] z) {{ {BODY} z = If <{branches}> (c) }}"
    model = build(text, WEIGHTS)
    assert_same_numbers(transposed_weights, model, {"x": normal(2, 3, 8), "c": np.array(True)})
    assert operators(model) == ["FusedMatMul", "If"]
    assert list(model.graph.initializers) == ["w"]


def test_doubles_are_left_alone() -> None:
    """What it is for are models, which have none."""
    text = f"{SIGNATURE} {{ {BODY} }}".replace("float", "double")
    model = build(text, {"w": WEIGHTS["w"].astype(np.float64)})
    assert_left_alone(transposed_weights, model, "neither float32 nor float16")


def test_the_bytes_are_not_read_before_they_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large weight stays where it lies on disk until then."""
    path = tmp_path / "large.onnx"
    text = "g (float[B, 256] x) => (float[B, 512] y) { t = Transpose(w) y = MatMul(x, t) }"
    write_inline(build(text, {"w": normal(512, 256)}), path)
    model = load_model(path)

    def refuse(_tensor: ir.ExternalTensor) -> None:
        raise AssertionError("a pass reads a weight")

    with monkeypatch.context() as patch:
        patch.setattr(ir.ExternalTensor, "numpy", refuse)
        assert apply(transposed_weights, model).num_changes == 1
    write_inline(model, tmp_path / "after.onnx")
    feeds = {"x": normal(3, 256)}
    before, after = (
        ort.InferenceSession(one, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for one in (path, tmp_path / "after.onnx")
    )
    np.testing.assert_allclose(after, before, atol=1e-4, rtol=0)  # sums of 256 products in another order


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_tied_embedding_of_an_export_stays_one_tensor(workshop: Workshop, exporter: str) -> None:
    """Its output layer reads the table that its lookup reads."""
    model = load_model(workshop.exported("tiny-mlm", exporter=exporter))
    num_transposes = count(model, "Transpose")
    assert_same_numbers(transposed_weights, model, ragged_feeds(), atol=1e-4)  # logits of about 10
    assert count(model, "FusedMatMul", "com.microsoft") == 1
    assert count(model, "Transpose") == num_transposes - 1
    large = [value for value in model.graph.initializers.values() if value.shape is not None and 30522 in value.shape]
    assert len([value for value in large if len(value.shape or ()) == 2]) == 1


ROW = Row(
    transposed_weights,
    {"own": partial(build, f"{SIGNATURE} {{ {BODY} }}", WEIGHTS), "tied": partial(build, TIED, WEIGHTS)},
    atol=None,
)
