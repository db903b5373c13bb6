"""The independent verdict on files: an exported one beside PyTorch, and an optimized one beside the exported one.

The exported file has answered the same questions as PyTorch does, so its answers are what the optimized file must give.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zoo.tasks import Facts, find_task

from survey.questions import UnknownInputError, ask, ask_pytorch, open_sessions, questions

if TYPE_CHECKING:
    from numpy.typing import NDArray

PRECISIONS = ("fp32", "int8", "bf16")
# The largest difference, in parts of an output's largest value or of 1, and the least cosine: of rounding, and of 8
# bits on random ids, whose error on texts is bounded by 0.01. The exported file has the precision "".
_TOLERANCES = {"": 1e-4, "fp32": 1e-4, "int8": float("inf"), "bf16": float("inf")}
_TURNS = 12  # the first one warms up
_COSINES = {"": -1.0, "fp32": 0.9999, "int8": 0.97, "bf16": 0.999}


def judge(
    folder: str,
    exported: Mapping[str, str],
    optimized: Mapping[str, str] | None = None,
    precision: str = "",
    provider: str = "cpu",
) -> dict[str, Any]:
    """Compare exported graphs with the checkpoint in `folder`, or optimized ones with the exported ones.

    Args:
        folder: the checkpoint.
        exported: `model`, one graph for every step, and `encoder` where the cache begins with what that one gives.
        optimized: the same after optimization.
        precision: of `optimized`.
        provider: where `optimized` runs; `exported` runs on the CPU.

    Returns:
        `right` (None where the file cannot be asked), `cases` (how many were asked), `error` and `cosine` (the largest
        and the least), and `reason`, empty where it is right.
    """
    facts = Facts.read(Path(folder))
    asked, worst, least = 0, 0.0, 1.0

    def verdict(reason: str) -> dict[str, Any]:
        return {"right": not reason, "cases": asked, "error": min(worst, 1e300), "cosine": least, "reason": reason}

    try:
        base = open_sessions(exported)
        sessions = base if optimized is None else open_sessions(optimized, provider)
    except Exception as error:  # noqa: BLE001  onnxruntime has no public tree of errors
        return verdict(f"onnxruntime does not load it: {_first_line(error)}")
    for question in questions(facts, Path(folder), base):
        answered = question
        try:
            if optimized is None:
                answered, expected = ask_pytorch(facts, Path(folder), question)
            else:
                expected = ask(base, question)
        except Exception:  # noqa: BLE001, S112  what PyTorch does not run is no question
            continue
        try:
            found = ask(sessions, answered)
        except UnknownInputError as error:
            return {**verdict(str(error)), "right": None}
        except Exception as error:  # noqa: BLE001
            return verdict(f"{question.name}: onnxruntime raises: {_first_line(error)}")
        asked += 1
        if optimized is not None and found.keys() != expected.keys():
            return verdict(f"{question.name}: it gives {', '.join(found)}, not {', '.join(expected)}")
        pairs = [(found[name], expected[name]) for name in found if name in expected]
        for ours, theirs in pairs or [(next(iter(found.values())), next(iter(expected.values())))]:
            error_here, cosine = _distance(ours, theirs, question.mask)
            worst, least = max(worst, error_here), min(least, cosine)
        if worst > _TOLERANCES[precision] or not least >= _COSINES[precision]:
            return verdict(f"{question.name}: differs by {worst:.3g} of the largest value, cosine {least:.5f}")
    return verdict("" if asked else "no question could be asked")


def race(folder: str, exported: Mapping[str, str], optimized: Mapping[str, str], provider: str) -> list[float]:
    """Return how many times as fast a batch is as the exported file on the CPU, and as that file on the provider.

    In turns and in CPU time; empty for graphs with a cache.
    """
    facts = Facts.read(Path(folder))
    if find_task(facts.task).has_cache:
        return []
    contenders = [open_sessions(exported), open_sessions(exported, provider), open_sessions(optimized, provider)]
    asked = max(questions(facts, Path(folder), contenders[0]), key=lambda one: sum(x.size for x in one.feeds.values()))
    seconds: list[list[float]] = []
    for _ in range(_TURNS):
        row = []
        for sessions in contenders:
            start = time.process_time()
            ask(sessions, asked)
            row.append(time.process_time() - start)
        seconds.append(row)
    cpu, plain, ours = (statistics.median(times) for times in zip(*seconds[1:], strict=True))
    return [cpu / ours, plain / ours]


def _distance(found: NDArray[Any], reference: NDArray[Any], valid: NDArray[np.bool_] | None) -> tuple[float, float]:
    """Return the largest difference in parts of the largest value, or of 1, and the cosine of real tokens."""
    if found.shape != reference.shape:
        return float("inf"), -1.0
    ours, theirs = found.astype(np.float64), reference.astype(np.float64)
    if valid is not None and reference.shape[:2] == valid.shape:
        ours, theirs = ours[valid], theirs[valid]
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) or not np.isfinite(ours[finite]).all():
        return float("inf"), -1.0
    ours, theirs = ours[finite], theirs[finite]
    scale = max(1.0, float(np.abs(theirs).max(initial=0.0)))
    norms = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    cosine = float(ours @ theirs) / norms if norms else float(np.array_equal(ours, theirs))
    return float(np.abs(ours - theirs).max(initial=0.0)) / scale, cosine


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, no longer than a table can bear."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
