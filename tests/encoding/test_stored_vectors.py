"""A corpus is stored as codes or bits, with the ranges beside it, and queries are stored by the same ranges."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from onnxtool.checkpoint.quantized_vectors import VectorType, read_ranges, restore_vectors
from onnxtool.encoding import CorpusOptions, by_document, encode_corpus, read_shards, splits
from onnxtool.encoding.report import CorpusReport
from onnxtool.encoding.shards import quantize_weights
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.infer import SparseVectors, TokenVectors, encode, load
from tests.encoding.corpora import V, contents_of, make_texts, sparse_model, stopped_after, write_corpus
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import POOLED, model_for, rows_of, table, write_model

TEXTS = make_texts(100)
TYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
WIDTH = 16


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An embedder of 16 numbers, scaled to length 1."""
    return write_model(
        tmp_path / "m", model_for("sentence-similarity", table(V, WIDTH), "last_hidden_state"), modules=POOLED
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A hundred texts of uneven length."""
    return write_corpus(tmp_path / "corpus.jsonl", TEXTS)


def _encode(model: Path, corpus: Path, name: str = "vectors", **options: Any) -> CorpusReport:
    if str(options.get("vectors_as")).endswith("int8") and "ranges" not in options:
        options = {"calibration": corpus, **options}
    return encode_corpus(model, corpus, corpus.parent / name, CorpusOptions(provider="cpu", **options))


def _stored(manifest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(manifest).read_text())["identity"]["vectors"]
    return found


@pytest.mark.parametrize(("vectors_as", "dimensions"), list(zip(TYPES, (8, None, None, 8, 8, None), strict=True)))
def test_a_corpus_and_its_queries_are_stored_alike(
    tmp_path: Path, model: Path, corpus: Path, vectors_as: str, dimensions: int | None
) -> None:
    """In arrays and tables; the manifest says what they are, and queries take the ranges from it."""
    report = _encode(model, corpus, vectors_as=vectors_as, dimensions=dimensions)
    found = np.load(tmp_path / "vectors" / "part-00000.npy")
    width = dimensions or WIDTH
    floats = rows_of(encode(model, TEXTS, provider="cpu"))[:, :width]
    if dimensions:
        floats = floats / np.linalg.norm(floats, axis=1, keepdims=True)
    ranges = np.stack([floats.min(axis=0), floats.max(axis=0)]) if vectors_as.endswith("int8") else None
    wanted = VectorType.of(vectors_as, ranges).apply(floats)
    assert found.dtype == wanted.dtype
    # The tiny model sums in another order in another batch: a code in 1,600 may be the next one.
    assert (found != wanted).mean() < 2e-3

    stored = _stored(report.manifest)
    assert (stored["as"], stored["dtype"], stored["dimensions"]) == (vectors_as, str(found.dtype), width)
    assert (report.vectors_as, report.dimensions) == (vectors_as, width)
    own: dict[str, Any] = {"ranges": report.manifest} if ranges is not None else {}
    queries = rows_of(encode(model, TEXTS, provider="cpu", vectors_as=vectors_as, dimensions=dimensions, **own))
    assert queries.dtype == found.dtype
    assert (queries != found).mean() < 2e-3

    options = {"ranges": Path(report.manifest)} if ranges is not None else {}
    _encode(model, corpus, "t", vectors_as=vectors_as, dimensions=dimensions, output_format="parquet", **options)
    table = pq.read_table(tmp_path / "t")
    assert table.column("vector").to_pylist() == found.tolist()
    # The table alone says what its codes stand for.
    described = json.loads(table.schema.metadata[b"onnxtool.vectors"])
    assert described == stored
    of_table = {"ranges": np.array(described["ranges"], np.float32)} if own else {}
    restored = restore_vectors(found, described["as"], **of_table)
    np.testing.assert_array_equal(restored, restore_vectors(found, vectors_as, **own))


@pytest.mark.parametrize(
    ("kind", "output_format"),
    [
        *itertools.product(["dense", "codes", "tokens", "passages"], ["npy", "parquet"]),
        ("terms", "parquet"),
        ("whole weights", "parquet"),
    ],
)
def test_what_is_written_is_read_shard_by_shard(
    tmp_path: Path, model: Path, corpus: Path, kind: str, output_format: str
) -> None:
    """Ids and vectors of each, whatever they are, as encoding the texts gives them."""
    if kind in ("terms", "whole weights"):
        model = sparse_model(tmp_path / "sparse")
    elif kind == "tokens":
        model = encoder(tmp_path / "late")
    settings: dict[str, dict[str, Any]] = {
        "codes": {"vectors_as": "binary"},
        "whole weights": {"weights": "int"},
        "passages": {"long": "window"},
    }
    more = settings.get(kind, {})
    options = CorpusOptions(provider="cpu", shard_size=30, output_format=output_format, **more)
    encode_corpus(model, corpus, tmp_path / "v", options)
    loaded = load(model, provider="cpu")
    vocabulary = loaded.tokenizer.vocabulary
    found = list(read_shards(tmp_path / "v", vocabulary))
    assert [len(shard.ids) for shard in found] == [30, 30, 30, 10]
    assert [name.removesuffix("#0") for shard in found for name in shard.ids] == [f"d{place}" for place in range(100)]
    if kind == "passages":
        grouped = by_document(found[0])
        assert grouped.ids == [f"d{place}" for place in range(30)]
        assert grouped.starts is not None
        assert grouped.starts.tolist() == list(range(30))
    wanted: Any = loaded.encode(TEXTS, task=loaded.task_of(None), vectors_as=more.get("vectors_as"))
    parts: list[Any] = [shard.vectors for shard in found]
    if isinstance(wanted, SparseVectors):
        together = SparseVectors.concatenate(parts)
        weights: Any = quantize_weights(wanted.weights) if more else wanted.weights
        kept = weights != 0
        np.testing.assert_allclose(together.weights, weights[kept], atol=1e-6)
        assert together.indices.tolist() == wanted.indices[kept].tolist()
        assert together.indptr.tolist() == np.concatenate([[0], np.cumsum(kept)])[wanted.indptr].tolist()
    elif isinstance(wanted, TokenVectors):
        together_tokens = TokenVectors.concatenate(parts)
        assert together_tokens.indptr.tolist() == wanted.indptr.tolist()
        np.testing.assert_allclose(together_tokens.vectors, wanted.vectors, atol=1e-6)
    else:
        # As above, a bit of a number near 0 may be another one.
        assert (np.abs(np.concatenate(parts).astype(float) - wanted) > 1e-6).mean() < 2e-3


def test_a_stopped_run_over_codes_goes_on(tmp_path: Path, model: Path, corpus: Path, monkeypatch: Any) -> None:
    """The ranges are measured again, and are the same; with other ones it is another command."""
    monkeypatch.setattr(splits, "WINDOW_TEXTS", 16)
    options = CorpusOptions(provider="cpu", vectors_as="int8", calibration=corpus, shard_size=20)
    with pytest.raises(KeyboardInterrupt), stopped_after(51):
        encode_corpus(model, corpus, tmp_path / "vectors", options)
    report = encode_corpus(model, corpus, tmp_path / "vectors", options)
    assert report.resumed
    assert 0 < report.num_encoded < 100
    encode_corpus(model, corpus, tmp_path / "whole", options)
    assert contents_of(tmp_path / "vectors") == contents_of(tmp_path / "whole")
    np.save(tmp_path / "r.npy", read_ranges(Path(report.manifest)) * 2)
    with pytest.raises(OutputExistsError, match="--ranges: others than before"):
        _encode(model, corpus, vectors_as="int8", ranges=tmp_path / "r.npy", shard_size=20)


def test_vectors_of_tokens_share_their_ranges(tmp_path: Path, corpus: Path) -> None:
    """Those of all tokens of all texts; a stopped run goes on."""
    path = encoder(tmp_path / "late")
    options = CorpusOptions(provider="cpu", vectors_as="uint8", calibration=corpus, shard_size=30)
    with pytest.raises(KeyboardInterrupt), stopped_after(51):
        encode_corpus(path, corpus, tmp_path / "vectors", options)
    report = encode_corpus(path, corpus, tmp_path / "vectors", options)
    assert report.resumed
    encode_corpus(path, corpus, tmp_path / "whole", options)
    assert contents_of(tmp_path / "vectors") == contents_of(tmp_path / "whole")
    floats = load(path, provider="cpu").encode(TEXTS, task="document")
    assert isinstance(floats, TokenVectors)
    ranges = np.stack([floats.vectors.min(axis=0), floats.vectors.max(axis=0)])
    stored = _stored(report.manifest)
    assert (stored["of"], stored["dtype"]) == ("tokens", "uint8")
    np.testing.assert_array_equal(np.array(stored["ranges"], np.float32), ranges)
    found = TokenVectors.concatenate([shard.vectors for shard in read_shards(tmp_path / "vectors")])  # type: ignore[misc]
    np.testing.assert_array_equal(found.indptr, floats.indptr)
    np.testing.assert_array_equal(found.vectors, VectorType.of("uint8", ranges).apply(floats.vectors))


def test_ranges_of_few_texts_are_said(tmp_path: Path, model: Path, corpus: Path) -> None:
    """A hundred are enough."""
    assert _encode(model, corpus, "a", vectors_as="int8").notes == ()
    few = write_corpus(tmp_path / "few.jsonl", TEXTS[:99])
    (note,) = _encode(model, corpus, "b", vectors_as="int8", calibration=few).notes
    assert "measured on 99 vectors, which is few" in note


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vectors_as": "int8"}, "need the range of each number"),
        ({"vectors_as": "binary", "ranges": Path("r.npy")}, "--ranges is for int8 and uint8 vectors"),
        ({"calibration": Path("t.txt")}, "--calibration is for int8 and uint8 vectors"),
        ({"vectors_as": "uint8", "ranges": Path("r.npy"), "calibration": Path("t.txt")}, "both were passed"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options: dict[str, Any], reason: str) -> None:
    """Before a model is loaded, with the way out."""
    with pytest.raises(InputError, match=reason) as caught:
        CorpusOptions(**options)
    assert caught.value.hint


def test_vectors_that_cannot_be_stored_so_leave_no_file(tmp_path: Path, model: Path, corpus: Path) -> None:
    """It shows on a first text, before the folder is made."""
    np.save(tmp_path / "r.npy", np.array([[0.0] * 16, [1.0] * 16]))
    with pytest.raises(InputError, match="ranges cover 16 numbers, but the vectors have 8"):
        _encode(model, corpus, vectors_as="int8", ranges=tmp_path / "r.npy", dimensions=8)
    with pytest.raises(InputError, match="the vectors of this model have 16"):
        _encode(model, corpus, dimensions=16)
    assert not (tmp_path / "vectors").exists()


@pytest.mark.parametrize("options", [{"vectors_as": "binary"}, {"vectors_as": "int8"}, {"dimensions": 8}], ids=str)
def test_weights_of_terms_are_no_embedding(tmp_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    """Neither codes nor bits, nor a part of them."""
    with pytest.raises(InputError, match="the model gives term weights"):
        _encode(sparse_model(tmp_path), corpus, **options)
