"""Run onnxruntime-training's own tests of onnxblock and the Python bindings against onnxtool.

FOLDER has the two files as onnxruntime's repository has them in orttraining/orttraining/test/python, release 1.19 or
earlier. In a copy, imports, exporter and device are replaced. Every case passes, or docs/guide/onnxruntime_training.md
lists it with the reason and, where there is one, with the text to write instead; then the case passes with that text.
The script fails if a case fails that is not listed, or if a listed one passes as it stands.

    python scripts/check_reference_tests.py FOLDER
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

TABLE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "onnxruntime_training.md"
FILES = ("orttraining_test_ort_apis_onnxblock.py", "orttraining_test_ort_apis_py_bindings.py")
# In every file: what any program that moves to onnxtool replaces.
REPLACED = {"onnxruntime.training": "onnxtool.training", 'device="cuda"': 'device="cpu"', '= "cuda"': '= "cpu"'}
# The reference reads what the old exporter of PyTorch writes.
CONFTEST = """
import functools

import torch

torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)
"""
_ROW = re.compile(r"^\| `(test_\w+)` \| (.+?) \| (?:`(.+?)`|none) \| (?:`(.+?)`|none) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Difference:
    """A row of the documentation's table: what a case has, and what it has to have instead; both None if nothing."""

    case: str
    reason: str
    old: str | None
    new: str | None


def read_differences(text: str) -> list[Difference]:
    """Return the rows of the table of cases that differ."""
    return [Difference(*match.groups()) for match in _ROW.finditer(text)]


def rewrite(source: str, differences: Iterable[Difference]) -> str:
    """Replace in the functions of these cases what the table says.

    Raises:
        ValueError: a case, or what is to be replaced in it, is not in the file.
    """
    for difference in differences:
        found = re.search(rf"^def {difference.case}\(.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
        if found is None or difference.old is None or difference.new is None or difference.old not in found.group():
            raise ValueError(f"{difference.case} has no {difference.old!r}")
        function = found.group().replace(difference.old, difference.new)
        source = source[: found.start()] + function + source[found.end() :]
    return source


def run_cases(folder: Path, selected: Iterable[str] = ()) -> dict[str, bool]:
    """Run the tests in `folder`, or the selected ones, and return by case whether it passed."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    command += ["--rootdir", str(folder), "--junitxml", str(report), "--tb", "no"]
    command += [f"{file}::{name}" for file in FILES for name in selected if _has(folder / file, name)] or FILES
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - pytest has just written it
    return {str(case.get("name")): case.find("failure") is None and case.find("error") is None for case in cases}


def judge(
    plain: Mapping[str, bool], rewritten: Mapping[str, bool], differences: Sequence[Difference]
) -> tuple[list[str], list[str]]:
    """Return the rows of a table of outcomes, and the sentences on what is wrong.

    Args:
        plain: by case, whether it passes with another import, exporter and device.
        rewritten: by case of the table with a text to write instead, whether it passes with it.
        differences: the table.
    """
    listed = {difference.case: difference for difference in differences}
    rows, wrong = [], []
    for name, passed in plain.items():
        case = name.partition("[")[0]
        if case not in listed:
            if not passed:
                wrong.append(f"{name} fails, and {TABLE.name} does not list it")
            continue
        if passed:
            wrong.append(f"{name} passes as it stands, and {TABLE.name} lists it")
        if name in rewritten:
            rows.append(f"| {name} | {'passes' if rewritten[name] else 'fails'} with the text of the table |")
            if not rewritten[name]:
                wrong.append(f"{name} fails with the text that {TABLE.name} says to write")
        else:
            rows.append(f"| {name} | differs: {listed[case].reason} |")
    missing = set(listed) - {name.partition("[")[0] for name in plain}
    wrong += [f"{TABLE.name} lists {name}, and there is no such case" for name in sorted(missing)]
    return rows, wrong


def main() -> None:
    """Run the tests, print the table, and fail where it and the documentation differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if missing := [name for name in FILES if not (options.folder / name).is_file()]:
        parser.error(f"{options.folder} has no {', '.join(missing)}")
    differences = read_differences(TABLE.read_text(encoding="utf-8"))
    with_text = [difference for difference in differences if difference.old is not None]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tests"
        shutil.copytree(options.folder, folder, copy_function=shutil.copyfile)
        (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        for name in FILES:
            source = (folder / name).read_text(encoding="utf-8")
            for old, new in REPLACED.items():
                source = source.replace(old, new)
            (folder / name).write_text(source, encoding="utf-8")
        plain = run_cases(folder)
        for name in FILES:
            here = [difference for difference in with_text if _has(folder / name, difference.case)]
            source = rewrite((folder / name).read_text(encoding="utf-8"), here)
            (folder / name).write_text(source, encoding="utf-8")
        rewritten = run_cases(folder, sorted({difference.case for difference in with_text}))
    rows, wrong = judge(plain, rewritten, differences)
    print("| case | outcome |\n|---|---|")
    print("\n".join(rows))
    changed = sum(rewritten.values())
    print(
        f"\n{len(plain)} cases: {sum(plain.values())} pass, {changed} pass with the text of the table, "
        f"{len(rows) - len(rewritten)} differ by design, {len(wrong)} are wrong"
    )
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(int(bool(wrong)))


def _has(path: Path, case: str) -> bool:
    return f"\ndef {case}(" in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
