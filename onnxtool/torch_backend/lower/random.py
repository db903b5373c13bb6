"""Random numbers stay in PyTorch: its generator is what users seed, save and restore."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

aten = torch.ops.aten

_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node takes numbers from a generator, or keeps or restores its state."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "rng" in node.target.name()
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_memory_for_random(node: torch.fx.Node) -> bool:
    """Whether the node makes memory that nothing but random numbers goes into."""
    return node.target in _EMPTY and all(is_random(user) for user in node.users)


def is_scaled_draw(node: torch.fx.Node) -> bool:
    """Whether the node divides fresh random numbers by a constant, as `kept_shares` does."""
    if node.target is not aten.div.Tensor or not isinstance(node.args[1], int | float):
        return False
    return isinstance(node.args[0], torch.fx.Node) and is_random(node.args[0])


def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor | None:
    """Do what `torch.nn.functional.dropout` does, with one product; None where that is not to be had."""
    return x * kept_shares(x, p) if training and not inplace and draws_as_eager(x, p) else None


def draws_as_eager(x: torch.Tensor, p: float) -> bool:
    """Whether `kept_shares` knows how eager PyTorch draws for the dropout of `x`: on the CPU."""
    return isinstance(p, int | float) and 0 < p < 1 and x.device.type == "cpu" and x.is_floating_point()


def kept_shares(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return what dropout multiplies `x` by: 0 with probability p, else 1 / (1 - p), from the numbers of eager."""

    def draw(shape: list[int]) -> torch.Tensor:
        return aten.bernoulli.p(torch.empty(shape, dtype=x.dtype, device=x.device), 1 - p) / (1 - p)

    return drawn(x, draw)


def drawn(x: torch.Tensor, draw: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
    """Return what `draw` makes for the memory of `x`, in the layout of `x`.

    Generators fill memory in its order: the layout decides which element gets which number.
    """
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    numbers = draw([x.shape[dim] for dim in order])
    if list(order) == list(range(x.dim())):
        return numbers
    return numbers.permute([order.index(dim) for dim in range(x.dim())])
