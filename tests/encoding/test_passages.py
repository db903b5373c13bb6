"""A text that is longer than the model takes becomes passages, each with an id, a place in the text and a vector."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit, ReadOptions
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.encoding import (
    CorpusOptions,
    PartOptions,
    VectorOptions,
    encode_corpus,
    encode_part,
    merge_parts,
    read_shards,
    splits,
)
from onnxtool.encoding.pipeline import passages
from onnxtool.encoding.report import CorpusReport
from onnxtool.encoding.sources import Document
from onnxtool.errors import InputError
from onnxtool.infer import load
from tests.encoding.corpora import V, contents_of, lines_of, make_texts, sparse_model, stopped_after, told, write_corpus
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import VOCABULARY, model_for, table, write_checkpoint, write_model

LIMIT, OVERLAP = 8, 2
WINDOWS: dict[str, Any] = {"long": "window", "overlap": OVERLAP}
TEXTS = [" ".join(make_texts(5, seed)) for seed in range(12)] + make_texts(12)


def _model(folder: Path, **files: Any) -> Path:
    """Write an embedder with hidden states [B, S, 4], whose checkpoint takes their mean over at most 8 tokens."""
    return write_model(
        folder,
        model_for("sentence-similarity", table(V, 4), "last_hidden_state"),
        modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}},
        sentence_bert={"max_seq_length": LIMIT},
        **files,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """That embedder, without prompts."""
    return _model(tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Long texts and short ones, some of them with ids that end as those of passages do."""
    lines = [{"id": f"d{place}{'#0' * (place % 3)}", "contents": text} for place, text in enumerate(TEXTS)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _encode(model: Path, corpus: Path, **options: Any) -> CorpusReport:
    return encode_corpus(model, corpus, corpus.parent / "vectors", CorpusOptions(provider="cpu", **WINDOWS | options))


def _vectors(folder: Path) -> NDArray[Any]:
    return np.concatenate([np.load(path, allow_pickle=False) for path in sorted(folder.glob("*.npy"))])


def test_passages_are_the_windows_of_the_checkpoints_own_tokenizer(tmp_path: Path, model: Path, corpus: Path) -> None:
    """As many as its truncation with a stride gives, with the same characters; ids count them."""
    report = _encode(model, corpus, contents=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LIMIT, stride=OVERLAP)
    expected = []
    for name, text in ((line["id"], line["contents"]) for line in map(json.loads, corpus.read_text().splitlines())):
        first = tokenizer.encode(text)
        spans = [(window.offsets[1][0], window.offsets[-2][1]) for window in (first, *first.overflowing)]
        expected += [
            {"id": f"{name}#{number}", "contents": text[begin:end], "begin": begin, "end": end}
            for number, (begin, end) in enumerate(spans)
        ]
    assert lines_of(tmp_path / "vectors") == expected
    assert len(expected) > 2 * len(TEXTS)
    assert (report.num_texts, report.num_passages, report.num_truncated) == (len(TEXTS), len(expected), 0)


@pytest.mark.parametrize("prompt", [None, "the red "])
def test_the_vector_of_a_passage_is_that_of_its_text(tmp_path: Path, model: Path, corpus: Path, prompt: str) -> None:
    """A prompt stands before each passage, and is not a part of its place."""
    _encode(model, corpus, contents=True, prompt=prompt)
    alone = load(model, provider="cpu").encode(
        [line["contents"] for line in lines_of(tmp_path / "vectors")], prompt=prompt
    )
    # A mean of at most 8 numbers around 1 in float32.
    np.testing.assert_allclose(_vectors(tmp_path / "vectors"), np.asarray(alone), atol=1e-6)


@pytest.mark.usefixtures("workers_here")
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "npy"])
def test_parts_and_one_run_write_the_same_bytes(
    tmp_path: Path, model: Path, corpus: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard has as many texts as it says, however many passages these are."""
    monkeypatch.setattr(splits, "WINDOW_TEXTS", 5)
    content = corpus.read_text()
    corpus.write_text(content + content.splitlines()[0] + "\n")
    options = VectorOptions(provider="cpu", shard_size=7, split_bytes=300, output_format=kind, **WINDOWS)
    report = _encode(model, corpus, shard_size=7, split_bytes=300, output_format=kind)
    assert (report.num_texts, report.rejects) == (len(TEXTS), {"repeats the id of an earlier line": 1})
    for part in ("2/2", "1/2"):
        encode_part(model, corpus, tmp_path / "parts", options, PartOptions(part=part))
    merged = merge_parts(tmp_path / "parts")
    assert (merged.num_texts, merged.num_passages) == (report.num_texts, report.num_passages)
    assert contents_of(tmp_path / "parts") == contents_of(tmp_path / "vectors")


def test_parquet_says_where_a_passage_is(tmp_path: Path, model: Path, corpus: Path) -> None:
    """Columns of whole numbers beside the id."""
    pq = pytest.importorskip("pyarrow.parquet")
    _encode(model, corpus, output_format="parquet", contents=True)
    found = pq.read_table(tmp_path / "vectors")
    assert found.column_names == ["id", "contents", "begin", "end", "vector"]
    assert str(found.schema.field("begin").type) == str(found.schema.field("end").type) == "int32"
    texts = {line["id"]: line["contents"] for line in map(json.loads, corpus.read_text().splitlines())}
    for row in found.to_pylist():
        assert row["contents"] == texts[row["id"].rpartition("#")[0]][row["begin"] : row["end"]]


def test_terms_of_passages_are_those_of_their_texts(tmp_path: Path, corpus: Path) -> None:
    """A sparse encoder reads passages as well."""
    model = sparse_model(tmp_path)
    write_checkpoint(tmp_path / "model", sentence_bert={"max_seq_length": LIMIT}, modules={"Transformer": {}})
    _encode(model, corpus, weights="float")
    lines = lines_of(tmp_path / "vectors")
    alone: Any = load(model, provider="cpu").encode([line["contents"] for line in lines])
    for place, line in enumerate(lines):
        weights = {VOCABULARY[term]: weight for term, weight in zip(*_row(alone, place), strict=True)}
        assert line["vector"] == pytest.approx(weights, abs=1e-6)


def _row(vectors: Any, place: int) -> tuple[list[int], list[float]]:
    part = slice(vectors.indptr[place], vectors.indptr[place + 1])
    return vectors.indices[part].tolist(), vectors.weights[part].tolist()


def test_long_texts_are_rejected_where_that_is_asked_for(tmp_path: Path, model: Path) -> None:
    """They are counted by that reason, and the others are encoded; a strict run stops."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a cat", "a cat sat on the red mat of the house", "a dog"])
    options = {"long": "fail", "overlap": None}
    report = _encode(model, corpus, **options)
    assert report.rejects == {"has more tokens than the model takes": 1}
    assert [line["id"] for line in lines_of(tmp_path / "vectors")] == ["d0", "d2"]
    with pytest.raises(InputError, match="corpus.jsonl:2 has more tokens than the model takes"):
        _encode(model, corpus, strict=True, force=True, **options)


