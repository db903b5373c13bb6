"""Symbolic sizes: which number to take for one where only its order of magnitude counts."""

from __future__ import annotations

import torch

_UNSEEN = 64


def seen_size(size: int | torch.SymInt) -> int:
    """Return the size at the first call; one that depends on data, and which nobody saw, counts as many."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _UNSEEN
