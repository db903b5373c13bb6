"""End a command at a signal: an exception unwinds it, and no unfinished file of it remains."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

# Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
GRACE_S = 10.0  # to unwind, as containers get
_POLL_S = 0.05
_asked: list[int] = []  # the exit code that a signal asked for
_arrived: list[int] = []  # the first signal: Python calls handlers of several that wait by their numbers
unfinished: set[Path] = set()  # files and folders that this process removes before it ends


class Interrupted(SystemExit):
    """A signal asked this process to end; `code` is 128 plus its number."""

    code: int


def raise_at_signals(report: Callable[[int], None]) -> None:
    """Report the exit code of the first termination signal, and raise `Interrupted` in the main thread.

    Python handles signals between two instructions, and a library in C++ may not come back to the next: after some
    seconds, a thread removes unfinished files and ends this process.
    """
    if sys.platform != "win32":
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        _thread.start_new_thread(_watch, (reader, report))

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if _is_importing_torch():
            _thread.start_new_thread(_raise_later, (number,))
            return
        ignore_signals()
        _asked.append(128 + [*_arrived, number][0])
        report(_asked[0])
        raise Interrupted(_asked[0])

    _handle(interrupt)


def _is_importing_torch() -> bool:
    """Whether PyTorch's C++ may be calling Python: an exception there aborts the process, and leaves its files."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # as importlib itself asks


def _raise_later(number: int) -> None:
    time.sleep(_POLL_S)
    if sys.platform == "win32":
        signal.raise_signal(number)
    else:  # to the main thread, which may wait for something: a signal to this one would not wake it
        os.kill(os.getpid(), number)


def ignore_signals() -> None:
    """Let further termination signals raise nothing: the process is about to end, at the deadline at the latest."""
    _handle(lambda _number, _frame: None)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, handler)


def _watch(reader: int, report: Callable[[int], None]) -> None:
    while (number := os.read(reader, 1)[0]) not in ENDING:
        pass
    _arrived.append(number)
    time.sleep(GRACE_S)
    remove_unfinished()
    if not _asked:
        report(128 + number)
    os._exit(128 + number)


def check_interrupted() -> None:
    """Raise `Interrupted` again if a signal asked to end: an exception in a destructor or callback is lost.

    Raises:
        Interrupted: one did.
    """
    if _asked:
        raise Interrupted(_asked[0])


@contextmanager
def critical() -> Iterator[None]:
    """Hold termination signals back until the block ends; for a few lines that must not be left halfway."""
    import threading

    if threading.current_thread() is not threading.main_thread():  # no signal raises there
        yield
        return
    held: list[int] = []
    before = {number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None}
    try:
        for number in before:
            signal.signal(number, lambda number, _frame: held.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held[:1]:
            signal.raise_signal(number)


@contextmanager
def temporary_folder(prefix: str = "onnxtool-") -> Iterator[Path]:
    """Provide a folder for temporary files, which no signal leaves behind."""
    import tempfile

    with critical():
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        unfinished.add(path := Path(folder.name))
    try:
        yield path
    finally:
        with critical():
            folder.cleanup()
            unfinished.discard(path)


def remove_unfinished() -> None:
    """Remove this process's unfinished files and folders."""
    import shutil

    for path in list(unfinished):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


@contextmanager
def deaf() -> Iterator[None]:
    """Block termination signals for processes started in the block: their parent handles the signals and ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
