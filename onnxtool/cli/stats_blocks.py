"""A summary and a difference as sections, for all formats, and as blocks for text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_bytes, format_shape
from onnxtool.cli.stats_wording import (
    ABSENT,
    compared,
    entry_rows,
    format_count,
    interface_notes,
    join,
    layer_rows,
    metadata_of,
    names_of,
    operator_rows,
    replaced,
    shape_of,
    shorten,
    show_weight,
    signatures,
    step_row,
)
from onnxtool.model_file.metadata import STEPS_KEY
from onnxtool.summary.figures import Cost, Difference, Stats

_MAX_ROWS = 40


class Section(NamedTuple):
    """A table with its title, for text, Markdown and HTML alike.

    Attributes:
        names: columns of names from a model file, which Markdown shows as code.
        numbers: columns that are aligned to the right in text and HTML.
        is_long: whether text and HTML show the first rows only.
        is_whole: whether they show long cells whole.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: Sequence[str]
    numbers: Sequence[str] = ()
    is_long: bool = False
    is_whole: bool = False


def summary_blocks(stats: Stats, title: str, *, details: bool = False) -> list[Block]:
    """Describe one model, under a heading; with `details`, its weights, parts and functions too."""
    blocks: list[Block] = [Heading(title), Facts(_summary_facts(stats))]
    for section in graph_sections(stats):
        blocks += _section_blocks(section)
    if stats.cost is not None:
        blocks += _cost_blocks(stats.cost)
    for section in (*(detail_sections(stats) if details else ()), *metadata_sections(stats)):
        blocks += _section_blocks(section) if section.rows else []
    return blocks


def graph_sections(stats: Stats) -> list[Section]:
    """Return the inputs, outputs and operators of a model."""
    columns = ("Name", "Dtype", "Shape")
    return [
        *(
            Section(title, columns, [(info.name, info.dtype, format_shape(info.shape)) for info in tensors], columns)
            for title, tensors in (("Inputs", stats.inputs), ("Outputs", stats.outputs))
        ),
        Section(
            "Operators", ("Operator", "Nodes"), [(op, str(n)) for op, n in stats.ops.items()], ["Operator"], ["Nodes"]
        ),
    ]


