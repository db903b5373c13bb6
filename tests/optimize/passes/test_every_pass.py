"""What holds for every pass: a row of the table is in the test file of its pass."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context
from onnxtool.optimize.presets import FINISHING, PRESETS
from tests.optimize.passes import (
    test_attention,
    test_convert_opset,
    test_duplicates,
    test_fold_constants,
    test_gelu,
    test_input_sizes,
    test_maxima,
    test_neutral_operators,
    test_normalizations,
    test_onnxoptimizer_passes,
    test_onnxruntime_fusions,
    test_products,
    test_repeated_heads,
    test_rotary_embedding,
)
from tests.optimize.passes.builders import (
    Row,
    assert_left_alone,
    assert_same_numbers,
    assert_twice_is_once,
    build,
    operators,
)
from tests.optimize.quantization import test_embeddings, test_linear_layers, test_static
from tests.workshop import Workshop

ROWS: dict[str, Row] = {
    row.step.name: row
    for row in (
        *(test_attention.ROW, test_convert_opset.ROW, *test_duplicates.ROWS, test_fold_constants.ROW, *test_gelu.ROWS),
        *(test_input_sizes.ROW, *test_maxima.ROWS, test_neutral_operators.ROW, *test_normalizations.ROWS),
        *test_onnxoptimizer_passes.ROWS,
        *(test_onnxruntime_fusions.ROW, *test_products.ROWS, test_repeated_heads.ROW, test_rotary_embedding.ROW),
        *(*test_embeddings.ROWS, *test_linear_layers.ROWS),
    )
} | {"quantize_int8, static": test_static.ROW}
GRAPHS = [(name, graph) for name, row in ROWS.items() for graph in row.fires]
STAYS = [(name, graph) for name, row in ROWS.items() for graph in row.stays]
BERT = Context("bert", num_heads=4, hidden_size=32)


def test_every_pass_has_a_row() -> None:
    """A new pass of a preset fails this test until it has one."""
    passes = {step.name for steps in (*PRESETS.values(), *FINISHING.values()) for step in steps}
    assert passes <= {row.step.name for row in ROWS.values()}


@pytest.mark.parametrize(("name", "graph"), [pair for pair in GRAPHS if ROWS[pair[0]].atol is not None])
def test_a_pass_keeps_the_numbers(name: str, graph: str) -> None:
    """Before and after, in onnxruntime; with the names and dtypes of the outputs, and the metadata."""
    row = ROWS[name]
    assert_same_numbers(row.step, row.fires[graph](), row.feeds, row.atol or 0)


@pytest.mark.parametrize(("name", "graph"), [pair for pair in GRAPHS if ROWS[pair[0]].left(pair[1])])
def test_what_is_left_of_a_graph(name: str, graph: str) -> None:
    """The operators that the table says, in their order."""
    outcome = ROWS[name].step.apply(ROWS[name].fires[graph](), Context())
    assert operators(outcome.model) == ROWS[name].left(graph)


@pytest.mark.parametrize(("name", "graph"), STAYS)
def test_a_pass_leaves_alone_what_is_not_its_pattern(name: str, graph: str) -> None:
    """With the reason, where it has one."""
    build_graph, note = ROWS[name].stays[graph]
    assert_left_alone(ROWS[name].step, build_graph(), note)


@pytest.mark.parametrize(("name", "graph"), GRAPHS)
def test_a_pass_does_nothing_the_second_time(name: str, graph: str) -> None:
    """To the byte."""
    assert_twice_is_once(ROWS[name].step, ROWS[name].fires[graph]())


@pytest.mark.parametrize("name", ROWS)
def test_a_pass_does_nothing_without_its_pattern(name: str) -> None:
    """Integers only: nothing to fuse, to clean up or to share."""
    assert_left_alone(ROWS[name].step, build("g (int64[B] x) => (int64[B] y) { y = Neg(x) }"))


@pytest.mark.parametrize("provider", PRESETS)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_pass_does_nothing_the_second_time_on_an_export(workshop: Workshop, exporter: str, provider: str) -> None:
    """Each behind those that run before it; the metadata stay."""
    model: ir.Model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    metadata = dict(model.metadata_props)
    assert metadata
    for step in (*PRESETS[provider], *FINISHING[provider]):
        model = step.apply(model, BERT).model
        assert (step.name, step.apply(model, BERT).num_changes) == (step.name, 0)
        assert (step.name, dict(model.metadata_props)) == (step.name, metadata)
