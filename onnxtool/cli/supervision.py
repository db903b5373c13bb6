"""Run a command in a child process, so that a signal or a crash in C++ gives one line and one exit code.

Most of the harm that a file can do to onnxruntime is found beforehand (see `onnxtool.runtime.probation`). The rest,
such as a trapped division in the middle of a benchmark or a machine out of memory, ends a process without a message.
The child is forked before anything large is imported, which takes about a millisecond, and keeps the terminal, the
working directory and its place in the job. This process only waits.

Only this process handles termination signals: they are blocked in the child and its descendants, so a signal to the
whole group has the same effect as one to this process. The child is notified by a separate signal, unwinds, and prints
nothing more; this process reports. A child that computes in C++ notices only when it returns, which may be never: it
gets some seconds, and its staged files are removed once it is killed.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from onnxtool.interruption import ENDING, share_staged, stop, told_staged

_LONGEST_WAIT = 3600.0  # `sigtimedwait` has no "no timeout" value
_GRACE_SECONDS = 10.0  # to unwind, as containers get
_AGAIN_SECONDS = 2.0  # the exception may arrive in a destructor, which drops it
_spoken = {2}  # the descriptors of stderr, whatever sys.stderr is meanwhile


def supervised(run: Callable[[], int]) -> int:
    """Return what `run` returns in a child process, or 128 plus the number of the signal that ended it.

    The first of several signals counts; of two that are pending together, the one with the lower number, as the kernel
    keeps no order of them. If an unhandled signal ends the child, the result is 1, with an error. Systems other
    than Linux run it in this process.
    """
    if sys.platform != "linux":
        return _alone(run)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may have ignored it, in which case nothing is reported
    ending = {number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}
    # Signals that arrive before the child handles them stay pending, and none ends this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending | {signal.SIGCHLD})
    share_staged()
    parent, alive = os.pipe()
    child = os.fork()
    if child == 0:
        for number in (signal.SIGRTMIN, *ending):  # the latter where a library unblocks them
            signal.signal(number, _stop)
        os.close(alive)
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before | ending)
        _quiet_libraries()
        code = run()
        if "obstore" in sys.modules:
            _leave(code)
        return code
    asked, again, deadline = 0, math.inf, math.inf
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
            os.kill(child, signal.SIGKILL if again >= deadline else signal.SIGRTMIN)
            again = min(again + _AGAIN_SECONDS, deadline) if again < deadline else math.inf
    if asked:
        code = _report_stopped(asked, is_killed=again == math.inf)
    else:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else _report_death(os.WTERMSIG(status))
    os._exit(code)  # nothing needs finalizing, which would take some milliseconds


def _leave(code: int) -> None:
    """End this process before interpreter shutdown, but after its registered exit handlers.

    Threads of obstore may not survive that: they abort a process that has encoded into a store, once in eight times on
    a busy machine.
    """
    atexit._run_exitfuncs()  # noqa: SLF001  there is no public name
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    os._exit(code)


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
    """Drop warnings, and what C++ and Rust libraries print to stderr, unless a log level is given.

    Errors arrive as exceptions, or as a crash that the parent reports; a panic prints a page beforehand.
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
    """Unwind, so that staged files are removed, and print nothing more: what libraries print meanwhile is of no use."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in _spoken:
            os.dup2(null, descriptor)
    stop(KeyboardInterrupt(), frame)


def _die_with(parent: int) -> None:
    """Let the kernel end this process (SIGIO) when its parent closes the other end of a pipe, or dies."""
    import fcntl

    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        if not os.read(parent, 1):
            os._exit(1)


def _report_stopped(number: int, *, is_killed: bool) -> int:
    from onnxtool.cli.streams import report_error

    _settle_staged()
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\r\x1b[2K\x1b[?25h")  # the child's progress bar, which hides the cursor
    name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    late = f", and killed as it did not end within {_GRACE_SECONDS:.0f} s" if is_killed else ""
    return report_error(f"interrupted{name}{late}", "", 128 + number)


def _settle_staged() -> None:
    if left := [path for path in told_staged() if path.exists()]:
        import logging

        from onnxtool.model_file.commits import settle

        logging.disable()
        for path in left:
            with suppress(OSError):
                settle(path)


def _report_death(number: int) -> int:
    from onnxtool.cli.streams import report_error
    from onnxtool.guarded import signal_name

    _settle_staged()
    name = signal_name(number)
    if number == signal.SIGKILL:
        return report_error(
            "the command was killed (SIGKILL): the machine ran out of memory, or someone killed it",
            "use smaller batches or shorter texts, or a machine with more memory; onnxtool encode rejects a text of a "
            "corpus that does this, and goes on; no output was replaced",
            1,
        )
    return report_error(
        f"a library died on the input ({name}), and the command with it",
        "no output was replaced; -v shows what the library printed; do not trust the file; inspect it with onnxtool "
        "stats, or make it again; if a text "
        "of a corpus caused it, onnxtool encode rejects the text and goes on",
        1,
    )
