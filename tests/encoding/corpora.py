"""Corpora of a few words for tests, the models that encode them, and what their vectors have to be."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.infer.tiny_models import VOCABULARY, WORDS, ids_of, model_for, splade_terms, table, write_model

V = len(VOCABULARY)


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Make texts of 1 to 12 words."""
    chance = random.Random(seed)  # noqa: S311  no secret
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 12))) for _ in range(count)]


def write_corpus(path: Path, texts: Sequence[str]) -> Path:
    """Write `texts` with the ids d0, d1 and so on, packed where the name says so."""
    lines = "".join(json.dumps({"id": f"d{place}", "contents": text}) + "\n" for place, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def sparse_model(folder: Path) -> Path:
    """Write a sparse encoder with logits [B, S, V]."""
    return write_model(folder, model_for("sparse-encoding", table(V, V), "logits"))


def dense_model(folder: Path, **settings: Any) -> Path:
    """Write an embedder with hidden states [B, S, 4], whose checkpoint takes their mean."""
    model = model_for("sentence-similarity", table(V, 4), "last_hidden_state", **settings)
    return write_model(folder, model, modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}})


def expected_terms(text: str) -> dict[str, int]:
    """SPLADE's definition in a loop, in whole numbers as Anserini counts them."""
    weights = {term: int(weight / 5 * 256 + 0.5) for term, weight in splade_terms(table(V, V), text).items()}
    return {term: weight for term, weight in weights.items() if weight}


def expected_mean(text: str) -> NDArray[np.float64]:
    """The mean of the rows of a text's tokens: float64 [4]."""
    return np.asarray(table(V, 4).astype(np.float64)[ids_of(text)].mean(axis=0))


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return name to content of all files of an output, those beside the folder as well."""
    beside = [path for path in folder.parent.iterdir() if path.is_file() and path.name.startswith(f"{folder.name}.")]
    hidden = [path for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}.")]
    inside = {path.name: path.read_bytes() for path in folder.iterdir()}
    return inside | {path.name.removeprefix(folder.name): path.read_bytes() for path in (*beside, *hidden)}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all shards, in order."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
