"""Verify an optimized file against the input file, and find the faulty pass where they differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.errors import SessionError, VerificationError
from onnxtool.model_file import ModelFile, scratch_file
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context, Pass, run_passes
from onnxtool.runtime.accepted_cases import accepted_cases, require_accepted
from onnxtool.runtime.comparison import ReferenceOutputs, Runner, Tolerance, failure, run_reference, verify
from onnxtool.runtime.feeds import LONGEST_CASE
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.session import open_session
from onnxtool.verification import Verification


class FaultyPassError(VerificationError):
    """The outputs differ, or there are none, and one pass alone is to blame.

    Attributes:
        name: of the pass.
        why: what differs after it.
    """

    def __init__(self, error: VerificationError, name: str, why: str) -> None:
        super().__init__(error.message, error.hint, error.verification)
        self.name, self.why = name, why


@dataclass(frozen=True)
class Verifier:
    """Compares optimized files with their input file.

    Attributes:
        source: the input file.
        passes: the passes that ran on it, one after another, those of later rounds again.
        provider: where both files run: the provider of the result, or the CPU where that one is not available.
        tolerance: the allowed differences.
        reference: the file that is run for the outputs to compare with: the source, or, where that stores its vectors,
            the same without the storage.
        stored: how the source stores its vectors; None for as they are.
        given: inputs to compare on, or their shapes.
    """

    source: ModelFile
    passes: Sequence[Pass]
    context: Context
    tolerance: Tolerance
    reference: Path
    stored: VectorType | None = None
    given: GivenInputs = NO_INPUTS

    @property
    def provider(self) -> str:
        """The provider of both sessions."""
        wanted = self.context.provider
        return wanted if wanted == "cpu" or not cuda_problem() else "cpu"

    def verify(self, path: Path) -> Verification:
        """Compare the file at `path` with the source on random inputs of several shapes and masks.

        Raises:
            FaultyPassError: an output differs by more than the tolerance, because of one pass.
            VerificationError: an output differs, and no pass is the cause.
            SessionError: the source itself runs on none of the inputs.
        """
        # One session at a time: each holds the weights twice while it loads.
        session = open_session(self.reference, provider=self.provider, frugal=True)
        cases = input_cases(self.source, given=self.given)
        reference = run_reference(session.run, cases, name=self.source.path.name, refusal=SessionError)
        require_accepted(self.source, reference.cases, cases, session.run)
        del session
        verification = self._compare(path, reference)
        if not verification.passed:
            self._blame(reference, verification, path.parent)
        return verification

    def _compare(self, path: Path, reference: ReferenceOutputs) -> Verification:
        try:
            run: Runner = open_session(path, provider=self.provider, frugal=True).run
        except SessionError as error:  # a graph that is not loaded fails every case
            run = _failing(error)
        return replace(verify(run, reference, self.tolerance, self.stored), provider=self.provider)

    def _blame(self, reference: ReferenceOutputs, verification: Verification, folder: Path) -> NoReturn:
        """Raise for the first pass after which the worst case fails, found by bisection.

        No pass is to blame for a file that differs from itself.
        """
        itself = self._compare(self.reference, reference)
        if not itself.passed:
            floats = [one for given in reference.outputs for one in given.values() if one.dtype.kind == "f"]
            why, hint = (
                "it draws random numbers",
                "export it in inference mode, without Dropout in training mode",
            )
            if any(np.isnan(one).any() for one in floats):
                why, hint = "it gives NaN, which equals nothing", "look at its weights"
            raise VerificationError(
                f"{self.source.path} differs from itself: {why}",
                f"no file was written; {hint}, or pass --no_verify",
                verification,
            )
        failed = [number for number, case in enumerate(verification.cases) if not case.passed]
        worst = max(failed, key=lambda number: verification.cases[number].max_abs_error)
        case = replace(reference, cases=(reference.cases[worst],), outputs=(reference.outputs[worst],))
        place = bisect_left(range(len(self.passes)), True, key=lambda place: self._is_wrong_after(place, case, folder))
        if place == len(self.passes):
            hint = "no pass is the cause, but how the file was written; please report this model"
            raise failure(verification, f"no file was written; {hint}")
        name, description = self.passes[place].name, reference.cases[worst].description
        hint = f"no file was written; the pass {name} is the first after which {description} differs"
        found = verification.cases[worst]
        by = f"{description} differs by {found.max_abs_error:.3g}"
        raise FaultyPassError(failure(verification, hint), name, found.failure or by)

    def _is_wrong_after(self, place: int, case: ReferenceOutputs, folder: Path) -> bool:
        """Whether the model after the pass at `place`, and those before it, gives other outputs for a case."""
        model = load_model(self.reference)
        model, _ = run_passes(model, self.passes[: place + 1], self.context, most_rounds=1)
        with scratch_file(model, folder) as path:
            return not self._compare(path, case).passed


def _failing(error: SessionError) -> Runner:
    def run(_feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        raise error

    return run


def verification_feeds(source: ModelFile, given: GivenInputs = NO_INPUTS) -> list[Mapping[str, NDArray[Any]]]:
    """Return the inputs on which a model is verified, to measure its inner values."""
    return [case.feeds for case in accepted_cases(source, longest=LONGEST_CASE, given=given)]
