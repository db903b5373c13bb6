"""Prepare a model for differentiation, and expand operators that have no rule."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.errors import GradientError, first_line
from onnxtool.graph.edit import attribute, constant
from onnxtool.model_file.domains import default_opset, settle_imports

LOWEST_OPSET = 18  # before, ScatterElements has no max reduction, and the axes of ReduceMean are an attribute


def prepare(model: ir.Model) -> None:
    """Inline the functions of `model`, and convert it to opset 18 if it is older, in place.

    Raises:
        GradientError: the model cannot be converted, or a function cannot be inlined.
    """
    from onnxscript.version_converter import convert_version

    for opset_imports in (model.opset_imports, *(one.opset_imports for one in model.functions.values())):
        settle_imports(opset_imports)
    try:
        common.InlinePass()(model)
    except ValueError as error:  # for example, a function with another opset than the graph
        raise GradientError(
            f"a function of the model cannot be inlined: {first_line(error)}",
            "export it again, with functions of the opset of the graph or without them",
        ) from error
    opset = default_opset(model.opset_imports)
    if opset >= LOWEST_OPSET:
        return
    order = list(model.graph.initializers)
    reason = ""
    try:
        convert_version(model, LOWEST_OPSET, fallback=True)
    except (RuntimeError, ValueError) as error:
        reason = f": {first_line(error)}"
    # The conversion moves large initializers after small ones, and buffers of all parameters follow this order.
    initializers = model.graph.initializers
    for name in [name for name in order if name in initializers] + [name for name in initializers if name not in order]:
        model.graph.register_initializer(initializers.pop(name))
    if default_opset(model.opset_imports) < LOWEST_OPSET:
        raise GradientError(
            f"the model is of opset {opset} and cannot be converted to {LOWEST_OPSET}{reason}",
            f"export it again with opset {LOWEST_OPSET} or later",
        )


def check_prepared(model: ir.Model) -> None:
    """Refuse a model that has not been through `prepare`.

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
            f"the model calls local functions: {', '.join(called)}",
            "inline them with onnxtool.autodiff.prepare",
        )


def expand_functions(model: ir.Model, nodes: Collection[ir.Node]) -> bool:
    """Replace each of `nodes` that has a function body with that body; return whether there were any.

    An If with a constant condition is replaced with the branch it takes, including when it computes a shape.
    """
    choices = [node for node in model.graph if node.op_type == "If"] if nodes else []
    expanded = [
        (node, body)
        for node in dict.fromkeys((*nodes, *choices))
        if (body := _branch(node) or _body(node, model)) is not None
    ]
    for node, body in expanded:
        _expand(node, body, model.graph)
    return bool(expanded)


def known_branch(node: ir.Node) -> ir.Graph | None:
    """Return the branch that an If takes; None if this is known only at run time."""
    condition = constant(node.inputs[0]) if node.op_type == "If" and not node.domain else None
    if condition is None:
        return None
    return node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()


def _branch(node: ir.Node) -> ir.Graph | None:
    """Return the branch that an If is known to take, with its output names."""
    branch = known_branch(node)
    if branch is None:
        return None
    copies = [(value, ir.node("Constant", [], {"value": value.const_value})) for value in branch.initializers.values()]
    branch.initializers.clear()
    for value, copy in copies:
        copy.outputs[0].name = value.name
        ir.convenience.replace_all_uses_with(value, copy.outputs[0], replace_graph_outputs=True)
        branch.insert_before(branch[0], copy) if len(branch) else branch.append(copy)
    for value, result in zip(node.outputs, branch.outputs, strict=True):
        copy = ir.node("Identity", [result])
        copy.outputs[0].name = value.name
        branch.append(copy)
    return branch


