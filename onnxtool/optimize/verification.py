"""Verify an optimized file against the input file, and find the faulty pass if they differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from onnxtool.checkpoint.pruning import Pruning
from onnxtool.errors import ProviderError, SessionError, VerificationError, first_line
from onnxtool.model_file import ModelFile, ModelPath, scratch_file
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context, Pass, run_passes
from onnxtool.runtime.comparison import Case, ReferenceOutputs, Runner, batch_cases, failure, run_reference, verify
from onnxtool.runtime.difference import TOLERANCES, Tolerance
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.input_cases import LONGEST_CASE, extreme_case, input_cases, turning_cases
from onnxtool.runtime.providers import CPU, CUDA, ExecutionProvider, cuda_problem
from onnxtool.runtime.recipes import InputStamp
from onnxtool.runtime.session import open_alike, open_session
from onnxtool.verification import Verification

Feeds = Mapping[str, "NDArray[Any]"]

_ROUNDING = TOLERANCES["fp32"]  # a file that varies more between runs is not deterministic
_OTHER_SEED = 1_000_003  # small seeds, such as 0 and 1, make onnxruntime draw the same numbers
_ALL = "ENABLE_ALL"
_OTHER_LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED")
# Operators that draw random numbers; Dropout only in training mode.
_RANDOM = frozenset(
    ("Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
) | {"com.microsoft::BiasDropout", "com.microsoft::BitmaskBiasDropout", "com.microsoft::BitmaskDropout"}
# Operators that quantize activations dynamically.
_DYNAMIC = frozenset(("DynamicQuantizeLinear", "com.microsoft::DynamicQuantizeLSTM")) | {
    "com.microsoft::DynamicQuantizeMatMul"
}


class FaultyPassError(VerificationError):
    """The outputs differ, or the model cannot be run, because of a single pass.

    Attributes:
        name: the pass.
        why: the difference after this pass.
    """

    def __init__(self, error: VerificationError, name: str, why: str) -> None:
        super().__init__(error.message, error.hint, error.verification)
        self.name, self.why = name, why


@dataclass(frozen=True)
class Original:
    """The input file as the reference for results, run with the same session options.

    Attributes:
        source: the input file.
        path: the file that is run for the reference outputs: the source or, if it stores vectors in another type, a
            copy without that conversion.
        wanted: the provider of the result. The original runs on it too if it is CUDA and available, else on the CPU.
        ops: the operators of the source, as counted in Stats.
        disabled: onnxruntime optimizers that are disabled for both files.
        turns: axis sizes at which the graph changes its computation, by axis name.
        given: user-supplied inputs to compare on, or their shapes.
    """

    source: ModelFile
    path: ModelPath
    wanted: ExecutionProvider
    ops: Mapping[str, int]
    disabled: Sequence[str] = ()
    turns: Mapping[str, Collection[int]] = field(default_factory=dict)
    given: GivenInputs = NO_INPUTS

    @property
    def provider(self) -> str:
        """The execution provider of the original."""
        return str(self.wanted) if self.wanted.name == CUDA and not cuda_problem() else CPU

    @property
    def runs_elsewhere(self) -> bool:
        """Whether results run on a provider that is no reference."""
        return not self.wanted.row.is_reference

    def open(self, path: ModelPath, level: str = _ALL) -> Runner:
        """Load the model at `path` where the original runs, with the session options of both files.

        Raises:
            SessionError: onnxruntime cannot load it.
        """
        return open_alike(path, provider=self.provider, disabled=self.disabled, level=level).run

    def open_result(self, path: ModelPath) -> Runner:
        """Load a result where it is to run.

        Raises:
            SessionError: onnxruntime cannot load it.
            ProviderError: the provider leaves nodes to the CPU.
        """
        if not self.runs_elsewhere:
            return self.open(path)
        return open_alike(path, provider=self.wanted, disabled=self.disabled).run

    def reseeded(self, path: ModelPath, seed: int = 1, opened: Callable[[ModelPath], Runner] | None = None) -> Runner:
        """Return what loads the model at `path` for every run: random operators then draw from the beginning."""

        def run(feeds: Feeds) -> Feeds:
            import onnxruntime as ort

            ort.set_seed(seed)
            return (opened or self.open)(path)(feeds)

        return run

    def run(self) -> Reference:
        """Run the file on random inputs of several shapes and masks, and once more to check that the results repeat.

        Raises:
            SessionError: onnxruntime cannot load it, or cannot run it on any of these inputs.
            VerificationError: it draws different random numbers each time, or returns only NaN and infinities.
        """
        # One session at a time: each holds the weights twice while it loads.
        run, cases = self.open(self.path), input_cases(self.source, given=self.given)
        if not self.given.samples:
            hardest = extreme_case(self.source, cases)
            cases += [*([hardest] if hardest else []), *turning_cases(self.source, self.turns, self.given)]
            cases += batch_cases(self.source.structure.inputs, cases)
        name = self.source.path.name
        expected = run_reference(run, cases, name=name, refusal=SessionError).without_moves(_ROUNDING)
        require_accepted(self.source, expected.cases, cases, run)
        operators = sorted(_RANDOM & self.ops.keys())
        # Any case may take the branch that draws random numbers; if no operator is known to draw, one case is enough.
        again = (
            expected
            if operators
            else expected.only(sorted(expected.cases, key=_num_elements)[len(expected.cases) // 2])
        )
        draws = not verify(run, again, _ROUNDING).passed
        if draws:
            # Operators with a seed attribute draw the same numbers in each session; others use the seed of the process.
            del run
            expected = run_reference(self.reseeded(self.path), expected.cases, name=name)
            itself = verify(self.reseeded(self.path, _OTHER_SEED), expected, _ROUNDING)
            if not itself.passed:
                by = ", ".join(operators) or "by no operator that is known for it"
                raise VerificationError(
                    f"{self.source.path} draws random numbers ({by}) and gives other outputs each time, so that no "
                    "result can be compared with it",
                    "no file was written; export it in inference mode, without Dropout in training mode, or pass "
                    "--no_verify",
                    itself,
                )
        if not expected.has_numbers:
            raise VerificationError(
                f"{self.source.path} gives nothing but NaN and infinities, so that there is nothing to compare",
                "no file was written; pass inputs that give numbers with --sample_inputs FILE.npz, look at its "
                "weights, or pass --no_verify",
                verify(run, expected, _ROUNDING),
            )
        return Reference(self, expected, draws)


@dataclass(frozen=True)
class Reference:
    """The expected outputs.

    Attributes:
        expected: the outputs of the original.
        draws: whether it draws random numbers from its own seeds, the same ones each time it is loaded.
    """

    original: Original
    expected: ReferenceOutputs
    draws: bool = False

    def compare(self, result: ModelFile, tolerance: Tolerance, pruning: Pruning | None = None) -> Verification:
        """Compare `result` with the original; a model that does not load fails every case."""
        original = self.original
        try:
            run = original.reseeded(result, opened=original.open_result) if self.draws else original.open_result(result)
        except (SessionError, ProviderError) as error:
            run = _failing(SessionError(error.message.replace(str(result.path), "the result"), error.hint))
        place = original.wanted.place if original.runs_elsewhere else original.provider
        return replace(verify(run, self.expected, tolerance, pruning), provider=place)

    def widened(self, tolerance: Tolerance, failed: Verification) -> tuple[Tolerance, float | None]:
        """Allow for the original's own differences between onnxruntime's optimization levels; return these too.

        With dynamically quantized activations, the slightest rounding may move a value to the next step, and a range by
        as much as its outlier: each level fuses differently, and none is more correct. This only applies to files with
        such operators, and up to the int8 tolerance: beyond that, a faulty pass could not be detected.

        Raises:
            VerificationError: the original differs by more than that.
        """
        original = self.original
        if _DYNAMIC.isdisjoint(original.ops):
            return tolerance, None
        moves = [
            verify(original.open(original.path, level), self.expected, TOLERANCES["int8"]) for level in _OTHER_LEVELS
        ]
        error, cosine = max(move.max_abs_error for move in moves), min(move.cosine_min for move in moves)
        if not all(move.passed for move in moves):
            raise VerificationError(
                f"{original.source.path} quantizes activations as it runs, and moves by {error:.3g} (cosine "
                f"{cosine:.4f}) by itself between onnxruntime's optimization levels: more than int8 may change, so "
                "that comparing it verifies nothing",
                "no file was written; pass --no_verify, and evaluate the result",
                failed,
            )
        return replace(tolerance, atol=tolerance.atol + error, cosine=tolerance.cosine - (1.0 - cosine)), error


@dataclass(frozen=True)
class Verifier:
    """Compare optimized files with their input file.

    Attributes:
        reference: the outputs of the input file.
        passes: the passes that ran on it, in order, with repetitions in later rounds.
        tolerance: the allowed differences.
        pruning: how the result prunes its vectors; None for as computed.
    """

    reference: Reference
    passes: Sequence[Pass]
    context: Context
    tolerance: Tolerance
    pruning: Pruning | None = None

    def verify(self, result: ModelFile) -> Verification:
        """Compare `result` with the source on random inputs of several shapes and masks.

        Raises:
            FaultyPassError: an output differs by more than the tolerance because of one pass.
            VerificationError: an output differs, and no pass is the cause.
            SessionError: the source itself runs on none of the inputs.
        """
        verification = self.reference.compare(result, self.tolerance, self.pruning)
        if verification.passed:
            return verification
        tolerance, variation = self.reference.widened(self.tolerance, verification)
        if variation is not None:
            verification = self.reference.compare(result, tolerance, self.pruning)
        if not verification.passed:
            self._blame(verification, tolerance, result.path.parent)
        return replace(verification, own_variation=variation)

    def _blame(self, verification: Verification, tolerance: Tolerance, folder: Path) -> NoReturn:
        """Raise for the first pass after which the worst case fails, found by bisection.

        Differences that exist before the first pass are not blamed on any.
        """
        expected = self.reference.expected
        failed = [number for number, case in enumerate(verification.cases) if not case.passed]
        worst = max(failed, key=lambda number: verification.cases[number].max_abs_error)
        case = replace(self.reference, expected=expected.only(expected.cases[worst]))
        places = range(len(self.passes) + 1)
        place = bisect_left(places, True, key=lambda place: not self._after(place, case, tolerance, folder).passed)
        wanted = self.reference.original.wanted
        if place == 0 and self.reference.original.runs_elsewhere:
            raise failure(
                self._after(0, case, tolerance, folder),
                f"no file was written; {wanted.place} computes the input file itself so in {wanted.arithmetic}: allow "
                "it with --max_error, or pass another --precision or --provider",
            )
        if place in (0, len(places)):
            hint = "no pass is the cause, but how the file was written; please report this model"
            raise failure(verification, f"no file was written; {hint}")
        name, description = self.passes[place - 1].name, expected.cases[worst].description
        hint = (
            f"no file was written; the pass {name} is the first after which {description} differs. --no_verify writes "
            "it all the same, and onnxtool verify RESULT INPUT --layers names its first part that differs"
        )
        (differing,) = self._after(place, case, tolerance, folder).cases  # a later pass may have done more
        by = f"{description} differs by {differing.max_abs_error:.3g}"
        raise FaultyPassError(failure(verification, hint), name, differing.failure or by)

    def _after(self, num_passes: int, case: Reference, tolerance: Tolerance, folder: Path) -> Verification:
        """Compare the model after this many passes on a case."""
        model = load_model(ModelFile.open(self.reference.original.path).path)
        model, _ = run_passes(model, self.passes[:num_passes], self.context, most_rounds=1)
        with scratch_file(model, folder) as path:
            return case.compare(ModelFile.open(path), tolerance, self.pruning)


def _num_elements(case: Case) -> int:
    return sum(array.size for array in case.feeds.values())


def _failing(error: SessionError) -> Runner:
    def run(_feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        raise error

    return run


def verification_feeds(source: ModelFile, given: GivenInputs = NO_INPUTS) -> list[Mapping[str, NDArray[Any]]]:
    """Return the inputs on which a model is verified, for measuring its inner values."""
    # NaN in a row that is only padding is not a value that the model uses.
    cases = accepted_cases(source, longest=LONGEST_CASE, given=given)
    return [case.feeds for case in cases if not case.has_empty_rows]


def accepted_cases(model: ModelFile, *, longest: int | None = None, given: GivenInputs = NO_INPUTS) -> list[Case]:
    """Return the `input_cases` that the file itself runs on; cases of a stamp have already been run.

    Raises:
        InputError: as for `input_cases`.
        SessionError: it runs on none of them.
    """
    cases = input_cases(model, longest=longest, given=given)
    stamp = InputStamp.read_from(model)
    if stamp is not None and stamp.cases and given == NO_INPUTS:
        return cases
    session = open_session(model, provider="cpu", frugal=True)
    outputs = run_reference(session.run, cases, name=model.path.name, refusal=SessionError)
    require_accepted(model, outputs.cases, cases, session.run)
    return list(outputs.cases)


def require_accepted(model: ModelFile, accepted: Sequence[Case], cases: Sequence[Case], run: Runner) -> None:
    """Refuse a file that runs on none of `cases`.

    Raises:
        SessionError: it runs on none; with onnxruntime's message for the smallest.
    """
    if accepted:
        return
    try:
        run(min(cases, key=_num_elements).feeds)
    except SessionError as error:
        tried = "; ".join(dict.fromkeys(case.description for case in cases))
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise SessionError(
            f"{model.path} itself runs on none of {len(cases)} inputs ({tried}): {first_line(cause)}",
            "pass inputs that it takes with --sample_inputs FILE.npz, or their shapes with --input_shape NAME:1,128",
        ) from error
