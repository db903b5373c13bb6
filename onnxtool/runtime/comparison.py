"""Compare a model's outputs with a reference's, case by case."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.errors import OnnxtoolError, SessionError, VerificationError
from onnxtool.progress import counted
from onnxtool.verification import Verification, VerificationCase

Runner = Callable[[Mapping[str, "NDArray[Any]"]], Mapping[str, "NDArray[Any]"]]

_LOGGER = logging.getLogger(__name__)
_PIECE = 1 << 20  # elements compared at a time: logits of a long text take 60 MB, and each copy as much again

_LONGEST_REASON = 200  # characters of onnxruntime's message about unsupported inputs
_CLEARLY = 1e-2  # relative to the largest value: far above any rounding


@dataclass(frozen=True)
class Case:
    """Inputs for a model and its reference.

    Attributes:
        feeds: arrays by input name.
        valid: bool [B, S], false on padding, where outputs have no meaning; None without padding.
        like: the description of an earlier case that differs only in padding, so that the outputs must be the same;
            empty for none.
        rows: the rows of that case that this one consists of, alone or in another order; empty for the same rows.
    """

    description: str
    feeds: Mapping[str, NDArray[Any]]
    valid: NDArray[np.bool_] | None
    like: str = ""
    rows: tuple[int, ...] = ()

    @property
    def has_empty_rows(self) -> bool:
        """Whether a row consists only of padding."""
        return self.valid is not None and not self.valid.any(axis=1).all()

    def meaningful(self, output: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of an output that are not only padding; all of it if its first axis is not a batch."""
        if self.valid is None or not self.has_empty_rows or output.shape[:1] != self.valid.shape[:1]:
            return output
        return output[self.valid.any(axis=1)]


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of an output from its reference: `|difference| <= atol + rtol * max|reference|`.

    The relative part is scaled by the largest value of the whole output, not elementwise: rounding errors of a
    transformer follow the size of its hidden states, and an entry near zero has the same error as its neighbours.
    """

    atol: float
    rtol: float
    cosine: float

    def overridden(self, atol: float | None, rtol: float | None, cosine: float | None) -> Tolerance:
        """Return the tolerance with each part that is given instead of its own."""
        given = {"atol": atol, "rtol": rtol, "cosine": cosine}
        return replace(self, **{name: part for name, part in given.items() if part is not None})


# By the precision of the arithmetic. fp16 keeps 11 bits and bf16 8, and errors add up over a dozen layers. In
# int8 and int4, outputs of random ids only show that masks and shapes are right; their quality is measured on the
# calibration texts.
TOLERANCES = {
    "fp32": Tolerance(atol=1e-4, rtol=1e-5, cosine=0.99999),
    "fp16": Tolerance(atol=5e-3, rtol=1e-2, cosine=0.9999),
    "bf16": Tolerance(atol=1e-2, rtol=5e-2, cosine=0.999),
    "int8": Tolerance(atol=1e-2, rtol=0.5, cosine=0.97),
    "int4": Tolerance(atol=1e-2, rtol=0.5, cosine=0.95),
}


@dataclass(frozen=True)
class OutputError:
    """The difference of one output from its reference.

    Attributes:
        num_equal: number of values that are the same NaN or infinity in both, and are not measured.
        num_measured: number of measured values.
    """

    max_abs_error: float
    cosine: float
    scale: float
    num_equal: int = 0
    num_measured: int = 0

    def within(self, tolerance: Tolerance) -> bool:
        """Whether this difference is allowed. NaN or infinities in only one of the two never are."""
        return self.max_abs_error <= tolerance.atol + tolerance.rtol * self.scale and self.cosine >= tolerance.cosine


_INCOMPARABLE = OutputError(float("inf"), -1.0, 1.0)


def measure(output: NDArray[Any], reference: NDArray[Any], valid: NDArray[np.bool_] | None) -> OutputError:
    """Measure how far `output` is from `reference`, in float64, a piece at a time.

    Args:
        output: any shape; the first two axes are B and S if it has a sequence, or it is [B, H, S, D].
        reference: the same shape.
        valid: bool [B, S], false on padding, where values have no meaning. None compares everything.
    """
    if output.shape != reference.shape:
        return _INCOMPARABLE
    if reference.dtype.kind not in "biuf":  # strings, which are equal or not
        return OutputError(0.0, 1.0, 1.0) if np.array_equal(output, reference) else _INCOMPARABLE
    if valid is not None and not valid.all():
        output, reference = _at_tokens(output, valid), _at_tokens(reference, valid)
    error = scale = dot = output_norm = reference_norm = 0.0
    num_equal = 0
    actual_flat, wanted_flat = output.reshape(-1), reference.reshape(-1)
    for start in range(0, actual_flat.size, _PIECE):
        actual = actual_flat[start : start + _PIECE].astype(np.float64)
        wanted = wanted_flat[start : start + _PIECE].astype(np.float64)
        # Squares of float32 are finite in float64, so these suffice without another pass over all values.
        squares, wanted_squares = float(actual @ actual), float(wanted @ wanted)
        if not math.isfinite(squares + wanted_squares):
            finite = np.isfinite(actual) & np.isfinite(wanted)
            # A model that masks with infinities is right if both have the same ones, and the logarithm of a negative
            # number is NaN in both. Their number is reported.
            if not np.array_equal(actual[~finite], wanted[~finite], equal_nan=True):
                return _INCOMPARABLE
            num_equal += int((~finite).sum())
            actual, wanted = actual[finite], wanted[finite]
            squares, wanted_squares = float(actual @ actual), float(wanted @ wanted)
        if not actual.size:
            continue
        scale = max(scale, float(wanted.max()), -float(wanted.min()))
        dot += float(actual @ wanted)
        output_norm += squares
        reference_norm += wanted_squares
        difference = np.subtract(actual, wanted, out=actual)
        error = max(error, float(difference.max()), -float(difference.min()))
    norms = (output_norm * reference_norm) ** 0.5
    cosine = min(1.0, dot / norms) if norms else float(error == 0.0)
    return OutputError(error, cosine, scale, num_equal, actual_flat.size - num_equal)


def row_errors(
    one: tuple[Case, Mapping[str, NDArray[Any]]],
    other: tuple[Case, Mapping[str, NDArray[Any]]],
    sequences: frozenset[str] | None,
) -> dict[str, OutputError]:
    """Measure how far the outputs of a case are from those of the case that it is like, at real tokens.

    Outputs without rows, or with another shape for another number of tokens (scores of pairs of them), are left out.

    Args:
        one: a case with its outputs.
        other: the case that it is like, with its outputs.
        sequences: as in ReferenceOutputs.
    """
    (case, found), (like, wanted) = one, other
    errors: dict[str, OutputError] = {}
    for name in (name for name in wanted if name in found):
        given, rows, valid = found[name], wanted[name], like.valid
        if case.rows and valid is not None:
            if rows.shape[:1] != valid.shape[:1]:
                continue
            rows, valid = rows[list(case.rows)], valid[list(case.rows)]
        if sequences is None or name in sequences:
            given, rows = _at_tokens(given, case.valid), _at_tokens(rows, valid)
        if given.shape == rows.shape:
            errors[name] = measure(given, rows, None)
    return errors


def _at_tokens(output: NDArray[Any], valid: NDArray[np.bool_] | None) -> NDArray[Any]:
    """Return an output at real tokens, [N, ...]; unchanged if it has no sequence, or there is no padding."""
    if valid is not None and output.ndim >= 2 and output.shape[:2] == valid.shape:
        return output[valid]
    if valid is not None and output.ndim == 4 and output.shape[::2] == valid.shape:  # keys or values, [B, H, S, D]
        return output.swapaxes(1, 2)[valid]
    return output


@dataclass(frozen=True)
class ReferenceOutputs:
    """A reference's outputs on every case, kept so that it can be unloaded before the candidate is loaded.

    Attributes:
        mask_effect: how far its outputs on real tokens move if padding is attended to, in the first case that shows it
            clearly, or else in the clearest case; None if no case has padding.
        ignores_mask: whether attending to padding never moves an output by more than rounding.
        constant: the outputs that are the same for all inputs; see `constant_outputs`.
        refused: descriptions of skipped cases, which the reference itself does not run on.
        sequences: the outputs whose first axes are B and S, in which padding is ignored; None for all outputs of that
            shape, including those of a classifier with as many labels as tokens.
    """

    reference: str
    cases: tuple[Case, ...]
    outputs: tuple[Mapping[str, NDArray[Any]], ...]
    mask_effect: float | None
    refused: tuple[str, ...] = ()
    sequences: frozenset[str] | None = None
    ignores_mask: bool = False
    constant: tuple[str, ...] = ()

    def measure(self, case: Case, name: str, output: NDArray[Any], wanted: NDArray[Any]) -> OutputError:
        """Measure how far an output of a case is from `wanted` at meaningful positions.

        A row of only padding has no meaning, and models and operators differ there. It must be finite if `wanted` is,
        because averaging over a batch spreads NaN to other rows.
        """
        valid = case.valid if self.sequences is None or name in self.sequences else None
        if output.shape != wanted.shape or not case.has_empty_rows:
            return measure(output, wanted, valid)
        if output.dtype.kind == wanted.dtype.kind == "f" and (np.isfinite(wanted) & ~np.isfinite(output)).any():
            return _INCOMPARABLE
        if valid is not None:
            valid = case.meaningful(valid)
        return measure(case.meaningful(output), case.meaningful(wanted), valid)

    def moves(self, outputs: Sequence[Mapping[str, NDArray[Any]]]) -> dict[int, dict[str, OutputError]]:
        """Return how far outputs are from those of the same texts in another case, by number and name; see `Case.like`.

        Args:
            outputs: for each case, a model's outputs; they may be empty if no other case is like it.
        """
        numbers = {self.cases[number].description: number for number in reversed(range(len(self.cases)))}
        found = {
            number: row_errors((case, outputs[number]), (self.cases[other], outputs[other]), self.sequences)
            for number, case in enumerate(self.cases)
            for other in [numbers.get(case.like)]
            if other is not None
        }
        return {number: errors for number, errors in found.items() if errors}

    def without_moves(self, tolerance: Tolerance) -> ReferenceOutputs:
        """Leave out cases whose rows the reference itself computes differently in their batch."""
        moves = self.moves(self.outputs)
        kept = [
            (case, outputs)
            for number, (case, outputs) in enumerate(zip(self.cases, self.outputs, strict=True))
            if not case.rows or all(error.within(tolerance) for error in moves.get(number, {}).values())
        ]
        return replace(self, cases=tuple(row[0] for row in kept), outputs=tuple(row[1] for row in kept))

    def only(self, case: Case) -> ReferenceOutputs:
        """Return the outputs for one of the cases."""
        number = next(number for number, one in enumerate(self.cases) if one is case)
        return replace(self, cases=(case,), outputs=(self.outputs[number],))

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything to compare except NaN and infinities."""
        arrays = [array for found in self.outputs for array in found.values()]
        return any(array.dtype.kind != "f" or not array.size or np.isfinite(array).any() for array in arrays)


