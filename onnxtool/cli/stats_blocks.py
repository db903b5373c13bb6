"""A summary and a difference as blocks, for text on a terminal and elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

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
from onnxtool.reports import TensorInfo
from onnxtool.summary.figures import Cost, Difference, Stats

_MAX_ROWS = 40


def summary_blocks(stats: Stats, title: str, *, details: bool = False) -> list[Block]:
    """Describe one model, under a heading; with `details`, its weights, parts and functions too."""
    blocks: list[Block] = [
        Heading(title),
        Facts(_summary_facts(stats)),
        Heading("Inputs"),
        _tensor_table(stats.inputs),
        Heading("Outputs"),
        _tensor_table(stats.outputs),
        Heading("Operators"),
        _table(("Operator", "Nodes"), ((op, str(count)) for op, count in stats.ops.items()), numbers={"Nodes"}),
    ]
    if stats.cost is not None:
        blocks += _cost_blocks(stats.cost)
    if details:
        blocks += _detail_blocks(stats)
    metadata = [(key, value) for key, value in stats.metadata.items() if key != STEPS_KEY or not stats.steps]
    if metadata:
        blocks += [Heading("Metadata"), _table(("Key", "Value"), metadata)]
    if stats.steps:
        blocks += [Heading("What onnxtool did"), Table(("Step", "Details"), [step_row(step) for step in stats.steps])]
    return blocks


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


def _detail_blocks(stats: Stats) -> list[Block]:
    blocks: list[Block] = []
    if stats.layers:
        rows = [(name, str(layer.num_nodes), format_bytes(layer.size_bytes)) for name, layer in stats.layers.items()]
        blocks += [
            Heading("Parts by scope"),
            *_limited(("Part", "Nodes", "Weights"), rows, numbers={"Nodes", "Weights"}),
        ]
    if stats.largest:
        largest = [
            (weight.name, weight.dtype, format_shape(weight.shape), format_bytes(weight.size_bytes))
            for weight in stats.largest
        ]
        blocks += [
            Heading("Largest initializers"),
            _table(("Name", "Dtype", "Shape", "Size"), largest, numbers={"Size"}),
        ]
    if stats.duplicates:
        duplicates = [(", ".join(entry.names), format_bytes(entry.size_bytes)) for entry in stats.duplicates]
        blocks += [Heading("Stored more than once"), _table(("Names", "Wasted"), duplicates, numbers={"Wasted"})]
    if stats.functions:
        functions = [(entry.name, str(entry.num_nodes), join(entry.opsets)) for entry in stats.functions]
        blocks += [
            Heading("Functions of the model"),
            *_limited(("Function", "Nodes", "Opsets"), functions, numbers={"Nodes"}),
        ]
    return blocks


def difference_blocks(difference: Difference) -> list[Block]:
    """Describe what separates a model from its base: the figures first, then what changed in detail."""
    base, model, delta = difference.base, difference.model, difference.delta
    blocks: list[Block] = [Heading(f"{model.path} against {base.path}"), Facts(_difference_facts(base, model))]
    notes = interface_notes(base, model, delta.inputs, delta.outputs)
    if not notes and not any((delta.ops, delta.weights, delta.layers, delta.renamed)):
        notes = ["the same operators and initializers; " + _not_compared(difference)]
    blocks += [Note(text) for text in notes]
    columns = ("Base", "Model", "Change")
    if delta.ops:
        rows = operator_rows(delta.ops, base.ops, model.ops)
        blocks += [Heading("Operators"), _table(("Operator", *columns), rows, numbers=set(columns))]
    for title, changes, before, after in (
        ("Inputs", delta.inputs, signatures(base.inputs), signatures(model.inputs)),
        ("Outputs", delta.outputs, signatures(base.outputs), signatures(model.outputs)),
        ("Metadata", delta.metadata, metadata_of(base), metadata_of(model)),
    ):
        if changes:
            entries = ((name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names_of(changes))
            blocks += [Heading(title), _table(("Name", "Base", "Model"), entries)]
    if delta.layers:
        blocks += [Heading("Parts by scope"), *_limited(("Part", *columns), layer_rows(base, model))]
    if delta.weights:
        weights = entry_rows(delta.weights, show_weight)
        blocks += [Heading("Initializers"), *_limited(("Name", "Base", "Model"), weights)]
    if delta.renamed:
        renamed = list(delta.renamed.items())
        blocks += [Heading("Initializers of another name"), *_limited(("Base", "Model"), renamed)]
    return blocks


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


def _tensor_table(tensors: Iterable[TensorInfo]) -> Table:
    return _table(
        ("Name", "Dtype", "Shape"), ((tensor.name, tensor.dtype, format_shape(tensor.shape)) for tensor in tensors)
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: AbstractSet[str] = frozenset()) -> Table:
    """Make a table in which no cell is so long that it hides the others."""
    return Table(columns, [[shorten(cell) for cell in row] for row in rows], frozenset(numbers))


def _limited(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: AbstractSet[str] = frozenset()
) -> list[Block]:
    """Make a table of the first rows, and a note where there are more."""
    blocks: list[Block] = [_table(columns, rows[:_MAX_ROWS], numbers=numbers)]
    if len(rows) > _MAX_ROWS:
        blocks.append(Note(f"and {len(rows) - _MAX_ROWS} more, all of them in --format json"))
    return blocks
