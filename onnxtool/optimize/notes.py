"""What a pass says of the patterns that it left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def refusals(reasons: Sequence[str]) -> str:
    """Return how many patterns were left alone for which reason; empty where none was."""
    return "; ".join(f"{count} left alone: {reason}" for reason, count in Counter(reasons).items())
