"""Install the wheel in dist/ by its metadata alone, into empty environments, run it there, and check both packages.

Run `make dist`, then `python scripts/check_install.py`. Packages come from the index that pip is set up with; `--torch
torch==2.13.0+cpu` asks for a build of PyTorch. The sizes are printed as rows of the table in docs/guide/install.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from harness.pages import print_row
from make_models import ROOT, make_model

from onnxtool.version import DISTRIBUTION

_OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


class Environment:
    """An environment of its own, with what pip installs for `requirements`."""

    def __init__(self, folder: Path, requirements: Sequence[str]) -> None:
        venv.create(folder, with_pip=True)
        self.folder, self.scripts = folder, folder / ("Scripts" if sys.platform == "win32" else "bin")
        before = self._size_bytes()
        subprocess.run([self.scripts / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)
        subprocess.run([self.scripts / "python", "-m", "pip", "check"], check=True)
        self.size_bytes = self._size_bytes() - before

    def _size_bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if path.is_file())

    def run(self, *arguments: str, code: int = 0, says: str = "") -> None:
        """Run onnxtool in the folder above the environment.

        Raises:
            SystemExit: it ends with another code, or does not say that.
        """
        done = subprocess.run(
            [self.scripts / "onnxtool", *arguments],
            cwd=self.folder.parent,
            env=_OFFLINE,
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"{self.folder.name}: onnxtool {' '.join(arguments)}: exit code {done.returncode}", flush=True)
        if done.returncode != code or says not in done.stdout + done.stderr:
            raise SystemExit(f"{done.stdout}{done.stderr}\nexpected: exit code {code}, and {says!r}")


def main() -> int:
    """Install, run and measure; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="torch", help="requirement of PyTorch, e.g. torch==2.13.0+cpu")
    torch = parser.parse_args().torch
    packages = sorted((ROOT / "dist").glob("onnxtool_cli-*"))
    (wheel,) = (path for path in packages if path.suffix == ".whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model("tiny-splade", folder)
        full = Environment(folder / "full", [f"{wheel}[export]", torch])
        full.run("export", "tiny-splade", "--output", "model.onnx", says="Verified: model.onnx")
        small = Environment(folder / "small", [str(wheel)])
        for environment in (full, small):
            environment.run("--version", says="onnxtool, version ")
            environment.run("stats", "model.onnx", says="Number of nodes")
            environment.run("infer", "model.onnx", "--text", "a cat", says="1.")
        small.run("infer", "model.onnx", "--benchmark", "--runs", "5")
        small.run("optimize", "model.onnx", "--output", "fast.onnx", says="Verified: fast.onnx")
        small.run("export", "tiny-splade", "--force", code=1, says=f"pip install '{DISTRIBUTION}[export]'")
        twine = Environment(folder / "twine", ["twine"])
        subprocess.run([twine.scripts / "twine", "check", "--strict", *packages], check=True)
    for requirement, environment in ((DISTRIBUTION, small), (f"{DISTRIBUTION}[export]", full)):
        print_row(f"`pip install '{requirement}'`", f"{environment.size_bytes / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
