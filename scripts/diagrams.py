"""Draw docs/diagrams/pipeline.svg and docs/diagrams/packages.svg.

Run `python scripts/diagrams.py` after the layers of tests/test_architecture.py change; a test compares. The drawings
use the colours of the page that contains them; without a page they are light or dark, as the reader prefers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "diagrams"
sys.path.insert(0, str(ROOT))

from tests.test_architecture import LAYERS  # noqa: E402  the path comes first

_STYLE = """
.diagram { --page: #ffffff; --panel: #f6f8fa; --text: #1f2328; --muted: #59636e; --accent: #0a4bff; }
@media (prefers-color-scheme: dark) {
.diagram { --page: #131416; --panel: #1a1c1e; --text: #cfd0d0; --muted: #9ca0a5; --accent: #3d94ff; }
}
.diagram .page { fill: var(--color-background-primary, var(--page)); }
.diagram text { fill: var(--color-foreground-primary, var(--text)); font: 14px system-ui, sans-serif; }
.diagram text { text-anchor: middle; }
.diagram .small { fill: var(--color-foreground-secondary, var(--muted)); font-size: 12px; }
.diagram .file { fill: var(--color-background-secondary, var(--panel)); }
.diagram .file { stroke: var(--color-foreground-border, var(--muted)); }
.diagram .step { fill: var(--color-background-primary, var(--page)); }
.diagram .step { stroke: var(--color-brand-primary, var(--accent)); }
.diagram .step-name { font: 600 14px ui-monospace, monospace; }
.diagram .arrow { fill: none; stroke: var(--color-foreground-secondary, var(--muted)); stroke-width: 1.5; }
.diagram .head { fill: var(--color-foreground-secondary, var(--muted)); }
"""
_BOX_HEIGHT = 52


def _box(kind: str, x: int, y: int, width: int, lines: Sequence[str]) -> str:
    """Return a box with its top left corner at `x`, `y`, and one or two centred lines."""
    radius = 6 if kind == "file" else 16
    middle, centre = x + width / 2, y + _BOX_HEIGHT / 2
    top = centre + 5 if len(lines) == 1 else centre - 4
    name = "step-name" if kind == "step" else "name"
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="{radius}"/>']
    parts.append(f'<text class="{name}" x="{middle:g}" y="{top:g}">{escape(lines[0])}</text>')
    parts += [f'<text class="small" x="{middle:g}" y="{centre + 15:g}">{escape(line)}</text>' for line in lines[1:]]
    return "\n".join(parts)


def _arrow(*points: tuple[float, float]) -> str:
    """Return a line through `points` that ends in an arrowhead; its last segment is horizontal or vertical."""
    (before_x, before_y), (x, y) = points[-2:]
    dx, dy = (x > before_x) - (x < before_x), (y > before_y) - (y < before_y)
    line = " ".join(f"{px:g},{py:g}" for px, py in (*points[:-1], (x - 8 * dx, y - 8 * dy)))
    head = ((x, y), (x - 9 * dx + 5 * dy, y - 9 * dy + 5 * dx), (x - 9 * dx - 5 * dy, y - 9 * dy - 5 * dx))
    corners = " ".join(f"{px:g},{py:g}" for px, py in head)
    return f'<polyline class="arrow" points="{line}"/>\n<polygon class="head" points="{corners}"/>'


def _drawing(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return an SVG document, which also serves inside of an HTML page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" viewBox="0 0 {width} {height}"'
        f' width="{width}">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect class="page" width="{width}" height="{height}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def pipeline() -> str:
    """Draw the commands between the files that they read and write."""
    top, middle, bottom = 12, 92, 172
    half = _BOX_HEIGHT / 2
    parts = [
        _box("file", 8, middle, 118, ("checkpoint", "hub id or folder")),
        _box("step", 156, middle, 96, ("export",)),
        _box("file", 282, middle, 110, ("model.onnx", "verified")),
        _box("step", 422, middle, 104, ("optimize",)),
        _box("file", 556, middle, 130, ("optimized.onnx", "verified")),
        _box("step", 732, top, 96, ("infer",)),
        _box("step", 732, middle, 96, ("stats",)),
        _box("step", 422, bottom, 104, ("artifacts",)),
        _box("file", 860, top, 132, ("answers", "vectors, timings")),
        _box("file", 860, middle, 132, ("summary", "difference, gates")),
        _box("file", 556, bottom, 130, ("training files", "verified")),
        _arrow((126, middle + half), (156, middle + half)),
        _arrow((252, middle + half), (282, middle + half)),
        _arrow((392, middle + half), (422, middle + half)),
        _arrow((526, middle + half), (556, middle + half)),
        _arrow((686, middle + half), (732, middle + half)),
        _arrow((709, middle + half), (709, top + half), (732, top + half)),
        _arrow((407, middle + half), (407, bottom + half), (422, bottom + half)),
        _arrow((828, top + half), (860, top + half)),
        _arrow((828, middle + half), (860, middle + half)),
        _arrow((526, bottom + half), (556, bottom + half)),
    ]
    return _drawing("The pipeline of onnxtool: commands, and the files that they read and write", 1000, 236, parts)


def packages() -> str:
    """Draw the packages by layers; a package imports only packages of the rows below its own."""
    rows = [[name for name in names if name != "__main__"] for names in LAYERS]
    rows = [names for names in rows if names]
    width, pitch, left = 760, _BOX_HEIGHT + 20, 40
    parts = [_arrow((18, 12), (18, len(rows) * pitch - 12))]
    parts.append(f'<text class="small" transform="translate(12 {len(rows) * pitch / 2:g}) rotate(-90)">imports</text>')
    for number, names in enumerate(rows):
        y = 4 + number * pitch
        parts.append(f'<rect class="file" x="{left}" y="{y}" width="{width - left - 4}" height="{pitch - 6}" rx="8"/>')
        widths = [9 * len(name) + 16 for name in names]
        gap = (width - left - 4 - sum(widths)) / (len(names) + 1)
        for place, name in enumerate(names):
            x = round(left + (place + 1) * gap + sum(widths[:place]))
            parts.append(_box("step", x, y + 7, widths[place], (name,)))
    title = "The packages of onnxtool in layers; a package imports only packages of the rows below its own"
    return _drawing(title, width, len(rows) * pitch, parts)


DRAWINGS = {"pipeline.svg": pipeline, "packages.svg": packages}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, draw in DRAWINGS.items():
        (FOLDER / file).write_text(draw(), encoding="utf-8", newline="\n")
