"""What artifacts ask of a runtime: kernels that onnxruntime 1.17 has, and so browsers and phones since then.

onnxruntime-web and the packages for Android and iOS are built with all kernels of the CPU provider for standard
operators; the reduced onnxruntime-mobile is no longer published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs

from onnxtool.training import artifacts, onnxblock
from tests.graphs import of_text
from tests.training.graphs.test_ignored_rows import language_model
from tests.training.small_models import make, perceptron


def convolution() -> onnx.ModelProto:
    """Make an image [N, 2, 6, 6] -> convolution, normalization, pooling and a layer -> three classes."""
    draw = np.random.default_rng(0)
    shapes = {"kernel": (4, 2, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,), "w": (16, 3), "b": (3,)}
    arrays = {name: draw.uniform(0.5, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    body = """c = Conv(x, kernel) n = BatchNormalization(c, scale, shift, mean, var) r = Relu(n)
        p = MaxPool <kernel_shape=[2, 2], strides=[2, 2]> (r) f = Flatten(p) y = Gemm(f, w, b)"""
    return of_text(f"convolution (float[N, 2, 6, 6] x) => (float[N, 3] y) {{ {body} }}", arrays)


_KERNELS = Path(__file__).with_name("cpu_kernels_1_17.txt")
_CLIPPED = onnxblock.optim.AdamW(weight_decay=0.01, clip_grad=onnxblock.optim.ClipGradNorm(1.0))
MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    "perceptron": (lambda: perceptron(dropout=0.1), {"optimizer": _CLIPPED}),
    "convolution": (convolution, {"optimizer": artifacts.OptimType.SGD}),
    "language": (language_model, {"loss": onnxblock.loss.CrossEntropyLoss(axis=-1, ignore_index=-100)}),
}


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[tuple[int, int | None]]]:
    """For each operator the opsets of its kernels."""
    found = {}
    for line in _KERNELS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, *ranges = line.split()
            bounds = [one.split("-") for one in ranges]
            found[name] = [(int(first), int(last) if last else None) for first, last in bounds]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_has_a_kernel_in_browsers_and_phones(
    tmp_path: Path, kernels: dict[str, list[tuple[int, int | None]]], name: str
) -> None:
    """Or is a function of operators that have; training, eval and optimizer model, and all graphs in them."""
    model, settings = MODELS[name]
    make(tmp_path, model(), **settings)
    paths = sorted(tmp_path.glob("*.onnx"))
    assert len(paths) == 3
    for path in paths:
        written = onnx.load(path)
        assert written.ir_version <= 9
        assert [(opset.domain, opset.version <= 20) for opset in written.opset_import] == [("", True)]
        lacking = {node.op_type for node in nodes_of(written.graph) if not runs(node, written, kernels)}
        assert not lacking, path.name


def test_what_runtimes_lack_is_found(kernels: dict[str, list[tuple[int, int | None]]]) -> None:
    """An operator of onnxruntime-training, and a standard one without a kernel; not one that is a function."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[2] x, uint8[9] code) => (float[2] y, uint8[H,W,3] image) {
            a = com.microsoft.InPlaceAccumulatorV2(x, x)
            image = ImageDecoder(code)
            y = Gelu(x)
        }""")
    assert [runs(node, model, kernels) for node in model.graph.node] == [False, False, True]


def runs(node: onnx.NodeProto, model: onnx.ModelProto, kernels: dict[str, list[tuple[int, int | None]]]) -> bool:
    """Return whether there is a kernel for a node, by onnxruntime's rule: one without an end is for its opset alone."""
    if node.domain:
        return False
    schema = defs.get_schema(node.op_type, model.opset_import[0].version, "")
    since = schema.since_version
    ranges = kernels.get(node.op_type, [])
    if any(first == since or (last is not None and first <= since <= last) for first, last in ranges):
        return True
    return bool(schema.has_function or schema.has_context_dependent_function)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph, and of the graphs in their attributes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)
