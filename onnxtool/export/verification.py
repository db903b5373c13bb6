"""Verify an export on the usual cases and on texts up to its maximum; else find the text length it works up to.

A file is also compared with its checkpoint, regardless of how it was made or changed since.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import find_checkpoint_folder
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.errors import CheckpointError, ExportError, ModelFileError, VerificationError
from onnxtool.export.lengths import WORK, Lengths
from onnxtool.export.modalities.modality import SEQUENCE
from onnxtool.export.options import DTYPES, ExportOptions
from onnxtool.export.preparation import Job, Request, prepare
from onnxtool.export.signature import to_numpy
from onnxtool.export.single_call import SingleCallPipeline
from onnxtool.export.tracing import ExportStrategy
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DTYPE_KEY, HEAD_KEY, MAX_LENGTH_KEY, ROUTE_KEY, TASK_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.progress import tell
from onnxtool.reading import parse_json
from onnxtool.runtime.comparison import Case, ReferenceOutputs, run_reference
from onnxtool.runtime.layers import Values, is_same_alone
from onnxtool.runtime.tokens import OwnTokenizer, hard_texts, read_folder
from onnxtool.verification import Verification

# A file that fails for texts longer than these is a wrong trace, not one side of a threshold.
_MIN_TOKENS = 60
_IDS = ("input_ids", "inputs")


class ShorterError(VerificationError):
    """A file works for texts up to some length, but not for longer ones.

    Attributes:
        lengths: the lengths that it works for.
        is_own: whether the model itself does not run on longer texts, so no other trace can.
    """

    def __init__(self, error: VerificationError, lengths: Lengths, *, is_own: bool) -> None:
        super().__init__(error.message, error.hint, error.verification)
        self.lengths, self.is_own = lengths, is_own

    @property
    def longest(self) -> int:
        """The maximum number of tokens in a text that it works for."""
        return self.lengths.longest or 0


def lengths_of(job: Job, strategy: ExportStrategy) -> Lengths:
    """Return the text lengths of the file: a single one if the model or the strategy fixes it."""
    model_sizes = {} if job.plan.pipeline.signature is None else job.plan.pipeline.signature.model_sizes
    fixed = {**model_sizes, **strategy.fixed}.get(SEQUENCE)
    return job.lengths if fixed is None or job.lengths.longest is None else Lengths(job.lengths.stated, fixed)


class ExportVerifier:
    """Compares an export's files with PyTorch; computes PyTorch's outputs once for all strategies."""

    def __init__(self, job: Job) -> None:
        self._job, self._pipeline = job, job.plan.pipeline
        self.adapted = {
            adapter.name: ExportVerifier(replace(job, models=job.models.with_adapter(adapter)))
            for adapter in job.models.adapters
        }
        # Keyed by the sizes of fixed axes and, apart from the usual cases, the text lengths.
        self._references: dict[tuple[tuple[tuple[str, int], ...], tuple[int, ...]], ReferenceOutputs] = {}

    def verify(self, file: ModelFile, strategy: ExportStrategy, lengths: Lengths) -> Verification:
        """Compare the file with a freshly loaded model, because running and tracing may change a model.

        The usual cases come first, then texts at the thresholds and maximum of `lengths`.

        Raises:
            ShorterError: the file works only for shorter texts.
            VerificationError: an output differs in another way.
        """
        try:
            verification, error, refused = self.measure(file, strategy, lengths)
            if error is not None:
                raise self._shorter(error, file, strategy, lengths)
            covered = self.longest_case(verification)
            too_long = min((length for length in refused if length > covered), default=None)
            if too_long is None:
                return verification
            longest = self._longest_right(file, strategy, lengths, covered, too_long)
            reason = f"PyTorch itself does not run on {longest + 1}"
            none = VerificationError(f"PyTorch itself does not run on {too_long} tokens", "", verification)
            raise ShorterError(none, replace(lengths, longest=longest, reason=reason), is_own=True)
        finally:
            self._job.stopwatch.lap("verify")

    def measure(
        self, file: ModelFile, strategy: ExportStrategy, lengths: Lengths
    ) -> tuple[Verification, VerificationError | None, set[int]]:
        """Compare the file like `verify`; return the figures, the error, and the lengths that PyTorch refuses."""
        steps = self._pipeline.steps
        verification, error = self._compare(file, self._reference(strategy, lengths))
        further = lengths.beyond(self.longest_case(verification), steps=steps)
        refused: set[int] = set()
        if error is None and further:
            tell(f"comparing texts of up to {further[0]} tokens")
            reference = self._reference(strategy, lengths, further)
            refused = {*further} - {_num_tokens(case) + steps for case in reference.cases}
            if reference.cases:
                longer, error = self._compare(file, reference)
                verification = _merged(verification, longer)
            described = (f"a text of {length} tokens" for length in sorted(refused))
            verification = replace(verification, refused=(*verification.refused, *described))
        return verification, error, refused

    def cases(self, strategy: ExportStrategy, lengths: Lengths) -> tuple[Case, ...] | None:
        """Return all cases that a file was verified on; None if it was not verified."""
        references = [reference for (fixed, _), reference in self._references.items() if fixed == _fixed(strategy)]
        shortened = (self._shortened(reference, lengths) for reference in references)
        return tuple(case for reference in shortened for case in reference.cases) if references else None

    def longest_case(self, verification: Verification) -> int:
        """Return the number of tokens in the longest text that a file was verified on; 0 for none."""
        passed = (_of_ids(case.inputs) for case in verification.cases if case.passed)
        return max(passed, default=0) + self._pipeline.steps

    def _reference(self, strategy: ExportStrategy, lengths: Lengths, further: tuple[int, ...] = ()) -> ReferenceOutputs:
        """Return PyTorch's outputs on the usual cases, or on texts of `further` lengths; computed once."""
        key = (_fixed(strategy), further)
        if key not in self._references:
            self._references[key] = self._run_pytorch(strategy, further)
            if not further:
                _require_telling(self._references[key], self._job.request.source.model_name)
        return self._shortened(self._references[key], lengths)

    def _run_pytorch(self, strategy: ExportStrategy, lengths: tuple[int, ...]) -> ReferenceOutputs:
        model = self._job.models.reference()
        reference = self._pipeline.reference_outputs(model, strategy, lengths)
        del model
        gc.collect()  # free its weights to make room for onnxruntime's
        return reference

    def _shortened(self, reference: ReferenceOutputs, lengths: Lengths) -> ReferenceOutputs:
        """Leave out cases longer than the texts that the file supports."""
        rows = [
            (case, outputs)
            for case, outputs in zip(reference.cases, reference.outputs, strict=True)
            if lengths.longest is None or _num_tokens(case) + self._pipeline.steps <= lengths.longest
        ]
        return replace(reference, cases=tuple(row[0] for row in rows), outputs=tuple(row[1] for row in rows))

    def _compare(self, file: ModelFile, reference: ReferenceOutputs) -> tuple[Verification, VerificationError | None]:
        try:
            return self._pipeline.verify(file, reference, self._job.request.options.tolerance), None
        except VerificationError as error:
            return error.verification, error

    def _shorter(
        self, error: VerificationError, file: ModelFile, strategy: ExportStrategy, lengths: Lengths
    ) -> VerificationError:
        """Return an error that says up to which text length a file works; the error itself if it works for none."""
        ends = [(_of_ids(case.inputs) + self._pipeline.steps, case.passed) for case in error.verification.cases]
        wrong = min(length for length, passed in ends if not passed)
        right = max((length for length, passed in ends if passed), default=0)
        if lengths.work is None or right < _MIN_TOKENS or right > wrong:
            return error
        longest = self._longest_right(file, strategy, lengths, right, wrong)
        reason = f"on longer ones it differs from PyTorch by {error.verification.max_abs_error:.3g}"
        return ShorterError(error, replace(lengths, longest=longest, reason=reason), is_own=False)

    def _longest_right(
        self, file: ModelFile, strategy: ExportStrategy, lengths: Lengths, right: int, wrong: int
    ) -> int:
        """Return the last length from `right` to `wrong` at which a file works, by bisection within the budget."""
        budget = WORK
        named = {number for threshold in lengths.thresholds for number in (threshold, threshold + 1)}
        while wrong - right > 1:
            middle = (right + wrong) // 2
            length = min(
                (number for number in named if right < number < wrong), key=lambda n: abs(n - middle), default=middle
            )
            budget -= lengths.work.operations(length) if lengths.work is not None else 0
            if budget < 0:
                break
            tell(f"looking for the longest text that the file is correct for: {length} tokens")
            # A short text may make a model switch to another computation for good, so each length has its own model.
            reference = self._run_pytorch(strategy, (length,))
            if reference.cases and self._compare(file, reference)[1] is None:
                right = length
            else:
                wrong = length
        return right


