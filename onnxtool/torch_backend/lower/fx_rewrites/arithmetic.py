"""Rewrites of one operator and its neighbours."""

from __future__ import annotations

import torch

from onnxtool.torch_backend.nodes import Node, call, is_call, is_static, is_view, shape_of, tensor_of

aten = torch.ops.aten
_SQUARE_ROOT_OF_TWO = 2**0.5
_SCALINGS = (aten.div.Scalar, aten.mul.Scalar, aten.div.Tensor, aten.mul.Tensor)


def first_power(node: Node) -> Node | None:
    """Replace `x ** 1`, which the gradient of a square has, by x: onnxruntime computes it as any other power."""
    return node.all_input_nodes[0] if node.args[1] == 1 else None


def scale_before_expand(node: Node) -> Node | None:
    """Replace `expand(x) / c * y` by `x / c * y` where y has the shape of the product, with or without the number c.

    The gradient of a mean has the former.
    """
    if len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return None
    left, right = node.all_input_nodes
    for factor, other in ((left, right), (right, left)):
        scaling = factor if is_call(factor, *_SCALINGS) and isinstance(factor.args[1], int | float) else None
        expanded = factor if scaling is None else scaling.args[0]
        if not is_call(expanded, aten.expand.default) or not is_static(tensor_of(node)):
            continue
        if shape_of(other) != shape_of(node):
            continue
        small = expanded.args[0]
        if scaling is not None:
            small = call(node, scaling.target, small, scaling.args[1])
        return call(node, aten.mul.Tensor, small, other)
    return None


def fusible_gelu(node: Node) -> Node | None:
    """Replace the exact GELU by `x * (erf(x / sqrt(2)) + 1) * 0.5`, in the order in which onnxruntime fuses it."""
    x = node.all_input_nodes[0]
    tensor = tensor_of(x)
    if node.kwargs.get("approximate", "none") != "none" or tensor is None or tensor.dtype is not torch.float32:
        return None
    erf = call(node, aten.erf.default, call(node, aten.div.Tensor, x, _SQUARE_ROOT_OF_TWO))
    return call(node, aten.mul.Tensor, call(node, aten.mul.Tensor, x, call(node, aten.add.Tensor, erf, 1.0)), 0.5)


def redundant_detach(node: Node) -> Node | None:
    """Replace `detach(x)` by x within a graph: where what reads it stays in PyTorch, a session would copy x."""
    return None if any(user.op == "output" for user in node.users) else node.all_input_nodes[0]


def transposed_product(node: Node) -> Node | None:
    """Replace `transpose(bmm(a, b))`, the gradient of transposed keys, by `bmm(transpose(b), transpose(a))`.

    onnxruntime's matmuls read transposed matrices as they are, and write none. The result keeps its layout in memory:
    that costs nothing in onnxruntime, where the two transpositions around it vanish.
    """
    if not _swaps_last_two(node):
        return None
    product = node.all_input_nodes[0]
    if not is_call(product, aten.bmm.default) or len(product.users) != 1 or _is_output(node):
        return None
    left, right = product.args
    replacement = call(node, aten.bmm.default, _transposed(node, right), _transposed(node, left))
    in_memory = call(node, aten.clone.default, _transposed(node, replacement), memory_format=torch.contiguous_format)
    return _transposed(node, in_memory)


def _is_output(node: Node) -> bool:
    """Whether some output is the node or a view of it: PyTorch transposes that at no cost."""
    return any(user.op == "output" or (is_view(user) and _is_output(user)) for user in node.users)


def _transposed(before: Node, matrices: Node) -> Node:
    if is_call(matrices, aten.transpose.int) and _swaps_last_two(matrices):
        return matrices.all_input_nodes[0]
    return call(before, aten.transpose.int, matrices, 1, 2)


def _swaps_last_two(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 3 and {dim % 3 for dim in node.args[1:]} == {1, 2}
