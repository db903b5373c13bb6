"""The ids that a corpus had so far, in sixteen bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 16
# Digests as objects of Python take six times the memory of those in arrays.
_MAX_RECENT = 1 << 14


class KnownIds:
    """A set of ids that only grows.

    It holds a digest of each: two ids of the same digest among ten billion have a chance of one in 10^18. They lie in
    sorted arrays, each at least twice as long as the next, so that a billion of them are in thirty.
    """

    def __init__(self) -> None:
        self._recent: set[bytes] = set()
        self._sorted: list[NDArray[np.bytes_]] = []

    def add(self, ids: Sequence[str]) -> list[bool]:
        """Add `ids` and return for each whether it was there before, or earlier among them."""
        digests = [blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest() for name in ids]
        was_there = self._in_arrays(digests)
        for place, digest in enumerate(digests):
            if digest in self._recent:
                was_there[place] = True
            elif not was_there[place]:
                self._recent.add(digest)
        if len(self._recent) >= _MAX_RECENT:
            self._settle()
        return was_there

    def _in_arrays(self, digests: Sequence[bytes]) -> list[bool]:
        wanted = np.array(digests, dtype=f"S{_DIGEST_BYTES}")
        found = np.zeros(len(wanted), np.bool_)
        for array in self._sorted:
            places = np.minimum(np.searchsorted(array, wanted), len(array) - 1)
            found |= array[places] == wanted
        return [bool(value) for value in found]

    def _settle(self) -> None:
        """Put the recent digests into the arrays, and merge those that are no longer twice as long as the next."""
        merged = np.sort(np.array(list(self._recent), dtype=f"S{_DIGEST_BYTES}"))
        self._recent.clear()
        while self._sorted and len(self._sorted[-1]) < 2 * len(merged):
            merged = np.concatenate([self._sorted.pop(), merged])
            merged.sort(kind="stable")
        self._sorted.append(merged)
