"""`onnxtool stats`: the summary of a model, or its difference from a base, and gates on either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import click

from onnxtool.cli.options import PathType, output_options, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_shape, format_tensor
from onnxtool.metadata import STEPS_KEY, parse_steps
from onnxtool.reports import Difference, Json, MappingDelta, Stats, TensorInfo, to_json
from onnxtool.stats import compare_models, summarize_model

_ABSENT = "absent"
_MAX_CELL_LENGTH = 160
_MAX_DEPTH = 3


@click.command(
    "stats",
    epilog="\b\nExample: onnxtool stats models/all-MiniLM-L6-v2.onnx --fail_if 'num_nodes>500'",
)
@click.argument("model", type=PathType())
@click.argument("base", type=PathType(), required=False)
@click.option(
    "--fail_if",
    metavar="EXPR",
    multiple=True,
    help="Exit with 1 where this holds: any number of the JSON report, one of > >= < <= == !=, and a number; with a"
    " sign, and % if you like, it is relative to BASE. E.g. 'num_nodes>500', 'ops.MatMul!=98', 'size_bytes>+5%'."
    " May be given several times.",
)
@output_options("Write the result to this file instead of stdout.")
@report_options
def command(
    model: Path,
    base: Path | None,
    fail_if: Sequence[str],
    format_name: str,
    quiet: bool,
    output: Path | None,
    force: bool,
) -> int:
    """Summarize the ONNX file MODEL, or say how it differs from the ONNX file BASE.

    Reads the structure and hardly any weights, so gigabytes take no longer. Nodes inside of If, Loop and Scan count.
    Between two files, values of weights are not compared.
    """
    if base is None:
        stats, base_stats = summarize_model(model), None
        report: Stats | Difference = stats
        blocks = summary_blocks(stats, stats.path)
    else:
        report = compare_models(model, base)
        stats, base_stats = report.model, report.base
        blocks = difference_blocks(report)
    met = _met_gates(fail_if, stats, base_stats)
    emit(report, blocks, format_name, output=output, force=force)
    for gate in met:
        click.echo(f"gate {gate}", err=True)
    return 1 if met else 0


def _met_gates(expressions: Sequence[str], stats: Stats, base: Stats | None) -> list[str]:
    if not expressions:
        return []
    from onnxtool.gates import check_gates, parse_gate

    gates = [parse_gate(expression) for expression in expressions]
    results = check_gates(gates, to_json(stats), None if base is None else to_json(base))
    return [str(result) for result in results if result.met]


def summary_blocks(stats: Stats, title: str) -> list[Block]:
    """Describe one model, under a heading."""
    blocks: list[Block] = [
        Heading(title),
        Facts(
            (
                ("Number of nodes", str(stats.num_nodes)),
                ("Number of inputs", str(stats.num_inputs)),
                ("Number of outputs", str(stats.num_outputs)),
                ("Initializers", str(stats.num_initializers)),
                ("Parameters", f"{stats.num_parameters:,}"),
                ("Size", f"{format_bytes(stats.size_bytes)} ({stats.size_bytes:,} bytes)"),
                ("Weights", _join(stats.initializer_bytes, format_bytes)),
                ("Duplicates", format_bytes(stats.duplicate_bytes)),
                ("Opsets", _join(stats.opsets, str)),
                ("IR version", str(stats.ir_version)),
                ("Producer", stats.producer or "not stated"),
                ("Subgraphs", str(stats.num_subgraphs)),
                ("Functions", str(stats.num_functions)),
            )
        ),
        Heading("Inputs"),
        _tensor_table(stats.inputs),
        Heading("Outputs"),
        _tensor_table(stats.outputs),
        Heading("Operators"),
        _table(("Operator", "Nodes"), ((op, str(count)) for op, count in stats.ops.items()), numbers={"Nodes"}),
    ]
    steps = parse_steps(stats.metadata.get(STEPS_KEY, "[]"))
    metadata = [(key, value) for key, value in stats.metadata.items() if key != STEPS_KEY or steps is None]
    if metadata:
        blocks += [Heading("Metadata"), _table(("Key", "Value"), metadata)]
    if steps:
        blocks += [Heading("What onnxtool did"), Table(("Step", "Details"), [_step_row(step) for step in steps])]
    return blocks


def difference_blocks(difference: Difference) -> list[Block]:
    """Describe what separates a model from its base: the figures first, then what changed in detail."""
    base, model, delta = difference.base, difference.model, difference.delta
    blocks: list[Block] = [Heading(f"{model.path} against {base.path}"), Facts(_difference_facts(base, model))]
    blocks += [Note(text) for text in _difference_notes(difference)]
    if delta.ops:
        blocks += [Heading("Operators"), _operator_table(delta.ops, base.ops, model.ops)]
    tables = (
        ("Inputs", delta.inputs, _signatures(base.inputs), _signatures(model.inputs)),
        ("Outputs", delta.outputs, _signatures(base.outputs), _signatures(model.outputs)),
        ("Metadata", delta.metadata, _metadata_values(base.metadata), _metadata_values(model.metadata)),
    )
    for title, changes, before, after in tables:
        if changes:
            rows = ((name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in _names(changes))
            blocks += [Heading(title), _table(("Name", "Base", "Model"), rows)]
    return blocks


def _difference_facts(base: Stats, model: Stats) -> list[tuple[str, str]]:
    rows = [
        ("Number of nodes", _compare(model.num_nodes, base.num_nodes)),
        ("Number of inputs", _compare(model.num_inputs, base.num_inputs)),
        ("Number of outputs", _compare(model.num_outputs, base.num_outputs)),
        ("Initializers", _compare(model.num_initializers, base.num_initializers)),
        ("Parameters", _compare(model.num_parameters, base.num_parameters)),
        ("Size", _compare(model.size_bytes, base.size_bytes, format_bytes)),
    ]
    for dtype in sorted(model.initializer_bytes.keys() | base.initializer_bytes.keys()):
        before, after = base.initializer_bytes.get(dtype, 0), model.initializer_bytes.get(dtype, 0)
        rows.append((f"Weights in {dtype}", _compare(after, before, format_bytes)))
    rows.append(("Duplicates", _compare(model.duplicate_bytes, base.duplicate_bytes, format_bytes)))
    domains = sorted(model.opsets.keys() | base.opsets.keys())
    return [
        *rows,
        *((f"Opset {domain}", _replace(model.opsets.get(domain), base.opsets.get(domain))) for domain in domains),
        ("IR version", _replace(model.ir_version, base.ir_version)),
        ("Producer", _replace(model.producer, base.producer)),
    ]


def _difference_notes(difference: Difference) -> list[str]:
    base, model, delta = difference.base, difference.model, difference.delta
    notes = []
    for what, changes, before, after in (
        ("inputs", delta.inputs, base.inputs, model.inputs),
        ("outputs", delta.outputs, base.outputs, model.outputs),
    ):
        if changes:
            counts = f"{len(changes.added)} added, {len(changes.removed)} removed, {len(changes.changed)} changed"
            notes.append(f"the {what} differ ({counts}); what feeds or reads the base may not fit this model")
        elif [tensor.name for tensor in before] != [tensor.name for tensor in after]:
            notes.append(f"the {what} are in another order; what addresses them by position may not fit this model")
    if not notes and model.ops == base.ops and model.initializer_bytes == base.initializer_bytes:
        notes.append(
            "the same operators and sizes of weights; values of weights, attributes and edges are not compared"
        )
    return notes


def _operator_table(changes: MappingDelta, base: Mapping[str, int], model: Mapping[str, int]) -> Table:
    growth = {op: model.get(op, 0) - base.get(op, 0) for op in _names(changes)}
    rows = [
        (op, str(base.get(op, 0)), str(model.get(op, 0)), f"{growth[op]:+d}")
        for op in sorted(growth, key=lambda op: (-abs(growth[op]), op))
    ]
    return _table(("Operator", "Base", "Model", "Change"), rows, numbers={"Base", "Model", "Change"})


def _tensor_table(tensors: Iterable[TensorInfo]) -> Table:
    return _table(
        ("Name", "Dtype", "Shape"), ((tensor.name, tensor.dtype, format_shape(tensor.shape)) for tensor in tensors)
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: AbstractSet[str] = frozenset()) -> Table:
    """Make a table in which no cell is so long that it hides the others."""
    return Table(columns, [[_shorten(cell) for cell in row] for row in rows], frozenset(numbers))


def _names(changes: MappingDelta) -> list[str]:
    return sorted([*changes.added, *changes.removed, *changes.changed])


def _signatures(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    return {tensor.name: format_tensor(tensor) for tensor in tensors}


def _metadata_values(metadata: Mapping[str, str]) -> dict[str, str]:
    values = dict(metadata)
    steps = parse_steps(metadata.get(STEPS_KEY, ""))
    if steps is not None:
        values[STEPS_KEY] = ", ".join(str(step.get("step", "?")) for step in steps) or "none"
    return values


def _step_row(step: Mapping[str, Json]) -> tuple[str, str]:
    details = [f"{key} {_show(value)}" for key, value in step.items() if key != "step"]
    return _show(step.get("step", "?")), ", ".join(details)


def _show(value: Json, depth: int = 0) -> str:
    """Write a JSON value of a step for a reader: `yes`, `1.2e-06`, `(a 1, b 2)`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict | list) and depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_show(item, depth + 1)}' for key, item in value.items())})"
    if isinstance(value, list):
        return f"[{', '.join(_show(item, depth + 1) for item in value)}]"
    return _shorten("-" if value is None else str(value))


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CELL_LENGTH:
        return text
    return f"{text[:_MAX_CELL_LENGTH]}… ({len(text)} characters)"


def _join(counts: Mapping[str, int], show: Callable[[int], str]) -> str:
    return ", ".join(f"{name} {show(count)}" for name, count in counts.items()) or "none"


def _compare(after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> str:
    if after == before:
        return f"{show(after)}, unchanged"
    percent = f", {(after - before) / before:+.1%}" if before else ""
    sign = "+" if after > before else ""
    return f"{show(after)}, was {show(before)} ({sign}{show(after - before)}{percent})"


def _replace(after: int | str | None, before: int | str | None) -> str:
    texts = [_ABSENT if value is None else str(value) or "not stated" for value in (after, before)]
    return f"{texts[0]}, unchanged" if after == before else f"{texts[0]}, was {texts[1]}"
