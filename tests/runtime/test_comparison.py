"""A comparison sees every kind of wrong output, and passes what only rounding separates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import onnxtool.runtime.comparison as comparison
import onnxtool.runtime.difference as difference
from onnxtool.errors import VerificationError
from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case, batch_cases, require_passed, row_cases, run_reference, verify
from onnxtool.runtime.difference import TOLERANCES, OutputError, Tolerance, measure
from onnxtool.runtime.input_cases import FeedShape

Arrays = Mapping[str, NDArray[Any]]

LOOSE = Tolerance(atol=1e-3, rtol=0.0, cosine=0.999)
MASK = np.array([[True, True, False], [True, True, True]])


def _states(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((2, 3, 4)).astype(np.float32)


def _case(valid: NDArray[np.bool_] | None = MASK) -> Case:
    ids = np.arange(6).reshape(2, 3)
    mask = (np.ones((2, 3)) if valid is None else valid).astype(np.int64)
    return Case("a case", {"input_ids": ids, "attention_mask": mask}, valid)


def test_the_error_is_the_largest_difference_and_the_cosine_that_of_all_values() -> None:
    """By their definitions, in a loop."""
    output, reference = _states(1), _states(2)
    error = measure(output, reference, None)
    pairs = [(float(a), float(b)) for a, b in zip(output.ravel(), reference.ravel(), strict=True)]
    assert error.max_abs_error == max(abs(a - b) for a, b in pairs)
    assert error.scale == max(abs(b) for _, b in pairs)
    norms = (sum(a * a for a, _ in pairs) * sum(b * b for _, b in pairs)) ** 0.5
    assert error.cosine == pytest.approx(sum(a * b for a, b in pairs) / norms, abs=1e-12)


def test_a_large_output_is_measured_in_pieces_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces save memory and change nothing else, also where the last one is shorter."""
    whole = measure(_states(1), _states(2), None)
    monkeypatch.setattr(difference, "_PIECE", 5)
    pieces = measure(_states(1), _states(2), None)
    assert (pieces.max_abs_error, pieces.scale) == (whole.max_abs_error, whole.scale)
    assert pieces.cosine == pytest.approx(whole.cosine, abs=1e-12)


