"""What onnxoptimizer cleans up."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.onnxoptimizer_cleanup import onnxoptimizer_cleanup
from tests.optimize.passes.builders import (
    CONTEXT,
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    build_body,
    count,
    operators,
    ragged_feeds,
)
from tests.optimize.passes.properties import Row
from tests.workshop import Workshop


def test_identities_and_constants_are_cleaned_up(workshop: Workshop) -> None:
    """TorchScript leaves many."""
    model = ir.load(workshop.exported("tiny-encoder", exporter="torchscript"))
    assert count(model, "Constant") > 20
    cleaned = apply(onnxoptimizer_cleanup, model).model
    assert count(cleaned, "Constant") == 0
    assert len(cleaned.graph) < len(model.graph)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_numbers_stay(workshop: Workshop, exporter: str) -> None:
    """And the metadata, and the names of the outputs."""
    model = ir.load(workshop.exported("tiny-encoder", exporter=exporter))
    assert_same_numbers(onnxoptimizer_cleanup, model, ragged_feeds(), atol=2e-5)  # hidden states of about 3


def test_what_nothing_reads_is_dropped() -> None:
    """With what it alone reads."""
    model = build("g (float[B] x) => (float[B] y) { a = Abs(x) b = Exp(a) c = Identity(x) y = Neg(c) }")
    outcome = apply(onnxoptimizer_cleanup, model)
    assert outcome.num_changes > 0
    assert operators(outcome.model) == ["Neg"]
    assert apply(onnxoptimizer_cleanup, outcome.model).num_changes == 0


def test_a_reshape_that_copies_sizes_of_another_stays_behind_it() -> None:
    """A 0 means the size that stands there, which the input of the first Reshape does not have."""
    model = build(
        "g (float[6, 16] x) => (float[2, 3, 16] y) <int64[4] heads = {2, 3, 2, 8}, int64[3] flat = {0, 0, -1}> "
        "{ r = Reshape(x, heads) y = Reshape(r, flat) }"
    )
    assert_left_alone(onnxoptimizer_cleanup, model)


def test_model_local_functions_are_not_lost() -> None:
    """A model with functions is left alone by onnxoptimizer, which would drop them, and the note tells."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=["n"])
    inner = ir.node("Relu", [a := ir.val("a")])
    function = ir.Function(
        "local", "F", graph=ir.Graph([a], inner.outputs, nodes=[inner], opset_imports={"": 20}), attributes=[]
    )
    call = ir.node("F", [x], domain="local")
    call.outputs[0].name = "y"
    graph = ir.Graph([x], call.outputs, nodes=[call], opset_imports={"": 20, "local": 1}, name="g")
    model = ir.Model(graph, ir_version=9, functions=[function])
    outcome = onnxoptimizer_cleanup.apply(model, CONTEXT)
    assert outcome.model is model
    assert "functions" in outcome.note


NOTHING = "t = Identity(x) y = Neg(t)"
ROW = Row(onnxoptimizer_cleanup, {"identity": partial(build_body, NOTHING)}, atol=0)
