"""The text jobs of `onnxtool infer`: answers and generated text, as tables, JSON or lines."""

from __future__ import annotations

import gzip
import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.cli.options import Result, is_given, refuse
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_shape
from onnxtool.cli.streams import json_line, say
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.options import InferOptions
from onnxtool.infer.report import GenerationReport, InferReport, TextAnswer
from onnxtool.model_file import staged

if TYPE_CHECKING:
    from onnxtool.checkpoint.text_files import TextInput
    from onnxtool.infer.run import WriteJob

LINES = "jsonl"
MAX_IN_ONE_REPORT = 10_000
"""Larger numbers of texts default to lines, because a single report is held in memory."""

# Titles of the two candidate columns, by kind.
_COLUMNS = {"terms": ("term", "weight"), "tokens": ("token", "probability"), "labels": ("label", "score")}
# A larger table of all pairs does not fit a screen; each text's nearest neighbour is shown instead.
_MAX_MATRIX = 12
_MAX_TEXT_WIDTH = 80
_NUMBERS_SHOWN = 5  # of an embedding


def run_answers(
    options: InferOptions, generation: GenerateOptions | None, output: Result, *, stream: bool, vectors: bool
) -> None:
    """Answer or continue the texts of `options`, and print the result.

    Args:
        options: what to run.
        generation: the generation options; None if none is given.
        output: where the result goes.
        stream: whether generated text is printed as it is produced.
        vectors: whether embeddings are printed too.

    Raises:
        UsageError: an option has no effect on text generation, or a stream would not go to stdout.
    """
    from onnxtool.infer.run import PictureJob, WriteJob, given_texts, open_job

    job = open_job(options, generation, must_write=stream)
    if isinstance(job, WriteJob):
        refuse({"query", "overlap", "vectors"}, "the model writes text;")
        if stream:
            _stream(job, given_texts(options), output)
            return
    texts = given_texts(options)
    in_lines = output.format_name == LINES
    is_chosen = is_given("format_name") or output.format_name != "text"
    if not (in_lines or is_chosen or options.input_path is None or isinstance(job, PictureJob)):
        first = tuple(islice(texts, MAX_IN_ONE_REPORT + 1))
        texts = chain(first, texts)
        if len(first) > MAX_IN_ONE_REPORT:
            say(f"more than {MAX_IN_ONE_REPORT:,} texts: answers are written as --format {LINES}")
            in_lines = True
    if in_lines:
        write_lines(job.stream(texts), output)
        return
    with progress(quiet=output.quiet):
        report = job.answer(texts)
    if isinstance(report, GenerationReport):
        output.emit(report, generation_blocks(report))
        return
    if not any(answer.vector or answer.token_vectors for answer in report.answers):
        refuse({"vectors"}, f"{report.model} gives {report.kind} and no vectors;")
    output.emit(report, answer_blocks(report, vectors=vectors))


def write_vector_file(options: InferOptions, output: Path, *, force: bool, quiet: bool) -> None:
    """Write the vectors of the texts or images of `options` to a .npy, .npz or .parquet file."""
    from onnxtool.encoding.parquet import require_pyarrow
    from onnxtool.encoding.shards import write_vectors
    from onnxtool.infer.run import encode_texts

    suffix = output.suffix.lower()
    if suffix == ".parquet":
        require_pyarrow()
    with progress(quiet=quiet), staged(output, force=force) as staging:
        ids, vectors = encode_texts(options, dense=suffix == ".npy")
        write_vectors(staging.model_path, ids, vectors)
    if not quiet:
        say(f"vectors of {len(ids)} inputs: {output}")


def _stream(job: WriteJob, texts: Iterable[TextInput], output: Result) -> None:
    """Print generated text as it is produced."""
    if output.output is not None or output.format_name != "text":
        raise click.UsageError("--stream prints text to stdout: leave out --output and --format")
    last = 0

    def show(number: int, piece: str) -> None:
        nonlocal last
        click.echo("\n" * (number - last) + piece, nl=False)
        last = number

    report = job.answer(texts, on_text=show)
    click.echo("\n" * (len(report.answers) - 1 - last))
    if not output.quiet:
        say(f"{report.num_generated} tokens, {report.throughput_tokens_per_s:.1f} tokens/s")


def answer_blocks(report: InferReport, *, vectors: bool) -> list[Block]:
    """Lay out the results by the model's task."""
    facts = Facts([("Model", report.model), ("Task", report.task), ("Provider", report.provider)])
    blocks: list[Block] = [facts, *(Note(note) for note in report.notes)]
    if report.rankings:
        return [*blocks, *_ranking_blocks(report)]
    if report.similarities:
        blocks += _similarity_blocks(report)
    else:
        for number, answer in enumerate(report.answers, start=1):
            blocks += [Heading(f"{number}. {_title(report, answer)}"), _answer_block(report.kind, answer)]
    return [*blocks, *_vector_blocks(report)] if vectors else blocks


def generation_blocks(report: GenerationReport) -> list[Block]:
    """Lay out the text generated after each prompt."""
    facts = Facts(
        [
            ("Model", report.model),
            ("Task", report.task),
            ("Provider", report.provider),
            ("Decoding", report.decoding),
            ("Tokens written", str(report.num_generated)),
            ("First token", f"{report.first_token_ms:.1f} ms"),
            ("Speed", f"{report.throughput_tokens_per_s:.1f} tokens/s"),
        ]
    )
    blocks: list[Block] = [facts, *(Note(note) for note in report.notes)]
    for number, answer in enumerate(report.answers, start=1):
        name = _one_line(answer.text) if answer.id is None else f"[{answer.id}] {_one_line(answer.text)}"
        cut = ", cut" if answer.truncated else ""
        title = f"{number}. {name} ({answer.num_tokens} tokens{cut})"
        ended = f"{len(answer.token_ids)}, ended by {answer.finish_reason}"
        blocks += [Heading(title), Facts([("written", answer.generated), ("tokens", ended)])]
    return blocks


