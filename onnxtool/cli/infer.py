"""`onnxtool infer`: run texts through a model, or time it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from onnxtool.cli.options import CountList, PathType, output_options, progress, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration, format_shape
from onnxtool.model_file import check_writable
from onnxtool.reports import BenchmarkReport, InferReport, TextAnswer
from onnxtool.runtime.providers import PROVIDERS

# What the two columns of candidates are called, by kind.
_COLUMNS = {"terms": ("term", "weight"), "tokens": ("token", "probability"), "labels": ("label", "score")}
# A wider table of all pairs does not fit a screen; the nearest text of each is shown instead.
_MAX_MATRIX = 12
_MAX_TEXT_WIDTH = 80
# Parameters that mean nothing without --benchmark, and those that mean nothing with it.
_OF_BENCHMARKS = frozenset({"batch_sizes", "sequence_lengths", "runs", "duration_s", "warmup"})
_OF_TEXTS = frozenset({"texts", "input_path", "top_k", "model_name"})


@click.command(epilog='Example: onnxtool infer --model_path models/tiny-splade.onnx --text "a cat"')
@click.option("--model_path", type=PathType(), required=True, help="The ONNX file.")
@click.option("--model_name", help="Folder or hub id with tokenizer.json; default: the files beside the model.")
@click.option("--text", "texts", multiple=True, help="A text to run; may be given several times.")
@click.option(
    "--input", "input_path", type=PathType(), help="A file of texts: .txt, or .jsonl with id and contents on a line."
)
@click.option("--top_k", type=click.IntRange(min=1), default=10, show_default=True, help="Candidates for each text.")
@click.option("--benchmark", is_flag=True, help="Time the model on random inputs in place of texts.")
@click.option(
    "--batch_size", "batch_sizes", type=CountList(), default="1,8", show_default=True, help="Batch sizes to time."
)
@click.option(
    "--sequence_length",
    "sequence_lengths",
    type=CountList(),
    default="16,128",
    show_default=True,
    help="Sequence lengths to time.",
)
@click.option("--runs", type=click.IntRange(min=1), help="Stop a shape after so many runs.  [default: 100 or 5 s]")
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop a shape after so many seconds; with --runs, after whichever comes first.",
)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Runs of a shape that do not count."
)
@click.option(
    "--provider",
    type=click.Choice(["auto", *PROVIDERS]),
    default="auto",
    show_default=True,
    help="Where to run: cuda fails where it cannot, auto takes it where it can.",
)
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, show_default=True, help="Intra-op threads; 0: one a core."
)
@output_options("Write the result to this file instead of stdout.")
@report_options
def command(
    *,
    model_path: Path,
    model_name: str | None,
    texts: tuple[str, ...],
    input_path: Path | None,
    top_k: int,
    benchmark: bool,
    batch_sizes: tuple[int, ...],
    sequence_lengths: tuple[int, ...],
    runs: int | None,
    duration_s: float | None,
    warmup: int,
    provider: str,
    threads: int,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Run texts through an ONNX file with the checkpoint's own tokenizer, or time it with --benchmark.

    What is printed depends on what the model is for: the terms of a sparse encoder and their weights, labels, the
    tokens for a mask, or how similar the texts are to each other.
    """
    if benchmark:
        if unused := _given_of(_OF_TEXTS):
            raise click.UsageError(f"--benchmark times random inputs; leave out {' and '.join(unused)}")
    elif unused := _given_of(_OF_BENCHMARKS):
        raise click.UsageError(f"nothing is timed without --benchmark; pass it, or leave out {' and '.join(unused)}")
    elif not texts and input_path is None:
        raise click.UsageError("nothing to run: pass --text, --input or --benchmark")
    if output is not None:
        check_writable(output, force=force)
    # Imported here so that --help needs neither numpy nor tokenizers.
    from onnxtool.infer import BenchmarkOptions, TextInput, benchmark_model, infer_texts, read_texts

    report: BenchmarkReport | InferReport
    with progress(quiet=quiet) as on_progress:
        if benchmark:
            options = BenchmarkOptions(
                batch_sizes=batch_sizes,
                sequence_lengths=sequence_lengths,
                runs=runs,
                duration_s=duration_s,
                warmup=warmup,
                provider=provider,
                threads=threads,
            )
            report = benchmark_model(model_path, options, on_progress=on_progress)
            blocks = _benchmark_blocks(report)
        else:
            named = [TextInput(text) for text in texts]
            report = infer_texts(
                model_path,
                [*named, *(read_texts(input_path) if input_path is not None else ())],
                model_name=model_name,
                provider=provider,
                threads=threads,
                top_k=top_k,
                on_progress=on_progress,
            )
            blocks = _infer_blocks(report)
    emit(report, blocks, format_name, output=output, force=force)