def run_reference(
    reference: Runner,
    cases: Sequence[Case],
    *,
    name: str,
    refusal: type[OnnxtoolError] | tuple[()] = (),
    sequences: frozenset[str] | None = None,
) -> ReferenceOutputs:
    """Run the reference called `name` on every case.

    Args:
        reference: runs a case's feeds.
        cases: the cases to run.
        name: its name in reports.
        sequences: the outputs whose first axes are B and S; see ReferenceOutputs.
        refusal: the error with which it refuses a case, e.g. a single token if it halves its sequence.
    """
    found: dict[int, Mapping[str, NDArray[Any]]] = {}
    reasons: dict[int, str] = {}
    # Longest first: after a short text, BigBird computes differently from then on.
    numbers = sorted(range(len(cases)), key=lambda number: -_length(cases[number]))
    for number in counted(numbers, f"running {name} on case"):
        try:
            found[number] = reference(cases[number].feeds)
        except refusal as error:
            # In onnxruntime's own words.
            why = str(error.__cause__).strip().partition("\n")[0] if isinstance(error, SessionError) else ""
            reasons[number] = f" ({why[:_LONGEST_REASON]})" if why else ""
    done = [number for number in range(len(cases)) if number in found]
    refused = [f"{cases[number].description}{why}" for number, why in sorted(reasons.items())]
    outputs = [found[number] for number in done]
    expected = ReferenceOutputs(
        name, tuple(cases[number] for number in done), tuple(outputs), None, tuple(refused), sequences
    )
    mask_effect, ignores_mask = _mask_effect(reference, expected)
    return replace(
        expected,
        mask_effect=mask_effect,
        ignores_mask=ignores_mask,
        constant=constant_outputs([case.feeds for case in expected.cases], outputs),
    )


