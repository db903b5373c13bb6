"""An export reads each small file of its checkpoint once, whoever asks for it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onnxtool.export import ExportOptions, export_model
from tests.workshop import Workshop


@pytest.mark.parametrize("target", ["plain", "fastembed"])
def test_each_small_file_is_read_once(
    workshop: Workshop, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Modules, their settings, limits, tokenizer and card; transformers reads some of them for itself."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint"))
    for name in ("modules.json", "sentence_bert_config.json"):
        shutil.copyfile(minilm / name, checkpoint / name)
    shutil.copytree(minilm / "1_Pooling", checkpoint / "1_Pooling")
    reads: Counter[str] = Counter()
    for method in ("read_bytes", "read_text"):
        _count(monkeypatch, method, checkpoint, reads)
    options = ExportOptions(
        str(checkpoint), output=tmp_path / ("m.onnx" if target == "plain" else "m"), target=target, verify=False,
        exporter="torchscript",
    )  # fmt: skip
    export_model(options)
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"} <= reads.keys()
    # Of vocab.txt, whether it is stale is seen twice: where tokens are compared, and where files are written.
    assert {name: count for name, count in reads.items() if count > 1 and name != "vocab.txt"} == {}


def _count(monkeypatch: pytest.MonkeyPatch, method: str, checkpoint: Path, reads: Counter[str]) -> None:
    original = getattr(Path, method)

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        if path.is_relative_to(checkpoint):
            reads[path.relative_to(checkpoint).as_posix()] += 1
        return original(path, *args, **options)

    monkeypatch.setattr(Path, method, counted)
