"""Choices of the command line, with a suggestion for one that is misspelled."""

from __future__ import annotations

from difflib import get_close_matches

import click

_MOST_LISTED = 10  # where one of them looks like what was written


class NameChoice(click.Choice[str]):
    """One of several names, shown as they are written: their hyphens are not those of options."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, or fail with those that look like it."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            names = [str(choice) for choice in self.choices]
            near = get_close_matches(str(value), names, n=1, cutoff=0.5)
            listed = f"{len(names)} values" if near and len(names) > _MOST_LISTED else ", ".join(map(repr, names))
            suggestion = f" Did you mean {near[0]!r}?" if near else ""
            self.fail(f"{value!r} is not one of {listed}.{suggestion}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """List the names as the help shows them."""
        names = "|".join(map(str, self.choices))
        return f"{{{names}}}" if isinstance(param, click.Argument) and param.required else f"[{names}]"