def _require_telling(reference: ReferenceOutputs, checkpoint_name: str) -> None:
    """Refuse a model that verification cannot test because it ignores its inputs."""
    names = [name for name, array in reference.outputs[0].items() if array.dtype.kind == "f"]
    if names and set(names) == {*reference.constant}:
        first = reference.outputs[0][names[0]]
        value = f", {first.flat[0]:g} throughout" if np.unique(first).size == 1 else ""
        raise CheckpointError(
            f"{checkpoint_name} gives the same {', '.join(names)} for all inputs{value}",
            "its training has collapsed, or its weights are damaged; --no_verify exports it unverified",
        )
    if reference.ignores_mask:
        raise CheckpointError(
            f"{checkpoint_name} ignores its attention mask: attending to padding changes no output",
            "no token sees another one, or all see the padding too: its weights are damaged, or its code ignores the "
            "mask; --no_verify exports it unverified",
        )


def _merged(first: Verification, second: Verification) -> Verification:
    """Join two verifications of the same file."""
    return replace(
        first,
        passed=first.passed and second.passed,
        max_abs_error=max(first.max_abs_error, second.max_abs_error),
        cosine_min=min(first.cosine_min, second.cosine_min),
        cases=(*first.cases, *second.cases),
    )


def _of_ids(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of tokens in a case's texts, from its input shapes; 0 if there are none."""
    return next((shapes[name][1] for name in _IDS if name in shapes), 0)


def _num_tokens(case: Case) -> int:
    return _of_ids({name: array.shape for name, array in case.feeds.items()})


def _fixed(strategy: ExportStrategy) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(strategy.fixed.items()))


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
    job = _job_of(file, options)
    strategy = _strategy_of(job, file)
    if samples:
        return _compare_on(samples, file, job)
    lengths = lengths_of(job, strategy).seen_in(load_model(file.path))
    return ExportVerifier(job).measure(file, strategy, lengths)[0]


