"""Compare a model's outputs with a reference's, case by case."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.pruning import Pruning
from onnxtool.errors import OnnxtoolError, SessionError, VerificationError
from onnxtool.progress import counted
from onnxtool.reports import TensorInfo
from onnxtool.runtime.difference import (
    INCOMPARABLE,
    TOLERANCES,
    OutputError,
    Spread,
    Tolerance,
    informative,
    measure,
    real_tokens,
    selected,
)
from onnxtool.verification import Verification, VerificationCase

Runner = Callable[[Mapping[str, "NDArray[Any]"]], Mapping[str, "NDArray[Any]"]]

_LOGGER = logging.getLogger(__name__)
_LONGEST_REASON = 200  # characters of onnxruntime's message about unsupported inputs
_FEWEST = 4  # tokens of a text alone: models that halve their sequence do not run on fewer
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
class ReferenceOutputs:
    """A reference's outputs on every case, kept so that it can be unloaded before the candidate is loaded.

    Attributes:
        mask_effect: how far its outputs on real tokens move if padding is attended to, in the first case that shows it
            clearly, or else in the clearest case; None if no case has padding.
        ignores_mask: whether attending to padding never moves an output by more than rounding.
        constant: the outputs that are the same for all inputs; see `constant_outputs`.
        spreads: how the outputs with few columns vary over all cases.
        length_effect: how far the outputs for a text move if it is padded to the fixed length of a graph, if any.
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
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    length_effect: float | None = None

    def measure(
        self,
        case: Case,
        name: str,
        output: NDArray[Any],
        expected: NDArray[Any],
        tolerance: Tolerance = TOLERANCES["fp32"],
    ) -> OutputError:
        """Measure how far an output of a case is from `expected` at meaningful positions.

        A row of only padding has no meaning, and models and operators differ there. It must be finite if `expected` is,
        because averaging over a batch spreads NaN to other rows.
        """
        batched = output.ndim > 0 and {array.shape[:1] for array in case.feeds.values()} == {output.shape[:1]}
        spread, valid = self.spreads.get(name), self._valid(case, name)
        if output.shape == expected.shape and case.has_empty_rows:
            if output.dtype.kind == expected.dtype.kind == "f" and (np.isfinite(expected) & ~np.isfinite(output)).any():
                return INCOMPARABLE
            output, expected = case.meaningful(output), case.meaningful(expected)
        return measure(output, expected, valid, tolerance, batched=batched, spread=spread)

    def _valid(self, case: Case, name: str) -> NDArray[np.bool_] | None:
        """Return where an output has real tokens, without the rows that have none."""
        is_sequence = self.sequences is None or name in self.sequences
        return case.meaningful(case.valid) if is_sequence and case.valid is not None else None

    def with_spreads(self) -> ReferenceOutputs:
        """Return the same outputs with the spreads of those with few columns."""
        runs = list(zip(self.cases, self.outputs, strict=True))
        spreads = {
            name: Spread.of([selected(case.meaningful(array[name]), self._valid(case, name)) for case, array in runs])
            for name in (self.outputs[0] if self.outputs else ())
        }
        return replace(self, spreads={name: spread for name, spread in spreads.items() if spread is not None})

    def moves(
        self, outputs: Sequence[Mapping[str, NDArray[Any]]], tolerance: Tolerance
    ) -> dict[int, dict[str, OutputError]]:
        """Return how far outputs are from those of the same texts in another case, by number and name; see `Case.like`.

        Args:
            outputs: for each case, a model's outputs; they may be empty if no other case is like it.
            tolerance: the allowed difference.
        """
        numbers = {self.cases[number].description: number for number in reversed(range(len(self.cases)))}
        errors_by_case = {
            number: row_errors(
                (case, outputs[number]), (self.cases[other], outputs[other]), self.sequences, tolerance, self.spreads
            )
            for number, case in enumerate(self.cases)
            for other in [numbers.get(case.like)]
            if other is not None
        }
        return {number: errors for number, errors in errors_by_case.items() if errors}

    def without_moves(self, tolerance: Tolerance) -> ReferenceOutputs:
        """Leave out cases whose rows the reference itself computes differently in their batch."""
        moves = self.moves(self.outputs, tolerance)
        kept = [
            (case, outputs)
            for number, (case, outputs) in enumerate(zip(self.cases, self.outputs, strict=True))
            if not case.rows or all(error.passed for error in moves.get(number, {}).values())
        ]
        return replace(self, cases=tuple(row[0] for row in kept), outputs=tuple(row[1] for row in kept))

    def only(self, case: Case) -> ReferenceOutputs:
        """Return the outputs for one of the cases."""
        number = next(number for number, candidate in enumerate(self.cases) if candidate is case)
        return replace(self, cases=(case,), outputs=(self.outputs[number],))

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything to compare except NaN and infinities."""
        arrays = [array for outputs in self.outputs for array in outputs.values()]
        return any(array.dtype.kind != "f" or not array.size or np.isfinite(array).any() for array in arrays)


def row_errors(
    reference: tuple[Case, Mapping[str, NDArray[Any]]],
    other: tuple[Case, Mapping[str, NDArray[Any]]],
    sequences: frozenset[str] | None,
    tolerance: Tolerance,
    spreads: Mapping[str, Spread],
) -> dict[str, OutputError]:
    """Measure how far the outputs of a case are from those of the case that it is like, at real tokens.

    Outputs without rows, or with another shape for another number of tokens (scores of pairs of them), are left out.

    Args:
        reference: a case with its outputs.
        other: the case that it is like, with its outputs.
        sequences: as in ReferenceOutputs.
        tolerance: the allowed difference.
        spreads: as in ReferenceOutputs.
    """
    (case, outputs), (like, expected) = reference, other
    errors: dict[str, OutputError] = {}
    for name in (name for name in expected if name in outputs):
        actual, rows, valid = outputs[name], expected[name], like.valid
        if case.rows and valid is not None:
            if rows.shape[:1] != valid.shape[:1]:
                continue
            rows, valid = rows[list(case.rows)], valid[list(case.rows)]
        if sequences is None or name in sequences:
            actual, rows = real_tokens(actual, case.valid), real_tokens(rows, valid)
        if actual.shape == rows.shape:
            errors[name] = measure(actual, rows, None, tolerance, spread=spreads.get(name))
    return errors


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
    outputs_by_case: dict[int, Mapping[str, NDArray[Any]]] = {}
    reasons: dict[int, str] = {}
    # Longest first: after a short text, BigBird computes differently from then on.
    numbers = sorted(range(len(cases)), key=lambda number: -_length(cases[number]))
    for number in counted(numbers, f"running {name} on case"):
        try:
            outputs_by_case[number] = reference(cases[number].feeds)
        except refusal as error:
            # In onnxruntime's own words.
            reason = str(error.__cause__).strip().partition("\n")[0] if isinstance(error, SessionError) else ""
            reasons[number] = f" ({reason[:_LONGEST_REASON]})" if reason else ""
    done = [number for number in range(len(cases)) if number in outputs_by_case]
    refused = [f"{cases[number].description}{reason}" for number, reason in sorted(reasons.items())]
    outputs = [outputs_by_case[number] for number in done]
    expected = ReferenceOutputs(
        name, tuple(cases[number] for number in done), tuple(outputs), None, tuple(refused), sequences
    ).with_spreads()
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
    candidate: Runner, expected: ReferenceOutputs, tolerance: Tolerance, pruning: Pruning | None = None
) -> Verification:
    """Run `candidate` on every case and compare all outputs that the reference has.

    Args:
        candidate: runs a case's feeds.
        expected: the expected outputs.
        tolerance: the allowed difference.
        pruning: how the candidate prunes weights that the reference has in full. They are compared with the nearest
            weights to the reference's that have the candidate's terms, so that a value may cross a threshold by no more
            than the tolerance.
    """
    results = []
    likes = [case for case in expected.cases if case.like]
    kept: list[Mapping[str, NDArray[Any]]] = []
    for case, expected_outputs in counted(list(zip(expected.cases, expected.outputs, strict=True)), "comparing case"):
        try:
            outputs = _restored(candidate(case.feeds), expected_outputs, pruning)
            missing = ", ".join(sorted(expected_outputs.keys() - outputs.keys()))
            failure = f"it has no output {missing}" if missing else ""
        except SessionError as error:  # a graph fixed to one size only runs on that size
            outputs, failure = {}, error.message
        results.append(replace(_compare(case, outputs, expected_outputs, expected, tolerance), failure=failure))
        _LOGGER.debug("case %s: %s", case.description, failure or f"largest error {results[-1].max_abs_error:.3g}")
        kept.append(outputs if any(case.description in (like.description, like.like) for like in likes) else {})
    moves = expected.moves(kept, tolerance)
    for number, errors in moves.items():
        name = max(errors, key=lambda name: (not errors[name].passed, errors[name].max_abs_error))
        if expected.cases[number].rows and not errors[name].passed and not results[number].failure:
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
        length_effect=expected.length_effect,
        refused=expected.refused,
        constant_outputs=expected.constant,
    )


def _restored(
    outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], pruning: Pruning | None
) -> Mapping[str, NDArray[Any]]:
    """Replace pruned weights among `outputs` by full ones; weights of another width stay, and fail the comparison."""
    if pruning is None:
        return outputs
    return {
        name: pruning.nearest(array, expected[name])
        if name == pruning.output and name in expected and expected[name].shape == array.shape
        else array
        for name, array in outputs.items()
    }


def _compare(
    case: Case,
    outputs: Mapping[str, NDArray[Any]],
    expected_outputs: Mapping[str, NDArray[Any]],
    expected: ReferenceOutputs,
    tolerance: Tolerance,
) -> VerificationCase:
    errors = {
        name: expected.measure(case, name, outputs[name], reference, tolerance) if name in outputs else INCOMPARABLE
        for name, reference in expected_outputs.items()
    }
    worst = max(errors, key=lambda name: (not errors[name].passed, errors[name].max_abs_error))
    return VerificationCase(
        description=case.description,
        inputs={name: tuple(array.shape) for name, array in case.feeds.items()},
        max_abs_error=max(error.max_abs_error for error in errors.values()),
        cosine=min(error.cosine for error in errors.values()),
        passed=all(error.passed for error in errors.values()),
        worst_output=worst,
        scale=errors[worst].scale,
        left_out={name: error.num_equal for name, error in errors.items() if error.num_equal},
        nothing_measured=tuple(name for name, error in errors.items() if error.num_equal and not error.num_measured),
    )


def _mask_effect(reference: Runner, expected: ReferenceOutputs) -> tuple[float | None, bool]:
    """Return how far the reference's outputs move on real tokens if padding is attended to.

    The second result tells whether this is only rounding.
    """
    effect: float | None = None
    ignores_mask = True
    for case, expected_outputs in zip(expected.cases, expected.outputs, strict=True):
        if case.valid is None or case.valid.all():
            continue
        masks = [name for name, array in case.feeds.items() if "mask" in name and array.ndim == 2]
        unmasked = _outputs_without_masks(reference, expected, case, masks)
        errors = [expected.measure(case, name, unmasked[name], expected_outputs[name]) for name in expected_outputs]
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
    unmasked = [name for name in case.feeds if name not in masks]
    for twin, outputs in zip(expected.cases, expected.outputs, strict=True):
        if all(twin.feeds.get(name) is case.feeds[name] for name in unmasked) and all(
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
        f"output {case.worst_output}: max_abs_error {case.max_abs_error:.3g} (numbers up to {case.scale:.3g}), "
        f"cosine {case.cosine:.6f} (allowed: {verification.atol:g} + {verification.rtol:g} x largest value, cosine "
        f"{verification.cosine_required:g}) on {shapes}"
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
    return all(_same(vectors[0], vector) for vector in vectors[1:])


def _is_constant(name: str, feeds: Sequence[Arrays], outputs: Sequence[Arrays]) -> bool:
    firsts: dict[Any, tuple[list[NDArray[Any]], NDArray[Any]]] = {}
    compared = False
    for inputs, results in zip(feeds, outputs, strict=True):
        for masks, contents, row in _rows(inputs, results[name]):
            if row.size and np.all(row == 1):
                return False
            key = tuple((mask.shape, mask.tobytes()) for mask in masks), tuple(content.shape for content in contents)
            first, output = firsts.setdefault(key, (contents, row))
            if all(np.array_equal(*pair) for pair in zip(first, contents, strict=True)):
                continue
            if not _same(output, row):
                return False
            compared = True
    return compared


def _rows(feeds: Arrays, output: NDArray[Any]) -> Iterator[tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[Any]]]:
    """Yield masks, contents and output of each row of a run, or of the whole run if its inputs share no batch axis."""
    sizes = {array.shape[:1] for array in feeds.values()}
    batched = len(sizes) == 1 and output.shape[:1] in sizes and output.ndim > 0
    for place in range(len(output)) if batched else (slice(None),):
        arrays = {name: np.asarray(array[place]) if array.ndim else array for name, array in feeds.items()}
        masks = [array for name, array in arrays.items() if "mask" in name]
        row = output[place] if output.ndim else output
        attended = next((mask.astype(bool) for mask in masks if mask.ndim == 1 and mask.shape == row.shape[:1]), None)
        contents = [array for name, array in arrays.items() if "mask" not in name]
        yield masks, contents, row if attended is None or attended.all() else row[attended]


def _same(first: NDArray[Any], second: NDArray[Any]) -> bool:
    if first.shape != second.shape:
        return False
    first, second = (np.atleast_1d(array).astype(np.float64) for array in (first, second))
    kept = informative(first, second)  # next to a fill, all others would be the same
    if kept is None:
        return False
    scale = float(np.abs(first[kept]).max(initial=0.0))
    return bool((np.abs(first[kept] - second[kept]) <= _SAME * scale).all())


def batch_cases(inputs: Sequence[TensorInfo], cases: Sequence[Case]) -> list[Case]:
    """Return the row cases of the first batches padded on each side, if the graph takes other numbers of texts."""
    if any(isinstance(size, int) for info in inputs for size in info.shape[:2]):
        return []
    ragged = [case for case in cases if case.valid is not None and not case.valid.all() and case.valid.any(1).all()]
    sides = {bool(case.valid[:, 0].all()): case for case in reversed(ragged) if case.valid is not None}
    return [row for case in sides.values() for row in row_cases(case)]


def row_cases(case: Case) -> list[Case]:
    """Return one row of a case without its padding, and all of its rows in another order.

    The outputs for these rows must be those in `case`. A case of one row, or with inputs that are not rows of a batch,
    gives none.
    """
    valid = case.valid
    if valid is None or len(valid) < 2 or any(array.shape[:1] != valid.shape[:1] for array in case.feeds.values()):
        return []
    lengths = valid.sum(axis=1)
    row = min(np.flatnonzero(lengths >= _FEWEST), key=lengths.__getitem__, default=int(lengths.argmax()))
    tokens = valid[row]
    alone = {
        name: array[row : row + 1][:, tokens] if array.shape[:2] == valid.shape else array[row : row + 1]
        for name, array in case.feeds.items()
    }
    order = [*range(1, len(valid)), 0]
    turned = {name: array[order] for name, array in case.feeds.items()}
    like = case.description
    return [
        Case(f"{like}, one row alone", alone, valid[row : row + 1, tokens], like, (int(row),)),
        Case(f"{like}, in another order", turned, valid[order], like, tuple(order)),
    ]
