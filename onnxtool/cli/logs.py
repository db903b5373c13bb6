"""-v, -vv and --log_level: log the library's work to stderr, with timestamps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from onnxtool.cli.choices import NameChoice
from onnxtool.cli.configuration import all_of
from onnxtool.cli.streams import shown

Command = TypeVar("Command", bound=Callable[..., Any])

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OF_VERBOSITY = (logging.WARNING, logging.INFO, logging.DEBUG)


def log_options(command: Command) -> Command:
    """Add -v and --log_level, for `set_up_logging`."""
    level = click.option(
        "--log_level",
        type=NameChoice(tuple(_LEVELS), case_sensitive=False),
        help="What to log to stderr, with timestamps.  [default: warning; info with -v, debug with -vv]",
    )
    verbose = click.option(
        "-v",
        "--verbose",
        count=True,
        help="Log each step, such as passes and export strategies; -vv also logs every case, file and session.",
    )
    return verbose(level(command))


class _Formatter(logging.Formatter):
    """Write a record without control characters, and bounded: names in a model are untrusted."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def set_up_logging(context: click.Context, log_level: str | None, verbose: int) -> None:
    """Log to stderr until the command ends, at the given level, or one for the number of -v."""
    logger = logging.getLogger("onnxtool")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers = [handler]
    logger.propagate = False  # a library may have added a handler to the root logger
    logger.setLevel(_LEVELS[log_level] if log_level else _OF_VERBOSITY[min(verbose, len(_OF_VERBOSITY) - 1)])

    for one in all_of(context):
        logger.info("--%s is %s, from %s", one.option, one.value, one.source)

    def take_back() -> None:
        logger.setLevel(before[0])
        logger.propagate, logger.handlers = before[1:]

    context.call_on_close(take_back)
