"""Write docs/reference/options.md, the reference of all options, from the commands' own help.

Run `python scripts/options_reference.py` after changing an option; a test compares.
"""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.cli.commands import COMMANDS, RUNNABLE, SUBCOMMANDS
from onnxtool.cli.entry import find_command

PATH = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"

_HEAD = """\
# Options

Every long option is accepted with underscores and with hyphens: `--model_name` is `--model-name`.

<!-- Written by scripts/options_reference.py. -->
"""


def options_reference() -> str:
    """Return the reference as Markdown: for each command its purpose, its arguments, a table of options, an example."""
    parts = [_HEAD]
    for name in RUNNABLE:
        group, _, inner = name.partition(" ")
        purpose = SUBCOMMANDS[group][inner] if inner else COMMANDS[name]
        command = find_command(name)
        context = click.Context(command, info_name=f"onnxtool {name}", max_content_width=1000)
        usage = " ".join([f"onnxtool {name}", *command.collect_usage_pieces(context)])
        parts += [f"## onnxtool {name}\n", f"{purpose}\n", f"`{usage}`\n", "| option | meaning |", "|---|---|"]
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if isinstance(parameter, click.Option) and record is not None:
                option, meaning = (_cell(text) for text in record)
                parts.append(f"| `{option}` | {meaning} |")
        example = (command.epilog or "").strip("\b\n").removeprefix("Example: ")
        parts.append(f"\nExample: `{example}`\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Keep a text in one cell, with no markup but its own."""
    for character in "|*<>":
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(options_reference(), encoding="utf-8")
