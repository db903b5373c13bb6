"""The command line: parse, make one library call, render. The only place that prints, and that catches errors."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from onnxtool.cli.entry import COMMANDS as COMMANDS
    from onnxtool.cli.entry import main as main
    from onnxtool.cli.entry import run_arguments as run_arguments


def run() -> NoReturn:
    """Run the command line of this process and exit.

    SIGINT, SIGTERM and SIGHUP end it with one line and 128 plus the number of the first of them.
    """
    import signal

    if sys.platform != "win32":  # those that arrive before they are handled wait
        ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    from onnxtool import interruption
    from onnxtool.cli.streams import quiet_libraries, ready_streams, report_interrupted

    quiet_libraries()
    ready_streams()  # before any import opens a file
    try:
        interruption.raise_at_signals(report_interrupted)
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
        from onnxtool.cli.entry import run_arguments

        try:
            code = run_arguments(sys.argv[1:])
        finally:  # a library may have caught the exception, or raised another: pybind11 an ImportError as it starts
            interruption.check_interrupted()
    except interruption.Interrupted as stop:
        code = stop.code
    interruption.ignore_signals()
    interruption.remove_unfinished()  # what a signal hit where it was about to be removed
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process after its registered exit handlers, but before interpreter shutdown.

    That lets signals kill, takes time, and threads of obstore may not survive it: they abort a process that has encoded
    into a store, once in eight times on a busy machine.
    """
    import atexit

    atexit._run_exitfuncs()  # noqa: SLF001  there is no public name
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    os._exit(code)


def __getattr__(name: str) -> object:
    if name not in ("COMMANDS", "main", "run_arguments"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onnxtool.cli import entry

    return getattr(entry, name)
