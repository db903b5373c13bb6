"""A corpus becomes a folder of vectors: the right ones, in the order of its lines, in each format."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool.encoding import CorpusOptions, encode_corpus, splits
from onnxtool.encoding.report import CorpusReport
from onnxtool.encoding.shards import quantize_weights
from onnxtool.errors import InputError, OnnxtoolError, OutputExistsError, OutputWriteError
from onnxtool.model_file.metadata import stamp
from tests.encoding.corpora import (
    V,
    contents_of,
    dense_model,
    expected_mean,
    expected_terms,
    lines_of,
    make_texts,
    sparse_model,
    told,
    write_corpus,
)
from tests.infer.tiny_models import (
    TinyModel,
    model_for,
    table,
    tokenizer_stamp,
    write_checkpoint,
    write_model,
)

TEXTS = make_texts(100)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A hundred texts of uneven length."""
    return write_corpus(tmp_path / "corpus.jsonl", TEXTS)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 texts, so that there are several."""
    monkeypatch.setattr(splits, "WINDOW_TEXTS", 16)


def _encode(model: Path, corpus: Path, **options: Any) -> CorpusReport:
    return encode_corpus(model, corpus, corpus.parent / "vectors", CorpusOptions(provider="cpu", **options))


def _vectors(corpus: Path) -> tuple[list[str], Any]:
    """Return ids and array of an output of arrays."""
    folder = corpus.parent / "vectors"
    names = [line["id"] for line in lines_of(folder)]
    return names, np.concatenate([np.load(path, allow_pickle=False) for path in sorted(folder.glob("*.npy"))])


@pytest.mark.usefixtures("small_windows")
def test_sparse_vectors_are_those_of_the_formula_as_anserini_counts_them(tmp_path: Path, corpus: Path) -> None:
    """Whole numbers by the term, without framing tokens and weights of 0, in the order of the corpus."""
    report = _encode(sparse_model(tmp_path), corpus, shard_size=40, batch_tokens=32)
    lines = lines_of(tmp_path / "vectors")
    assert [line["id"] for line in lines] == [f"d{place}" for place in range(100)]
    assert [line["contents"] for line in lines] == TEXTS
    assert [line["vector"] for line in lines] == [expected_terms(text) for text in TEXTS]
    assert report.files == ("part-00000.jsonl", "part-00000_00001.jsonl", "part-00000_00002.jsonl")
    assert (report.num_texts, report.num_encoded, report.resumed) == (100, 100, False)


def test_weights_are_rounded_as_java_rounds_them() -> None:
    """Half a step goes up, in float32 before it is rounded; 5 is 256 steps."""
    weights = np.array([0.0, 0.009765625, 0.0097656, 0.029296875, 5.0, 3.3333333], np.float32)
    assert quantize_weights(weights).tolist() == [0, 1, 0, 2, 256, 171]


def test_float_weights_are_written_as_they_are(tmp_path: Path, corpus: Path) -> None:
    """The digits that are written are that float32 again."""
    _encode(sparse_model(tmp_path), corpus, weights="float", contents=False)
    for line, text in zip(lines_of(tmp_path / "vectors"), TEXTS, strict=True):
        assert set(line) == {"id", "vector"}
        quantized = quantize_weights(np.array(list(line["vector"].values()), np.float32)).tolist()
        assert {term: weight for term, weight in zip(line["vector"], quantized, strict=True) if weight} == (
            expected_terms(text)
        )


def test_special_tokens_are_terms_where_that_is_asked_for(tmp_path: Path, corpus: Path) -> None:
    """[CLS] is in every text, and its row gives weight to some of the framing tokens."""
    _encode(sparse_model(tmp_path), corpus, keep_special=True)
    assert any({"[PAD]", "[CLS]", "[SEP]"} & set(line["vector"]) for line in lines_of(tmp_path / "vectors"))


@pytest.mark.usefixtures("small_windows")
def test_embeddings_are_arrays_with_a_file_of_ids(tmp_path: Path, corpus: Path) -> None:
    """float32 [N, H] by the order of the corpus, which numpy opens; the ids stand beside it."""
    _encode(dense_model(tmp_path), corpus, shard_size=40)
    names, vectors = _vectors(corpus)
    assert names == [f"d{place}" for place in range(100)]
    assert vectors.dtype == np.float32
    # A mean of at most 14 numbers around 1 in float32.
    np.testing.assert_allclose(vectors, np.stack([expected_mean(text) for text in TEXTS]), atol=1e-6)


@pytest.mark.usefixtures("small_windows")
def test_embeddings_are_a_table_where_parquet_is_asked_for(tmp_path: Path, corpus: Path) -> None:
    """Columns id, contents and vector, a list of fixed size."""
    import pyarrow.parquet as pq

    _encode(dense_model(tmp_path), corpus, output_format="parquet", contents=True)
    found = pq.read_table(tmp_path / "vectors")
    assert found.column_names == ["id", "contents", "vector"]
    assert found.column("contents").to_pylist() == TEXTS
    assert str(found.schema.field("vector").type) == "fixed_size_list<element: float>[4]"
    vectors = np.array(found.column("vector").to_pylist())
    np.testing.assert_allclose(vectors, np.stack([expected_mean(text) for text in TEXTS]), atol=1e-6)


def test_embeddings_are_lines_where_jsonl_is_asked_for(tmp_path: Path, corpus: Path) -> None:
    """A list of numbers, as Anserini's JsonDenseVectorCollection reads it."""
    _encode(dense_model(tmp_path), corpus, output_format="jsonl")
    vectors = np.array([line["vector"] for line in lines_of(tmp_path / "vectors")])
    np.testing.assert_allclose(vectors, np.stack([expected_mean(text) for text in TEXTS]), atol=1e-6)


