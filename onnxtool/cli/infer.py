"""`onnxtool infer`: run texts through a model, time it, or encode a corpus with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.cli.benchmark_blocks import benchmark_blocks, benchmark_csv
from onnxtool.cli.infer_answers import answer_blocks, generation_blocks
from onnxtool.cli.infer_corpus import encode_folder
from onnxtool.cli.infer_lines import FORMAT as LINES
from onnxtool.cli.infer_lines import MAX_IN_ONE_REPORT, is_lines_file, write_lines
from onnxtool.cli.options import (
    FORMATS,
    LocationType,
    PathType,
    derived_options,
    dry_run_option,
    format_options,
    option_names,
)
from onnxtool.cli.progress import progress
from onnxtool.cli.render import emit, emit_plan, write_out
from onnxtool.encoding.locations import Uri, is_uri
from onnxtool.encoding.options import CorpusOptions
from onnxtool.encoding.progress_files import ProgressOptions
from onnxtool.errors import GateError
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.options import InferOptions
from onnxtool.model_file import ModelFile, check_writable
from onnxtool.reports import WritePlan, planned_files

if TYPE_CHECKING:
    from onnxtool.checkpoint.text_files import TextInput

_STDOUT = Path("-")
# Parameters by what they are for.
_ALWAYS = frozenset({"model_path", "provider", "threads"})
_FOR_TEXTS = (option_names(InferOptions) | option_names(GenerateOptions)) - _ALWAYS | {"vectors", "stream"}
_FOR_BENCHMARKS = option_names(BenchmarkOptions) - option_names(InferOptions) | {"plot"}
_FOR_CORPORA = (option_names(CorpusOptions) | option_names(ProgressOptions)) - option_names(InferOptions) - {"force"}


class _OutputType(LocationType):
    """A path that remembers whether it was written as a folder, with a separator at its end; a store has folders."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if ctx is not None:
            ctx.meta[__name__] = str(value).endswith(("/", os.sep)) or is_uri(str(value))
        return super().convert(value, param, ctx)


