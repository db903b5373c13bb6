"""Compare `evaluate --prune` with brute force, and merged token vectors with sentence-transformers.

`python scripts/check_pruning.py`, after `make demo`: nDCG@10 of each rule by a loop in float64 beside that of
`evaluate`, the smallest index that passes a gate by exhaustive search, and the token vectors of 100 documents at
factors from 2 to 4.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onnxtool import EvaluateOptions, evaluate_model, load
from onnxtool.infer.vectors import TokenVectors

MODELS = Path("models")
SPARSE, COLLECTION, DENSE = MODELS / "splade.onnx", MODELS / "collection", MODELS / "checkpoints" / "all-MiniLM-L6-v2"
RULES = [f"top_k:{count}" for count in (8, 16, 24, 32, 48, 64, 96, 128)]
RULES += [
    "max_ratio:0.2",
    "max_ratio:0.4",
    "alpha_mass:0.6",
    "alpha_mass:0.8",
    "abs_value:1",
    "abs_value:2",
    "top_k:64/top_k:16",
]
GATE, LOSS = "ndcg@10<-1%", 0.99


def kept(row: Any, rule: str) -> Any:
    """Return a row of weights by a definition in float64."""
    name, _, number = rule.partition(":")
    if not name:
        return row
    order = [term for term in sorted(range(len(row)), key=lambda term: (-row[term], term)) if row[term] > 0]
    total, running, stays = sum(row[term] for term in order), 0.0, []
    for rank, term in enumerate(order):
        running += row[term]
        is_kept = {
            "top_k": rank < float(number),
            "max_ratio": row[term] >= float(number) * row[order[0]],
            "alpha_mass": running <= float(number) * total,
            "abs_value": row[term] >= float(number),
        }[name]
        stays += [term] if is_kept else []
    found = np.zeros_like(row)
    found[stays] = row[stays]
    return found


def ndcg(documents: Any, queries: Any, names: list[str], judged: list[dict[str, int]]) -> float:
    """Return nDCG@10; of equal scores, the last id comes first, as in trec_eval."""
    values = []
    for row, grades in zip((queries @ documents.T).astype(np.float32), judged, strict=True):
        ranked = sorted(((score, name) for score, name in zip(row, names, strict=True) if score > 0), reverse=True)[:10]
        gain = sum(grades.get(name, 0) / math.log2(rank + 2) for rank, (_, name) in enumerate(ranked))
        ideal = sorted(grades.values(), reverse=True)[:10]
        values.append(gain / sum(grade / math.log2(rank + 2) for rank, grade in enumerate(ideal)))
    return float(np.mean(values))


def main() -> int:
    """Print the curves and the largest differences; return 1 where one is not that of brute force."""
    lines = [json.loads(line) for line in (COLLECTION / "corpus.jsonl").open(encoding="utf-8")]
    texts = [f"{line.get('title') or ''} {line['text']}".strip() for line in lines]
    asked = {one["_id"]: one["text"] for one in map(json.loads, (COLLECTION / "queries.jsonl").open(encoding="utf-8"))}
    judged: dict[str, dict[str, int]] = {}
    for line in (COLLECTION / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        judged.setdefault(query, {})[document] = int(grade)
    model: Any = load(SPARSE)
    whole, wanted = (
        model.encode(part).to_dense().astype(np.float64) for part in (texts, [asked[query] for query in judged])
    )
    with tempfile.TemporaryDirectory() as cache:
        options = EvaluateOptions(measures=("nDCG@10",), prune=RULES, fail_if=(GATE,), cache=cache)
        report = evaluate_model(SPARSE, COLLECTION, options)
    worst, base, passing = 0.0, report.measures["nDCG@10"].mean, list[tuple[int, str]]()
    for one in report.pruned:
        documents, _, queries = one.prune.removesuffix("none").partition("/")
        found = np.stack([kept(row, documents) for row in whole])
        value = ndcg(
            found, np.stack([kept(row, queries) for row in wanted]), [line["_id"] for line in lines], [*judged.values()]
        )
        ours = one.measures["nDCG@10"].mean
        worst = max(worst, abs(ours - value))
        if one.prune != "none" and value >= LOSS * base:
            size = 8 * int(np.count_nonzero(found)) + 8 * (int(found.any(axis=0).sum()) + 1)
            passing.append((size, one.prune))
        print(f"| {one.prune} | {one.sizes.document_terms:.1f} | {one.sizes.index_bytes} | {ours:.6f} | {value:.6f} |")
    chosen = next(one for one in report.pruned if one.chosen)
    print(f"largest difference {worst:.1e}; chosen {chosen.prune}, by exhaustive search {min(passing)[1]}")
    apart = max(compare_tokens(texts[:100], factor) for factor in (2, 3, 4))
    print(f"token vectors of 100 documents at factors 2 to 4: largest difference {apart:.1e}")
    is_smallest = (chosen.sizes.index_bytes, chosen.prune) == min(passing)
    return int(worst > 1e-9 or not is_smallest or apart > 1e-6)


def compare_tokens(texts: list[str], factor: int) -> float:
    """Return how far merged token vectors are from those of sentence-transformers, infinite for another number."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    states: Any = SentenceTransformer(str(DENSE)).encode(texts, output_value="token_embeddings")
    rows = [(state / state.norm(dim=1, keepdim=True)).cpu() for state in states]
    expected = HierarchicalTokenPooling(factor).pool(rows)
    found = TokenVectors.stack([row.numpy() for row in rows]).pruned(f"pool_factor:{factor}")
    pairs = [(found[place], one.numpy()) for place, one in enumerate(expected)]
    return max(float(np.abs(a - b).max()) if a.shape == b.shape else math.inf for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
