"""How the vectors of a model are cut and stored, where something else is asked for than what it gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.checkpoint.quantized_vectors import RangesLike, VectorType, given_ranges
from onnxtool.errors import InputError
from onnxtool.infer.heads import AnyHead
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.vectors import DenseVectors, SparseVectors, TokenVectors


@dataclass(frozen=True)
class VectorForm:
    """What becomes of vectors.

    Attributes:
        dimensions: how many numbers are kept, the first; None for all.
        normalizes: whether what is kept is scaled to length 1 again.
        stored: how the numbers are stored; None for as they are.
    """

    dimensions: int | None = None
    normalizes: bool = False
    stored: VectorType | None = None

    @classmethod
    def of(
        cls, head: AnyHead, *, vectors_as: str | None, ranges: RangesLike | None, dimensions: int | None
    ) -> VectorForm:
        """Check what is asked for against what a model gives.

        Args:
            head: of the model.
            vectors_as: one of VECTOR_TYPES; None for as the model gives them.
            ranges: of int8 and uint8: float32 [2, W], or a file that `read_ranges` takes.
            dimensions: how many numbers to keep; None for all.

        Raises:
            InputError: the model gives no such vectors, or ranges are missing, not asked for, or malformed.
        """
        if ranges is not None and vectors_as is None:
            raise InputError("ranges were passed, and vectors stay as they are", "pass vectors_as int8 or uint8")
        if vectors_as is None and dimensions is None:
            return cls()
        if head.kind == "terms":
            raise InputError(
                "the model gives weights of terms, and --vectors_as and --dimensions are for embeddings",
                "leave them out; --weights int stores the weights of a corpus as whole numbers",
            )
        given = head.stored if isinstance(head, Embeddings) else None
        if given is not None:
            raise InputError(
                f"the graph itself gives {given.name} vectors",
                "leave --vectors_as, --ranges and --dimensions out, or use the model exported without --vectors_as",
            )
        stored = None
        if vectors_as is not None:
            stored = VectorType.of(vectors_as, None if ranges is None else given_ranges(ranges))
        return cls(dimensions, isinstance(head, Embeddings) and head.normalizes, stored)

    def apply(self, vectors: Any) -> Any:
        """Cut and store vectors of texts or of tokens.

        Raises:
            InputError: they have fewer numbers than are to be kept, or do not fit the ranges or bytes.
        """
        if self.dimensions is None and self.stored is None:
            return vectors
        if isinstance(vectors, TokenVectors):
            if self.dimensions is not None:
                raise InputError(
                    "--dimensions keeps a part of an embedding, and texts have one for each token", "leave it out"
                )
            return replace(vectors, vectors=self._apply(vectors.vectors))
        assert not isinstance(vectors, SparseVectors)  # noqa: S101  refused by `of`
        return self._apply(vectors)

    def _apply(self, vectors: DenseVectors) -> NDArray[Any]:
        if self.dimensions is not None:
            if vectors.shape[1] <= self.dimensions:
                raise InputError(
                    f"--dimensions {self.dimensions} was passed, and the vectors of this model have {vectors.shape[1]}",
                    "pass a smaller number, or leave --dimensions out",
                )
            vectors = vectors[:, : self.dimensions]
            if self.normalizes:
                vectors = np.asarray(normalize(vectors), np.float32)
        return vectors if self.stored is None else self.stored.apply(vectors)
