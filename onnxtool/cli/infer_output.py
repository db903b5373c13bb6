"""Where a job of `onnxtool infer` puts its report, and which options of other jobs it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from onnxtool.cli.render import Block, emit, write_out
from onnxtool.model_file import check_writable


@dataclass(frozen=True)
class Output:
    """What becomes of a report.

    Attributes:
        path: the file to write; None for stdout.
        force: whether a file that exists is replaced.
        format_name: one of the formats of the command.
        quiet: whether nothing is said of progress.
    """

    path: Path | None
    force: bool
    format_name: str
    quiet: bool

    def check(self, *paths: Path | None) -> None:
        """Refuse paths that cannot be written, and the output's own."""
        for path in (self.path, *paths):
            if path is not None:
                check_writable(path, force=self.force)

    def emit(self, report: Any, blocks: Sequence[Block]) -> None:
        """Print a report, or write it to the file."""
        emit(report, blocks, self.format_name, output=self.path, force=self.force)

    def write(self, text: str) -> None:
        """Print text, or write it to the file."""
        write_out(text, output=self.path, force=self.force)


def is_given(name: str) -> bool:
    """Whether a parameter of the running command was chosen, and is not the default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse(names: AbstractSet[str], reason: str) -> None:
    """Refuse parameters on the command line that would do nothing.

    Raises:
        UsageError: one was passed.
    """
    context = click.get_current_context()
    unused = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if unused:
        raise click.UsageError(f"{reason} leave out {' and '.join(unused)}")
