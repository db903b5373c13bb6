"""Write what was measured into a page of the documentation, whose prose stands there alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def replace(page: str, pattern: str, text: str) -> str:
    """Replace the one place of a page that matches `pattern`, in which ^ and $ are those of a line.

    Raises:
        ValueError: there is none, or there are several.
    """
    found, count = re.subn(pattern, lambda _: text, page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"the page has {count} places like {pattern}, and not one")
    return found


def replace_rows(page: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Replace the rows of the table with this head."""
    lines = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    lines.insert(1, f"|{'---|' * len(head)}\n")
    return replace(page, rf"^{re.escape(lines[0])}(?:\|.*\n)*", "".join(lines))
