"""Answer any number of texts in `onnxtool infer`: one line of JSON each, as soon as it is answered."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.options import Result
from onnxtool.cli.progress import progress
from onnxtool.cli.streams import json_line, printable
from onnxtool.model_file import staged

if TYPE_CHECKING:
    from onnxtool.infer.report import GenerationReport, InferReport

FORMAT = "jsonl"
MAX_IN_ONE_REPORT = 10_000
"""Larger numbers of texts default to lines, because a single report is held in memory."""


def is_lines_file(output: Path | None) -> bool:
    """Whether an output's name ends like a JSON Lines file."""
    return output is not None and output.name.lower().removesuffix(".gz").endswith(f".{FORMAT}")


def write_lines(reports: Iterator[InferReport | GenerationReport], output: Result) -> None:
    """Print a line of JSON for each answer of `reports`, or write them to the output, compressed for `.gz`.

    The rest of the report goes to stderr at the end.
    """
    count, last = 0, None
    # A progress bar would garble the lines on a terminal.
    is_shown = output.output is None and sys.stdout.isatty()
    with progress(quiet=output.quiet or is_shown), _lines(output.output, force=output.force) as write:
        for report in reports:
            last = report
            count += len(report.answers)
            write("".join(map(json_line, report.answers)))
    if last is not None and not output.quiet:
        for note in last.notes:
            click.echo(f"note: {printable(note)}", err=True)
        place = "" if output.output is None else f": {output.output}"
        click.echo(f"{count} texts answered by {last.model} ({last.task}, {last.provider}){printable(place)}", err=True)


@contextmanager
def _lines(output: Path | None, *, force: bool) -> Iterator[Callable[[str], object]]:
    if output is None:
        yield lambda text: click.echo(text, nl=False)  # which flushes
        return
    with staged(output, force=force) as staging, staging.model_path.open("wb") as raw:
        packed = output.name.lower().endswith(".gz")
        # Without a timestamp, the same answers give the same bytes.
        binary = gzip.GzipFile(output.name.removesuffix(".gz"), "wb", fileobj=raw, mtime=0) if packed else raw
        with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as file:
            yield file.write
