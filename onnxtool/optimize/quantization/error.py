"""Measure the difference between outputs and reference outputs that `max_error` bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.progress import counted
from onnxtool.runtime.comparison import measure
from onnxtool.runtime.session import Session

_SMALLEST_NORM = 1e-30
_ROWS_AT_A_TIME = 256  # of logits, 31 MB


def measure_errors(
    session: Session, feeds: Sequence[Mapping[str, NDArray[Any]]], expected: Sequence[Mapping[str, NDArray[Any]]]
) -> NDArray[np.float64]:
    """Run a session on each of `feeds`, and return the errors of all outputs (see `output_errors`)."""
    pairs = counted(list(zip(feeds, expected, strict=True)), "measuring the error of batch")
    return np.concatenate([output_errors(session.run(given), wanted, padding_mask(given)) for given, wanted in pairs])


def padding_mask(feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
    """Return the padding mask among `feeds`, bool [B, S], false on padding; None if there is none."""
    for name, array in feeds.items():
        if "mask" in name and array.ndim == 2:
            return array.astype(bool)
    return None


def row_errors(found: NDArray[Any], expected: NDArray[Any], valid: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return 1 - cosine of each row along the last axis, float64 [R], without rows of padding.

    Args:
        found: float [..., D].
        expected: the same shape.
        valid: bool [B, S], false on padding; it applies to outputs whose first axes are B and S, and to [B, H, S, D].
    """
    if valid is not None and found.ndim >= 3 and found.shape[:2] == valid.shape:
        found, expected = found[valid], expected[valid]
    elif valid is not None and found.ndim == 4 and found.shape[::2] == valid.shape:
        # Keys or values, [B, H, S, D].
        found, expected = found.swapaxes(1, 2)[valid], expected.swapaxes(1, 2)[valid]
    rows, wanted = (array.reshape(-1, array.shape[-1]) for array in (found, expected))
    parts = [
        _cosine_errors(rows[start : start + _ROWS_AT_A_TIME], wanted[start : start + _ROWS_AT_A_TIME])
        for start in range(0, len(rows), _ROWS_AT_A_TIME)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def _cosine_errors(rows: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.float64]:
    one, other = rows.astype(np.float64), wanted.astype(np.float64)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(norms, _SMALLEST_NORM)
    # A row of zeros has no direction: it is correct if both are zero.
    cosines[norms <= _SMALLEST_NORM] = (one == other).all(axis=1)[norms <= _SMALLEST_NORM]
    errors: NDArray[np.float64] = np.where(np.isfinite(cosines), np.maximum(0.0, 1.0 - cosines), 2.0)
    return errors


def output_errors(
    found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], valid: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Return 1 - cosine of each row of each floating output, and of each such output as a whole.

    `max_error` bounds the largest of them: rows are real tokens of hidden states and logits [B, S, D], and texts of
    embeddings [B, D]. A row of one number has no direction, so outputs whose last axis has size one only count as a
    whole.
    """
    errors = [np.zeros(0)]
    for name, wanted in expected.items():
        if wanted.dtype.kind != "f" or not wanted.size:
            continue
        if wanted.ndim >= 2 and wanted.shape[-1] > 1:
            errors.append(row_errors(found[name], wanted, valid))
        errors.append(np.array([max(0.0, 1.0 - measure(found[name], wanted, valid).cosine)]))
    return np.concatenate(errors)
