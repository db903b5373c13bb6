"""Check what `onnxtool evaluate` says: its measures against pytrec_eval, its search against loops, and its gates.

`python scripts/check_evaluation.py` makes a collection (scripts/make_collection.py), exports MiniLM, which has trained
weights, and prints tables as Markdown:

- measures of three runs, read from their files and computed again by pytrec_eval alone;
- the file in fp32 against PyTorch, int8 against fp32, and weights in int8 with one scale for a whole matrix, which is
  the planted mistake, each on the gate `ndcg@10<-0.5%`;
- an unchanged file against itself, 20 times, each with vectors that were encoded anew;
- `--beir`, and nothing else: three collections in which queries have ids of documents, beside the `beir` package, which
  loads, encodes with sentence-transformers, searches and measures by itself (`pip install --no-deps beir`);
- `--large DIR`: time and memory on a collection that is repeated until it has 100,000 documents.

Exit code 1: a measure differs by more than 1e-6, the mistake passes, or an unchanged model does not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytrec_eval
from harness.machine import cpu_class
from make_collection import make_collection
from make_models import trained_model
from onnxruntime.quantization import QuantType, quantize_dynamic

from onnxtool.evaluation import EvaluateOptions, EvaluationReport, evaluate_model
from onnxtool.evaluation.collection import open_collection
from onnxtool.evaluation.systems import Bm25
from onnxtool.export import ExportOptions, export_model
from onnxtool.optimize import OptimizeOptions, optimize_model

GATE = "ndcg@10<-0.5%"
TREC = {"nDCG@10": "ndcg_cut_10", "Recall@100": "recall_100", "MAP": "map"}
BEIR = {"nDCG@10": "NDCG@10", "MRR@10": "MRR@10", "Recall@100": "Recall@100", "MAP": "MAP@100"}
DEPTH = 100  # less than the documents, so that one too few would show
LARGE = 100_000


def read_columns(path: Path, *places: int) -> Iterator[list[str]]:
    """Yield columns of a file, by nothing of onnxtool."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            cells = line.split()
            yield [cells[place] for place in places]


def by_pytrec_eval(data: Path, run_path: Path) -> dict[str, float]:
    """Return the means over all judged queries, from the files alone."""
    judged: dict[str, dict[str, int]] = {}
    for query, document, grade in list(read_columns(data / "qrels" / "test.tsv", 0, 1, 2))[1:]:
        judged.setdefault(query, {})[document] = int(grade)
    run: dict[str, dict[str, float]] = {}
    for query, document, score in read_columns(run_path, 0, 2, 4):
        run.setdefault(query, {})[document] = float(score)
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


def graded(data: Path, output: Path) -> Path:
    """Copy a collection and judge, beside the right document, those next to it: grades 2 and 1."""
    shutil.copytree(data, output)
    ids = [json.loads(line)["_id"] for line in (data / "corpus.jsonl").open(encoding="utf-8")]
    places = {name: place for place, name in enumerate(ids)}
    lines = ["query-id\tcorpus-id\tscore\n"]
    for query, document in list(read_columns(data / "qrels" / "test.tsv", 0, 1))[1:]:
        lines.append(f"{query}\t{document}\t2\n")
        lines += [
            f"{query}\t{ids[place]}\t1\n"
            for place in range(places[document] + 1, places[document] + 4)
            if place < len(ids)
        ]
    (output / "qrels" / "test.tsv").write_text("".join(lines), encoding="utf-8")
    return output


def make_files(folder: Path) -> dict[str, Path]:
    """Return MiniLM in fp32, in int8, and with the planted mistake."""
    plain = folder / "minilm.onnx"
    export_model(ExportOptions(str(trained_model()), output=plain))
    whole, parts, bad = (folder / f"minilm-{name}.onnx" for name in ("fp32", "int8", "bad"))
    optimize_model(OptimizeOptions(plain, output=whole))
    optimize_model(OptimizeOptions(plain, output=parts, precision="int8"))
    # Operators that each compute in integers with one scale for a matrix, and ranges of activations over a whole batch.
    quantize_dynamic(plain, bad, weight_type=QuantType.QInt8, per_channel=False)
    return {"plain": plain, "fp32": whole, "int8": parts, "bad": bad}


