"""The command line: parse, make one library call, render. The only place that prints, and that catches errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from onnxtool.cli.entry import COMMANDS as COMMANDS
    from onnxtool.cli.entry import main as main


def run() -> NoReturn:
    """Run the command line of this process and exit."""
    if sys.platform == "linux":  # termination signals are handled once this is supervised, some milliseconds later
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    from onnxtool.cli.supervision import supervised

    sys.exit(supervised(lambda: run_arguments(sys.argv[1:])))


def run_arguments(arguments: Sequence[str]) -> int:
    """Run a command line; return 0 for done, 1 for failed or a gate met, 2 for wrong usage, 130 for interrupted."""
    from onnxtool.cli.streams import ready_streams

    ready_streams()
    from onnxtool.cli.entry import run_group

    return run_group(arguments)


def __getattr__(name: str) -> object:
    if name not in ("COMMANDS", "main"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onnxtool.cli import entry

    return getattr(entry, name)
