"""Exact search finds what a loop over all pairs finds. Letters of shapes: Q queries, D documents, H numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnxtool.encoding.reading import Shard
from onnxtool.errors import InputError
from onnxtool.evaluation.options import COSINE, DOT, EUCLIDEAN, MANHATTAN, MAXSIM, MEANMAXSIM
from onnxtool.evaluation.search import Run, Search, require_different
from onnxtool.infer.vectors import SparseVectors, TokenVectors

Q, D, H = 7, 60, 5
NAMES = [f"q{number}" for number in range(Q)]
IDS = [f"d{number}" for number in range(D)]


def dense(count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((count, H)).astype(np.float32)


def terms(count: int, seed: int) -> SparseVectors:
    """Half of the terms are missing, so that some pairs share none."""
    values = dense(count, seed)
    return SparseVectors.from_dense(np.where(values > 0.5, values, 0).astype(np.float32), [*"abcde"])


def tokens(count: int, seed: int) -> TokenVectors:
    random = np.random.default_rng(seed)
    return TokenVectors.stack(
        [random.standard_normal((random.integers(1, 6), H)).astype(np.float32) for _ in range(count)]
    )


def shards(vectors: Any, size: int = 17) -> Iterator[Shard]:
    for start in range(0, D, size):
        places = range(start, min(start + size, D))
        part = vectors[start : start + size] if isinstance(vectors, np.ndarray) else vectors.take(places)
        yield Shard([IDS[place] for place in places], part)


def search(names: Sequence[str], queries: Any, given: Iterable[Shard], **how: Any) -> tuple[Run, list[str]]:
    searching, ids = Search(names, queries, **how), list[str]()
    for shard in given:
        searching.add(shard)
        ids += shard.ids
    require_different(ids)
    return searching.found(), ids


def loop(queries: Any, documents: Any, compare: Callable[[Any, Any], float]) -> dict[str, list[tuple[str, float]]]:
    """Score every pair; of equals, the id that sorts last comes first."""
    found = {}
    for name, query in zip(NAMES, queries, strict=True):
        scores = [(float(np.float32(compare(query, one))), key) for one, key in zip(documents, IDS, strict=True)]
        found[name] = [(key, score) for score, key in sorted(scores, reverse=True)]
    return found


def _cosine(one: Any, other: Any) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(
    ("similarity", "compare"),
    [
        (COSINE, _cosine),
        (DOT, lambda one, other: float(one.astype(np.float64) @ other.astype(np.float64))),
        (EUCLIDEAN, lambda one, other: -float(np.linalg.norm(one.astype(np.float64) - other.astype(np.float64)))),
        (MANHATTAN, lambda one, other: -float(np.abs(one.astype(np.float64) - other.astype(np.float64)).sum())),
    ],
)
@pytest.mark.parametrize("depth", [3, D + 5])
def test_dense_search_equals_a_loop(similarity: str, compare: Callable[[Any, Any], float], depth: int) -> None:
    """Order and scores, whatever the blocks are."""
    queries, documents = dense(Q, 0), dense(D, 1)
    run, ids = search(NAMES, queries, shards(documents), similarity=similarity, depth=depth)
    expected = loop(queries, documents, compare)
    assert ids == IDS
    for name in NAMES:
        assert list(run[name]) == [key for key, _ in expected[name][:depth]]
        np.testing.assert_allclose(list(run[name].values()), [score for _, score in expected[name][:depth]], rtol=1e-6)


def test_sparse_search_equals_a_loop_without_pairs_that_share_nothing() -> None:
    """As an inverted index never finds these."""
    queries, documents = terms(Q, 0), terms(D, 1)
    run, _ = search(NAMES, queries, shards(documents), similarity=DOT, depth=D)
    expected = loop(queries.to_dense(), documents.to_dense(), lambda one, other: float(one @ other))
    assert any(score == 0 for found in expected.values() for _, score in found)
    for name in NAMES:
        kept = [(key, score) for key, score in expected[name] if score != 0]
        assert list(run[name]) == [key for key, _ in kept]
        np.testing.assert_allclose(list(run[name].values()), [score for _, score in kept], rtol=1e-6)


@pytest.mark.parametrize("similarity", [MAXSIM, MEANMAXSIM])
def test_late_interaction_equals_a_loop(similarity: str) -> None:
    """The largest product of each token of the query, summed up, or their mean."""

    def compare(query: Any, document: Any) -> float:
        best = [max(float(token @ other) for other in document) for token in query]
        return sum(best) / (len(best) if similarity == MEANMAXSIM else 1)

    queries, documents = tokens(Q, 0), tokens(D, 1)
    run, _ = search(NAMES, queries, shards(documents), similarity=similarity, depth=10)
    expected = loop([queries.row(n) for n in range(Q)], [documents.row(n) for n in range(D)], compare)
    for name in NAMES:
        assert list(run[name]) == [key for key, _ in expected[name][:10]]
        np.testing.assert_allclose(list(run[name].values()), [score for _, score in expected[name][:10]], rtol=1e-5)


@pytest.mark.parametrize("vectors", [dense, terms, tokens])
@pytest.mark.parametrize("at_a_time", [1, 7, 4096])
def test_a_document_has_the_score_of_its_best_passage(
    vectors: Callable[[int, int], Any], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each passage were searched alone; also where a block is smaller than a document."""
    monkeypatch.setattr("onnxtool.evaluation.search._VECTORS_AT_A_TIME", at_a_time)
    similarity = MAXSIM if vectors is tokens else DOT
    queries, passages = vectors(Q, 1), vectors(D, 2)
    alone, _ = search(NAMES, queries, [Shard(IDS, passages)], similarity=similarity, depth=D)
    starts = np.array([0, 1, 2, 20, 21, 44])
    names = [f"doc{number}" for number in range(len(starts))]
    run, found = search(NAMES, queries, [Shard(names, passages, starts)], similarity=similarity, depth=D)
    assert found == names
    for query, scores in alone.items():
        parts = np.split(np.array([scores.get(name, -np.inf) for name in IDS]), starts[1:])
        best = {name: part.max() for name, part in zip(names, parts, strict=True) if part.max() > -np.inf}
        assert run[query] == pytest.approx(best)
        assert list(run[query]) == sorted(best, key=lambda name: (best[name], name), reverse=True)


