"""Follow README and the start guide as a newcomer does: in a fresh clone, with an empty home, in order, twice.

`python scripts/follow_documents.py` clones the repository, runs `make demo` there, which installs everything, and then
each command and program of the two documents with the environment active. Prints a line for each with its exit code and
time, and ends with 1 if one failed. Needs Git, the index of packages, and 7 GB of disk for the clone's environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from tests.docs.documents import blocks  # noqa: E402

_DOCUMENTS = ("README.md", "docs/guide/start.md")
_KEPT = ("PATH", "LANG", "SSL_", "PIP_")  # beginnings of the names of variables; a newcomer has set nothing else


def _steps(document: Path) -> list[list[str]]:
    """Return the commands that a document shows with their output, and its program."""
    commands = [["bash", "-c", block.text.splitlines()[0].removeprefix("$ ")] for block in blocks(document, "console")]
    program = "\n".join(block.text for block in blocks(document, "python"))
    return [*commands, *([["python", "-c", program]] if program else [])]


def _run(step: list[str], folder: Path, variables: dict[str, str]) -> bool:
    began = time.perf_counter()
    done = subprocess.run(step, cwd=folder, env=variables, capture_output=True, encoding="utf-8", check=False)
    what = "the program" if step[0] == "python" else step[-1]
    print(f"{done.returncode}  {time.perf_counter() - began:6.1f} s  {what}", flush=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.returncode == 0


def main() -> int:
    """Follow the documents, and return 1 where a step failed."""
    with tempfile.TemporaryDirectory() as base:
        home, clone = Path(base, "home"), Path(base, "onnxtool")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(clone)], check=True)  # noqa: S607
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        active = {**kept, "HOME": str(home), "PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        passed = [_run(["bash", "-c", "make demo"], clone, {**kept, "HOME": str(home)})]
        for document in 2 * _DOCUMENTS:
            print(document)
            passed += [_run(step, clone, active) for step in _steps(clone / document)]
    print(f"{passed.count(True)} of {len(passed)} steps succeeded")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
