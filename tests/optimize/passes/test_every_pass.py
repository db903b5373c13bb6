"""What holds for every pass: a row of the table is in the test file of its pass."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context
from onnxtool.optimize.presets import FINISHING, PRESETS
from tests.optimize.passes import (
    test_attention,
    test_bias_gelu,
    test_blocked_maximum,
    test_common_subexpressions,
    test_convert_opset,
    test_deduplicate_initializers,
    test_einsum_products,
    test_embed_layer_normalization,
    test_fold_constants,
    test_gelu,
    test_input_sizes,
    test_layer_normalization,
    test_matmul_add,
    test_neutral_operators,
    test_onnxruntime_fusions,
    test_repeated_heads,
    test_rms_normalization,
    test_rotary_embedding,
    test_skip_layer_normalization,
    test_softmax_maximum,
    test_sums,
    test_tied_transposes,
    test_token_maximum,
    test_transposed_weights,
)
from tests.optimize.passes.builders import assert_left_alone, assert_same_numbers, assert_twice_is_once, build
from tests.optimize.passes.properties import Row
from tests.optimize.quantization import (
    test_int4_embeddings,
    test_int4_linear_layers,
    test_int8_embeddings,
    test_int8_linear_layers,
    test_static,
)
from tests.workshop import Workshop

ROWS: dict[str, Row] = {
    "attention": test_attention.ROW,
    "bias_gelu": test_bias_gelu.ROW,
    "blocked_maximum": test_blocked_maximum.ROW,
    "common_subexpressions": test_common_subexpressions.ROW,
    "convert_opset": test_convert_opset.ROW,
    "deduplicate_initializers": test_deduplicate_initializers.ROW,
    "einsum_products": test_einsum_products.ROW,
    "embed_layer_normalization": test_embed_layer_normalization.ROW,
    "fold_constants": test_fold_constants.ROW,
    "gelu": test_gelu.ROW,
    "input_sizes": test_input_sizes.ROW,
    "layer_normalization": test_layer_normalization.ROW,
    "matmul_add": test_matmul_add.ROW,
    "neutral_operators": test_neutral_operators.ROW,
    "onnxruntime_fusions": test_onnxruntime_fusions.ROW,
    "repeated_heads": test_repeated_heads.ROW,
    "rms_normalization": test_rms_normalization.ROW,
    "rotary_embedding": test_rotary_embedding.ROW,
    "skip_layer_normalization": test_skip_layer_normalization.ROW,
    "softmax_maximum": test_softmax_maximum.ROW,
    "sums": test_sums.ROW,
    "tied_transposes": test_tied_transposes.ROW,
    "token_maximum": test_token_maximum.ROW,
    "transposed_weights": test_transposed_weights.ROW,
    "int4_embeddings": test_int4_embeddings.ROW,
    "int4_linear_layers": test_int4_linear_layers.ROW,
    "int8_embeddings": test_int8_embeddings.ROW,
    "int8_linear_layers": test_int8_linear_layers.ROW,
    "int8_linear_layers, static": test_static.ROW,
}
GRAPHS = [(name, graph) for name, row in ROWS.items() for graph in row.graphs]
BERT = Context("bert", num_heads=4, hidden_size=32)


def test_every_pass_has_a_row() -> None:
    """A new pass of a preset fails this test until it has one."""
    passes = {step.name for steps in (*PRESETS.values(), *FINISHING.values()) for step in steps}
    assert passes <= {row.step.name for row in ROWS.values()}


@pytest.mark.parametrize(("name", "graph"), [pair for pair in GRAPHS if ROWS[pair[0]].atol is not None])
def test_a_pass_keeps_the_numbers(name: str, graph: str) -> None:
    """Before and after, in onnxruntime; with the names and dtypes of the outputs, and the metadata."""
    row = ROWS[name]
    assert_same_numbers(row.step, row.graphs[graph](), row.feeds, row.atol or 0)


@pytest.mark.parametrize(("name", "graph"), GRAPHS)
def test_a_pass_does_nothing_the_second_time(name: str, graph: str) -> None:
    """To the byte."""
    assert_twice_is_once(ROWS[name].step, ROWS[name].graphs[graph]())


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
