"""`onnxtool evaluate` from a model and a collection to measures, gates and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from onnxtool import EvaluateOptions, OptimizeOptions, evaluate_model, optimize_model
from onnxtool.cli.optimize import optimize_blocks
from onnxtool.cli.render import Table
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.encoding.reading import read_shards
from onnxtool.errors import CheckpointError, GateError, InputError
from onnxtool.evaluation import systems
from onnxtool.evaluation.collection import read_run
from onnxtool.evaluation.options import DENSE
from onnxtool.evaluation.pytorch import open_checkpoint
from onnxtool.evaluation.report import EvaluationReport, TermCounts
from onnxtool.evaluation.run import judge_by_retrieval
from onnxtool.infer.vectors import SparseVectors
from onnxtool.optimize.quantization import candidates
from tests.cli.entry_point import run_onnxtool
from tests.evaluation.collections import Texts, random_texts, write_beir, write_lines
from tests.infer.test_late_interaction import encoder
from tests.infer.test_static_queries import inference_free
from tests.infer.tiny_models import (
    POOLED,
    VOCABULARY,
    TinyModel,
    ids_of,
    model_for,
    splade_terms,
    table,
    write_model,
)
from tests.workshop import Workshop

V = len(VOCABULARY)
TEXTS = random_texts(50, 12)
VALUES = table(V, 6)


def write_dense(folder: Path, values: Any = VALUES, **files: Any) -> Path:
    model = model_for("sentence-similarity", values, "last_hidden_state")
    return write_model(folder, model, modules=POOLED, **files)


def mean(text: str) -> Any:
    rows = VALUES[ids_of(text)].mean(axis=0)
    return rows / np.linalg.norm(rows)


def evaluate(model: Path, data: Path, **options: Any) -> EvaluationReport:
    return evaluate_model(model, data, EvaluateOptions(cache=data / "cache", provider="cpu", **options))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "data", TEXTS)


def test_an_embedder_finds_what_its_vectors_say(tmp_path: Path, data: Path) -> None:
    """The run is that of a loop over all pairs; a document whose text is another's may stand in its place."""
    path = write_dense(tmp_path)
    run_path = tmp_path / "found.run"
    options = EvaluateOptions(cache=tmp_path / "cache", provider="cpu")
    report = evaluate_model(path, data, options, run_path=run_path)
    assert (report.model.kind, report.model.similarity) == ("dense", "cosine")
    assert (report.num_documents, report.num_queries) == (50, 12)
    run = read_run(run_path)
    for query, text in TEXTS.queries.items():
        expected = {name: float(mean(text) @ mean(document)) for name, document in TEXTS.documents.items()}
        assert run[query] == pytest.approx(expected, abs=1e-6)
    assert report.queries[0].top == tuple(run[report.queries[0].id])[:10]


def test_a_sparse_encoder_finds_what_shares_terms(tmp_path: Path, data: Path) -> None:
    """By the product of the weights, in float; special tokens count not."""
    pytest.importorskip("pyarrow")
    values = np.where(table(V, V) > 1, table(V, V), -1).astype(np.float32)
    path = write_model(tmp_path, model_for("sparse-encoding", values, "logits"))
    run_path = tmp_path / "found.run"
    report = evaluate_model(path, data, EvaluateOptions(cache=tmp_path / "cache"), run_path=run_path)
    assert (report.model.kind, report.model.similarity) == ("sparse", "dot")
    terms = {name: splade_terms(values, text) for name, text in {**TEXTS.documents, **TEXTS.queries}.items()}
    for query, found in read_run(run_path).items():
        expected = {
            name: sum(weight * terms[name].get(term, 0) for term, weight in terms[query].items())
            for name in TEXTS.documents
        }
        assert found == pytest.approx({name: score for name, score in expected.items() if score > 0}, rel=1e-5)
    of_query, of_document = (sum(len(terms[one]) for one in of) / len(of) for of in (TEXTS.queries, TEXTS.documents))
    assert report.model.terms == TermCounts(of_query, of_document, 1 - of_document / V)


