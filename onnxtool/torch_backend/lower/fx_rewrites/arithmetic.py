"""Rewrites of an operator and its neighbors.

PyTorch's maximum of NaN and a number is NaN; onnxruntime's is the number. Kernels disagree about empty tensors.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from onnxtool.torch_backend.nodes import (
    Node,
    call,
    is_call,
    is_empty,
    is_memory_for_random,
    is_random,
    is_static,
    is_view,
    shape_of,
    tensor_of,
)

aten = torch.ops.aten
_SQUARE_ROOT_OF_TWO = 2**0.5
_QUOTIENTS = (aten.div.Tensor, aten.xlogy.Tensor)
_RELATIVE = (
    *(aten.log.default, aten.log2.default, aten.log10.default, aten.logit.default, aten.xlogy.Scalar_Self),
    *(aten.reciprocal.default, aten.rsqrt.default, aten.div.Tensor_mode, aten.pow.Tensor_Tensor),
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default),
)
"""Functions that tell a small number from a smaller one, of their first argument or, `_QUOTIENTS`, of the second."""
_SCALINGS = (aten.div.Scalar, aten.mul.Scalar, aten.div.Tensor, aten.mul.Tensor)


def known_power(node: Node) -> Node | None:
    """Replace `x ** 1`, found in the gradient of a square, with x, and `x ** 0.5` and `x ** -0.5` with roots of x.

    onnxruntime computes them like any other power, which for minus infinity gives a number. A result of the graph stays
    a tensor of its own.
    """
    x, exponent = node.args
    if exponent == 1:
        return None if _is_output(node) else x
    root = {0.5: aten.sqrt.default, -0.5: aten.rsqrt.default}.get(exponent)
    return None if root is None else call(node, root, x)


def scale_before_expand(node: Node) -> Node | None:
    """Replace `expand(x) / c * y` with `x / c * y` if y has the shape of the product, with or without the number c.

    The former occurs in the gradient of a mean.
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


def exact_sigmoid(node: Node) -> Node | None:
    """Replace a sigmoid of which the size of small results matters with `1 / (1 + exp(-x))`.

    onnxruntime's kernel is exact to 6e-8, whatever the result: that of -20 is zero, and its logarithm minus infinity.
    """
    x = node.all_input_nodes[0]
    tensor = tensor_of(x)
    if tensor is None or tensor.dtype is not torch.float32:
        return None
    if not _is_only_returned(node) and not _divides(node):
        return None
    above = call(node, aten.add.Scalar, call(node, aten.exp.default, call(node, aten.neg.default, x)), 1.0)
    return call(node, aten.reciprocal.default, above)


def _divides(node: Node) -> bool:
    """Return whether something divides by the node, or by a function or a part of it, or takes its logarithm."""
    followed, waiting = {node}, [node]
    while waiting:
        source = waiting.pop()
        for user in source.users.keys() - followed:
            if is_call(user, *_RELATIVE) or (is_call(user, *_QUOTIENTS) and user.args[1] is source):
                return True
            tags = user.target.tags if isinstance(user.target, torch._ops.OpOverload) else ()
            if is_view(user) or torch.Tag.pointwise in tags or is_call(user, aten.cat.default, aten.clone.default):
                followed.add(user)
                waiting.append(user)
    return False


def _is_only_returned(node: Node) -> bool:
    """Return whether nothing but the user reads the node or views of it: others are kept for the gradient."""
    return all(user.op == "output" or (is_view(user) and _is_only_returned(user)) for user in node.users)


def fusible_gelu(node: Node) -> Node | None:
    """Replace the exact GELU with `x * (erf(x / sqrt(2)) + 1) * 0.5`, in the order that onnxruntime fuses."""
    x = node.all_input_nodes[0]
    tensor = tensor_of(x)
    if node.kwargs.get("approximate", "none") != "none" or tensor is None or tensor.dtype is not torch.float32:
        return None
    erf = call(node, aten.erf.default, call(node, aten.div.Tensor, x, _SQUARE_ROOT_OF_TWO))
    return call(node, aten.mul.Tensor, call(node, aten.mul.Tensor, x, call(node, aten.add.Tensor, erf, 1.0)), 0.5)


def redundant_detach(node: Node) -> Node | None:
    """Replace `detach(x)` with x within a graph: if its reader stays in PyTorch, a session would copy x."""
    return None if any(user.op == "output" for user in node.users) else node.all_input_nodes[0]


