"""Tools that need no weights do not get them, and the model keeps them."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtool.model_file.weights import to_full_proto, to_light_proto
from tests.workshop import WORDS, Workshop


def test_a_light_proto_has_the_structure_and_no_large_weight(workshop: Workshop) -> None:
    """A matrix goes in as an input of its shape; shapes and scalars stay readable."""
    model = ir.load(workshop.exported("tiny-encoder"))
    proto = to_light_proto(model)
    assert len(proto.graph.node) == len(model.graph)
    assert proto.ByteSize() < 200_000 < workshop.exported("tiny-encoder").stat().st_size
    table = next(value for value in proto.graph.input if value.name.endswith("word_embeddings.weight"))
    assert [dim.dim_value for dim in table.type.tensor_type.shape.dim] == [WORDS, 32]


def test_the_model_is_as_before_after_it_was_lent(workshop: Workshop) -> None:
    """Inputs, initializers and their order."""
    model = ir.load(workshop.exported("tiny-encoder"))
    inputs, initializers = list(model.graph.inputs), list(model.graph.initializers)
    to_light_proto(model)
    assert list(model.graph.inputs) == inputs
    assert list(model.graph.initializers) == initializers


def test_a_full_proto_of_external_data_holds_the_bytes(workshop: Workshop, tmp_path: Path) -> None:
    """A tool that computes with weights must not look for a file beside nothing."""
    ir.save(ir.load(workshop.exported("tiny-encoder")), tmp_path / "m.onnx", external_data="m.onnx.data")
    proto = to_full_proto(ir.load(tmp_path / "m.onnx"))
    assert all(tensor.data_location == onnx.TensorProto.DEFAULT for tensor in proto.graph.initializer)
    assert proto.ByteSize() > 4 * WORDS * 32
