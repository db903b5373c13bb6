"""A checkpoint whose outputs ignore what it is given cannot be verified, and is refused instead."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from onnxtool.errors import CheckpointError
from onnxtool.export import ExportOptions, export_model
from onnxtool.export.report import ExportReport
from tests.workshop import Workshop

Weights = dict[str, Any]


def zero(weights: Weights) -> None:
    for name in weights:
        weights[name] = np.zeros_like(weights[name])


def without_last_scale(weights: Weights) -> None:
    """Let the last normalization give its bias alone."""
    weights["encoder.layer.1.output.LayerNorm.weight"][:] = 0
    weights["encoder.layer.1.output.LayerNorm.bias"][:] = np.linspace(-1, 1, 32)
    weights["pooler.dense.weight"][:] = 0


def without_words(weights: Weights) -> None:
    """Leave positions alone, so that tokens of one text differ."""
    weights["embeddings.word_embeddings.weight"][:] = 0
    weights["embeddings.token_type_embeddings.weight"][:] = 0


def not_a_number(weights: Weights) -> None:
    weights["encoder.layer.0.output.dense.bias"][3] = np.nan


def blind(weights: Weights) -> None:
    """Let no token see another one."""
    for name in weights:
        if ".attention.self.value." in name:
            weights[name] = np.zeros_like(weights[name])


def changed(workshop: Workshop, folder: Path, change: Callable[[Weights], None]) -> Path:
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), folder / "checkpoint"))
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


def export(checkpoint: Path, folder: Path, **options: Any) -> ExportReport:
    return export_model(
        ExportOptions(str(checkpoint), output=folder / "m.onnx", exporter="torchscript", head="none", **options)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (zero, "for all inputs, 0 throughout"),
        (without_last_scale, "gives the same last_hidden_state"),
        (without_words, "gives the same last_hidden_state"),
        (not_a_number, "for all inputs, nan throughout"),
        (blind, "ignores its attention mask"),
    ],
)
def test_a_model_that_ignores_its_inputs_is_refused(
    workshop: Workshop, tmp_path: Path, change: Callable[[Weights], None], message: str
) -> None:
    """All that it gives agrees with PyTorch, whatever is wrong with it; no file is left."""
    with pytest.raises(CheckpointError, match=message) as raised:
        export(changed(workshop, tmp_path, change), tmp_path)
    assert "--no_verify" in str(raised.value.hint)
    assert not (tmp_path / "m.onnx").exists()


def test_it_can_be_exported_unverified(workshop: Workshop, tmp_path: Path) -> None:
    """As what it is."""
    report = export(changed(workshop, tmp_path, zero), tmp_path, verify=False)
    assert report.verification is None
    assert len(onnx.load(tmp_path / "m.onnx").graph.node) > 0