def detail_sections(stats: Stats) -> list[Section]:
    """Return the parts, initializers and functions of a model."""
    layers = [(name, str(layer.num_nodes), format_bytes(layer.size_bytes)) for name, layer in stats.layers.items()]
    largest = [
        (each.name, each.dtype, format_shape(each.shape), format_bytes(each.size_bytes)) for each in stats.largest
    ]
    duplicates = [(", ".join(entry.names), format_bytes(entry.size_bytes)) for entry in stats.duplicates]
    functions = [(entry.name, str(entry.num_nodes), join(entry.opsets)) for entry in stats.functions]
    return [
        Section("Parts by scope", ("Part", "Nodes", "Weights"), layers, ["Part"], ["Nodes", "Weights"], is_long=True),
        Section(
            "Largest initializers", ("Name", "Dtype", "Shape", "Size"), largest, ["Name", "Dtype", "Shape"], ["Size"]
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


def metadata_sections(stats: Stats) -> list[Section]:
    """Return the metadata of a model, and the steps that onnxtool recorded there."""
    metadata = [(key, value) for key, value in stats.metadata.items() if key != STEPS_KEY or not stats.steps]
    steps = [step_row(step) for step in stats.steps]
    return [
        Section("Metadata", ("Key", "Value"), metadata, ["Key", "Value"]),
        Section("What onnxtool did", ("Step", "Details"), steps, ["Step", "Details"], is_whole=True),
    ]


def _summary_facts(stats: Stats) -> list[tuple[str, str]]:
    external = f", {format_bytes(stats.external_bytes)} of it external" if stats.external_bytes else ""
    facts = [
        ("Number of nodes", str(stats.num_nodes)),
        ("Number of inputs", str(stats.num_inputs)),
        ("Number of outputs", str(stats.num_outputs)),
        ("Initializers", str(stats.num_initializers)),
        ("Parameters", f"{stats.num_parameters:,}"),
        ("Size", f"{format_bytes(stats.size_bytes)} ({stats.size_bytes:,} bytes){external}"),
        ("Weights", join(stats.initializer_bytes, format_bytes)),
        ("Duplicates", format_bytes(stats.duplicate_bytes)),
        ("Fused attentions", str(stats.num_attentions)),
        ("Opsets", join(stats.opsets)),
        ("IR version", str(stats.ir_version)),
        ("Least onnxruntime", stats.min_onnxruntime or "none that is known"),
        ("Producer", stats.producer or "not stated"),
        ("Subgraphs", str(stats.num_subgraphs)),
        ("Functions", str(stats.num_functions)),
    ]
    if len(stats.domains) > 1:
        facts.append(("Nodes by domain", join(stats.domains)))
    optional = (
        ("Tensors in attributes", stats.attribute_bytes, format_bytes),
        ("Exporter's notes", stats.annotation_bytes, format_bytes),
        ("Quantized values", stats.num_quantized_values, str),
        ("Training records", stats.num_trainings, str),
    )
    return [*facts, *((name, show(amount)) for name, amount, show in optional if amount)]


def _cost_blocks(cost: Cost) -> list[Block]:
    facts = [
        ("Multiplications", f"{format_count(cost.macs)} ({cost.macs:,} MACs)"),
        ("By operator", join(cost.macs_by_op, format_count)),
        ("Activations", f"{format_bytes(cost.activation_bytes)}, {format_bytes(cost.peak_activation_bytes)} at once"),
    ]
    blocks: list[Block] = [Heading(f"One run on {shape_of(cost)}"), Facts(facts)]
    if cost.num_unknown_nodes:
        ops = join(cost.unknown_ops)
        blocks.append(Note(f"{cost.num_unknown_nodes} nodes of unknown shape are not in these figures: {ops}"))
    return blocks


def difference_blocks(difference: Difference) -> list[Block]:
    """Describe what separates a model from its base: the figures first, then what changed in detail."""
    base, model, delta = difference.base, difference.model, difference.delta
    blocks: list[Block] = [Heading(f"{model.path} against {base.path}"), Facts(_difference_facts(base, model))]
    notes = interface_notes(base, model, delta.inputs, delta.outputs)
    if not notes and not any((delta.ops, delta.weights, delta.layers, delta.renamed)):
        notes = ["the same operators and initializers; " + _not_compared(difference)]
    blocks += [Note(text) for text in notes]
    for section in difference_sections(difference):
        blocks += _section_blocks(section) if section.rows else []
    return blocks


def difference_sections(difference: Difference) -> list[Section]:
    """Return what changed, a section for each kind."""
    base, model, delta = difference.base, difference.model, difference.delta
    numbers = ("Base", "Model", "Change")
    columns = ("Name", "Base", "Model")
    entries = [
        Section(title, columns, [(n, before.get(n, ABSENT), after.get(n, ABSENT)) for n in names_of(changes)], columns)
        for title, changes, before, after in (
            ("Inputs", delta.inputs, signatures(base.inputs), signatures(model.inputs)),
            ("Outputs", delta.outputs, signatures(base.outputs), signatures(model.outputs)),
            ("Metadata", delta.metadata, metadata_of(base), metadata_of(model)),
        )
    ]
    operators = operator_rows(delta.ops, base.ops, model.ops)
    renamed = list(delta.renamed.items())
    return [
        Section("Operators", ("Operator", *numbers), operators, ["Operator"], numbers),
        *entries,
        Section("Parts by scope", ("Part", *numbers), layer_rows(base, model), ["Part"], is_long=True),
        Section("Initializers", columns, entry_rows(delta.weights, show_weight), columns, is_long=True),
        Section("Initializers of another name", ("Base", "Model"), renamed, ["Base", "Model"], is_long=True),
    ]


def _not_compared(difference: Difference) -> str:
    what = "attributes" if difference.delta.hashed else "values of weights, attributes"
    return f"{what} and edges are not compared"


def _difference_facts(base: Stats, model: Stats) -> list[tuple[str, str]]:
    rows = [
        ("Number of nodes", compared(model.num_nodes, base.num_nodes)),
        ("Number of inputs", compared(model.num_inputs, base.num_inputs)),
        ("Number of outputs", compared(model.num_outputs, base.num_outputs)),
        ("Initializers", compared(model.num_initializers, base.num_initializers)),
        ("Parameters", compared(model.num_parameters, base.num_parameters)),
        ("Size", compared(model.size_bytes, base.size_bytes, format_bytes)),
    ]
    for dtype in sorted(model.initializer_bytes.keys() | base.initializer_bytes.keys()):
        before, after = base.initializer_bytes.get(dtype, 0), model.initializer_bytes.get(dtype, 0)
        rows.append((f"Weights in {dtype}", compared(after, before, format_bytes)))
    rows += [
        ("Duplicates", compared(model.duplicate_bytes, base.duplicate_bytes, format_bytes)),
        ("Fused attentions", compared(model.num_attentions, base.num_attentions)),
    ]
    if model.cost is not None and base.cost is not None:
        peaks = model.cost.peak_activation_bytes, base.cost.peak_activation_bytes
        rows += [
            (f"MACs of {shape_of(model.cost)}", compared(model.cost.macs, base.cost.macs, format_count)),
            (f"Activations of {shape_of(model.cost)}", compared(*peaks, format_bytes)),
        ]
    domains = sorted(model.opsets.keys() | base.opsets.keys())
    return [
        *rows,
        *((f"Opset {domain}", replaced(model.opsets.get(domain), base.opsets.get(domain))) for domain in domains),
        ("IR version", replaced(model.ir_version, base.ir_version)),
        ("Least onnxruntime", replaced(model.min_onnxruntime, base.min_onnxruntime)),
        ("Producer", replaced(model.producer, base.producer)),
    ]


def _section_blocks(section: Section) -> list[Block]:
    """Make a heading and a table in which no cell is so long that it hides the others."""
    rows = section.rows[:_MAX_ROWS] if section.is_long else section.rows
    if not section.is_whole:
        rows = [[shorten(cell) for cell in row] for row in rows]
    table = Table(section.columns, rows, frozenset(section.numbers))
    blocks: list[Block] = [Heading(section.title), table]
    if len(section.rows) > len(rows):
        blocks.append(Note(f"and {len(section.rows) - len(rows)} more, all of them in --format json"))
    return blocks