def test_windows_without_room_are_refused_before_a_text_is_read(tmp_path: Path, model: Path, corpus: Path) -> None:
    """Not by rejecting each text; and an overlap needs windows."""
    with pytest.raises(InputError, match="leaves 6 for the text"):
        _encode(model, corpus, overlap=6)
    with pytest.raises(InputError, match="no windows to share tokens"):
        _encode(model, corpus, long=None)
    assert not (tmp_path / "vectors").exists()


def test_a_run_with_other_passages_is_another_one(tmp_path: Path, model: Path, corpus: Path) -> None:
    """The manifest holds how long texts are read; a quarter that is written out is the same."""
    _encode(model, corpus, overlap=None)
    assert _encode(model, corpus, overlap=LIMIT // 4).resumed
    with pytest.raises(Exception, match="--overlap: 2, now 3"):
        _encode(model, corpus, overlap=3)
    with pytest.raises(Exception, match="--long: window, now none"):
        _encode(model, corpus, overlap=None, long=None)


def test_progress_counts_texts(model: Path, corpus: Path) -> None:
    """Not their passages."""
    options = CorpusOptions(provider="cpu", workers=1, **WINDOWS)
    with told() as heard:
        encode_corpus(model, corpus, corpus.parent / "vectors", options)
    assert heard[-1].num_texts == len(TEXTS)
    assert heard[-1].share == pytest.approx(1)


@pytest.mark.parametrize("task", ["document", "query"])
def test_passages_of_late_interaction_have_the_tokens_of_their_texts(tmp_path: Path, corpus: Path, task: str) -> None:
    """What counts of a document or a query, and the prompt of each, as of the passage alone."""
    model = encoder(tmp_path / "late", prompts={"query": "a ", "document": "red "}, max_seq_length=LIMIT)
    _encode(model, corpus, contents=True, task=task)
    lines = lines_of(tmp_path / "vectors")
    alone: Any = load(model, provider="cpu").encode([line["contents"] for line in lines], task=task)
    (shard,) = read_shards(tmp_path / "vectors")
    found: Any = shard.vectors
    assert found.indptr.tolist() == alone.indptr.tolist()
    np.testing.assert_allclose(found.vectors, alone.vectors, atol=1e-6)


def test_a_model_that_reads_chats_is_refused_before_a_text_is_read(tmp_path: Path, corpus: Path) -> None:
    """Its template is for whole texts; no text is rejected for it."""
    message = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}
    model = write_model(
        tmp_path,
        model_for("sentence-similarity", table(V, 4), "last_hidden_state"),
        modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}},
        sentence_bert={"max_seq_length": LIMIT, "modality_config": {"message": message}},
    )
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}a {{ m.content }} {% endfor %}")
    with pytest.raises(InputError, match="put into a chat template cannot be read in windows"):
        _encode(model, corpus, overlap=None)
    assert not (tmp_path / "vectors").exists()


