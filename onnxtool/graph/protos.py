"""Pass a model to tools that work on ONNX protobufs, and convert the result back.

Serializing copies every weight, and nothing over 2 GB can be serialized at all. Tools that only look at the structure
get the model without its large weights: these become graph inputs with the same name, type and shape, and are restored
as initializers afterward.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import TensorProto

from onnxtool.model_file.weights import detached_weights, from_proto, to_proto


def to_full_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf with all weights inside; `model` itself is unchanged."""
    proto = to_proto(model)
    for tensor in proto.graph.initializer:
        weight = model.graph.initializers[tensor.name].const_value
        if tensor.data_location == TensorProto.EXTERNAL and weight is not None:
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT
            tensor.raw_data = weight.tobytes()
    return proto


def to_light_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf whose large weights are graph inputs; `model` is unchanged."""
    graph = model.graph
    inputs = list(graph.inputs)
    listed = {value.name for value in inputs}  # IR versions before 4 also list initializers as inputs
    with detached_weights(model) as weights:
        graph.inputs.extend(value for name, value in weights.items() if name not in listed)
        try:
            return to_proto(model)
        finally:
            graph.inputs[:] = inputs


def from_light_proto(proto: onnx.ModelProto, original: ir.Model) -> ir.Model:
    """Convert a tool's result for `to_light_proto(original)` back, restoring the weights of `original`.

    Weights that nodes no longer use are dropped.
    """
    model = from_proto(proto)
    restore_description(model, original)
    with detached_weights(original) as weights:
        tensors = {name: value.const_value for name, value in weights.items()}
    inputs = []
    for value in model.graph.inputs:
        name = str(value.name)
        if name not in tensors:
            inputs.append(value)
        elif value.uses() or value.is_graph_output():
            value.const_value = tensors[name]
            model.graph.initializers[name] = value
    model.graph.inputs[:] = inputs
    return model


def restore_description(model: ir.Model, original: ir.Model) -> None:
    """Restore the metadata and producer of `original`, which tools drop or replace."""
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    model.metadata_props.clear()
    model.metadata_props.update(original.metadata_props)
