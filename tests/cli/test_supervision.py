"""A command whose process dies says so: on Linux it runs in a child, and the parent ends with 0, 1 or 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

if sys.platform != "linux":
    pytest.skip("supervision is for Linux", allow_module_level=True)

from tests.hostile.gadgets import splice
from tests.hostile.seeds import by_hand

START = "import os, signal, sys, time\nfrom onnxtool.cli.supervision import supervised\n"


def run(command: str, before: str = "") -> subprocess.Popen[str]:
    """Start a process in which `command` is supervised."""
    code = f"{START}{before}def command():\n    {command}\n    return 2\nsys.exit(supervised(command))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(command: str, before: str = "") -> subprocess.Popen[str]:
    """Start a process in which `command` is supervised, and wait until it says that it is ready."""
    process = run(command, before)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def is_running(process: int) -> bool:
    """Return whether the process is there, and not only its exit code."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_exit_code_is_the_childs() -> None:
    """And so is what it prints."""
    process = run("print('done', flush=True)")
    assert process.communicate() == ("done\n", "")
    assert process.returncode == 2


def test_a_library_that_does_not_survive_the_end_of_python_changes_no_exit_code() -> None:
    """As threads of obstore, which abort after everything is done; what is registered for the end still runs."""
    before = (
        "import atexit\natexit.register(print, 'first of all')\nsys.modules['obstore'] = sys\n"
        "class Thread:\n    def __del__(self):\n        os.abort()\nthread = Thread()\n"
    )
    process = run("atexit.register(print, 'last'); print('done')", before=before)
    assert process.communicate() == ("done\nlast\nfirst of all\n", "")
    assert process.returncode == 2


def test_what_libraries_print_is_not_ahead_of_an_error() -> None:
    """Panics of Rust and aborts of C++ print to the descriptor, which `-v` shows; Python's own stderr stays."""
    prints = "os.write(2, b'panicked'); warnings.warn('odd'); print('error: one', file=sys.stderr)"
    assert run(prints, before="import warnings\n").communicate() == ("", "error: one\n")
    shown = run(prints, before="import warnings\nsys.argv = ['', '-v']\n").communicate()[1]
    assert shown.startswith("panicked")
    assert "odd" in shown
    assert shown.endswith("error: one\n")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSEGV, "a library died on the input (SIGSEGV)"),
        (signal.SIGFPE, "a library died on the input (SIGFPE)"),
        (signal.SIGKILL, "the command was killed (SIGKILL): the machine ran out of memory, or someone killed it"),
    ],
)
def test_a_death_is_one_error(number: signal.Signals, said: str) -> None:
    """With exit code 1 and a way out."""
    process = run(f"os.kill(os.getpid(), {int(number)})")
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr.startswith(f"error: {said}")
    assert stderr.count("error:") == 1
    assert "hint:" in stderr


def test_a_death_leaves_nothing_that_was_being_written(tmp_path: Path) -> None:
    """As a machine out of memory ends it: the process that waits removes what the command staged."""
    before = "from pathlib import Path\nfrom onnxtool.model_file.commits import CommitFolder\n"
    before += f"root = Path({str(tmp_path)!r})\n"
    staging = "folder = CommitFolder(root, 'model.onnx'); folder.make(); (folder.files / 'model.onnx').touch()"
    process = run(f"{staging}; print(len([*root.iterdir()]), flush=True); os.kill(os.getpid(), 9)", before=before)
    stdout, stderr = process.communicate()
    assert stdout == "1\n"
    assert "no output was replaced" in stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "error: interrupted\n"),
        (signal.SIGTERM, "error: interrupted by SIGTERM\n"),
        (signal.SIGHUP, "error: interrupted by SIGHUP\n"),
    ],
)
def test_a_signal_is_one_line(number: signal.Signals, line: str) -> None:
    """The command unwinds, and what it prints from then on is dropped, whatever it ends with."""
    process = started("print('ready', flush=True); time.sleep(60)")
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("", line)
    assert process.returncode == 128 + number


def test_a_signal_that_a_destructor_drops_is_sent_again() -> None:
    """Python prints an exception of a destructor, and goes on."""
    process = started(
        "Slow().end(); time.sleep(60)",
        before="import onnxtool.cli.supervision as own\nown._AGAIN_SECONDS = 0.2\nclass Slow:\n"
        "    def end(self): pass\n    def __del__(self): print('ready', flush=True); time.sleep(60)\n",
    )
    process.terminate()
    assert process.communicate(timeout=30) == ("", "error: interrupted by SIGTERM\n")


def test_a_signal_is_one_line_where_python_collects_what_libraries_print() -> None:
    """Then sys.stderr has no descriptor, and the child's own is silenced all the same."""
    process = started(
        "quiet().__enter__(); print('ready', file=sys.__stdout__, flush=True)\n    try: time.sleep(60)\n"
        "    except KeyboardInterrupt: os.write(max(own._spoken), b'said')",
        before="import onnxtool.cli.supervision as own\nfrom onnxtool.runtime.quiet import quiet\n",
    )
    process.terminate()
    assert process.communicate() == ("", "error: interrupted by SIGTERM\n")


def test_a_command_started_by_nohup_goes_on() -> None:
    """`nohup` ignores SIGHUP before it starts the command."""
    process = started(
        "print('ready', flush=True); time.sleep(0.3)", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    )
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 2


def test_a_command_that_hears_no_signal_is_killed_after_some_seconds(tmp_path: Path) -> None:
    """Python handles a signal between two instructions, and a library in C++ may not come back to the next."""
    process = started(
        "folder.make(); signal.signal(signal.SIGRTMIN, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
        before="import onnxtool.cli.supervision as own\nfrom pathlib import Path\n"
        "from onnxtool.model_file.commits import CommitFolder\nown._GRACE_SECONDS = 0.2\n"
        f"folder = CommitFolder(Path({str(tmp_path)!r}), 'm.onnx')\n",
    )
    assert list(tmp_path.iterdir())
    process.terminate()
    line = "error: interrupted by SIGTERM, and killed as it did not end within 0 s\n"
    assert process.communicate() == ("", line)
    assert process.returncode == 143
    assert not list(tmp_path.iterdir())


def test_the_command_is_killed_with_its_parent() -> None:
    """Nobody waits for it any more."""
    process = run("print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_graph_that_traps_in_the_middle_of_a_benchmark_is_one_error(tmp_path: Path) -> None:
    """-2^63 / -1 of values that nothing can foresee."""
    model = by_hand()["mlp"]
    splice(model, "Div of the least int64 on a value", "x", "h_")
    onnx.save(model, tmp_path / "model.onnx")
    command = [sys.executable, "-m", "onnxtool", "infer", "--model_path", "model.onnx", "--benchmark", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: a library died on the input (SIGFPE)")
