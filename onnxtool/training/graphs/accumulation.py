"""Add each gradient to its buffer, or overwrite the buffer if `lazy_reset_grad` is true.

There is one If per parameter: of a Where, onnxruntime would compute both sides. If a Gemm is the last step of a
gradient, it is inside the If: it writes directly into the buffer, or adds to it, without a copy of the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import onnx_ir as ir

from onnxtool.autodiff.flow import reads
from onnxtool.training.graphs.names import LAZY_RESET, accumulated_name, buffer_name, gradient_name

# Inputs and attributes of a Gemm.
_Gemm: TypeAlias = "tuple[list[ir.Value | None], dict[str, int | float]]"
_SUFFIX = "/accumulate"


def accumulate(graph: ir.Graph, gradients: Mapping[str, ir.Value]) -> None:
    """Add buffers and `lazy_reset_grad` to the inputs, and the new content of the buffers to the outputs.

    Args:
        graph: the training graph, with the parameters among its inputs.
        gradients: the gradient of each trained parameter.
    """
    parameters = [value for value in graph.inputs if value.name in gradients]
    reset = ir.val(LAZY_RESET, ir.DataType.BOOL, [1])
    counts = Counter(gradients.values())
    for parameter in parameters:
        name = str(parameter.name)
        buffer = ir.val(buffer_name(name), parameter.dtype, parameter.shape)
        gemm = _as_gemm(gradients[name]) if counts[gradients[name]] == 1 else None
        node = _accumulation(reset, buffer, gemm or gradients[name], name)
        result = node.outputs[0]
        result.name, result.shape, result.type = accumulated_name(name), parameter.shape, parameter.type
        graph.append(node)
        graph.inputs.append(buffer)
        graph.outputs.append(result)
    graph.inputs.append(reset)


def order_accumulations(graph: ir.Graph) -> None:
    """Move the accumulations to the end of a sorted graph, the one whose gradient is ready last first.

    onnxruntime first runs what the last node needs, then what the node before it needs in addition, and so on. So each
    gradient is finished as early as possible, and the memory that only it needs is freed; otherwise the gradients of
    all activations would come first, and all of them would be in memory at once.
    """
    positions: dict[ir.Node | None, int] = {node: position for position, node in enumerate(graph)}
    names = {value.name for value in graph.outputs}
    nodes = [node for node in graph if node.op_type == "If" and node.outputs[0].name in names]
    nodes = [node for node in nodes if str(node.name).endswith(_SUFFIX)]
    for node in sorted(nodes, key=lambda node: -max(positions.get(producer, 0) for producer in _producers(node))):
        graph.remove(node)
        graph.append(node)


def _accumulation(reset: ir.Value, buffer: ir.Value, gradient: ir.Value | _Gemm, name: str) -> ir.Node:
    """Return the node that computes the new content of a buffer."""
    if isinstance(gradient, ir.Value):
        replaced, added = ir.node("Identity", [gradient]), ir.node("Add", [buffer, gradient])
    else:
        factors, attributes = gradient
        replaced, added = ir.node("Gemm", factors, attributes), ir.node("Gemm", [*factors, buffer], attributes)
    branches = {
        "then_branch": _branch("replace", replaced, buffer, name),
        "else_branch": _branch("add", added, buffer, name),
    }
    return ir.node("If", [reset], branches, name=f"{gradient_name(name)}{_SUFFIX}")


def _as_gemm(gradient: ir.Value) -> _Gemm | None:
    """Return inputs and attributes of a Gemm that computes the gradient; None without one, or if others read it."""
    node = gradient.producer()
    is_swapped = node is not None and node.op_type == "Transpose" and _is_read_once(gradient)
    if node is not None and is_swapped and node.inputs[0] is not None:
        gradient = node.inputs[0]
        node = gradient.producer()
    if node is None or node.op_type != "Gemm" or len(node.inputs) != 2 or not _is_read_once(gradient):
        return None
    first, second = (node.attributes.get_int(name, 0) or 0 for name in ("transA", "transB"))
    alpha = node.attributes.get_float("alpha", 1.0) or 0.0
    if is_swapped:  # (a^T b)^T is b^T a
        return [*node.inputs[::-1]], {"transA": 1 - second, "transB": 1 - first, "alpha": alpha}
    return [*node.inputs], {"transA": first, "transB": second, "alpha": alpha}


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) <= 1 and not value.is_graph_output()


def _branch(kind: str, node: ir.Node, buffer: ir.Value, name: str) -> ir.Graph:
    """Return a graph of one node, with an output of the buffer's type and shape."""
    result = node.outputs[0]
    node.name = result.name = f"{gradient_name(name)}/{kind}"
    result.shape, result.type = buffer.shape, buffer.type
    return ir.Graph([], [result], nodes=[node], name=f"{gradient_name(name)}/{kind}")


def _producers(node: ir.Node) -> list[ir.Node | None]:
    """Return the producers of all values that a node reads."""
    return [value.producer() for value in reads(node) if value is not None]