def transposed_product(node: Node) -> Node | None:
    """Replace `transpose(bmm(a, b))`, the gradient of transposed keys, with `bmm(transpose(b), transpose(a))`.

    onnxruntime's matmuls can read transposed matrices directly, but cannot write them. The result keeps its memory
    layout, at no cost in onnxruntime, where the two transpositions around it disappear.
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
    """Return whether some output is the node or a view of it, which PyTorch transposes at no cost."""
    return any(user.op == "output" or (is_view(user) and _is_output(user)) for user in node.users)


def _transposed(before: Node, matrices: Node) -> Node:
    if is_call(matrices, aten.transpose.int) and _swaps_last_two(matrices):
        return matrices.all_input_nodes[0]
    return call(before, aten.transpose.int, matrices, 1, 2)


def _swaps_last_two(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 3 and {dim % 3 for dim in node.args[1:]} == {1, 2}


aten, prims = torch.ops.aten, torch.ops.prims


def extreme(node: Node) -> Node | None:
    """Make a maximum or minimum NaN if one of its numbers is NaN."""
    return _value(node, node)


def index_of_extreme(node: Node) -> Node | None:
    """Make the index of a maximum or minimum the index of the first NaN, if there is one."""
    return _index(node, node)


def extreme_and_index(node: Node) -> Node | None:
    """Apply both to what `getitem` takes from the two results of `max` and `min` along a dimension."""
    both, index = node.args
    if not is_call(both, aten.max.dim, aten.min.dim):
        return None
    return (_index if index else _value)(node, both)


def _value(node: Node, reduction: Node) -> Node | None:
    is_nan = _nans(node, reduction)
    if is_nan is None:
        return None
    dims, *keep = reduction.args[1:] or ([],)
    has_nan = call(node, aten.amax.default, is_nan, dims if isinstance(dims, list | tuple) else [dims], *keep)
    nan = call(node, aten.mul.Scalar, _copied(node), math.nan)
    return call(node, aten.where.self, call(node, aten.gt.Scalar, has_nan, 0), nan, _copied(node))


def _index(node: Node, reduction: Node) -> Node | None:
    is_nan = _nans(node, reduction)
    if is_nan is None:
        return None
    options: tuple[Any, ...] = reduction.args[1:]
    first = call(node, aten.argmax.default, is_nan, *options)
    dims = () if not options or options[0] is None else (options[0],)
    has_nan = call(node, aten.amax.default, is_nan, list(dims), *options[1:])
    return call(node, aten.where.self, call(node, aten.gt.Scalar, has_nan, 0), first, _copied(node))


def _nans(node: Node, reduction: Node) -> Node | None:
    """Return where the numbers are NaN, as ones; None for numbers that never are, and for none at all."""
    x = reduction.args[0]
    tensor = tensor_of(x)
    if tensor is None or not tensor.is_floating_point() or is_empty(tensor) or reduction.kwargs:
        return None
    return call(node, prims.convert_element_type.default, call(node, aten.isnan.default, x), torch.int32)


def _copied(node: Node) -> Node:
    """Insert the same computation again, because the node itself is about to be replaced by its reader."""
    with node.graph.inserting_before(node):
        copied = node.graph.call_function(node.target, node.args)
    copied.meta["val"] = node.meta["val"]
    return copied


def empty_result(node: Node) -> Node | None:
    """Replace a node whose result is known to be empty with a constant of that shape.

    Its inputs stay out of the session because kernels disagree about empty inputs. A check, as for a singular matrix,
    has an empty result too, by which PyTorch keeps the order of checks.
    """
    tensor, origin = tensor_of(node), node.args[0] if node.target is operator.getitem else node
    if tensor is None or not is_empty(tensor) or not is_static(tensor):
        return None
    if isinstance(origin.target, torch._ops.HigherOrderOperator):
        return None
    if is_empty_constant(node) or is_random(node) or is_memory_for_random(node) or indexes_nothing(node):
        return None
    with node.graph.inserting_before(node):
        constant = node.graph.call_function(
            aten.full.default, (list(tensor.shape), 0), {"dtype": tensor.dtype, "device": tensor.device}
        )
    # A fake tensor, like all other values: torch.onnx finds the fake tensor mode from the values of a graph.
    constant.meta["val"] = tensor.new_empty(tensor.shape)
    return constant


def indexes_nothing(node: Node) -> bool:
    """Return whether a node may have indices into an empty tensor: PyTorch raises, even if the result is not read."""
    result, *inputs = map(tensor_of, (node, *node.all_input_nodes))
    indices = [tensor for tensor in inputs if tensor is not None and tensor.dtype in (torch.int64, torch.int32)]
    return is_empty(result) and not all(map(is_empty, indices))


def concatenation_without_empty(node: Node) -> Node | None:
    """Drop empty tensors from a concatenation that has others."""
    parts, dim = node.args[0], node.kwargs.get("dim", 0) if len(node.args) < 2 else node.args[1]
    full = [part for part in parts if not is_empty(tensor_of(part))]
    return call(node, aten.cat.default, full, dim) if 0 < len(full) < len(parts) else None


def is_empty_constant(node: Node) -> bool:
    """Return whether the node was made by `empty_result`, which no kernel computes."""
    return is_call(node, aten.full.default) and is_empty(tensor_of(node))
