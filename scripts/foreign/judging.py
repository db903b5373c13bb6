"""Judge an optimized file by its input, with onnxruntime and NumPy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from survey.judging import distance
from survey.questions import open_session

_OTHER_LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED")
_LEAST = 0.1  # of what an output's largest value counts as: probabilities near 0 are no scale


def judge(source: str, result: str, *cases: str) -> dict[str, Any]:
    """Compare a file with its input on all cases.

    Returns:
        dict: `error`, the largest difference relative to the largest value of its output; `noise`, the same between
        the input's own optimization levels; `cosine`, the smallest of an output; `equal`, the smallest share of equal
        elements of an output that is not of floats; `differs`, what cannot be compared at all, or an empty text.
    """
    wanted, found = open_session(source), open_session(result)
    others = [open_session(source, level) for level in _OTHER_LEVELS]
    figures: dict[str, Any] = {"error": 0.0, "noise": 0.0, "cosine": 1.0, "equal": 1.0, "differs": ""}
    for case in cases:
        with np.load(case) as held:
            feeds = dict(held)
        reference = list(_tensors(wanted.run(None, feeds)))
        for session in others:
            for array, other in zip(reference, _tensors(session.run(None, feeds)), strict=True):
                if array.dtype.kind == "f" and (error := distance(other, array, _LEAST)[0]) < np.inf:
                    figures["noise"] = max(figures["noise"], error)
        outputs = list(_tensors(found.run(None, feeds)))
        if len(outputs) != len(reference):
            figures["differs"] = f"{len(outputs)} tensors, not {len(reference)}"
            continue
        for array, other in zip(reference, outputs, strict=True):
            if (array.shape, array.dtype) != (other.shape, other.dtype):
                figures["differs"] = f"{other.dtype} {list(other.shape)}, not {array.dtype} {list(array.shape)}"
            elif array.dtype.kind != "f":
                figures["equal"] = min(figures["equal"], float(np.mean(array == other)) if array.size else 1.0)
            else:
                error, cosine = distance(other, array, _LEAST)
                if error == np.inf:
                    figures["differs"] = "NaN or infinity in other places"
                figures["error"] = max(figures["error"], error)
                figures["cosine"] = min(figures["cosine"], cosine)
    return figures


def _tensors(values: Any) -> Iterator[NDArray[Any]]:
    """Yield the tensors of outputs, those in sequences and maps as well."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _tensors(value[key] for key in sorted(value))
        elif isinstance(value, list):
            yield from _tensors(value)
        else:
            yield np.asarray(value)
