"""Summaries and differences as sections, in the order shown by text, Markdown and HTML, and as text blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxtool.cli.render import (
    VERIFICATION_LABELS,
    Block,
    Facts,
    Heading,
    Note,
    Table,
    format_bytes,
    format_shape,
    format_tensor,
    show,
    verification_figures,
)
from onnxtool.errors import shorten
from onnxtool.model_file.metadata import (
    COMPILED_KEY,
    SIZES_KEY,
    STEPS_KEY,
    TEXT_KEY,
    License,
    parse_compiled,
    parse_sizes,
    parse_text_input,
)
from onnxtool.reports import Json, TensorInfo
from onnxtool.summary.figures import Difference, Edges, MappingDelta, Stats, StatsDelta

ABSENT = "absent"
_UNCHANGED, _CHANGED = "unchanged", "changed"
_MAX_CELL_LENGTH = 160
_VERIFICATION = ("reference", "max_abs_error", "cosine_min", "cases")
_VERIFICATION_KEYS = frozenset({*VERIFICATION_LABELS, "verified", "rtol", "cosine_required", "error", "arithmetic"})
_NUM_STEPS = 3  # only the last ones are shown side by side, to fit a phone; onnxtool's own files have two
_NOT_RECORDED = "-"

# A row of a comparison: the name, the base's value, the model's value, and the change.
Row = tuple[str, str, str, str]


def join(counts: Mapping[str, int], show: Callable[[int], str] = str) -> str:
    """Write counts on one line: `float32 8.0 kB, int64 24 B`."""
    return ", ".join(f"{name} {show(count)}" for name, count in counts.items()) or "none"


def replaced(name: str, after: int | str | None, before: int | str | None) -> Row:
    """Return the row of a value without a numeric difference, such as a version."""
    was, now = (ABSENT if value is None else str(value) or "not stated" for value in (before, after))
    return name, was, now, _UNCHANGED if after == before else _CHANGED


def compared(name: str, after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> Row:
    """Return the row of a figure."""
    return name, show(before), show(after), growth(after, before, show)


def comparison(before: str, after: str, change: str) -> str:
    """Write a row on one line: `3, was 5 (-2, -40.0%)`."""
    if change == _UNCHANGED:
        return f"{after}, unchanged"
    return f"{after}, was {before}" + (f" ({change})" if change != _CHANGED else "")


def growth(after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> str:
    """Write the change of a figure: `-2, -40.0%`."""
    if after == before:
        return _UNCHANGED
    percent = f", {(after - before) / before:+.1%}" if before else ""
    return f"{signed(after - before, show)}{percent}"


def signed(amount: int, show: Callable[[int], str] = "{:,}".format) -> str:
    """Write an amount with its sign."""
    return f"{'+' if amount > 0 else ''}{show(amount)}"


def needs(stats: Stats) -> str:
    """Write what is needed to load a model."""
    opsets = join(stats.opsets) if stats.opsets else "no opset"
    return f"{opsets}; IR {stats.ir_version}; onnxruntime {stats.min_onnxruntime or 'of no release that is known'}"


def names_of(changes: MappingDelta) -> list[str]:
    """Return all differences by name."""
    return sorted([*changes.added, *changes.removed, *changes.changed])


def counts_of(changes: MappingDelta) -> str:
    """Write the numbers of changes: `1 added, 2 removed, 3 changed`; empty if nothing differs."""
    counts = {"added": changes.added, "removed": changes.removed, "changed": changes.changed}
    return ", ".join(f"{len(entries)} {verb}" for verb, entries in counts.items() if entries)


def initializers_of(delta: StatsDelta) -> str:
    """Write how the initializers differ; empty if all are the same."""
    more = {"renamed": len(delta.renamed), "not compared by their data": delta.num_not_hashed}
    return ", ".join(filter(None, [counts_of(delta.weights), *(f"{n} {label}" for label, n in more.items() if n)]))


def initializer_row(model: Stats, base: Stats, delta: StatsDelta) -> Row:
    """Return the row of the number of initializers, with how they differ."""
    *values, change = compared("Initializers", model.num_initializers, base.num_initializers)
    changes = [change] if change != _UNCHANGED else []
    return values[0], values[1], values[2], "; ".join(filter(None, [*changes, initializers_of(delta)])) or _UNCHANGED


def entry_rows(changes: MappingDelta, show: Callable[[Json], str]) -> list[tuple[str, str, str]]:
    """Return name, base value and model value of every entry that differs."""
    rows = []
    for name in names_of(changes):
        change = changes.changed.get(name)
        before = change.before if change else changes.removed.get(name)
        after = change.after if change else changes.added.get(name)
        values = [ABSENT if value is None else show(value) for value in (before, after)]
        rows.append((name, values[0], values[1]))
    return rows


def show_weight(value: Json) -> str:
    """Write an initializer of a difference: `float32 [768, 768]`, with the start of its hash."""
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        return show(value)
    digest = str(value.get("sha256", ""))[:12]
    shape = value["shape"]
    sizes = (
        format_shape(size if isinstance(size, int | str) else None for size in shape) if isinstance(shape, list) else ""
    )
    return f"{value['dtype']} {sizes}{f' {digest}' if digest else ''}"


def signatures(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Return inputs or outputs by name, as `float32 [batch, 384]`."""
    return {tensor.name: format_tensor(tensor) for tensor in tensors}


