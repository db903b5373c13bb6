"""Classify a mask: padding, causal, both, none, or a bias that has to be added as it is.

One export computes a mask with twenty operators, another with two. Here the mask is computed for rows of several
lengths, padded on either side and with holes, by running only the nodes above it, and compared with the masks that
fused operators support. Any other mask stays a bias, which is always correct.

Shape letters: B batch, S queries, L keys, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.shapes import Shapes, named_axes, with_sums
from onnxtool.optimize.attention.scores import Masking
from onnxtool.optimize.attention.slices import Slice, evaluate, find_reach, sizes_of, slice_above, table_lengths

_LOWEST = -1e4
DEFAULT_FILL = -1e4
"""The value that fused operators add to the scores of padding unless `mask_filter_value` is set."""
# A value this low absorbs any score that it is added to.
_ABSORBING = -1e30
# The mask's size is quadratic in it; a mask that needs larger trials stays a bias.
_LONGEST = 2100


@dataclass(frozen=True)
class MaskKind:
    """The combined masks of an attention.

    Attributes:
        padding: the graph input [B, L], 1 for keys that may be attended to; None without padding.
        is_causal: whether a query sees no keys after its own position.
        is_bias: whether they are of an unknown kind, and have to be added as they are.
        hides_later: whether no query sees a key after its own position, whatever else is masked.
        sees_later: whether a query that may attend to nothing sees later keys as much as its own, unlike in any fused
            operator.
        fill: the value added to the scores of padding, which determines the result of a query that may attend to
            nothing.
    """

    padding: ir.Value | None = None
    is_causal: bool = False
    is_bias: bool = False
    hides_later: bool = False
    sees_later: bool = False
    fill: float = DEFAULT_FILL


NO_MASK, BIAS = MaskKind(), MaskKind(is_bias=True)


def find_mask_kind(model: ir.Model, masking: Masking, shapes: Shapes, counted: ir.Value | None = None) -> MaskKind:
    """Classify a masking, at enough sizes to prove its kind at all sizes; see `find_reach`.

    Args:
        model: the whole model.
        masking: the operations on the scores.
        shapes: shapes of the model.
        counted: broadcasts to [B, 1, S, L]; a query with a sum of 0 gets a row of zeros. Unless it is 1 for keys that
            may be attended to and 0 for all others, the masks are a bias.
    """
    if not masking.values:
        return NO_MASK
    part = slice_above((*masking.values, *([] if counted is None else [counted])), shapes)
    if part is None or any(term.is_merged for term in masking.terms):
        return BIAS
    reach = find_reach(part, shapes)
    if reach is None:
        return BIAS
    kinds = [_at(model, part, masking, shapes.probes[probe]) for probe in shapes.small]
    if shapes.probes[0]:
        beyond = (_at(model, part, masking, sizes) for sizes in _beyond(model, part, shapes, reach))
        kinds.append(next((kind for kind in beyond if kind is not None), None))
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return BIAS
    if len(set(known)) == 1:
        return known[0]
    return MaskKind(is_bias=True, hides_later=all(kind.hides_later for kind in known))


def _beyond(model: ir.Model, part: Slice, shapes: Shapes, reach: int) -> Iterator[Mapping[str, int]]:
    """Yield sizes beyond every change in a mask, longest first: no mask is longer than the tables it is sliced from."""
    named = [(axis, name) for value in model.graph.inputs for axis, name in named_axes(value)]
    batch = {name for axis, name in named if axis == 0} - {name for axis, name in named if axis}
    shortest = max(reach, 1 + max(size for probe in shapes.small for size in shapes.probes[probe].values()))
    for length in sorted({shortest, *(length for length in table_lengths(part) if length > reach)}, reverse=True):
        if length <= _LONGEST:
            first = shapes.probes[0]
            yield with_sums({name: first[name] if name in batch else length for name in first})


def _at(model: ir.Model, part: Slice, masking: Masking, sizes: Mapping[str, int]) -> MaskKind | None:
    """Return the kind of a slice's masks at these sizes of the dynamic axes; None if they cannot have these sizes."""
    feeds = _feeds(part, sizes)
    computed = None if feeds is None else evaluate(model, part, sizes, [inputs for inputs, _ in feeds])
    if feeds is None or computed is None:
        return BIAS if feeds is None else None
    kinds: dict[tuple[ir.Value | None, bool], bool] = {}
    hides_later, fill, sees_later = True, 0.0, False
    for (_, masks), arrays in zip(feeds, computed, strict=True):
        if not _fit(arrays):
            return None
        added = _added(masking, arrays)
        if added is None or added.ndim > 4:
            return BIAS
        added = added.reshape((1,) * (4 - added.ndim) + added.shape)
        allowed, keys = added == 0.0, added.shape[-1]
        causal = np.tril(np.ones((keys, keys), bool))
        rows: list[tuple[ir.Value | None, NDArray[np.bool_]]] = [(None, np.ones((1, 1, 1, keys), bool))]
        rows += [(value, mask[:, None, None, :]) for value, mask in masks.items() if mask.shape[-1] == keys]
        # Keys of another text, or of a cache next to their own: queries have no position among them.
        are_own = allowed.shape[-2] in (1, keys)
        for value, row in rows:
            # Queries in padding count too: heads read some of them, such as the first token in a left-padded row.
            for is_causal, seen in ((False, row), (True, row & causal)):
                fits = (are_own or not is_causal) and _equal(seen, allowed)
                kinds[value, is_causal] = kinds.get((value, is_causal), True) and fits
        hides_later &= allowed.shape[-2] == keys > 1 and not (allowed & ~causal).any()
        if len(masking.values) > 1 and allowed.shape[-2] == keys:
            sees_later |= _sees_later(_added(masking, arrays, as_lowest=False), causal)
        # After a query's own position, causal masks are even lower.
        own = added[..., causal] if allowed.shape[-2] == keys else added
        fill = min(fill, float(own.min(initial=0.0)))
        if len(arrays) > len(masking.values) and not _equal(arrays[-1], allowed):
            return BIAS
    fill = -np.inf if fill == -np.inf else float(np.finfo(np.float32).min) if fill <= _ABSORBING else fill
    for (value, is_causal), fits in kinds.items():
        if fits and (value is not None or is_causal):
            later = is_causal and hides_later
            fill = fill if value is not None else DEFAULT_FILL
            return MaskKind(value, is_causal, hides_later=later, sees_later=is_causal and sees_later, fill=fill)
        if fits:
            return NO_MASK
    return MaskKind(is_bias=True, hides_later=hides_later)


