"""Exact search: every document is compared with every query, a block of documents at a time.

Shape letters: Q queries, D documents of a block, or their passages, H numbers of a vector, V terms of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.encoding.reading import Shard
from onnxtool.errors import InputError
from onnxtool.evaluation.options import COSINE, DOT, EUCLIDEAN, MEANMAXSIM
from onnxtool.infer.vectors import SparseVectors, TokenVectors

Run = dict[str, dict[str, float]]
"""Scores by query and document; each query's documents are ordered from best to worst."""


_VECTORS_AT_A_TIME = 4096
_DIFFERENCES = 1 << 24  # float64 in memory at once, for distances that are not products


def require_different(ids: Sequence[str]) -> None:
    """Refuse ids of documents of which one occurs twice.

    Raises:
        InputError: one does.
    """
    if same := len(ids) - len({*ids}):
        raise InputError(f"{same} documents have the id of another one", "give each its own")


class Search:
    """A search for the `depth` best documents of each query, to which documents are added a shard at a time.

    Scores that are products are computed in float64 and rounded to float32, so that equal vectors have equal scores.
    Among equal scores, the last id in sort order comes first, as in trec_eval. A sparse document that shares no terms
    with a query is not a result. A document read as passages has the score of its best passage (MaxP; Dai and Callan,
    2019, arXiv:1905.09217).
    """

    def __init__(self, query_ids: Sequence[str], queries: Any, *, similarity: str, depth: int) -> None:
        """Prepare the queries.

        Args:
            query_ids: Q names.
            queries: float [Q, H], SparseVectors or TokenVectors of Q texts.
            similarity: `cosine`, `dot`, `euclidean` or `manhattan`; of token vectors `maxsim` or `meanmaxsim`.
            depth: number of documents kept per query.
        """
        self._query_ids = query_ids
        self._compare = QueryComparison(queries, similarity)
        self._best = [Best(depth) for _ in query_ids]

    def add(self, shard: Shard) -> None:
        """Compare further documents with all queries.

        Raises:
            InputError: their vectors have another size than those of the queries.
        """
        starts = np.arange(len(shard.ids)) if shard.starts is None else shard.starts
        ends = np.append(starts[1:], len(shard.vectors))
        first = 0
        while first < len(shard.ids):
            begin = starts[first]
            last = max(first + 1, int(np.searchsorted(ends, begin + _VECTORS_AT_A_TIME, side="right")))
            names = shard.ids[first:last]
            scores = self._compare.scores(shard.vectors, begin, ends[last - 1])
            if shard.starts is not None:
                scores = np.maximum.reduceat(scores, starts[first:last] - begin, axis=1)
            first = last
            for row, own in zip(scores, self._best, strict=True):
                own.add(row, names)

    def found(self) -> Run:
        """Return the best documents of each query so far."""
        return {name: own.ordered() for name, own in zip(self._query_ids, self._best, strict=True)}


class Best:
    """The best documents of a query so far."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._found: list[tuple[float, str]] = []
        self._least = -np.inf

    def add(self, scores: NDArray[np.float32], names: Sequence[str]) -> None:
        """Add the documents of a block: float32 [D], with -inf for non-results."""
        least = self._least
        if len(scores) > self._depth:
            least = max(least, float(np.partition(scores, -self._depth)[-self._depth]))
        places: list[int] = np.flatnonzero((scores >= least) & (scores > -np.inf)).tolist()
        if not places:
            return
        self._found += [(float(scores[place]), names[place]) for place in places]
        self._found.sort(reverse=True)
        del self._found[self._depth :]
        if len(self._found) == self._depth:
            self._least = self._found[-1][0]

    def ordered(self) -> dict[str, float]:
        """Return scores by document, best first."""
        return {name: score for score, name in self._found}


class QueryComparison:
    """Queries prepared for comparison with blocks of documents."""

    def __init__(self, queries: Any, similarity: str) -> None:
        self._similarity = similarity
        self._tokens = queries if isinstance(queries, TokenVectors) else None
        self._terms = queries if isinstance(queries, SparseVectors) else None
        self._rows = None if self._tokens or self._terms is not None else self._prepared(queries)

    def scores(self, vectors: Any, start: int, stop: int) -> NDArray[np.float32]:
        """Return float32 [Q, D] for documents from `start` to `stop`; larger is better."""
        if self._tokens is not None:
            part = vectors.take(range(start, stop))
            return self._tokens.max_similarities(part, is_mean=self._similarity == MEANMAXSIM)
        if self._terms is not None:
            width = 1 + max(int(terms.indices.max(initial=0)) for terms in (self._terms, vectors))
            queries = _matrix(self._terms, 0, len(self._terms), width)
            products = (queries @ _matrix(vectors, start, stop, width).T).toarray()
            return np.where(products == 0, -np.inf, products).astype(np.float32)
        assert self._rows is not None  # noqa: S101  of dense vectors
        documents = self._prepared(vectors[start:stop])
        if documents.shape[1] != self._rows.shape[1]:
            raise InputError(
                f"queries have {self._rows.shape[1]} numbers, and documents {documents.shape[1]}",
                "encode both with one model",
            )
        if self._similarity in (COSINE, DOT):
            return (self._rows @ documents.T).astype(np.float32)
        return self._distances(documents)

    def _distances(self, documents: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the negative distance."""
        assert self._rows is not None  # noqa: S101  of dense vectors
        scores = np.empty((len(self._rows), len(documents)), np.float32)
        step = max(1, _DIFFERENCES // max(1, documents.size))
        for first in range(0, len(self._rows), step):
            differences = self._rows[first : first + step, None] - documents[None]
            if self._similarity == EUCLIDEAN:
                scores[first : first + step] = -np.sqrt(np.square(differences).sum(axis=2))
            else:
                scores[first : first + step] = -np.abs(differences).sum(axis=2)
        return scores

    def _prepared(self, vectors: NDArray[Any]) -> NDArray[np.float64]:
        rows = vectors.astype(np.float64)
        return np.asarray(normalize(rows)) if self._similarity == COSINE else rows


def _matrix(vectors: SparseVectors, start: int, stop: int, width: int) -> Any:
    """Return texts from `start` to `stop` as a matrix of SciPy, float64 [N, `width`] in compressed rows.

    SciPy trusts the indices, so the width comes from them, and not from a vocabulary.

    Raises:
        InputError: an index is negative.
    """
    from scipy.sparse import csr_matrix

    if vectors.indices.min(initial=0) < 0:
        raise InputError("a term has a negative id", "encode the documents again")
    first, last = vectors.indptr[start], vectors.indptr[stop]
    return csr_matrix(
        (
            vectors.weights[first:last].astype(np.float64),
            vectors.indices[first:last],
            vectors.indptr[start : stop + 1] - first,
        ),
        shape=(stop - start, width),
    )