def metadata_of(stats: Stats) -> dict[str, str]:
    """Return the metadata, with the recorded steps reduced to their names."""
    values = dict(stats.metadata)
    if stats.steps:
        values[STEPS_KEY] = ", ".join(str(step.get("step", "?")) for step in stats.steps)
    return values


def license_of(stats: Stats) -> str:
    """Return the license with the details that distinguish it from similar ones."""
    described = str(License(stats.license, stats.license_name))
    return f"{described}, {stats.license_link}" if stats.license_link else described


def edges_of(edges: Edges) -> str:
    """Write how many edges differ; empty if none does."""
    if edges.compared:
        return f"{edges.changed:,} changed" if edges.changed else ""
    return f"{edges.changed:,} changed, and others not compared" if edges.changed else "not compared"


def edge_rows(edges: Edges) -> list[tuple[str, str, str, str]]:
    """Return node, what of it differs, and its values in base and model, of every change."""
    rows = []
    for change in edges.changes:
        part = f" in {change.layer}" if change.layer not in change.node else ""
        values = change.before or ABSENT, change.after or ABSENT
        rows.append((f"{change.node} ({change.op}){part}", change.what, *values))
    return rows


def interface_notes(base: Stats, model: Stats, inputs: MappingDelta, outputs: MappingDelta) -> list[str]:
    """Return what callers of the base must know about the model's inputs and outputs."""
    notes = []
    for kind, changes, before, after in (
        ("inputs", inputs, base.inputs, model.inputs),
        ("outputs", outputs, base.outputs, model.outputs),
    ):
        if changes:
            counts = f"{len(changes.added)} added, {len(changes.removed)} removed, {len(changes.changed)} changed"
            notes.append(f"the {kind} differ ({counts}); what feeds or reads the base may not fit this model")
        elif [tensor.name for tensor in before] != [tensor.name for tensor in after]:
            notes.append(f"the {kind} are in another order; what addresses them by position may not fit this model")
    return notes


def step_row(number: int, step: Mapping[str, Json]) -> tuple[str, str]:
    """Write a recorded step: its name and its details, without the verification."""
    details = {key: value for key, value in step.items() if key not in _VERIFICATION_KEYS}
    passes = details.get("passes")
    if isinstance(passes, dict):
        details["passes"] = {name: count for name, count in passes.items() if count != 0}
    return step_title(number, step), ", ".join(
        f"{key} {show(value)}" for key, value in details.items() if key != "step"
    )


