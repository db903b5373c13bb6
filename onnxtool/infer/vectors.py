"""Text vectors: sparse over a vocabulary, dense, and one per token.

Shape letters: N texts, H hidden size, V vocabulary, T terms (or tokens) of all texts together, W width of a token's
vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import Floats
from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.vector_types import parse_pruning
from onnxtool.options import Option, checked
from onnxtool.reports import short_repr

PruningRule = Annotated[str, Option(parse=parse_pruning)]
TopK = Annotated[int | None, Option(minimum=1)]
# Dense vectors: float32 [N, H].
DenseVectors = NDArray[np.float32]
# Maximum number of vector products in memory at once.
_PRODUCTS = 1 << 24
_EMPTY_DOCUMENT = -1e9  # like sentence-transformers


@short_repr
@dataclass(frozen=True)
class SparseVector:
    """Term weights of one text.

    Attributes:
        indices: int32 [T], the ids of the terms, ascending.
        weights: float32 [T], all nonzero.
        vocabulary: V terms, by id.
    """

    indices: NDArray[np.int32]
    weights: NDArray[np.float32]
    vocabulary: Sequence[str]

    @property
    def shape(self) -> tuple[int]:
        """V."""
        return (len(self.vocabulary),)

    @checked
    def terms(self, top_k: TopK = None) -> dict[str, float]:
        """Return weights by term, heaviest first; ties by lowest id.

        Args:
            top_k: the maximum number of terms; None for all.
        """
        order = np.argsort(-self.weights, kind="stable")[:top_k]
        return {self.vocabulary[int(self.indices[i])]: float(self.weights[i]) for i in order}

    def to_dense(self) -> NDArray[np.float32]:
        """Return float32 [V]."""
        dense = np.zeros(self.shape, np.float32)
        dense[self.indices] = self.weights
        return dense


@short_repr
@dataclass(frozen=True)
class SparseVectors:
    """Term weights of N texts, in compressed rows like scipy.sparse.csr_matrix.

    Attributes:
        indptr: int64 [N + 1]; text n has the terms from indptr[n] up to indptr[n + 1].
        indices: int32 [T], the ids of the terms, ascending in each text.
        weights: float32 [T], all but zero.
        vocabulary: V terms, by id.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weights: NDArray[np.float32]
    vocabulary: Sequence[str]

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def shape(self) -> tuple[int, int]:
        """N and V."""
        return len(self), len(self.vocabulary)

    @property
    def num_empty(self) -> int:
        """The number of texts without any term."""
        return int((np.diff(self.indptr) == 0).sum())

    @checked
    def row(self, place: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the ids of the terms of one text, and their weights."""
        part = _part(self.indptr, place)
        return self.indices[part], self.weights[part]

    def __getitem__(self, place: int) -> SparseVector:
        return SparseVector(*self.row(place), self.vocabulary)

    @checked
    def terms(self, top_k: TopK = None) -> list[dict[str, float]]:
        """Return weights by term for each text; see `SparseVector.terms`."""
        return [self[place].terms(top_k) for place in range(len(self))]

    def without(self, ids: Iterable[int]) -> SparseVectors:
        """Return the vectors without the terms of these ids."""
        return self._kept(~np.isin(self.indices, list(ids)))

    @checked
    def pruned(self, rule: PruningRule) -> SparseVectors:
        """Return the vectors without the terms that a rule leaves out.

        Args:
            rule: `RULE:NUMBER`, as in `LoadedModel.encode`.

        Raises:
            InputError: the rule is for token vectors; or a weight is negative, and it is for positive ones.
        """
        return self._kept(Pruning.of_kind(rule, "terms").kept(self.indptr, self.weights))

    def _kept(self, is_kept: NDArray[np.bool_]) -> SparseVectors:
        before = np.concatenate([[0], np.cumsum(is_kept)])
        return SparseVectors(before[self.indptr], self.indices[is_kept], self.weights[is_kept], self.vocabulary)

    def to_dense(self) -> DenseVectors:
        """Return float32 [N, V]."""
        dense = np.zeros(self.shape, np.float32)
        dense[np.repeat(np.arange(len(self)), np.diff(self.indptr)), self.indices] = self.weights
        return dense

    @classmethod
    def from_dense(cls, weights: NDArray[np.float32], vocabulary: Sequence[str]) -> SparseVectors:
        """Keep the nonzero entries of `weights`, float32 [N, V]."""
        rows, columns = np.nonzero(weights)
        indptr = np.searchsorted(rows, np.arange(len(weights) + 1)).astype(np.int64)
        return cls(indptr, columns.astype(np.int32), weights[rows, columns].astype(np.float32), vocabulary)

    @classmethod
    def of_entries(
        cls,
        rows: NDArray[np.int64],
        indices: NDArray[np.int32],
        weights: NDArray[np.float32],
        count: int,
        vocabulary: Sequence[str],
    ) -> SparseVectors:
        """Return the vectors of `count` texts, keeping the largest weight of each term.

        Args:
            rows: int64 [E], the text of each entry.
            indices: int32 [E], the ids of the terms.
            weights: float32 [E], all but zero.
            count: N.
            vocabulary: V terms.
        """
        order = np.lexsort((indices, rows))
        rows, indices, weights = rows[order], indices[order], weights[order]
        starts = np.flatnonzero(np.diff(rows, prepend=-1) | np.diff(indices, prepend=-1))
        largest = np.maximum.reduceat(weights, starts) if len(starts) else weights
        indptr = np.searchsorted(rows[starts], np.arange(count + 1)).astype(np.int64)
        return cls(indptr, indices[starts], largest, vocabulary)

    @classmethod
    def concatenate(cls, parts: Sequence[SparseVectors]) -> SparseVectors:
        """Concatenate the texts of one or more parts."""
        return cls(
            _indptr(np.concatenate([np.diff(part.indptr) for part in parts])),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.weights for part in parts]),
            max((part.vocabulary for part in parts), key=len),
        )

    def take(self, places: Sequence[int]) -> SparseVectors:
        """Return the texts at `places`, in that order."""
        indptr, source = _taken(self.indptr, places)
        return SparseVectors(indptr, self.indices[source], self.weights[source], self.vocabulary)


@short_repr
@dataclass(frozen=True)
class TokenVectors:
    """Vectors of the counting tokens of N texts, for late interaction.

    Attributes:
        indptr: int64 [N + 1]; text n has the tokens from indptr[n] up to indptr[n + 1].
        vectors: float32 [T, W].
    """

    indptr: NDArray[np.int64]
    vectors: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, place: int) -> NDArray[np.float32]:
        return self.row(place)

    @property
    def shape(self) -> tuple[int, int]:
        """N and W."""
        return len(self), self.width

    @property
    def width(self) -> int:
        """W."""
        return int(self.vectors.shape[1])

    @checked
    def row(self, place: int) -> NDArray[np.float32]:
        """Return the vectors of one text: float32 [its tokens, W]."""
        return self.vectors[_part(self.indptr, place)]

    @checked
    def max_similarities(self, documents: TokenVectors, *, is_mean: bool = False) -> NDArray[np.float32]:
        """Return the late-interaction similarity of these queries to D documents: float32 [N, D].

        The maximum product of each query token with a document token, summed over the query (MaxSim, Khattab and
        Zaharia, 2020, arXiv:2004.12832). A document without tokens ranks below all others.

        Args:
            documents: documents with vectors of the same width.
            is_mean: whether to divide by the number of the query's tokens.
        """
        counts = np.diff(documents.indptr)
        filled = np.flatnonzero(counts)
        scores = np.full((len(self), len(documents)), _EMPTY_DOCUMENT, np.float32)
        # Process few enough documents at once to keep the products with the longest query small.
        most = max(1, _PRODUCTS // max(1, int(np.diff(self.indptr).max(initial=1))))
        parts = np.cumsum(counts[filled]) // most
        for part in np.unique(parts):
            chosen = filled[parts == part]
            first, last = documents.indptr[chosen[0]], documents.indptr[chosen[-1] + 1]
            starts = documents.indptr[chosen] - first
            for place in range(len(self)):
                products = self.row(place) @ documents.vectors[first:last].T
                # Documents without tokens have no columns, so that the starts ascend.
                scores[place, chosen] = np.maximum.reduceat(products, starts, axis=1).sum(axis=0, dtype=np.float32)
        return scores / np.maximum(np.diff(self.indptr), 1).astype(np.float32)[:, None] if is_mean else scores

    @checked
    def pruned(self, rule: PruningRule) -> TokenVectors:
        """Return the vectors of documents whose similar tokens are merged.

        Args:
            rule: `pool_factor:NUMBER`, as in `LoadedModel.encode`.

        Raises:
            InputError: the rule is for terms, or scipy is not installed.
        """
        pruning = Pruning.of_kind(rule, "token_vectors")
        return self.stack([pruning.pool(self.row(place)) for place in range(len(self))])

    @classmethod
    def stack(cls, rows: Sequence[NDArray[np.float32]]) -> TokenVectors:
        """Concatenate the vectors of N >= 1 texts."""
        indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(indptr, np.concatenate(rows).astype(np.float32, copy=False))

    @classmethod
    def concatenate(cls, parts: Sequence[TokenVectors]) -> TokenVectors:
        """Concatenate the texts of one or more parts."""
        indptr = _indptr(np.concatenate([np.diff(part.indptr) for part in parts]))
        return cls(indptr, np.concatenate([part.vectors for part in parts]))

    def take(self, places: Sequence[int]) -> TokenVectors:
        """Return the texts at `places`, in that order."""
        indptr, source = _taken(self.indptr, places)
        return TokenVectors(indptr, self.vectors[source])


AnyVectors = DenseVectors | SparseVectors | TokenVectors


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate the vectors of one or more parts, all of one kind."""
    several = isinstance(parts[0], SparseVectors | TokenVectors)
    return type(parts[0]).concatenate(parts) if several else np.concatenate(parts)


def in_order(parts: Sequence[Any], places: Sequence[int]) -> Any:
    """Concatenate the vectors of several batches, and restore the order of the N texts."""
    vectors, order = concatenated(parts), np.argsort(places).tolist()
    return vectors[order] if isinstance(vectors, np.ndarray) else vectors.take(order)


def _indptr(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _taken(indptr: NDArray[np.int64], places: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `indptr` of the texts at `places`, and the place of each of their values: its text's start and offset."""
    counts = np.diff(indptr)[places]
    taken = _indptr(counts)
    return taken, np.repeat(indptr[:-1][places] - taken[:-1], counts) + np.arange(taken[-1])


def _part(indptr: NDArray[np.int64], place: int) -> slice:
    """Return the range of a text's values; a negative index counts from the end, as in a list."""
    place = range(len(indptr) - 1)[place]
    return slice(int(indptr[place]), int(indptr[place + 1]))


def cosine_similarities(vectors: Floats) -> NDArray[np.float64]:
    """Return the cosine of every pair of vectors: float [N, H] to float64 [N, N]."""
    unit = normalize(vectors.astype(np.float64))
    return np.asarray(np.clip(unit @ unit.T, -1.0, 1.0))
