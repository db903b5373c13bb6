"""Fixtures of the tests of optimize."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from onnxtool.optimize.report import OptimizeReport
from tests.workshop import WORDS, Workshop, make_shallow


@pytest.fixture(scope="session")
def trained(workshop: Workshop, minilm: Path) -> Path:
    """Two layers and 8,000 words of MiniLM with real weights, exported, its tokenizer beside it; `fused.onnx` too."""
    return workshop.made("trained", partial(_make_trained, minilm, words=WORDS)) / "minilm.onnx"


@pytest.fixture(scope="session")
def trained_of_all_words(workshop: Workshop, minilm: Path) -> Path:
    """The same with the whole vocabulary, where errors on real texts count."""
    return workshop.made("trained_of_all_words", partial(_make_trained, minilm, words=0)) / "minilm.onnx"


def _make_trained(minilm: Path, folder: Path, *, words: int) -> None:
    from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model

    make_shallow(minilm, folder / "checkpoint", layers=2, words=words)
    options = ExportOptions(
        str(folder / "checkpoint"), output=folder / "minilm.onnx", exporter="torchscript", verify=False
    )
    export_model(options)
    optimize_model(OptimizeOptions(folder / "minilm.onnx", output=folder / "fused.onnx", verify=False))
    shutil.copytree(folder / "minilm", folder / "fused")


@pytest.fixture(scope="session")
def trained_int8(workshop: Workshop, trained: Path) -> tuple[Path, OptimizeReport]:
    """The trained model, and the report of its optimization to int8 as a user asks for it."""
    folder = workshop.made("trained_int8", lambda folder: _to_int8(trained, folder))
    report: OptimizeReport = pickle.loads((folder / "report.pickle").read_bytes())  # noqa: S301  written below
    return folder / "m.onnx", replace(report, output=str(folder / "m-int8.onnx"))  # it was made elsewhere


def _to_int8(trained: Path, folder: Path) -> None:
    from onnxtool import OptimizeOptions, optimize_model

    shutil.copytree(trained.with_suffix(""), folder / "m")
    report = optimize_model(OptimizeOptions(Path(shutil.copy(trained, folder / "m.onnx")), precision="int8"))
    (folder / "report.pickle").write_bytes(pickle.dumps(report))


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A TorchScript export to optimize in a folder of its own, with its tokenizer beside it."""
    source = workshop.exported("tiny-encoder", exporter="torchscript")
    shutil.copytree(source.with_suffix(""), tmp_path / "tiny")
    return Path(shutil.copy(source, tmp_path / "tiny.onnx"))
