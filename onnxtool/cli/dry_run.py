"""--dry_run: what a command would write, without its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit
from onnxtool.reports import WritePlan

Command = TypeVar("Command", bound=Callable[..., Any])


def dry_run_option(command: Command) -> Command:
    """Add --dry_run."""
    return click.option(
        "--dry_run",
        is_flag=True,
        help="Check options and inputs as far as that is quick, say which files would be written, and write none.",
    )(command)


def emit_plan(plan: WritePlan, format_name: str) -> None:
    """Print what would be written."""
    rows = [(file.path, file.change) for file in plan.files]
    blocks: list[Block] = [
        Heading(f"onnxtool {plan.command} would write"),
        Table(("file", "which is"), rows) if rows else Facts([("files", "none; the result is printed")]),
        *map(Note, plan.notes),
        Note("nothing was written"),
    ]
    emit({"dry_run": True, **plan._asdict()}, blocks, format_name)
