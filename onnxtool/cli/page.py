"""HTML templates, and the HTML page of a report: text is escaped, and numbers may have bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtool.cli.stats_blocks import Section, shown_rows
from onnxtool.cli.streams import printable

if TYPE_CHECKING:
    from markupsafe import Markup

_LONG = re.compile(r"[^\s&;]{25,}")  # entities stay whole


def render_template(name: str, filters: Mapping[str, Callable[..., Any]], **values: object) -> str:
    """Fill in an HTML or SVG template from this package; all text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("onnxtool.cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"printable": printable, **filters}
    return environment.get_template(name).render(**values)


def sections_page(
    title: str,
    sections: Sequence[Section],
    gates: Sequence[str],
    notes: Sequence[str] = (),
    drawing: str = "",
) -> str:
    """Write sections as an HTML page, below failed gates and notes; a drawing follows the first."""
    from markupsafe import Markup

    return render_template(
        "page.html.jinja",
        {"words": words, "shown_rows": shown_rows},
        title=title,
        sections=sections,
        gates=gates,
        notes=notes,
        drawing=Markup(drawing),  # noqa: S704  its template has escaped it
    )


def words(text: str) -> Markup:
    """Escape text and let names break after separators; longer words break anywhere if necessary."""
    from markupsafe import Markup, escape

    # Do not break before short pieces, such as `.onnx` at the end of a file name.
    pieces = re.split(r"(?<=[./:])(?=[A-Za-z]\w{5})", printable(text))
    broken = "<wbr>".join(_LONG.sub(r'<span class="long">\g<0></span>', str(escape(piece))) for piece in pieces)
    return Markup(broken)  # noqa: S704  each piece is escaped
