"""A graph that stores its vectors as codes or bits gives them as they are, and says what their similarities are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import InputError
from onnxtool.graph.builder import Builder
from onnxtool.infer import load, restore_vectors
from onnxtool.model_file.metadata import RANGES_KEY, VECTORS_KEY
from onnxtool.model_file.weights import load_model, write_inline
from tests.infer.tiny_models import POOLED, TEXTS, VOCABULARY, model_for, rows_of, table, write_model

WIDTH = 16
NAMES = ("float16", "int8", "uint8", "binary", "ubinary")


def _write(folder: Path, stored: VectorType | None, **metadata: str) -> Path:
    """Write a graph that sums rows of a table over a text, and stores the sum so."""
    model = model_for("sentence-similarity", table(len(VOCABULARY), WIDTH), "sentence_embedding", pooled=True)
    path = write_model(folder, model, modules=POOLED, sentence_bert={"max_seq_length": 20})
    if stored is None:
        return path
    graph = load_model(path)
    (vectors,) = graph.graph.outputs
    vectors.name = "sums"
    output = stored.build(Builder(graph.graph, ir.DataType.FLOAT), vectors)
    output.name, output.dtype, output.shape = "sentence_embedding", ir.DataType.from_numpy(stored.dtype), None
    graph.graph.outputs[:] = [output]
    graph.metadata_props.update(stored.metadata | metadata)
    write_inline(graph, path)
    return path


def _stored(name: str, floats: NDArray[Any]) -> VectorType:
    return VectorType.of(name, np.stack([floats.min(0), floats.max(0)]) if name.endswith("int8") else None)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_given_as_they_are_stored(tmp_path: Path, name: str) -> None:
    """By encode, in a report, and in a corpus, whose manifest says what they are."""
    floats = rows_of(load(_write(tmp_path / "f", None), provider="cpu").encode(TEXTS))
    stored = _stored(name, floats)
    path = _write(tmp_path / "m", stored)
    model = load(path, provider="cpu")
    found = model.encode(TEXTS)
    np.testing.assert_array_equal(found, stored.apply(floats))
    assert rows_of(found).dtype == stored.dtype

    report = model.answer(TEXTS)
    assert [list(answer.vector) for answer in report.answers] == [
        pytest.approx(row, rel=1e-3) for row in rows_of(found).tolist()
    ]
    assert all(isinstance(value, int) for value in report.answers[0].vector) == (name != "float16")
    assert (f"the vectors are {name}" in " ".join(report.notes)) == (name != "float16")
    codes = restore_vectors(rows_of(found), name) if "binary" in name else rows_of(found).astype(np.float64)
    unit = codes / np.linalg.norm(codes, axis=1, keepdims=True)
    np.testing.assert_allclose(report.similarities, unit @ unit.T, atol=1e-6)

    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    corpus = encode_corpus(path, tmp_path / "corpus.txt", tmp_path / "v", CorpusOptions(provider="cpu"))
    np.testing.assert_array_equal(np.load(tmp_path / "v" / "part-00000.npy"), found)
    assert (corpus.vectors_as, corpus.dimensions) == (name, WIDTH)


def test_what_a_stored_vector_cannot_become_is_refused(tmp_path: Path) -> None:
    """Other codes, a part of it, or one of several windows."""
    model = load(_write(tmp_path, VectorType.of("binary")), provider="cpu")
    refused: dict[str, dict[str, Any]] = {
        "the graph itself gives binary vectors": {"vectors_as": "float32"},
        "gives binary vectors": {"dimensions": 8},
        "those of windows cannot be put together": {"long": "window"},
        "ranges were passed, and vectors stay": {"ranges": np.ones((2, WIDTH))},
    }
    long = " ".join(["cat"] * 60)
    for reason, settings in refused.items():
        with pytest.raises(InputError, match=reason) as caught:
            model.encode([long], **settings)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({VECTORS_KEY: "int3"}, "cannot be stored as 'int3'"),
        ({VECTORS_KEY: "int8"}, "need the range"),
        ({VECTORS_KEY: "int8", RANGES_KEY: "[[1"}, "is not JSON"),
        ({VECTORS_KEY: "int8", RANGES_KEY: "[" * 100_000}, "is not JSON"),
        ({VECTORS_KEY: "int8", RANGES_KEY: '["a", "b"]'}, "holds <U1"),
        ({VECTORS_KEY: "int8", RANGES_KEY: "[[0, NaN], [1, 1]]"}, "not finite"),
    ],
    ids=str,
)
def test_metadata_is_not_believed(tmp_path: Path, metadata: dict[str, str], reason: str) -> None:
    """A file that says what cannot be ends in one error."""
    with pytest.raises(InputError, match=reason):
        load(_write(tmp_path, VectorType.of("binary"), **metadata))
