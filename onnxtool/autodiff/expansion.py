"""Replace operators that ONNX defines as functions by their function bodies, so that they need no rule."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx.inliner
import onnx_ir as ir


def expand_functions(model: ir.Model, nodes: Collection[ir.Node]) -> bool:
    """Replace those of `nodes` that have a function body by it, and return whether there were any."""
    expanded = [node for node in nodes if _has_body(node, model)]
    for node in expanded:
        _expand(node, model)
    return bool(expanded)


def _has_body(node: ir.Node, model: ir.Model) -> bool:
    try:
        schema = _schema(node, model)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(node: ir.Node, model: ir.Model) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(node.op_type, model.opset_imports.get(node.domain, 1), node.domain)


def _expand(node: ir.Node, model: ir.Model) -> None:
    graph = model.graph
    body = ir.from_proto(_inlined(node, model)).graph
    prefix = f"{node.name or node.outputs[0].name}/"
    known = {value.name: value for value in node.inputs if value is not None}
    taken = set(ir.convenience.create_value_mapping(graph, include_subgraphs=True)) - {
        value.name for value in node.outputs
    }
    inner = [value for one in body for value in one.outputs]
    outputs = {value.name: value for value in inner}
    for value in inner:
        if value.name in taken:
            value.name = f"{prefix}{value.name}"
            while value.name in taken:
                value.name += "_"
    nodes = list(body)
    for one in nodes:
        one.name = f"{prefix}{one.outputs[0].name}"
        for place, value in enumerate(one.inputs):
            if value is not None and value.name in known and value.producer() is None:
                one.replace_input_with(place, known[value.name])
    replacements = [outputs[value.name] for value in node.outputs]
    body.remove(nodes)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, replacements)


def _inlined(node: ir.Node, model: ir.Model) -> onnx.ModelProto:
    """Return the function body of `node` as a model with the inputs and outputs of the node."""
    inputs = dict.fromkeys(value for value in node.inputs if value is not None)
    call = ir.to_proto(node)
    # The inliner uses the attributes of the node, but not the defaults of the schema.
    for name, attribute in _schema(node, model).attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            call.attribute.append(attribute.default_value)
    graph = onnx.helper.make_graph(
        [call],
        "function",
        [ir.to_proto(ir.Value(name=value.name, type=value.type, shape=value.shape)) for value in inputs],
        [ir.to_proto(ir.Value(name=value.name, type=value.type)) for value in node.outputs if value.name],
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    whole = onnx.helper.make_model(graph, opset_imports=opsets)
    return onnx.inliner.inline_selected_functions(whole, [(node.domain, node.op_type)], inline_schema_functions=True)
