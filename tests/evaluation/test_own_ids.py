"""A document that has the query's own id is no result of it, in every kind of search; BEIR's way is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval

from onnxtool import EvaluateOptions, evaluate_model
from onnxtool.errors import GateError
from onnxtool.evaluation.collection import read_run
from onnxtool.evaluation.report import EvaluationReport
from tests.evaluation.collections import Texts, random_texts, write_beir
from tests.evaluation.test_evaluate import V, evaluate, write_dense
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import model_for, table, write_model

K = 5
TREC = {"nDCG@5": "ndcg_cut_5", "Recall@5": "recall_5", "MAP": "map"}


def queries_among_documents(num_others: int = 4) -> Texts:
    """Make a collection whose first queries are its first documents, with judgements that leave those out."""
    texts = random_texts(40, num_others + 8, seed=3)
    documents = {name.removeprefix("d"): text for name, text in texts.documents.items()}
    queries = {str(place): documents[str(place)] for place in range(8)}
    queries |= {name: texts.queries[name] for name in list(texts.queries)[:num_others]}
    judged = dict(zip(queries, texts.judgements.values(), strict=True))
    judgements = {
        query: {one.removeprefix("d"): grade for one, grade in grades.items() if one != f"d{query}"}
        for query, grades in judged.items()
    }
    return Texts(documents, queries, judgements)


TEXTS = queries_among_documents()


def write_sparse(folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    return write_model(folder, model_for("sparse-encoding", np.maximum(table(V, V), 0), "logits"))


def write_reranker(folder: Path) -> Path:
    return write_model(folder, model_for("text-classification", table(V, 1) / 4, "logits", pooled=True))


def write_windows(folder: Path) -> Path:
    return write_dense(folder, sentence_bert={"max_seq_length": 5})


def write_candidates(folder: Path) -> Path:
    """Write a run that has every document for every query, its own one first."""
    lines = (
        f"{query} Q0 {document} 1 {100 - place + 1000 * (document == query)} made\n"
        for query in TEXTS.queries
        for place, document in enumerate(TEXTS.documents)
    )
    path = folder / "candidates.run"
    path.write_text("".join(lines))
    return path


def by_beir(texts: Texts, run: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the means that EvaluateRetrieval.evaluate of beir gives: it drops the query's id from what was found."""
    results = {
        query: {one: score for one, score in run.get(query, {}).items() if one != query} for query in texts.queries
    }
    judged = {query: dict(grades) for query, grades in texts.judgements.items()}
    found = pytrec_eval.RelevanceEvaluator(judged, set(TREC.values())).evaluate(results)
    return {ours: sum(one[theirs] for one in found.values()) / len(found) for ours, theirs in TREC.items()}


def search(model: Path, data: Path, **options: Any) -> tuple[EvaluationReport, dict[str, dict[str, float]]]:
    run_path = model.parent / "found.run"
    asked = EvaluateOptions(cache=data / "cache", provider="cpu", measures=tuple(TREC), **options)
    report = evaluate_model(model, data, asked, run_path=run_path, force=True)
    return report, read_run(run_path)


