"""A command opens its model once, and hands the open file on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from onnxtool.model_file.wire import read_structure
from tests.cli.entry_point import run_onnxtool
from tests.encoding.corpora import dense_model, make_texts, write_corpus
from tests.export.test_static import VECTORS, written


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose structure is read."""
    found: list[Path] = []

    def read(path: Path, *arguments: Any, **options: Any) -> Any:
        found.append(path)
        return read_structure(path, *arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("onnxtool") and getattr(module, "read_structure", None) is read_structure:
            monkeypatch.setattr(module, "read_structure", read)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("infer", "{model}", "--text", "a b"),
        ("infer", "{model}", "--input", "{texts}", "--output", "vectors/"),
        ("stats", "{model}"),
    ],
    ids=["a text", "a collection", "a summary"],
)
def test_a_command_reads_its_model_once(tmp_path: Path, reads: list[Path], arguments: tuple[str, ...]) -> None:
    """However many parts of the command ask what it is."""
    model, texts = dense_model(tmp_path), write_corpus(tmp_path / "texts.jsonl", make_texts(3))
    reads.clear()
    done = run_onnxtool(tmp_path, *(word.format(model=model, texts=texts) for word in arguments))
    assert (done.returncode, reads) == (0, [model]), done.stderr


def test_an_optimization_reads_its_input_and_its_result_once(tmp_path: Path, reads: list[Path]) -> None:
    """An open file knows its stamps, and whoever writes a graph knows its external data."""
    model = dense_model(tmp_path)
    reads.clear()
    done = run_onnxtool(tmp_path, "optimize", str(model), "--output", "o.onnx")
    assert (done.returncode, [path.name for path in reads]) == (0, [model.name, "o.onnx"]), done.stderr


def test_an_export_reads_its_file_once(tmp_path: Path, reads: list[Path]) -> None:
    """It is verified, stamped and described as it was opened when it was written."""
    table = written(tmp_path / "table", "StaticEmbedding", {"embedding.weight": VECTORS}, "Normalize")
    done = run_onnxtool(tmp_path, "export", str(table), "--exporter=torchscript", "--output", "e.onnx")
    assert (done.returncode, [path.name for path in reads]) == (0, ["e.onnx"]), done.stderr


def test_artifacts_read_their_model_once(tmp_path: Path, reads: list[Path]) -> None:
    """What they are verified with was made here."""
    model = dense_model(tmp_path)
    reads.clear()
    done = run_onnxtool(tmp_path, "artifacts", str(model), "--loss=MSELoss")
    assert (done.returncode, reads) == (0, [model]), done.stderr
