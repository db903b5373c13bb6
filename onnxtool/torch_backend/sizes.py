"""Symbolic sizes: which number to take for one where only its order of magnitude counts."""

from __future__ import annotations

import math

import torch

MANY_ELEMENTS = 2**16
"""From here on what a kernel takes counts more than what it costs to call it; PyTorch's use threads from 2**15 on."""
_UNSEEN = 64


def seen_size(size: int | torch.SymInt) -> int:
    """Return the size at the first call; one that depends on data, and which nobody saw, counts as many."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _UNSEEN


def seen_elements(value: torch.Tensor) -> int:
    """Return the number of elements at the first call."""
    return math.prod(map(seen_size, value.shape))
