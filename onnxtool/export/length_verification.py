"""Verify an export on the usual cases and on texts up to its maximum; find for how long texts it is right otherwise."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxtool.errors import CheckpointError, VerificationError
from onnxtool.export.lengths import WORK, Lengths
from onnxtool.export.pipelines import ExportPipeline
from onnxtool.export.preparation import Job
from onnxtool.export.strategies import ExportStrategy
from onnxtool.progress import tell
from onnxtool.runtime.comparison import ReferenceOutputs
from onnxtool.verification import Verification

# A file that is wrong for longer texts than these is a wrong trace, and not one side of a threshold.
_LEAST = 60
_IDS = ("input_ids", "inputs")


class ShorterError(VerificationError):
    """A file is right for texts up to some length, and wrong for longer ones.

    Attributes:
        lengths: those for which it is right.
        is_own: whether the model itself does not run on longer ones, so that no other trace does.
    """

    def __init__(self, error: VerificationError, lengths: Lengths, *, is_own: bool) -> None:
        super().__init__(error.message, error.hint, error.verification)
        self.lengths, self.is_own = lengths, is_own

    @property
    def longest(self) -> int:
        """The most tokens of a text for which it is right."""
        return self.lengths.longest or 0


def verify_export(path: Path, job: Job, strategy: ExportStrategy) -> Verification:
    """Compare the file with a model that was loaded again: running and tracing may change a model.

    The usual cases come first, then texts at the thresholds and the maximum of the job's lengths.

    Raises:
        ShorterError: the file is right for shorter texts alone.
        VerificationError: an output differs otherwise.
    """
    pipeline, steps = job.pipeline, job.pipeline.steps
    try:
        verification, error = _compare(path, job, _reference(job, strategy))
        further = job.lengths.beyond(longest_case(verification, pipeline), steps=steps)
        refused: set[int] = set()
        if error is None and further:
            tell(f"comparing texts of up to {further[0]} tokens")
            reference = _reference(job, strategy, further)
            refused = {*further} - {_num_tokens(case.feeds) + steps for case in reference.cases}
            if reference.cases:
                longer, error = _compare(path, job, reference)
                verification = _merged(verification, longer)
            verification = replace(verification, refused=(*verification.refused, *_described(refused)))
        if error is not None:
            raise _shorter(error, path, job, strategy)
        covered = longest_case(verification, pipeline)
        too_long = min((length for length in refused if length > covered), default=None)
        if too_long is None:
            return verification
        longest = _longest_right(path, job, strategy, covered, too_long)
        why = f"PyTorch itself does not run on {longest + 1}"
        none = VerificationError(f"PyTorch itself does not run on {too_long} tokens", "", verification)
        raise ShorterError(none, job.lengths.up_to(longest, why), is_own=True)
    finally:
        job.stopwatch.lap("verify")


def _require_telling(reference: ReferenceOutputs, checkpoint_name: str) -> None:
    """Refuse a model that no verification can say anything about, as it ignores what it is given.

    Raises:
        CheckpointError: all of its outputs are the same for all inputs, or masking tokens out changes none.
    """
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
            f"{checkpoint_name} ignores its attention mask: attending to the padding as well changes no output",
            "no token sees another one, or all see the padding too: its weights are damaged, or its code ignores the "
            "mask; --no_verify exports it unverified",
        )


def merged_reference(job: Job, strategy: ExportStrategy) -> ReferenceOutputs | None:
    """Return PyTorch's outputs on all cases on which a file was verified; None where it was not."""
    found = [reference for (fixed, _), reference in job.references.items() if fixed == _fixed(strategy)]
    if not found:
        return None
    cases = tuple(case for reference in found for case in _shortened(reference, job).cases)
    return replace(found[0], cases=cases)


def longest_case(verification: Verification, pipeline: ExportPipeline) -> int:
    """Return how many tokens the longest text has that a file was verified on; 0 for none."""
    passed = (_of_ids(case.inputs) for case in verification.cases if case.passed)
    return max(passed, default=0) + pipeline.steps


