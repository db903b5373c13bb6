"""A summary and a difference as Markdown for a comment on a pull request.

At the top, in twelve lines at most, what a reviewer needs; below, folded, what changed in detail. The same files give
the same text on every run. Names come from model files, which are untrusted: they stand in code spans, where nothing
of them is read as Markdown, HTML or the mention of a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxtool.cli.printable import printable
from onnxtool.cli.render import format_bytes, format_shape, format_tensor
from onnxtool.cli.stats_wording import (
    ABSENT,
    counts_of,
    entry_rows,
    format_count,
    growth,
    interface_notes,
    join,
    last_proof,
    layer_rows,
    metadata_of,
    names_of,
    needs,
    operator_rows,
    shape_of,
    shorten,
    show_weight,
    signatures,
    step_row,
)
from onnxtool.model_file.metadata import STEPS_KEY
from onnxtool.summary.figures import Difference, Stats

# GitHub refuses a comment of more than 65,536 characters.
_MAX_LENGTH = 60_000
_MAX_ROWS = 40
_MAX_CELL_LENGTH = 100
_MAX_GATES = 3


class _Section(NamedTuple):
    """A folded table; cells are plain text, of which those in `names` become code."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: frozenset[int] = frozenset({0})


def summary_comment(stats: Stats, gates: Sequence[str] = ()) -> str:
    """Write one model as Markdown."""
    figures = [
        ("Number of nodes", f"{stats.num_nodes:,}"),
        ("Fused attentions", str(stats.num_attentions)),
        ("Parameters", f"{stats.num_parameters:,} in {stats.num_initializers:,} initializers"),
        (
            "Size",
            f"{format_bytes(stats.size_bytes)}, {format_bytes(stats.duplicate_bytes)} of it stored more than once",
        ),
        ("Needs", _text(needs(stats))),
    ]
    if stats.cost is not None:
        cost = (
            f"{format_count(stats.cost.macs)}, {format_bytes(stats.cost.peak_activation_bytes)} of activations at once"
        )
        figures.insert(4, (f"MACs of {shape_of(stats.cost)}", cost))
    top = [f"### {_code(stats.path)}", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in figures), ""]
    top += _last_lines(stats, gates)
    return _document(top, _summary_sections(stats))


def difference_comment(difference: Difference, gates: Sequence[str] = ()) -> str:
    """Write what separates two models as Markdown."""
    base, model, delta = difference.base, difference.model, difference.delta
    rows = [
        _figure("Number of nodes", model.num_nodes, base.num_nodes),
        _figure("Fused attentions", model.num_attentions, base.num_attentions),
        _figure("Parameters", model.num_parameters, base.num_parameters),
        (
            "Size",
            *map(format_bytes, (base.size_bytes, model.size_bytes)),
            growth(model.size_bytes, base.size_bytes, format_bytes),
        ),
    ]
    if model.cost is not None and base.cost is not None:
        macs = model.cost.macs, base.cost.macs
        label = f"MACs of {shape_of(model.cost)}"
        rows.append((label, *map(format_count, reversed(macs)), growth(*macs, format_count)))
    same = needs(model) == needs(base)
    rows.append(("Needs", _text(needs(base)), _text(needs(model)), "unchanged" if same else ""))
    top = [f"### {_code(model.path)} against {_code(base.path)}", "| | base | model | change |", "|---|---:|---:|---:|"]
    top += [f"| {' | '.join(row)} |" for row in rows]
    parts = [("Operators", delta.ops), ("Initializers", delta.weights), ("Metadata", delta.metadata)]
    told = [f"**{name}:** {counts_of(changes) or 'unchanged'}" for name, changes in parts]
    notes = interface_notes(base, model, delta.inputs, delta.outputs)
    interface = f"⚠ {'; '.join(notes)}" if notes else "inputs and outputs unchanged"
    top += ["", f"**Interface:** {interface}. {' · '.join(told)}", *_last_lines(model, gates)]
    return _document(top, _difference_sections(difference))


def _figure(name: str, after: int, before: int) -> tuple[str, str, str, str]:
    return name, f"{before:,}", f"{after:,}", growth(after, before)


def _last_lines(stats: Stats, gates: Sequence[str]) -> list[str]:
    """Return a line that says which gates are met, and how the file was made; none where there is nothing to say."""
    parts = []
    if gates:
        more = f" and {len(gates) - _MAX_GATES} more" if len(gates) > _MAX_GATES else ""
        parts.append(f"❌ **Gates:** {'; '.join(_code(gate) for gate in gates[:_MAX_GATES])}{more}.")
    if proof := last_proof(stats):
        parts.append(f"**Made by** {_text(shorten(proof, _MAX_CELL_LENGTH * 3))}.")
    return [" ".join(parts)] if parts else []


