"""What is printed, without click: UTF-8 streams, JSON documents, and text without control characters.

Names come from model files, which are untrusted: no escape sequence of theirs may reach a terminal.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

from onnxtool.reports import printable as printable
from onnxtool.reports import to_json


def ready_streams() -> None:
    """Make stdout and stderr accept all text as UTF-8, in every locale and even where they were closed.

    JSON knows no other encoding, and names of models are of any script. A closed stream becomes the null device: a
    file that is opened later would take its descriptor, and get what libraries print.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def drop_output() -> None:
    """Discard what stdout still buffers after a failed write: Python would write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def json_document(report: object) -> str:
    """Write `report` as JSON in which all control characters are escaped."""
    return _json(report, indent=2)


def json_line(report: object) -> str:
    """Write `report` as one line of JSON, with the characters escaped that `json_document` escapes."""
    return _json(report, indent=None)


def _json(report: object, indent: int | None) -> str:
    values = to_json(report)
    text = json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False)
    if not all(line.isprintable() for line in text.split("\n")):
        # JSON itself escapes only some of the control characters.
        text = json.dumps(values, indent=indent, ensure_ascii=True, allow_nan=False)
    return text + "\n"


def is_text(argument: str) -> bool:
    """Whether an argument is valid text: Python decodes other bytes to lone surrogates, which no library accepts."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)
