"""The gradient of the cross entropy of one label a row, by the scores.

Letters of shapes: M rows, V classes.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtool.torch_backend.nodes import Node, call, is_call, is_static, shape_of, tensor_of

aten = torch.ops.aten


def label_gradient(node: Node) -> Node | None:
    """Replace `g - exp(x) * sum(g)` by `(exp(x) - onehot) * -c * row` where g is `c * onehot * row`.

    That is the gradient of the negative log likelihood, followed by that of the log-softmax x: [M, V]. The weight of
    each row is row: [M, 1], or one number. The zeros of g, [M, V], are neither made nor added up.
    """
    if node.kwargs or len(node.all_input_nodes) != 2:
        return None
    gradient, product = node.all_input_nodes
    found = _read_gradient(gradient)
    if found is None or not is_call(product, aten.mul.Tensor) or len(product.all_input_nodes) != 2:
        return None
    scatter, row = found
    exponent, total = product.all_input_nodes
    dim = scatter.args[1]
    if not is_call(exponent, aten.exp.default) or not is_call(total, aten.sum.dim_IntList):
        return None
    if total.kwargs or len(total.args) != 3 or total.args[0] is not gradient or not total.args[2]:
        return None
    if list(total.args[1]) != [dim] or shape_of(exponent) != shape_of(node):
        return None
    index, value = scatter.args[2], scatter.args[3]
    # The sizes of the index may be symbols: those of the scores, which are numbers, are the same.
    sizes = [1 if axis == dim else size for axis, size in enumerate(shape_of(scatter) or ())]
    source = call(node, aten.new_full.default, exponent, sizes, -1.0)
    difference = call(node, aten.scatter_add.default, exponent, dim, index, source)
    factor = row if value == -1 else call(node, aten.mul.Tensor, row, -value)
    return call(node, aten.mul.Tensor, difference, factor)


def _read_gradient(node: Node) -> tuple[Node, Node] | None:
    """Return the scatter of one value a row into zeros, and the factor of each row, whose product the node is."""
    if not is_call(node, aten.mul.Tensor) or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return None
    scatter, row = node.all_input_nodes
    if not is_call(scatter, aten.scatter.value) or not is_call(scatter.args[0], aten.zeros_like.default):
        return None
    _, dim, index, value = scatter.args
    indices, factors, zeros = tensor_of(index), tensor_of(row), tensor_of(scatter)
    if scatter.kwargs or indices is None or factors is None or zeros is None or not isinstance(value, int | float):
        return None
    if (
        not isinstance(dim, int)
        or not is_static(zeros)
        or zeros.dtype is not torch.float32
        or factors.dtype is not torch.float32
    ):
        return None
    one_a_row = [size if axis != dim else 1 for axis, size in enumerate(zeros.shape)]
    if not _same(indices.shape, one_a_row) or (factors.dim() and not _same(factors.shape, one_a_row)):
        return None
    return scatter, row


def _same(shape: torch.Size, sizes: list[int]) -> bool:
    """Whether a shape, symbols included, is this one at every call."""
    return len(shape) == len(sizes) and all(
        statically_known_true(first == second) for first, second in zip(shape, sizes, strict=True)
    )
