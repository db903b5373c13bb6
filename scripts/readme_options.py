"""Write the tables of docs/reference/options.md from the commands' own help.

Run `python scripts/readme_options.py` after changing an option; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from onnxtool.cli import COMMANDS, main

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"
BEGIN, END = "<!-- options:begin -->\n", "<!-- options:end -->"


def options_table() -> str:
    """Return a Markdown table for each command: option, meaning, default."""
    parts = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None  # noqa: S101  every name has a command
        parts += [f"\n## onnxtool {name}\n", "| option | meaning |", "|---|---|"]
        for parameter in command.params:
            record = parameter.get_help_record(click.Context(command, max_content_width=1000))
            if isinstance(parameter, click.Option) and record is not None:
                option, meaning = (text.replace("|", "\\|") for text in record)
                parts.append(f"| `{option}` | {meaning} |")
    return "\n".join(parts) + "\n\n"


def with_table(text: str) -> str:
    """Return the document `text` with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + options_table() + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
