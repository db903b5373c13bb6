"""Numbers too small for a full mantissa, below 1.2e-38 in float32, count as zero while a session runs.

A masked softmax gives thousands of them, and processors take over a hundred cycles for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALLEST = 5e-324


def are_flushed() -> bool:
    """Whether this thread takes them for zero."""
    return _SMALLEST == 0.0


@contextmanager
def flushed(wanted: bool = True) -> Iterator[None]:
    """Let this thread take them for zero, or not, and leave it as it was."""
    before = are_flushed()
    if before is not wanted:
        torch.set_flush_denormal(wanted)
    try:
        yield
    finally:
        if before is not are_flushed():
            torch.set_flush_denormal(before)
