"""Results of comparing a model with its reference, case by case."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class VerificationCase:
    """One comparison of the model with its reference on the same inputs.

    Attributes:
        description: description of the case, e.g. `ragged, padded right`.
        inputs: the shape of each input.
        max_abs_error: the largest absolute difference over all outputs, on positions that are not padding.
        cosine: the smallest cosine similarity of an output with its reference, each flattened.
        passed: whether every output is within the tolerance.
        worst_output: the output with the largest error.
        scale: the largest measured value of this output, without fills and shared offsets.
        failure: why the model did not run on these inputs; empty if it did.
        left_out: by output, the number of values that are the same NaN, infinity or fill in both models. They count as
            equal, and are neither measured nor part of the scale.
        nothing_measured: the outputs that have no other values, so that nothing else was compared.
    """

    description: str
    inputs: dict[str, tuple[int, ...]]
    max_abs_error: float
    cosine: float
    passed: bool
    worst_output: str
    failure: str = ""
    scale: float = 0.0
    left_out: dict[str, int] = field(default_factory=dict)
    nothing_measured: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class Verification:
    """Differences between a model and its reference.

    A case passes where `|output - reference| <= atol + rtol * scale` holds for every output (the scale is that of a
    value's neighbours, without fills, shared offsets and outliers; see docs/concepts/verification.md), and the
    cosine of each is at least `cosine_required`.

    Attributes:
        reference: the model that served as reference.
        mask_effect: how far the reference's outputs move when padding is attended to; below `atol`, these weights
            cannot reveal a wrong mask. None for a model without an attention mask.
        padding_effect: largest change of the model's outputs when padding holds other ids; None if not tried.
        batch_effect: largest change of the model's outputs for a text when it is alone instead of padded in a batch,
            or the batch is in another order; None if not tried.
        length_effect: for a file with a fixed length, how far the reference's outputs for a short text move when it is
            padded to that length; None otherwise.
        refused: cases that were skipped because the reference itself does not run on them.
        provider: where the model ran. The CPU provider computes half precision in float32, so it shows rounded weights
            but not overflows.
        constant_outputs: the reference's outputs that are the same for all inputs, and therefore prove little.
        own_variation: for files with dynamically quantized activations, how far the reference itself moves between
            onnxruntime's optimization levels, which is added to the tolerance; None if the usual tolerance was enough,
            or for other files.
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
    batch_effect: float | None = None
    length_effect: float | None = None
    refused: tuple[str, ...] = ()
    provider: str = "cpu"
    constant_outputs: tuple[str, ...] = ()
    own_variation: float | None = None


@short_repr
@dataclass(frozen=True)
class LayerError:
    """The difference of one part of a model.

    Attributes:
        scope: the modules of the part, as in `encoder.layer.3.attention`; the names of values where there are none.
        value: the reference's value at its end.
        model_value: the model's.
        precision: the narrowest type that it computes in: `fp32`, `fp16` (also of bfloat16) or `int8` (any integers).
        error: norm of the difference at its end, relative to the reference's norm: of this part and all before it.
        own_error: the same of this part alone, computed from the reference's value before it.
        batch_error: how far its value for a text moves, relative to its size, if the text is padded in a batch.
        bound: the largest `own_error` that its precision explains.
        differs: whether one of its errors is larger.
    """

    scope: str
    value: str
    model_value: str
    precision: str
    error: float
    own_error: float
    batch_error: float
    bound: float
    differs: bool


@short_repr
@dataclass(frozen=True)
class LayerReport:
    """The parts of a model, and the first that differs from its reference.

    Attributes:
        model: the model's file.
        reference: the file or checkpoint that it was compared with.
        cases: descriptions of the inputs.
        source: the input at which the compared path begins.
        output: the output at which it ends: the one that differs most.
        parts: all parts on this path, in order.
        first: the modules of the first part that differs; None if none does.
        reason: what was found, in a sentence.
    """

    model: str
    reference: str
    cases: tuple[str, ...]
    source: str
    output: str
    parts: tuple[LayerError, ...]
    first: str | None
    reason: str

    @property
    def passed(self) -> bool:
        """Whether no part differs by more than its precision explains."""
        return self.first is None