def _reference(job: Job, strategy: ExportStrategy, lengths: tuple[int, ...] = ()) -> ReferenceOutputs:
    """Return PyTorch's outputs on the usual cases, or on texts of some lengths, which are computed once."""
    key = (_fixed(strategy), lengths)
    if key not in job.references:
        model = job.models.reference()
        job.references[key] = job.pipeline.reference_outputs(model, strategy, lengths)
        if not lengths:
            _require_telling(job.references[key], job.checkpoint.source.model_name)
        del model
        gc.collect()  # its weights make room for onnxruntime's
    return _shortened(job.references[key], job)


def _shortened(reference: ReferenceOutputs, job: Job) -> ReferenceOutputs:
    """Leave out the cases that are longer than the texts that the file is for."""
    longest = job.lengths.longest
    rows = [
        (case, outputs)
        for case, outputs in zip(reference.cases, reference.outputs, strict=True)
        if longest is None or _num_tokens(case.feeds) + job.pipeline.steps <= longest
    ]
    return replace(reference, cases=tuple(row[0] for row in rows), outputs=tuple(row[1] for row in rows))


def _compare(path: Path, job: Job, reference: ReferenceOutputs) -> tuple[Verification, VerificationError | None]:
    try:
        return job.pipeline.verify(path, reference, job.options.tolerance), None
    except VerificationError as error:
        return error.verification, error


def _shorter(error: VerificationError, path: Path, job: Job, strategy: ExportStrategy) -> VerificationError:
    """Return an error that says for how long texts a file is right; the error itself where that is for none."""
    steps, lengths = job.pipeline.steps, job.lengths
    ends = [(_of_ids(case.inputs) + steps, case.passed) for case in error.verification.cases]
    wrong = min(length for length, passed in ends if not passed)
    right = [length for length, passed in ends if passed]
    if lengths.work is None or max(right, default=0) < _LEAST or max(right) > wrong:
        return error
    longest = _longest_right(path, job, strategy, max(right), wrong)
    why = f"on longer ones it differs from PyTorch by {error.verification.max_abs_error:.3g}"
    return ShorterError(error, lengths.up_to(longest, why), is_own=False)


def _longest_right(path: Path, job: Job, strategy: ExportStrategy, right: int, wrong: int) -> int:
    """Return the last length from `right` to `wrong` at which a file is right, found by bisection within the budget."""
    work, left = job.lengths.work, WORK
    named = {number for threshold in job.lengths.thresholds for number in (threshold, threshold + 1)}
    while wrong - right > 1:
        middle = (right + wrong) // 2
        length = min(
            (number for number in named if right < number < wrong), key=lambda n: abs(n - middle), default=middle
        )
        left -= work.operations(length) if work is not None else 0
        if left < 0:
            break
        tell(f"looking for the longest text that the file is right for: {length} tokens")
        # A model may take a short text as the reason to compute otherwise from then on, so each has its own.
        model = job.models.reference()
        reference = job.pipeline.reference_outputs(model, strategy, (length,))
        del model
        gc.collect()
        if reference.cases and _compare(path, job, reference)[1] is None:
            right = length
        else:
            wrong = length
    return right


def _merged(first: Verification, second: Verification) -> Verification:
    """Join two verifications of the same file."""
    return replace(
        first,
        passed=first.passed and second.passed,
        max_abs_error=max(first.max_abs_error, second.max_abs_error),
        cosine_min=min(first.cosine_min, second.cosine_min),
        cases=(*first.cases, *second.cases),
    )


def _described(lengths: Iterable[int]) -> Iterable[str]:
    return (f"a text of {length} tokens" for length in sorted(lengths))


def _of_ids(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many tokens the texts of a case have, by the shapes of its inputs; 0 where there are none."""
    return next((shapes[name][1] for name in _IDS if name in shapes), 0)


def _num_tokens(feeds: Mapping[str, Any]) -> int:
    return _of_ids({name: array.shape for name, array in feeds.items()})


def _fixed(strategy: ExportStrategy) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(strategy.fixed.items()))
