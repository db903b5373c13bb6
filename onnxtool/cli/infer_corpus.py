"""How `onnxtool infer` encodes a corpus: its progress, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from onnxtool.cli.dry_run import emit_plan
from onnxtool.cli.progress import LINE_EVERY_S, bar, clock, is_interactive
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.encoding.locations import Location
from onnxtool.encoding.progress_files import ProgressFiles, ProgressOptions
from onnxtool.encoding.report import CorpusReport

if TYPE_CHECKING:
    from onnxtool.encoding import CorpusOptions, CorpusProgress


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
    from onnxtool.encoding import encode_corpus, plan_corpus

    if dry_run:
        emit_plan(plan_corpus(model_path, corpus, output, options), format_name)
        return
    with corpus_progress(quiet=quiet, files=files) as show:
        report = encode_corpus(model_path, corpus, output, options, on_progress=show)
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
) -> Iterator[Callable[[CorpusProgress], None]]:
    """Give a function that shows on stderr how far a run is, and writes it into files that were asked for."""
    with _shown(quiet=quiet) as show:
        written, state = ProgressFiles(files), "failed"

        def note(progress: CorpusProgress) -> None:
            show(progress)
            written.add(progress)

        try:
            yield note
            state = "done"
        finally:
            written.end(state)


@contextmanager
def _shown(*, quiet: bool) -> Iterator[Callable[[CorpusProgress], None]]:
    """Show a bar on a terminal, else a line now and then."""
    if quiet:
        yield lambda _progress: None
    elif is_interactive():
        with _bar() as show:
            yield show
    else:
        yield _Lines()


@contextmanager
def _bar() -> Iterator[Callable[[CorpusProgress], None]]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn

    with bar(TextColumn("encoding"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[state]}")) as shown:
        task = shown.add_task("encoding", total=1.0, state="loading the model")
        yield lambda progress: shown.update(task, completed=progress.share, state=_state(progress))


class _Lines:
    """Prints a line for the first batch, and then one every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: CorpusProgress) -> None:
        now = time.monotonic()
        if now >= self._next:
            click.echo(f"encoded {_state(progress)} ({progress.share:.0%})", err=True)
            self._next = now + LINE_EVERY_S


def _state(progress: CorpusProgress) -> str:
    parts = [f"{progress.num_texts} texts", f"{progress.texts_per_s:.1f} texts/s"]
    if progress.tokens_per_s:
        parts.append(f"{progress.tokens_per_s:.0f} tokens/s")
    if progress.num_rejects:
        parts.append(f"{progress.num_rejects} rejected")
    if progress.seconds_left is not None:
        parts.append(f"{clock(progress.seconds_left)} left")
    return ", ".join(parts)
