"""Fixtures of the tests of optimize."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.workshop import Workshop


@pytest.fixture(scope="session")
def trained(workshop: Workshop, minilm: Path) -> Path:
    """The first three layers of MiniLM with real weights, exported, with its tokenizer beside it; `fused.onnx` too."""

    def make(folder: Path) -> None:
        from transformers import BertModel

        from onnxtool.export import ExportOptions, export_model
        from onnxtool.optimize import OptimizeOptions, optimize_model

        shutil.copytree(minilm, folder / "checkpoint")
        BertModel.from_pretrained(minilm, num_hidden_layers=3).save_pretrained(folder / "checkpoint")
        options = ExportOptions(
            str(folder / "checkpoint"), output=folder / "minilm.onnx", exporter="torchscript", verify=False
        )
        export_model(options)
        optimize_model(OptimizeOptions(folder / "minilm.onnx", output=folder / "fused.onnx", verify=False))
        shutil.copytree(folder / "minilm", folder / "fused")

    return workshop.made("trained", make) / "minilm.onnx"
