"""Small collections, written in the layouts of BEIR and TREC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.infer.tiny_models import WORDS


@dataclass(frozen=True)
class Texts:
    """Documents and queries, id to text, and the judgements: query to document to grade."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    judgements: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def random_texts(num_documents: int, num_queries: int, seed: int = 0) -> Texts:
    """Make texts of words that the tiny tokenizer knows; each query has up to four judged documents."""
    random = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(random.choice(WORDS, size=random.integers(1, 7)))

    documents = {f"d{number}": text() for number in range(num_documents)}
    queries = {f"q{number}": text() for number in range(num_queries)}
    judgements = {
        query: {
            str(document): int(random.integers(0, 4))
            for document in random.choice(list(documents), size=min(4, num_documents), replace=False)
        }
        for query in queries
    }
    return Texts(documents, queries, judgements)


def write_beir(folder: Path, texts: Texts, split: str = "test") -> Path:
    """Write `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "corpus.jsonl", texts.documents, title="")
    write_lines(folder / "queries.jsonl", texts.queries)
    lines = ["query-id\tcorpus-id\tscore"]
    lines += [f"{query}\t{one}\t{grade}" for query, found in texts.judgements.items() for one, grade in found.items()]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_lines(path: Path, texts: Mapping[str, str], **more: str) -> None:
    """Write BEIR's JSON Lines."""
    lines = (json.dumps({"_id": name, **more, "text": text}) for name, text in texts.items())
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_trec(folder: Path, texts: Texts) -> Path:
    """Write `collection.tsv`, `topics.tsv` and `qrels.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "collection.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in texts.documents.items()))
    (folder / "topics.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in texts.queries.items()))
    judged = (f"{query} 0 {one} {grade}\n" for query, all_ in texts.judgements.items() for one, grade in all_.items())
    (folder / "qrels.txt").write_text("".join(judged))
    return folder
