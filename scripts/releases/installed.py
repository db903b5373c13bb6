"""The releases of onnxruntime on PyPI, each installed into a folder of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_WORKER = Path(__file__).with_name("worker.py")
_LAST_WITH_NUMPY_1 = (1, 18)
_SECONDS = 600


def order(version: str) -> tuple[int, ...]:
    """Return the numbers of a version."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Releases:
    """Releases, and the interpreter that each has a wheel for.

    Attributes:
        folder: where they are installed.
        pythons: the interpreter by version, the oldest version first.
    """

    folder: Path
    pythons: dict[str, str]

    @classmethod
    def find(cls, folder: Path, pythons: Sequence[str]) -> Releases:
        """Ask PyPI which releases have wheels for `pythons`; the first that has one runs it.

        Raises:
            SystemExit: pip of one of them does not answer.
        """
        found: dict[str, str] = {}
        for python in pythons:
            asked = [python, "-m", "pip", "index", "versions", "onnxruntime", "--disable-pip-version-check"]
            done = _run(asked)
            line = next((line for line in done.stdout.splitlines() if line.startswith("Available versions:")), None)
            if line is None:
                raise SystemExit(f"{' '.join(asked)} lists no versions:\n{done.stderr}")
            for version in line.partition(":")[2].split(","):
                found.setdefault(version.strip(), python)
        return cls(folder, {version: found[version] for version in sorted(found, key=order)})

    def first_of(self, release: str) -> str | None:
        """Return the first version of a release such as 1.18, or that version itself; None where there is none."""
        parts = order(release)
        return next((version for version in self.pythons if order(version)[: len(parts)] == parts), None)

    def before(self, version: str) -> str | None:
        """Return the version before; None before the first."""
        versions = list(self.pythons)
        place = versions.index(version)
        return versions[place - 1] if place else None

    def last_of(self, release: str) -> str:
        """Return the last version of a release."""
        return [version for version in self.pythons if order(version)[:2] == order(release)][-1]

    def ask(self, version: str, *arguments: str) -> tuple[int, str]:
        """Run the worker in a version, which is installed first, and return its exit code and errors."""
        environment = {**os.environ, "PYTHONPATH": str(self._install(version)), "OMP_WAIT_POLICY": "PASSIVE"}
        done = _run([self.pythons[version], str(_WORKER), *arguments], environment)
        return done.returncode, done.stderr

    def _install(self, version: str) -> Path:
        target = self.folder / version
        if (target / "onnxruntime").is_dir():
            return target
        packages = [f"onnxruntime=={version}", "numpy<2" if order(version)[:2] <= _LAST_WITH_NUMPY_1 else "numpy"]
        pip = [self.pythons[version], "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = _run([*pip, "--target", str(target), *packages])
        if done.returncode:
            raise SystemExit(f"onnxruntime {version} cannot be installed:\n{done.stderr}")
        return target


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS, env=environment)
