"""Convert weights and arithmetic to float16; inputs and outputs keep their types.

Nodes that overflow stay in float32, and so do operators without a float16 kernel, or with too large an error in it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.graph.edit import attribute, drop_unused, tensor_of
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_LARGEST = 65504.0
# onnxruntime's converter keeps these in float32, and a mask's lowest float32 would become an infinity behind them.
_TAKEN = frozenset({"Max", "Min"})
# It converts these, which take only float32 before opset 19, or always.
_LEFT = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
# Their other outputs, the statistics, are float32 for any input.
_NORMALIZATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
# Attributes that name the dtype of the output.
_DTYPES = ("to", "dtype", "output_datatype")


def to_float16(fallbacks: Collection[str] = ()) -> Pass:
    """Return the pass that converts all nodes except those that compute or read a value named in `fallbacks`."""
    names = frozenset(fallbacks)
    return Pass("float16", lambda model, _context: _apply(model, _context, names))


@dataclass
class _Conversion:
    """A conversion under way.

    Attributes:
        floats: the names of all values that are float32.
        halved: the nodes that compute in float16.
        cast: the values cast so far, by value and wanted dtype.
    """

    model: ir.Model
    floats: frozenset[str]
    halved: set[ir.Node]
    cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)

    def is_half(self, value: ir.Value) -> bool:
        """Whether a float value is computed in float16 after the conversion."""
        node = value.producer()
        return node is not None and node in self.halved


def _apply(model: ir.Model, _context: Context, fallbacks: frozenset[str]) -> Outcome:
    """Replace `y = Op(float x)` by `y = Op(float16 x)`, with a Cast at inputs, outputs and nodes that stay float32."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    matrices = [value for value in model.graph.initializers.values() if _is_float32_matrix(value)]
    if not matrices:
        return Outcome(model, 0, "no weight of two axes or more is float32")
    dtypes = find_shapes(model).dtypes
    floats = frozenset(name for name, dtype in dtypes.items() if dtype == ir.DataType.FLOAT.value)
    angles = _angles(model)
    halved = {node for node in model.graph if node not in angles and _computes_in_half(node, floats, fallbacks)}
    conversion = _Conversion(model, floats, halved)
    outputs = [value for value in model.graph.outputs if value.name in floats and conversion.is_half(value)]
    for node in list(model.graph):
        for index, value in enumerate(node.inputs):
            if value is not None and value.name in floats:
                _connect(node, index, value, conversion)
        if node in halved:
            _retype(node, floats)
    for node in halved:
        _widen_for_branches(node, floats)
    for value in outputs:
        _keep_output(value, model.graph)
    drop_unused(list(model.graph.initializers.values()))
    num_kept = sum(1 for node in model.graph if node not in halved and any(v.name in fallbacks for v in node.outputs))
    note = f"{num_kept} nodes stay in float32, because they would overflow" if num_kept else ""
    return Outcome(model, len(halved), note)


def _is_float32_matrix(value: ir.Value) -> bool:
    """Whether a value is a weight to convert; scalars and vectors may be float32 on purpose."""
    return value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) >= 2


def _angles(model: ir.Model) -> set[ir.Node]:
    """Return the nodes above cosines and sines: a position times a frequency has few correct digits in float16."""
    waiting = [node for node in model.graph if not node.domain and node.op_type in ("Cos", "Sin")]
    found: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(
                above for value in node.inputs if value is not None and (above := value.producer()) is not None
            )
    return found


def _computes_in_half(node: ir.Node, floats: frozenset[str], fallbacks: frozenset[str]) -> bool:
    from onnxruntime.transformers.float16 import ALWAYS_FLOAT_INPUTS, DEFAULT_OP_BLOCK_LIST

    names = [str(value.name) for value in (*node.inputs, *node.outputs) if value is not None]
    if not any(name in floats for name in names) or any(name in fallbacks for name in names):
        return False
    if node.op_type in _NORMALIZATIONS and any(one.uses() or one.is_graph_output() for one in node.outputs[1:]):
        return False
    if (
        node.op_type in ALWAYS_FLOAT_INPUTS
        or node.op_type in _LEFT
        or (node.op_type in DEFAULT_OP_BLOCK_LIST and node.op_type not in _TAKEN)
    ):
        return False
    return not any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in node.attributes.values())


def _connect(node: ir.Node, index: int, value: ir.Value, conversion: _Conversion) -> None:
    """Cast a float input of a node to the precision in which the node computes."""
    wanted = ir.DataType.FLOAT16 if node in conversion.halved else ir.DataType.FLOAT
    given = ir.DataType.FLOAT16 if conversion.is_half(value) else ir.DataType.FLOAT
    if wanted == given:
        return
    key = (value, wanted)
    if key not in conversion.cast:
        if value.is_initializer() and not value.is_graph_input():
            conversion.cast[key] = Writer(node).initializer(_halved(tensor_of(value)), f"{value.name}_float16")
        else:
            cast = Writer(node).node("Cast", [value], {"to": wanted.value})
            cast.type, cast.shape = ir.TensorType(wanted), value.shape
            conversion.cast[key] = cast
    node.replace_input_with(index, conversion.cast[key])


def _widen_for_branches(node: ir.Node, floats: frozenset[str]) -> None:
    """Cast float16 outputs of a node back to float32 for branches and loop bodies, which stay in float32."""
    for value in node.outputs:
        inside = [(reader, index) for reader, index in value.uses() if reader.graph is not node.graph]
        if value.name not in floats or not inside or node.graph is None:
            continue
        cast = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT.value})
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        node.graph.insert_after(node, cast)
        for reader, index in inside:
            reader.replace_input_with(index, cast.outputs[0])


def _halved(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a tensor in float16, computed when it is read; numbers beyond its range become its largest number."""

    def convert() -> ir.TensorProtocol:
        return ir.tensor(np.clip(tensor.numpy(), -_LARGEST, _LARGEST).astype(np.float16))

    return ir.LazyTensor(convert, dtype=ir.DataType.FLOAT16, shape=ir.Shape(tensor.shape.numpy()))


def _retype(node: ir.Node, floats: frozenset[str]) -> None:
    """Set the dtype of the outputs of a node to float16, and the attributes that name it."""
    for output in node.outputs[:1] if node.op_type in _NORMALIZATIONS else node.outputs:
        if output.name in floats:
            output.type = ir.TensorType(ir.DataType.FLOAT16)
    for name in _DTYPES:
        if attribute(node, name) == ir.DataType.FLOAT.value:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT16.value)
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        number = np.zeros(1, np.float16) if fill is None else _halved(fill.as_tensor()).numpy()
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(number))


def _keep_output(value: ir.Value, graph: ir.Graph) -> None:
    """Cast an output of the graph back to float32, under its name."""
    name, value.name = value.name, f"{value.name}_float16"
    output = Writer(graph).op("Cast", value, to=ir.DataType.FLOAT.value)
    output.name, output.dtype, output.shape = name, ir.DataType.FLOAT, value.shape
    for index, known in enumerate(graph.outputs):
        if known is value:
            graph.outputs[index] = output


float16 = to_float16()