def test_equal_documents_have_equal_scores_and_the_last_id_comes_first() -> None:
    """As trec_eval breaks ties; also where only some of the equals fit, and across blocks."""
    documents = np.repeat(dense(1, 3), D, axis=0)
    run, _ = search(NAMES, dense(Q, 0), shards(documents), similarity=COSINE, depth=4)
    for name in NAMES:
        assert list(run[name]) == sorted(IDS, reverse=True)[:4]
        assert len(set(run[name].values())) == 1


def test_ids_of_terms_beyond_a_vocabulary_are_columns_too() -> None:
    """The queries of an inference-free encoder are looked up, and only its documents are as wide as the model."""
    ids = np.array([3, 9_000], np.int32)
    queries = SparseVectors(np.array([0, 2]), ids, np.array([1, 2], np.float32), ("a",) * 4)
    documents = SparseVectors(np.array([0, 1, 3]), np.array([3, 5, 9_000], np.int32), np.ones(3, np.float32), ())
    run, _ = search(["q"], queries, [Shard(["d", "e"], documents)], similarity="dot", depth=9)
    assert run == {"q": {"e": 2.0, "d": 1.0}}
    broken = replace(documents, indices=-documents.indices)
    with pytest.raises(InputError, match="negative id"):
        search(["q"], queries, [Shard(["d", "e"], broken)], similarity="dot", depth=9)


def test_documents_of_another_size_or_with_one_id_are_refused() -> None:
    """Both would give figures of something else."""
    with pytest.raises(InputError, match="queries have 5 numbers, and documents 4"):
        search(NAMES, dense(Q, 0), shards(dense(D, 1)[:, :4]), similarity=DOT, depth=1)
    with pytest.raises(InputError, match="1 documents have the id of another one"):
        search(NAMES, dense(Q, 0), [Shard(["a", "a"], dense(2, 1))], similarity=DOT, depth=1)
