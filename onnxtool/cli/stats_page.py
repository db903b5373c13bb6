"""A summary and a difference as one HTML page: the sections of text and Markdown, with bars beside the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtool.cli.page import sections_page
from onnxtool.cli.stats_blocks import difference_notes, difference_sections, summary_sections
from onnxtool.summary.figures import Difference, Stats


def summary_page(stats: Stats, gates: Sequence[str] = ()) -> str:
    """Write one model as an HTML page."""
    return sections_page(stats.path, summary_sections(stats), gates)


def difference_page(difference: Difference, gates: Sequence[str] = ()) -> str:
    """Write what separates two models as an HTML page."""
    title = f"{difference.model.path} against {difference.base.path}"
    return sections_page(title, difference_sections(difference), gates, difference_notes(difference))