def step_title(number: int, step: Mapping[str, Json]) -> str:
    """Write the title of a step: `2. optimize int8`."""
    words = [show(step[key]) for key in ("step", "precision") if key in step]
    return f"{number}. {shorten(' '.join(words), 40)}"


def verification_table(steps: Sequence[Mapping[str, Json]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the verification recorded by the last steps; no rows if none did.

    Files are untrusted and may record anything, so a value may have any type.
    """
    numbered = [(number, step) for number, step in enumerate(steps, 1) if "verified" in step][-_NUM_STEPS:]
    columns = ("Figure", *(step_title(number, step) for number, step in numbered))
    recorded = [_recorded(step) for _, step in numbered]
    labels = list(dict.fromkeys(label for figures in recorded for label in figures))
    return columns, [(label, *(figures.get(label, _NOT_RECORDED) for figures in recorded)) for label in labels]


def _recorded(step: Mapping[str, Json]) -> dict[str, str]:
    if step.get("verified") is not True:
        return {"Result": "not verified"}
    figures = {"Result": "passed", **verification_figures(step)}
    if step.get("error") is not None:
        figures["Quantization error"] = f"1 - cosine {show(step['error'])}"
    errors = step.get("arithmetic")
    for arithmetic, error in errors.items() if isinstance(errors, dict) else ():
        figures[f"Error in {shorten(arithmetic, 40)} arithmetic"] = (
            "not for such CPUs" if error is None else f"1 - cosine {show(error)}"
        )
    return figures


def last_verification(stats: Stats) -> str:
    """Write how the last step was verified; empty for files made by other tools."""
    if not stats.steps:
        return ""
    step = stats.steps[-1]
    name = show(step.get("step", "?"))
    if step.get("verified") is not True:
        return f"{name}, not verified"
    figures = ", ".join(f"{key} {show(step[key])}" for key in _VERIFICATION if step.get(key) is not None)
    return f"{name}, verified: {figures}"


MAX_ROWS = 40
_CHANGES = ("Base", "Model", "Change")
_COMPARED = ("Figure", *_CHANGES)
_EDGES = ("Node", "What", "Base", "Model")


class Section(NamedTuple):
    """A table with its title, for text, Markdown and HTML alike.

    Attributes:
        names: columns of names from a model file, shown as code in Markdown.
        numbers: columns that are right-aligned in text and HTML.
        bars: columns of numbers, each with a fraction from 0 to 1 per row that HTML draws as a bar.
        is_long: whether text and HTML show only the first rows.
        is_whole: whether they show long cells in full.
        is_facts: whether text shows each row as a line `name: value`.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: Sequence[str] = ()
    numbers: Sequence[str] = ()
    bars: Mapping[str, Sequence[float]] = {}
    is_long: bool = False
    is_whole: bool = False
    is_facts: bool = False


def summary_blocks(stats: Stats, title: str, *, details: bool = False) -> list[Block]:
    """Describe one model, under a heading; with `details`, its verification, weights, parts and functions too."""
    return _blocks(title, summary_sections(stats, details=details))


def difference_blocks(difference: Difference) -> list[Block]:
    """Describe how a model differs from its base: figures first, then changes in detail."""
    title = f"{difference.model.path} against {difference.base.path}"
    return _blocks(title, difference_sections(difference), difference_notes(difference))


def _blocks(title: str, sections: Sequence[Section], notes: Sequence[str] = ()) -> list[Block]:
    """Make the blocks of the sections; the first, the figures, uses the title as its heading."""
    figures, *others = sections
    blocks: list[Block] = [Heading(title), *_section_blocks(figures)[1:], *map(Note, notes)]
    for section in others:
        blocks += _section_blocks(section)
    return blocks


def summary_sections(stats: Stats, *, details: bool = True) -> list[Section]:
    """Return the sections of one model: figures, graph, weights; with `details`, verification and parts."""
    columns = ("Name", "Dtype", "Shape")
    weights = [
        (dtype, f"{stats.parameters.get(dtype, 0):,}", format_bytes(size))
        for dtype, size in stats.initializer_bytes.items()
    ]
    sections = [
        Section("Figures", ("Figure", "Value"), _summary_facts(stats), is_facts=True),
        *((_verification_section(stats),) if details else ()),
        *(
            Section(title, columns, [(info.name, info.dtype, format_shape(info.shape)) for info in tensors], columns)
            for title, tensors in (("Inputs", stats.inputs), ("Outputs", stats.outputs))
        ),
        _counts("Operators", "Operator", "Nodes", stats.ops),
        Section(
            "Weights by dtype",
            ("Dtype", "Parameters", "Bytes"),
            weights,
            ["Dtype"],
            ("Parameters", "Bytes"),
            bars={"Bytes": _parts(stats.initializer_bytes.values())},
        ),
        *(_detail_sections(stats) if details else ()),
        *_metadata_sections(stats),
    ]
    return [section for section in sections if section.rows]


def difference_sections(difference: Difference) -> list[Section]:
    """Return the figures of both models, the model's verification, and one section for each kind of change."""
    base, model, delta = difference.base, difference.model, difference.delta
    columns = ("Name", "Base", "Model")
    entries = [
        Section(title, columns, [(n, before.get(n, ABSENT), after.get(n, ABSENT)) for n in names_of(changes)], columns)
        for title, changes, before, after in (
            ("Inputs", delta.inputs, signatures(base.inputs), signatures(model.inputs)),
            ("Outputs", delta.outputs, signatures(base.outputs), signatures(model.outputs)),
            ("Metadata", delta.metadata, metadata_of(base), metadata_of(model)),
        )
    ]
    nodes, other_nodes = ({name: layer.num_nodes for name, layer in each.layers.items()} for each in (base, model))
    sizes, other_sizes = ({name: layer.size_bytes for name, layer in each.layers.items()} for each in (base, model))
    parts = [*base.layers, *(name for name in model.layers if name not in base.layers)]
    renamed = list(delta.renamed.items())
    sections = [
        Section("Figures", _COMPARED, _difference_figures(base, model, delta), (), _CHANGES, is_facts=True),
        _verification_section(model),
        *entries[:2],
        _changed_counts("Operators", "Operator", _most_changed(delta.ops, base, model), base.ops, model.ops),
        _changed_counts("Nodes by part", "Part", parts, nodes, other_nodes),
        _changed_counts("Weights by part", "Part", parts, sizes, other_sizes, show=format_bytes),
        Section("Edges, attributes and constants", _EDGES, edge_rows(delta.edges), _EDGES, is_long=True),
        Section("Initializers", columns, entry_rows(delta.weights, show_weight), columns, is_long=True),
        Section("Initializers of another name", ("Base", "Model"), renamed, ["Base", "Model"], is_long=True),
        entries[2],
    ]
    return [section for section in sections if section.rows]


def difference_notes(difference: Difference) -> list[str]:
    """Return what callers of the base must know or, if nothing differs, what was not compared."""
    delta = difference.delta
    notes = interface_notes(difference.base, difference.model, delta.inputs, delta.outputs)
    if not delta.edges.compared:
        notes.append("edges are compared in part: the graphs are too large, or too different")
    if delta.num_not_hashed:
        notes.append(f"the data of {delta.num_not_hashed:,} initializers is not compared")
    return notes


def _verification_section(stats: Stats) -> Section:
    """Return the verification recorded in the file for each step."""
    columns, rows = verification_table(stats.steps)
    return Section("Verification, as the model records it", columns, rows, is_long=True)


def _detail_sections(stats: Stats) -> list[Section]:
    """Return the parts, initializers and functions of a model."""
    layers = [(name, str(layer.num_nodes), format_bytes(layer.size_bytes)) for name, layer in stats.layers.items()]
    largest = [
        (each.name, each.dtype, format_shape(each.shape), format_bytes(each.size_bytes)) for each in stats.largest
    ]
    duplicates = [(", ".join(entry.names), format_bytes(entry.size_bytes)) for entry in stats.duplicates]
    functions = [(entry.name, str(entry.num_nodes), join(entry.opsets)) for entry in stats.functions]
    return [
        Section(
            "Parts by scope",
            ("Part", "Nodes", "Weights"),
            layers,
            ["Part"],
            ("Nodes", "Weights"),
            bars={
                "Nodes": _parts(layer.num_nodes for layer in stats.layers.values()),
                "Weights": _parts(layer.size_bytes for layer in stats.layers.values()),
            },
            is_long=True,
        ),
        Section(
            "Largest initializers",
            ("Name", "Dtype", "Shape", "Size"),
            largest,
            ["Name", "Dtype", "Shape"],
            ["Size"],
            bars={"Size": _parts(each.size_bytes for each in stats.largest)},
        ),
        Section("Stored more than once", ("Names", "Wasted"), duplicates, ["Names"], ["Wasted"]),
        Section(
            "Functions of the model",
            ("Function", "Nodes", "Opsets"),
            functions,
            ["Function", "Opsets"],
            ["Nodes"],
            is_long=True,
        ),
    ]


def _metadata_sections(stats: Stats) -> list[Section]:
    """Return the metadata of a model, and the steps that onnxtool recorded there."""
    metadata = [(key, value) for key, value in stats.metadata.items() if key != STEPS_KEY or not stats.steps]
    steps = [step_row(number, step) for number, step in enumerate(stats.steps, 1)]
    return [
        Section("Metadata", ("Key", "Value"), metadata, ["Key", "Value"]),
        Section("What onnxtool did", ("Step", "Details"), steps, ["Step", "Details"], is_whole=True),
    ]


def _counts(title: str, what: str, column: str, counts: Mapping[str, int]) -> Section:
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    return Section(title, (what, column), rows, [what], [column], bars={column: _parts(counts.values())})


def _changed_counts(
    title: str,
    what: str,
    names: Sequence[str],
    base: Mapping[str, int],
    model: Mapping[str, int],
    show: Callable[[int], str] = "{:,}".format,
) -> Section:
    """Return the names whose counts differ between the base and the model."""
    counts = [(name, base.get(name, 0), model.get(name, 0)) for name in names]
    counts = [(name, before, after) for name, before, after in counts if before != after]
    rows = [(name, show(before), show(after), signed(after - before, show)) for name, before, after in counts]
    parts = _parts([count for _, *both in counts for count in both])
    bars = {"Base": parts[::2], "Model": parts[1::2]}
    return Section(title, (what, *_CHANGES), rows, [what], _CHANGES, bars=bars, is_long=what == "Part")


def _most_changed(changes: MappingDelta, base: Stats, model: Stats) -> list[str]:
    """Return the operators that differ, largest difference first."""
    return sorted(names_of(changes), key=lambda op: (-abs(model.ops.get(op, 0) - base.ops.get(op, 0)), op))


def _parts(amounts: Iterable[int]) -> list[float]:
    """Return each amount as a fraction of the largest."""
    amounts = list(amounts)
    largest = max(amounts, default=0) or 1
    return [amount / largest for amount in amounts]


def _summary_facts(stats: Stats) -> list[tuple[str, str]]:
    external = f", {format_bytes(stats.external_bytes)} of it external" if stats.external_bytes else ""
    facts = [
        ("Number of nodes", str(stats.num_nodes)),
        ("Number of inputs", str(stats.num_inputs)),
        ("Number of outputs", str(stats.num_outputs)),
        ("Initializers", str(stats.num_initializers)),
        ("Parameters", f"{stats.num_parameters:,}"),
        ("Size", f"{format_bytes(stats.size_bytes)} ({stats.size_bytes:,} bytes){external}"),
        ("Duplicates", format_bytes(stats.duplicate_bytes)),
        ("Fused attentions", str(stats.num_attentions)),
        ("Opsets", join(stats.opsets)),
        ("IR version", str(stats.ir_version)),
        ("Least onnxruntime", stats.min_onnxruntime or "none that is known"),
        ("Producer", stats.producer or "not stated"),
        ("License", license_of(stats)),
        ("Subgraphs", str(stats.num_subgraphs)),
        ("Functions", str(stats.num_functions)),
    ]
    if len(stats.domains) > 1:
        facts.append(("Nodes by domain", join(stats.domains)))
    if (stated := parse_text_input(stats.metadata.get(TEXT_KEY, ""))) is not None:
        facts += [("Tokenizer", note) for note in stated.notes]
    for sized_file in parse_sizes(stats.metadata.get(SIZES_KEY, "")) or ():
        facts.append(("Fixed sizes", f"{join(sized_file.sizes)} in {sized_file.file}"))
    if (compiled := parse_compiled(stats.metadata.get(COMPILED_KEY, ""))) is not None:
        on = f"{compiled.provider} {compiled.version}, onnxruntime {compiled.runtime}, {compiled.hardware}"
        facts += [("Compiled for", on), ("Compiled part", compiled.context)]
    if stats.attribute_bytes:
        facts.append(("Tensors in attributes", format_bytes(stats.attribute_bytes)))
    return facts


def _difference_figures(base: Stats, model: Stats, delta: StatsDelta) -> list[Row]:
    rows = [
        compared("Number of nodes", model.num_nodes, base.num_nodes),
        compared("Number of inputs", model.num_inputs, base.num_inputs),
        compared("Number of outputs", model.num_outputs, base.num_outputs),
        initializer_row(model, base, delta),
        replaced("Changed edges", delta.edges.changed, 0),
        compared("Parameters", model.num_parameters, base.num_parameters),
        compared("Size", model.size_bytes, base.size_bytes, format_bytes),
    ]
    for dtype in sorted(model.initializer_bytes.keys() | base.initializer_bytes.keys()):
        before, after = base.initializer_bytes.get(dtype, 0), model.initializer_bytes.get(dtype, 0)
        rows.append(compared(f"Weights in {dtype}", after, before, format_bytes))
    rows += [
        compared("Duplicates", model.duplicate_bytes, base.duplicate_bytes, format_bytes),
        compared("Fused attentions", model.num_attentions, base.num_attentions),
    ]
    domains = sorted(model.opsets.keys() | base.opsets.keys())
    return [
        *rows,
        *(replaced(f"Opset {domain}", model.opsets.get(domain), base.opsets.get(domain)) for domain in domains),
        replaced("IR version", model.ir_version, base.ir_version),
        replaced("Least onnxruntime", model.min_onnxruntime, base.min_onnxruntime),
        replaced("Producer", model.producer, base.producer),
        replaced("License", license_of(model), license_of(base)),
    ]


def _section_blocks(section: Section) -> list[Block]:
    """Make a heading and a table, with long cells shortened."""
    rows, left_out = shown_rows(section)
    if not section.is_facts:
        body: Block = Table(section.columns, rows, frozenset(section.numbers))
    elif section.columns == _COMPARED:
        body = Facts([(name, comparison(before, after, change)) for name, before, after, change in rows])
    else:
        body = Facts([(name, value) for name, value in rows])
    return [Heading(section.title), body, *([Note(left_out)] if left_out else [])]


def shown_rows(section: Section) -> tuple[Sequence[Sequence[str]], str]:
    """Return the rows that text and HTML show, and a note about omitted rows; empty if there are none."""
    rows = section.rows[:MAX_ROWS] if section.is_long else section.rows
    more = len(section.rows) - len(rows)
    if not section.is_whole:
        rows = [[shorten(cell) for cell in row] for row in rows]
    return rows, f"and {more} more, all of them in --format json" if more else ""