@click.command(epilog='Example: onnxtool infer --model_path models/tiny-splade.onnx --text "a cat"')
@derived_options(
    options=InferOptions,
    generation=GenerateOptions,
    corpus=CorpusOptions,
    timing=BenchmarkOptions,
    files=ProgressOptions,
)
@click.option("--stream", is_flag=True, help="Print what a model writes while it does, and nothing else to stdout.")
@click.option("--vectors", is_flag=True, help="Print the embeddings themselves as well; JSON always has them.")
@click.option(
    "--benchmark",
    is_flag=True,
    help="Time the model: on the texts of --text and --input, else on generated inputs of several shapes.",
)
@click.option("--plot", type=PathType(), metavar="FILE", help="Draw the latencies of each shape: .png, .svg or .pdf.")
@click.option(
    "--output",
    type=_OutputType(),
    help="Write the result to this file instead of stdout, which is -. A folder that exists or is written with / at "
    "its end gets a vector for each text of --input.",
)
@dry_run_option
@format_options(
    [*FORMATS, LINES, "csv"],
    "; jsonl is a JSON object for each text as soon as it is answered, in bounded memory, and the default for an "
    f"--output NAME.jsonl, or .jsonl.gz, and for more than {MAX_IN_ONE_REPORT:,} texts; csv is for --benchmark",
)
def command(
    options: InferOptions,
    generation: GenerateOptions,
    corpus: CorpusOptions,
    timing: BenchmarkOptions,
    files: ProgressOptions,
    *,
    stream: bool,
    vectors: bool,
    benchmark: bool,
    plot: Path | None,
    output: Path | None,
    dry_run: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Run texts through an ONNX file with the checkpoint's own tokenizer, or time it with --benchmark.

    What is printed depends on what the model is for: the terms of a sparse encoder and their weights, how similar
    texts are to each other, labels, texts ranked for a query, entities, the answer to a question, tokens for a mask.
    Decoders with a cache write with --max_new_tokens, and give candidates for the next token without it;
    encoder-decoders always write.
    """
    output = None if output == _STDOUT else output
    if format_name == "csv" and not benchmark:
        raise click.UsageError("--format csv is for --benchmark; json has all of an answer")
    if format_name == LINES and (benchmark or stream):
        raise click.UsageError(
            f"--format {LINES} is for answers; leave out {'--benchmark' if benchmark else '--stream'}"
        )
    if output is not None and (click.get_current_context().meta[__name__] or output.is_dir()):
        _refuse(
            _FOR_BENCHMARKS | _FOR_TEXTS - option_names(CorpusOptions) - {"input"} | {"benchmark"},
            "--output is a folder, for the vectors of --input;",
        )
        encode_folder(
            options.model_path,
            options.input_path,
            output,
            corpus,
            format_name,
            files=files,
            quiet=quiet,
            dry_run=dry_run,
        )
        return 0
    _refuse_addresses()
    _refuse(_FOR_CORPORA, "no folder to encode into: pass --output NAME/, or")
    has_texts = bool(options.texts or options.images) or options.input_path is not None
    if benchmark:
        _refuse(_FOR_TEXTS - {"text", "input", "model_name"}, "--benchmark times the model and gives no answers;")
        if has_texts:
            _refuse({"sequence_length"}, "--benchmark times texts, which have lengths of their own;")
        else:
            _refuse({"model_name"}, "--benchmark times generated inputs;")
    else:
        _refuse(_FOR_BENCHMARKS, "nothing is timed without --benchmark; pass it, or")
        if not has_texts:
            beside = " beside --query" if options.query is not None else ""
            raise click.UsageError(f"nothing to run: pass --text, --image, --input or --benchmark{beside}")
    if output is not None:
        check_writable(output, force=corpus.force)
    if dry_run:
        _plan(
            options, [path for path in (output, plot) if path is not None], force=corpus.force, format_name=format_name
        )
        return 0
    # Imported here so that --help needs neither numpy nor tokenizers.
    from onnxtool.infer.generation.writing import writes_text
    from onnxtool.infer.pictures import takes_pictures
    from onnxtool.infer.run import given_texts, run_texts, stream_texts

    if benchmark:
        return _run_benchmark(
            options.model_path,
            replace(timing, texts=tuple(given_texts(options))),
            plot=plot,
            output=output,
            force=corpus.force,
            format_name=format_name,
            quiet=quiet,
        )
    generation = replace(generation, top_k=options.top_k)
    writes = stream or writes_text(options.model_path, generation)
    if writes:
        _refuse({"query", "overlap", "vectors"}, "the model writes text;")
    texts = None
    if not stream and not _is_given("format_name"):
        if is_lines_file(output):
            format_name = LINES
        elif options.input_path is not None and not takes_pictures(ModelFile.open(options.model_path)):
            rest = given_texts(options)
            texts = tuple(islice(rest, MAX_IN_ONE_REPORT + 1))
            if len(texts) > MAX_IN_ONE_REPORT:
                click.echo(f"more than {MAX_IN_ONE_REPORT:,} texts: answers are written as --format {LINES}", err=True)
                format_name = LINES
    if format_name == LINES:
        answered = stream_texts(
            options,
            texts=None if texts is None else chain(texts, rest),
            generation=generation if writes else None,
        )
        write_lines(answered, output, force=corpus.force, quiet=quiet)
        return 0
    if writes:
        return _write(
            options,
            generation,
            texts,
            stream=stream,
            output=output,
            force=corpus.force,
            format_name=format_name,
            quiet=quiet,
        )
    with progress(quiet=quiet):
        report = run_texts(options, texts=texts)
    emit(report, answer_blocks(report, vectors=vectors), format_name, output=output, force=corpus.force)
    return 0


def _write(
    options: InferOptions,
    generation: GenerateOptions,
    texts: Sequence[TextInput] | None,
    *,
    stream: bool,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Let a model write after texts, and print what it wrote, at the end or, to `stream`, while it writes."""
    from onnxtool.infer.run import write_texts

    if not stream:
        with progress(quiet=quiet):
            report = write_texts(options, generation, texts=texts)
        emit(report, generation_blocks(report), format_name, output=output, force=force)
        return 0
    if output is not None or format_name != "text":
        raise click.UsageError("--stream prints text to stdout: leave out --output and --format")
    last = 0

    def show(number: int, piece: str) -> None:
        nonlocal last
        click.echo("\n" * (number - last) + piece, nl=False)
        last = number

    report = write_texts(options, generation, on_text=show)
    click.echo("\n" * (len(report.answers) - 1 - last))
    if not quiet:
        click.echo(f"{report.num_generated} tokens, {report.throughput_tokens_per_s:.1f} tokens/s", err=True)
    return 0


def _run_benchmark(
    model_path: Path,
    options: BenchmarkOptions,
    *,
    plot: Path | None,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Time a model and print the report; return the exit code, which is 1 where a gate is met.

    Raises:
        UsageError: a gate or a baseline cannot be used, or the plot cannot be drawn as asked.
    """
    from onnxtool.benchmarking import benchmark

    if plot is not None:
        from onnxtool.cli.latency_plot import check_plot, draw_latencies

        check_plot(plot)
        check_writable(plot, force=force)
    try:
        with progress(quiet=quiet):
            report = benchmark(model_path, options)
    except GateError as error:
        raise click.UsageError(f"{error.message}\n{error.hint}") from error
    if plot is not None:
        draw_latencies(report, plot, force=force)
    if format_name == "csv":
        write_out(benchmark_csv(report), output=output, force=force)
    else:
        emit(report, benchmark_blocks(report), format_name, output=output, force=force)
    for gate in report.gates:
        if gate.met or not gate.decided:
            click.echo(f"gate {gate}", err=True)
    return 1 if any(gate.met for gate in report.gates) else 0


def _plan(options: InferOptions, outputs: Sequence[Path], *, force: bool, format_name: str) -> None:
    """Say what would be written, where the model and the texts can be read."""
    from onnxtool.infer.pictures import takes_pictures
    from onnxtool.infer.run import given_texts

    model = ModelFile.open(options.model_path)
    model.check_sound()
    if not takes_pictures(model):
        next(given_texts(options), None)
    for path in outputs:
        check_writable(path, force=force)
    emit_plan(WritePlan("infer", planned_files(outputs)), format_name)


def _is_given(name: str) -> bool:
    """Whether a parameter was chosen, and is not the default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _refuse(names: AbstractSet[str], reason: str) -> None:
    """Refuse parameters that would do nothing."""
    context = click.get_current_context()
    unused = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if unused:
        raise click.UsageError(f"{reason} leave out {' and '.join(unused)}")


def _refuse_addresses() -> None:
    """Refuse what lies in a store, which corpora alone are read from."""
    given = click.get_current_context().params
    for name in ("model_path", "input", "output"):
        if isinstance(given.get(name), Uri):
            raise click.UsageError(
                f"{given[name]} is in an object store, which is for encoding a corpus: pass --input and --output NAME/"
            )
