"""Rewritings of a few operators each, and the list of all that are applied before a graph is cut."""

from __future__ import annotations

import torch

from onnxtool.torch_backend.lower.fx_rewrites.cross_entropy_gradient import label_gradient
from onnxtool.torch_backend.lower.fx_rewrites.empty_tensors import empty_result, joined_with_nothing
from onnxtool.torch_backend.lower.fx_rewrites.nan_extremes import extreme_with_nan
from onnxtool.torch_backend.lower.fx_rewrites.rewriter import Node, Rule, call, is_call, tensor_of
from onnxtool.torch_backend.lower.fx_rewrites.row_scaling import row_factor
from onnxtool.torch_backend.lower.fx_rewrites.slices import joined_slices, padded_slice
from onnxtool.torch_backend.partition.views import is_view

aten = torch.ops.aten
_SQUARE_ROOT_OF_TWO = 2**0.5
_SCALINGS = (aten.div.Scalar, aten.mul.Scalar, aten.div.Tensor, aten.mul.Tensor)


def first_power(node: Node) -> Node | None:
    """Replace `x ** 1`, which the gradient of a square has, by x: onnxruntime computes it as any other power."""
    if not is_call(node, aten.pow.Tensor_Scalar) or node.args[1] != 1:
        return None
    return node.all_input_nodes[0]


def small_factor(node: Node) -> Node | None:
    """Replace `expand(x) / c * y` by `x / c * y` where y has the shape of the product, with or without the number c.

    The gradient of a mean has the former.
    """
    if not is_call(node, aten.mul.Tensor) or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return None
    left, right = node.all_input_nodes
    for factor, other in ((left, right), (right, left)):
        scaling = factor if is_call(factor, *_SCALINGS) and isinstance(factor.args[1], int | float) else None
        expanded = factor if scaling is None else scaling.args[0]
        if not is_call(expanded, aten.expand.default) or not _is_static(node) or _shape(other) != _shape(node):
            continue
        small = expanded.args[0]
        if scaling is not None:
            small = call(node, scaling.target, small, scaling.args[1])
        return call(node, aten.mul.Tensor, small, other)
    return None


def fusible_gelu(node: Node) -> Node | None:
    """Replace the exact GELU by `x * (erf(x / sqrt(2)) + 1) * 0.5`, in the order in which onnxruntime fuses it."""
    if not is_call(node, aten.gelu.default) or node.kwargs.get("approximate", "none") != "none":
        return None
    x = node.all_input_nodes[0]
    tensor = tensor_of(x)
    if tensor is None or tensor.dtype is not torch.float32:
        return None
    erf = call(node, aten.erf.default, call(node, aten.div.Tensor, x, _SQUARE_ROOT_OF_TWO))
    return call(node, aten.mul.Tensor, call(node, aten.mul.Tensor, x, call(node, aten.add.Tensor, erf, 1.0)), 0.5)


def idle_detach(node: Node) -> Node | None:
    """Replace `detach(x)` by x within a graph: where what reads it stays in PyTorch, a session would copy x."""
    if not is_call(node, aten.detach.default) or any(user.op == "output" for user in node.users):
        return None
    return node.all_input_nodes[0]


def transposed_product(node: Node) -> Node | None:
    """Replace `transpose(bmm(a, b))`, which the gradient of transposed keys is, by `bmm(transpose(b), transpose(a))`.

    onnxruntime's products read transposed matrices as they are, and write none. The result keeps the layout that it had
    in memory, which is nothing to onnxruntime, where the two transpositions around it vanish.
    """
    if not is_call(node, aten.transpose.int) or not _swaps_last_two(node):
        return None
    product = node.all_input_nodes[0]
    if not is_call(product, aten.bmm.default) or len(product.users) != 1 or _leaves(node):
        return None
    left, right = product.args
    replacement = call(node, aten.bmm.default, _transposed(node, right), _transposed(node, left))
    in_memory = call(node, aten.clone.default, _transposed(node, replacement), memory_format=torch.contiguous_format)
    return _transposed(node, in_memory)


def _leaves(node: Node) -> bool:
    """Whether some output is a view of the node: PyTorch transposes that for nothing."""
    return any(user.op == "output" or (is_view(user) and _leaves(user)) for user in node.users)


def _transposed(before: Node, matrices: Node) -> Node:
    if is_call(matrices, aten.transpose.int) and _swaps_last_two(matrices):
        return matrices.all_input_nodes[0]
    return call(before, aten.transpose.int, matrices, 1, 2)


def _swaps_last_two(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 3 and {dim % 3 for dim in node.args[1:]} == {1, 2}


def _shape(node: Node) -> torch.Size | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.shape


def _is_static(node: Node) -> bool:
    return all(isinstance(size, int) for size in _shape(node) or ())


SHORTCUTS: tuple[Rule, ...] = (
    empty_result,
    joined_with_nothing,
    extreme_with_nan,
    first_power,
    joined_slices,
    padded_slice,
    label_gradient,
    row_factor,
    small_factor,
    fusible_gelu,
    transposed_product,
    idle_detach,
)
