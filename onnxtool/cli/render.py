"""Render a report as text, Markdown or JSON.

A command describes its report once, as a few blocks; the three formats are made here. Text is a rich table on a
terminal and plain columns elsewhere, so logs and pipes get no escape codes. Names in a model file are untrusted:
unprintable characters are escaped in every format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from onnxtool.cli.streams import json_document, printable
from onnxtool.errors import bounded, shorten
from onnxtool.model_file import write_text
from onnxtool.reports import Dimension, Json, TensorInfo, WritePlan, to_json

_MAX_DEPTH = 3
# The verification figures that a step records, worded as in the reports of export and optimize.
VERIFICATION_LABELS = {
    "reference": "Verified against",
    "verified_on": "Verified on",
    "cases": "Cases",
    "max_abs_error": "max_abs_error",
    "cosine_min": "Lowest cosine",
    "atol": "Allowed",
    "mask_effect": "Moving the mask moves the outputs by",
    "padding_effect": "Other ids in the padding move them by",
    "batch_effect": "The rest of the batch moves a text by",
}


class Heading(NamedTuple):
    """A heading line."""

    text: str


class Facts(NamedTuple):
    """Names with values, one line each."""

    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """Titled columns; every cell is text. Columns named in `numbers` are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()


def table_of(rows: Sequence[Mapping[str, str]], *, names: Collection[str] = ()) -> Table:
    """Make a table of rows, each a mapping of column to cell; all columns except `names` are numbers."""
    columns = tuple(rows[0])
    return Table(columns, [tuple(row.values()) for row in rows], frozenset(columns).difference(names))


class Note(NamedTuple):
    """A note that readers must not miss."""

    text: str


_LEAST_TEXT = 12  # minimum width of a text column on a narrow terminal

Block = Heading | Facts | Table | Note


def emit(
    report: object,
    blocks: Sequence[Block],
    format_name: str,
    *,
    output: Path | None = None,
    force: bool = False,
) -> None:
    """Print `report` in a format, or write it to `output`; notes are bounded in every format, unlike data."""
    if format_name == "json":
        notes = {block.text: bounded(block.text) for block in blocks if isinstance(block, Note)}
        report = _replaced(to_json(report), {text: note for text, note in notes.items() if text != note})
    blocks = [_printable_block(block) for block in blocks]
    if format_name == "json":
        text = json_document(report)
    elif format_name == "markdown":
        text = _markdown(blocks)
    else:
        text = _text(blocks)
    if output is None and format_name == "text" and sys.stdout.isatty():
        _print_rich(blocks)
    else:
        write_out(text, output=output, force=force)


def _replaced(value: Json, texts: Mapping[str, str]) -> Json:
    if isinstance(value, dict) and texts:
        return {name: _replaced(item, texts) for name, item in value.items()}
    if isinstance(value, list) and texts:
        return [_replaced(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) else value


def emit_plan(plan: WritePlan, format_name: str) -> None:
    """Print what would be written."""
    rows = [(file.path, file.change) for file in plan.files]
    blocks: list[Block] = [
        Heading(f"onnxtool {plan.command} would write"),
        Table(("file", "change"), rows) if rows else Facts([("files", "none; the result is printed")]),
        *map(Note, plan.notes),
        Note("nothing was written"),
    ]
    emit({"dry_run": True, **plan._asdict()}, blocks, format_name)


def write_out(text: str, *, output: Path | None, force: bool) -> None:
    """Print `text`, or write it to `output`."""
    if output is not None:
        write_text(output, text, force=force)
    else:
        click.echo(text, nl=False)


def format_shape(shape: Iterable[Dimension]) -> str:
    """Write a shape as `[batch_size, sequence, 384]`, with `?` for unknown dimensions."""
    return f"[{', '.join('?' if dimension is None else str(dimension) for dimension in shape)}]"


def format_tensor(info: TensorInfo) -> str:
    """Write a tensor as `float32 [batch_size, 384]`."""
    return f"{info.dtype} {format_shape(info.shape)}"


def format_bytes(size: float) -> str:
    """Write bytes in decimal units with about three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def format_duration(milliseconds: float) -> str:
    """Write a duration in seconds if at least one second, else in milliseconds."""
    return f"{milliseconds / 1e3:.1f} s" if milliseconds >= 1e3 else f"{milliseconds:.1f} ms"


def show(value: Json, depth: int = 0) -> str:
    """Write a JSON value of a step in readable form: `yes`, `1.2e-06`, `(a 1, b 2)`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict | list) and depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {show(item, depth + 1)}' for key, item in value.items())})"
    if isinstance(value, list):
        return f"[{', '.join(show(item, depth + 1) for item in value)}]"
    return shorten("-" if value is None else str(value))


