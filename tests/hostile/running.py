"""Run a command on a hostile case within limits of time and memory, and judge how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.surroundings import Case

MAX_SECONDS, MAX_EXPORT_SECONDS = 20, 90  # of processor time; an export runs PyTorch on all cases as well
_PATIENCE = 3  # times as much of wall time
MAX_BYTES = 1 << 30  # of memory that a process may have for itself
MAX_STDERR = 10_000  # characters; a log is not asked for
ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# What may stand ahead of an error.
_LOG = re.compile(r"\d{4}-\d\d-\d\d .*|note: .*|hint: .*|warning: .*|.* …( [\d:]+ left)?|")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (below 0 the signal that ended it), seconds, and what it wrote to stderr."""

    code: int
    seconds: float
    stderr: str
    is_late: bool = False
    changed: str = ""  # a file that the command had no business with
    is_mute: bool = False  # without stderr

    @property
    def fault(self) -> str:
        """Say what a user could not accept; empty where the command ended as it should."""
        if self.is_late:
            return f"took more than its time: {self.seconds:.0f} s of the processor, or waited"
        if self.code not in (0, 1, 2):
            return f"ended with {self.code}"
        if "Traceback" in self.stderr:
            return "printed a traceback"
        if len(self.stderr) > MAX_STDERR:
            return f"wrote {len(self.stderr)} characters to stderr"
        lines = self.stderr.splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error:")]
        if len(errors) != (self.code != 0) and not self.is_mute:
            return f"ended with {self.code} and {len(errors)} errors"
        if ahead := [line for line in lines[: sum(errors)] if not _LOG.fullmatch(line)]:
            return f"printed {ahead[0][:80]!r} ahead of its error"
        return f"wrote or removed {self.changed}" if self.changed else ""


def run_command(case: Case, folder: Path) -> Ended:
    """Run the command of a case in `folder`, within limits of time and memory."""
    most = MAX_EXPORT_SECONDS if case.command[0] == "export" else MAX_SECONDS
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_DATA: MAX_BYTES, resource.RLIMIT_CPU: most, **case.limits}

    def limit() -> None:
        for number in case.closed:
            os.close(number)
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))

    home, temporary = folder / ".home", folder / ".tmp"
    home.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    given = {
        **os.environ,
        **VARIABLES,
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "TMPDIR": str(temporary),
        **case.variables,
    }
    before, start = _contents(folder), time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxtool", *case.command], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, preexec_fn=limit,
            env={name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
        while True:
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - start > _PATIENCE * most:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError):  # what it left running
            os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        text = errors.read(10 * MAX_STDERR).decode(errors="replace")
    wall, busy = time.monotonic() - start, used.ru_utime + used.ru_stime
    is_late = wall > _PATIENCE * most or busy > most
    is_mute = 2 in case.closed or resource.RLIMIT_FSIZE in case.limits  # stderr is a file here
    return Ended(code, busy, text, is_late, _unasked(case, code, before, _contents(folder)), is_mute)


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file in a folder."""
    found = {str(path.relative_to(folder)): (path.is_dir(), path.lstat()) for path in folder.rglob("*")}
    return {
        name: (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
        for name, (is_folder, status) in found.items()
    }


def _unasked(case: Case, code: int, before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return a file that a command changed, and should not have; its output is its own where it succeeds."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or name.startswith((".home/.cache/onnxtool", "out-cache", "out.parts")):
            continue
        is_its_own = name.startswith("out") and (code == 0 or case.command[:2] == ("encode", "run"))
        is_left_by_a_run = ".partial" in name and name in before and name not in after
        if not (is_its_own or is_left_by_a_run):
            return name
    return ""
