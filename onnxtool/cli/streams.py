"""Output without click: UTF-8 streams, JSON documents, and text without control characters.

Names come from untrusted model files: no escape sequence in them may reach a terminal.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from contextlib import suppress
from typing import TextIO

from onnxtool.errors import bounded
from onnxtool.reports import printable as printable
from onnxtool.reports import to_json

_stderr = [2]  # the descriptor of our own messages


def ready_streams() -> None:
    """Make stdout and stderr accept all text as UTF-8, in every locale and even if they are closed.

    JSON allows no other encoding, and model names may use any script. A closed stream becomes the null device:
    otherwise a file opened later would take its descriptor and receive what libraries print.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            with suppress(OSError):
                os.close(descriptor)
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            stream = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
        elif descriptor and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def quiet_libraries() -> None:
    """Drop warnings, and what C++ and Rust libraries print to stderr, unless a log level is given.

    Errors arrive as exceptions; a panic prints a page beforehand. If a library crashes, Python's stack is printed.
    """
    import faulthandler

    if sys.stderr is None:
        return
    if not any(word.startswith(("-v", "--verbose", "--log")) for word in sys.argv[1:]):
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        _stderr[0] = os.dup(2)
        sys.stderr = _opened(_stderr[0])
        _drop(2)
    faulthandler.enable(sys.stderr, all_threads=False)


def report_interrupted(code: int) -> None:
    """Print the one line of a command that a signal ends, and discard what libraries print while it unwinds."""
    import signal

    sys.stderr = _opened(_stderr[0])
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")  # removes a progress bar, which hides the cursor
    name = "" if code == 128 + signal.SIGINT else f" by {signal.Signals(code - 128).name}"
    report_error(f"interrupted{name}", "", code)
    with suppress(OSError):
        _drop(_stderr[0])


def _opened(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def drop_output() -> None:
    """Discard stdout's buffer after a failed write: Python would write it again at exit."""
    _drop(sys.stdout.fileno())


def _drop(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def report_error(message: str, hint: str, code: int) -> int:
    """Print an error and its hint to stderr, and return `code`."""
    label = "error:"
    if sys.platform != "win32" and sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        label = f"\x1b[31m\x1b[1m{label}\x1b[0m"
    try:
        say(message, f"{label} ")
        if hint:
            say(hint, "hint: ")
        sys.stderr.flush()
    except OSError:  # the exit code still reports it
        _drop(sys.stderr.fileno())
    return code


def say(message: str, label: str = "") -> None:
    """Print a message to stderr, bounded and escaped; its line breaks are kept."""
    print(f"{label}{shown(message)}", file=sys.stderr)  # noqa: T201  click is what this module does without


def shown(message: str) -> str:
    """Bound a message, and escape its control characters except line breaks."""
    return bounded("\n".join(map(printable, bounded(message).splitlines())))


def json_document(report: object) -> str:
    """Write `report` as JSON with all control characters escaped."""
    return _json(report, indent=2)


def json_line(report: object) -> str:
    """Write `report` as one line of JSON, escaped like `json_document`."""
    return _json(report, indent=None)


def _json(report: object, indent: int | None) -> str:
    values = to_json(report)
    text = json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False)
    if not all(line.isprintable() for line in text.split("\n")):
        # JSON itself escapes only some control characters.
        text = json.dumps(values, indent=indent, ensure_ascii=True, allow_nan=False)
    return text + "\n"


def is_text(argument: str) -> bool:
    """Whether an argument is valid text: Python decodes invalid bytes to lone surrogates, which no library accepts."""
    try:
        argument.encode()  # an argument may have a megabyte
    except UnicodeEncodeError:
        return False
    return True
