"""Fixtures of the tests of optimize."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import onnx_ir as ir
import pytest

from onnxtool.model_file import scratch_file
from onnxtool.optimize.quantization import activations
from tests.optimize.exact_products import with_exact_products


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let quantization measure with exact products, so that what it decides is the same on every CPU.

    Without this fixture it measures with the kernels of this CPU, as users do.
    """

    def write(model: ir.Model, folder: Path) -> AbstractContextManager[Path]:
        return scratch_file(with_exact_products(model), folder)

    monkeypatch.setattr(activations, "scratch_file", write)