def evaluate(path: Path, data: Path, folder: Path, **options: Any) -> tuple[EvaluationReport, Path]:
    """Evaluate, and return the report and where the run lies."""
    run_path = folder / f"{path.stem}-{data.name}.run"
    asked = EvaluateOptions(model_name=str(trained_model()), cache=folder / "cache", provider="cpu", **options)
    return evaluate_model(path, data, asked, run_path=run_path, force=True), run_path


def measures_table(files: dict[str, Path], data: Path, folder: Path) -> int:
    """Print how far the measures are from those of pytrec_eval, and return how many are too far."""
    small = folder / "small"
    make_collection(small, num_documents=800, num_queries=150)
    cases = [("all documents", data), ("800 documents", small), ("three grades", graded(data, folder / "graded"))]
    print("| collection | queries | nDCG@10 | MRR@10 | Recall@100 | MAP | largest difference from pytrec_eval |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    wrong = 0
    for name, place in cases:
        report, run_path = evaluate(files["fp32"], place, folder)
        expected = by_pytrec_eval(place, run_path)
        largest = max(abs(report.measures[one].mean - value) for one, value in expected.items())
        wrong += largest > 1e-6
        means = " | ".join(f"{report.measures[one].mean:.4f}" for one in ("nDCG@10", "MRR@10", "Recall@100", "MAP"))
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
        (output / "qrels").mkdir(parents=True)
        corpus = ({**one, "_id": key} for one, key in zip(documents, names, strict=True))
        (output / "corpus.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in corpus), encoding="utf-8")
        lines = (json.dumps({"_id": key, "text": text}) for key, (_, text) in queries.items())
        (output / "queries.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        judged = ["query-id\tcorpus-id\tscore"]
        for number, (key, (place, _)) in enumerate(queries.items()):
            grades = (4 - behind for behind in (1, 2, 3)) if number % 10 else (0, 0, 0)
            judged += [f"{key}\t{names[place + behind]}\t{grade}" for behind, grade in enumerate(grades, start=1)]
        (output / "qrels" / "test.tsv").write_text("\n".join(judged) + "\n", encoding="utf-8")
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


def own_ids_table(files: dict[str, Path], data: Path, folder: Path) -> int:
    """Print how far measures are from those of beir where queries are documents, and return how many are too far."""
    heads = ("collection", "queries", "with the id of a document", "without a relevant one", "search")
    print(f"| {' | '.join((*heads, *BEIR))} | nDCG@10 with own ids | largest difference from beir |")
    print(f"|---|---:|---:|---:|---|{'---:|' * (len(BEIR) + 2)}")
    wrong = 0
    for name, place in with_own_ids(data, folder):
        searches: dict[str, dict[str, Any]] = {"dense": {}, "windows": {"long": "window"}, "BM25": {"against": "bm25"}}
        for search, options in searches.items():
            report, _ = evaluate(files["fp32"], place, folder, depth=DEPTH, **options)
            longer = {**options, "depth": DEPTH + 1, "keep_own_ids": True}
            with_own, run_path = evaluate(files["fp32"], place, folder, **longer)
            means = {one: report.measures[one].mean for one in BEIR}
            kept = with_own.measures["nDCG@10"].mean
            run: dict[str, dict[str, float]] | None = None
            if search == "windows":
                run = {}
                for query, document, score in read_columns(run_path, 0, 2, 4):
                    run.setdefault(query, {})[document] = float(score)
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


def gates_table(files: dict[str, Path], data: Path, folder: Path) -> int:
    """Print what differs between files, and return how many gates decided wrongly."""
    cases = (
        ("fp32, optimized", "fp32", str(trained_model()), False),
        ("int8", "int8", str(files["fp32"]), None),  # near the gate, either may be
        ("int8 with one scale a matrix", "bad", str(files["fp32"]), True),
    )
    print(f"\n| file | base | nDCG@10 | change | interval of 95 % | p | same ten in the same order | `{GATE}` |")
    print("|---|---|---:|---:|---|---:|---:|---|")
    wrong = 0
    for name, kind, base, expected in cases:
        report, _ = evaluate(files[kind], data, folder, against=base, fail_if=(GATE,))
        assert report.against is not None  # noqa: S101  it was asked for
        one = report.against.measures["nDCG@10"]
        met = report.gates[0].met
        wrong += expected is not None and met is not expected
        label = "PyTorch" if kind == "fp32" else "fp32, optimized"
        change, low, high = (f"{value / one.base:+.2%}" for value in (one.change, one.low, one.high))
        figures = f"{report.measures['nDCG@10'].mean:.4f} | {change} | {low} to {high}"
        same = f"{report.against.num_equal_top_10} of {report.num_queries}"
        print(
            f"| {name} | {label} | {figures} | {one.p_value:.3f} | {same} | {'met' if met else 'not met'} |", flush=True
        )
    return wrong


def repeat_unchanged(files: dict[str, Path], folder: Path, times: int) -> int:
    """Evaluate a file against a copy of itself, each time with a cache of its own; return how often a gate was met."""
    small, copy = folder / "small", folder / "copy.onnx"
    shutil.copy(files["int8"], copy)
    met = 0
    for number in range(times):
        place = folder / f"again{number}"
        place.mkdir()
        gates = ("ndcg@10<-0%", "mrr@10<-0%", "recall@100<-0%", "map<-0%", "overlap@10<1")
        report, _ = evaluate(copy, small, place, against=str(files["int8"]), fail_if=gates)
        met += not report.passed
        shutil.rmtree(place)
    print(f"\nAn unchanged file against itself: {times - met} of {times} runs pass every gate.", flush=True)
    return met


def large_table(files: dict[str, Path], folder: Path, folders: Sequence[Path]) -> None:
    """Evaluate 100,000 documents in a process of its own, and print its time and memory."""
    data = folder / "large"
    record = make_collection(data, folders=folders)
    lines = (data / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    with (data / "corpus.jsonl").open("a", encoding="utf-8") as file:
        for number in range(LARGE - len(lines)):
            entry = json.loads(lines[number % len(lines)])
            file.write(json.dumps({**entry, "_id": f"{entry['_id']}#{number // len(lines) + 2}"}) + "\n")
    command = [sys.executable, "-m", "onnxtool", "evaluate", "--model_path", str(files["int8"]), "--data", str(data)]
    command += ["--model_name", str(trained_model()), "--cache", str(folder / "cache"), "--format", "json", "--quiet"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"\n{report['num_documents']:,} documents, of which {record['documents']:,} are different, and "
        f"{report['num_queries']} queries: {report['model']['seconds']:.0f} s, "
        f"{report['peak_rss_bytes'] / 1e9:.2f} GB of memory at most."
    )


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="runs of the unchanged file")
    parser.add_argument("--large", type=Path, action="append", default=[], metavar="DIR", help="with more Python files")
    parser.add_argument("--beir", action="store_true", help="compare with the beir package, and do nothing else")
    asked = parser.parse_args()
    print(f"{cpu_class()}\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "all"
        make_collection(data, num_documents=400 if asked.beir else 0, num_queries=100 if asked.beir else 500)
        files = make_files(folder)
        if asked.beir:
            return int(own_ids_table(files, data, folder) > 0)
        wrong = measures_table(files, data, folder) + gates_table(files, data, folder)
        wrong += repeat_unchanged(files, folder, asked.times)
        if asked.large:
            large_table(files, folder, asked.large)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
