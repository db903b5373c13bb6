"""Queries of an inference-free sparse encoder are looked up, and nothing else encodes them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sentence_transformers.sparse_encoder import modules as reference
from transformers import PreTrainedTokenizerFast

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.sentence_modules import StoredModule
from onnxtool.checkpoint.static_embeddings import SparseStaticEmbedding, require_same_tokens
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import InputError
from onnxtool.export.sidecar_files import write_sidecar_files
from onnxtool.export.source import Source
from onnxtool.infer import InferOptions, SparseVectors, encode, load, run_texts
from onnxtool.infer.static_queries import load_queries
from onnxtool.model_file import ModelFile
from onnxtool.runtime import running
from tests.infer.tiny_models import CLS, VOCABULARY, model_for, table, write_model

V = len(VOCABULARY)
# A term of each weight, one that weighs nothing among them.
WEIGHTS = np.arange(V, dtype=np.float32) / 4
TYPES = {
    "query_0_SparseStaticEmbedding": "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding",
    "document_0_Transformer": "sentence_transformers.models.Transformer",
    "document_1_SpladePooling": "sentence_transformers.sparse_encoder.models.SpladePooling",
}
ROUTES: dict[str, Any] = {
    "types": TYPES,
    "structure": {
        "query": ["query_0_SparseStaticEmbedding"],
        "document": ["document_0_Transformer", "document_1_SpladePooling"],
    },
    "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
}


def inference_free(
    folder: Path,
    *,
    weights: Any = WEIGHTS,
    values: Any = None,
    router: dict[str, Any] = ROUTES,
    prompts: dict[str, str] | None = None,
    max_tokens: int | None = None,
) -> Path:
    """Write a model for documents as it is exported, and the table for queries beside it."""
    path = write_model(folder, model_for("sparse-encoding", table(V, V) if values is None else values, "logits"))
    files = folder / "model"
    (files / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.models.Router"}]))
    (files / "router_config.json").write_text(json.dumps(router))
    (files / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))
    query = files / "query_0_SparseStaticEmbedding"
    query.mkdir()
    (query / "config.json").write_text('{"frozen": true}')
    (query / "tokenizer_config.json").write_text(json.dumps({"model_max_length": max_tokens}))
    save_file({"weight": np.asarray(weights)}, query / "model.safetensors")
    return path


def terms(text: str, **settings: int) -> dict[str, float]:
    """Return the terms of a query by a loop over its words."""
    words = text.split()[: settings.get("max_tokens")]
    return {word: VOCABULARY.index(word) / 4 for word in words if VOCABULARY.index(word)}


def test_each_token_of_a_query_weighs_what_the_table_says(tmp_path: Path) -> None:
    """Once, however often it stands there, and without the tokens around a text."""
    model = load(inference_free(tmp_path))
    texts = ["the cat sat on the mat", "red red red", "", "dog"]
    vectors = model.encode(texts, task="query")
    assert isinstance(vectors, SparseVectors)
    assert vectors.terms() == [dict(sorted(terms(text).items(), key=lambda term: -term[1])) for text in texts]
    assert all((np.diff(vectors.row(place)[0]) > 0).all() for place in range(len(texts)))


def test_terms_of_queries_are_pruned_beside_a_graph_that_prunes_documents(tmp_path: Path) -> None:
    """The graph never sees queries; a rule for documents is refused."""
    path = inference_free(tmp_path)
    ModelFile.open(path).stamp({"onnxtool.prune": "top_k:3"})
    for call in (load(path).encode, partial(encode, path)):
        vectors: Any = call(["the cat sat on the mat"], task="query", prune="top_k:2")
        assert vectors.terms() == [{"mat": 3.25, "the": 2.5}]
    with pytest.raises(InputError, match="the graph itself is pruned by top_k:3"):
        load(path).encode(["the cat"], task="document", prune="top_k:2")


def by_token(folder: Path, content: Any, named: str = "idf.json") -> StoredModule:
    """Write a table of weights by their tokens, in place of the safetensors."""
    inference_free(folder)
    query = folder / "model" / "query_0_SparseStaticEmbedding"
    (query / "model.safetensors").unlink()
    (query / "config.json").write_text(json.dumps({"frozen": True, "path": named}))
    if content is not None:
        (query / "idf.json").write_text(content if isinstance(content, str) else json.dumps(content))
    stored = CheckpointFolder(folder / "model").sentence_modules.query
    assert stored is not None
    return stored


def test_weights_may_be_written_by_their_tokens(tmp_path: Path) -> None:
    """As sentence-transformers reads them, beside the module or at the top; no token means no weight."""
    weights = {"cat": 1.5, "dog": 0.1, "the": 3}
    stored = by_token(tmp_path, weights)
    found = SparseStaticEmbedding.read(stored)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "model" / "tokenizer.json"))
    table = tmp_path / "model" / "query_0_SparseStaticEmbedding" / "idf.json"
    theirs = reference.SparseStaticEmbedding.from_json(str(table), tokenizer)
    np.testing.assert_array_equal(found.weights, theirs.weight.detach().numpy())
    assert found.named_weights(stored) == weights
    table.rename(tmp_path / "model" / "idf.json")
    np.testing.assert_array_equal(SparseStaticEmbedding.read(stored).weights, found.weights)


@pytest.mark.parametrize(
    ("content", "named", "reason"),
    [
        ({"cat": 1.0, "xyzzy": 2.0}, "idf.json", "the tokenizer has no 'xyzzy'"),
        ({"cat": "heavy"}, "idf.json", "it is not one number per token"),
        ({"cat": True}, "idf.json", "it is not one number per token"),
        ({"cat": float("nan")}, "idf.json", "it is not one number per token"),
        ({"cat": 10**400}, "idf.json", "it is not one number per token"),
        ({}, "idf.json", "it is empty or missing"),
        (["cat"], "idf.json", "not a JSON object"),
        ('{"cat": 1', "idf.json", "not JSON"),
        (None, "idf.json", "it is empty or missing"),
        ({"cat": 1.0}, "../idf.json", "its path leaves the folder"),
        ({"cat": 1.0}, "/etc/idf.json", "its path leaves the folder"),
        ({"cat": 1.0}, "C:/idf.json", "its path leaves the folder"),
    ],
)
def test_a_table_by_tokens_that_cannot_be_read_is_refused(
    tmp_path: Path, content: Any, named: str, reason: str
) -> None:
    """A path in a checkpoint stays inside of it, unlike in sentence-transformers."""
    with pytest.raises(InputError, match=reason):
        SparseStaticEmbedding.read(by_token(tmp_path, content, named))


def test_a_tokenizer_of_huge_ids_makes_no_huge_table(tmp_path: Path) -> None:
    """A few bytes of a file must not ask for gigabytes."""
    stored = by_token(tmp_path, {"cat": 1.0})
    path = tmp_path / "model" / "query_0_SparseStaticEmbedding" / "tokenizer.json"
    path = path if path.exists() else tmp_path / "model" / "tokenizer.json"
    written = json.loads(path.read_text())
    written["model"]["vocab"]["huge"] = 2**31
    path.write_text(json.dumps(written))
    with pytest.raises(InputError, match="the tokenizer has the token 2147483648, and the table a row for each"):
        SparseStaticEmbedding.read(stored)


def test_an_export_has_the_table_by_tokens_for_other_consumers(tmp_path: Path) -> None:
    """OpenSearch reads idf.json; one that the checkpoint has is its own."""
    inference_free(tmp_path)
    source = Source.find(str(tmp_path / "model"))
    write_sidecar_files(source, None, tmp_path / "out", tmp_path / "elsewhere")
    written = json.loads((tmp_path / "out" / "idf.json").read_text())
    assert written == {token: index / 4 for index, token in enumerate(VOCABULARY) if index}


def test_documents_are_encoded_by_the_model(tmp_path: Path) -> None:
    """With the task and without it, as sentence-transformers routes them."""
    model = load(inference_free(tmp_path))
    plain, documents, queries = (model.encode(["the cat"], task=task) for task in (None, "document", "query"))
    assert isinstance(plain, SparseVectors)
    assert isinstance(documents, SparseVectors)
    assert isinstance(queries, SparseVectors)
    assert plain.terms() == documents.terms() != queries.terms()


def test_no_session_is_opened_for_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library's call, and by what the command calls."""
    path = inference_free(tmp_path)
    monkeypatch.setattr(running.Session, "__init__", lambda *_arguments, **_options: pytest.fail("opened a session"))
    vectors = encode(path, ["red cat"], task="query")
    assert isinstance(vectors, SparseVectors)
    report = run_texts(InferOptions(path, texts=("red cat",), prompt="query"))
    assert report.answers[0].scores == vectors.terms()[0] == {"red": 2.75, "cat": 1.5}
    assert (report.provider, report.answers[0].num_tokens) == ("none", 2)


