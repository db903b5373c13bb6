"""Check the measures of `onnxtool evaluate` against pytrec_eval, or its whole search against the `beir` package.

`python scripts/check_evaluation.py` makes collections (scripts/make_collection.py), exports MiniLM, which has trained
weights, and prints measures as Markdown beside those that pytrec_eval computes from the run files alone. `--beir` tries
three collections in which queries have ids of documents, beside beir, which loads, encodes with sentence-transformers,
searches and measures by itself (`pip install --no-deps beir`). Exit code 1: a measure differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytrec_eval
from bench_infer import make_minilm
from harness.machine import cpu_class
from make_collection import make_collection, write_beir
from make_models import trained_model

from onnxtool import EvaluateOptions, evaluate_model
from onnxtool.evaluation.collection import open_collection
from onnxtool.evaluation.report import EvaluationReport
from onnxtool.evaluation.systems import Bm25

TREC = {"nDCG@10": "ndcg_cut_10", "Recall@100": "recall_100", "MAP": "map"}
BEIR = {"nDCG@10": "NDCG@10", "MRR@10": "MRR@10", "Recall@100": "Recall@100", "MAP": "MAP@100"}
DEPTH = 100  # less than the documents, so that one too few would show


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Return the scores of a run file, by nothing of onnxtool."""
    with path.open(encoding="utf-8") as file:
        run: dict[str, dict[str, float]] = pytrec_eval.parse_run(file)
    return run


def by_pytrec_eval(data: Path, run_path: Path) -> dict[str, float]:
    """Return the means over all judged queries, from the files alone."""
    judged: dict[str, dict[str, int]] = {}
    for line in (data / "qrels" / "test.tsv").read_text("utf-8").splitlines()[1:]:
        query, document, grade = line.split("\t")
        judged.setdefault(query, {})[document] = int(grade)
    run = read_run(run_path)
    ten = {
        query: dict(sorted(found.items(), key=lambda entry: (entry[1], entry[0]), reverse=True)[:10])
        for query, found in run.items()
    }
    found = pytrec_eval.RelevanceEvaluator(judged, set(TREC.values())).evaluate(run)
    first = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank"}).evaluate(ten)
    means = {
        ours: sum(found.get(one, {}).get(theirs, 0.0) for one in judged) / len(judged) for ours, theirs in TREC.items()
    }
    return means | {"MRR@10": sum(first.get(one, {}).get("recip_rank", 0.0) for one in judged) / len(judged)}


def evaluate(path: Path, data: Path, folder: Path, **options: Any) -> tuple[EvaluationReport, Path]:
    """Evaluate, and return the report and where the run lies."""
    run_path = folder / f"{path.stem}-{data.name}.run"
    asked = EvaluateOptions(model_name=str(trained_model()), cache=folder / "cache", provider="cpu", **options)
    return evaluate_model(path, data, asked, run_path=run_path, force=True), run_path


