"""`onnxtool env`: versions, execution providers, and problems with this installation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import click

from onnxtool.cli.configuration import PRECEDENCE, Configured, all_configured
from onnxtool.cli.options import Result, result_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table
from onnxtool.runtime.environment import EnvironmentReport


@click.command(epilog="Example: onnxtool env --format json")
@result_options()
def command(*, result: Result) -> None:
    """Show what is installed, which execution providers can run here, and any problems.

    Problems are listed, each with its remedy; a machine without a GPU is not a problem.
    """
    from onnxtool.runtime.environment import describe_environment

    report = describe_environment()
    found, wrong = all_configured(click.get_current_context())
    report = replace(report, problems=(*report.problems, *wrong))
    document: dict[str, object] = {field.name: getattr(report, field.name) for field in fields(report)}
    document["configuration"] = found
    document["precedence"] = PRECEDENCE
    result.emit(document, _blocks(report, found))


def _blocks(report: EnvironmentReport, found: Sequence[Configured]) -> list[Block]:
    blocks: list[Block] = [
        Facts([("Commit", report.commit or "unknown"), ("Python", report.python), ("Platform", report.platform)]),
        Heading("Packages"),
        Table(("package", "version"), list(report.packages.items())),
        Heading("Execution providers"),
        Table(("provider", "can it run"), list(report.providers.items())),
        Heading("Configuration, by the first of " + ", ".join(PRECEDENCE)),
        Table(
            ("command", "option", "value", "from"),
            [(one.command, one.option, str(one.value), one.source) for one in found],
        )
        if found
        else Facts([("set", "nothing")]),
        Heading("Problems"),
    ]
    if report.problems:
        return [*blocks, *(Note(problem) for problem in report.problems)]
    return [*blocks, Facts([("found", "none")])]