SYSTEMS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], int]] = {
    "dense": (write_dense, {"depth": K}, K),
    "windows": (write_windows, {"depth": K, "long": "window", "overlap": 1}, K),
    "sparse": (write_sparse, {"depth": K}, K),
    "late interaction": (encoder, {"depth": K}, K),
    "reranker of BM25": (write_reranker, {"num_candidates": K}, 0),
    "reranker of a run": (write_reranker, {"num_candidates": K, "candidates": True}, K),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_measures_are_those_of_beir_and_a_full_ranking_remains(tmp_path: Path, name: str) -> None:
    """What beir makes of a run that is one document longer; documents that are cut into windows have their own ids."""
    write, options, least = SYSTEMS[name]
    data = write_beir(tmp_path / "data", TEXTS)
    (tmp_path / "model").mkdir()
    model = write(tmp_path / "model")
    if "candidates" in options:
        options = {**options, "candidates": write_candidates(tmp_path)}
    report, run = search(model, data, **options)
    longer = {key: value + 1 for key, value in options.items() if value == K}
    kept, whole = search(model, data, **{**options, **longer}, keep_own_ids=True)
    assert any(query in documents for query, documents in whole.items())
    for query, documents in run.items():
        assert query not in documents
        assert least <= len(documents) <= K
        if query in whole[query]:
            others = {one: score for one, score in whole[query].items() if one != query}
            assert documents == pytest.approx(others, rel=1e-6)  # rerankers run other batches
    expected = by_beir(TEXTS, run)
    assert {measure: one.mean for measure, one in report.measures.items()} == pytest.approx(expected, abs=1e-9)
    assert (report.num_own_ids_left_out, kept.num_own_ids_left_out) == (8, 0)
    assert any(note.startswith("8 queries have the id of a document, which is left out") for note in report.notes)
    assert any(note.startswith("8 queries have the id of a document, which stays") for note in kept.notes)


def test_bases_leave_the_same_documents_out(tmp_path: Path) -> None:
    """BM25 and another file; a model does not win by its base finding the queries themselves."""
    data = write_beir(tmp_path / "data", TEXTS)
    model, copy = write_dense(tmp_path / "a"), write_dense(tmp_path / "b")
    for base in ("bm25", str(copy)):
        report = evaluate(model, data, against=base, depth=K, measures=("nDCG@5",))
        assert all(one.id not in (*one.top, *one.base_top) for one in report.queries)
    assert all(len(one.base_top) == K for one in report.queries)


def test_vectors_of_pytorch_leave_the_same_documents_out(tmp_path: Path) -> None:
    """They are searched as those of a file are."""
    from onnxtool.evaluation.collection import open_collection
    from onnxtool.evaluation.pytorch import _TorchVectors

    class Model:
        similarity_fn_name = "dot"

        def encode_query(self, texts: list[str], **_options: Any) -> Any:
            return np.array([[len(text), 1.0] for text in texts], np.float32)

        encode_document = encode_query

    collection = open_collection(write_beir(tmp_path, TEXTS))
    system = _TorchVectors("made", "dense", Model(), EvaluateOptions(depth=K))
    found = system.retrieve(collection)
    assert found.left_out == {str(place) for place in range(8)}
    assert all(query not in documents and len(documents) == K for query, documents in found.run.items())


def test_a_document_that_is_judged_relevant_stays(tmp_path: Path) -> None:
    """The ideal ranking has it. A grade of 0 or less says the opposite, and is no reason."""
    judgements = {**TEXTS.judgements, "0": {"0": 2}, "1": {"1": 0, "9": 1}, "2": {"2": -1, "9": 1}}
    data = write_beir(tmp_path / "data", replace(TEXTS, judgements=judgements))
    report, run = search(write_dense(tmp_path), data)
    assert [query for query in map(str, range(8)) if query in run[query]] == ["0"]
    assert report.queries[0].measures["nDCG@5"] > 0
    assert report.num_own_ids_left_out == 7
    assert [note for note in report.notes if "judged relevant" in note] == [
        "1 queries have the id of a document, which stays as it is judged relevant; BEIR leaves it out"
    ]


def test_an_id_that_is_a_number_is_the_text_of_its_digits(tmp_path: Path) -> None:
    """In JSON both are written."""
    beir, data = write_beir(tmp_path / "beir", TEXTS), write_beir(tmp_path / "data", TEXTS)
    lines = [json.loads(line) for line in (data / "corpus.jsonl").read_text().splitlines()]
    numbered = (json.dumps({**line, "_id": int(line["_id"])}) for line in lines)
    (data / "corpus.jsonl").write_text("\n".join(numbered))
    model = write_dense(tmp_path)
    expected, report = evaluate(model, beir), evaluate(model, data)
    assert report.num_own_ids_left_out == expected.num_own_ids_left_out == 8
    assert report.measures == expected.measures


def test_a_collection_without_own_ids_has_no_note_and_the_option_changes_nothing(tmp_path: Path) -> None:
    """An id that a document's id only begins with is another one."""
    documents = {f"{name}#0": text for name, text in TEXTS.documents.items()}
    data = write_beir(tmp_path / "data", replace(TEXTS, documents=documents))
    model = write_dense(tmp_path)
    report, kept = evaluate(model, data), evaluate(model, data, keep_own_ids=True)
    assert report.notes == kept.notes
    assert not any("have the id of a document" in note for note in report.notes)
    assert report.queries == kept.queries


def test_queries_without_a_relevant_document_are_counted_and_count_as_0(tmp_path: Path) -> None:
    """As pytrec_eval has them in its means; queries whose relevant documents are not there are another matter."""
    judgements = {**TEXTS.judgements, "0": {"9": 0, "10": -1}, "1": {"9": 0}, "2": {"nowhere": 1, "9": 0}}
    texts = replace(TEXTS, judgements=judgements)
    report, run = search(write_dense(tmp_path), write_beir(tmp_path / "data", texts))
    assert {name: one.mean for name, one in report.measures.items()} == pytest.approx(by_beir(texts, run), abs=1e-9)
    assert report.num_queries == len(TEXTS.queries)
    expected = [grades for grades in judgements.values() if max(grades.values()) <= 0]
    assert report.num_without_relevant == len(expected) >= 2
    assert any(note.startswith(f"{len(expected)} queries have no relevant document") for note in report.notes)
    assert "for 1 queries no relevant document is among the documents; they count as 0" in report.notes


def test_a_gate_needs_a_query_with_a_relevant_document(tmp_path: Path) -> None:
    """Where every measure is 0, a comparison with a base would always pass."""
    nothing = {query: dict.fromkeys(grades, 0) for query, grades in TEXTS.judgements.items()}
    data = write_beir(tmp_path / "data", replace(TEXTS, judgements=nothing))
    model = write_dense(tmp_path)
    assert evaluate(model, data, fail_if=("size_bytes<1",)).measures["MAP"].mean == 0
    with pytest.raises(GateError, match="decides nothing: no query of .* has a relevant document"):
        evaluate(model, data, against="bm25", fail_if=("size_bytes<1", "ndcg@10<-0%"))
