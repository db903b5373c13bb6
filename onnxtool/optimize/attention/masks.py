"""Find the kind of a mask: padding, causal, both, none, or a bias that has to be added as it is.

One export computes a mask by twenty operators, another one by two. Here the mask is computed for rows of several
lengths, padded on either side and with holes, and compared with the masks that fused operators know by name. Any other
mask stays a bias, which is always correct.

Letters of shapes: B batch, S queries, L keys, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.shapes import Shapes, axis_name, with_sums
from onnxtool.optimize.attention.evaluation import Slice, evaluate, largest_number, slice_above, table_lengths
from onnxtool.optimize.attention.scores import Masking

_LOWEST = -1e4
# A mask grows with the square of it; with a window that is wider, it stays a bias.
_LONGEST = 2100
_HOLES = 0.3  # of the tokens of a row, masked out in the middle: no rule about lengths reproduces that


@dataclass(frozen=True)
class MaskKind:
    """What the masks of an attention are, taken together.

    Attributes:
        padding: the graph input [B, L], 1 for keys that may be attended to; None without padding.
        is_causal: whether a query sees no keys after its own position.
        is_bias: whether they are of no known kind, and have to be added as they are.
        hides_later: whether no query sees a key after its own position, whatever else they mask.
    """

    padding: ir.Value | None = None
    is_causal: bool = False
    is_bias: bool = False
    hides_later: bool = False


NO_MASK, BIAS = MaskKind(), MaskKind(is_bias=True)


def find_mask_kind(model: ir.Model, masking: Masking, shapes: Shapes) -> MaskKind:
    """Find the kind of a masking, at the sizes of a probe of `shapes` and at sizes beyond every attention window."""
    if not masking.values:
        return NO_MASK
    part = slice_above(masking.values, shapes)
    if part is None or any(term.is_merged for term in masking.terms):
        return BIAS
    mask_kind = _at(model, part, masking, shapes.probes[0])
    if mask_kind is None or mask_kind == BIAS or not shapes.probes[0]:
        return mask_kind or BIAS
    for sizes in _past_windows(part, shapes):
        beyond = _at(model, part, masking, sizes)
        if beyond is not None:
            if beyond == mask_kind:
                return mask_kind
            return MaskKind(is_bias=True, hides_later=mask_kind.hides_later and beyond.hides_later)
    return BIAS


def _past_windows(part: Slice, shapes: Shapes) -> Iterator[Mapping[str, int]]:
    """Yield sizes beyond every window of a mask; a mask that has no such size is tried at the next ones.

    A window wider than the longest input has no effect, and no mask is longer than the tables it is cut from.
    """
    sizes, window = shapes.probes[0], largest_number(part)
    batch = next(iter(sizes))
    past = {name: min(window + 8, size) for name, size in shapes.probes[-1].items()}
    if max(past.values()) > _LONGEST:
        return
    lengths = {number + more for number in (window, *table_lengths(part)) for more in (8, 1, 0)}
    for length in sorted(lengths, reverse=True):
        if max(sizes.values()) < length <= _LONGEST:
            yield with_sums({**dict.fromkeys(sizes, length), batch: sizes[batch]})
    yield with_sums({**past, batch: sizes[batch]})


def _at(model: ir.Model, part: Slice, masking: Masking, sizes: Mapping[str, int]) -> MaskKind | None:
    """Return the kind of the masks of a slice at these sizes of the dynamic axes; None where they have no such size."""
    feeds, masks = _feeds(part, sizes)
    if feeds is None:
        return BIAS
    arrays = evaluate(model, part, sizes, feeds)
    if arrays is None or not _fit(arrays):
        return None
    allowed = _allowed(masking, arrays)
    if allowed is None or allowed.ndim > 4:
        return BIAS
    if allowed.all():
        return NO_MASK
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    keys = allowed.shape[-1]
    causal = np.tril(np.ones((keys, keys), bool))
    rows: list[tuple[ir.Value | None, NDArray[np.bool_]]] = [(None, np.ones((1, 1, 1, keys), bool))]
    rows += [(value, mask[:, None, None, :]) for value, mask in masks.items() if mask.shape[-1] == keys]
    # Keys of another text, or of a cache beside their own: no query has a place among them.
    are_own = allowed.shape[-2] in (1, keys)
    for value, row in rows:
        # Queries that are padding count as well: heads read some of them, as that of the first token does in a row
        # that is padded left.
        if value is not None and _equal(row, allowed):
            return MaskKind(value)
        if are_own and _equal(row & causal, allowed):
            return MaskKind(value, is_causal=True, hides_later=True)
    is_square = allowed.shape[-2] == keys > 1
    return MaskKind(is_bias=True, hides_later=is_square and not (allowed & ~causal).any())


def _fit(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether masks apply to the same scores; one that is cut from a table that is too short does not."""
    try:
        np.broadcast_shapes(*(array.shape for array in arrays))
    except ValueError:
        return False
    return True


def _equal(mask: NDArray[np.bool_], allowed: NDArray[np.bool_]) -> bool:
    """Whether two masks are the same where they are broadcast against each other."""
    try:
        one, other = np.broadcast_arrays(mask, allowed)
    except ValueError:  # their shapes do not belong to one attention
        return False
    return np.array_equal(one, other)


def _feeds(
    part: Slice, sizes: Mapping[str, int]
) -> tuple[dict[str, NDArray[Any]] | None, dict[ir.Value, NDArray[np.bool_]]]:
    """Make inputs of a slice: ragged masks with holes, and random numbers for all others."""
    generator = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    masks: dict[ir.Value, NDArray[np.bool_]] = {}
    for value in part.inputs:
        if value.shape is None or value.dtype is None:
            return None, {}
        shape = [
            size if isinstance(size, int) else sizes[size.value or axis_name(str(value.name), axis)]
            for axis, size in enumerate(value.shape)
        ]
        dtype = value.dtype.numpy()
        if len(shape) == 2 and "mask" in str(value.name):
            mask = _ragged(shape[0], shape[1], generator)
            masks[value] = mask
            feeds[str(value.name)] = mask.astype(dtype)
        elif dtype.kind == "f":  # a mask that depends on hidden states may differ on those that are not tried
            return None, {}
        else:
            # Not 0 and 1 alone: an input is a mask only if every other number has the effect of 1.
            numbers = generator.integers(0, 4, shape).astype(dtype)
            feeds[str(value.name)] = numbers
            if len(shape) == 2:
                masks[value] = numbers != 0
    return feeds, masks


def _ragged(rows: int, length: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Return a mask with a row padded right, a row padded left, and rows with holes; the first token of each stays."""
    mask = generator.random((rows, length)) >= _HOLES
    mask[0] = np.arange(length) < max(1, length // 2)
    if rows > 1:
        mask[1] = np.arange(length) >= length // 3
    return mask


def _allowed(masking: Masking, arrays: Sequence[NDArray[Any]]) -> NDArray[np.bool_] | None:
    """Return where scores stay, [B or 1, H or 1, S or 1, L]; None where the masks do more than drop scores."""
    allowed: NDArray[np.bool_] = np.ones((1, 1, 1, 1), bool)
    for term, array in zip(masking.terms, arrays, strict=False):
        added = array.astype(np.float64) * term.scale
        stays = added == 0.0
        if not np.all(stays | (added <= _LOWEST)):
            return None
        allowed = allowed & stays
    for masked_fill, array in zip(masking.masked_fills, arrays[len(masking.terms) :], strict=True):
        allowed = allowed & (array.astype(bool) == masked_fill.keeps)
    return allowed
