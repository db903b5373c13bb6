"""Judge an optimized file by its input, with onnxruntime and NumPy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Feeds = Mapping[str, NDArray[Any]]
_OTHER_LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED")
_LEAST = 0.1  # of what an output's largest value counts as: probabilities near 0 are no scale


def open_plainly(path: str, *, level: str = "ENABLE_ALL", threads: int = 1) -> Any:
    """Return a session as users open it, with one thread; `level` is what onnxruntime optimizes in it."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def load(path: str) -> dict[str, NDArray[Any]]:
    """Return the inputs of a case."""
    with np.load(path) as held:
        return dict(held)


def judge(source: str, result: str, *cases: str) -> dict[str, Any]:
    """Compare a file with its input on all cases.

    Returns:
        dict: `error`, the largest difference relative to the largest value of its output; `noise`, the same between
        the input's own optimization levels; `cosine`, the smallest of an output; `equal`, the smallest share of equal
        elements of an output that is not of floats; `differs`, what cannot be compared at all, or an empty text.
    """
    wanted, found = open_plainly(source), open_plainly(result)
    others = [open_plainly(source, level=level) for level in _OTHER_LEVELS]
    figures: dict[str, Any] = {"error": 0.0, "noise": 0.0, "cosine": 1.0, "equal": 1.0, "differs": ""}
    for case in cases:
        feeds = load(case)
        reference = list(_tensors(wanted.run(None, feeds)))
        for session in others:
            for array, other in zip(reference, _tensors(session.run(None, feeds)), strict=True):
                if array.shape == other.shape and array.dtype.kind == "f":
                    figures["noise"] = max(figures["noise"], _apart(array, other)[0])
        outputs = list(_tensors(found.run(None, feeds)))
        if len(outputs) != len(reference):
            figures["differs"] = f"{len(outputs)} tensors, not {len(reference)}"
            continue
        for array, other in zip(reference, outputs, strict=True):
            if (array.shape, array.dtype) != (other.shape, other.dtype):
                figures["differs"] = f"{other.dtype} {list(other.shape)}, not {array.dtype} {list(array.shape)}"
            elif array.dtype.kind != "f":
                figures["equal"] = min(figures["equal"], float(np.mean(array == other)) if array.size else 1.0)
            elif not np.array_equal(np.isfinite(array), np.isfinite(other)):
                figures["differs"] = "NaN or infinity in other places"
            else:
                error, cosine = _apart(array, other)
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


def _apart(wanted: NDArray[Any], found: NDArray[Any]) -> tuple[float, float]:
    """Return the largest difference, relative to the largest value, and the cosine, of what is finite."""
    kept = np.isfinite(wanted) & np.isfinite(found)
    first, second = (array[kept].astype(np.float64) for array in (wanted, found))
    if not first.size:
        return 0.0, 1.0
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    cosine = float(first @ second) / norms if norms else float(np.array_equal(first, second))
    return float(np.abs(first - second).max() / max(float(np.abs(first).max()), _LEAST)), cosine
