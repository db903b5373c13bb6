"""Whether outputs depend on what a model is given: where they do not, agreeing with them shows nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, "NDArray[Any]"]

_SAME = 1e-6  # of the largest value: what rounding alone makes of other shapes


def constant_outputs(feeds: Sequence[Arrays], outputs: Sequence[Arrays]) -> tuple[str, ...]:
    """Return the names of the floating outputs that are the same for all inputs, NaN among them.

    Rows of a batch are compared that have the same shapes and masks and different contents: an output that depends on
    lengths and positions alone is constant as well. Positions that a mask leaves out are not compared. An output of
    ones may be a probability that is saturated, or the only one, and counts as telling.

    Args:
        feeds: of each run, input name to array.
        outputs: of each run, output name to array.
    """
    names = [name for name, array in outputs[0].items() if array.dtype.kind == "f"] if outputs else []
    return tuple(name for name in names if _is_constant(name, feeds, outputs))


def is_negligible(effect: float, scale: float) -> bool:
    """Whether an output moved by no more than rounding moves one whose largest value is `scale`."""
    return effect <= _SAME * scale


def all_same(vectors: NDArray[Any]) -> bool:
    """Whether all of several vectors, float [T, D], are the same."""
    return all(_same(vectors[0], one) for one in vectors[1:])


def _is_constant(name: str, feeds: Sequence[Arrays], outputs: Sequence[Arrays]) -> bool:
    firsts: dict[Any, tuple[list[NDArray[Any]], NDArray[Any]]] = {}
    compared = False
    for given, found in zip(feeds, outputs, strict=True):
        for masks, contents, row in _rows(given, found[name]):
            if row.size and np.all(row == 1):
                return False
            key = tuple((one.shape, one.tobytes()) for one in masks), tuple(one.shape for one in contents)
            first, output = firsts.setdefault(key, (contents, row))
            if all(np.array_equal(*pair) for pair in zip(first, contents, strict=True)):
                continue
            if not _same(output, row):
                return False
            compared = True
    return compared


def _rows(given: Arrays, output: NDArray[Any]) -> Iterator[tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[Any]]]:
    """Yield masks, contents and output of each row of a run, or of all of it where inputs have no common batch."""
    sizes = {array.shape[:1] for array in given.values()}
    batched = len(sizes) == 1 and output.shape[:1] in sizes and output.ndim > 0
    for place in range(len(output)) if batched else (slice(None),):
        arrays = {name: array[place] if array.ndim else array for name, array in given.items()}
        masks = [array for name, array in arrays.items() if "mask" in name]
        row = output[place] if output.ndim else output
        seen = next((mask.astype(bool) for mask in masks if mask.ndim == 1 and mask.shape == row.shape[:1]), None)
        contents = [array for name, array in arrays.items() if "mask" not in name]
        yield masks, contents, row if seen is None or seen.all() else row[seen]


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one.shape != other.shape:
        return False
    finite = one[np.isfinite(one)]
    scale = float(np.abs(finite.astype(np.float64)).max(initial=0.0))
    return bool(np.allclose(one.astype(np.float64), other, rtol=0.0, atol=_SAME * scale, equal_nan=True))
