"""Choices of the command line, with a suggestion for one that is misspelled."""

from __future__ import annotations

import click

from onnxtool.options import not_a_choice


class NameChoice(click.Choice[str]):
    """One of several names, shown as they are written: their hyphens are not those of options."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, or fail with those that look like it."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(not_a_choice(value, self.choices), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """List the names as the help shows them."""
        names = "|".join(map(str, self.choices))
        return f"{{{names}}}" if isinstance(param, click.Argument) and param.required else f"[{names}]"