def _length(case: Case) -> int:
    return max((array.shape[1] for array in case.feeds.values() if array.ndim > 1), default=0)


def verify(
    candidate: Runner, expected: ReferenceOutputs, tolerance: Tolerance, stored: VectorType | None = None
) -> Verification:
    """Run `candidate` on every case and compare all outputs that the reference has.

    Args:
        candidate: runs a case's feeds.
        expected: the expected outputs.
        tolerance: the allowed difference.
        stored: how the candidate stores vectors that the reference has as floats. They are compared with the nearest
            vectors to the reference's that have the candidate's codes, so that a value may cross a step or a sign by no
            more than the tolerance.
    """
    results = []
    likes = [case for case in expected.cases if case.like]
    found: list[Mapping[str, NDArray[Any]]] = []
    for case, wanted in counted(list(zip(expected.cases, expected.outputs, strict=True)), "comparing case"):
        try:
            outputs = _restored(candidate(case.feeds), wanted, stored)
            missing = ", ".join(sorted(wanted.keys() - outputs.keys()))
            failure = f"it has no output {missing}" if missing else ""
        except SessionError as error:  # a graph fixed to one size only runs on that size
            outputs, failure = {}, error.message
        results.append(replace(_compare(case, outputs, wanted, expected, tolerance), failure=failure))
        _LOGGER.debug("case %s: %s", case.description, failure or f"largest error {results[-1].max_abs_error:.3g}")
        found.append(outputs if any(case.description in (like.description, like.like) for like in likes) else {})
    moves = expected.moves(found)
    for number, errors in moves.items():
        name = max(errors, key=lambda name: (not errors[name].within(tolerance), errors[name].max_abs_error))
        if expected.cases[number].rows and not errors[name].within(tolerance) and not results[number].failure:
            moved = f"{name} moves by {errors[name].max_abs_error:.3g} with the batch that a text is in"
            results[number] = replace(results[number], passed=False, failure=moved)
    effects = {number: max(error.max_abs_error for error in errors.values()) for number, errors in moves.items()}
    num_passed = sum(result.passed for result in results)
    _LOGGER.info("%d of %d cases are as %s gives them", num_passed, len(results), expected.reference)
    return Verification(
        passed=bool(results) and num_passed == len(results),
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        cosine_required=tolerance.cosine,
        max_abs_error=max((result.max_abs_error for result in results), default=float("inf")),
        cosine_min=min((result.cosine for result in results), default=-1.0),
        reference=expected.reference,
        cases=tuple(results),
        mask_effect=expected.mask_effect,
        padding_effect=max((moved for n, moved in effects.items() if not expected.cases[n].rows), default=None),
        batch_effect=max((moved for n, moved in effects.items() if expected.cases[n].rows), default=None),
        refused=expected.refused,
        constant_outputs=expected.constant,
    )