def _summary_sections(stats: Stats) -> list[_Section]:
    tensors = [("input", value) for value in stats.inputs] + [("output", value) for value in stats.outputs]
    sections = [
        _Section(
            "Inputs and outputs",
            ("", "Name", "Type"),
            [(kind, value.name, format_tensor(value)) for kind, value in tensors],
            frozenset({1, 2}),
        ),
        _Section("Operators", ("Operator", "Nodes"), [(op, str(count)) for op, count in stats.ops.items()]),
        _Section(
            "Weights by dtype",
            ("Dtype", "Parameters", "Bytes"),
            [
                (dtype, f"{stats.parameters.get(dtype, 0):,}", f"{size:,}")
                for dtype, size in stats.initializer_bytes.items()
            ],
        ),
        _Section(
            "Parts by scope",
            ("Part", "Nodes", "Weights"),
            [(name, str(layer.num_nodes), format_bytes(layer.size_bytes)) for name, layer in stats.layers.items()],
        ),
        _Section(
            "Largest initializers",
            ("Name", "Type", "Size"),
            [
                (entry.name, f"{entry.dtype} {format_shape(entry.shape)}", format_bytes(entry.size_bytes))
                for entry in stats.largest
            ],
            frozenset({0, 1}),
        ),
        _Section(
            "Stored more than once",
            ("Names", "Wasted"),
            [(", ".join(entry.names), format_bytes(entry.size_bytes)) for entry in stats.duplicates],
        ),
        _Section(
            "Functions",
            ("Function", "Nodes", "Opsets"),
            [(entry.name, str(entry.num_nodes), join(entry.opsets)) for entry in stats.functions],
            frozenset({0, 2}),
        ),
        _Section(
            "Metadata",
            ("Key", "Value"),
            [(key, value) for key, value in stats.metadata.items() if key != STEPS_KEY or not stats.steps],
            frozenset({0, 1}),
        ),
        _Section("What onnxtool did", ("Step", "Details"), [step_row(step) for step in stats.steps], frozenset({0, 1})),
    ]
    if stats.cost is not None:
        sections.insert(
            2,
            _Section(
                "Multiplications by operator",
                ("Operator", "MACs"),
                [(op, f"{macs:,}") for op, macs in stats.cost.macs_by_op.items()],
            ),
        )
    return sections


def _difference_sections(difference: Difference) -> list[_Section]:
    base, model, delta = difference.base, difference.model, difference.delta
    columns = ("Base", "Model", "Change")
    both = frozenset({0, 1, 2})
    sections = [_Section("Operators", ("Operator", *columns), operator_rows(delta.ops, base.ops, model.ops))]
    for title, changes, before, after in (
        ("Inputs", delta.inputs, signatures(base.inputs), signatures(model.inputs)),
        ("Outputs", delta.outputs, signatures(base.outputs), signatures(model.outputs)),
    ):
        rows = [(name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names_of(changes)]
        sections.append(_Section(title, ("Name", "Base", "Model"), rows, both))
    before, after = metadata_of(base), metadata_of(model)
    return [
        *sections,
        _Section("Parts by scope", ("Part", *columns), layer_rows(base, model)),
        _Section("Initializers", ("Name", "Base", "Model"), entry_rows(delta.weights, show_weight), both),
        _Section("Initializers of another name", ("Base", "Model"), list(delta.renamed.items()), frozenset({0, 1})),
        _Section(
            "Metadata",
            ("Name", "Base", "Model"),
            [(name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names_of(delta.metadata)],
            both,
        ),
    ]


def _document(top: Sequence[str], sections: Sequence[_Section]) -> str:
    text = "\n".join(top).rstrip() + "\n"
    for section in sections:
        if not section.rows:
            continue
        folded = _folded(section)
        if len(text) + len(folded) > _MAX_LENGTH:
            folded = f"\n{section.title}: {len(section.rows)}, left out for their length; `--format json` has them.\n"
        text += folded
    return text


def _folded(section: _Section) -> str:
    numbers = [index for index in range(len(section.columns)) if index not in section.names]
    rule = "|".join("---:" if index in numbers and index else "---" for index in range(len(section.columns)))
    lines = [f"| {' | '.join(section.columns)} |", f"|{rule}|"]
    for row in section.rows[:_MAX_ROWS]:
        cells = [_cell(cell, is_name=index in section.names) for index, cell in enumerate(row)]
        lines.append(f"| {' | '.join(cells)} |")
    more = len(section.rows) - _MAX_ROWS
    note = f"\n\nand {more} more; `--format json` has them all" if more > 0 else ""
    summary = f"<summary>{section.title} ({len(section.rows)})</summary>"
    return f"\n<details>{summary}\n\n" + "\n".join(lines) + f"{note}\n\n</details>\n"


def _cell(text: str, *, is_name: bool) -> str:
    text = shorten(text, _MAX_CELL_LENGTH)
    return _code(text) if is_name and text != ABSENT else _text(text)


def _code(text: str) -> str:
    """Put a name into a code span; one that could end it, or is empty, is spelled in entities instead."""
    text = printable(text)
    if text.strip() and "`" not in text and not text.endswith("\\"):
        return f"`{text}`".replace("|", "\\|")
    return f"<code>{''.join(_entity(character) for character in text)}</code>"


def _text(text: str) -> str:
    """Escape what is read as Markdown or HTML; what would mention a person or an issue, or is a link, becomes code."""
    if any(mark in text.lower() for mark in ("@", "#", "://", "www.")):
        return _code(text)
    text = "".join(_entity(character) if character in "\\`*|<>[]&~" else character for character in printable(text))
    # Within a word an underscore is only that.
    return " ".join(
        word.replace("_", "&#95;") if word[:1] == "_" or word[-1:] == "_" else word for word in text.split(" ")
    )


def _entity(character: str) -> str:
    return character if character.isalnum() else f"&#{ord(character)};"
