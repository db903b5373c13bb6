"""Write docs/reference/options.md, the reference of all options, from the commands' own help.

Run `python scripts/options_reference.py` after changing an option; a test compares.
"""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.cli.commands import COMMANDS, RUNNABLE, SUBCOMMANDS
from onnxtool.cli.entry import find_command
from onnxtool.cli.options import SectionedCommand

PATH = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"

_HEAD = """\
# Options

Every long option is accepted with underscores and with hyphens: `--model_name` is `--model-name`.

<!-- Written by scripts/options_reference.py. -->
"""


def options_reference() -> str:
    """Return the reference as Markdown: for each command its purpose, its arguments, a list of options, an example.

    A list wraps on a narrow screen, where a table of two columns would scroll.
    """
    parts = [_HEAD]
    for name in RUNNABLE:
        group, _, inner = name.partition(" ")
        purpose = SUBCOMMANDS[group][inner] if inner else COMMANDS[name]
        command = find_command(name)
        context = click.Context(command, info_name=f"onnxtool {name}", max_content_width=1000)
        usage = " ".join([f"onnxtool {name}", *command.collect_usage_pieces(context)])
        parts += [f"## onnxtool {name}\n", f"{purpose}\n", f"`{usage}`\n"]
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        titles = ["Options", *(command.titles.values() if isinstance(command, SectionedCommand) else ())]
        for title in titles:
            parts += [f"**{title}**\n"] if len(titles) > 1 else []
            for option in options:
                placed = command.title_of(option) if isinstance(command, SectionedCommand) else "Options"
                if placed == title and not option.hidden:
                    parts.append(_entry(option, context))
            parts.append("")
        example = (command.epilog or "").strip("\b\n").removeprefix("Example: ")
        parts.append(f"Example: `{example}`\n")
    return "\n".join(parts)


def _entry(option: click.Option, context: click.Context) -> str:
    """Return an item of the list: the option, its meaning, its choices, its default and its range."""
    names, _ = option.get_help_record(context) or ("", "")
    names, extra = names.removesuffix(" RANGE"), option.get_help_extra(context)
    meaning, _, stated = (option.help or "").partition("  [default: ")
    facts = [_text(meaning)]
    if isinstance(option.type, click.Choice):
        names = names.replace(option.make_metavar(context), "CHOICE")
        if not all(str(choice) in meaning for choice in option.type.choices):
            facts.append(f"One of {', '.join(f'`{choice}`' for choice in option.type.choices)}.")
    default = stated.removesuffix("]") or extra.get("default")
    facts += [_text(f"Default: {default}.")] if default else []
    facts += ["Required."] if "required" in extra else []
    facts += [f"Range: `{extra['range']}`."] if "range" in extra else []
    return " ".join([f"- `{names}`:", *facts])


def _text(text: str) -> str:
    """Return a text with no markup but its own."""
    for character in "*<>":
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(options_reference(), encoding="utf-8")
