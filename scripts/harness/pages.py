"""Print tables as Markdown, and write them into pages of the documentation, whose prose stands there alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def markdown_row(cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_rule(num_columns: int) -> str:
    """Return the line below the head of a table."""
    return f"|{'---|' * num_columns}"


def print_head(columns: Sequence[str]) -> None:
    """Print the head of a table."""
    print(f"{markdown_row(columns)}\n{markdown_rule(len(columns))}", flush=True)


def print_row(*cells: object) -> None:
    """Print a row of a table at once, because the next one may take minutes."""
    print(markdown_row(cells), flush=True)


def replace(page: str, pattern: str, text: str) -> str:
    """Replace the only match of `pattern` in a page; ^ and $ match at lines.

    Raises:
        ValueError: there is no match, or there are several.
    """
    replaced, count = re.subn(pattern, lambda _: text, page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"the page has {count} matches of {pattern} instead of one")
    return replaced


def replace_rows(page: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Replace the rows of the table with this head."""
    first = markdown_row(head)
    lines = [first, markdown_rule(len(head)), *map(markdown_row, rows)]
    return replace(page, rf"^{re.escape(first)}\n(?:\|.*\n)*", "".join(f"{line}\n" for line in lines))