@pytest.mark.parametrize("output_format", ["jsonl", "npy", "parquet"])
@pytest.mark.usefixtures("small_windows")
def test_the_number_of_workers_changes_no_byte(tmp_path: Path, corpus: Path, output_format: str) -> None:
    """Nor does running again into another folder."""
    model = dense_model(tmp_path)
    found: list[dict[str, bytes]] = []
    for workers in (1, 2, 5, 2):
        output = tmp_path / f"{len(found)}"
        options = CorpusOptions(provider="cpu", workers=workers, output_format=output_format, shard_size=40)
        encode_corpus(model, corpus, output, options)
        found.append(contents_of(output))
    assert all(contents == found[0] for contents in found)


def test_sorted_texts_are_padded_little_and_that_is_said(tmp_path: Path, corpus: Path) -> None:
    """Counted by hand: texts of one length fill a batch of 32 tokens, or share it with the next length."""
    report = _encode(dense_model(tmp_path), corpus, batch_tokens=32)
    lengths = sorted(len(text.split()) + 2 for text in TEXTS)
    assert report.num_tokens == sum(lengths)
    num_run, batch = 0, list[int]()
    for length in [*lengths, 33]:
        if batch and (len(batch) + 1) * length > 32:
            num_run += len(batch) * max(batch)
            batch = []
        batch.append(length)
    assert report.padding_share == pytest.approx(1 - sum(lengths) / num_run)
    assert report.padding_share < 0.05


def test_a_graph_of_fixed_shape_encodes_a_corpus(tmp_path: Path, corpus: Path) -> None:
    """Batches are filled up, and what fills them counts as padding."""
    report = _encode(dense_model(tmp_path, fixed=(8, 16)), corpus)
    np.testing.assert_allclose(_vectors(corpus)[1], np.stack([expected_mean(text) for text in TEXTS]), atol=1e-6)
    assert report.padding_share == pytest.approx(1 - report.num_tokens / (13 * 8 * 16))


def test_a_graph_without_a_mask_runs_texts_of_one_length_together(tmp_path: Path, corpus: Path) -> None:
    """There is nothing to hide padding by."""
    report = _encode(dense_model(tmp_path, inputs=("input_ids",)), corpus)
    np.testing.assert_allclose(_vectors(corpus)[1], np.stack([expected_mean(text) for text in TEXTS]), atol=1e-6)
    assert report.padding_share == 0


def test_rejected_lines_are_counted_and_written_beside_the_folder(tmp_path: Path, corpus: Path) -> None:
    """By file, line, reason and id; the others are encoded."""
    lines = corpus.read_text().splitlines()
    lines[3:3] = ["{", '{"id": "d0", "contents": "again"}', '{"id": "x", "contents": 7}']
    corpus.write_text("\n".join(lines))
    report = _encode(dense_model(tmp_path), corpus)
    assert report.rejects == {
        "repeats the id of an earlier line": 1,
        "has no contents that is a string": 1,
        "is not JSON": 1,
    }
    rejects = [json.loads(line) for line in Path(report.rejects_path).read_text().splitlines()]
    assert [(reject["file"], reject["line"], reject["id"]) for reject in rejects] == [
        ("corpus.jsonl", 4, None),
        ("corpus.jsonl", 5, "d0"),
        ("corpus.jsonl", 6, "x"),
    ]
    assert report.num_texts == 100
    assert _vectors(corpus)[0] == [f"d{place}" for place in range(100)]
    assert Path(report.rejects_path) == tmp_path / "vectors.rejects.jsonl"


