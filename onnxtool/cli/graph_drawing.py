"""Draw the graph of one or two models as HTML: operators in order, and repeated blocks once, with their count.

The page of a report escapes text; numbers may have bars.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onnxtool.cli.stats_blocks import Section, join, shown_rows, signatures
from onnxtool.cli.streams import printable
from onnxtool.model_file.wire.topology import MAX_DRAWN_NODES, WiredNode, read_topology
from onnxtool.reports import TensorInfo
from onnxtool.summary import FUSED_OPERATORS
from onnxtool.summary.figures import Difference, Stats
from onnxtool.summary.repetition import RepeatedBlock, find_blocks

if TYPE_CHECKING:
    from markupsafe import Markup

_MAX_BOXES = 500  # of a list; and four times as many of a page
_MAX_READS = 4  # names in a box
_ANCHOR = 10  # a block of this part of a graph, or more, is compared with such a block of the other
_FUSED = frozenset().union(*FUSED_OPERATORS.values())


class Box(NamedTuple):
    """A drawn item: an operator, a repeated block, or nodes before and after a change; otherwise a note.

    Attributes:
        reads: the values that come from elsewhere than the preceding box.
        mark: added, removed or changed.
        is_block: whether its boxes have a title and a frame.
        base: in a comparison, the counterpart of `boxes` in the base.
    """

    op: str = ""
    is_fused: bool = False
    number: int = 0
    reads: str = ""
    mark: str = ""
    title: str = ""
    boxes: Sequence[Box] = ()
    base: Sequence[Box] = ()
    base_title: str = ""
    note: str = ""


class _DrawnGraph:
    """A graph to be drawn as boxes."""

    def __init__(self, stats: Stats, changed: frozenset[str] = frozenset()) -> None:
        self.stats, self.changed = stats, changed
        topology = read_topology(Path(stats.path))
        self.calls: Sequence[WiredNode] = () if topology is None else topology.calls
        self.is_drawn = stats.num_nodes <= MAX_DRAWN_NODES
        self.blocks = find_blocks(self.calls)
        self.inputs = frozenset(info.name for info in stats.inputs)
        self.boxes_left = 4 * _MAX_BOXES
        self.key = lru_cache(None)(self._key)

    def _key(self, block: RepeatedBlock, *, exact: bool) -> object:
        """Return a key that equal blocks share: operators, and if `exact`, also their attributes."""
        if block.times == 1:
            call = self.calls[block.start]
            return (call.op, call.attributes) if exact else call.op
        return block.times, tuple(self.key(item, exact=exact) for item in block.items)

    def is_changed(self, block: RepeatedBlock) -> bool:
        """Whether an edge of a node of a block is another one than in the base."""
        calls = self.calls[block.start : block.end]
        return any(call.name in self.changed or not self.changed.isdisjoint(call.outputs) for call in calls)

    def boxes(self, blocks: Sequence[RepeatedBlock], mark: str = "", *, numbered: bool = False) -> list[Box]:
        """Draw consecutive blocks, as many as fit."""
        boxes = []
        for number, block in enumerate(blocks[:_MAX_BOXES], 1):
            if self.boxes_left <= 0:
                break
            boxes.append(self.box(block, mark, number if numbered else 0, blocks))
        if rest := blocks[len(boxes) :]:
            ops = Counter(self.calls[place].op for block in rest for place in range(block.start, block.end))
            boxes.append(Box(note=f"and {ops.total():,} more nodes: {join(dict(ops.most_common(_MAX_BOXES // 50)))}"))
        return boxes

    def box(self, block: RepeatedBlock, mark: str, number: int, level: Sequence[RepeatedBlock]) -> Box:
        """Draw a block of the list `level`; if it has a number, with that and the values it reads."""
        self.boxes_left -= 1
        reads = self.reads(block, number, level) if number else ""
        if block.length > 1:
            boxes = self.boxes(block.items, numbered=number > 0)  # marked as a whole
            return Box(number=number, reads=reads, mark=mark, title=_title(block), boxes=boxes)
        op = self.calls[block.start].op
        note = "" if block.times == 1 else f"x {block.times} {'in a row' if block.is_chain else 'side by side'}"
        return Box(op, op in _FUSED or op.startswith("com.microsoft::"), number, reads, mark, note=note)

    def reads(self, block: RepeatedBlock, number: int, level: Sequence[RepeatedBlock]) -> str:
        """Name the values that a block reads: by the numbers of boxes, `in` from outside, or graph inputs."""
        starts = [each.start for each in level]
        numbers: set[int] = set()
        names: dict[str, None] = {}
        for call in self.calls[block.start : block.end]:
            for place, name in filter(None, call.wires):
                if place >= starts[0]:
                    numbers |= {bisect_right(starts, place)} - {number}
                elif place >= 0 or name in self.inputs:
                    names["in" if place >= 0 else str(name)] = None
        if not names and numbers <= {number - 1}:
            return ""
        listed = [*map(str, sorted(numbers)), *names]
        more = len(listed) - _MAX_READS
        return ", ".join(listed[:_MAX_READS]) + (f" and {more} more" if more > 0 else "")


def graph_drawing(report: Stats | Difference) -> str:
    """Draw the graph of a model, or its differences from the base, as a section of a page."""
    if isinstance(report, Difference):
        # Where operators differ, the edges to them do as well.
        edges = () if report.delta.ops else report.delta.edges.changes
        changed = frozenset(change.node for change in edges)
        graphs = model, base = [_DrawnGraph(report.model, changed), _DrawnGraph(report.base)]
        boxes = _compare(model, base, model.blocks, base.blocks)
    else:
        graphs = [model] = [_DrawnGraph(report)]
        boxes = model.boxes(model.blocks, numbered=True)
    after, before = graphs[0].stats, graphs[-1].stats
    too_large = [graph.stats.path for graph in graphs if not graph.is_drawn]
    return render_template(
        "graph.html.jinja",
        {"words": words},
        boxes=boxes,
        too_large=too_large,
        most=MAX_DRAWN_NODES,
        inputs=_ends(after.inputs, before.inputs),
        outputs=_ends(after.outputs, before.outputs),
        is_comparison=isinstance(report, Difference),
    )


def _ends(after: Sequence[TensorInfo], before: Sequence[TensorInfo]) -> list[Box]:
    """Draw the inputs or outputs of a graph, with differences from the base."""
    new, old = signatures(after), signatures(before)
    boxes = []
    for name, signature in (old | new).items():
        mark = "" if old.get(name) == new.get(name) else "added" if name not in old else "changed"
        if name not in new:
            mark = "removed"
        note = f"{signature}, was {old[name]}" if mark == "changed" else signature
        boxes.append(Box(name, mark=mark, note=note))
    return boxes


def _title(block: RepeatedBlock) -> str:
    wired = "each reads the one before" if block.is_chain else "side by side"
    return f"x {block.times}: {block.length} nodes, {wired}"


def _compare(
    model: _DrawnGraph, base: _DrawnGraph, after: Sequence[RepeatedBlock], before: Sequence[RepeatedBlock]
) -> list[Box]:
    """Draw the common parts of two lists once, and between them removed parts next to added ones."""
    anchors = [_anchor(graph, blocks) for graph, blocks in ((model, after), (base, before))]
    if anchors[0] < 0 or anchors[1] < 0:
        return _compare_items(model, base, after, before)
    here, there = anchors
    new, old = after[here], before[there]
    leading = _compare(model, base, after[:here], before[:there])
    if model.key(new, exact=True) == base.key(old, exact=True):
        pair = model.box(new, "", 0, after)
    else:
        boxes, base_boxes = _sides(model, base, new.items, old.items)
        pair = Box(title=_title(new), boxes=boxes, base=base_boxes, base_title=_title(old))
    return [*leading, pair, *_compare(model, base, after[here + 1 :], before[there + 1 :])]


def _anchor(graph: _DrawnGraph, blocks: Sequence[RepeatedBlock]) -> int:
    """Return the position of the repeated block with the most nodes; -1 if all are small parts of the graph."""
    place = max(range(len(blocks)), key=lambda place: blocks[place].end - blocks[place].start, default=-1)
    is_large = place >= 0 and (blocks[place].end - blocks[place].start) * _ANCHOR >= len(graph.calls)
    return place if is_large and blocks[place].times > 1 else -1


def _opcodes(
    model: _DrawnGraph, base: _DrawnGraph, after: Sequence[RepeatedBlock], before: Sequence[RepeatedBlock]
) -> Sequence[tuple[str, int, int, int, int]]:
    """Align two lists by their operators, as many as are drawn."""
    new = [model.key(block, exact=False) for block in after[:_MAX_BOXES]]
    old = [base.key(block, exact=False) for block in before[:_MAX_BOXES]]
    return SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def _equal(
    model: _DrawnGraph, base: _DrawnGraph, after: Sequence[RepeatedBlock], before: Sequence[RepeatedBlock]
) -> list[Box]:
    """Draw blocks of the same operators; different attributes, or changed edges, mark them as changed."""
    pairs = zip(after, before, strict=True)
    changed = [model.key(new, exact=True) != base.key(old, exact=True) or model.is_changed(new) for new, old in pairs]
    return [
        model.box(new, "changed" if is_changed else "", 0, after)
        for new, is_changed in zip(after, changed, strict=True)
    ]


def _compare_items(
    model: _DrawnGraph, base: _DrawnGraph, after: Sequence[RepeatedBlock], before: Sequence[RepeatedBlock]
) -> list[Box]:
    boxes: list[Box] = []
    for kind, i, j, k, m in _opcodes(model, base, after, before):
        if kind == "equal":
            boxes += _equal(model, base, after[k:m], before[i:j])
        elif kind == "replace":
            boxes.append(Box(boxes=model.boxes(after[k:m], "added"), base=base.boxes(before[i:j], "removed")))
        else:
            boxes += base.boxes(before[i:j], "removed") + model.boxes(after[k:m], "added")
    for graph, blocks in ((base, before), (model, after)):
        if len(blocks) > _MAX_BOXES:
            num_nodes = sum(block.end - block.start for block in blocks[_MAX_BOXES:])
            boxes.append(Box(note=f"{graph.stats.path} has {num_nodes:,} more nodes here, which are not compared"))
    return boxes


def _sides(
    model: _DrawnGraph, base: _DrawnGraph, after: Sequence[RepeatedBlock], before: Sequence[RepeatedBlock]
) -> tuple[list[Box], list[Box]]:
    """Draw two blocks separately, marking the parts that the other lacks."""
    new: list[Box] = []
    old: list[Box] = []
    for kind, i, j, k, m in _opcodes(model, base, after, before):
        is_equal = kind == "equal"
        new += _equal(model, base, after[k:m], before[i:j]) if is_equal else model.boxes(after[k:m], "added")
        old += base.boxes(before[i:j], "" if is_equal else "removed")
    return new, old


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
