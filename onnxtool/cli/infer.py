"""`onnxtool infer`: run texts through a model, time it, or encode a corpus with it."""

from __future__ import annotations

import gzip
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.cli.choices import LocationType
from onnxtool.cli.infer_benchmark import run_benchmark
from onnxtool.cli.options import (
    FORMATS,
    STDOUT,
    VECTORS,
    Result,
    SectionedCommand,
    derived_options,
    dry_run_option,
    format_of,
    format_options,
    is_given,
    model_argument,
    option_names,
    refuse,
)
from onnxtool.cli.progress import progress
from onnxtool.cli.render import (
    Block,
    Facts,
    Heading,
    Note,
    Table,
    emit,
    emit_plan,
    format_bytes,
    format_duration,
    format_shape,
)
from onnxtool.cli.streams import json_line, say
from onnxtool.encoding.locations import Uri, is_uri
from onnxtool.encoding.options import CorpusOptions
from onnxtool.encoding.report import CorpusReport
from onnxtool.infer.options import GenerateOptions, InferOptions
from onnxtool.infer.report import GenerationReport, InferReport, TextAnswer
from onnxtool.model_file import ModelFile, staged
from onnxtool.reports import WritePlan, planned_files
from onnxtool.runtime.providers import ProviderOptions

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

# Parameters by purpose.
_ALWAYS = frozenset({"model_path", "provider", "threads"}) | option_names(ProviderOptions)
_FOR_TEXTS = (option_names(InferOptions) | option_names(GenerateOptions)) - _ALWAYS | {"vectors", "stream"}
_FOR_BENCHMARKS = option_names(BenchmarkOptions) - option_names(InferOptions)
_FOR_CORPORA = option_names(CorpusOptions) - option_names(InferOptions) - {"force"}
_BESIDE_CORPORA = _FOR_BENCHMARKS | _FOR_TEXTS - option_names(CorpusOptions) - {"input"} | {"benchmark"}

_BESIDE_VECTORS = option_names(GenerateOptions) | {"query", "stream", "text_model", "vectors"}


class _OutputType(LocationType):
    """A path that remembers whether it was given as a folder, with a trailing separator; stores are always folders."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if ctx is not None:
            ctx.meta[__name__] = str(value).endswith(("/", os.sep)) or is_uri(str(value))
        return super().convert(value, param, ctx)


class _Command(SectionedCommand):
    titles: ClassVar = {
        "generation": "Options for models that write text",
        "corpus": "Options for collections (--input FILE --output NAME/)",
        "timing": "Options for --benchmark",
    }


@click.command(cls=_Command, epilog='Example: onnxtool infer --model_path models/splade-int8.onnx --text "a train"')
@model_argument("model_path")
@derived_options(
    options=InferOptions,
    generation=GenerateOptions,
    corpus=CorpusOptions,
    timing=BenchmarkOptions,
)
@click.option("--stream", is_flag=True, help="Print generated text as it is produced, and nothing else, to stdout.")
@click.option("--vectors", is_flag=True, help="Also print the embeddings themselves; JSON always includes them.")
@click.option(
    "--benchmark",
    is_flag=True,
    help="Time the model on the texts of --text and --input, or on generated inputs of several shapes.",
)
@click.option(
    "--output",
    type=_OutputType("file"),
    help="Write the result to this file instead of stdout (-), in the format of its suffix: .txt, .md, .json or "
    ".jsonl; vectors alone to .npy, .npz or .parquet. A folder that exists or ends with / "
    "receives a vector for each text of --input.",
)
@dry_run_option
@format_options(
    [*FORMATS, LINES],
    "; jsonl is a JSON object for each text as soon as it is answered, in bounded memory, and the default for an "
    f"--output NAME.jsonl, or .jsonl.gz, and for more than {MAX_IN_ONE_REPORT:,} texts",
)
def command(
    options: InferOptions,
    generation: Callable[[], GenerateOptions],
    corpus: Callable[[], CorpusOptions],
    timing: Callable[[], BenchmarkOptions],
    *,
    stream: bool,
    vectors: bool,
    benchmark: bool,
    output: Path | None,
    dry_run: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Run texts through an ONNX file with the checkpoint's own tokenizer, or time it with --benchmark.

    The output depends on the model's task: terms and weights of a sparse encoder, similarities between texts, labels,
    texts ranked for a query, entities, the answer to a question, or tokens for a mask. Decoders with a cache generate
    text with --max_new_tokens, and list candidates for the next token without it; encoder-decoders always generate.
    """
    destination = None if output == STDOUT else output
    _check_format(format_name, benchmark=benchmark, stream=stream)
    is_folder = destination is not None and (click.get_current_context().meta[__name__] or destination.is_dir())
    if destination is not None and is_folder:
        refuse(_BESIDE_CORPORA, "--output is a folder, for the vectors of --input;")
        if options.input_path is None:
            raise click.UsageError("nothing to encode: pass the corpus with --input, or an --output that is a file")
        from onnxtool.encoding.run import encode_corpus, plan_corpus

        places = options.model_path, options.input_path, destination
        if dry_run:
            emit_plan(plan_corpus(*places, corpus()), format_name)
            return 0
        with progress(quiet=quiet):
            encoded = encode_corpus(*places, corpus())
        emit(encoded, corpus_blocks(encoded), format_name)
        return 0
    _check(options, is_benchmark=benchmark)
    formats = FORMATS if benchmark else [*FORMATS, LINES, VECTORS]
    force = bool(click.get_current_context().params["force"])
    printed = Result(destination, force, format_of(destination, format_name, formats), quiet)
    printed.check()
    is_vectors = printed.format_name == VECTORS
    if is_vectors:
        refuse(_BESIDE_VECTORS, "--output is a file of vectors;")
    benchmark_options = timing() if benchmark else None
    if dry_run:
        _plan(options, printed)
    elif benchmark_options is not None:
        return run_benchmark(options, benchmark_options, printed)
    elif is_vectors:
        write_vector_file(options, printed)
    else:
        written = generation() if any(map(is_given, option_names(GenerateOptions))) else None
        run_answers(options, written, printed, stream=stream, vectors=vectors)
    return 0