def test_the_prompt_of_queries_stands_before_them(tmp_path: Path) -> None:
    """It is text as any other."""
    vectors = load(inference_free(tmp_path, prompts={"query": "the "})).encode(["cat"], task="query")
    assert isinstance(vectors, SparseVectors)
    assert vectors.terms() == [{"the": 2.5, "cat": 1.5}]


def test_a_prompt_that_is_passed_stands_before_queries(tmp_path: Path) -> None:
    """In answers as in vectors, and a note says so."""
    path = inference_free(tmp_path, prompts={"query": "the "})
    report = run_texts(InferOptions(path, texts=("cat",), task="query", prompt="dog "))
    vectors = load(path).encode(["cat"], task="query", prompt="dog ")
    assert isinstance(vectors, SparseVectors)
    assert [{one.label: one.score for one in answer.candidates} for answer in report.answers] == vectors.terms()
    assert "'dog ' stands before each text" in report.notes


def test_a_query_is_cut_to_the_limit_of_its_tokenizer(tmp_path: Path) -> None:
    """Special tokens do not count: there are none."""
    path = inference_free(tmp_path, max_tokens=2)
    vectors = load(path).encode(["the cat sat"], task="query")
    assert isinstance(vectors, SparseVectors)
    assert vectors.terms() == [terms("the cat sat", max_tokens=2)]
    report = run_texts(InferOptions(path, texts=("the cat sat", "the cat"), prompt="query"))
    assert [answer.truncated for answer in report.answers] == [True, False]