def _restored(
    outputs: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]], stored: VectorType | None
) -> Mapping[str, NDArray[Any]]:
    """Replace the stored vectors among `outputs` by floats; vectors of another width stay, and fail the comparison."""
    if stored is None:
        return outputs
    return {
        name: stored.nearest(array, wanted[name])
        if name in wanted
        and array.dtype == stored.dtype
        and wanted[name].shape == (*array.shape[:-1], array.shape[-1] * stored.numbers_of_a_column)
        else array
        for name, array in outputs.items()
    }


def _compare(
    case: Case,
    outputs: Mapping[str, NDArray[Any]],
    wanted: Mapping[str, NDArray[Any]],
    expected: ReferenceOutputs,
    tolerance: Tolerance,
) -> VerificationCase:
    errors = {
        name: expected.measure(case, name, outputs[name], reference) if name in outputs else _INCOMPARABLE
        for name, reference in wanted.items()
    }
    worst = max(errors, key=lambda name: (not errors[name].within(tolerance), errors[name].max_abs_error))
    return VerificationCase(
        description=case.description,
        inputs={name: tuple(array.shape) for name, array in case.feeds.items()},
        max_abs_error=max(error.max_abs_error for error in errors.values()),
        cosine=min(error.cosine for error in errors.values()),
        passed=all(error.within(tolerance) for error in errors.values()),
        worst_output=worst,
        equal_not_finite=tuple(name for name, error in errors.items() if error.num_equal),
        nothing_measured=tuple(name for name, error in errors.items() if error.num_equal and not error.num_measured),
    )