def test_a_text_without_tokens_is_rejected_also_where_a_run_goes_on(tmp_path: Path) -> None:
    """A tokenizer that frames nothing finds none in a control character; the manifest remembers the line."""
    model = dense_model(tmp_path)
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokenizer |= {
        "post_processor": None,
        "normalizer": {"type": "Replace", "pattern": {"String": "\x07"}, "content": ""},
    }
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    stamp(model, tokenizer_stamp(tmp_path / "model"))
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a cat", "\x07", "a dog"])
    first = _encode(model, corpus)
    assert (first.num_texts, first.rejects) == (2, {"has contents without any token": 1})
    before = contents_of(tmp_path / "vectors")
    again = _encode(model, corpus)
    assert (again.num_encoded, again.rejects) == (0, first.rejects)
    assert contents_of(tmp_path / "vectors") == before


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_corpus_of_other_fields_is_told_which_count(tmp_path: Path, suffix: str) -> None:
    """The error lists the fields that the lines have, and those that hold an id and a text."""
    rows, corpus = (
        [{"docid": "1", "passage": "a cat"}, {"docid": "2", "passage": "a dog"}],
        tmp_path / f"corpus.{suffix}",
    )
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), corpus)
    else:
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        InputError, match=r"its name is id or _id, and the line's fields are docid, passage \(2 lines\)"
    ):
        _encode(dense_model(tmp_path), corpus)


