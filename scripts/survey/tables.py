"""The results of a survey as Markdown: a summary of each task, then a row for each type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from zoo.tasks import TASKS, model_classes

from survey.judging import PRECISIONS

_INTRODUCTION = """# Coverage

Every model type that transformers {version} lists for a task was tried as a tiny model with random weights. The command
line exports it with its own verification enabled, and an independent program judges the result: PyTorch and onnxruntime
on the same inputs, with several batches, lengths or sizes, padded on either side, within 1e-4 of the largest value.

- *runnable*: a small model of the type can be built, saved, loaded, and run in PyTorch on its processor's output, and
  two runs give the same result.
- *right*: the file matches PyTorch on all cases; with an asterisk, with an axis that the export fixed and reported.
- *refused*: an error, and no file. *wrong*: a file that differs, or that fails where PyTorch runs. *crashed*: an error
  that is not onnxtool's, or a timeout or memory limit.
- *fp32*, *int8*: the file after `onnxtool optimize` in that precision, compared with the exported file on the judge's
  own inputs. The fp32 file must be within 1e-4 of the largest value; the int8 file must have a cosine of at least
  0.97 on random ids. *refused*: no file. int8 is refused if the weights, which are random here, do not meet its error
  bound. bf16, which another provider than the CPU's multiplies in, must have a cosine of at least 0.999. Two
  numbers such as 1.90x, 1.02x are the times of the exported file on the CPU and on the provider, as ratios to that of
  the optimized one on the provider.
- *attention*: how many of the graph's attention blocks became a single operator in the optimized file, and how many
  there are in total.
"""
_VERDICTS = ("right", "refused", "wrong", "crashed")
Results = Mapping[str, Mapping[str, Any]]


def render(results: Results) -> str:
    """Return the page for results by `task/type`."""
    by_task = {
        task: {key.partition("/")[2]: results[key] for key in sorted(results) if key.startswith(f"{task.name}/")}
        for task in TASKS
    }
    tried_in = {name for result in results.values() for name in result.get("optimized", {})}
    precisions = [name for name in PRECISIONS if name in tried_in]
    summary, optimized = [], []
    for task, types in by_task.items():
        tried = [result["onnxtool"] for result in types.values() if "onnxtool" in result]
        right, *others = _counts(tried)
        fixed = sum(bool(one["fixed_axes"]) for one in tried if one["verdict"] == "right")
        counts = [task.name, len(model_classes(task)), len(types), len(tried), right, fixed, *others]
        summary.append([*counts, _share(right, len(tried))])
        optimized.append(_optimized(task.name, types, precisions))
    columns = [f"{precision}: tried | right | refused | wrong | crashed | right %" for precision in precisions]
    parts = [
        _INTRODUCTION.format(version=transformers.__version__),
        _table(
            "task | types | tried | runnable | right | of them fixed | refused | wrong | crashed | right %", summary
        ),
        "## Optimization\n",
        _table(" | ".join(["task", "right exports", *columns]), [*optimized, _optimized("all", results, precisions)]),
    ]
    for task, types in by_task.items():
        head = f"type | verdict | way | s | why | {' | '.join(precisions)} | attention"
        parts += [f"## {task.name}\n", _table(head, [_details(*one, precisions) for one in types.items()])]
    return "\n".join(parts)


def _counts(tried: Sequence[Mapping[str, Any]]) -> list[int]:
    return [sum(one["verdict"] == verdict for one in tried) for verdict in _VERDICTS]


def _share(right: int, whole: int) -> str:
    return f"{100 * right / whole:.1f}" if whole else ""


def _optimized(name: str, results: Results, precisions: Sequence[str]) -> list[Any]:
    """Return the row of a task, or of all: verdicts of each precision."""
    right = [result["optimized"] for result in results.values() if "optimized" in result]
    row: list[Any] = [name, len(right)]
    for precision in precisions:
        counts = _counts([tried[precision] for tried in right])
        row += [len(right), *counts, _share(counts[0], len(right))]
    return row


def _details(model_type: str, result: Mapping[str, Any], precisions: Sequence[str]) -> list[Any]:
    """Return the row of a type, with the reasons of what is not right, speeds, and passes that were left out."""
    if reason := result["not_runnable"]:
        return [model_type, "not runnable", "", "", _cell(reason), *("" for _ in precisions), ""]
    tried, optimized = result["onnxtool"], result.get("optimized", {})
    star = "*" if tried["fixed_axes"] and tried["verdict"] == "right" else ""
    way = tried["way"] + "".join(f", {axis} {size}" for axis, size in tried["fixed_axes"].items())
    verdicts = []
    for precision in precisions:
        one = optimized.get(precision, {"verdict": "", "reason": ""})
        left_out = [f"without {name}: {note}" for name, note in one.get("left_out", {}).items()]
        speeds = [", ".join(f"{speed:.2f}x" for speed in one.get("speeds", ()))]
        verdicts.append(_cell("; ".join(filter(None, [one["verdict"], one["reason"], *speeds, *left_out]))))
    attention = " of ".join(map(str, optimized.get("fp32", {}).get("attentions", ())))
    return [model_type, tried["verdict"] + star, way, tried["seconds"], _cell(tried["reason"]), *verdicts, attention]


def _table(head: str, rows: list[list[Any]]) -> str:
    lines = [f"| {head} |", f"| {' | '.join('---' for _ in head.split('|'))} |"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _cell(text: str) -> str:
    text = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", text)  # whose folders they are is nobody's business
    short = text if len(text) <= 160 else f"{text[:159]}…"
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
