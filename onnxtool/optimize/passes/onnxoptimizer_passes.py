"""Passes of onnxoptimizer, each on the nodes that it rewrites.

docs/onnxoptimizer.md lists all its passes. Those here are never wrong there, apart from graphs that are not passed to
them.

onnxoptimizer's own form of a graph has no place for metadata, documentation, quantization annotations and types of
sequences. It therefore gets a model of only the nodes to rewrite, with numbers as names and weights as external data
that does not exist. The graph's nodes and values remain the same objects: the result only determines which of them are
left, and with which inputs and attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxtool.graph.edit import (
    attribute,
    drop_unused,
    is_weight,
    only_consumer,
    operands,
    producer,
    reduced_axes,
    remove_unused,
    replace,
    scalar,
    tensor_of,
)
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.weights import LARGE_BYTES
from onnxtool.optimize.onnxoptimizer_child import DeadPassError, run_pass
from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory, refusals

_IR_VERSION = 8  # before 4, every initializer is also an input
# The spacing of numbers, relative to a number.
_SPACING = {ir.DataType.FLOAT: 2.0**-23, ir.DataType.DOUBLE: 2.0**-52, ir.DataType.FLOAT16: 2.0**-10}
# onnxoptimizer does not compute with weights: it writes these operators before the node that reads the result.
_WRITTEN = frozenset(("Add", "Cast", "Constant", "Div", "Mul", "Sqrt", "Squeeze", "Sub", "Tile", "Unsqueeze"))

Forms = Mapping[ir.Node, Sequence[ir.Value | None]]
"""Nodes of a graph, in order, with the inputs that onnxoptimizer sees."""


class InexactError(Exception):
    """A computed weight would lose digits in its dtype, or is not finite."""


def rewrite(name: str, forms: Forms) -> bool:
    """Run the pass `name` of onnxoptimizer on the nodes `forms`, and return whether it changed any.

    Raises:
        DeadPassError: the pass dies, or writes other operators than expected; the graph is unchanged.
        InexactError: a weight cannot be computed exactly; the graph is unchanged.
    """
    graph: Any = next(iter(forms)).graph
    values: dict[str, ir.Value] = {}
    sent = _to_proto(graph, forms, values)
    result = run_pass(name, sent).graph
    left = {proto.name: proto for proto in result.node}
    computed = _compute(result, values, default_opset(graph.opset_imports) or 1)
    removed, changed = [], []
    for node, proto in zip(forms, sent.graph.node, strict=True):
        if proto.name not in left:
            removed.append(node)
        elif _content(left[proto.name]) != _content(proto):
            changed.append((node, left[proto.name], _rounded(node, left[proto.name], computed, values)))
    sources = [value for node in forms for value in node.inputs if value is not None and not value.is_graph_input()]
    for node, proto, constants in changed:
        written = {name: Writer(node).initializer(*constants[name]) for name in constants}
        inputs = [written.get(name, values.get(name)) for name in proto.input]
        _change(node, inputs, [values[output] for output in proto.output], proto)
    remove_unused(graph, removed)
    drop_unused(value for value in sources if value.is_initializer())
    return bool(removed or changed)


def _to_proto(graph: Any, forms: Forms, values: dict[str, ir.Value]) -> onnx.ModelProto:
    """Return `forms` as a model in which node I is `nI` and a value `vI`, which are added to `values`."""
    proto = onnx.GraphProto(name="g")
    names: dict[ir.Value, str] = {}

    def name_of(value: ir.Value | None) -> str:
        return "" if value is None or not value.name else names.setdefault(value, f"v{len(names)}")

    for number, (node, inputs) in enumerate(forms.items()):
        node_proto = proto.node.add(name=f"n{number}", op_type=node.op_type, domain=node.domain)
        node_proto.input.extend(map(name_of, inputs))
        node_proto.output.extend(map(name_of, node.outputs))
        node_proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    for value, name in names.items():
        values[name] = value
        info = ir.to_proto(value)
        info.name = name
        if value.producer() in forms:
            is_read_outside = value.is_graph_output() or any(user not in forms for user, _ in value.uses())
            (proto.output if is_read_outside else proto.value_info).append(info)
        elif value.const_value is None or value.is_graph_input():
            proto.input.append(info)
        else:
            proto.initializer.append(_light(value.const_value, name))
    opsets = [helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    return helper.make_model(proto, opset_imports=opsets, ir_version=_IR_VERSION)


def _light(tensor: ir.TensorProtocol, name: str) -> onnx.TensorProto:
    """Return a tensor as a protobuf; floats, and what is large, are said to lie in a file called `name`."""
    if tensor.nbytes <= LARGE_BYTES and not tensor.dtype.is_floating_point():
        proto: onnx.TensorProto = ir.to_proto(tensor)
        proto.name = name
        return proto
    proto = onnx.TensorProto(name=name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
    proto.data_location = onnx.TensorProto.EXTERNAL
    proto.external_data.add(key="location", value=name)
    return proto


def _content(node: onnx.NodeProto) -> object:
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    return node.op_type, list(node.input), list(node.output), attributes


def _compute(graph: onnx.GraphProto, values: Mapping[str, ir.Value], opset: int) -> dict[str, NDArray[Any]]:
    """Return the constants that a pass stored, and the results of the nodes that it wrote, with floats as float64."""
    nodes = [node for node in graph.node if not node.name]
    if unexpected := {node.op_type for node in nodes} - _WRITTEN:
        raise DeadPassError(f"writes {', '.join(sorted(unexpected))}, which is not expected")
    read_names = {name for node in nodes for name in node.input}
    constants = {}
    for tensor in graph.initializer:
        if tensor.name in read_names or tensor.name not in values:
            is_stored = not tensor.external_data
            source = None if is_stored else tensor_of(values[tensor.external_data[0].value])
            array = numpy_helper.to_array(tensor) if source is None else source.numpy()
            constants[tensor.name] = array.astype(np.float64) if array.dtype.kind == "f" else array
    for node in nodes:
        if node.op_type == "Cast":  # from one float to another
            node.attribute[0].i = onnx.TensorProto.DOUBLE
    names, opsets = [output for node in nodes for output in node.output], [helper.make_opsetid("", opset)]
    function = helper.make_function("", "weights", list(constants), names, nodes, opsets)
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(function).run(None, constants, attributes={})
    return constants | dict(zip(names, results, strict=True))


def _rounded(
    node: ir.Node, rewritten: onnx.NodeProto, computed: Mapping[str, NDArray[Any]], values: Mapping[str, ir.Value]
) -> dict[str, tuple[ir.TensorProtocol, str]]:
    """Return the new constants that a node reads, in the dtype of its weight, with names for them.

    Raises:
        InexactError: a number is off by more than the rounding of the largest one in its channel.
    """
    constants: dict[str, tuple[ir.TensorProtocol, str]] = {}
    largest: Any = 0.0
    for kind, name in zip(("data", "folded", "bias"), rewritten.input, strict=False):
        if name not in computed or name in values:
            continue
        array, weight = computed[name], (*node.inputs, *node.outputs)[1]
        if array.dtype.kind == "f" and weight is not None:
            dtype = tensor_of(weight).dtype
            with np.errstate(over="ignore"):
                array = array.astype(dtype.numpy())
            largest = np.maximum(largest, _channel_maxima(computed[name]))
            lost = _channel_maxima(array - computed[name])
            if dtype not in _SPACING or not (lost <= largest * _SPACING[dtype]).all():
                raise InexactError
        constants[name] = (ir.tensor(array), f"{weight.name if weight else name}_{kind}")
    return constants


def _channel_maxima(array: NDArray[Any]) -> NDArray[Any]:
    maxima: NDArray[Any] = np.abs(array.reshape(len(array), -1)).max(axis=1, initial=0.0)
    return maxima


def _change(
    node: ir.Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], rewritten: onnx.NodeProto
) -> None:
    """Give a node these inputs and the attributes of `rewritten`, and let its outputs replace `outputs`."""
    node.resize_inputs(len(inputs))
    for place, value in enumerate(inputs):
        node.replace_input_with(place, value)
    node.attributes.clear()
    node.attributes.update({entry.name: ir.from_proto(entry) for entry in rewritten.attribute})
    for new, old in zip(node.outputs, outputs, strict=False):
        if new is not old:  # the reader of `new` disappears, and all that is noted about its result stays
            name, new.type, new.shape, new.doc_string = str(old.name), old.type, old.shape, old.doc_string
            for mine, theirs in ((new.metadata_props, old.metadata_props), (new.meta, old.meta)):
                mine.clear()
                mine.update(theirs)
            replace(old, new)
            new.name = name


_DEAD = "onnxtool.dead_passes"  # key under which a model keeps why passes died on it
_SWAP = [1, 0]


def _apply(name: str, match: Callable[[ir.Node], Forms | str], model: ir.Model, _context: Context) -> Outcome:
    """Run the pass `name` on each match; instead of one, `match` may return a reason, or an empty text."""
    dead = model.meta.setdefault(_DEAD, {})
    before, reasons = None, []
    for node in list(model.graph):
        matched = "" if name in dead or node.graph is None or node.domain else match(node)
        if not isinstance(matched, str):
            before = before or inventory(model)
            matched = _rewrite(name, matched, dead)
        reasons.append(matched)
    num_changes = count_changes(before, inventory(model)) if before else 0
    return Outcome(model, num_changes, dead.get(name) or refusals([*filter(None, reasons)]), left_out=name in dead)


def _rewrite(name: str, forms: Forms, dead: dict[str, str]) -> str:
    """Rewrite a match, or return why it is left alone; a pass that dies is added to `dead`."""
    try:
        return "" if rewrite(name, forms) else "onnxoptimizer does not rewrite it"
    except InexactError:
        return "a weight would lose digits, or not be finite"
    except DeadPassError as error:
        dead[name] = f"left out: onnxoptimizer's pass {error}"
        return ""


def _pad_before_conv(conv: ir.Node) -> Forms | str:
    """Match `Conv(Pad(x, pads), W)`, which becomes a Conv with these pads."""
    pad = producer(conv.inputs[0], "Pad") if conv.op_type == "Conv" else None
    if pad is None:
        return ""
    # onnxoptimizer does not read axes, nor the value of each dtype and opset.
    padding = attribute(pad, "value", 0.0) if len(pad.inputs) < 3 or pad.inputs[2] is None else scalar(pad.inputs[2])
    if padding != 0 or any(pad.inputs[3:]):
        return "the padding is not known to be zeros on each axis"
    return {pad: pad.inputs[:2], conv: conv.inputs}


def _bias_after_conv(add: ir.Node) -> Forms | str:
    """Match `Add(Conv(x, W), B)`, which becomes `Conv(x, W, B)`."""
    parts = operands(add, lambda value: producer(value, "Conv") is not None) if add.op_type == "Add" else None
    conv = None if parts is None else parts[0].producer()
    if parts is None or conv is None or not is_weight(parts[1]):
        return ""
    return {conv: conv.inputs, add: parts}  # onnxoptimizer knows the Conv only as the first operand


def _normalization_after_conv(node: ir.Node) -> Forms | str:
    """Match `BatchNormalization(Conv(x, W, b), scale, B, mean, var)`, which becomes a Conv with other weights."""
    conv = producer(node.inputs[0], "Conv") if node.op_type == "BatchNormalization" else None
    if conv is None:
        return ""
    if only_consumer(conv.outputs[0]) is None:
        return "the output of the Conv is read elsewhere"
    if attribute(node, "training_mode", 0) or any(output.name for output in node.outputs[1:]):
        return "the normalization is in training mode"
    if not all(is_weight(value) for value in (*conv.inputs[1:], *node.inputs[1:]) if value is not None):
        return "weights or statistics are not constant"
    return {conv: conv.inputs, node: node.inputs}


def _transposed_operand(gemm: ir.Node) -> Forms | str:
    """Match `Gemm(Transpose(a), Transpose(b))`, which becomes `Gemm<transA=1, transB=1>(a, b)`."""
    moved = [producer(value, "Transpose") for value in gemm.inputs[:2]] if gemm.op_type == "Gemm" else []
    moved = [node if node is None or attribute(node, "perm", _SWAP) == _SWAP else None for node in moved]
    if moved and moved[0] is not None and is_weight(gemm.inputs[1] if moved[1] is None else moved[1].inputs[0]):
        moved[0] = None  # neither int8 nor int4 takes a layer with a transposed input
    transposes = {node: node.inputs for node in moved if node is not None}
    for node in transposes:
        node.attributes["perm"] = ir.AttrInt64s("perm", _SWAP)  # onnxoptimizer fails without
    return {**transposes, gemm: gemm.inputs} if transposes else ""


def _unsqueezed_reduction(node: ir.Node) -> Forms | str:
    """Match `Unsqueeze(ReduceMean<keepdims=0>(x, axes), axes)`, which becomes `ReduceMean<keepdims=1>(x, axes)`."""
    reduction = producer(node.inputs[0]) if node.op_type == "Unsqueeze" else None
    # Without axes, a reduction is over all of them, and Unsqueeze adds none.
    if reduction is None or not reduction.op_type.startswith("Reduce") or not reduced_axes(reduction):
        return ""
    return {reduction: reduction.inputs, node: node.inputs}


_MATCHES: dict[str, Callable[[ir.Node], Forms | str]] = {
    # In this order: padding and biases belong to the Conv that a normalization changes.
    "fuse_pad_into_conv": _pad_before_conv,
    "fuse_add_bias_into_conv": _bias_after_conv,
    "fuse_bn_into_conv": _normalization_after_conv,
    "fuse_transpose_into_gemm": _transposed_operand,
    "fuse_consecutive_reduce_unsqueeze": _unsqueezed_reduction,
}


def onnxoptimizer_pass(name: str) -> Pass:
    """Return a pass of onnxoptimizer; one that is not in the presets gets the whole main graph."""

    def every_node(node: ir.Node) -> Forms | str:
        graph: Any = node.graph
        return {member: member.inputs for member in graph} if node is graph[0] else ""

    return Pass(name, partial(_apply, name, _MATCHES.get(name, every_node)))


ALLOWED = tuple(map(onnxoptimizer_pass, _MATCHES))
