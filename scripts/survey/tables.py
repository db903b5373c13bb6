"""The results of a survey as Markdown: a summary of each task, then a row for each type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zoo.tasks import TASKS, find_task, model_classes

from survey.optimizing import PRECISIONS

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
  bound.
- *attention*: how many of the graph's attention blocks became a single operator in the optimized file, and how many
  there are in total.
- *not tried*: an export that has not been optimized with this script yet.
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
    if any("optimized" in result for result in results.values()):
        parts += [_optimized(by_task), _not_right(results)]
    parts += [_details(name, types) for name, types in by_task.items()]
    return "\n".join(parts)


def _summary(by_task: Mapping[str, Mapping[str, Any]]) -> str:
    head = ["task", "types", "tried", "runnable", "right", "of them fixed", "refused", "wrong", "crashed", "right %"]
    rows = []
    for name, types in by_task.items():
        runnable = [result for result in types.values() if not result["runnable"].get("reason")]
        ours = [result["onnxtool"] for result in runnable if "onnxtool" in result]
        right = [tried for tried in ours if tried["verdict"] == "right"]
        counts = [sum(tried["verdict"] == verdict for tried in ours) for verdict in ("refused", "wrong", "crashed")]
        fixed = sum(bool(tried["fixed_axes"]) for tried in right)
        row = [name, len(model_classes(find_task(name))), len(types), len(runnable), len(right), fixed, *counts]
        rows.append([*row, f"{100 * len(right) / len(ours):.1f}" if ours else ""])
    return _table(head, rows)


def _optimized(by_task: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each task and one for all: verdicts of each precision, and attentions."""
    head = ["task", "right exports"]
    for precision in PRECISIONS:
        head += [f"{precision}: tried", "right", "refused", "wrong", "crashed", "right %"]
    rows = []
    whole = {f"{name}/{key}": result for name, types in by_task.items() for key, result in types.items()}
    for name, types in (*by_task.items(), ("all", whole)):
        right = [result for result in types.values() if result.get("onnxtool", {}).get("verdict") == "right"]
        row: list[Any] = [name, len(right)]
        for precision in PRECISIONS:
            verdicts = [result["optimized"][precision]["verdict"] for result in right if _tried(result, precision)]
            counts = [verdicts.count(verdict) for verdict in ("right", "refused", "wrong", "crashed")]
            row += [len(verdicts), *counts, f"{100 * counts[0] / len(verdicts):.1f}" if verdicts else ""]
        rows.append(row)
    return "## Optimization\n\n" + _table(head, rows)


def _tried(result: Mapping[str, Any], precision: str) -> bool:
    tried = result.get("optimized", {}).get(precision)
    return tried is not None and bool(tried["verdict"] != "not exported")


def _not_right(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each optimized file that is not right, or that a pass was left out of."""
    rows = []
    for key, result in sorted(results.items()):
        for precision, tried in result.get("optimized", {}).items():
            left_out = ", ".join(tried.get("left_out", ()))
            if tried["verdict"] != "right" or left_out:
                why = "; ".join(
                    filter(None, [tried["reason"], *map(tried.get("notes", {}).get, tried.get("left_out", ()))])
                )
                rows.append([key, precision, tried["verdict"], left_out, _cell(why)])
    head = ["export", "precision", "verdict", "passes left out", "why"]
    return "### Not right, or not by all passes\n\n" + _table(head, rows)


def _fused(tried: Mapping[str, Any]) -> str:
    return " of ".join(map(str, tried["attentions"])) if "attentions" in tried else ""


def _details(name: str, types: Mapping[str, Any]) -> str:
    head = ["type", "verdict", "way", "s", "why", *PRECISIONS, "attention"]
    rows = []
    for model_type, result in types.items():
        if reason := result["runnable"].get("reason"):
            rows.append([model_type, "not runnable", "", "", _cell(reason), *("" for _ in PRECISIONS), ""])
            continue
        tried = result.get("onnxtool", {"verdict": "not tried", "way": "", "seconds": "", "reason": ""})
        star = "*" if tried.get("fixed_axes") and tried["verdict"] == "right" else ""
        way = tried["way"] + "".join(f", {axis} {size}" for axis, size in (tried.get("fixed_axes") or {}).items())
        rows.append(
            [model_type, tried["verdict"] + star, way, tried["seconds"], _cell(tried["reason"]), *_after(result)]
        )
    return f"## {name}\n\n" + _table(head, rows)


def _after(result: Mapping[str, Any]) -> list[str]:
    """Return the cells of an export's optimized files."""
    if result.get("onnxtool", {}).get("verdict") != "right":
        return [""] * (len(PRECISIONS) + 1)
    tried = result.get("optimized", {})
    verdicts = [tried[precision]["verdict"] if precision in tried else "not tried" for precision in PRECISIONS]
    return [*verdicts, _fused(tried.get("fp32", {}))]


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    text = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", text)  # whose folders they are is nobody's business
    short = text if len(text) <= 160 else f"{text[:159]}…"
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
