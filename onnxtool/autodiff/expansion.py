"""Prepare a model for differentiation, and replace operators that have no rule by what they consist of."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.errors import GradientError
from onnxtool.graph.edit import attribute, constant
from onnxtool.model_file.domains import default_opset, settle_imports
from onnxtool.options import checked

LOWEST_OPSET = 18  # before, ScatterElements has no reduction max, and the axes of ReduceMean are an attribute


@checked
def prepare(model: ir.Model) -> None:
    """Inline the functions of `model`, and convert it to opset 18 if it is older; it is changed in place.

    Raises:
        GradientError: it cannot be converted, or a function cannot be inlined.
    """
    from onnxscript.version_converter import convert_version

    for opset_imports in (model.opset_imports, *(one.opset_imports for one in model.functions.values())):
        settle_imports(opset_imports)
    try:
        common.InlinePass()(model)
    except ValueError as error:  # such as a function of another opset than the graph
        raise GradientError(
            f"a function of the model cannot be inlined: {(str(error).splitlines() or [''])[0]}",
            "export it again, with functions of the opset of the graph or without them",
        ) from error
    opset = default_opset(model.opset_imports)
    if opset >= LOWEST_OPSET:
        return
    order = list(model.graph.initializers)
    convert_version(model, LOWEST_OPSET, fallback=True)
    # The conversion moves large ones behind small ones, and buffers of all parameters are in this order.
    initializers = model.graph.initializers
    for name in [name for name in order if name in initializers] + [name for name in initializers if name not in order]:
        model.graph.register_initializer(initializers.pop(name))
    if default_opset(model.opset_imports) < LOWEST_OPSET:
        raise GradientError(
            f"the model is of opset {opset} and cannot be converted to {LOWEST_OPSET}",
            f"export it again with opset {LOWEST_OPSET} or later",
        )


def check_prepared(model: ir.Model) -> None:
    """Refuse a model that needs `prepare` first.

    Raises:
        GradientError: the opset is too old, or nodes call functions of the model.
    """
    if default_opset(model.opset_imports) < LOWEST_OPSET:
        raise GradientError(
            f"the model is of opset {default_opset(model.opset_imports)}, and gradients need {LOWEST_OPSET}",
            "convert it with onnxtool.autodiff.prepare",
        )
    called = sorted({node.op_type for node in model.graph if node.op_identifier() in model.functions})
    if called:
        raise GradientError(
            f"the model calls functions of its own: {', '.join(called)}",
            "inline them with onnxtool.autodiff.prepare",
        )


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
    for name, declared in _schema(node, model).attributes.items():
        if name not in node.attributes and declared.default_value.name:
            call.attribute.append(declared.default_value)
    graph = onnx.helper.make_graph(
        [call],
        "function",
        [ir.to_proto(ir.Value(name=value.name, type=value.type, shape=value.shape)) for value in inputs],
        [ir.to_proto(ir.Value(name=value.name, type=value.type)) for value in node.outputs if value.name],
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    whole = onnx.helper.make_model(graph, opset_imports=opsets)
    return onnx.inliner.inline_selected_functions(whole, [(node.domain, node.op_type)], inline_schema_functions=True)


def replace_sequences(graph: ir.Graph) -> bool:
    """Replace `SequenceAt(SplitToSequence(x, sizes), i)` by an output of `Split`, and return whether there were any.

    The sizes and i must be constants; sequences with other readers are kept.
    """
    replaced = False
    for node in list(graph):
        if node.op_type != "SplitToSequence" or (sizes := _sizes(node)) is None:
            continue
        reads = [(use.node, _index(use.node, len(sizes))) for use in node.outputs[0].uses()]
        if node.outputs[0].is_graph_output() or any(place is None for _, place in reads):
            continue
        lengths = ir.node("Constant", [], {"value": ir.tensor(sizes)})
        inputs, attributes = [node.inputs[0], lengths.outputs[0]], {"axis": attribute(node, "axis", 0)}
        split = ir.node("Split", inputs, attributes, num_outputs=len(sizes), name=node.name)
        lengths.outputs[0].name = f"{node.outputs[0].name}/sizes"
        for number, value in enumerate(split.outputs):
            value.name = f"{node.outputs[0].name}/{number}"
        graph.insert_before(node, [lengths, split])
        for reader, place in reads:
            value = split.outputs[place or 0]
            value.type, value.shape = reader.outputs[0].type, reader.outputs[0].shape
            ir.convenience.replace_all_uses_with(reader.outputs[0], value, replace_graph_outputs=True)
            graph.remove(reader, safe=True)
        graph.remove(node, safe=True)
        replaced = True
    return replaced


def _sizes(node: ir.Node) -> list[int] | None:
    """Return the sizes of the pieces; None if they are not fixed, or the axis is removed."""
    x, lengths = node.inputs[0], constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if lengths is None or x is None:
        return None
    if lengths.ndim:
        return [int(length) for length in lengths]
    whole = None if x.shape is None else x.shape[attribute(node, "axis", 0)]
    piece = int(lengths)
    if not isinstance(whole, int) or piece < 1:
        return None
    return [min(piece, whole - start) for start in range(0, whole, piece)]


def _index(node: ir.Node, length: int) -> int | None:
    """Return the index of the piece that a node reads; None for other readers, or if it is not constant."""
    index = constant(node.inputs[1]) if node.op_type == "SequenceAt" else None
    return int(index) % length if index is not None and -length <= int(index) < length else None