def _given_of(names: frozenset[str]) -> list[str]:
    """Return the options for the parameters `names` that stand on the command line, in the order of the help."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def _infer_blocks(report: InferReport) -> list[Block]:
    facts = Facts([("Model", report.model), ("Task", report.task), ("Provider", report.provider)])
    blocks: list[Block] = [facts, *(Note(note) for note in report.notes)]
    if report.similarities:
        return [*blocks, *_similarity_blocks(report)]
    for number, answer in enumerate(report.answers, start=1):
        blocks.append(Heading(_title(number, answer)))
        if answer.candidates:
            label, score = _COLUMNS[report.kind]
            rows = [(candidate.label, f"{candidate.score:.4f}") for candidate in answer.candidates]
            blocks.append(Table((label, score), rows, frozenset({score})))
        elif answer.outputs:
            blocks.append(Facts([(name, format_shape(shape)) for name, shape in answer.outputs.items()]))
        else:
            blocks.append(Facts([(_COLUMNS[report.kind][0], "none")]))
    return blocks


def _similarity_blocks(report: InferReport) -> list[Block]:
    rows = [
        (str(number), str(answer.num_tokens), _label(answer)) for number, answer in enumerate(report.answers, start=1)
    ]
    blocks: list[Block] = [Heading("Texts"), Table(("#", "tokens", "text"), rows, frozenset({"#", "tokens"}))]
    if len(rows) <= _MAX_MATRIX:
        numbers = [number for number, _, _ in rows]
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
    return [*blocks, Heading("Nearest other text of each"), Table(columns, nearest, frozenset(columns))]


def _title(number: int, answer: TextAnswer) -> str:
    cut = ", cut" if answer.truncated else ""
    return f"{number}. {_label(answer)} ({answer.num_tokens} tokens{cut})"


def _label(answer: TextAnswer) -> str:
    """Name a text by its id and how it begins, on one line."""
    text = " ".join(answer.text.split())
    short = text if len(text) <= _MAX_TEXT_WIDTH else f"{text[: _MAX_TEXT_WIDTH - 1]}…"
    return short if answer.id is None else f"[{answer.id}] {short}"


def _benchmark_blocks(report: BenchmarkReport) -> list[Block]:
    facts = Facts(
        [
            ("Model", report.model),
            ("Provider", report.provider),
            ("Threads", str(report.threads)),
            ("Load", format_duration(report.load_ms)),
            ("First run", format_duration(report.first_run_ms)),
            ("Peak memory", format_bytes(report.peak_rss_bytes)),
            ("Warm-up", f"{report.warmup} runs of each shape, not counted"),
        ]
    )
    columns = ("batch", "sequence", "runs", "p50 ms", "p95 ms", "p99 ms", "mean ms", "samples/s", "tokens/s")
    rows: list[Sequence[str]] = []
    for result in report.results:
        latency = result.latency_ms
        rows.append(
            (
                str(result.batch_size),
                str(result.sequence_length),
                str(result.runs),
                f"{latency.p50:.2f}",
                f"{latency.p95:.2f}",
                f"{latency.p99:.2f}",
                f"{latency.mean:.2f} ± {latency.stdev:.2f}",
                f"{result.throughput_samples_per_s:.1f}",
                f"{result.throughput_tokens_per_s:.0f}",
            )
        )
    return [facts, Heading("Latency and throughput"), Table(columns, rows, frozenset(columns))]
