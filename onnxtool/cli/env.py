"""`onnxtool env`: versions, execution providers, and problems with this installation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from onnxtool.cli.configuration import PRECEDENCE, Configured, all_configured
from onnxtool.cli.options import Result, derived_options, result_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table
from onnxtool.cli.streams import say
from onnxtool.model_file import ModelFile
from onnxtool.runtime.environment import EnvironmentReport, PlacementOptions


@click.command(epilog="Example: onnxtool env --format json")
@derived_options(options=PlacementOptions)
@result_options()
def command(options: PlacementOptions, *, result: Result) -> int:
    """Show what is installed, which execution providers can run here, and any problems.

    Problems are listed, each with its remedy; a machine without a GPU is not a problem. With --model, the provider is
    asked whether it runs all of the file, without the CPU; the exit code is 1 if it does not.
    """
    from onnxtool.runtime.environment import describe_environment

    if options.model is not None:
        return _place(options.model, options.provider, result)

    report = describe_environment()
    found, wrong = all_configured(click.get_current_context())
    report = replace(report, problems=(*report.problems, *wrong))
    result.emit({**vars(report), "configuration": found, "precedence": PRECEDENCE}, _blocks(report, found))
    return 0


def _place(path: Path, provider: str | None, result: Result) -> int:
    from onnxtool.runtime.environment import find_placement

    found = find_placement(ModelFile.open(path), provider)
    asked = "asked of the provider" if found.asked else "from documentation, not asked of the provider"
    facts = [
        ("Model", found.model),
        ("Provider", found.provider),
        ("Answer", f"{asked}: {found.source}"),
        ("Nodes", f"{found.num_taken} of {found.num_nodes} on the provider"),
        *([] if found.opens is None else [("Session without the CPU", "opens" if found.opens else "does not open")]),
        *([("Not checked", found.not_checked)] if found.not_checked else []),
    ]
    rows = [(node.operator, node.name, node.layer) for node in found.refused]
    blocks: list[Block] = [Facts(facts)]
    if rows:
        blocks += [Heading("Nodes that it does not take"), Table(("operator", "node", "layer"), rows)]
    result.emit(found, [*blocks, *map(Note, found.reasons)])
    if not found.whole:
        say(f"{found.model} does not run wholly on {found.provider}")
    return 0 if found.whole else 1


def _blocks(report: EnvironmentReport, configured: Sequence[Configured]) -> list[Block]:
    blocks: list[Block] = [
        Facts([("Commit", report.commit or "unknown"), ("Python", report.python), ("Platform", report.platform)]),
        Heading("Packages"),
        Table(("package", "version"), list(report.packages.items())),
        Heading("Execution providers"),
        Table(("provider", "can it run"), list(report.providers.items())),
        Heading("Configuration, by the first of " + ", ".join(PRECEDENCE)),
        Table(
            ("command", "option", "value", "from"),
            [(one.command, one.option, str(one.value), one.source) for one in configured],
        )
        if configured
        else Facts([("set", "nothing")]),
        Heading("Problems"),
    ]
    if report.problems:
        return [*blocks, *(Note(problem) for problem in report.problems)]
    return [*blocks, Facts([("found", "none")])]
