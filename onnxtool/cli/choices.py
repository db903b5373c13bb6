"""Command-line choices, with a suggestion for a misspelled one."""

from __future__ import annotations

import click

from onnxtool.options import not_a_choice


class NameChoice(click.Choice[str]):
    """One of several names, shown verbatim: unlike in option names, hyphens are not converted."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, or fail and suggest similar ones."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(not_a_choice(value, self.choices), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """List the names for the help."""
        names = "|".join(map(str, self.choices))
        return f"{{{names}}}" if isinstance(param, click.Argument) and param.required else f"[{names}]"
