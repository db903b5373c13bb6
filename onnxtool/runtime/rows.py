"""Cases that show whether the outputs for a text depend on the other texts of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case

_FEWEST = 4  # tokens of a text alone: models that halve their sequence do not run on fewer


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
