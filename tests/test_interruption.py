"""A signal ends a command with one line and 128 plus its number; what was there stays, and nothing half remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from onnxtool import interruption
from onnxtool.model_file import staged
from tests.cli.entry_point import run_process
from tests.hostile.gadgets import splice
from tests.hostile.seeds import by_hand
from tests.workshop import Workshop

if sys.platform == "win32":
    pytest.skip("signals of POSIX", allow_module_level=True)

# A shell's background jobs and nohup start processes that ignore signals.
START = (
    "import os, signal, sys, time\nfor name in ('SIGINT', 'SIGTERM', 'SIGHUP'):\n"
    "    number = getattr(signal, name, None)\n"
    "    if number and signal.getsignal(number) == signal.SIG_IGN: signal.signal(number, signal.SIG_DFL)\n"
    "from onnxtool import cli\nfrom onnxtool.cli import entry\n"
)


def run(command: str, before: str = "") -> subprocess.Popen[str]:
    """Start a process that runs `command` as onnxtool runs one."""
    code = (
        f"{START}{before}def command(arguments):\n    {command}\n    return 2\nentry.run_arguments = command\ncli.run()"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(command: str, before: str = "") -> subprocess.Popen[str]:
    """Start such a process, and wait until it says that it is ready."""
    process = run(command, before)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_signal_waits_for_the_import_of_pytorch() -> None:
    """Its C++ calls Python meanwhile, and would abort the process at an exception."""
    imports = (
        "import importlib.machinery as machinery, types\ntorch = types.ModuleType('torch')\n"
        "torch.__spec__ = machinery.ModuleSpec('torch', None)\ntorch.__spec__._initializing = True\n"
        "sys.modules['torch'] = torch\n"
    )
    command = "time.sleep(0.5); print('imported', flush=True); torch.__spec__._initializing = False; time.sleep(30)"
    process = started(f"print('ready', flush=True); {command}", imports)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=8) == ("imported\n", "error: interrupted\n")  # in less than the grace
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "error: interrupted\n"),
        (signal.SIGTERM, "error: interrupted by SIGTERM\n"),
        (signal.SIGHUP, "error: interrupted by SIGHUP\n"),
    ],
)
def test_a_signal_is_one_line(number: signal.Signals, line: str) -> None:
    """The command unwinds, what it prints from then on is dropped, and only the first of several signals counts."""
    process = started(
        "print('ready', flush=True)\n    try: time.sleep(60)\n    finally: print('x', file=sys.stderr); time.sleep(0.2)"
    )
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("", line)
    assert process.returncode == 128 + number


def test_a_signal_before_the_first_import_is_one_line() -> None:
    """It waits until it is handled."""
    code = (
        "import os, sys\nfrom onnxtool import cli\nclass Finder:\n    def find_spec(self, name, *_):\n"
        "        if name == 'onnxtool.interruption': os.kill(os.getpid(), 15)\n"
        "sys.meta_path.insert(0, Finder())\ncli.run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "error: interrupted by SIGTERM\n")


def test_the_first_of_two_signals_that_wait_counts() -> None:
    """Here for a function in C; Python calls the handler of the lower number first."""
    process = run(
        "kill.start(); hashlib.pbkdf2_hmac('sha256', b'x', b'x', 3 * 10**6)",
        "import hashlib, threading\ndef both():\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\nkill = threading.Timer(0.1, both)\n",
    )
    assert process.communicate() == ("", "error: interrupted by SIGTERM\n")


def test_a_command_started_by_nohup_goes_on() -> None:
    """`nohup` ignores SIGHUP before it starts the command."""
    process = started("print('ready', flush=True); time.sleep(0.3)", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    process.send_signal(signal.SIGHUP)
    assert process.communicate() == ("", "")
    assert process.returncode == 2


def test_a_command_that_does_not_stop_is_ended_after_some_seconds(tmp_path: Path) -> None:
    """Python handles a signal between two instructions, and a library may not come back to the next."""
    process = run(
        "make.__enter__(); print(len(os.listdir(folder)), flush=True); kill.start(); hashlib.pbkdf2_hmac(*endless)",
        f"import hashlib, pathlib, threading\nfolder = {str(tmp_path)!r}\n"
        "from onnxtool import interruption\nfrom onnxtool.model_file import scratch_folder\n"
        "interruption.GRACE_S = 0.2\nmake = scratch_folder(pathlib.Path(folder, 'm.onnx'))\n"
        "endless = 'sha256', b'x', b'x', 10**9\nkill = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))\n",
    )
    line = "error: interrupted by SIGTERM\n"
    assert process.communicate() == ("1\n", line)
    assert process.returncode == 143
    assert not list(tmp_path.iterdir())


def test_a_signal_that_a_destructor_drops_is_raised_again_and_leaves_nothing(tmp_path: Path) -> None:
    """Python prints an exception of a destructor, and goes on; the earlier result stays all the same."""
    (tmp_path / "m.onnx").write_text("earlier")
    process = started(
        "\n    with staged(path, force=True) as to, temporary_folder():\n        to.model_path.write_text('later')\n"
        "        Slow().end()",
        "import pathlib\nfrom onnxtool.model_file import staged\nfrom onnxtool.interruption import temporary_folder\n"
        f"path = pathlib.Path({str(tmp_path)!r}, 'm.onnx')\nimport tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n"
        "class Slow:\n    def end(self): pass\n    def __del__(self): print('ready', flush=True); time.sleep(60)\n",
    )
    process.terminate()
    assert process.communicate(timeout=30) == ("", "error: interrupted by SIGTERM\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "earlier"


def test_a_command_that_loses_the_exception_ends_with_the_code_of_the_signal() -> None:
    """What catches it may end the command with a code of its own, after the line that says it was interrupted."""
    process = started("\n    try: print('ready', flush=True); time.sleep(60)\n    except BaseException: return 1")
    process.terminate()
    assert process.communicate(timeout=30) == ("", "error: interrupted by SIGTERM\n")
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_waits_for_the_end_of_critical_lines() -> None:
    """In any program: the handler that is installed there runs afterwards, once."""
    seen: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: seen.append("handled"))
    try:
        with interruption.critical():
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            seen.append("whole")
        assert seen == ["whole", "handled"]
        signal.raise_signal(signal.SIGTERM)
        assert seen == ["whole", "handled", "handled"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("where", ["after the first rename", "while the stage is removed"])
def test_a_signal_parts_no_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A set that is being moved into place gets there, and the stage goes."""
    replace, rmtree = Path.replace, shutil.rmtree

    def replacing(self: Path, target: Path) -> Path:
        if where == "after the first rename":
            signal.raise_signal(signal.SIGINT)
        return replace(self, target)

    def removing(path: Path, *, ignore_errors: bool) -> None:
        if where == "while the stage is removed":
            signal.raise_signal(signal.SIGINT)
        rmtree(path, ignore_errors=ignore_errors)

    def write() -> None:
        with staged(tmp_path / "m.onnx", force=True) as staging:
            staging.model_path.write_text("new")
            (staging.folder / "words.txt").write_text("new")

    monkeypatch.setattr(Path, "replace", replacing)
    monkeypatch.setattr(shutil, "rmtree", removing)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m.onnx": "new", "words.txt": "new"}