def test_a_gate_knows_how_sparse_vectors_are(tmp_path: Path, data: Path) -> None:
    """And that dense ones are not."""
    pytest.importorskip("pyarrow")
    values = np.where(table(V, V) > 1, table(V, V), -1).astype(np.float32)
    sparse = write_model(tmp_path / "sparse", model_for("sparse-encoding", values, "logits"))
    gates = ("sparsity<0.999", "document_terms>10000", "query_terms>+0%")
    report = evaluate(sparse, data, fail_if=gates, against=str(sparse))
    assert [gate.met for gate in report.gates] == [True, False, False]
    with pytest.raises(GateError, match="sparsity"):
        evaluate(write_dense(tmp_path / "dense"), data, fail_if=("sparsity<0.9",))


def test_late_interaction_reads_queries_as_queries(tmp_path: Path, data: Path) -> None:
    """With the tokens that count for each."""
    prompts = {"query": "a ", "document": "the "}
    with_prompts = evaluate(encoder(tmp_path / "a", prompts=prompts), data)
    without = evaluate(encoder(tmp_path / "b"), data)
    assert (with_prompts.model.kind, with_prompts.model.similarity) == ("late interaction", "maxsim")
    assert with_prompts.queries != without.queries


def test_prompts_of_queries_and_documents_are_used(tmp_path: Path, data: Path) -> None:
    """A checkpoint with another prompt for queries finds something else."""
    path = write_dense(tmp_path / "a")
    before = evaluate(path, data)
    config = path.parent / "model" / "config_sentence_transformers.json"
    config.write_text(json.dumps({"prompts": {"query": "red house ", "document": ""}}))
    assert evaluate(path, data).queries != before.queries


def test_the_best_passage_of_a_long_document_counts(tmp_path: Path, data: Path) -> None:
    """MaxP over the windows of the tokenizer, where a document that is cut has the score of its beginning."""
    path = write_dense(tmp_path, sentence_bert={"max_seq_length": 5})
    runs = {}
    for long, overlap in (("truncate", None), ("window", 1)):
        run_path = tmp_path / f"{long}.run"
        options = EvaluateOptions(cache=tmp_path / "cache", provider="cpu", long=long, overlap=overlap)
        report = evaluate_model(path, data, options, run_path=run_path)
        assert report.num_documents == 50
        num_long = sum(len(text.split()) > 3 for text in TEXTS.documents.values())
        note = f"{num_long} documents are longer" if long == "truncate" else "passages, of which the best one counts"
        assert any(note in line for line in report.notes)
        runs[long] = read_run(run_path)
    assert runs["truncate"] != runs["window"]
    for query, text in TEXTS.queries.items():
        expected = {
            name: max(
                float(mean(" ".join(text.split()[:3])) @ mean(" ".join(words[start : start + 3])))
                for start in range(0, max(1, len(words) - 1), 2)
            )
            for name, words in ((name, document.split()) for name, document in TEXTS.documents.items())
        }
        assert runs["window"][query] == pytest.approx(expected, abs=1e-6)


