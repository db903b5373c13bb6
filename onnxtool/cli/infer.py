"""`onnxtool infer`: run texts through a model, or time it."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from onnxtool.cli.infer_answers import answer_blocks, answer_options
from onnxtool.cli.infer_benchmark import benchmark_blocks, benchmark_options
from onnxtool.cli.infer_corpus import (
    OF_CORPORA,
    OutputType,
    corpus_options,
    encode_folder,
    given_corpus_options,
    writes_folder,
)
from onnxtool.cli.options import PathType, output_options, progress, report_options
from onnxtool.cli.render import emit
from onnxtool.model_file import check_writable
from onnxtool.reports import BenchmarkReport, InferReport
from onnxtool.runtime.providers import PROVIDERS

# Parameters that mean nothing without --benchmark, and those that mean nothing with it.
_OF_BENCHMARKS = frozenset({"batch_sizes", "sequence_lengths", "runs", "duration_s", "warmup"})
_OF_TEXTS = frozenset({"texts", "query", "input_path", "prompt", "long", "overlap", "top_k", "vectors", "model_name"})

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
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, show_default=True, help="Intra-op threads; 0: one a core."
)
@output_options(
    "Write the result to this file instead of stdout. A folder, that is there or is written with / at its end, gets a "
    "vector for each text of --input.",
    OutputType(),
)
@report_options
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
    provider: str,
    threads: int,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Run texts through an ONNX file with the checkpoint's own tokenizer, or time it with --benchmark.

    What is printed depends on what the model is for: the terms of a sparse encoder and their weights, how similar
    texts are to each other, labels, texts ranked for a query, entities, the answer to a question, tokens for a mask.
    """
    if output is not None and writes_folder(output):
        if unused := _given_of((_OF_BENCHMARKS | _OF_TEXTS | {"benchmark"}) - _OF_FOLDERS):
            raise click.UsageError(
                f"--output is a folder, for the vectors of --input; leave out {' and '.join(unused)}"
            )
        asked = given_corpus_options(model_name, prompt, provider, threads, force=force)
        encode_folder(model_path, input_path, output, asked, format_name, quiet=quiet)
        return
    if unused := _given_of(OF_CORPORA):
        raise click.UsageError(f"no folder to encode into: pass --output NAME/, or leave out {' and '.join(unused)}")
    if benchmark:
        if unused := _given_of(_OF_TEXTS):
            raise click.UsageError(f"--benchmark times random inputs; leave out {' and '.join(unused)}")
    elif unused := _given_of(_OF_BENCHMARKS):
        raise click.UsageError(f"nothing is timed without --benchmark; pass it, or leave out {' and '.join(unused)}")
    elif not texts and input_path is None:
        beside = " beside --query" if query is not None else ""
        raise click.UsageError(f"nothing to run: pass --text, --input or --benchmark{beside}")
    elif overlap is not None and long != "window":
        raise click.UsageError("no windows to share tokens: pass --long window, or leave out --overlap")
    if output is not None:
        check_writable(output, force=force)
    # Imported here so that --help needs neither numpy nor tokenizers.
    from onnxtool.infer import BenchmarkOptions, LongTexts, TextInput, load, read_texts
    from onnxtool.infer.benchmark import benchmark as time_model

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
            report = time_model(model_path, options, on_progress=on_progress)
            blocks = benchmark_blocks(report)
        else:
            named = [TextInput(text) for text in texts]
            named += read_texts(input_path) if input_path is not None else ()
            model = load(model_path, model_name=model_name, provider=provider, threads=threads, on_progress=on_progress)
            report = model.answer(
                named,
                query=query,
                prompt=prompt,
                long=None if long is None else LongTexts(long, overlap),
                top_k=top_k,
                on_progress=on_progress,
            )
            blocks = answer_blocks(report, vectors=vectors)
    emit(report, blocks, format_name, output=output, force=force)


def _given_of(names: frozenset[str]) -> list[str]:
    """Return the options for the parameters `names` that stand on the command line, in the order of the help."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
