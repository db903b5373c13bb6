"""How `onnxtool infer` encodes a corpus: its options, its progress, and what it says at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxtool.cli.options import Command, PathType
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.corpus.report import OUTPUT_FORMATS, WEIGHTS, CorpusReport

if TYPE_CHECKING:
    from onnxtool.corpus import CorpusOptions, CorpusProgress

OF_CORPORA = frozenset(
    {"output_format", "gzip", "contents", "weights", "keep_special", "strict", "workers", "shard_size", "batch_tokens"}
)
# Where the options are kept from being parsed to being used: the command has parameters enough.
_GIVEN, _IS_FOLDER = "onnxtool.corpus.given", "onnxtool.corpus.is_folder"
_LINE_EVERY_S = 10.0


class OutputType(PathType):
    """A path that remembers whether it was written as a folder, with a separator at its end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if ctx is not None:
            ctx.meta[_IS_FOLDER] = str(value).endswith(("/", os.sep))
        return super().convert(value, param, ctx)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    ctx.meta.setdefault(_GIVEN, {})[param.name] = value


def corpus_options(command: Command) -> Command:
    """Add the options of encoding a corpus; `given_corpus_options` has their values."""
    options = (
        click.option(
            "--output_format",
            type=click.Choice(OUTPUT_FORMATS),
            help="Of a folder: jsonl as Anserini reads it (default of sparse encoders), npy (of embedders), parquet.",
            expose_value=False,
            callback=_keep,
        ),
        click.option("--gzip", is_flag=True, help="Compress jsonl.", expose_value=False, callback=_keep),
        click.option(
            "--contents/--no_contents",
            default=None,
            help="Write the texts beside their vectors; default: in jsonl only.",
            expose_value=False,
            callback=_keep,
        ),
        click.option(
            "--weights",
            type=click.Choice(WEIGHTS),
            default="int",
            show_default=True,
            help="Weights of terms: int is round(weight / 5 * 256), as Anserini counts them.",
            expose_value=False,
            callback=_keep,
        ),
        click.option(
            "--keep_special",
            is_flag=True,
            help="Let [CLS], [SEP] and the like be terms.",
            expose_value=False,
            callback=_keep,
        ),
        click.option(
            "--strict",
            is_flag=True,
            help="Stop at a line without id or text, or with an id that was there; else it is counted and written to "
            "NAME.rejects.jsonl.",
            expose_value=False,
            callback=_keep,
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Batches of a corpus that run at once; 0: one a core.",
            expose_value=False,
            callback=_keep,
        ),
        click.option(
            "--shard_size",
            type=click.IntRange(min=1),
            default=4096,
            show_default=True,
            help="Texts of a file of vectors, the most that a killed run loses.",
            expose_value=False,
            callback=_keep,
        ),
        click.option(
            "--batch_tokens",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="The most tokens of a batch of a corpus; 0: what fits the model.",
            expose_value=False,
            callback=_keep,
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def writes_folder(output: Path | None) -> bool:
    """Say whether a corpus is to be encoded: `--output` ends with a separator, or is a folder already."""
    is_written_so = click.get_current_context().meta.get(_IS_FOLDER, False)
    return output is not None and (bool(is_written_so) or output.is_dir())


def given_corpus_options(
    model_name: str | None, prompt: str | None, provider: str, threads: int, *, force: bool
) -> CorpusOptions:
    """Return what the command line asked for, with the options that other jobs have as well."""
    from onnxtool.corpus import CorpusOptions

    given: dict[str, Any] = click.get_current_context().meta[_GIVEN]
    return CorpusOptions(
        model_name=model_name,
        prompt=prompt,
        provider=provider,
        workers=given["workers"],
        threads=threads,
        output_format=given["output_format"],
        gzip=given["gzip"],
        contents=given["contents"],
        weights=given["weights"],
        keep_special=given["keep_special"],
        strict=given["strict"],
        shard_size=given["shard_size"],
        batch_tokens=given["batch_tokens"],
        force=force,
    )


def encode_folder(
    model_path: Path, corpus: Path | None, output: Path, options: CorpusOptions, format_name: str, *, quiet: bool
) -> None:
    """Encode `corpus` into the folder `output`, and print the report."""
    if corpus is None:
        raise click.UsageError("nothing to encode: pass the corpus with --input, or an --output that is a file")
    from onnxtool.corpus import encode_corpus

    with corpus_progress(quiet=quiet) as show:
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
                ("Texts", f"{report.num_texts}{f', {done}' if done else ''}"),
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
        blocks += [Heading(f"Lines that gave no text, in {report.rejects_path}")]
        blocks += [Table(("a line that", "lines"), rows, frozenset({"lines"}))]
    return blocks


@contextmanager
def corpus_progress(*, quiet: bool) -> Iterator[Callable[[CorpusProgress], None]]:
    """Give a function that shows on stderr how far a run is: a bar on a terminal, else a line now and then."""
    if quiet:
        yield lambda _progress: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar() as show:
            yield show
    else:
        yield _Lines()


@contextmanager
def _bar() -> Iterator[Callable[[CorpusProgress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("encoding"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("encoding", total=1.0, state="loading the model")
        yield lambda progress: bar.update(task, completed=progress.share, state=_state(progress))


class _Lines:
    """Prints a line for the first batch, and then one every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: CorpusProgress) -> None:
        now = time.monotonic()
        if now >= self._next:
            click.echo(f"encoded {_state(progress)} ({progress.share:.0%})", err=True)
            self._next = now + _LINE_EVERY_S


def _state(progress: CorpusProgress) -> str:
    left = "" if progress.seconds_left is None else f", {_clock(progress.seconds_left)} left"
    return f"{progress.num_texts} texts, {progress.texts_per_s:.1f} texts/s{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