def _body(node: ir.Node, model: ir.Model) -> ir.Graph | None:
    """Return the function body of `node` as a graph with the node's inputs and outputs; None if it has none."""
    opset = model.opset_imports.get(node.domain, 1)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    call = ir.to_proto(node)
    # Bodies refer to the node's attributes, but not to the schema's defaults.
    for name, declared in schema.attributes.items():
        if name not in node.attributes and declared.default_value.name:
            call.attribute.append(declared.default_value)
    types = [b"" if value is None else _declared(value, shape=True).type.SerializeToString() for value in node.inputs]
    try:
        if schema.has_context_dependent_function:
            version = max(since for since in schema.context_dependent_function_opset_versions if since <= opset)
            text = schema.get_context_dependent_function_with_opset_version(version, call.SerializeToString(), types)
        else:
            version = max((since for since in schema.function_opset_versions if since <= opset), default=0)
            text = schema.get_function_with_opset_version(version) if version else b""
    except RuntimeError:  # the body depends on an unknown type or shape
        return None
    if not text:
        return None
    # As a model function: for its built-in ones, onnx's inliner requires input types, even of omitted inputs.
    function = onnx.FunctionProto.FromString(text)
    function.domain = call.domain = "onnxtool.expanded"
    function.name = call.op_type
    for used in function.opset_import:  # the inliner skips functions with a different opset
        used.version = model.opset_imports.get(used.domain, used.version)
    inputs = [_declared(value, shape=True) for value in dict.fromkeys(node.inputs) if value is not None]
    outputs = [_declared(value, shape=False) for value in node.outputs if value.name]
    opsets = [onnx.helper.make_opsetid(*entry) for entry in {**model.opset_imports, function.domain: 1}.items()]
    graph = onnx.helper.make_graph([call], "function", inputs, outputs)
    whole = onnx.helper.make_model(graph, opset_imports=opsets, functions=[function])
    inlined: ir.Model = ir.from_proto(onnx.inliner.inline_local_functions(whole))
    return inlined.graph


def _declared(value: ir.Value, *, shape: bool) -> onnx.ValueInfoProto:
    copy = ir.Value(name=value.name, type=value.type, shape=value.shape if shape else None)
    proto: onnx.ValueInfoProto = ir.to_proto(copy)
    return proto


def _expand(node: ir.Node, body: ir.Graph, graph: ir.Graph) -> None:
    prefix = f"{node.name or node.outputs[0].name}/"
    known = {value.name: value for value in node.inputs if value is not None}
    replaced = [value for value in node.outputs if value.name]
    taken = set(ir.convenience.create_value_mapping(graph, include_subgraphs=True)) - {value.name for value in replaced}
    nodes, inside = list(body), list(body.all_nodes())
    inner = [value for inner_node in inside for value in inner_node.outputs]
    inner += [value for subgraph in body.subgraphs() for value in subgraph.inputs]
    outputs = {value.name: value for inner_node in nodes for value in inner_node.outputs}
    for value in inner:
        if value.name in taken:
            value.name = f"{prefix}{value.name}"
            while value.name in taken:
                value.name += "_"
    for inner_node in inside:
        inner_node.name = f"{prefix}{inner_node.outputs[0].name}"
        for place, value_read in enumerate(inner_node.inputs):
            if value_read is not None and value_read.name in known and value_read.producer() is None:
                inner_node.replace_input_with(place, known[value_read.name])
    body.outputs.clear()
    body.remove(nodes)
    graph.insert_after(node, nodes)
    for value in replaced:
        new = outputs[value.name]
        new.type, new.shape, value.name = value.type, value.shape, None
        ir.convenience.replace_all_uses_with(value, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def replace_sequences(graph: ir.Graph) -> bool:
    """Replace `SequenceAt(SplitToSequence(x, sizes), i)` with an output of `Split`; return whether there were any.

    The sizes and i must be constant; sequences with other readers are kept.
    """
    replaced = False
    for node in list(graph):
        if node.op_type != "SplitToSequence" or (sizes := _sizes(node)) is None:
            continue
        reads = [(usage.node, _index(usage.node, len(sizes))) for usage in node.outputs[0].uses()]
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
    """Return the index of the piece a node reads; None for other readers, or if the index is not constant."""
    index = constant(node.inputs[1]) if node.op_type == "SequenceAt" else None
    return int(index) % length if index is not None and -length <= int(index) < length else None
