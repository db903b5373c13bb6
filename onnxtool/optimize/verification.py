"""Verify an optimized file against the input file, and find the faulty pass where they differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.model_file import ModelFile, scratch_file
from onnxtool.model_file.metadata import MAX_LENGTH_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context, Pass, run_passes
from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case, ReferenceOutputs, Tolerance, require_passed, run_reference, verify
from onnxtool.runtime.feeds import (
    FeedShape,
    has_past,
    index_bounds,
    is_mask,
    past_shapes,
    random_feeds,
    verification_shapes,
)
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.session import open_session
from onnxtool.verification import Verification

_SAMPLES_IN_A_STEP = 640  # twice the samples in a step of wav2vec2, and enough for its first step
_LONGEST = 64  # for a model without a maximum length


@dataclass(frozen=True)
class Verifier:
    """Compares optimized files with their input file.

    Attributes:
        source: the input file.
        passes: the passes that ran on it.
        provider: where both files run: the provider of the result, or the CPU where that one is not available.
        tolerance: the allowed differences.
        reference: the file that is run for the outputs to compare with: the source, or, where that stores its vectors,
            the same without the storage.
        stored: how the source stores its vectors; None for as they are.
    """

    source: ModelFile
    passes: Sequence[Pass]
    context: Context
    tolerance: Tolerance
    reference: Path
    stored: VectorType | None = None

    @property
    def provider(self) -> str:
        """The provider of both sessions."""
        wanted = self.context.provider
        return wanted if wanted == "cpu" or not cuda_problem() else "cpu"

    def verify(self, path: Path) -> Verification:
        """Compare the file at `path` with the source on random inputs of several shapes and masks.

        Raises:
            VerificationError: an output differs by more than the tolerance; the hint names the faulty pass.
        """
        # One session at a time: each holds the weights twice while it loads.
        session = open_session(self.reference, provider=self.provider, frugal=True)
        reference = run_reference(session.run, _cases(self.source), name=self.source.path.name)
        del session
        verification = self._compare(path, reference)
        if not verification.passed:
            faulty = self._find_faulty_pass(reference, verification, path.parent)
            require_passed(verification, f"no file was written; {faulty}")
        return verification

    def _compare(self, path: Path, reference: ReferenceOutputs) -> Verification:
        session = open_session(path, provider=self.provider, frugal=True)
        return replace(verify(session.run, reference, self.tolerance, self.stored), provider=self.provider)

    def _find_faulty_pass(self, reference: ReferenceOutputs, verification: Verification, folder: Path) -> str:
        """Return the first pass after which the worst case fails, found by bisection."""
        failed = [number for number, case in enumerate(verification.cases) if not case.passed]
        worst = max(failed, key=lambda number: verification.cases[number].max_abs_error)
        case = replace(reference, cases=(reference.cases[worst],), outputs=(reference.outputs[worst],))
        place = bisect_left(range(len(self.passes)), True, key=lambda place: self._is_wrong_after(place, case, folder))
        if place == len(self.passes):
            return "no single pass is faulty, only all of them in several rounds; please report this model"
        return (
            f"the pass {self.passes[place].name} is the first after which {reference.cases[worst].description} differs"
        )

    def _is_wrong_after(self, place: int, case: ReferenceOutputs, folder: Path) -> bool:
        """Whether the model after the pass at `place`, and those before it, gives other outputs for a case."""
        model = load_model(self.reference)
        model, _ = run_passes(model, self.passes[: place + 1], self.context, lambda _stage: None, most_rounds=1)
        with scratch_file(model, folder) as path:
            return not self._compare(path, case).passed


def verification_feeds(source: ModelFile) -> list[Mapping[str, NDArray[Any]]]:
    """Return the inputs on which a model is verified, to measure its inner values."""
    return [case.feeds for case in _cases(source)]


def _holds_samples(info: TensorInfo) -> bool:
    """Whether an input is a row of audio samples, hundreds of which are one step of the model."""
    return info.dtype.startswith("float") and len(info.shape) == 2 and not isinstance(info.shape[1], int)


def _in_samples(shape: FeedShape) -> FeedShape:
    lengths = tuple(length * _SAMPLES_IN_A_STEP for length in shape.lengths)
    return replace(shape, lengths=lengths, sequence_length=shape.sequence_length * _SAMPLES_IN_A_STEP)


def _cases(source: ModelFile) -> list[Case]:
    bounds = index_bounds(source)
    longest = source.metadata_number(MAX_LENGTH_KEY) or _LONGEST
    samples = any(_holds_samples(info) for info in source.structure.inputs)
    cases = []
    past = past_shapes(longest) if has_past(source.structure.inputs) else ()
    for seed, shape in enumerate((*verification_shapes(longest), *past)):
        if samples:
            shape = _in_samples(shape)
        feeds = random_feeds(source.structure.inputs, shape, bounds, seed=seed)
        masked = any(is_mask(info) for info in source.structure.inputs)
        cases.append(Case(shape.description, feeds, shape.mask if masked else None))
    return cases
