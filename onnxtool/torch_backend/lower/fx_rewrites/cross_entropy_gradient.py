"""The gradient of the logarithm of a softmax at one label a row.

Letters of shapes: M rows, V classes.
"""

from __future__ import annotations

import torch

from onnxtool.torch_backend.lower.fx_rewrites.rewriter import Node, call, is_call, tensor_of

aten = torch.ops.aten


def label_gradient(node: Node) -> Node | None:
    """Replace `g - exp(x) * sum(g)` by `(exp(x) - onehot) * -c * row` where g is `c * onehot * row`.

    That is the gradient of the negative log likelihood, behind that of the logarithm of the softmax x: [M, V]; row:
    [M, 1], or one number, is what each row counts. The zeros of g, [M, V], are not made, nor added up.
    """
    if not is_call(node, aten.sub.Tensor) or node.kwargs or len(node.all_input_nodes) != 2:
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
    if list(total.args[1]) != [dim] or _shape(exponent) != _shape(node):
        return None
    index, value = scatter.args[2], scatter.args[3]
    source = call(node, aten.new_full.default, exponent, list(_shape(index) or ()), -1.0)
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
    if not isinstance(dim, int) or zeros.dtype is not torch.float32 or factors.dtype is not torch.float32:
        return None
    if not all(isinstance(size, int) for size in zeros.shape):
        return None
    one_a_row = [size if axis != dim else 1 for axis, size in enumerate(zeros.shape)]
    if list(indices.shape) != one_a_row or (factors.dim() and list(factors.shape) != one_a_row):
        return None
    return scatter, row


def _shape(node: object) -> torch.Size | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.shape
