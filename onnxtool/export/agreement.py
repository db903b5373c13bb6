"""Compare a file with a checkpoint, regardless of how the file was made or changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from onnxtool.checkpoint.folder import find_checkpoint_folder
from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.errors import ExportError, ModelFileError, VerificationError
from onnxtool.export.options import DTYPES, ExportOptions
from onnxtool.export.preparation import Job, Request, prepare
from onnxtool.export.single_call import SingleCallPipeline
from onnxtool.export.tracing import ExportStrategy
from onnxtool.export.verification import Verifier, lengths_of
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DTYPE_KEY, HEAD_KEY, MAX_LENGTH_KEY, ROUTE_KEY, TASK_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.reading import parse_json
from onnxtool.runtime.comparison import Case, run_reference
from onnxtool.runtime.tokens import OwnTokenizer, hard_texts, read_folder
from onnxtool.verification import Verification

_FIXED_KEY, _OPTIONS_KEY = "onnxtool.fixed_axes", "onnxtool.options"
# Options that the comparison sets itself, or that do not affect what a file computes.
_NOT_COMPARED = ("atol", "rtol", "min_cosine", "opset", "device", "tokenizer", "prompt")


def compare_with_checkpoint(file: ModelFile, options: ExportOptions, samples: Sequence[Case] = ()) -> Verification:
    """Compare a file with a checkpoint in PyTorch, on the export's test cases or on samples.

    What the file computes from the checkpoint is read from its stamps: task, head and export options. A file without
    stamps is compared with what `onnxtool export` would make of the checkpoint with `options`.

    Args:
        file: an export, or a file derived from one.
        options: the checkpoint, how it may be loaded, and the tolerance.
        samples: inputs to run both on instead of the cases.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: samples were passed for a generative model, or PyTorch cannot run them.
        ModelFileError: the stamps cannot be read.
    """
    stamped = _stamped(file)
    with temporary_folder() as folder:  # nothing is written, but an export requires an output
        try:
            job = prepare(Request.of(replace(options, output=folder / "model.onnx", **stamped)))
        except ExportError as error:  # its hint is about options that the file states, not the user
            stated = ", ".join(f"{name} {value}" for name, value in stamped.items())
            raise ExportError(
                f"{file.path} states {stated}, which {options.model_name} does not give: {error.message}",
                "compare it with the checkpoint that it was made from",
            ) from error
    if file.embedded_tokenizer is not None:
        source = job.request.source
        own = OwnTokenizer(job.tokenizer, source.model_name, source.sentence_modules.adds_special_tokens)
        texts, way = hard_texts(job.tokenizer), "compare it with the checkpoint that it was made from"
        own.check("the file's tokenizer", read_folder(find_checkpoint_folder(file)), texts, way)
    job = _with_storage(job, file)
    strategy = _strategy_of(job, file)
    if samples:
        return _compare_on(samples, file, job)
    lengths = lengths_of(job, strategy).seen_in(load_model(file.path))
    return Verifier(job).measure(file, strategy, lengths)[0]


def _stamped(file: ModelFile) -> dict[str, Any]:
    """Return the export options stated in a file."""
    keys = {"task": TASK_KEY, "head": HEAD_KEY, "dtype": DTYPE_KEY, "route": ROUTE_KEY}
    found: dict[str, Any] = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    if found.get("dtype") not in DTYPES:  # int8 and int4, of `optimize`: PyTorch computes what was quantized
        found.pop("dtype", None)
    longest = file.metadata_number(MAX_LENGTH_KEY)
    found |= {} if longest is None else {"max_length": longest}
    try:
        chosen = parse_json(file.metadata.get(_OPTIONS_KEY, "{}"))
    except ValueError:
        chosen = None
    if not isinstance(chosen, Mapping):
        raise ModelFileError(
            f"the metadata {_OPTIONS_KEY} of {file.path} is not an object", "it was edited; export the model again"
        )
    # Files are untrusted: only the user can allow running code.
    known = {"max_length", "target", "dimensions", "keep_raw", "text", "allow_missing_weights", "allow_unused_weights"}
    unknown = chosen.keys() - known - {"route", "allow_pickle", *_NOT_COMPARED}
    if unknown:
        raise ModelFileError(
            f"the metadata {_OPTIONS_KEY} of {file.path} has {', '.join(sorted(unknown))}, which no export has",
            "it was edited, or made by another version; export the model again",
        )
    return found | {name: value for name, value in chosen.items() if name in known}


def _with_storage(job: Job, file: ModelFile) -> Job:
    """Make the head store vectors as the file does, with ranges that are stamped and not in any option."""
    stored, pipeline = VectorType.of_model(file), job.plan.pipeline
    if stored is None or not isinstance(pipeline, SingleCallPipeline) or pipeline.head is None:
        return job
    pipeline = replace(pipeline, head=replace(pipeline.head, stored=stored))
    return replace(job, plan=replace(job.plan, pipeline=pipeline))


def _strategy_of(job: Job, file: ModelFile) -> ExportStrategy:
    """Return the strategy that fixes the same axes as the file."""
    strategies = list(job.plan.pipeline.strategies("auto", verified=True))
    stated = file.metadata.get(_FIXED_KEY, "")
    fitting = (one for one in strategies if ", ".join(f"{axis} {size}" for axis, size in one.fixed.items()) == stated)
    strategy = next(fitting, None)
    if strategy is None:
        raise ExportError(
            f"{file.path} was exported with {stated}, and {job.request.source.model_name} has no such axes",
            "compare it with the checkpoint that it was made from",
        )
    return strategy


def _compare_on(samples: Sequence[Case], file: ModelFile, job: Job) -> Verification:
    pipeline = job.plan.pipeline
    if not isinstance(pipeline, SingleCallPipeline):
        raise ExportError(
            f"{file.path} generates step by step, and is compared on its own prompts", "leave --sample_inputs out"
        )
    run = partial(pipeline.run, job.models.reference())
    outputs = run_reference(run, samples, name="PyTorch", sequences=pipeline.sequences)
    try:
        return pipeline.verify(file, outputs, job.request.options.tolerance)
    except VerificationError as error:
        return error.verification
