"""The command line: parse, make one library call, render. The only place that prints, and that catches errors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from onnxtool.cli.entry import COMMANDS as COMMANDS
    from onnxtool.cli.entry import main as main


def run() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed or a gate met, 2 usage, 130 and 143 interrupted."""
    from onnxtool.cli.shortcut import take_shortcut
    from onnxtool.cli.streams import ready_streams

    ready_streams()
    code = take_shortcut(sys.argv[1:])
    if code is None:
        from onnxtool.cli.entry import run_group

        run_group()
    sys.exit(code)


def __getattr__(name: str) -> object:
    if name not in ("COMMANDS", "main"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onnxtool.cli import entry

    return getattr(entry, name)
