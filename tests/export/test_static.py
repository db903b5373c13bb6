"""Checkpoints that are a table of vectors, or of weights, are exported without a transformer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from sentence_transformers.sentence_transformer import modules as reference
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding as SparseReference
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from onnxtool import ExportOptions, export_model
from onnxtool.errors import CheckpointError, OnnxtoolError, TargetError
from onnxtool.export.source import Source
from onnxtool.export.static import StaticCheckpoint
from onnxtool.infer import SparseVectors, load
from tests.infer.tiny_models import VOCABULARY, write_checkpoint

V = len(VOCABULARY)
VECTORS = np.random.default_rng(0).standard_normal((V, 6)).astype(np.float32)
TEXTS = ["the cat sat on the mat", "red", "dog dog dog cat"]


def written(
    folder: Path, kind: str, tensors: dict[str, NDArray[Any]], *behind: str, settings: dict[str, Any] | None = None
) -> Path:
    """Write a table with the tokenizer of the tests, and modules behind it."""
    write_checkpoint(folder)
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("tokenizer.json", "tokenizer_config.json"):
            path.unlink()
    listed = [{"path": ".", "type": f"sentence_transformers.models.{kind}"}]
    listed += [
        {"path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(behind, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings or {}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def opened(folder: Path, **options: Any) -> StaticCheckpoint:
    """Read a table."""
    return StaticCheckpoint.open_static(Source.find(str(folder)), **options)


def test_a_text_is_the_mean_of_the_vectors_of_its_tokens(tmp_path: Path) -> None:
    """Without the tokens around a text, and scaled where the checkpoint scales it: as StaticEmbedding."""
    folder = written(tmp_path / "table", "StaticEmbedding", {"embedding.weight": VECTORS}, "Normalize")
    report = export_model(ExportOptions(str(folder), output=tmp_path / "model.onnx", exporter="torchscript"))
    assert (report.task, report.head, report.architecture) == ("sentence-similarity", "embedding", "StaticEmbedding")
    assert report.verification is not None
    assert report.verification.passed
    theirs = reference.StaticEmbedding(Tokenizer.from_file(str(folder / "tokenizer.json")), embedding_weights=VECTORS)
    expected = theirs(theirs.preprocess(TEXTS))["sentence_embedding"].detach()
    expected = torch.nn.functional.normalize(expected).numpy()
    found = load(tmp_path / "model.onnx").encode(TEXTS)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)


def test_a_text_weighs_its_tokens_once(tmp_path: Path) -> None:
    """As SparseStaticEmbedding, a sparse encoder by itself."""
    weights = np.arange(V, dtype=np.float32)
    folder = written(tmp_path / "table", "SparseStaticEmbedding", {"weight": weights})
    report = export_model(ExportOptions(str(folder), output=tmp_path / "model.onnx", exporter="torchscript"))
    assert (report.task, report.head) == ("sparse-encoding", "none")
    found = load(tmp_path / "model.onnx").encode(TEXTS)
    assert isinstance(found, SparseVectors)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token=VOCABULARY[0])
    theirs = SparseReference(tokenizer, torch.from_numpy(weights))
    expected = theirs(theirs.preprocess(TEXTS))["sentence_embedding"].detach().numpy()
    np.testing.assert_array_equal(found.to_dense()[:, :V], expected)


def test_rows_of_model2vec_are_folded_into_one_table(tmp_path: Path) -> None:
    """As sentence-transformers folds them."""
    generator = np.random.default_rng(1)
    rows, weights = generator.integers(4, size=V), generator.random(V).astype(np.float32)
    tensors: dict[str, NDArray[Any]] = {"embeddings": VECTORS[:4], "mapping": rows, "weights": weights}
    expected = reference.StaticEmbedding._fold_model2vec_weights(VECTORS[:4], rows, weights).numpy()
    np.testing.assert_array_equal(opened(written(tmp_path, "StaticEmbedding", tensors)).table, expected)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"other": VECTORS}, "embedding.weight in model.safetensors of .* is missing"),
        ({"embedding.weight": VECTORS[0]}, r"is of shape \[6\]"),
        ({"embedding.weight": np.full((V, 2), np.nan, np.float32)}, "not finite"),
        ({"embedding.weight": np.zeros((0, 4), np.float32)}, r"of shape \[0, 4\]"),
        ({"embeddings": VECTORS, "mapping": np.array([0, V])}, "mapping in .* names rows that do not exist"),
        ({"embeddings": VECTORS, "mapping": np.array([0, -1])}, "mapping in .* names rows that do not exist"),
        ({"embeddings": VECTORS, "weights": VECTORS[0]}, r"weights in .* is of shape \[6\]"),
    ],
)
def test_a_table_of_vectors_that_cannot_be_read_is_refused(
    tmp_path: Path, tensors: dict[str, NDArray[Any]], reason: str
) -> None:
    """By the file that it should be in."""
    with pytest.raises(OnnxtoolError, match=reason):
        opened(written(tmp_path, "StaticEmbedding", tensors))


def test_a_table_without_weights_or_tokenizer_is_refused(tmp_path: Path) -> None:
    """A pickle is not read, a truncated file is one clear error."""
    folder = written(tmp_path, "StaticEmbedding", {"embedding.weight": VECTORS})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(OnnxtoolError, match="cannot read"):
        opened(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(OnnxtoolError, match="only in a pickle"):
        opened(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(OnnxtoolError, match="has no weights"):
        opened(folder)
    save_file({"embedding.weight": VECTORS}, weights)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot load"):
        opened(folder).load_tokenizer()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        opened(folder).load_tokenizer()


@pytest.mark.parametrize(
    ("kind", "behind", "settings", "options", "reason"),
    [
        ("StaticEmbedding", ("LSTM",), {}, {}, "computes LSTM after a table of vectors"),
        ("StaticEmbedding", ("Pooling",), {}, {}, "computes Pooling after a table of vectors"),
        ("StaticEmbedding", (), {}, {"task": "fill-mask"}, "--task fill-mask was passed"),
        ("StaticEmbedding", (), {}, {"target": "fastembed", "output": None}, "takes no table of vectors"),
        ("SparseStaticEmbedding", ("Normalize",), {}, {}, "computes Normalize after its term weights"),
        ("SparseStaticEmbedding", (), {"max_active_dims": 3}, {}, "computes max_active_dims after its term weights"),
    ],
)
def test_what_is_not_computed_with_a_table_is_refused(
    tmp_path: Path, kind: str, behind: tuple[str, ...], settings: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """By its name; no file is left."""
    tensors = {"embedding.weight": VECTORS} if kind == "StaticEmbedding" else {"weight": VECTORS[:, 0].copy()}
    folder = written(tmp_path / "table", kind, tensors, *behind, settings=settings)
    with pytest.raises((CheckpointError, TargetError), match=reason):
        export_model(ExportOptions(str(folder), **{"output": tmp_path / "out" / "model.onnx", **options}))
    assert not (tmp_path / "out").exists()
