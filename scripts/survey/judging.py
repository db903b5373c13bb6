"""The independent verdict on files: exported ones compared with PyTorch, optimized ones with the exported ones.

The exported file has answered the same questions as PyTorch does, so its answers are what the optimized file must give.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from harness.workers import times_in_turns
from numpy.typing import NDArray
from zoo.checkpoint import first_line
from zoo.tasks import find_task

from survey.questions import Question, ask, ask_pytorch, open_session, questions

PRECISIONS = ("fp32", "int8", "bf16")
# The largest difference, in parts of an output's largest value or of 1, and the least cosine: of rounding, and of 8
# bits on random ids, whose error on texts is bounded by 0.01. The exported file has the precision "".
_TOLERANCES = {"": 1e-4, "fp32": 1e-4, "int8": float("inf"), "bf16": float("inf")}
_COSINES = {"": -1.0, "fp32": 0.9999, "int8": 0.97, "bf16": 0.999}
_TURNS, _PEER_TURNS = 11, 40


def judge(
    task: str,
    folder: str,
    exported: Mapping[str, str],
    optimized: Mapping[str, str] | None = None,
    precision: str = "",
    provider: str = "cpu",
) -> dict[str, Any]:
    """Compare exported graphs with the checkpoint in `folder`, or optimized ones with the exported ones.

    Args:
        task: the name of the checkpoint's task.
        folder: the checkpoint.
        exported: `model`, one graph for every step, and `encoder` where the cache begins with what that one gives.
        optimized: the same after optimization.
        precision: of `optimized`.
        provider: where `optimized` runs; `exported` runs on the CPU.

    Returns:
        `verdict` (right or wrong), `cases` (how many were asked), `error` and `cosine` (the largest and the least), and
        `reason`, empty where it is right.
    """
    num_cases, worst, least = 0, 0.0, 1.0

    def verdict(reason: str) -> dict[str, Any]:
        figures = {"cases": num_cases, "error": min(worst, 1e300), "cosine": least}
        return {"verdict": "wrong" if reason else "right", **figures, "reason": reason}

    try:
        base = open_sessions(exported)
        sessions = base if optimized is None else open_sessions(optimized, provider)
    except Exception as error:  # noqa: BLE001  onnxruntime has no public tree of errors
        return verdict(f"onnxruntime does not load it: {first_line(error)}")
    for question in questions(find_task(task), Path(folder), base):
        answered = question
        try:
            if optimized is None:
                answered, expected = ask_pytorch(find_task(task), Path(folder), question)
            else:
                expected = ask(base, question)
        except Exception:  # noqa: BLE001, S112  what PyTorch does not run is no question
            continue
        try:
            outputs = ask(sessions, answered)
        except Exception as error:  # noqa: BLE001
            return verdict(f"{question.name}: onnxruntime raises: {first_line(error)}")
        num_cases += 1
        if optimized is not None and outputs.keys() != expected.keys():
            return verdict(f"{question.name}: it gives {', '.join(outputs)}, not {', '.join(expected)}")
        pairs = [(outputs[name], expected[name]) for name in outputs if name in expected]
        for ours, theirs in pairs or [(next(iter(outputs.values())), next(iter(expected.values())))]:
            if question.mask is not None and theirs.shape[:2] == question.mask.shape and ours.shape == theirs.shape:
                ours, theirs = ours[question.mask], theirs[question.mask]
            error_here, cosine = distance(ours, theirs)
            worst, least = max(worst, error_here), min(least, cosine)
        if worst > _TOLERANCES[precision] or not least >= _COSINES[precision]:
            return verdict(f"{question.name}: differs by {worst:.3g} of the largest value, cosine {least:.5f}")
    return verdict("" if num_cases else "no question could be asked")


def race(
    task: str, folder: str, exported: Mapping[str, str], optimized: Mapping[str, str], provider: str
) -> list[float]:
    """Return how many times as fast a batch is as the exported file on the CPU, and as that file on the provider.

    In turns and in CPU time; empty for graphs with a cache.
    """
    if find_task(task).has_cache:
        return []
    contenders = [open_sessions(exported), open_sessions(exported, provider), open_sessions(optimized, provider)]
    question = sorted(questions(find_task(task), Path(folder), contenders[0]), key=num_elements)[-1]
    runs = [partial(ask, sessions, question) for sessions in contenders]
    cpu, plain, ours = map(statistics.median, times_in_turns(runs, _TURNS, time.process_time))
    return [cpu / ours, plain / ours]


def race_peers(task: str, folder: str, files: Mapping[str, str]) -> dict[str, list[float]]:
    """Return the nodes of each file and its time as a ratio to that of the first, which is ours.

    In turns, on one thread, in CPU time, the shortest of many runs, for the smallest question and the largest.
    """
    contenders = [{"model": open_session(path, tuned=True)} for path in files.values()]
    by_size = sorted(questions(find_task(task), Path(folder), contenders[0]), key=num_elements)
    figures = {name: [float(len(onnx.load(path, load_external_data=False).graph.node))] for name, path in files.items()}
    for question in (by_size[0], by_size[-1]):
        runs = [partial(ask, sessions, question) for sessions in contenders]
        shortest = [min(times) for times in times_in_turns(runs, _PEER_TURNS, time.process_time)]
        for name, seconds in zip(files, shortest, strict=True):
            figures[name].append(seconds / shortest[0])
    return figures


def num_elements(question: Question) -> int:
    """Return the size of a question."""
    return sum(array.size for array in question.feeds.values())


def open_sessions(files: Mapping[str, str], provider: str = "cpu") -> dict[str, Any]:
    """Open graphs by their roles."""
    return {role: open_session(path, provider=provider) for role, path in files.items()}


def distance(actual: NDArray[Any], reference: NDArray[Any], least: float = 1.0) -> tuple[float, float]:
    """Return the largest difference in parts of the largest value that differs, or of `least`, and the cosine."""
    if actual.shape != reference.shape:
        return float("inf"), -1.0
    ours, theirs = actual.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) or not np.isfinite(ours[finite]).all():
        return float("inf"), -1.0
    ours, theirs = ours[finite], theirs[finite]
    # Equal values are right, and large ones among them, such as the fills of a mask, must not set the scale.
    scale = max(least, float(np.abs(theirs[ours != theirs]).max(initial=0.0)))
    ours, theirs = ours[np.abs(theirs) <= scale], theirs[np.abs(theirs) <= scale]
    norms = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    cosine = float(ours @ theirs) / norms if norms else float(np.array_equal(ours, theirs))
    return float(np.abs(ours - theirs).max(initial=0.0)) / scale, cosine
