"""Choose the side on which texts are padded, so that the outputs for a text do not depend on its batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onnxtool.errors import ExportError
from onnxtool.export.modalities.text import PADDING_SIDES, TextInputs
from onnxtool.export.signature import run_torch_tensors, to_numpy
from onnxtool.model_file.metadata import NO_PADDING
from onnxtool.runtime.comparison import row_cases, row_errors
from onnxtool.runtime.difference import OutputError, Tolerance


def choose_side(
    model: Any, text: TextInputs, sequences: frozenset[str] | None, tolerance: Tolerance
) -> tuple[TextInputs, str, str]:
    """Run a text alone and padded in a batch, and set the tokenizer's side, and so that of all files that are written.

    The tokenizer's own side is preferred. Models that count positions from the start of the row (BERT, GPT-2) need
    padding on the right; classifiers that read the last position (XLNet) need it on the left.

    Args:
        model: a transformers model, or its encoder.
        text: its inputs.
        sequences: as in ReferenceOutputs.
        tolerance: the allowed difference.

    Returns:
        The inputs with the sides that are right; the chosen side, NO_PADDING if texts of different lengths must not
        share a batch; and a note for the user, empty for the tokenizer's own side.
    """
    own = text.tokenizer.padding_side
    errors = {side: list(_errors(model, text, side, sequences, tolerance)) for side in PADDING_SIDES}
    sides = tuple(side for side, found in errors.items() if all(error.passed for error in found))
    side = own if own in sides else next(iter(sides), NO_PADDING)
    if sides:
        text.tokenizer.padding_side = side
    moved = f"moves the outputs for a text by {max((error.max_abs_error for error in errors[own]), default=0.0):.2g}"
    note = f"texts are padded on the {side}, although the tokenizer pads on the {own}: that {moved}"
    if not sides:
        note = f"only texts of the same length share a batch: padding {moved}"
    return replace(text, sides=sides), side, "" if side == own else note


def _errors(
    model: Any, text: TextInputs, side: str, sequences: frozenset[str] | None, tolerance: Tolerance
) -> Iterator[OutputError]:
    """Yield how far each output for a text alone is from the one in a batch; nothing if the model refuses either."""
    batch = text.padded(side)
    try:
        runs = [
            (case, {name: to_numpy(value) for name, value in run_torch_tensors(model, case.feeds).items()})
            for case in (batch, *row_cases(batch)[:1])
        ]
    except ExportError:
        return
    yield from row_errors(runs[-1], runs[0], sequences, tolerance, {}).values()