def test_a_library_that_does_not_survive_the_end_of_python_changes_no_exit_code() -> None:
    """As threads of obstore, which abort after everything is done; what is registered for the end still runs."""
    process = run(
        "atexit.register(print, 'last')",
        "import atexit\natexit.register(print, 'first of all')\n"
        "class Thread:\n    def __del__(self):\n        os.abort()\nthread = Thread()\n",
    )
    assert process.communicate() == ("last\nfirst of all\n", "")
    assert process.returncode == 2


def test_what_libraries_print_is_not_ahead_of_an_error() -> None:
    """Panics of Rust and aborts of C++ print to the descriptor, which `-v` shows; Python's own stderr stays."""
    prints = "os.write(2, b'panicked'); warnings.warn('odd'); print('one', file=sys.stderr)"
    assert run(prints, "import warnings\n").communicate() == ("", "one\n")
    shown = run(prints, "import warnings\nsys.argv = ['', '-v']\n").communicate()[1]
    assert shown.startswith("panicked")
    assert "odd" in shown
    assert shown.endswith("one\n")


def test_a_crash_in_a_library_shows_where_it_was_called(tmp_path: Path) -> None:
    """-2^63 / -1 in the middle of a benchmark, of values that nothing can foresee."""
    model = by_hand()["mlp"]
    splice(model, "Div of the least int64 on a value", "x", "h_")
    onnx.save(model, tmp_path / "model.onnx")
    done = run_process(tmp_path, "infer", "--model_path", "model.onnx", "--benchmark", "--quiet")
    assert done.returncode == -signal.SIGFPE
    assert done.stderr.startswith("Fatal Python error: Floating point exception")
    assert "benchmarking/measurement.py" in done.stderr


def test_a_signal_that_a_library_turns_into_an_error_of_its_own_ends_the_command_all_the_same() -> None:
    """As pybind11 does while it starts a library: without this, the command ended with a traceback and code 1."""
    code = (
        "import os, signal, time\nfrom onnxtool import cli\nfrom onnxtool.cli import entry\n"
        "def start(_arguments):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(60)\n"
        "    except BaseException as error:\n        raise ImportError('initialization failed') from error\n"
        "entry.run_arguments = start\ncli.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A file to optimize, and an earlier result beside it."""
    (tmp_path / "m-optimized.onnx").write_text("the earlier result")
    return Path(shutil.copy(workshop.exported("tiny-splade", exporter="torchscript"), tmp_path / "m.onnx"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=lambda one: str(one)
)
def test_an_interrupted_command_leaves_the_earlier_result(exported: Path, number: signal.Signals, code: int) -> None:
    """The signal arrives while the stage is there; after SIGKILL, the same command removes it and writes the result."""
    command = [sys.executable, "-m", "onnxtool", "optimize", "--model_path", str(exported), "--force"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(".partial" in path.name for path in exported.parent.iterdir()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    names = sorted(path.name for path in exported.parent.iterdir())
    assert names[code == -9 :] == ["m-optimized.onnx", "m.onnx"]
    assert exported.with_name("m-optimized.onnx").read_text() == "the earlier result"
    if code == -9:
        assert run_process(exported.parent, *command[3:]).returncode == 0
        assert sorted(path.name for path in exported.parent.iterdir()) == names[1:]
        onnx.checker.check_model(exported.with_name("m-optimized.onnx"))
