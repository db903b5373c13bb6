"""The names of all commands, with a one-line description of each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import click

# Each lives in the module of the same name, which is imported only to run the command or show its help.
COMMANDS = {
    "export": "Export a Hugging Face checkpoint to a verified ONNX file.",
    "optimize": "Fuse and convert an ONNX file, verified against the input.",
    "infer": "Run texts through an ONNX file, or time it.",
    "encode": "Encode a collection on several machines.",
    "verify": "Compare an ONNX file with its source.",
    "stats": "Summarize an ONNX file, or its difference from another.",
    "evaluate": "Measure retrieval quality on a test collection.",
    "artifacts": "Make on-device training artifacts from standard operators.",
    "release": "Make a verified, described and signed release, or check one.",
    "env": "Show versions, execution providers, and setup problems.",
    "completion": "Set up shell completion of commands, options and paths.",
}

# Subcommands of command groups.
SUBCOMMANDS = {
    "encode": {
        "run": "Encode a collection with several processes, and publish it.",
        "part": "Encode one part of a collection.",
        "merge": "Check the output of all parts, and publish it as one.",
        "status": "Show the progress of all parts.",
    }
}

# Everything that can be run, as typed: `encode part`, for example.
RUNNABLE = tuple(f"{name} {inner}".strip() for name in COMMANDS for inner in SUBCOMMANDS.get(name, ("",)))

# The same by the names of configuration tables; a release has a file of its own.
TABLES = {name.replace(" ", "_"): name for name in RUNNABLE if name not in ("release", "completion")}


class TableGroup(click.Group):
    """A group whose help lists commands in the order of a table, and which suggests one for an unknown name.

    Attributes:
        table: the names of its commands, each with a description.
    """

    table: Mapping[str, str] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the requested command, or suggest similar ones; an option is left to click.

        Raises:
            UsageError: there is no such command.
        """
        if args and args[0] not in self.table and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.table, n=1)
            more = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(self.table)}."
            ctx.fail(f"No such command {args[0]!r}. {more}")
        return super().resolve_command(ctx, args)