def measures_table(model: Path, data: Path, folder: Path) -> int:
    """Print how far the measures are from those of pytrec_eval, and return how many are too far."""
    small = folder / "small"
    make_collection(small, num_documents=800, num_queries=150)
    cases = [("all documents", data), ("800 documents", small)]
    print("| collection | queries | nDCG@10 | MRR@10 | Recall@100 | MAP | largest difference from pytrec_eval |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    wrong = 0
    for name, place in cases:
        report, run_path = evaluate(model, place, folder)
        expected = by_pytrec_eval(place, run_path)
        largest = max(abs(report.measures[one].mean - value) for one, value in expected.items())
        wrong += largest > 1e-6
        means = " | ".join(f"{report.measures[one].mean:.4f}" for one in BEIR)
        print(f"| {name} | {report.num_queries} | {means} | {largest:.1e} |", flush=True)
    return wrong


def with_own_ids(data: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Write collections whose queries have ids of documents, none of which is judged relevant for its query.

    Judged are the three documents behind the one that a query is, or is about; each tenth query has grades of 0 alone.
    """
    documents = [json.loads(line) for line in (data / "corpus.jsonl").open(encoding="utf-8")]
    texts = {line["_id"]: line["text"] for line in map(json.loads, (data / "queries.jsonl").open(encoding="utf-8"))}
    places = [place for place, one in enumerate(documents[:-3]) if f"q:{one['_id']}" in texts]
    ids = [one["_id"] for one in documents]
    about = {place: texts[f"q:{ids[place]}"] for place in places}
    numbers = list(map(str, range(len(documents))))
    # Numbered apart, so that the same number is another thing: a query is never that of the document behind it.
    by_chance = {str((place + 7) % len(documents)): (place, text) for place, text in about.items()}
    are_documents = {ids[place]: (place, documents[place]["text"]) for place in places}
    some = {ids[place] if place % 2 else f"q:{ids[place]}": (place, text) for place, text in about.items()}
    for name, names, queries in (
        ("every query is a document", ids, are_documents),
        ("half of the ids", ids, some),
        ("numbers, equal by chance", numbers, by_chance),
    ):
        output = folder / name.replace(" ", "-").replace(",", "")
        corpus = ({**one, "_id": key} for one, key in zip(documents, names, strict=True))
        judged = [
            (key, names[place + behind], 4 - behind if number % 10 else 0)
            for number, (key, (place, _)) in enumerate(queries.items())
            for behind in (1, 2, 3)
        ]
        write_beir(output, corpus, ({"_id": key, "text": text} for key, (_, text) in queries.items()), {"test": judged})
        yield name, output


def by_beir(data: Path, run: Mapping[str, Mapping[str, float]] | None) -> dict[str, float]:
    """Return what the beir package measures of a run, or by its own search with MiniLM in PyTorch, unrounded."""
    from beir.datasets.data_loader import GenericDataLoader
    from beir.retrieval import custom_metrics, evaluation
    from beir.retrieval.models import SentenceBERT
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    for module in (custom_metrics, evaluation):
        vars(module)["round"] = lambda value, _digits: value
    corpus, queries, judged = GenericDataLoader(str(data)).load(split="test")
    searcher = None
    if run is None:
        model = SentenceBERT(str(trained_model()), device="cpu")
        searcher = DenseRetrievalExactSearch(model, show_progress_bar=False)
    retriever = evaluation.EvaluateRetrieval(searcher, k_values=[10, DEPTH], score_function="cos_sim")
    found = retriever.retrieve(corpus, queries) if run is None else {query: dict(ten) for query, ten in run.items()}
    means: dict[str, float] = {}
    for part in retriever.evaluate(judged, found, retriever.k_values):
        means |= part
    means |= retriever.evaluate_custom(judged, found, retriever.k_values, metric="mrr")
    return {ours: means[theirs] for ours, theirs in BEIR.items()}


def own_ids_table(model: Path, data: Path, folder: Path) -> int:
    """Print how far measures are from those of beir where queries are documents, and return how many are too far."""
    heads = ("collection", "queries", "with the id of a document", "without a relevant one", "search")
    print(f"| {' | '.join((*heads, *BEIR))} | nDCG@10 with own ids | largest difference from beir |")
    print(f"|---|---:|---:|---:|---|{'---:|' * (len(BEIR) + 2)}")
    wrong = 0
    for name, place in with_own_ids(data, folder):
        searches: dict[str, dict[str, Any]] = {"dense": {}, "windows": {"long": "window"}, "BM25": {"against": "bm25"}}
        for search, options in searches.items():
            report, _ = evaluate(model, place, folder, depth=DEPTH, **options)
            longer = {**options, "depth": DEPTH + 1, "keep_own_ids": True}
            with_own, run_path = evaluate(model, place, folder, **longer)
            means = {one: report.measures[one].mean for one in BEIR}
            kept = with_own.measures["nDCG@10"].mean
            run: dict[str, dict[str, float]] | None = None
            if search == "windows":
                run = read_run(run_path)
            elif search == "BM25":
                assert report.against is not None  # noqa: S101  it was asked for
                assert with_own.against is not None  # noqa: S101
                means = {one: report.against.measures[one].base for one in BEIR}
                kept = with_own.against.measures["nDCG@10"].base
                run = Bm25(EvaluateOptions(depth=DEPTH + 1, keep_own_ids=True)).retrieve(open_collection(place)).run
            largest = max(abs(means[one] - value) for one, value in by_beir(place, run).items())
            wrong += largest > 1e-6
            counts = (report.num_queries, report.num_own_ids_left_out, report.num_without_relevant)
            figures = (*(f"{value:.4f}" for value in means.values()), f"{kept:.4f}", f"{largest:.1e}")
            print(f"| {' | '.join((name, *map(str, counts), search, *figures))} |", flush=True)
    return wrong


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beir", action="store_true", help="compare with the beir package instead")
    asked = parser.parse_args()
    print(f"{cpu_class()}\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "all"
        make_collection(data, num_documents=400 if asked.beir else 0, num_queries=100 if asked.beir else 500)
        check = own_ids_table if asked.beir else measures_table
        return int(check(make_minilm(folder)[1], data, folder) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
