"""Run a command in a child process, so that a signal or a death in C++ is one line and one exit code.

Most that a file could do to onnxruntime is found before (see `onnxtool.runtime.probation`). What is left, a division
that the processor refuses in the middle of a benchmark or a machine without memory, ends a process without a word. The
child is forked before anything large is imported, which takes about a millisecond, and keeps the terminal, the folder
and the place in its job. This process only waits.

It alone hears the signals that ask to end: the child and all that the child starts have them blocked, so a signal to
the whole group does what one to this process does. The child is told by a signal of its own, unwinds, and is silent
from then on; this process reports. A child that computes in C++ does not hear that before it is done, which may be
never: it gets some seconds, and what it has staged is removed once it is killed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from onnxtool.interruption import ENDING, stop

_LONGEST_WAIT = 3600.0  # there is no call that waits for ever, or for some time
_GRACE_SECONDS = 10.0  # to unwind, as containers get
_AGAIN_SECONDS = 2.0  # the exception may arrive in a destructor, which drops it
_spoken = {2}  # the descriptors of stderr, whatever sys.stderr is meanwhile


def supervised(run: Callable[[], int]) -> int:
    """Return what `run` returns in a child process; 128 and the number of a signal that asked to end it.

    Of several signals, the first one counts; of two that come before this process looks, the one with the lower number,
    as the kernel keeps no order of them. Where a signal that nothing handles ends the child, that is 1, with an error.
    Systems other than Linux run it in this process.
    """
    if sys.platform != "linux":
        return _alone(run)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started this may have ignored it, and then nobody is told
    ending = {number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}
    # What arrives before the child handles signals waits, and none ends this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending | {signal.SIGCHLD})
    parent, alive = os.pipe()
    child = os.fork()
    if child == 0:
        for number in (signal.SIGRTMIN, *ending):  # the latter where a library unblocks them
            signal.signal(number, _stop)
        os.close(alive)
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before | ending)
        _quiet_libraries()
        return run()
    asked, again, deadline = 0, math.inf, math.inf
    staged: set[Path] = set()
    while True:
        wait = max(0.0, min(again - time.monotonic(), _LONGEST_WAIT))
        info = signal.sigtimedwait(ending | {signal.SIGCHLD}, wait)
        ended, status = os.waitpid(child, os.WNOHANG)
        if info is not None and info.si_signo != signal.SIGCHLD and not asked:
            asked, again = info.si_signo, time.monotonic()
            deadline = again + _GRACE_SECONDS
        if ended:
            break
        if time.monotonic() >= again:
            staged |= _staged_by(child)
            os.kill(child, signal.SIGKILL if again >= deadline else signal.SIGRTMIN)
            again = min(again + _AGAIN_SECONDS, deadline) if again < deadline else math.inf
    if asked:
        code = _report_stopped(asked, staged, is_killed=again == math.inf)
    else:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else _report_death(os.WTERMSIG(status))
    os._exit(code)  # there is nothing to finalize, which takes some milliseconds


def _alone(run: Callable[[], int]) -> int:
    asked: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        stop(KeyboardInterrupt(), frame)

    for number in ENDING:
        signal.signal(number, interrupt)
    try:
        code = run()
    except KeyboardInterrupt:
        from onnxtool.cli.streams import report_error

        code = report_error("interrupted", "", 130)
    return 128 + asked[0] if asked else code


def _quiet_libraries() -> None:
    """Drop warnings, and what libraries in C++ and Rust print on stderr, unless a level of the log is given.

    What they have to say is an exception, or a death that the parent reports; a panic prints a page ahead of it.
    """
    if any(word.startswith(("-v", "--verbose", "--log")) for word in sys.argv[1:]):
        return
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    if sys.stderr is not None:
        _spoken.add(kept := os.dup(2))
        sys.stderr = os.fdopen(kept, "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors, buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _stop(_number: int, frame: FrameType | None) -> None:
    """Unwind, so that staged files go, and print nothing more: what libraries say of it is of no use."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in _spoken:
            os.dup2(null, descriptor)
    stop(KeyboardInterrupt(), frame)


def _die_with(parent: int) -> None:
    """Let the kernel end this process (SIGIO) when its parent closes the other end of a pipe, by dying as well."""
    import fcntl

    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        if not os.read(parent, 1):
            os._exit(1)


def _staged_by(process: int) -> set[Path]:
    """Return the folders in which a process stages files, and files that have no name yet: it has them open."""
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                path = descriptor.readlink()
                path = path.with_name(path.name.removesuffix(" (deleted)"))
                found.add(path.parent if path.name == "lock" else path)
    return {path for path in found if path.suffix == ".partial"}


def _report_stopped(number: int, staged: set[Path], *, is_killed: bool) -> int:
    from onnxtool.cli.streams import report_error

    if left := [path for path in staged if path.exists()]:
        import logging

        from onnxtool.model_file.commits import settle

        logging.disable()
        for path in left:
            with suppress(OSError):
                settle(path)
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\r\x1b[2K\x1b[?25h")  # the child's progress bar, which hides the cursor
    name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    late = f", and killed as it did not end within {_GRACE_SECONDS:.0f} s" if is_killed else ""
    return report_error(f"interrupted{name}{late}", "", 128 + number)


def _report_death(number: int) -> int:
    from onnxtool.cli.streams import report_error
    from onnxtool.guarded import signal_name

    name = signal_name(number)
    if number == signal.SIGKILL:
        return report_error(
            "the command was killed (SIGKILL): the machine ran out of memory, or somebody did it",
            "use smaller batches or shorter texts, or a machine with more memory; onnxtool encode rejects a text of a "
            "corpus that does this, and goes on; no output was replaced",
            1,
        )
    return report_error(
        f"a library died on the input ({name}), and the command with it",
        "no output was replaced; -v shows what the library printed; do not trust the file, look at it with onnxtool "
        "stats, or make it again; where a text "
        "of a corpus did it, onnxtool encode rejects that and goes on",
        1,
    )
