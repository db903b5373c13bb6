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
    configured, wrong = all_configured(click.get_current_context())
    report = replace(report, problems=(*report.problems, *wrong))
    result.emit({**vars(report), "configuration": configured, "precedence": PRECEDENCE}, _blocks(report, configured))
    return 0


def _place(path: Path, provider: str | None, result: Result) -> int:
    from onnxtool.runtime.environment import find_placement

    placement = find_placement(ModelFile.open(path), provider)
    opens = placement.opens
    origin = "asked of the provider" if placement.asked else "from documentation, not asked of the provider"
    facts = [
        ("Model", placement.model),
        ("Provider", placement.provider),
        ("Answer", f"{origin}: {placement.source}"),
        ("Nodes", f"{placement.num_taken} of {placement.num_nodes} on the provider"),
        *([] if opens is None else [("Session without the CPU", "opens" if opens else "does not open")]),
        *([("Not checked", placement.not_checked)] if placement.not_checked else []),
    ]
    rows = [(node.operator, node.name, node.layer) for node in placement.refused]
    blocks: list[Block] = [Facts(facts)]
    if rows:
        blocks += [Heading("Nodes that it does not take"), Table(("operator", "node", "layer"), rows)]
    result.emit(placement, [*blocks, *map(Note, placement.reasons)])
    if not placement.whole:
        say(f"{placement.model} does not run wholly on {placement.provider}")
    return 0 if placement.whole else 1


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
            [(setting.command, setting.option, str(setting.value), setting.source) for setting in configured],
        )
        if configured
        else Facts([("set", "nothing")]),
        Heading("Problems"),
    ]
    if report.problems:
        return [*blocks, *(Note(problem) for problem in report.problems)]
    return [*blocks, Facts([("found", "none")])]