def test_vectors_do_not_go_to_a_file(tmp_path: Path) -> None:
    """The error names the file, and does not speak of space."""
    (tmp_path / "vectors").write_text("mine")
    with pytest.raises(OutputWriteError, match=r"vectors is a file") as caught:
        _encode(dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", ["a cat"]))
    assert "room" not in caught.value.hint


def test_a_corpus_of_rejected_lines_alone_has_no_vectors(tmp_path: Path) -> None:
    """It is an error that says why, for each line in the file of rejects; and so is one without any line."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("{\n")
    with pytest.raises(InputError, match=r"no line of .* gave a text: is not JSON: .* \(1 line\)"):
        _encode(dense_model(tmp_path), corpus)
    assert "is not JSON" in (tmp_path / "vectors.rejects.jsonl").read_text()
    corpus.write_text("\n \n")
    with pytest.raises(InputError, match="has no texts"):
        encode_corpus(dense_model(tmp_path), corpus, tmp_path / "other", CorpusOptions(provider="cpu"))


def test_a_stage_goes_also_where_the_folder_is_of_another_command(tmp_path: Path) -> None:
    """A run that was killed over a finished one left it; the next one is refused, and leaves nothing hidden."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "one"}\n')
    model = dense_model(tmp_path)
    encode_corpus(model, corpus, tmp_path / "vectors", CorpusOptions(provider="cpu"))
    half = tmp_path / ".vectors.0123abcd.partial"
    half.mkdir()
    corpus.write_text('{"id": "2", "contents": "three"}\n')
    with pytest.raises(OnnxtoolError):
        encode_corpus(model, corpus, tmp_path / "vectors", CorpusOptions(provider="cpu"))
    assert not half.exists()


@pytest.mark.usefixtures("small_windows")
def test_progress_is_told_after_each_batch(tmp_path: Path, corpus: Path) -> None:
    """Texts and share grow to the end, and the time left is known from the second one on."""
    options = CorpusOptions(provider="cpu", shard_size=40, batch_tokens=64)
    with told() as heard:
        encode_corpus(dense_model(tmp_path), corpus, tmp_path / "vectors", options)
    texts, shares = ([getattr(progress, name) for progress in heard] for name in ("num_texts", "share"))
    assert len(heard) > 8
    assert texts == sorted(texts)
    assert shares == sorted(shares)
    assert (texts[-1], shares[-1]) == (100, pytest.approx(1.0))
    # Each window of sixteen texts is about as many bytes.
    assert abs(shares[texts.index(32)] - 0.32) < 0.1
    assert [progress.seconds_left is None for progress in heard] == [True] + [False] * (len(heard) - 1)


def test_truncated_texts_are_counted(tmp_path: Path) -> None:
    """With the limit and where it is written."""
    model = dense_model(tmp_path, positions=8)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a cat sat", "a b c d e f g h i j k"])
    report = _encode(model, corpus)
    assert report.num_truncated == 1
    cut = "1 texts were cut to 8 tokens (the rows of position_embeddings.weight)"
    assert report.notes == (f"{cut}; --long window splits them into passages",)


def test_models_and_formats_without_vectors_are_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written."""
    classifier = write_model(tmp_path / "c", model_for("text-classification", table(V, 3), "logits", pooled=True))
    for model, options, reason in (
        (classifier, {}, "is for text-classification, and gives no vector"),
        (sparse_model(tmp_path / "s"), {"output_format": "npy"}, "gives term weights, which npy cannot store"),
        (dense_model(tmp_path / "d"), {"weights": "int", "keep_special": True}, "--weights and --keep_special was"),
    ):
        with pytest.raises(InputError, match=reason):
            _encode(model, corpus, **options)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="Parquet needs pyarrow") as caught:
        _encode(dense_model(tmp_path / "d"), corpus, output_format="parquet")
    assert "pip install" in caught.value.hint
    assert not (tmp_path / "vectors").exists()


def test_a_note_says_when_the_graph_gives_all_logits(tmp_path: Path, corpus: Path) -> None:
    """Pooled in the graph they never leave the session."""
    assert "--head splade" in _encode(sparse_model(tmp_path), corpus).notes[-1]
    pooled = TinyModel(
        np.abs(table(V, V)),
        "sparse",
        pooled=True,
        metadata={"onnxtool.task": "sparse-encoding", "onnxtool.files": "model"},
    )
    write_checkpoint(tmp_path / "pooled" / "model")
    report = encode_corpus(
        pooled.write(tmp_path / "pooled" / "model.onnx"), corpus, tmp_path / "p", CorpusOptions(provider="cpu")
    )
    assert report.notes == ()


def test_files_of_others_are_never_touched(tmp_path: Path, corpus: Path) -> None:
    """Not with force either."""
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(OutputExistsError, match=r"such as thesis\.txt"):
            _encode(dense_model(tmp_path), corpus, force=force)
    assert contents_of(tmp_path / "vectors") == {"thesis.txt": b"years of work"}


def test_a_folder_of_another_command_is_refused_and_with_force_made_anew(tmp_path: Path, corpus: Path) -> None:
    """The error says what is not the same; with force the files are those of a run into an empty folder."""
    model, other = dense_model(tmp_path / "a"), dense_model(tmp_path / "b", positions=50)
    _encode(model, corpus, output_format="jsonl")
    before = contents_of(tmp_path / "vectors")
    longer = write_corpus(tmp_path / "longer.jsonl", [*TEXTS, "a cat"])
    for asked, reason in (
        ((model, corpus, {}), "--output_format: jsonl, now npy"),
        ((other, corpus, {"output_format": "jsonl"}), "another model"),
        ((model, longer, {"output_format": "jsonl"}), "longer.jsonl: none, now 5490"),
        ((model, corpus, {"output_format": "jsonl", "shard_size": 10}), "shard_size: 4096, now 10"),
    ):
        with pytest.raises(OutputExistsError, match=reason):
            _encode(asked[0], asked[1], **asked[2])
        assert contents_of(tmp_path / "vectors") == before
    _encode(model, corpus, force=True)
    encode_corpus(model, corpus, tmp_path / "fresh", CorpusOptions(provider="cpu"))
    assert contents_of(tmp_path / "vectors") == contents_of(tmp_path / "fresh")


def test_a_corpus_that_another_run_replaces_meanwhile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path
) -> None:
    """Its manifest is gone by the time that it is reported."""
    monkeypatch.setattr("onnxtool.encoding.run.read_manifest", lambda _path: None)
    with pytest.raises(OutputExistsError, match="another run is replacing"):
        _encode(dense_model(tmp_path), corpus)


def test_a_report_has_figures_alone(tmp_path: Path, corpus: Path) -> None:
    """Its fields are what JSON has, and what they say adds up."""
    report = _encode(dense_model(tmp_path), corpus)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["num_texts"] == 100
    assert report.size_bytes == sum(path.stat().st_size for path in (tmp_path / "vectors").iterdir())
    assert report.texts_per_s == pytest.approx(100 / report.seconds)
    assert report.peak_rss_bytes > 0