def _mask_effect(reference: Runner, expected: ReferenceOutputs) -> tuple[float | None, bool]:
    """Return how far the reference's outputs move on real tokens if padding is attended to.

    The second result tells whether this is only rounding.
    """
    effect: float | None = None
    ignores_mask = True
    for case, wanted in zip(expected.cases, expected.outputs, strict=True):
        if case.valid is None or case.valid.all():
            continue
        masks = [name for name, array in case.feeds.items() if "mask" in name and array.ndim == 2]
        unmasked = _outputs_without_masks(reference, expected, case, masks)
        errors = [expected.measure(case, name, unmasked[name], wanted[name]) for name in wanted]
        effect = max(effect or 0.0, *(error.max_abs_error for error in errors))
        ignores_mask &= bool(masks) and all(is_negligible(error.max_abs_error, error.scale) for error in errors)
        # A causal model only shows its mask with left padding, so one case may not be enough.
        if any(error.max_abs_error > _CLEARLY * error.scale for error in errors):
            break
    return effect, effect is not None and ignores_mask


def _outputs_without_masks(
    reference: Runner, expected: ReferenceOutputs, case: Case, masks: Sequence[str]
) -> Mapping[str, NDArray[Any]]:
    """Run the reference on a case with everything attended, unless another case is the same."""
    others = [name for name in case.feeds if name not in masks]
    for twin, outputs in zip(expected.cases, expected.outputs, strict=True):
        if all(twin.feeds.get(name) is case.feeds[name] for name in others) and all(
            name in twin.feeds and twin.feeds[name].all() for name in masks
        ):
            return outputs
    return reference({**case.feeds, **{name: np.ones_like(case.feeds[name]) for name in masks}})


def require_passed(verification: Verification, hint: str) -> None:
    """Raise with the worst case unless the verification passed.

    Raises:
        VerificationError: it did not pass.
    """
    if not verification.passed:
        raise failure(verification, hint)


