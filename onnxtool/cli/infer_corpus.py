"""Encode a corpus in `onnxtool infer`: progress and report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, emit_plan, format_bytes, format_duration
from onnxtool.encoding.locations import Location
from onnxtool.encoding.options import CorpusProgress
from onnxtool.encoding.progress import ProgressFiles, ProgressOptions
from onnxtool.encoding.report import CorpusReport
from onnxtool.progress import listener, listening

if TYPE_CHECKING:
    from onnxtool.encoding import CorpusOptions


def encode_folder(
    model_path: Location,
    corpus: Location | None,
    output: Location,
    options: CorpusOptions,
    format_name: str,
    *,
    files: ProgressOptions,
    quiet: bool,
    dry_run: bool,
) -> None:
    """Encode `corpus` into the folder `output`, and print the report; with `dry_run`, what would be written."""
    if corpus is None:
        raise click.UsageError("nothing to encode: pass the corpus with --input, or an --output that is a file")
    from onnxtool.encoding.run import encode_corpus, plan_corpus

    if dry_run:
        emit_plan(plan_corpus(model_path, corpus, output, options), format_name)
        return
    with corpus_progress(quiet=quiet, files=files):
        report = encode_corpus(model_path, corpus, output, options)
    emit(report, corpus_blocks(report), format_name)


def corpus_blocks(report: CorpusReport) -> list[Block]:
    """Lay out what was encoded."""
    done = f"{report.num_encoded} of them by this run" if report.resumed else ""
    blocks: list[Block] = [
        Facts(
            [
                ("Model", report.model),
                ("Task", report.task),
                ("Provider", report.provider),
                ("Output", f"{report.output}: {len(report.files)} files, {format_bytes(report.size_bytes)}"),
                ("Manifest", report.manifest),
                ("Vectors", f"{report.dimensions} numbers as {report.vectors_as}"),
                ("Texts", f"{report.num_texts}{f', {done}' if done else ''}"),
                *([("Passages", str(report.num_passages))] if report.num_passages else ()),
                ("Tokens", f"{report.num_tokens}, and {report.padding_share:.1%} padding"),
                ("Time", f"{format_duration(report.seconds * 1e3)}, {report.texts_per_s:.1f} texts/s"),
                ("Workers", f"{report.workers} of {report.threads} threads each"),
                ("Peak memory", format_bytes(report.peak_rss_bytes)),
            ]
        ),
        *(Note(note) for note in report.notes),
    ]
    if report.rejects:
        rows = [(reason, str(count)) for reason, count in report.rejects.items()]
        blocks += [Heading(f"Rejected lines, in {report.rejects_path}")]
        blocks += [Table(("reason", "lines"), rows, frozenset({"lines"}))]
    return blocks


@contextmanager
def corpus_progress(
    *,
    quiet: bool,
    files: ProgressOptions = ProgressOptions(),  # noqa: B008  a constant
) -> Iterator[None]:
    """Show the progress of the block's run on stderr, and write it to the requested files."""
    with progress(quiet=quiet):
        show, written, state = listener(), ProgressFiles(files), "failed"

        def note(stage: str) -> None:
            show(stage)
            if isinstance(stage, CorpusProgress):
                written.add(stage)

        try:
            with listening(note):
                yield
            state = "done"
        finally:
            written.end(state)