def record_modules(file: ModelFile, options: ExportOptions, cases: Sequence[Case]) -> Values:
    """Run the checkpoint of a file in PyTorch, and return what each of its modules computes, in order.

    Args:
        file: an export, or a file derived from one.
        options: the checkpoint, and how it may be loaded.
        cases: inputs of the file.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: the model generates step by step, or PyTorch cannot run the cases.
    """
    job = _job_of(file, options)
    pipeline, model = _single_call(job, file), job.models.reference()
    recorded: list[tuple[str, NDArray[Any]]] = []

    def keep(name: str, result: Any) -> None:
        tensors = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else [result]
        first = next(iter(tensors))
        if hasattr(first, "is_floating_point") and first.is_floating_point() and first.ndim > 1:
            recorded.append((name, to_numpy(first).astype(np.float32, copy=True)))  # PyTorch may reuse its memory

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda _module, _inputs, result, name=name: keep(name, result))
    runs = []
    for case in cases:
        outputs = pipeline.run(model, case.feeds)
        values = [*recorded]
        runs.append((outputs, values, is_same_alone(partial(pipeline.run, model), case, outputs)))
        recorded.clear()
    names = [name for name, _ in runs[0][1]]
    if any([name for name, _ in values] != names for _, values, _ in runs):
        raise ExportError(
            f"{options.model_name} runs other modules for other inputs, so that its layers have no order",
            "compare with an ONNX file of it, or on one input: --sample_inputs FILE.npz",
        )
    arrays = [[array for _, array in values] for _, values, _ in runs]
    return Values(names, [[name] for name in names], arrays, [run[0] for run in runs], [run[2] for run in runs], "")