def test_padding_is_not_compared() -> None:
    """Outputs mean nothing there; a pooled output has none and is compared as a whole."""
    output, reference = _states(), _states()
    output[~MASK] = 1e9
    assert measure(output, reference, MASK).max_abs_error == 0.0
    assert measure(output, reference, None).max_abs_error > 1e8
    assert measure(output[:, 0] + 1, reference[:, 0], MASK).max_abs_error == pytest.approx(1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_fails_against_one_that_is(value: float) -> None:
    """Even with the largest tolerance: fp16 that overflows must not pass."""
    output = _states()
    output[0, 0, 0] = value
    assert not measure(output, _states(), None, Tolerance(1e30, 1e30, -1.0)).passed
    assert not measure(_states(), output, None, Tolerance(1e30, 1e30, -1.0)).passed


def test_nan_equals_nan_in_the_same_place_and_nothing_else() -> None:
    """The logarithm of a negative number is right; how many there are is counted, and the rest is measured."""
    output, reference = _states(), _states()
    output[0, 0, 0] = reference[0, 0, 0] = np.nan
    output[1, 1, 1] += np.float32(1e-4)
    error = measure(output, reference, None)
    assert error.max_abs_error == pytest.approx(1e-4, rel=1e-2)
    assert (error.num_equal, error.num_measured) == (1, 23)
    output[0, 0, 0] = np.inf
    assert not measure(output, reference, None, Tolerance(1e30, 1e30, -1.0)).passed


def test_equal_infinities_are_equal_and_the_rest_is_still_measured() -> None:
    """Scores that a mask set to minus infinity are right; rounding beside them is judged by the tolerance."""
    output, reference = _states(), _states()
    output[0, 0, :2] = reference[0, 0, :2] = -np.inf
    assert measure(output, reference, None).max_abs_error == 0.0
    output[1, 1, 1] += np.float32(1e-4)
    error = measure(output, reference, None, LOOSE)
    assert error.max_abs_error == pytest.approx(1e-4, rel=1e-2)
    assert error.passed
    output[0, 0, 0] = np.inf
    assert not measure(output, reference, None, LOOSE).passed


def test_nothing_but_infinities_is_equal_to_itself() -> None:
    """There is nothing left to measure then."""
    output = np.full((2, 2), -np.inf, np.float32)
    assert measure(output, output, None) == OutputError(num_equal=4)


def test_another_shape_fails() -> None:
    """Also where broadcasting would make it fit."""
    assert not measure(_states()[:, :1], _states(), None, Tolerance(1e30, 1e30, -1.0)).passed


@pytest.mark.parametrize(("error", "passes"), [(0.9, True), (1.1, True), (1.6, False)])
def test_the_tolerance_is_relative_to_the_largest_value(error: float, passes: bool) -> None:
    """One absolute, and a twentieth of the scale; the cosine has a bound of its own."""
    reference = _states() / np.abs(_states()).max() * np.float32(10.0)
    output = reference.copy()
    output[0, 0, 0] += np.float32(error)
    assert measure(output, reference, None, Tolerance(atol=1.0, rtol=0.05, cosine=0.99)).passed is passes
    assert not measure(output, reference, None, Tolerance(atol=1.0, rtol=0.05, cosine=0.999999)).passed


def test_a_zero_output_is_like_nothing_but_itself() -> None:
    """It has no direction, so the cosine cannot tell."""
    zero = np.zeros((2, 2), np.float32)
    assert measure(zero, zero, None).cosine == 1.0
    assert measure(zero, np.ones_like(zero), None).cosine == 0.0


def test_every_case_and_every_output_is_verified() -> None:
    """The report has the worst of all, with the case and the output it is in."""
    states = _states()

    def reference(feeds: Arrays) -> Arrays:
        return {"first": states, "second": states * 2}

    def candidate(feeds: Arrays) -> Arrays:
        wrong = states.copy()
        wrong[1, 0, 0] += np.float32(0.5) if feeds["input_ids"][0, 0] else np.float32(0.0)
        return {"first": states, "second": wrong * 2, "extra": states}

    other = Case("another case", {"input_ids": np.ones((2, 3), np.int64)}, None)
    verification = verify(candidate, run_reference(reference, [_case(), other], name="a loop"), LOOSE)
    good, bad = verification.cases
    assert not verification.passed
    assert (good.passed, bad.passed) == (True, False)
    assert bad.worst_output == "second"
    assert verification.max_abs_error == bad.max_abs_error == pytest.approx(1.0)
    assert verification.cosine_min == bad.cosine < good.cosine
    assert bad.inputs == {"input_ids": (2, 3)}


def test_a_missing_output_fails() -> None:
    """Comparing only what both have would pass a graph without outputs."""
    verification = verify(lambda _: {}, run_reference(lambda _: {"logits": _states()}, [_case()], name="a loop"), LOOSE)
    assert not verification.passed
    assert verification.cases[0].worst_output == "logits"


def test_no_cases_prove_nothing() -> None:
    """An empty verification has not passed."""
    assert not verify(lambda _: {}, run_reference(lambda _: {}, [], name="a loop"), LOOSE).passed


def test_the_effect_of_the_mask_is_measured_on_real_tokens() -> None:
    """It tells whether these weights could show a wrong mask at all."""

    def attentive(feeds: Arrays) -> Arrays:
        mean = (feeds["input_ids"] * feeds["attention_mask"]).sum(axis=1, keepdims=True)
        return {"y": np.broadcast_to(mean, (2, 3)).astype(np.float64)}

    def indifferent(feeds: Arrays) -> Arrays:
        return {"y": feeds["input_ids"].astype(np.float64)}

    # Row 0 holds 0, 1 and, on padding, 2.
    assert verify(attentive, run_reference(attentive, [_case()], name="x"), LOOSE).mask_effect == 2.0
    assert verify(indifferent, run_reference(indifferent, [_case()], name="x"), LOOSE).mask_effect == 0.0
    assert verify(attentive, run_reference(attentive, [_case(None)], name="x"), LOOSE).mask_effect is None


def test_a_failed_verification_raises_with_its_worst_case() -> None:
    """Case, output, figures and shapes, and the whole verification for a program to read."""
    states = _states()
    answers = run_reference(lambda _: {"logits": states}, [_case()], name="PyTorch")
    verification = verify(lambda _: {"logits": states + 1}, answers, LOOSE)
    with pytest.raises(VerificationError) as caught:
        require_passed(verification, "look there")
    for part in ("PyTorch in 1 of 1 cases", "a case, output logits", "max_abs_error 1", "input_ids [2, 3]"):
        assert part in caught.value.message
    assert caught.value.hint == "look there"
    assert caught.value.verification is verification


def test_a_passed_verification_raises_nothing() -> None:
    """Equal outputs are within every tolerance."""
    states = _states()
    same = {"logits": states}
    for tolerance in TOLERANCES.values():
        require_passed(verify(lambda _: same, run_reference(lambda _: same, [_case()], name="x"), tolerance), "")


def test_padding_is_left_out_of_sequences_only() -> None:
    """A classifier with as many labels as there are tokens has logits of the shape of the mask."""
    mask = np.array([[True, True, False]])
    case = Case("ragged", {"input_ids": np.zeros((1, 3), np.int64), "attention_mask": mask.astype(np.int64)}, mask)
    right, wrong = np.zeros((1, 3), np.float32), np.array([[0, 0, 9]], np.float32)

    def verified(sequences: frozenset[str] | None) -> bool:
        answers = run_reference(lambda _feeds: {"logits": right}, [case], name="reference", sequences=sequences)
        return verify(lambda _feeds: {"logits": wrong}, answers, TOLERANCES["fp32"]).passed

    assert verified(frozenset({"logits"}))
    assert not verified(frozenset())


def test_padding_is_left_out_of_keys_and_values() -> None:
    """They are [B, H, S, D], so that their sequence is the third axis."""
    keys = np.zeros((2, 3, 4, 5), dtype=np.float32)
    other = keys.copy()
    valid = np.array([[True, True, True, True], [False, False, True, True]])
    other[1, :, 0] = 1.0
    assert measure(other, keys, valid).max_abs_error == 0
    other[1, 2, 3, 4] = 1.0
    assert measure(other, keys, valid).max_abs_error == 1


def test_outputs_that_are_not_finite_in_both_are_named() -> None:
    """And those of which nothing is left to compare, as a case that passes shows nothing of them."""
    part, none, whole = _states(), np.full((2, 4), np.nan, np.float32), _states()
    part[0, 0] = np.inf
    found = {"part": part, "none": none, "whole": whole}
    (case,) = verify(lambda _: found, run_reference(lambda _: found, [_case()], name="x"), LOOSE).cases
    assert case.passed
    assert (case.left_out, case.nothing_measured) == ({"part": 4, "none": 8}, ("none",))


@pytest.mark.parametrize("sequences", [None, frozenset[str]()])
def test_a_row_of_padding_alone_must_be_finite_and_nothing_more(sequences: frozenset[str] | None) -> None:
    """Its values mean nothing, also those of a pooled output, but NaN there spreads; other rows are compared."""
    case = _case(np.array([[False, False, False], [True, True, False]]))
    right = {"y": _states(), "pooled": _states()[:, 0]}

    def passes(name: str, row: int, value: float, reference: Arrays = right) -> bool:
        wrong = {key: array.copy() for key, array in reference.items()}
        wrong[name][row] = value
        return verify(
            lambda _: wrong, run_reference(lambda _: reference, [case], name="x", sequences=sequences), LOOSE
        ).passed

    for name in right:
        assert passes(name, 0, 9.0)
        assert not passes(name, 0, np.nan)
        assert not passes(name, 0, np.inf)
        assert not passes(name, 1, 9.0)
        nan = {**right, name: right[name].copy()}
        nan[name][0] = np.nan
        assert passes(name, 0, 0.0, nan)


def _ragged(side: str) -> Case:
    """Return three texts, padded on a side."""
    shape = FeedShape(f"padded {side}", (5, 4, 2), 5, side)
    ids = np.arange(15).reshape(3, 5)
    return Case(shape.description, {"input_ids": ids, "attention_mask": shape.mask.astype(np.int64)}, shape.mask)


def _sums(feeds: Arrays) -> dict[str, NDArray[Any]]:
    """Return the sum over the real tokens of each text, weighed by their positions in the row: float64 [B]."""
    positions = np.arange(1, feeds["input_ids"].shape[1] + 1)
    return {"sums": (feeds["input_ids"] * feeds["attention_mask"] * positions).sum(axis=1, dtype=np.float64)}


def test_a_text_alone_must_be_answered_as_in_its_batch() -> None:
    """Also where each of the two is close enough to the reference; the order of the batch counts as well."""
    batch = _ragged("right")
    alone, turned = row_cases(batch)
    assert (alone.feeds["input_ids"].tolist(), alone.rows) == ([[5, 6, 7, 8]], (1,))
    assert (turned.feeds["input_ids"][:, 0].tolist(), turned.rows) == ([5, 10, 0], (1, 2, 0))
    expected = run_reference(_sums, [batch, alone, turned], name="the reference")
    right = verify(_sums, expected, LOOSE)
    assert (right.passed, right.batch_effect) == (True, 0.0)
    for wrong in (alone, turned):

        def off(feeds: Arrays, case: Case = wrong) -> dict[str, NDArray[Any]]:
            sign = 1 if feeds["input_ids"] is case.feeds["input_ids"] else -1
            return {"sums": _sums(feeds)["sums"] + sign * 0.8 * LOOSE.atol}

        found = verify(off, expected, LOOSE)
        assert [case.description for case in found.cases if not case.passed] == [wrong.description]
        assert found.batch_effect == pytest.approx(1.6 * LOOSE.atol)


def test_a_reference_that_counts_padding_is_not_held_to_it() -> None:
    """Positions from the start of the row move with padding on the left: only the cases on the right stay."""
    inputs = [TensorInfo(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask")]
    cases = [_ragged("right"), _ragged("left")]
    expected = run_reference(_sums, cases + batch_cases(inputs, cases), name="the reference")
    kept = [case.description for case in expected.without_moves(LOOSE).cases if case.rows]
    assert kept == [
        "padded left, in another order",
        "padded right, one row alone",
        "padded right, in another order",
    ]


@pytest.mark.parametrize("fill", [-1e9, -np.inf])
def test_a_fill_does_not_make_an_output_constant(fill: float) -> None:
    """Next to it, all other numbers would be the same."""
    feeds = [{"ids": np.full((2, 3), number)} for number in range(3)]
    outputs = [{"y": np.array([[fill, number, 1.0, fill]] * 2, np.float32)} for number in range(3)]
    assert comparison.constant_outputs(feeds, outputs) == ()
    outputs = [{"y": np.array([[fill, 2.0, 1.0, fill]] * 2, np.float32)} for _ in range(3)]
    assert comparison.constant_outputs(feeds, outputs) == ("y",)