def _check_format(format_name: str, *, benchmark: bool, stream: bool) -> None:
    if format_name == LINES and (benchmark or stream):
        flag = "--benchmark" if benchmark else "--stream"
        raise click.UsageError(f"--format {LINES} is for answers; leave out {flag}")


def _check(options: InferOptions, *, is_benchmark: bool) -> None:
    """Refuse options that have no effect on the job, and a job with nothing to run.

    Raises:
        UsageError: an option has no effect, or there is nothing to run.
    """
    params = click.get_current_context().params
    for name in ("model_path", "input", "output"):
        if isinstance(params.get(name), Uri):
            raise click.UsageError(
                f"{params[name]} is in an object store, which is for encoding a corpus: pass --input and --output NAME/"
            )
    refuse(_FOR_CORPORA, "no folder to encode into: pass --output NAME/, or")
    has_texts = bool(options.texts or options.images) or options.input_path is not None
    if not is_benchmark:
        refuse(_FOR_BENCHMARKS, "nothing is timed without --benchmark; pass it, or")
        if not has_texts:
            suffix = " beside --query" if options.query is not None else ""
            raise click.UsageError(f"nothing to run: pass --text, --image, --input or --benchmark{suffix}")
        return
    refuse(_FOR_TEXTS - {"text", "input", "model_name"}, "--benchmark times the model and gives no answers;")
    if has_texts:
        refuse({"sequence_length"}, "--benchmark times texts, which have lengths of their own;")
    else:
        refuse({"model_name"}, "--benchmark times generated inputs;")


def _plan(options: InferOptions, output: Result) -> None:
    """Say what would be written, if the model and the texts can be read."""
    from onnxtool.infer.run import given_texts

    model = ModelFile.open(options.model_path)
    model.check_sound()
    if not model.takes_pictures:
        next(given_texts(options), None)
    emit_plan(WritePlan("infer", planned_files(filter(None, [output.output]))), output.format_name)


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


def write_vector_file(options: InferOptions, output: Result) -> None:
    """Write the vectors of the texts or images of `options` to a .npy, .npz or .parquet file."""
    from onnxtool.encoding.parquet import require_pyarrow
    from onnxtool.encoding.shards import write_vectors
    from onnxtool.infer.run import encode_texts

    assert output.output is not None  # noqa: S101  its suffix says that it is of vectors
    suffix = output.output.suffix.lower()
    if suffix == ".parquet":
        require_pyarrow()
    with progress(quiet=output.quiet), staged(output.output, force=output.force) as staging:
        ids, vectors = encode_texts(options, dense=suffix == ".npy")
        write_vectors(staging.model_path, ids, vectors)
    if not output.quiet:
        say(f"{len(ids)} {'vector' if len(ids) == 1 else 'vectors'}: {output.output}")


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
            rows.append((str(rank), score, *_cells(report, answer)))
        blocks.append(Table(("rank", "score", *_columns(report)), rows, frozenset({"rank", "score"})))
    return blocks


def _similarity_blocks(report: InferReport) -> list[Block]:
    rows = [(str(number), *_cells(report, answer)) for number, answer in enumerate(report.answers, start=1)]
    title = "Images" if _is_of_pictures(report) else "Texts"
    blocks: list[Block] = [Heading(title), Table(("#", *_columns(report)), rows, frozenset({"#", "tokens"}))]
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
    heading = Heading(f"Nearest other {title[:-1].lower()} of each")
    return [*blocks, heading, Table(columns, nearest, frozenset(columns))]


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


def _cells(report: InferReport, answer: TextAnswer) -> tuple[str, ...]:
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