def _job_of(file: ModelFile, options: ExportOptions) -> Job:
    """Prepare the export that gives what a file computes from its checkpoint."""
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
        texts, hint = hard_texts(job.tokenizer), "compare it with the checkpoint that it was made from"
        own.check("the file's tokenizer", read_folder(find_checkpoint_folder(file)), texts, hint)
    return _with_pruning(job, file)


def _stamped(file: ModelFile) -> dict[str, Any]:
    """Return the export options stated in a file."""
    keys = {"task": TASK_KEY, "head": HEAD_KEY, "dtype": DTYPE_KEY, "route": ROUTE_KEY}
    options: dict[str, Any] = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    if options.get("dtype") not in DTYPES:  # int8 and int4, of `optimize`: PyTorch computes what was quantized
        options.pop("dtype", None)
    longest = file.metadata_number(MAX_LENGTH_KEY)
    options |= {} if longest is None else {"max_length": longest}
    try:
        stamped_choices = parse_json(file.metadata.get(_OPTIONS_KEY, "{}"))
    except ValueError:
        stamped_choices = None
    if not isinstance(stamped_choices, Mapping):
        raise ModelFileError(
            f"the metadata {_OPTIONS_KEY} of {file.path} is not an object", "it was edited; export the model again"
        )
    # Files are untrusted: only the user can allow running code.
    known = {"max_length", "target", "dimensions", "keep_raw", "text", "allow_missing_weights", "allow_unused_weights"}
    unknown = stamped_choices.keys() - known - {"route", "allow_pickle", *_NOT_COMPARED}
    if unknown:
        raise ModelFileError(
            f"the metadata {_OPTIONS_KEY} of {file.path} has {', '.join(sorted(unknown))}, which no export has",
            "it was edited, or made by another version; export the model again",
        )
    return options | {name: value for name, value in stamped_choices.items() if name in known}


def _with_pruning(job: Job, file: ModelFile) -> Job:
    """Make the head prune vectors as the file does, which is stamped and not in any option."""
    pruning, pipeline = Pruning.of_model(file), job.plan.pipeline
    if pruning is None or not isinstance(pipeline, SingleCallPipeline) or pipeline.head is None:
        return job
    pipeline = replace(pipeline, head=replace(pipeline.head, pruning=pruning))
    return replace(job, plan=replace(job.plan, pipeline=pipeline))


def _strategy_of(job: Job, file: ModelFile) -> ExportStrategy:
    """Return the strategy that fixes the same axes as the file."""
    strategies = job.plan.pipeline.strategies("auto", verified=True)
    stated = file.metadata.get(_FIXED_KEY, "")
    strategy = next((strategy for strategy in strategies if strategy.fixed_axes == stated), None)
    if strategy is None:
        raise ExportError(
            f"{file.path} was exported with {stated}, and {job.request.source.model_name} has no such axes",
            "compare it with the checkpoint that it was made from",
        )
    return strategy


def _compare_on(samples: Sequence[Case], file: ModelFile, job: Job) -> Verification:
    pipeline = _single_call(job, file)
    run = partial(pipeline.run, job.models.reference())
    outputs = run_reference(run, samples, name="PyTorch", sequences=pipeline.sequences)
    try:
        return pipeline.verify(file, outputs, job.request.options.tolerance)
    except VerificationError as error:
        return error.verification


def _single_call(job: Job, file: ModelFile) -> SingleCallPipeline:
    pipeline = job.plan.pipeline
    if not isinstance(pipeline, SingleCallPipeline):
        raise ExportError(
            f"{file.path} generates step by step, and is compared with its checkpoint on its own prompts",
            "leave --sample_inputs and --layers out",
        )
    return pipeline
