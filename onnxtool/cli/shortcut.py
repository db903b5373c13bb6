"""A fast path without click for the form of `stats` that scripts and reviews call most.

Reading a model of half a gigabyte takes a tenth of the startup time, and half of the startup is click. So `onnxtool
stats MODEL [BASE] --format json` is recognized here and makes the same library calls as the command. All other forms,
and all failures, are left to the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from onnxtool.cli.streams import drop_output, is_text, report_error
from onnxtool.errors import OnnxtoolError


def take_shortcut(arguments: Sequence[str]) -> int | None:
    """Run `arguments` and return the exit code; None, with nothing printed, if they have another form."""
    paths = _paths(arguments)
    if paths is None:
        return None
    from onnxtool.cli.configuration import is_configured
    from onnxtool.cli.streams import json_document
    from onnxtool.stats import compare_models, describe_model

    try:
        if is_configured("stats"):
            return None
        report: object = describe_model(paths[0]) if len(paths) == 1 else compare_models(paths[0], paths[1])
    except (OnnxtoolError, OSError):
        return None
    try:
        sys.stdout.write(json_document(report))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()  # the reader of our output is gone (`| head`)
        return 141
    except OSError as error:
        drop_output()
        return report_error(f"cannot write to stdout: {error.strerror}", "", 1)
    return 0


def _paths(arguments: Sequence[str]) -> list[Path] | None:
    """Return MODEL and BASE; None if anything other than these, `--format json` and `--quiet` is given."""
    if arguments[:1] != ["stats"]:
        return None
    paths = []
    is_json = False
    words = iter(arguments[1:])
    for word in words:
        if word in ("--format", "--format=json"):
            is_json = word == "--format=json" or next(words, "") == "json"
            if not is_json:
                return None
        elif not word or (word.startswith("-") and word != "--quiet") or not is_text(word):
            return None
        elif word != "--quiet":
            paths.append(Path(word))
    return paths if is_json and len(paths) in (1, 2) else None
