"""`onnxtool infer`: run texts through a model, or time it."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from onnxtool.cli.infer_answers import answer_blocks, answer_options
from onnxtool.cli.infer_benchmark import BENCHMARK_PARAMETERS, benchmark_options, run_benchmark, threads_option
from onnxtool.cli.infer_corpus import (
    OF_CORPORA,
    OutputType,
    corpus_options,
    encode_folder,
    given_corpus_options,
    writes_folder,
)
from onnxtool.cli.options import FORMATS, PathType, format_options, output_options, progress
from onnxtool.cli.render import emit
from onnxtool.model_file import check_writable
from onnxtool.runtime.providers import PROVIDERS

# Parameters of answers, and those of them that a benchmark has a use for; of these, one for texts alone.
_OF_TEXTS = frozenset({"texts", "query", "input_path", "prompt", "long", "overlap", "top_k", "vectors", "model_name"})
_OF_BOTH = frozenset({"texts", "input_path", "model_name"})
# Of these, what means something for a corpus as well.
_OF_FOLDERS = frozenset({"input_path", "prompt", "model_name"})


@click.command(epilog='Example: onnxtool infer --model_path models/tiny-splade.onnx --text "a cat"')
@click.option("--model_path", type=PathType(), required=True, help="The ONNX file.")
@click.option("--model_name", help="Folder or hub id with tokenizer.json; default: the files beside the model.")
@answer_options
@corpus_options
@benchmark_options
@click.option(
    "--provider",
    type=click.Choice(["auto", *PROVIDERS]),
    default="auto",
    show_default=True,
    help="Where to run: cuda fails where it cannot, auto takes it where it can.",
)
@threads_option
@output_options(
    "Write the result to this file instead of stdout. A folder, that is there or is written with / at its end, gets a "
    "vector for each text of --input.",
    OutputType(),
)
@format_options([*FORMATS, "csv"], "; csv is for --benchmark")
def command(
    *,
    model_path: Path,
    model_name: str | None,
    texts: tuple[str, ...],
    query: str | None,
    input_path: Path | None,
    prompt: str | None,
    long: str | None,
    overlap: int | None,
    top_k: int | None,
    vectors: bool,
    benchmark: bool,
    batch_sizes: tuple[int, ...],
    sequence_lengths: tuple[int, ...],
    runs: int | None,
    duration_s: float | None,
    warmup: int,
    inter_threads: int,
    io_binding: bool,
    compare: str | None,
    baseline: Path | None,
    fail_if: tuple[str, ...],
    plot: Path | None,
    provider: str,
    threads: int,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Run texts through an ONNX file with the checkpoint's own tokenizer, or time it with --benchmark.

    What is printed depends on what the model is for: the terms of a sparse encoder and their weights, how similar
    texts are to each other, labels, texts ranked for a query, entities, the answer to a question, tokens for a mask.
    """
    if format_name == "csv" and not benchmark:
        raise click.UsageError("--format csv is for --benchmark; json has all of an answer")
    if output is not None and writes_folder(output):
        if unused := _given_of((BENCHMARK_PARAMETERS | _OF_TEXTS | {"benchmark"}) - _OF_FOLDERS):
            raise click.UsageError(
                f"--output is a folder, for the vectors of --input; leave out {' and '.join(unused)}"
            )
        asked = given_corpus_options(model_name, prompt, provider, threads, force=force)
        encode_folder(model_path, input_path, output, asked, format_name, quiet=quiet)
        return 0
    if unused := _given_of(OF_CORPORA):
        raise click.UsageError(f"no folder to encode into: pass --output NAME/, or leave out {' and '.join(unused)}")
    has_texts = bool(texts) or input_path is not None
    if benchmark:
        if unused := _given_of(_OF_TEXTS - _OF_BOTH):
            raise click.UsageError(f"--benchmark times the model and answers nothing; leave out {' and '.join(unused)}")
        if unused := _given_of(frozenset({"sequence_lengths"} if has_texts else {"model_name"})):
            inputs = "texts, which have lengths of their own" if has_texts else "made-up inputs"
            raise click.UsageError(f"--benchmark times {inputs}; leave out {' and '.join(unused)}")
    elif unused := _given_of(BENCHMARK_PARAMETERS):
        raise click.UsageError(f"nothing is timed without --benchmark; pass it, or leave out {' and '.join(unused)}")
    elif not has_texts:
        beside = " beside --query" if query is not None else ""
        raise click.UsageError(f"nothing to run: pass --text, --input or --benchmark{beside}")
    elif overlap is not None and long != "window":
        raise click.UsageError("no windows to share tokens: pass --long window, or leave out --overlap")
    if output is not None:
        check_writable(output, force=force)
    # Imported here so that --help needs neither numpy nor tokenizers.
    from onnxtool.benchmarking import BenchmarkOptions
    from onnxtool.infer import LongTexts, TextInput, load, read_texts

    named = [TextInput(text) for text in texts]
    named += read_texts(input_path) if input_path is not None else ()
    if benchmark:
        options = BenchmarkOptions(
            batch_sizes=batch_sizes,
            sequence_lengths=sequence_lengths,
            runs=runs,
            duration_s=duration_s,
            warmup=warmup,
            provider=provider,
            threads=threads,
            inter_threads=inter_threads,
            io_binding=io_binding,
            texts=tuple(named),
            model_name=model_name,
            compare=compare,
            baseline=baseline,
            fail_if=fail_if,
        )
        return run_benchmark(
            model_path, options, plot=plot, output=output, force=force, format_name=format_name, quiet=quiet
        )
    with progress(quiet=quiet) as on_progress:
        model = load(model_path, model_name=model_name, provider=provider, threads=threads, on_progress=on_progress)
        report = model.answer(
            named,
            query=query,
            prompt=prompt,
            long=None if long is None else LongTexts(long, overlap),
            top_k=top_k,
            on_progress=on_progress,
        )
    emit(report, answer_blocks(report, vectors=vectors), format_name, output=output, force=force)
    return 0


def _given_of(names: frozenset[str]) -> list[str]:
    """Return the options for the parameters `names` that stand on the command line, in the order of the help."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
