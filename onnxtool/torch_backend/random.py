"""Random numbers stay in PyTorch: its generator is what users seed, save and restore."""

from __future__ import annotations

import torch

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