def _sees_later(added: NDArray[np.float32] | None, causal: NDArray[np.bool_]) -> bool:
    """Whether a query that may attend to nothing sees later keys as much as its own: two masks may add the same value.

    The fused operators leave such a query only its own keys.
    """
    if added is None:
        return False
    own, later = (np.where(keys, added, -np.inf).max(axis=-1) for keys in (causal, ~causal))
    return bool(((own < 0.0) & (later > own + _LOWEST / 2) & np.isfinite(later)).any())


def _fit(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether masks apply to the same scores; one that is sliced from a table that is too short does not."""
    try:
        np.broadcast_shapes(*(array.shape for array in arrays))
    except ValueError:
        return False
    return True


def _equal(mask: NDArray[Any], allowed: NDArray[np.bool_]) -> bool:
    """Whether two masks are the same where they are broadcast against each other."""
    try:
        left, right = np.broadcast_arrays(mask, allowed)
    except ValueError:  # their shapes do not belong to one attention
        return False
    return np.array_equal(left, right)


def _feeds(
    part: Slice, sizes: Mapping[str, int]
) -> list[tuple[dict[str, NDArray[Any]], dict[ir.Value, NDArray[np.bool_]]]] | None:
    """Make inputs of a slice with the masks they represent; None for inputs with arbitrary values.

    Over all rows, any two positions of the inputs take all four combinations of padding and token: the numbers of two
    positions differ in some bit, and each bit, and its complement, makes a row. Rows without padding and rows of only
    padding are added.
    """
    shapes = {value: sizes_of(value, sizes) for value in part.inputs}
    # A mask that depends on hidden states may differ for other values.
    is_mask = {value: "mask" in str(value.name) for value in part.inputs}
    dtypes = {value: np.dtype(np.float32) if value.dtype is None else value.dtype.numpy() for value in part.inputs}
    if any(None in shape or len(shape) != 2 for shape in shapes.values()):
        return None
    if any(dtype.kind == "f" and not is_mask[value] for value, dtype in dtypes.items()):
        return None
    width = sum(int(shape[1] or 0) for shape in shapes.values())
    bits = [np.arange(width) >> bit & 1 == 1 for bit in range(max(1, width - 1).bit_length())]
    patterns = [np.ones(width, bool), *(row for bit in bits for row in (bit, ~bit)), np.zeros(width, bool)]
    rows_of_inputs = []
    first, generator = 0, np.random.default_rng(0)
    while first < len(patterns):
        feeds: dict[str, NDArray[Any]] = {}
        masks: dict[ir.Value, NDArray[np.bool_]] = {}
        start, batch = 0, 1
        for value, (rows, columns) in shapes.items():
            batch = max(batch, rows or 1)
            chosen = [patterns[(first + row) % len(patterns)] for row in range(rows or 1)]
            masks[value] = np.array(chosen)[:, start : start + int(columns or 0)]
            start += int(columns or 0)
            # Not only 0 and 1: another input is a mask only if every other number acts like 1.
            numbers = 1 if is_mask[value] else generator.choice([-1, 1, 2, 3], masks[value].shape)
            feeds[str(value.name)] = (masks[value] * numbers).astype(dtypes[value])
        rows_of_inputs.append((feeds, masks))
        first += batch if shapes else len(patterns)
    return rows_of_inputs


def _added(masking: Masking, arrays: Sequence[NDArray[Any]], *, as_lowest: bool = True) -> NDArray[np.float32] | None:
    """Return what is added to scores, 0 where they stay and `_LOWEST` or less where not, [B or 1, H or 1, S or 1, L].

    None if the masks do more than drop scores. The value of a masked fill replaces any score, like the lowest number,
    and counts `as_lowest` if that matters.
    """
    total: NDArray[np.float32] = np.zeros((1, 1, 1, 1), np.float32)
    with np.errstate(over="ignore"):
        for term, array in zip(masking.terms, arrays, strict=False):
            added = array.astype(np.float32) * np.float32(term.scale)
            if not np.all((added == 0.0) | (added <= _LOWEST)):
                return None
            total = total + added
    for masked_fill, array in zip(masking.masked_fills, arrays[len(masking.terms) :], strict=False):
        fill = np.finfo(np.float32).min if as_lowest and not masked_fill.is_infinite else masked_fill.number
        total = np.where(array.astype(bool) == masked_fill.keeps, total, np.float32(fill))
    return total
