"""Points of a curve: the same vectors pruned by several rules, each searched and compared with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.vector_types import POOL_FACTOR, parse_pruning
from onnxtool.encoding.reading import Shard
from onnxtool.errors import OptionError
from onnxtool.evaluation.report import VectorSizes
from onnxtool.evaluation.search import Run, Search
from onnxtool.infer.vectors import SparseVectors

_POSTING = 8  # bytes: the number of a document, int32, and a weight, float32
_OFFSET = 8  # bytes: where the list of a term begins, or a document's vectors, int64


class PruningRules(NamedTuple):
    """The rules, `RULE:NUMBER`, by which vectors of documents and of queries are made smaller; empty for none."""

    documents: str = ""
    queries: str = ""

    @property
    def name(self) -> str:
        """Its spelling in the option; `none` for neither."""
        return "/".join(self).removesuffix("/") or "none"


def parse_cuts(texts: Sequence[str]) -> tuple[PruningRules, ...]:
    """Parse `--prune`: rules with commas between them, each `DOCUMENTS`, `DOCUMENTS/QUERIES` or `/QUERIES`.

    Raises:
        OptionError: one is malformed, for other vectors, or stated twice.
    """
    cuts = []
    for text in (part for one in texts for part in one.split(",")):
        documents, slash, queries = text.strip().partition("/")
        cut = PruningRules(*(one and parse_pruning(one) for one in (documents, queries)))
        if cut == PruningRules() or (slash and not queries):
            raise OptionError(
                f"--prune {text!r} says nothing", "write DOCUMENTS or DOCUMENTS/QUERIES: top_k:64/top_k:8"
            )
        if cut.queries.startswith(f"{POOL_FACTOR}:"):
            raise OptionError(f"--prune {text}: {cut.queries} merges tokens of documents alone", "leave out the slash")
        cuts.append(cut)
    if repeated := [cut.name for cut in cuts if cuts.count(cut) > 1]:
        raise OptionError(f"--prune {repeated[0]} is stated twice", "state it once")
    return tuple(cuts)


class PrunedSearch:
    """A search with pruned vectors, which counts the remaining terms or tokens."""

    def __init__(
        self, cut: PruningRules, query_ids: Sequence[str], queries: Any, *, similarity: str, depth: int
    ) -> None:
        self._cut = cut
        self._queries = queries.pruned(cut.queries) if cut.queries else queries
        self._search = Search(query_ids, self._queries, similarity=similarity, depth=depth)
        self._num_terms = self._num_documents = self._num_empty = 0
        self._is_used = np.zeros(0, np.bool_)  # by term

    def add(self, shard: Shard) -> None:
        """Search further documents."""
        vectors: Any = shard.vectors
        if self._cut.documents:
            vectors = vectors.pruned(self._cut.documents)
            shard = shard._replace(vectors=vectors)
        self._search.add(shard)
        counts = _counts(vectors)
        self._num_terms += int(counts.sum())
        self._num_documents += len(counts)
        self._num_empty += int((counts == 0).sum())
        if isinstance(shard.vectors, SparseVectors):
            used = np.zeros(max(len(self._is_used), 1 + int(shard.vectors.indices.max(initial=-1))), np.bool_)
            used[: len(self._is_used)] = self._is_used
            used[shard.vectors.indices] = True
            self._is_used = used

    def found(self) -> Run:
        """Return the documents of each query, best first."""
        return self._search.found()

    @property
    def sizes(self) -> VectorSizes:
        """The sizes of the vectors so far."""
        counts = _counts(self._queries)
        if isinstance(self._queries, SparseVectors):
            size = _POSTING * self._num_terms + _OFFSET * (int(self._is_used.sum()) + 1)
        else:
            size = 4 * self._queries.shape[1] * self._num_terms + _OFFSET * (self._num_documents + 1)
        return VectorSizes(
            query_terms=float(counts.mean()) if len(counts) else 0.0,
            document_terms=self._num_terms / max(1, self._num_documents),
            empty_queries=int((counts == 0).sum()),
            empty_documents=self._num_empty,
            index_bytes=size,
        )


def _counts(vectors: Any) -> NDArray[np.int64]:
    """Return the number of terms, or token vectors, of each text; 1 for a dense vector."""
    return np.ones(len(vectors), np.int64) if isinstance(vectors, np.ndarray) else np.diff(vectors.indptr)
