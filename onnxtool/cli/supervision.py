"""Let a command that hands a stranger's file to C++ run in a child process, whose death becomes one error.

Most that a file could do to onnxruntime is found before (see `onnxtool.runtime.probation`). What is left, a division
that the processor refuses in the middle of a benchmark or a machine without memory, ends a process without a word. The
child is forked before anything large is imported, which takes about a millisecond, and keeps the terminal, the folder
and the place in its job. This process only waits: it passes signals on, and dies with the child's exit code. A child
that computes in C++ does not hear a signal before that is done, which may be never: it gets some seconds to end.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

_LOADING = frozenset(("artifacts", "encode", "evaluate", "export", "infer", "optimize", "release"))

_LONGEST_WAIT = 3600.0  # there is no call that waits for ever, or for some time
_GRACE_SECONDS = 10.0  # to unwind, as containers get
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def is_supervised(arguments: Sequence[str]) -> bool:
    """Return whether this command line loads strangers' files; systems other than Linux run it in this process."""
    return sys.platform == "linux" and arguments[:1] != [] and arguments[0] in _LOADING


def supervised(run: Callable[[], int]) -> int:
    """Return what `run` returns in a child process; 1 where a signal that nothing handles ends it, with an error."""
    import signal

    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started this may have ignored it, and then nobody is told
    # What arrives before the child handles signals waits, and none ends this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run()
    asked, deadline = 0, math.inf
    while True:
        seconds = min(deadline - time.monotonic(), _LONGEST_WAIT)
        info = signal.sigtimedwait(passed_on | {signal.SIGCHLD}, max(0.0, seconds))
        if info is None and time.monotonic() >= deadline:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        elif info is not None and info.si_signo != signal.SIGCHLD:
            asked, deadline = info.si_signo, min(deadline, time.monotonic() + _GRACE_SECONDS)
            # A terminal, whose signals have no sender, asks all processes of the job by itself.
            if info.si_pid:
                with suppress(ProcessLookupError):
                    os.kill(child, info.si_signo)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    if asked and os.WTERMSIG(status) == signal.SIGKILL:
        return _report_stopped(asked)
    return _report_death(os.WTERMSIG(status))


def _die_with(parent: int) -> None:
    """Let the kernel kill this process where its parent is killed: nobody would wait for its result."""
    import ctypes
    import signal

    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _report_stopped(number: int) -> int:
    import signal

    from onnxtool.cli.entry import report_error

    return report_error(
        f"the command did not end within {_GRACE_SECONDS:.0f} s of {signal.Signals(number).name}, and was killed",
        "no output was replaced; the next run of the same command removes what it left, as onnxtool clean does",
        128 + number,
    )


def _report_death(number: int) -> int:
    import signal

    from onnxtool.cli.entry import report_error
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
        "no output was replaced; do not trust the file, look at it with onnxtool stats, or make it again; where a text "
        "of a corpus did it, onnxtool encode rejects that and goes on",
        1,
    )
