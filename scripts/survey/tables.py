"""The results of a survey as Markdown: a summary of each task, then a row for each type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from harness.pages import markdown_row, replace
from zoo.tasks import TASKS, model_classes

from survey.judging import PRECISIONS

# What the columns mean stands in the documentation, for the precisions of its table.
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
_OTHERS = """
bf16, which another provider than the CPU's multiplies in, must have a cosine of at least 0.999. Two numbers such as
1.90x, 1.02x are the times of the exported file on the CPU and on the provider, as ratios to that of the optimized one
on the provider.
"""
_NEXT_TO_PEERS = """
Nodes, and the time on one thread as a ratio to that of onnxtool's file, with the smallest and the largest inputs.
"""
PEERS = ("onnxtool", "plain", "onnxruntime", "onnxslim")
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
        fixed = sum(bool(export["fixed_axes"]) for export in tried if export["verdict"] == "right")
        counts = [task.name, len(model_classes(task)), len(types), len(tried), right, fixed, *others]
        summary.append([*counts, _share(right, len(tried))])
        optimized.append(_optimized(task.name, types, precisions))
    columns = [f"{precision}: tried | right | refused | wrong | crashed | right %" for precision in precisions]
    introduction = _PAGE.read_text(encoding="utf-8").partition("\n| task")[0]
    parts = [
        replace(introduction, r"(?<= that transformers )\S+(?= lists)", transformers.__version__) + _OTHERS,
        _table(
            "task | types | tried | runnable | right | of them fixed | refused | wrong | crashed | right %", summary
        ),
        "## Optimization\n",
        _table(" | ".join(["task", "right exports", *columns]), [*optimized, _optimized("all", results, precisions)]),
    ]
    raced = [(key, peers) for key, result in sorted(results.items()) if (peers := _peers_of(result))]
    if raced:
        rows = [_row_of_peers(key, peers) for key, peers in raced]
        parts += ["## Compared with peers\n", _NEXT_TO_PEERS, _table(" | ".join(["type", *PEERS]), rows)]
    for task, types in by_task.items():
        head = f"type | verdict | way | s | why | {' | '.join(precisions)} | attention"
        parts += [f"## {task.name}\n", _table(head, [_details(*item, precisions) for item in types.items()])]
    return "\n".join(parts)


def _counts(tried: Sequence[Mapping[str, Any]]) -> list[int]:
    return [sum(result["verdict"] == verdict for result in tried) for verdict in _VERDICTS]


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
        outcome = optimized.get(precision, {"verdict": "", "reason": ""})
        left_out = [f"without {name}: {note}" for name, note in outcome.get("left_out", {}).items()]
        speeds = [", ".join(f"{speed:.2f}x" for speed in outcome.get("speeds", ()))]
        verdicts.append(_cell("; ".join(filter(None, [outcome["verdict"], outcome["reason"], *speeds, *left_out]))))
    attention = " of ".join(map(str, optimized.get("fp32", {}).get("attentions", ())))
    return [model_type, tried["verdict"] + star, way, tried["seconds"], _cell(tried["reason"]), *verdicts, attention]


def _peers_of(result: Mapping[str, Any]) -> Any:
    return result.get("optimized", {}).get("fp32", {}).get("peers")


def _row_of_peers(key: str, peers: Mapping[str, Any]) -> list[Any]:
    """Return nodes of each file, and its times as ratios to those of ours, or the reason why there is no file."""
    cells = []
    for name in PEERS:
        figures = peers.get(name, "")
        cells.append(
            _cell(figures) if isinstance(figures, str) else f"{figures[0]:.0f}, {figures[1]:.2f}x, {figures[2]:.2f}x"
        )
    return [key, *cells]


def _table(head: str, rows: list[list[Any]]) -> str:
    columns = head.split(" | ")
    return "".join(f"{markdown_row(row)}\n" for row in (columns, ["---"] * len(columns), *rows))


def _cell(text: str) -> str:
    text = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", text)  # without the folders of this machine
    short = text if len(text) <= 160 else f"{text[:159]}…"
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
