"""Compute constant subgraphs, and remove nodes that do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import attribute, bypass, constant, drop_unused, replace_by_constant
from onnxtool.graph.elements import BROADCASTING, CONSTANT_DTYPES, Numbers, evaluate, stays_small
from onnxtool.graph.shapes import fill_types
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals

_LARGEST_RESULT = 1 << 16
_FIRST_OPSET_OF_INFERENCE = 7  # of Dropout
# Dtypes with native NumPy arithmetic.
_COMPUTED_DTYPES = frozenset(
    (
        *("BOOL", "DOUBLE", "FLOAT", "FLOAT16", "INT8", "INT16", "INT32", "INT64"),
        *("UINT8", "UINT16", "UINT32", "UINT64"),
    )
)

# These return at most as many elements as they receive; BROADCASTING operators broadcast. Left out: random operators,
# those with graphs inside, DequantizeLinear, whose result is larger than its input, and Transpose, which would store a
# shared weight twice.
_NOT_GROWING = frozenset(
    (
        *("Abs", "Cast", "Ceil", "Concat", "Cos", "Exp", "Floor", "Log", "Neg", "Not", "Reciprocal", "ReduceMax"),
        *("ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Sign", "Sin", "Size", "Slice", "Sqrt"),
        *("Squeeze", "Unsqueeze"),
    )
)
_OTHERS = frozenset(("ConstantOfShape", "Gather", "Range"))
_FOLDED = BROADCASTING | _NOT_GROWING | _OTHERS


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Constant()`, and `Add(1, 2)` of small constants, by initializers.

    `Identity`, `Cast` to the same dtype and inference-mode `Dropout` are dropped. Results have at most 65536 elements.
    Graphs inside nodes stay as they are.
    """
    fill_types(model)
    opset = default_opset(model.opset_imports) or 1
    num_changes, reasons = 0, []
    for node in list(model.graph):
        if node.domain or len(node.outputs) != 1:
            continue
        if node.op_type == "Identity" or _is_cast_to_same(node) or _drops_nothing(node, opset):
            is_replaced = bypass(node, node.inputs[0])
        elif node.op_type == "Constant":
            is_replaced = _store(node, _constant_tensor(node))
        elif node.op_type in _FOLDED and (arrays := _constants(node)) is not None:
            single, feeds = _single(node, arrays)
            if not stays_small(single, feeds, _LARGEST_RESULT):
                reasons.append(f"more than {_LARGEST_RESULT} elements")
                continue
            is_replaced = _store(node, _evaluate(single, feeds, opset))
        else:
            continue
        num_changes += is_replaced
    return Outcome(model, num_changes, refusals(reasons))


def _is_cast_to_same(node: ir.Node) -> bool:
    value = node.inputs[0] if node.op_type in ("Cast", "CastLike") else None
    if value is None or value.dtype is None:
        return False
    like = node.inputs[-1]
    wanted = attribute(node, "to") if node.op_type == "Cast" else None if like is None else like.dtype
    return bool(wanted == value.dtype)


def _drops_nothing(node: ir.Node, opset: int) -> bool:
    """Whether a node is an inference-mode Dropout; before opset 7, runtimes disagree on its mode."""
    if node.op_type != "Dropout" or opset < _FIRST_OPSET_OF_INFERENCE:
        return False
    training = node.inputs[2] if len(node.inputs) > 2 else None
    array = constant(training)
    return training is None or (array is not None and not array.any())


def _store(node: ir.Node, tensor: ir.TensorProtocol | None) -> bool:
    """Replace a node by an initializer of the same name; False if that is not possible."""
    output, graph = node.outputs[0], node.graph
    if tensor is None or output.is_graph_output() or not isinstance(graph, ir.Graph) or output.name is None:
        return False
    sources = [value for value in node.inputs if value is not None]
    replace_by_constant(output, tensor, graph)
    graph.remove(node, safe=True)
    drop_unused(source for source in sources if source.is_initializer())
    return True


def _constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node; None for text and sparse tensors, which not every initializer can hold."""
    for name, dtype in CONSTANT_DTYPES.items():
        if name in node.attributes:
            return ir.tensor(np.array(attribute(node, name), dtype))
    held = node.attributes.get("value")
    tensor = None if held is None else held.as_tensor()
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor


def _constants(node: ir.Node) -> list[NDArray[Any] | None] | None:
    """Return the input arrays if all are small constants, with None for absent inputs."""
    tensors = []
    for value in node.inputs:
        tensor = None if value is None or value.is_graph_input() else value.const_value
        if value is not None and (tensor is None or tensor.size > _LARGEST_RESULT):
            return None
        if tensor is not None and tensor.dtype.name not in _COMPUTED_DTYPES:
            return None
        tensors.append(tensor)
    return [None if tensor is None else tensor.numpy() for tensor in tensors] if tensors else None


def _single(node: ir.Node, arrays: Sequence[NDArray[Any] | None]) -> tuple[onnx.NodeProto, Numbers]:
    """Return a node as a protobuf, and its inputs by their names there."""
    names = ["" if array is None else f"input_{number}" for number, array in enumerate(arrays)]
    single = onnx.helper.make_node(node.op_type, names, ["output"])
    single.attribute.extend(ir.to_proto(held) for held in node.attributes.values())
    return single, {name: array for name, array in zip(names, arrays, strict=True) if array is not None}


def _evaluate(node: onnx.NodeProto, feeds: Numbers, opset: int) -> ir.TensorProtocol | None:
    """Compute a node with ONNX's reference implementation; None if runtimes disagree on its result."""
    integers = [array for array in feeds.values() if array.dtype.kind in "iu"]
    if node.op_type in ("Div", "Mod") and any((array <= 0).any() for array in integers):
        return None  # rounding of negative quotients differs, and division by zero is undefined
    with np.errstate(all="ignore"):
        result = evaluate(node, feeds, opset)
    return ir.tensor(np.array(result, order="C"))


fold_constants = Pass("fold_constants", _apply)
