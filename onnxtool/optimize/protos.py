"""Hand a model to tools that work on ONNX protobufs, and take it back.

Serializing copies every weight, and nothing over 2 GB can be serialized at all. A tool that only looks at the
structure gets the model without its large weights: they go in as graph inputs of the same name, type and shape, and
come back as the initializers they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

# Shapes, axes and scalars stay, because tools read them; a weight matrix is larger than this.
_LARGE_BYTES = 1024


def to_full_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf with all weights inside it."""
    import onnx_ir as ir

    return ir.to_proto(ir.external_data.load_to_model(model))


def to_light_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf whose large weights are graph inputs; `model` is unchanged."""
    import onnx_ir as ir

    with _weights_as_inputs(model):
        return ir.to_proto(model)


def from_light_proto(proto: onnx.ModelProto, original: ir.Model) -> ir.Model:
    """Return what a tool made of `to_light_proto(original)`, with the weights of `original` in their place again.

    Weights that no node uses any more are dropped.
    """
    import onnx_ir as ir

    model: ir.Model = ir.from_proto(proto)
    restore_description(model, original)
    weights = _large_weights(original)
    inputs = []
    for value in model.graph.inputs:
        weight = weights.get(str(value.name))
        if weight is None:
            inputs.append(value)
        elif value.uses() or value.is_graph_output():
            value.const_value = weight.const_value
            model.graph.initializers[str(value.name)] = value
    model.graph.inputs[:] = inputs
    return model


def restore_description(model: ir.Model, original: ir.Model) -> None:
    """Give `model` the metadata and producer of `original`, which tools drop or replace."""
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    model.metadata_props.clear()
    model.metadata_props.update(original.metadata_props)


def _large_weights(model: ir.Model) -> dict[str, ir.Value]:
    return {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _LARGE_BYTES
    }


@contextmanager
def _weights_as_inputs(model: ir.Model) -> Iterator[None]:
    graph = model.graph
    inputs, initializers = list(graph.inputs), dict(graph.initializers)
    listed = {value.name for value in inputs}  # IR versions before 4 list initializers as inputs as well
    large = _large_weights(model)
    try:
        for name in large:
            graph.initializers.pop(name)
        graph.inputs.extend(value for name, value in large.items() if name not in listed)
        yield
    finally:
        graph.inputs[:] = inputs
        graph.initializers.clear()
        graph.initializers.update(initializers)
