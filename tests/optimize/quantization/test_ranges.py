"""Values that float16 cannot hold are found by running the model, and stay in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from onnxtool.model_file.weights import write_inline
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.quantization.float16 import beyond, measure_ranges, to_float16
from tests.optimize.passes.builders import Arrays, apply, build, normal, run

FEEDS = {"x": normal(2, 3, 8, seed=7)}
# The weights fit into float16, h is some hundred thousands large, and what comes after it as small as x again.
GRAPH = """g (float[B, S, 8] x) => (float[B, S, 8] y) {
    h = MatMul(x, up) a = Relu(h) d = MatMul(a, down) y = LayerNormalization(d, gamma, beta)
}"""
WEIGHTS: Arrays = {
    "up": 2e4 * normal(8, 16, seed=1),
    "down": 1e-4 * normal(16, 8, seed=2),
    "gamma": 1 + normal(8, seed=3),
    "beta": normal(8, seed=4),
}


def compute(model: ir.Model) -> NDArray[np.float32]:
    """Run a model as it says, operator by operator; onnxruntime's CPU kernels compute float16 in float32."""
    proto = ir.to_proto(ir.external_data.load_to_model(model))
    with np.errstate(over="ignore", invalid="ignore"):
        found: NDArray[np.float32] = ReferenceEvaluator(proto).run(None, dict(FEEDS))[0]
    return found


def test_ranges_are_the_largest_values_over_all_inputs(tmp_path: Path) -> None:
    """Of the input and each value that a node makes, by NumPy; nothing is left in the folder."""
    feeds = [FEEDS, {"x": -2 * FEEDS["x"]}]
    ranges = measure_ranges(build(GRAPH, WEIGHTS), feeds, tmp_path)
    hidden = [feed["x"] @ WEIGHTS["up"] for feed in feeds]
    assert set(ranges) == {"x", "h", "a", "d", "y"}
    assert ranges["x"] == 2 * np.abs(FEEDS["x"]).max()
    assert ranges["h"] == pytest.approx(max(np.abs(one).max() for one in hidden), rel=1e-5)
    assert ranges["a"] == pytest.approx(max(one.max() for one in hidden), rel=1e-5)
    assert list(tmp_path.iterdir()) == []


def test_values_without_elements_overflow_nothing(tmp_path: Path) -> None:
    """Such as keys before the first token; those of later tokens count."""
    graph = "g (float[B, P, 8] past, float[B, S, 8] x) => (float[B, T, 8] y) { p = Abs(past) y = Concat<axis=1>(p, x) }"
    first, later = ({"past": normal(2, length, 8), **FEEDS} for length in (0, 3))
    assert measure_ranges(build(graph), [first], tmp_path)["p"] == 0
    assert measure_ranges(build(graph), [first, later], tmp_path)["p"] == pytest.approx(np.abs(later["past"]).max())


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    """The outputs that measure are put on a copy."""
    model = build(GRAPH, WEIGHTS)
    measure_ranges(model, [FEEDS], tmp_path)
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert len(model.graph) == 4


def test_what_is_infinite_already_counts_as_infinite(tmp_path: Path) -> None:
    """1 / 0 is no number that any precision holds."""
    model = build("g (float[B] x) => (float[B] y) { y = Reciprocal(x) }")
    assert measure_ranges(model, [{"x": np.zeros(3, np.float32)}], tmp_path) == {"x": 0, "y": float("inf")}


def test_those_beyond_a_limit_come_the_largest_first() -> None:
    """The limits themselves are allowed, and so is zero."""
    ranges = {"a": 2.0, "b": 5.0, "c": float("inf"), "d": 1.0, "e": 0.25, "f": 0.5, "g": 0.0}
    assert beyond(ranges, 2.0) == ("c", "b")
    assert beyond(ranges, 2.0, 0.5) == ("c", "b", "e")


def test_everything_in_half_precision_would_overflow() -> None:
    """So that the next test shows something."""
    model = apply(to_float16(), build(GRAPH, WEIGHTS)).model
    assert not np.isfinite(compute(model)).all()


def test_an_activation_beyond_half_precision_stays_finite(tmp_path: Path) -> None:
    """The nodes that make and read it compute in float32, and the report says so."""
    source = build(GRAPH, WEIGHTS)
    write_inline(source, tmp_path / "m.onnx")
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx", precision="fp16"))
    result = ir.load(report.output)
    found, (wanted,) = compute(result), run(source, FEEDS)
    np.testing.assert_allclose(found, wanted, atol=2e-2, rtol=0)  # LayerNormalization's output is about 3 large
    assert "2 nodes stay in float32, because" in " ".join(result.note for result in report.passes)
    assert {str(node.op_type): str(node.outputs[0].dtype) for node in result.graph}["Relu"] in ("FLOAT", "None")