def failure(verification: Verification, hint: str) -> VerificationError:
    """Return the error of a verification that did not pass, with its worst case."""
    failed = [case for case in verification.cases if not case.passed]
    worst = max(failed, key=lambda case: case.max_abs_error)
    return VerificationError(
        f"the result differs from {verification.reference} in {len(failed)} of {len(verification.cases)} cases; "
        f"worst: {worst.description}, {_describe(worst, verification)}",
        hint,
        verification,
    )


def _describe(case: VerificationCase, verification: Verification) -> str:
    if case.failure:
        return case.failure
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in case.inputs.items())
    if math.isinf(case.max_abs_error):
        return f"output {case.worst_output} has NaN, infinities or sizes that the reference does not have, on {shapes}"
    return (
        f"output {case.worst_output}: max_abs_error {case.max_abs_error:.3g}, cosine {case.cosine:.6f} (allowed: "
        f"{verification.atol:g} + {verification.rtol:g} x largest value, cosine {verification.cosine_required:g}) "
        f"on {shapes}"
    )


Arrays = Mapping[str, "NDArray[Any]"]

_SAME = 1e-6  # relative to the largest value: effect of rounding in other shapes


def constant_outputs(feeds: Sequence[Arrays], outputs: Sequence[Arrays]) -> tuple[str, ...]:
    """Return the names of floating outputs that are the same for all inputs, including NaN.

    Rows with the same shapes and masks but different contents are compared, so an output that only depends on lengths
    and positions is constant too. Masked positions are not compared. An output of ones may be a saturated or only
    probability, and does not count as constant.

    Args:
        feeds: arrays by input name, for each run.
        outputs: arrays by output name, for each run.
    """
    names = [name for name, array in outputs[0].items() if array.dtype.kind == "f"] if outputs else []
    return tuple(name for name in names if _is_constant(name, feeds, outputs))


def is_negligible(effect: float, scale: float) -> bool:
    """Whether an output with the largest value `scale` moved by no more than rounding."""
    return effect <= _SAME * scale


def all_same(vectors: NDArray[Any]) -> bool:
    """Whether all of several vectors, float [T, D], are the same."""
    return all(_same(vectors[0], one) for one in vectors[1:])


def _is_constant(name: str, feeds: Sequence[Arrays], outputs: Sequence[Arrays]) -> bool:
    firsts: dict[Any, tuple[list[NDArray[Any]], NDArray[Any]]] = {}
    compared = False
    for given, found in zip(feeds, outputs, strict=True):
        for masks, contents, row in _rows(given, found[name]):
            if row.size and np.all(row == 1):
                return False
            key = tuple((one.shape, one.tobytes()) for one in masks), tuple(one.shape for one in contents)
            first, output = firsts.setdefault(key, (contents, row))
            if all(np.array_equal(*pair) for pair in zip(first, contents, strict=True)):
                continue
            if not _same(output, row):
                return False
            compared = True
    return compared


def _rows(given: Arrays, output: NDArray[Any]) -> Iterator[tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[Any]]]:
    """Yield masks, contents and output of each row of a run, or of the whole run if its inputs share no batch axis."""
    sizes = {array.shape[:1] for array in given.values()}
    batched = len(sizes) == 1 and output.shape[:1] in sizes and output.ndim > 0
    for place in range(len(output)) if batched else (slice(None),):
        arrays = {name: array[place] if array.ndim else array for name, array in given.items()}
        masks = [array for name, array in arrays.items() if "mask" in name]
        row = output[place] if output.ndim else output
        seen = next((mask.astype(bool) for mask in masks if mask.ndim == 1 and mask.shape == row.shape[:1]), None)
        contents = [array for name, array in arrays.items() if "mask" not in name]
        yield masks, contents, row if seen is None or seen.all() else row[seen]


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one.shape != other.shape:
        return False
    finite = one[np.isfinite(one)]
    scale = float(np.abs(finite.astype(np.float64)).max(initial=0.0))
    return bool(np.allclose(one.astype(np.float64), other, rtol=0.0, atol=_SAME * scale, equal_nan=True))