def _answer_block(kind: str, answer: TextAnswer) -> Block:
    if answer.candidates:
        label, score = _COLUMNS[kind]
        rows = [(candidate.label, f"{candidate.score:.4f}") for candidate in answer.candidates]
        return Table((label, score), rows, frozenset({score}))
    if answer.spans:
        spans = [
            (span.label, f"{span.score:.4f}", f"{span.start}-{span.end}", _one_line(span.text)) for span in answer.spans
        ]
        return Table(("label", "score", "characters", "text"), spans, frozenset({"score", "characters"}))
    if answer.outputs:
        return Facts([(name, _vector(shape, answer.vector)) for name, shape in answer.outputs.items()])
    return Facts([("spans" if kind == "spans" else _COLUMNS[kind][0], "none")])


def _vector(shape: tuple[int, ...], vector: tuple[float, ...]) -> str:
    """Show the first numbers of an embedding, its shape and its norm."""
    if not vector:
        return format_shape(shape)
    first = " ".join(f"{number:.4f}" for number in vector[:_NUMBERS_SHOWN])
    more = " …" if len(vector) > _NUMBERS_SHOWN else ""
    return f"{format_shape(shape)} with norm {math.hypot(*vector):.4f}: {first}{more}"


def _ranking_blocks(report: InferReport) -> list[Block]:
    blocks: list[Block] = []
    for ranking in report.rankings:
        blocks.append(Heading("Scores" if ranking.query is None else _one_line(ranking.query) or "An empty query"))
        rows: list[Sequence[str]] = []
        for rank, place in enumerate(ranking.order, start=1):
            answer = report.answers[place]
            score = f"{answer.candidates[0].score:.4f}"
            rows.append((str(rank), score, *_read(report, answer)))
        blocks.append(Table(("rank", "score", *_columns(report)), rows, frozenset({"rank", "score"})))
    return blocks


def _similarity_blocks(report: InferReport) -> list[Block]:
    rows = [(str(number), *_read(report, answer)) for number, answer in enumerate(report.answers, start=1)]
    what = "Images" if _is_of_pictures(report) else "Texts"
    blocks: list[Block] = [Heading(what), Table(("#", *_columns(report)), rows, frozenset({"#", "tokens"}))]
    if len(rows) <= _MAX_MATRIX:
        numbers = [row[0] for row in rows]
        matrix = [
            (number, *(f"{value:.4f}" for value in row))
            for number, row in zip(numbers, report.similarities, strict=True)
        ]
        return [*blocks, Heading("Cosine similarity"), Table(("#", *numbers), matrix, frozenset({"#", *numbers}))]
    nearest = []
    for place, row in enumerate(report.similarities):
        other = max((index for index in range(len(row)) if index != place), key=lambda index: row[index])
        nearest.append((str(place + 1), str(other + 1), f"{row[other]:.4f}"))
    columns = ("#", "nearest", "cosine")
    return [*blocks, Heading(f"Nearest other {what[:-1].lower()} of each"), Table(columns, nearest, frozenset(columns))]


def _vector_blocks(report: InferReport) -> list[Block]:
    rows = [
        (str(number), " ".join(map(str, answer.vector)))
        for number, answer in enumerate(report.answers, start=1)
        if answer.vector
    ]
    rows += [
        (f"{number}, token {token}", " ".join(map(str, vector)))
        for number, answer in enumerate(report.answers, start=1)
        for token, vector in enumerate(answer.token_vectors, start=1)
    ]
    return [Heading("Vectors"), Facts(rows)] if rows else []


def _is_of_pictures(report: InferReport) -> bool:
    return report.task == TASK_OF_PICTURES


def _columns(report: InferReport) -> tuple[str, ...]:
    """Return the cells for each text or image; an image has no tokens."""
    return ("image",) if _is_of_pictures(report) else ("tokens", "text")


def _read(report: InferReport, answer: TextAnswer) -> tuple[str, ...]:
    """Return the cells of these columns."""
    if _is_of_pictures(report):
        return (_label(answer),)
    return f"{answer.num_tokens}{_how_read(answer)}", _label(answer)


def _title(report: InferReport, answer: TextAnswer) -> str:
    if _is_of_pictures(report):
        return _label(answer)
    query = "" if answer.query is None else f"{_one_line(answer.query)} | "
    return f"{query}{_label(answer)} ({answer.num_tokens} tokens{_how_read(answer)})"


def _how_read(answer: TextAnswer) -> str:
    if answer.num_windows > 1:
        return f", {answer.num_windows} windows"
    return ", cut" if answer.truncated else ""


def _label(answer: TextAnswer) -> str:
    """Label a text with its id and its beginning, on one line."""
    short = _one_line(answer.text)
    return short if answer.id is None else f"[{answer.id}] {short}"


def _one_line(text: str) -> str:
    line = " ".join(text[: 8 * _MAX_TEXT_WIDTH].split())
    return line if len(line) <= _MAX_TEXT_WIDTH else f"{line[: _MAX_TEXT_WIDTH - 1]}…"


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
            say(f"note: {note}")
        place = "" if output.output is None else f": {output.output}"
        say(f"{count} texts answered by {last.model} ({last.task}, {last.provider}){place}")


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