def test_a_stopped_run_over_passages_goes_on(
    tmp_path: Path, model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bytes, and the passages of both runs in its report."""
    monkeypatch.setattr(splits, "WINDOW_TEXTS", 5)
    options = CorpusOptions(provider="cpu", shard_size=7, **WINDOWS)

    with pytest.raises(KeyboardInterrupt), stopped_after(16):
        encode_corpus(model, corpus, tmp_path / "vectors", options)
    report = encode_corpus(model, corpus, tmp_path / "vectors", options)
    whole = encode_corpus(model, corpus, tmp_path / "whole", options)
    assert report.resumed
    assert 0 < report.num_encoded < len(TEXTS)
    assert report.num_passages == whole.num_passages
    assert contents_of(tmp_path / "vectors") == contents_of(tmp_path / "whole")


def test_ids_that_do_not_fit_the_vectors_are_an_error(tmp_path: Path, model: Path, corpus: Path) -> None:
    """A line that is lost would give every later vector another text."""
    _encode(model, corpus)
    names = tmp_path / "vectors" / "part-00000.ids.jsonl"
    names.write_text("".join(names.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(InputError, match=r"part-00000.ids.jsonl has other contents than were written"):
        list(read_shards(tmp_path / "vectors"))


@pytest.mark.parametrize(
    "parts",
    [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Metaspace(), pre_tokenizers.WhitespaceSplit()],
    ids=["byte-level", "metaspace", "words"],
)
def test_a_space_in_front_of_a_token_is_no_part_of_a_passage(tmp_path: Path, parts: Any) -> None:
    """Behind its prompt, the text of a passage is read as the tokens of its window, also where spaces are in tokens."""
    words = ["the", "quick", "brown", "fox", "jumps", "über", "日本語", "café", "🐈", "query"]
    chance = random.Random(0)  # noqa: S311  no secret
    text, prompt = " ".join(chance.choices(words, k=60)), "passage: "
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = parts
    learned.train_from_iterator(
        [prompt + text, *words, *[f"a {word}" for word in words]] * 20,
        trainers.BpeTrainer(vocab_size=2000, show_progress=False),
    )
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    learned.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(CheckpointFolder(tmp_path))
    options = ReadOptions(with_offsets=True, num_leading=len(prompt))
    (read,) = tokenizer.encode_windows([prompt + text], Limit(16, "the test"), 3, options)
    found = passages(Document("d", text, "c.jsonl", 1), read, len(prompt))
    assert len(found) > 3
    for window, passage in zip(read, found, strict=True):
        assert passage.contents == passage.contents.strip()
        assert passage.span is not None
        assert passage.contents == text[slice(*passage.span)]
        assert tokenizer.encode([prompt + passage.contents])[0].ids == window.ids
