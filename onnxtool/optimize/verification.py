"""Prove an optimized file against the file that went in, and find the pass that is to blame where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SAMPLES_IN_A_STEP = 640  # twice what a step of wav2vec2 has, and enough for its first one
_LONGEST = 64  # for a model that does not say how long its texts may be


@dataclass(frozen=True)
class Prover:
    """Compares files with the one that they were made from.

    Attributes:
        source: the file that went in.
        passes: what was done to it.
        provider: where the result will run; where that cannot run here, both run on the CPU, and the result says so.
        tolerance: what may differ.
    """

    source: ModelFile
    passes: Sequence[Pass]
    context: Context
    tolerance: Tolerance

    @property
    def provider(self) -> str:
        """Where both run."""
        wanted = self.context.provider
        return wanted if wanted == "cpu" or not cuda_problem() else "cpu"

    def prove(self, path: Path) -> Verification:
        """Compare the file at `path` with the source on random inputs of several shapes and masks.

        Raises:
            VerificationError: an output differs by more than it may; the hint names the pass that made it so.
        """
        # One session at a time: each holds the weights twice while it loads.
        session = open_session(self.source.path, provider=self.provider, frugal=True)
        answers = run_reference(session.run, _cases(self.source), name=self.source.path.name)
        del session
        verification = self._compare(path, answers)
        if not verification.passed:
            guilty = self._find_guilty(answers, verification, path.parent)
            require_passed(verification, f"no file was written; {guilty}")
        return verification

    def _compare(self, path: Path, answers: ReferenceOutputs) -> Verification:
        session = open_session(path, provider=self.provider, frugal=True)
        return replace(verify(session.run, answers, self.tolerance), provider=self.provider)

    def _find_guilty(self, answers: ReferenceOutputs, verification: Verification, folder: Path) -> str:
        """Return which pass is the first after which the worst case fails, found by halving their list."""
        failed = [number for number, case in enumerate(verification.cases) if not case.passed]
        worst = max(failed, key=lambda number: verification.cases[number].max_abs_error)
        case = replace(answers, cases=(answers.cases[worst],), outputs=(answers.outputs[worst],))
        good, bad = 0, len(self.passes) + 1  # how many of the passes ran; one more than all has not been tried
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._is_right_after(middle, case, folder):
                good = middle
            else:
                bad = middle
        if bad > len(self.passes):
            return "no pass alone is to blame, only all of them in several rounds; please report this model"
        name = self.passes[bad - 1].name
        return f"the pass {name} is the first after which {answers.cases[worst].description} differs"

    def _is_right_after(self, number: int, case: ReferenceOutputs, folder: Path) -> bool:
        """Whether the first `number` passes leave a model that answers a case as the source does."""
        model = load_model(self.source.path)
        model, _ = run_passes(model, self.passes[:number], self.context, lambda _stage: None, most_rounds=1)
        with scratch_file(model, folder) as path:
            return self._compare(path, case).passed


def verification_feeds(source: ModelFile) -> list[Mapping[str, NDArray[Any]]]:
    """Return the inputs on which a model is verified, to look at what happens inside of it."""
    return [case.feeds for case in _cases(source)]


def _holds_samples(info: TensorInfo) -> bool:
    """Whether an input is a row of samples of sound, of which a model makes one step of hundreds."""
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