def test_a_reranker_orders_the_candidates(tmp_path: Path, data: Path) -> None:
    """Those of a run, by the model's own scores, whatever theirs are."""
    values = table(V, 1) / 4
    path = write_model(tmp_path, model_for("text-classification", values, "logits", pooled=True))
    candidates = tmp_path / "first.run"
    lines = [f"{query} Q0 d{number} 1 {number} me\n" for query in TEXTS.queries for number in range(5)]
    candidates.write_text("".join([*lines, f"{next(iter(TEXTS.queries))} Q0 other 1 9 me\n"]))
    run_path = tmp_path / "found.run"
    options = EvaluateOptions(candidates=candidates, num_candidates=4)
    report = evaluate_model(path, data, options, run_path=run_path)
    assert report.model.kind == "reranker"
    assert "1 candidates are not among the documents, and are left out" in report.notes
    for place, (query, found) in enumerate(read_run(run_path).items()):
        pair, numbers = ids_of(TEXTS.queries[query]), (1, 2, 3, 4) if place else (2, 3, 4)
        logits = {f"d{n}": float(values[[*pair, *ids_of(TEXTS.documents[f"d{n}"])]].sum()) for n in numbers}
        assert set(found) == set(logits)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_bm25_finds_the_candidates_of_a_reranker(tmp_path: Path, data: Path) -> None:
    """And is a base to compare with; pairs that are cut are said."""
    names = {"onnxtool.task": "text-classification", "onnxtool.files": "model", "onnxtool.max_length": "6"}
    path = write_model(tmp_path, TinyModel(table(V, 1) / 4, "logits", metadata=names, pooled=True))
    report = evaluate(path, data, against="bm25", num_candidates=100)
    assert report.against is not None
    assert report.against.base.kind == "bm25"
    for one in report.queries:
        assert set(one.top) <= set(TEXTS.documents)
    assert any("which BM25 found" in note for note in report.notes)
    assert any("pairs are longer than the model takes, and cut" in note for note in report.notes)


def test_an_unchanged_model_passes_every_gate(tmp_path: Path, data: Path) -> None:
    """No figure differs, whichever path its file has."""
    path = write_dense(tmp_path / "a")
    copy = write_dense(tmp_path / "b")
    gates = ("ndcg@10<-0%", "MRR@10<-0%", "map<-0", "overlap@10<1", "size_bytes>+0%")
    report = evaluate(path, data, against=str(copy), fail_if=gates)
    assert report.passed
    assert report.against is not None
    assert report.against.num_equal_top_10 == report.num_queries
    assert report.against.lost == ()
    assert all(difference.p_value == 1 for difference in report.against.measures.values())


def test_a_damaged_model_meets_the_gate_and_the_queries_that_lost_are_named(tmp_path: Path) -> None:
    """Each query has one document of the same words, which only the whole model finds first."""
    texts = known_items()
    data = write_beir(tmp_path / "data", texts)
    signs = np.sign(VALUES) * np.array([1, 1, 1, 0, 0, 0], np.float32)
    whole, damaged = write_dense(tmp_path / "a"), write_dense(tmp_path / "b", signs)
    done = run_onnxtool(
        tmp_path, "evaluate", "--model_path", damaged, "--data", data, "--against", whole,
        "--fail_if", "ndcg@10<-0.5%", "--fail_if", "ndcg@10<0", "--format", "json", "--quiet", "--cache", "cache",
    )  # fmt: skip
    assert done.returncode == 1
    assert "gate failed: nDCG@10 is 0." in done.stderr
    report = json.loads(done.stdout)
    change = report["against"]["measures"]["nDCG@10"]
    assert change["high"] < 0
    assert change["p_value"] < 0.05
    worst = report["against"]["lost"][0]
    assert worst["measures"]["nDCG@10"] < worst["base"]["nDCG@10"] == 1
    assert worst["text"] == texts.queries[worst["id"]]


def known_items() -> Texts:
    """All pairs of words as documents, of which each third is a query as well, whose only document is the same."""
    words = VOCABULARY[5:]
    pairs = [f"{one} {two}" for one in words for two in words if one < two]
    documents = {f"d{number}": text for number, text in enumerate(pairs)}
    queries = {f"q{number}": text for number, text in list(enumerate(pairs))[::3]}
    return Texts(documents, queries, {query: {f"d{query[1:]}": 1} for query in queries})


