"""`onnxtool env`: versions, execution providers, and what is wrong with this installation."""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.cli.options import output_options, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit
from onnxtool.runtime.environment import EnvironmentReport


@click.command(epilog="Example: onnxtool env --format json")
@output_options("Write the result to this file instead of stdout.")
@report_options
def command(*, output: Path | None, force: bool, format_name: str, quiet: bool) -> None:
    """Show what is installed, which execution providers can run here, and what is wrong.

    Problems are listed, each with its remedy; a machine without a GPU is not a problem.
    """
    from onnxtool.runtime.environment import describe_environment

    report = describe_environment()
    emit(report, _blocks(report), format_name, output=output, force=force)


def _blocks(report: EnvironmentReport) -> list[Block]:
    blocks: list[Block] = [
        Facts([("Python", report.python), ("Platform", report.platform)]),
        Heading("Packages"),
        Table(("package", "version"), list(report.packages.items())),
        Heading("Execution providers"),
        Table(("provider", "can it run"), list(report.providers.items())),
        Heading("Problems"),
    ]
    if report.problems:
        return [*blocks, *(Note(problem) for problem in report.problems)]
    return [*blocks, Facts([("found", "none")])]