def verification_figures(recorded: Mapping[str, Json]) -> dict[str, str]:
    """Return the recorded figures of a verification by their labels."""
    known = {key: value for key in VERIFICATION_LABELS if (value := recorded.get(key)) is not None}
    figures = {VERIFICATION_LABELS[key]: show(value) for key, value in known.items()}
    if isinstance(cosine := known.get("cosine_min"), float):
        figures[VERIFICATION_LABELS["cosine_min"]] = f"{cosine:.8f}"
    if "atol" in known:
        atol, rtol, required = (_bound(recorded.get(key)) for key in ("atol", "rtol", "cosine_required"))
        figures[VERIFICATION_LABELS["atol"]] = f"{atol} + {rtol} x largest value, cosine {required}"
    return figures


def _bound(value: Json) -> str:
    """Write a tolerance with all digits: a cosine of 0.99999 is not 1."""
    return f"{value:g}" if isinstance(value, float) else show(value)


def _printable_block(block: Block) -> Block:
    match block:
        case Heading(text):
            return Heading(printable(text))
        case Note(text):
            return Note(bounded(printable(text)))
        case Facts(rows):
            return Facts([(printable(name), printable(value)) for name, value in rows])
        case Table(columns, rows, numbers):
            numbers = frozenset(map(printable, numbers))
            return Table([*map(printable, columns)], [[printable(cell) for cell in row] for row in rows], numbers)


def _text(blocks: Sequence[Block]) -> str:
    parts: list[str] = []
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"\n{text}:" if parts else f"{text}:")
            case Note(text):
                parts.append(f"note: {text}")
            case Facts(rows):
                parts += [f"{name}: {value}" for name, value in rows]
            case Table():
                parts += _columns(block)
    return "\n".join(parts) + "\n"


def _columns(table: Table) -> list[str]:
    rows = [list(table.columns), *(list(row) for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if title in table.numbers else cell.ljust(width)
            for title, cell, width in zip(table.columns, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _markdown(blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"### {_escape(text)}")
            case Note(text):
                parts.append(f"> **Note:** {_escape(text)}")
            case Facts(rows):
                parts.append("\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in rows))
            case Table(columns, rows, numbers):
                head = f"| {' | '.join(_escape(column) for column in columns)} |"
                rule = f"|{'|'.join('---:' if column in numbers else '---' for column in columns)}|"
                body = [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows]
                parts.append("\n".join([head, rule, *body]))
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    """Keep untrusted names in a model from being read as Markdown or HTML."""
    for character in "\\`*_|<>[]":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


def _print_rich(blocks: Sequence[Block]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False, no_color="NO_COLOR" in os.environ or None)
    for index, block in enumerate(blocks):
        match block:
            case Heading(text):
                console.print(Text(f"\n{text}:" if index else f"{text}:", style="bold"))
            case Note(text):
                console.print(Text(f"note: {text}", style="yellow"))
            case Facts(rows):
                for name, value in rows:
                    console.print(Text.assemble((f"{name}: ", "cyan"), value), soft_wrap=True)
            case Table(columns, rows, numbers):
                widths = [max((len(row[place]) for row in rows), default=0) for place in range(len(columns))]
                natural = sum(max(width, len(title)) + 2 for title, width in zip(columns, widths, strict=True))
                least = sum(
                    max(width, len(title)) + 2 if title in numbers else min(width, _LEAST_TEXT) + 2
                    for title, width in zip(columns, widths, strict=True)
                )
                # Many figures stand closer, so that their titles are not broken.
                is_tight = least > console.width
                table = RichTable(
                    box=box.SIMPLE_HEAD,
                    pad_edge=False,
                    collapse_padding=True,
                    padding=0 if is_tight else (0, 1),
                    show_edge=not is_tight,
                )
                for title, width in zip(columns, widths, strict=True):
                    is_number = title in numbers
                    # Figures are never truncated: on a narrower terminal, lines get longer.
                    table.add_column(
                        Text(title.replace("_", "_\n") if natural > console.width else title),
                        justify="right" if is_number else "left",
                        overflow="fold",
                        min_width=width if is_number else min(width, _LEAST_TEXT),
                    )
                for row in rows:
                    table.add_row(*(Text(cell) for cell in row))
                console.print(table, crop=False)