def test_vectors_of_documents_are_kept_by_the_contents(tmp_path: Path, data: Path) -> None:
    """A second run encodes none; another text makes another folder."""
    path = write_dense(tmp_path)
    first = evaluate(path, data)
    folders = set((data / "cache").iterdir())
    assert evaluate(path, data).queries == first.queries
    assert set((data / "cache").iterdir()) == folders
    write_lines(data / "corpus.jsonl", {**TEXTS.documents, "d0": "mat mat mat"}, title="")
    evaluate(path, data)
    assert len(set((data / "cache").iterdir())) > len(folders)


def test_a_kept_vector_that_changed_is_refused(tmp_path: Path, data: Path) -> None:
    """By its file, whose size is the same."""
    path = write_dense(tmp_path)
    evaluate(path, data)
    (vectors,) = (data / "cache").glob("*/part-00000.npy")
    content = bytearray(vectors.read_bytes())
    content[-1] ^= 1
    vectors.write_bytes(content)
    with pytest.raises(InputError, match="part-00000.npy has other contents than were written") as caught:
        evaluate(path, data)
    assert "pass another --cache" in caught.value.hint


def test_what_is_wrong_with_the_collection_is_said(tmp_path: Path, data: Path) -> None:
    """Documents that are judged and not there, those without a text, those whose id is taken, and empty results."""
    with (data / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d0", "text": "again"}\n{"_id": "empty", "text": ""}\n')
    with (data / "qrels" / "test.tsv").open("a") as file:
        file.write("q0\tnowhere\t3\nq0\telsewhere\t3\n")
    notes = evaluate(write_dense(tmp_path), data).notes
    assert any(note.startswith("2 judged documents are not among the documents") for note in notes)
    assert any("repeats the id of an earlier line" in note for note in notes)
    assert any("has contents without any text" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--fail_if", "ndcg@10<-1%"), 2, "is relative, and there is no base"),
        (("--fail_if", "ndcg@20<0.5"), 2, "nothing called 'ndcg@20' is measured"),
        (("--fail_if", "ndcg@10"), 2, "no comparison after 'ndcg@10'"),
        (("--measure", "ndgc@10"), 2, "did you mean nDCG?"),
        (("--split", "dev"), 1, "has no judgements of the split 'dev'"),
        (("--candidates", "."), 1, "--candidates is for rerankers"),
        (("--against", "nowhere"), 1, "sentence-transformers cannot load nowhere"),
        (("--long", "window", "--against", "nowhere"), 1, "--long window is for ONNX files"),
        (("--overlap", "2"), 2, "no windows to share tokens"),
        (("--depth", "0"), 2, "0 is not in the range"),
        (("--dimensions", "6"), 1, "the vectors of this model have 6"),
        (("--measure", "Recall@2000"), 1, "Recall@2000 is not known of the 1000 best documents"),
        (("--measure", "P@0"), 2, "no measure 'P@0': it looks at no document"),
        (("--against", "bm25", "--fail_if", "size_bytes<-10%"), 2, "the base has no figure 'size_bytes'"),
        (("--against", "bm25", "--fail_if", "query_ms>+10%"), 2, "the base has no figure 'query_ms'"),
        (("--fail_if", "query_terms>3"), 2, "the report has no figure 'query_terms'"),
        (("--keep_special",), 1, "--keep_special would change nothing"),
        (("--partner", "."), 1, "reads queries and documents, and a partner was passed"),
        (("--num_candidates", "100"), 1, "--num_candidates would change nothing"),
        (("--cache", "/dev/null/x"), 1, "hint: pass another --cache"),
    ],
)
def test_a_mistake_is_one_error(tmp_path: Path, data: Path, options: tuple[str, ...], code: int, message: str) -> None:
    """With its way out, before anything is encoded."""
    path = write_dense(tmp_path)
    done = run_onnxtool(
        tmp_path, "evaluate", "--model_path", path, "--data", data, "--cache", "cache", "--quiet", *options,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("padding", [1, 6])
def test_a_padded_vocabulary_is_searched(tmp_path: Path, data: Path, padding: int) -> None:
    """A model is wider than its tokenizer, and than the table of its queries where they are looked up."""
    pytest.importorskip("pyarrow")
    values = table(V, V + padding)
    values[:, -1] = 3.0  # a term of every document that no query has
    path = write_model(tmp_path / "run", model_for("sparse-encoding", values, "logits"))
    terms = evaluate(path, data).model.terms
    looked_up = evaluate(inference_free(tmp_path / "looked_up", values=values), data)
    assert terms is not None
    assert terms.sparsity == pytest.approx(1 - terms.document_terms / (V + padding))
    assert looked_up.measures["nDCG@10"].mean > 0
    report = encode_corpus(path, data / "corpus.jsonl", tmp_path / "out", CorpusOptions(output_format="parquet"))
    assert report.dimensions == V + padding
    (shard,) = read_shards(tmp_path / "out", VOCABULARY)
    assert isinstance(shard.vectors, SparseVectors)
    assert f"[{V + padding - 1}]" in shard.vectors[0].terms()


def test_grades_that_a_measure_does_not_know_are_refused_first(tmp_path: Path, data: Path) -> None:
    """Before the documents are encoded."""
    (data / "qrels" / "test.tsv").write_text("q0\td0\t9\n")
    with pytest.raises(InputError, match="cannot compute ERR@10 of these judgements"):
        evaluate(write_dense(tmp_path), data, measures=("ERR@10",))
    assert not (data / "cache").exists()


def test_a_model_without_vectors_is_refused(tmp_path: Path, data: Path) -> None:
    """What it is for is said."""
    path = write_model(tmp_path, model_for("token-classification", table(V, 3), "logits"))
    with pytest.raises(InputError, match="is for token-classification, and neither gives vectors nor scores pairs"):
        evaluate(path, data)


@pytest.mark.parametrize("format_name", ["text", "markdown"])
def test_every_format_has_the_figures(tmp_path: Path, data: Path, format_name: str) -> None:
    """Names of files and queries are untrusted."""
    write_lines(data / "queries.jsonl", {**TEXTS.queries, "q1": "<script>alert(1)</script>"})
    path = write_dense(tmp_path)
    done = run_onnxtool(
        tmp_path, "evaluate", "--model_path", path, "--data", data, "--against", "bm25", "--quiet", "--cache", "cache",
        "--format", format_name,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measure = evaluate(path, data).measures["nDCG@10"].mean
    assert f"{measure:.4f}" in done.stdout
    assert "<script>" not in done.stdout or format_name == "text"


def test_a_run_has_no_place_for_ids_with_spaces(tmp_path: Path, data: Path) -> None:
    """Its columns would be others."""
    write_lines(data / "corpus.jsonl", {**TEXTS.documents, "d 0": "cat"}, title="")
    options = EvaluateOptions(cache=tmp_path / "cache", provider="cpu")
    with pytest.raises(InputError, match="the id 'd 0' has a space"):
        evaluate_model(write_dense(tmp_path), data, options, run_path=tmp_path / "found.run")
    assert not {"found.run", "cache"} & {path.name for path in tmp_path.iterdir()}


def test_a_dry_run_checks_and_writes_nothing(tmp_path: Path, data: Path) -> None:
    """Neither vectors nor the run."""
    path = write_dense(tmp_path)
    before = set(tmp_path.rglob("*"))
    done = run_onnxtool(
        tmp_path, "evaluate", "--model_path", path, "--data", data, "--dry_run", "--save_run", "found.run",
        "--cache", "cache",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "found.run" in done.stdout
    assert set(tmp_path.rglob("*")) == before


def test_a_collection_judges_candidates_against_the_input(tmp_path: Path) -> None:
    """A gate that is met is the reason; without a gate nothing would be decided."""
    data = write_beir(tmp_path / "data", known_items())
    path = write_dense(tmp_path / "a")
    options = EvaluateOptions(cache=tmp_path / "cache", fail_if=("ndcg@10<-0.5%",), measures=("nDCG@10",))
    judge = judge_by_retrieval(path, data, options)
    expected = evaluate(path, data).measures["nDCG@10"].mean
    assert judge(path) == ({"nDCG@10": expected}, "")
    # A candidate has no tokenizer beside it: that of the input is taken.
    damaged = model_for("sentence-similarity", np.ones_like(VALUES), "last_hidden_state").write(tmp_path / "b.onnx")
    assert judge(damaged).reason.startswith("nDCG@10 is ")
    with pytest.raises(GateError, match="a collection decides nothing without a condition"):
        judge_by_retrieval(path, data, EvaluateOptions())


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Model and number of documents of every encoding that no cache saves."""
    done: list[tuple[Path, int]] = []

    def spied(path: Path, corpus: Path, *others: Any) -> Any:
        report = encode_corpus(path, corpus, *others)
        done.extend([(path, report.num_encoded)] if report.num_encoded else [])
        return report

    monkeypatch.setattr(systems, "encode_corpus", spied)
    return done


@pytest.mark.usefixtures("brief_timings")
def test_auto_encodes_no_candidate_slower_than_one_that_passed(
    tmp_path: Path, encoded: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One encoding for the input and one for each candidate up to the first that passes; the table says so."""
    data = write_beir(tmp_path / "data", known_items())
    path = write_dense(tmp_path / "a")
    options = EvaluateOptions(cache=tmp_path / "cache", fail_if=("ndcg@10<-0.5%",), measures=("nDCG@10",))
    rows = (("fp32", ""), ("fp16", ""))
    monkeypatch.setitem(candidates.CANDIDATES, "cpu", rows)
    report = optimize_model(
        OptimizeOptions(path, precision="auto", provider="cpu"), judge=judge_by_retrieval(path, data, options)
    )
    assert [num_documents for _, num_documents in encoded] == [45, 45]
    (chosen,) = [one for one in report.candidates if one.chosen]
    (other,) = [one for one in report.candidates if not one.chosen]
    assert (other.reason, other.quality) == ("", {})
    assert other.not_judged == f"slower than {chosen.precision}, which passed"
    assert chosen.not_judged == ""
    blocks = optimize_blocks(report, stats=False)
    (table,) = [block for block in blocks if isinstance(block, Table) and "verdict" in block.columns]
    assert sorted(row[-1] for row in table.rows) == ["chosen", f"not judged: {other.not_judged}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fail_if", "ndcg@10<0"), "--fail_if is for a test collection: pass --data DIR"),
        (("--data", "data", "--fail_if", "ndcg@10<0"), "--data chooses among precisions, and --precision is fp32"),
    ],
)
def test_optimize_takes_a_collection_for_auto_alone(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    """Else it would say nothing of the result."""
    done = run_onnxtool(tmp_path, "optimize", "--model_path", write_dense(tmp_path), *options)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("module", ["", "2_Dense"])
def test_a_checkpoint_that_is_compared_with_is_not_unpickled(workshop: Workshop, tmp_path: Path, module: str) -> None:
    """Neither its transformer nor a module; torch.load is what it was behind that."""
    folder = tmp_path / "checkpoint"
    transformer = Transformer(str(workshop.checkpoint("tiny-mlm")))
    size = transformer.get_embedding_dimension()
    pooling = Pooling(size)
    dense = Dense(size, 4)
    SentenceTransformer(modules=[transformer, pooling, dense]).save(str(folder))
    assert open_checkpoint(str(folder), DENSE, EvaluateOptions()).kind == DENSE
    weights = folder / module / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    load = torch.load
    with pytest.raises(CheckpointError, match=r"has weights in a pickle only \(pytorch_model\.bin\)"):
        open_checkpoint(str(folder), DENSE, EvaluateOptions())
    assert torch.load is load
