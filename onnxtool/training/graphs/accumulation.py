"""Add each gradient to its buffer, or put it there alone where `lazy_reset_grad` is true.

One If a parameter chooses: of Where, onnxruntime would compute both sides. Where a product of matrices is the last step
of a gradient, it is inside: it writes straight into the buffer, or adds to it, and no copy of the gradient is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from onnxtool.training.graphs.names import LAZY_RESET, accumulated_name, buffer_name, gradient_name

if TYPE_CHECKING:
    import onnx_ir as ir

# Inputs and attributes of a Gemm.
_Product: TypeAlias = "tuple[list[ir.Value | None], dict[str, int | float]]"
_ENDING = "/accumulate"


def accumulate(graph: ir.Graph, gradients: Mapping[str, ir.Value]) -> None:
    """Add buffers and `lazy_reset_grad` to the inputs, and the new content of the buffers to the outputs.

    Args:
        graph: whose inputs hold the parameters.
        gradients: of each parameter that is trained.
    """
    import onnx_ir as ir

    parameters = [value for value in graph.inputs if value.name in gradients]
    reset = ir.val(LAZY_RESET, ir.DataType.BOOL, [1])
    times = Counter(gradients.values())
    for parameter in parameters:
        name = str(parameter.name)
        buffer = ir.val(buffer_name(name), parameter.dtype, parameter.shape)
        product = _product(gradients[name]) if times[gradients[name]] == 1 else None
        chosen = _choose(reset, buffer, product or gradients[name], name)
        result = chosen.outputs[0]
        result.name, result.shape, result.type = accumulated_name(name), parameter.shape, parameter.type
        graph.append(chosen)
        graph.inputs.append(buffer)
        graph.outputs.append(result)
    graph.inputs.append(reset)


def order_accumulations(graph: ir.Graph) -> None:
    """Put the choices to the end of a sorted graph, that of the gradient which is there last first.

    onnxruntime runs first what the last node needs, then what the node before it needs besides, and so on. So each
    gradient is done as soon as it can be, and what only it needs is freed; otherwise the gradients of all activations
    would come first, and all of them would be there at once.
    """
    places: dict[ir.Node | None, int] = {node: place for place, node in enumerate(graph)}
    names = {value.name for value in graph.outputs}
    choices = [node for node in graph if node.op_type == "If" and node.outputs[0].name in names]
    choices = [node for node in choices if str(node.name).endswith(_ENDING)]
    for node in sorted(choices, key=lambda node: -max(places.get(maker, 0) for maker in _makers(node))):
        graph.remove(node)
        graph.append(node)


def _choose(reset: ir.Value, buffer: ir.Value, gradient: ir.Value | _Product, name: str) -> ir.Node:
    """Return the node that gives the new content of a buffer."""
    import onnx_ir as ir

    if isinstance(gradient, ir.Value):
        replaced, added = ir.node("Identity", [gradient]), ir.node("Add", [buffer, gradient])
    else:
        factors, attributes = gradient
        replaced, added = ir.node("Gemm", factors, attributes), ir.node("Gemm", [*factors, buffer], attributes)
    branches = {
        "then_branch": _branch("replace", replaced, buffer, name),
        "else_branch": _branch("add", added, buffer, name),
    }
    return ir.node("If", [reset], branches, name=f"{gradient_name(name)}{_ENDING}")


def _product(gradient: ir.Value) -> _Product | None:
    """Return inputs and attributes of a Gemm that gives the gradient; None where it is none, or others read it."""
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
    """Return a graph of one node, whose output is like the buffer."""
    import onnx_ir as ir

    result = node.outputs[0]
    node.name = result.name = f"{gradient_name(name)}/{kind}"
    result.shape, result.type = buffer.shape, buffer.type
    return ir.Graph([], [result], nodes=[node], name=f"{gradient_name(name)}/{kind}")


def _makers(node: ir.Node) -> list[ir.Node | None]:
    """Return the nodes that make what a choice reads."""
    from onnxtool.autodiff.flow import reads

    return [value.producer() for value in reads(node) if value is not None]