def test_tokens_that_frame_texts_are_no_terms_unless_asked_for(tmp_path: Path) -> None:
    """Where a query spells them out."""
    queries = load_queries(ModelFile.open(inference_free(tmp_path)))
    assert queries is not None
    assert queries.encode(["[CLS] cat"]).terms() == [{"cat": 1.5}]
    assert queries.encode(["[CLS] cat"], keep_special=True).terms() == [{"cat": 1.5, "[CLS]": CLS / 4}]


def test_queries_never_go_through_the_model(tmp_path: Path) -> None:
    """Neither one by one nor as a corpus."""
    path = inference_free(tmp_path, prompts={"query": ""})
    with pytest.raises(InputError, match="encodes queries without its model") as caught:
        load(path).encode(["cat"], prompt="query")
    assert "--prompt query" in caught.value.hint
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "cat"}\n')
    with pytest.raises(InputError, match="encodes queries without its model"):
        encode_corpus(path, corpus, tmp_path / "out", CorpusOptions(prompt="query"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": ()}, "no texts to run"),
        ({"texts": ("cat",), "query": "dog"}, "a pair was passed"),
        ({"texts": ("cat",), "long": "window"}, "--long window was passed"),
        ({"texts": ("cat",), "representation": "dense"}, "--representation dense was passed"),
    ],
)
def test_options_that_mean_nothing_for_a_lookup_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Rather than ignored."""
    with pytest.raises(InputError, match=message):
        run_texts(InferOptions(inference_free(tmp_path), prompt="query", **options))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (WEIGHTS[:-1], f"has {V - 1} weights for the {V} tokens"),
        (WEIGHTS.reshape(1, -1), "weight in query_0_SparseStaticEmbedding of .* is of shape"),
        (np.full(V, np.nan, np.float32), "or not finite"),
    ],
)
def test_a_table_that_cannot_be_looked_up_in_is_refused(tmp_path: Path, weights: Any, message: str) -> None:
    """By what is wrong with it."""
    with pytest.raises(InputError, match=message):
        encode(inference_free(tmp_path, weights=weights), ["cat"], task="query")


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {"default_route": "query"}},
        {"parameters": {"default_route": "document", "route_mappings": {"query,text": "document"}}},
        {"structure": {**ROUTES["structure"], "image": []}},
        {"structure": {"document": ["document_0_Transformer"], "query": ["document_0_Transformer"]}},
        {"structure": {}},
    ],
)
def test_a_router_of_other_routes_stays_one(tmp_path: Path, change: dict[str, Any]) -> None:
    """And is refused as a module that is not computed."""
    inference_free(tmp_path, router={**ROUTES, **change})
    modules = CheckpointFolder(tmp_path / "model").sentence_modules
    assert (modules.kinds, modules.query) == (("Router",), None)


@pytest.mark.parametrize("folder", ["../outside", "/etc", "a\\b"])
def test_a_route_stays_inside_the_checkpoint(tmp_path: Path, folder: str) -> None:
    """Whatever router_config.json says."""
    router = {**ROUTES, "types": {folder: "a.B"}, "structure": {"query": [folder], "document": []}}
    inference_free(tmp_path, router=router)
    with pytest.raises(InputError, match=r"router_config\.json is malformed: .* outside the folder"):
        _ = CheckpointFolder(tmp_path / "model").sentence_modules


def test_two_tokenizers_are_refused(tmp_path: Path) -> None:
    """One reads both; how batches are padded makes no other tokens."""
    inference_free(tmp_path)
    folder = tmp_path / "model"
    stored = CheckpointFolder(folder).sentence_modules.query
    assert stored is not None
    content = json.loads((folder / "tokenizer.json").read_text())
    query = folder / stored.file("tokenizer.json")
    query.write_text(json.dumps({**content, "padding": None, "truncation": None}))
    require_same_tokens(stored, CheckpointFolder(folder))
    query.write_text(json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(InputError, match="have tokenizers that differ"):
        require_same_tokens(stored, CheckpointFolder(folder))


def test_a_task_names_a_prompt_of_any_checkpoint(tmp_path: Path) -> None:
    """The one of its own name or none, as in sentence-transformers 6.2; an unknown task is refused."""
    path = write_model(
        tmp_path, model_for("sentence-similarity", table(V, 4), "last_hidden_state"),
        modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}},
    )  # fmt: skip
    settings = {"prompts": {"passage": "the ", "query": "a "}, "default_prompt_name": "passage"}
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    model = load(path)
    for task, prompt in (("query", "query"), ("document", ""), (None, None)):
        np.testing.assert_array_equal(
            np.asarray(model.encode(["cat"], task=task)), np.asarray(model.encode(["cat"], prompt=prompt))
        )
    with pytest.raises(InputError, match="task: 'passage' is not one of 'query', 'document'"):
        model.encode(["cat"], task="passage")
