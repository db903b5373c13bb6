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
    """Replace in the functions of these cases, as far as the file has them, what the table says.

    Raises:
        ValueError: what is to be replaced is not in a case.
    """
    for difference in differences:
        found = re.search(rf"^def {difference.case}\(.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
        if found is None:
            continue
        if difference.old is None or difference.new is None or difference.old not in found.group():
            raise ValueError(f"{difference.case} has no {difference.old!r}")
        function = found.group().replace(difference.old, difference.new)
        source = source[: found.start()] + function + source[found.end() :]
    return source


def run_cases(folder: Path) -> dict[str, bool]:
    """Run the tests in `folder`, and return by case whether it passed."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    command += ["--rootdir", str(folder), "--junitxml", str(report), "--tb", "no", *FILES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - pytest has just written it
    return {str(case.get("name")): case.find("failure") is None and case.find("error") is None for case in cases}


def judge(plain: Mapping[str, bool], rewritten: Mapping[str, bool], differences: Sequence[Difference]) -> list[str]:
    """Return the sentences on what is wrong.

    Args:
        plain: by case, whether it passes with another import, exporter and device.
        rewritten: the same with what the table says to write instead.
        differences: the table.
    """
    listed = {difference.case: difference for difference in differences}
    wrong = []
    for name, passed in plain.items():
        difference = listed.get(name.partition("[")[0])
        if difference is None:
            wrong += [] if passed else [f"{name} fails, and {TABLE.name} does not list it"]
        elif passed:
            wrong.append(f"{name} passes as it stands, and {TABLE.name} lists it")
        elif difference.old is not None and not rewritten[name]:
            wrong.append(f"{name} fails with the text that {TABLE.name} says to write")
    missing = set(listed) - {name.partition("[")[0] for name in plain}
    return wrong + [f"{TABLE.name} lists {name}, and there is no such case" for name in sorted(missing)]


def main() -> None:
    """Run the tests, and fail where they and the documentation differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if missing := [name for name in FILES if not (options.folder / name).is_file()]:
        parser.error(f"{options.folder} has no {', '.join(missing)}")
    differences = read_differences(TABLE.read_text(encoding="utf-8"))
    with_text = [difference for difference in differences if difference.old is not None]
    sources = {name: (options.folder / name).read_text(encoding="utf-8") for name in FILES}
    for old, new in REPLACED.items():
        sources = {name: source.replace(old, new) for name, source in sources.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tests"
        shutil.copytree(options.folder, folder, copy_function=shutil.copyfile)
        (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        for name, source in sources.items():
            (folder / name).write_text(source, encoding="utf-8")
        plain = run_cases(folder)
        for name, source in sources.items():
            (folder / name).write_text(rewrite(source, with_text), encoding="utf-8")
        rewritten = run_cases(folder)
    wrong = judge(plain, rewritten, differences)
    passed, changed = sum(plain.values()), sum(rewritten.values()) - sum(plain.values())
    print(
        f"{len(plain)} cases: {passed} pass, {changed} pass with the text of the table, "
        f"{len(plain) - passed - changed} differ by design, {len(wrong)} are wrong"
    )
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(int(bool(wrong)))


if __name__ == "__main__":
    main()
