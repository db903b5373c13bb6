"""What a terminal shows of a report must not depend on how wide it is."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from unittest import mock

from onnxtool.cli import render
from onnxtool.cli.render import Block, Table

WIDTHS = (60, 80, 120)
_RULES = re.compile(r"[\s\u2500]")  # spaces, and the lines that rich draws


def screen(blocks: Sequence[Block], width: int) -> str:
    """Return what a terminal of `width` columns shows."""
    shown = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)}), mock.patch("sys.stdout", shown):
        render._print_rich(blocks)
    return shown.getvalue()


def require_whole_tables(blocks: Sequence[Block]) -> None:
    """Assert that tables lose no character on a terminal that is narrower than they are, and break no figure in two.

    All else is printed line by line, which the terminal breaks itself.
    """
    for table in blocks:
        if not isinstance(table, Table):
            continue
        cells = [*table.columns, *(cell for row in table.rows for cell in row)]
        figures = [
            row[place] for row in table.rows for place, title in enumerate(table.columns) if title in table.numbers
        ]
        natural = max(map(len, render._columns(table)))
        for width in (width for width in WIDTHS if width < natural):
            shown = screen([table], width)
            assert Counter(_RULES.sub("", shown)) == Counter(_RULES.sub("", "".join(cells))), f"{width}:\n{shown}"
            broken = [figure for figure in figures if figure not in shown]
            assert not broken, f"{width} columns break {broken}:\n{shown}"
