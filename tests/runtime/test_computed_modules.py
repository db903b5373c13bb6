"""Modules that a graph ends before; what they compute is compared with PyTorch in tests/checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtool.checkpoint.module_forms import PoolingModule
from onnxtool.checkpoint.pooling_modules import Activation, Dense, Pooling
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.token_modules import MultiVectorMask
from onnxtool.errors import InputError, SessionError
from onnxtool.runtime import computed_modules
from onnxtool.runtime.computed_modules import compute


def test_logits_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts together give what all rows at once give."""
    logits, mask = np.random.default_rng(0).standard_normal((5, 4, 9)), np.tri(5, 4) > 0
    whole = compute((SpladePooling(),), logits, mask)
    monkeypatch.setattr(computed_modules, "_MOST_BYTES", 300)
    np.testing.assert_allclose(compute((SpladePooling(),), logits, mask), whole, rtol=1e-6)


def test_modules_of_another_model_are_refused() -> None:
    """A projection of vectors of another width names both widths."""
    dense = Dense("2_Dense", np.zeros((2, 8), np.float32), None, "Identity")
    with pytest.raises(InputError, match="2_Dense takes vectors of 8 numbers, but is given 7"):
        compute((Pooling(), dense), np.zeros((1, 3, 7)))


def test_modules_that_change_nothing_return_what_they_are_given() -> None:
    """A mask of tokens is for the reader of the texts."""
    values = np.ones((1, 2, 3), np.float32)
    np.testing.assert_array_equal(compute((MultiVectorMask(),), values), values)


def test_no_activation_hides_a_nan() -> None:
    """Relu would make 0 of it; on padding it is of no account."""
    values = np.array([[[1.0, 2.0], [np.nan, 0.0]]])
    np.testing.assert_array_equal(compute((Pooling(("max",)),), values, np.array([[True, False]])), [[1.0, 2.0]])
    chains: tuple[tuple[PoolingModule, ...], ...] = ((Pooling(("max",)),), (Activation("ReLU"),))
    for modules in chains:
        with pytest.raises(SessionError, match="not a finite number"):
            compute(modules, values if isinstance(modules[0], Pooling) else values[0])
