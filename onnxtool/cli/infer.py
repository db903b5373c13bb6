"""`onnxtool infer`: run texts through a model, time it, or encode a corpus with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.cli.choices import LocationType
from onnxtool.cli.infer_answers import LINES, MAX_IN_ONE_REPORT, run_answers, write_vector_file
from onnxtool.cli.infer_benchmark import run_benchmark
from onnxtool.cli.infer_corpus import encode_folder
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
from onnxtool.cli.render import emit_plan
from onnxtool.encoding.locations import Uri, is_uri
from onnxtool.encoding.options import CorpusOptions
from onnxtool.encoding.progress import ProgressOptions
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.options import InferOptions
from onnxtool.model_file import ModelFile
from onnxtool.reports import WritePlan, planned_files
from onnxtool.runtime.providers import ProviderOptions

# Parameters by purpose.
_ALWAYS = frozenset({"model_path", "provider", "threads"}) | option_names(ProviderOptions)
_FOR_TEXTS = (option_names(InferOptions) | option_names(GenerateOptions)) - _ALWAYS | {"vectors", "stream"}
_FOR_BENCHMARKS = option_names(BenchmarkOptions) - option_names(InferOptions)
_FOR_CORPORA = (option_names(CorpusOptions) | option_names(ProgressOptions)) - option_names(InferOptions) - {"force"}
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
        "files": "Files that report encoding progress",
        "timing": "Options for --benchmark",
    }


@click.command(cls=_Command, epilog='Example: onnxtool infer --model_path models/splade-int8.onnx --text "a train"')
@model_argument("model_path")
@derived_options(
    options=InferOptions,
    generation=GenerateOptions,
    corpus=CorpusOptions,
    timing=BenchmarkOptions,
    files=ProgressOptions,
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
    ".jsonl, or .csv with --benchmark; vectors alone to .npy, .npz or .parquet. A folder that exists or ends with / "
    "receives a vector for each text of --input.",
)
@dry_run_option
@format_options(
    [*FORMATS, LINES, "csv"],
    "; jsonl is a JSON object for each text as soon as it is answered, in bounded memory, and the default for an "
    f"--output NAME.jsonl, or .jsonl.gz, and for more than {MAX_IN_ONE_REPORT:,} texts; csv is for --benchmark",
)
def command(
    options: InferOptions,
    generation: Callable[[], GenerateOptions],
    corpus: Callable[[], CorpusOptions],
    timing: Callable[[], BenchmarkOptions],
    files: Callable[[], ProgressOptions],
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
    if format_name == "csv" and not benchmark:
        raise click.UsageError("--format csv is for --benchmark; json has all of an answer")
    if format_name == LINES and (benchmark or stream):
        flag = "--benchmark" if benchmark else "--stream"
        raise click.UsageError(f"--format {LINES} is for answers; leave out {flag}")
    is_folder = destination is not None and (click.get_current_context().meta[__name__] or destination.is_dir())
    if destination is not None and is_folder:
        refuse(_BESIDE_CORPORA, "--output is a folder, for the vectors of --input;")
        encode_folder(
            options.model_path, options.input_path, destination, corpus(), format_name, files=files(), quiet=quiet,
            dry_run=dry_run,
        )  # fmt: skip
        return 0
    _check(options, is_benchmark=benchmark)
    formats = [*FORMATS, "csv"] if benchmark else [*FORMATS, LINES, VECTORS]
    force = bool(click.get_current_context().params["force"])
    printed = Result(destination, force, format_of(destination, format_name, formats), quiet)
    printed.check()
    is_vectors = destination is not None and printed.format_name == VECTORS
    if is_vectors:
        refuse(_BESIDE_VECTORS, "--output is a file of vectors;")
    asked = timing() if benchmark else None
    if dry_run:
        _plan(options, [] if destination is None else [destination], printed)
        return 0
    if asked is not None:
        return run_benchmark(options, asked, printed)
    if destination is not None and is_vectors:
        write_vector_file(options, destination, force=force, quiet=quiet)
        return 0
    written = generation() if any(map(is_given, option_names(GenerateOptions))) else None
    run_answers(options, written, printed, stream=stream, vectors=vectors)
    return 0


def _check(options: InferOptions, *, is_benchmark: bool) -> None:
    """Refuse options that have no effect on the job, and a job with nothing to run.

    Raises:
        UsageError: an option has no effect, or there is nothing to run.
    """
    given = click.get_current_context().params
    for name in ("model_path", "input", "output"):
        if isinstance(given.get(name), Uri):
            raise click.UsageError(
                f"{given[name]} is in an object store, which is for encoding a corpus: pass --input and --output NAME/"
            )
    refuse(_FOR_CORPORA, "no folder to encode into: pass --output NAME/, or")
    has_texts = bool(options.texts or options.images) or options.input_path is not None
    if not is_benchmark:
        refuse(_FOR_BENCHMARKS, "nothing is timed without --benchmark; pass it, or")
        if not has_texts:
            beside = " beside --query" if options.query is not None else ""
            raise click.UsageError(f"nothing to run: pass --text, --image, --input or --benchmark{beside}")
        return
    refuse(_FOR_TEXTS - {"text", "input", "model_name"}, "--benchmark times the model and gives no answers;")
    if has_texts:
        refuse({"sequence_length"}, "--benchmark times texts, which have lengths of their own;")
    else:
        refuse({"model_name"}, "--benchmark times generated inputs;")


def _plan(options: InferOptions, paths: Sequence[Path], output: Result) -> None:
    """Say what would be written, if the model and the texts can be read."""
    from onnxtool.infer.run import given_texts

    model = ModelFile.open(options.model_path)
    model.check_sound()
    if not model.takes_pictures:
        next(given_texts(options), None)
    output.check(*paths)
    emit_plan(WritePlan("infer", planned_files(paths)), output.format_name)
