"""Late interaction: which tokens have vectors, how a query is expanded, and texts ranked for it by MaxSim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import InputError
from onnxtool.infer import TokenVectors, load
from onnxtool.infer.loading import LoadedModel
from tests.infer.tiny_models import CLS, MASK, SEP, VOCABULARY, TinyModel, ids_of, model_for, table, write_model

V, W = len(VOCABULARY), 4
VALUES = table(V, W)
CHAIN: dict[str, dict[str, Any]] = {"Transformer": {}, "MultiVectorMask": {"skiplist_words": ["the", "on"]}}
PROMPTS = {"query": "a ", "document": "the "}
THE, ON, CAT, MAT = (VOCABULARY.index(word) for word in ("the", "on", "cat", "mat"))


def encoder(
    folder: Path, *, chain: dict[str, dict[str, Any]] | None = None, prompts: dict[str, str] | None = None,
    output: str = "token_embeddings", similarity: str = "maxsim", **transformer: Any,
) -> Path:  # fmt: skip
    """Write a model whose vector of a token is a row of a table."""
    path = write_model(
        folder, model_for("late-interaction", VALUES, output), modules=CHAIN if chain is None else chain,
        sentence_bert=transformer,
    )  # fmt: skip
    settings = {"model_type": "MultiVectorEncoder", "prompts": prompts or {}, "similarity_fn_name": similarity}
    (folder / "model" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return path


def rows(model: LoadedModel, text: str, task: str | None) -> NDArray[np.float32]:
    """Return the vectors of a text."""
    vectors = model.encode(["a much longer text beside it, by which it is padded", text], task=task)
    assert isinstance(vectors, TokenVectors)
    return vectors.row(1)


@pytest.mark.parametrize(
    ("task", "settings", "ids"),
    [
        ("document", {}, [CLS, CAT, MAT, SEP]),  # without what is skipped
        (None, {}, [CLS, CAT, MAT, SEP]),
        ("query", {}, [CLS, CAT, ON, THE, MAT, SEP]),
        ("document", {"document_length": 3}, [CLS, CAT, SEP]),
        ("query", {"query_length": 4}, [CLS, CAT, ON, SEP]),
        ("query", {"query_expansion": {"strategy": "fixed", "length": 4}}, [CLS, CAT, ON, SEP]),
        (
            "query",
            {"query_expansion": {"strategy": "fixed", "length": 8}},
            [CLS, CAT, ON, THE, MAT, SEP, MASK, MASK],
        ),
        (
            "query",
            {"query_expansion": {"strategy": "min", "length": 7, "token": "mat", "attend": True}},
            [CLS, CAT, ON, THE, MAT, SEP, MAT],
        ),
        ("query", {"query_expansion": {"strategy": "min", "length": 3}}, [CLS, CAT, ON, THE, MAT, SEP]),
        ("document", {"query_expansion": {"strategy": "fixed", "length": 8}}, [CLS, CAT, MAT, SEP]),
    ],
)
def test_the_tokens_that_count_have_vectors(
    tmp_path: Path, task: str | None, settings: dict[str, Any], ids: list[int]
) -> None:
    """In their order; of a query those that it is expanded by as well."""
    model = load(encoder(tmp_path, **settings), provider="cpu")
    np.testing.assert_array_equal(rows(model, "cat on the mat", task), VALUES[ids])


def test_a_task_has_its_prompt(tmp_path: Path) -> None:
    """And a text of no task has none."""
    model = load(encoder(tmp_path, prompts=PROMPTS, chain={"Transformer": {}}), provider="cpu")
    for task, text in (("query", "a cat"), ("document", "the cat"), (None, "cat")):
        np.testing.assert_array_equal(rows(model, "cat", task), VALUES[ids_of(text)])


def test_the_model_sees_of_an_expansion_what_the_checkpoint_says(tmp_path: Path) -> None:
    """The mask is 0 there, and 1 where it attends."""
    for attend in (False, True):
        expansion = {"strategy": "fixed", "length": 6, "attend": attend}
        model = load(encoder(tmp_path / str(attend), query_expansion=expansion), provider="cpu")
        feeds = model.feeds(model.tokenize(["cat"], task="query"))
        assert feeds["attention_mask"].tolist() == [[1, 1, 1, *[int(attend)] * 3]]
        assert feeds["input_ids"].tolist() == [[CLS, CAT, SEP, MASK, MASK, MASK]]


def test_what_the_graph_lacks_is_computed(tmp_path: Path) -> None:
    """A graph of hidden states, which `--head none` gives."""
    chain = {**CHAIN, "Normalize": {"module_input_name": "token_embeddings"}}
    model = load(encoder(tmp_path, chain=chain, output="last_hidden_state"), provider="cpu")
    expected = VALUES[[CLS, CAT, SEP]]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(rows(model, "cat", "document"), expected, rtol=1e-6)


def max_similarity(query: str, document: str) -> float:
    """MaxSim as two loops over tokens."""
    asked = [VALUES[token] for token in ids_of(query)]
    found = [VALUES[token] for token in ids_of(document) if token not in (THE, ON)]
    return float(sum(max(float(one @ other) for other in found) for one in asked))


TEXTS = ("the cat sat on the mat", "a dog", "red house")


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_texts_are_ranked_for_a_query(tmp_path: Path, similarity: str) -> None:
    """By the sum over its tokens, or their mean; each query is read once."""
    model = load(encoder(tmp_path, similarity=similarity), provider="cpu")
    report = model.answer(TEXTS, query="red cat")
    expected = np.array([max_similarity("red cat", text) for text in TEXTS])
    expected = expected / 4 if similarity == "meanmaxsim" else expected
    found = [answer.candidates[0] for answer in report.answers]
    np.testing.assert_allclose([one.score for one in found], expected, rtol=1e-5)
    assert {one.label for one in found} == {similarity}
    assert report.kind == "scores"
    assert report.rankings[0].order == tuple(np.argsort(-expected))
    assert not report.answers[0].token_vectors


def test_a_text_without_a_query_is_answered_with_its_vectors(tmp_path: Path) -> None:
    """As a document, and with the shape of what there is."""
    report = load(encoder(tmp_path), provider="cpu").answer(["the cat"])
    (answer,) = report.answers
    assert report.kind == "token_vectors"
    assert answer.outputs == {"token_embeddings": (3, W)}
    np.testing.assert_array_equal(np.array(answer.token_vectors, np.float32), VALUES[[CLS, CAT, SEP]])


def test_what_cannot_be_ranked_is_refused(tmp_path: Path) -> None:
    """Some texts with a query, queries for a query, windows."""
    model = load(encoder(tmp_path, max_seq_length=4), provider="cpu")
    with pytest.raises(InputError, match="1 of 2 texts have a query"):
        model.answer([("cat", "a dog"), "red house"])
    with pytest.raises(InputError, match="ranked for a query as documents"):
        model.answer(["a dog"], query="cat", task="query")
    with pytest.raises(InputError, match="windows of a text"):
        model.answer(["the cat sat on the mat"], long="window")


def test_files_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    """A model of vectors of tokens with the folder of an embedder."""
    path = encoder(tmp_path)
    (tmp_path / "model" / "config_sentence_transformers.json").write_text("{}")
    with pytest.raises(InputError, match="does not describe a late-interaction encoder"):
        load(path, provider="cpu")


@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_queries_longer_than_the_graph_takes_are_refused(tmp_path: Path, strategy: str) -> None:
    """When the model is loaded: each of them would fail."""
    path = encoder(tmp_path, query_expansion={"strategy": strategy, "length": 9})
    metadata = {"onnxtool.task": "late-interaction", "onnxtool.files": "model"}
    TinyModel(VALUES, "token_embeddings", positions=8, metadata=metadata).write(path)
    with pytest.raises(InputError, match="expanded to 9 tokens, and the rows of position_embeddings"):
        load(path, provider="cpu")


def test_similarities_of_many_texts_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of any size; a document without tokens is below all."""
    monkeypatch.setattr("onnxtool.infer.vectors._PRODUCTS", 8)
    draw = np.random.default_rng(0)
    queries, documents = (
        TokenVectors.stack([draw.standard_normal((count, W)).astype(np.float32) for count in counts])
        for counts in ((3, 1, 2), (0, 4, 1, 0, 0, 9, 2, 0))
    )
    found = queries.max_similarities(documents)
    for place in range(len(queries)):
        for other in range(len(documents)):
            document = documents.row(other)
            expected = (queries.row(place) @ document.T).max(axis=1).sum() if len(document) else -1e9
            np.testing.assert_allclose(found[place, other], expected, rtol=1e-5)
    np.testing.assert_allclose(queries.max_similarities(documents, is_mean=True)[0] * 3, found[0], rtol=1e-6)


def test_a_corpus_has_the_vectors_of_documents(tmp_path: Path) -> None:
    """With their prompt, without the tokens that are skipped; queries, where they are asked for."""
    path = encoder(tmp_path, prompts=PROMPTS)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXTS))
    model = load(path, provider="cpu")
    for task in (None, "query"):
        output = tmp_path / f"vectors-{task}"
        encode_corpus(path, corpus, output, CorpusOptions(task=task, provider="cpu"))
        found = TokenVectors(np.load(output / "part-00000.indptr.npy"), np.load(output / "part-00000.npy"))
        expected = model.encode(TEXTS, task=task or "document")
        assert isinstance(expected, TokenVectors)
        np.testing.assert_array_equal(found.indptr, expected.indptr)
        np.testing.assert_array_equal(found.vectors, expected.vectors)
