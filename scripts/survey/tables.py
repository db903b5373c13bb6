"""The results of a survey as Markdown: a summary of each task, then a row for each type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from zoo.tasks import TASKS, find_task, model_classes

_TOOLS = {"onnxtool": "onnxtool", "exporters": "transformers.exporters", "optimum": "optimum-onnx"}
_NOT_RUN = "not run"
_INTRODUCTION = """# Coverage

Made by `make coverage` (scripts/coverage.py); not edited by hand.

Every model type that transformers {version} lists for a task, as a tiny model with random weights, exported by the
command line with its own verification on, and judged by a program that shares nothing with it: PyTorch and onnxruntime
on the same inputs, several batches, lengths or sizes, padded on either side, within 1e-4 of the largest value.

- *runnable*: a small model of the type can be built, saved, loaded, and run by PyTorch on what its processor gives,
  with the same answer twice.
- *right*: the file gives PyTorch's answers on all cases; with an asterisk, with an axis that the export fixed and said.
- *refused*: an error, and no file. *wrong*: a file that differs, or that fails where PyTorch runs. *crashed*: no error
  of its own, or out of time or memory. *none*, of a peer: refused or crashed.
- *not run*: a peer that nobody has run on this yet, which says nothing about it. *unjudged*: its file takes inputs that
  the task does not have, or the judge does not load the checkpoint in the peer's own version of transformers.
"""


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page for results by `task/type`."""
    import transformers

    by_task = {
        task.name: {
            key.split("/", 1)[1]: result for key, result in sorted(results.items()) if key.startswith(f"{task.name}/")
        }
        for task in TASKS
    }
    by_task = {name: types for name, types in by_task.items() if types}
    parts = [_INTRODUCTION.format(version=transformers.__version__), _summary(by_task)]
    parts += [_details(name, types) for name, types in by_task.items()]
    return "\n".join(parts)


def _summary(by_task: Mapping[str, Mapping[str, Any]]) -> str:
    tools = _tools(result for types in by_task.values() for result in types.values())
    head = ["task", "types", "tried", "runnable", "right", "of them fixed", "refused", "wrong", "crashed", "right %"]
    head += [f"{_TOOLS[tool]}: right, wrong, none" for tool in tools if tool != "onnxtool"]
    rows = []
    for name, types in by_task.items():
        runnable = [result for result in types.values() if not result["runnable"].get("reason")]
        ours = [result["onnxtool"] for result in runnable if "onnxtool" in result]
        right = [tried for tried in ours if tried["verdict"] == "right"]
        counts = [sum(tried["verdict"] == verdict for tried in ours) for verdict in ("refused", "wrong", "crashed")]
        fixed = sum(bool(tried["fixed_axes"]) for tried in right)
        row = [name, len(model_classes(find_task(name))), len(types), len(runnable), len(right), fixed, *counts]
        row.append(f"{100 * len(right) / len(ours):.1f}" if ours else "")
        for tool in tools:
            if tool != "onnxtool":
                verdicts = [result[tool]["verdict"] for result in runnable if tool in result]
                row.append(_counts(verdicts, len(runnable)))
        rows.append(row)
    return _table(head, rows)


def _counts(verdicts: list[str], runnable: int) -> str:
    """Return how many are right, wrong and without a file, and of how many where that is not all of them."""
    if not verdicts:
        return _NOT_RUN
    right, wrong = verdicts.count("right"), verdicts.count("wrong")
    judged = len(verdicts) - verdicts.count("unjudged")
    part = "" if judged == runnable else f" (of {judged})"
    return f"{right}, {wrong}, {judged - right - wrong}{part}"


def _details(name: str, types: Mapping[str, Any]) -> str:
    tools = [tool for tool in _tools(types.values()) if tool != "onnxtool"]
    head = ["type", "verdict", "way", "s", "why", *(_TOOLS[tool] for tool in tools)]
    rows = []
    for model_type, result in types.items():
        if result["runnable"].get("reason"):
            rows.append([model_type, "not runnable", "", "", _cell(result["runnable"]["reason"]), *("" for _ in tools)])
            continue
        tried = result.get("onnxtool", {"verdict": "not tried", "way": "", "seconds": "", "reason": ""})
        star = "*" if tried.get("fixed_axes") and tried["verdict"] == "right" else ""
        fixed = "".join(f", {axis} {size}" for axis, size in (tried.get("fixed_axes") or {}).items())
        verdict, way = tried["verdict"] + star, tried["way"] + fixed
        peers = [result[tool]["verdict"] if tool in result else _NOT_RUN for tool in tools]
        rows.append([model_type, verdict, way, tried["seconds"], _cell(tried["reason"]), *peers])
    return f"## {name}\n\n" + _table(head, rows)


def _tools(results: Iterable[Mapping[str, Any]]) -> list[str]:
    present = {tool for result in results for tool in result}
    return [tool for tool in _TOOLS if tool in present]


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    text = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", text)  # whose folders they are is nobody's business
    short = text if len(text) <= 160 else f"{text[:159]}…"
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
