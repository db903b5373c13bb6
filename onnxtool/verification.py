"""How far a model is from its reference, case by case."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class VerificationCase:
    """One comparison of the model with its reference on the same inputs.

    Attributes:
        description: what this case is about, e.g. `ragged, padded right`.
        inputs: the shape of each input.
        max_abs_error: the largest absolute difference over all outputs, on positions that are not padding.
        cosine: the smallest cosine similarity of an output with its reference, each flattened.
        passed: whether every output was within the tolerance.
        worst_output: the output with the largest error.
        failure: why the model did not run on these inputs at all; empty where it did.
        equal_not_finite: the outputs that are NaN or infinite in some places, the same ones in both models. These
            places count as equal.
        nothing_measured: those of them that are so everywhere, of which nothing else was compared.
    """

    description: str
    inputs: dict[str, tuple[int, ...]]
    max_abs_error: float
    cosine: float
    passed: bool
    worst_output: str
    failure: str = ""
    equal_not_finite: tuple[str, ...] = ()
    nothing_measured: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class Verification:
    """How far a model is from its reference.

    A case passes where `|output - reference| <= atol + rtol * max|reference|` holds for every output, and the
    cosine of each is at least `cosine_required`.

    Attributes:
        reference: what the model was compared with.
        mask_effect: how far the reference's own outputs move when the padding is attended to; a figure below `atol`
            means that these weights cannot show a wrong mask. None for a model without an attention mask.
        padding_effect: how far the model's outputs move where other ids stand in the padding, at most; None where
            that was not tried.
        refused: cases that the reference itself does not run on, and that were left out therefore.
        provider: where the model ran. The CPU provider computes half precision in float32, so it shows the rounding of
            weights and not an overflow in between.
        constant_outputs: the reference's outputs that are the same for all inputs, which every file agrees with that
            gives them whatever it reads.
        own_variation: how far the reference of a file that quantizes its activations as it runs moves by itself
            between onnxruntime's optimization levels, which `atol` and `cosine_required` allow as well; None where the
            usual tolerance was enough, or for other files.
    """

    passed: bool
    atol: float
    rtol: float
    cosine_required: float
    max_abs_error: float
    cosine_min: float
    reference: str
    cases: tuple[VerificationCase, ...]
    mask_effect: float | None = None
    padding_effect: float | None = None
    refused: tuple[str, ...] = ()
    provider: str = "cpu"
    constant_outputs: tuple[str, ...] = ()
    own_variation: float | None = None
