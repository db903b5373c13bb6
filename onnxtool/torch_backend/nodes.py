"""Inspect nodes of FX graphs of ATen operators: what they call and return, and what their fake tensors say."""

from __future__ import annotations

import math
import operator
from typing import Any, TypeAlias

import torch

aten = torch.ops.aten
Node: TypeAlias = torch.fx.Node

MANY_ELEMENTS = 2**16
"""From this size on, a kernel's work outweighs its call; PyTorch kernels use threads from 2**15 elements on."""
_UNSEEN = 64
_UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}


def call(before: Node, target: Any, *arguments: Any, **options: Any) -> Node:
    """Insert a call of `target` before a node, with a fake value for its result."""
    graph = before.graph
    values = torch.fx.node.map_arg(arguments, lambda node: node.meta["val"])
    with graph.inserting_before(before):
        node = graph.call_function(target, arguments, options)
    node.meta["val"] = target(*values, **options)
    return node


def is_call(node: object, *targets: Any) -> bool:
    """Return whether an argument is a call of one of `targets`."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in targets


def called(target: object) -> str:
    """Return the name of a node's target, the same in every process: a plain function would print its address."""
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def tensor_of(node: object) -> torch.Tensor | None:
    """Return a node's fake tensor; None if it has none or is not a node."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: object) -> torch.Size | None:
    """Return the shape of a node's tensor; None if it has none."""
    tensor = tensor_of(node)
    return None if tensor is None else tensor.shape


def is_static(value: object) -> bool:
    """Return whether a value is a tensor with all sizes known."""
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def is_empty(value: object) -> bool:
    """Return whether a value is a tensor without elements, for any values of its symbolic sizes."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)


def seen_size(size: int | torch.SymInt) -> int:
    """Return the size at the first call; 64 for a data-dependent size, which is not known yet."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _UNSEEN


def is_seen(value: torch.Tensor) -> bool:
    """Return whether all sizes are known at the first call: none depends on data."""
    return all(isinstance(size, int) or size.node.has_hint() for size in value.shape)


def seen_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape at the first call."""
    return tuple(map(seen_size, value.shape))


def seen_elements(value: torch.Tensor) -> int:
    """Return the number of elements at the first call."""
    return math.prod(seen_shape(value))


def dims_by_stride(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from the largest stride to the smallest, for the sizes at the first call."""
    strides, sizes = ([seen_size(size) for size in sizes] for sizes in (value.stride(), value.shape))
    return tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim])))


def order_in_memory(value: object) -> tuple[int, ...] | None:
    """Return the dimension order in which a tensor is contiguous, so that onnxruntime reads it without a copy.

    None if the tensor is already contiguous or has no such order, or if sizes or strides are unknown.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())) or value.is_contiguous():
        return None
    order = dims_by_stride(value)
    return order if value.permute(order).is_contiguous() else None


def is_view(node: Node) -> bool:
    """Return whether the node's result is a view of its first argument; `getitem` selects one of several results."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or not node.args
        or not isinstance(node.args[0], torch.fx.Node)
    ):
        return False
    schema = node.target._schema
    alias = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    return alias is not None and not schema.is_mutable


def is_random(node: Node) -> bool:
    """Return whether the node draws from a generator, or saves or restores its state."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "rng" in node.target.name()
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_uninitialized(node: Node) -> bool:
    """Return whether the node allocates memory without initializing it."""
    return node.target in _UNINITIALIZED


def is_memory_for_random(node: Node) -> bool:
    """Return whether the node allocates memory that only random numbers fill."""
    return is_uninitialized(node) and all(is_random(user) for user in node.users)


def is_dropout_mask(node: Node) -> bool:
    """Return whether the node returns a tensor's dropout factor."""
    return is_scaled_draw(node) or is_call(node, torch.ops.onnxtool.fast_dropout_mask.default)


def is_scaled_draw(node: Node) -> bool:
    """Return whether the node divides fresh random numbers by a constant, as a scaled dropout mask does."""
    if node.target is not aten.div.Tensor or not isinstance(node.args[1], int | float):
        return False
    return isinstance(node.args[0], torch.fx.Node) and is_random(node.args[0])
