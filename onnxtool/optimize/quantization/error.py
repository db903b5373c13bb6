"""Measure the difference between outputs and reference outputs that `max_error` bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.progress import counted
from onnxtool.runtime.difference import Scales, Spread, informative, measure, selected, spreads_of
from onnxtool.runtime.running import Session

_SMALLEST_NORM = 1e-30
_LARGEST = 2.0  # of NaN or infinity in only one of the two
_ROWS_AT_A_TIME = 256  # of logits, 31 MB


def measure_errors(
    session: Session, feeds: Sequence[Mapping[str, NDArray[Any]]], expected: Sequence[Mapping[str, NDArray[Any]]]
) -> NDArray[np.float64]:
    """Run a session on each of `feeds`, and return the errors of all outputs (see `output_errors`)."""
    spreads = spreads_of(expected, [padding_mask(feed) for feed in feeds])
    pairs = counted(list(zip(feeds, expected, strict=True)), "measuring the error of batch")
    return np.concatenate(
        [output_errors(session.run(feed), wanted, padding_mask(feed), spreads) for feed, wanted in pairs]
    )


def padding_mask(feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
    """Return the padding mask among `feeds`, bool [B, S], false on padding; None if there is none."""
    for name, array in feeds.items():
        if "mask" in name and array.ndim == 2:
            return array.astype(bool)
    return None


def row_errors(actual: NDArray[Any], expected: NDArray[Any], valid: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return 1 - cosine of each row along the last axis, float64 [R], without rows of padding.

    As in a verification, fills and shared offsets are left out, and an outlying column has the weight of a usual one.

    Args:
        actual: float [..., D].
        expected: the same shape.
        valid: bool [B, S], false on padding; it applies to outputs whose first axes are B and S, and to [B, H, S, D].
    """
    actual, expected = selected(actual, valid), selected(expected, valid)
    rows, wanted = (array.reshape(-1, array.shape[-1]) for array in (actual, expected))
    kept = informative(rows, wanted)
    if kept is None:
        return np.full(len(rows), _LARGEST)
    if not kept.any():
        return np.zeros(len(rows))
    scales = Scales.of(wanted, kept, 0.0)
    parts = [
        _cosine_errors(rows[part], wanted[part], kept[part], scales)
        for start in range(0, len(rows), _ROWS_AT_A_TIME)
        for part in [slice(start, start + _ROWS_AT_A_TIME)]
    ]
    return np.concatenate(parts)


def _cosine_errors(
    rows: NDArray[Any], expected: NDArray[Any], is_valid: NDArray[np.bool_], scales: Scales
) -> NDArray[np.float64]:
    left, right = (np.where(is_valid, array.astype(np.float64) - scales.offset, 0.0) for array in (rows, expected))
    weights = scales.weights(np.abs(right), scales.columns)
    left, right = left * weights, right * weights
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    cosines = (left * right).sum(axis=1) / np.maximum(norms, _SMALLEST_NORM)
    # A row of zeros has no direction: it is correct if both are zero.
    cosines[norms <= _SMALLEST_NORM] = (left == right).all(axis=1)[norms <= _SMALLEST_NORM]
    errors: NDArray[np.float64] = np.maximum(0.0, 1.0 - cosines)
    return errors


def output_errors(
    actual: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    valid: NDArray[np.bool_] | None,
    spreads: Mapping[str, Spread],
) -> NDArray[np.float64]:
    """Return 1 - cosine of each row of each floating output, and of each such output as a whole.

    `max_error` bounds the largest of them: rows are real tokens of hidden states and logits [B, S, D], and texts of
    embeddings [B, D]. Scores and logits of few labels have no direction worth comparing: a bias turns all of them the
    same way. Their error is relative to how they vary over all inputs, as `spreads` has it.
    """
    errors = [np.zeros(0)]
    for name, wanted in expected.items():
        if wanted.dtype.kind != "f" or not wanted.size:
            continue
        spread = spreads.get(name)
        if spread is None and wanted.ndim >= 2 and wanted.shape[-1] > 1:
            errors.append(row_errors(actual[name], wanted, valid))
        whole = measure(actual[name], wanted, valid, spread=spread)
        errors.append(np.array([max(0.0, 1.0 - whole.cosine)]))
    return np.concatenate(errors)
