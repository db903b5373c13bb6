"""Smaller vectors: terms of sparse vectors are left out, or token vectors of late interaction merged.

`top_k`, `max_ratio`, `alpha_mass` and `abs_value` are those of neural-search, OpenSearch's plugin, in float32 as there;
`max_active_dims` and `pool_factor` (HierarchicalTokenPooling) those of sentence-transformers 6.2.

Shape letters: N texts, T terms of all texts together, V vocabulary, S tokens of a text, W width of a token's vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import Builder, Floats, Value
from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.checkpoint.sparse_modules import LargestTerms
from onnxtool.checkpoint.vector_types import POOL_FACTOR, parse_pruning
from onnxtool.errors import InputError, OptionError, imported
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PRUNE_KEY

COUNTS = ("top_k", "max_active_dims")
_IN_GRAPH = (*COUNTS, "max_ratio", "abs_value")
WHOLE = "onnxtool.vectors.floats"  # name of a graph's weights before it prunes them
_PROTECTED = 1  # leading tokens that are never merged, as in sentence-transformers: [CLS]


@dataclass(frozen=True)
class Pruning:
    """A rule by which vectors get smaller.

    Attributes:
        rule: one of those of `parse_pruning`.
        number: what it takes.
    """

    rule: str
    number: float

    output: ClassVar[str] = "sparse"  # of a graph, with the weights

    @classmethod
    def of(cls, text: str) -> Pruning:
        """Read `RULE:NUMBER`.

        Raises:
            OptionError: there is no such rule, or it takes no such number.
        """
        rule, _, number = parse_pruning(text).partition(":")
        return cls(rule, float(number))

    @classmethod
    def of_kind(cls, text: str, kind: str, task: str | None = None) -> Pruning:
        """Read a rule for vectors of a kind, `terms` or `token_vectors`, of texts of a task.

        Raises:
            OptionError: as for `of`.
            InputError: the rule is for others.
        """
        pruning = cls.of(text)
        if kind != ("token_vectors" if pruning.is_of_tokens else "terms"):
            vectors = (
                "vectors of tokens (late interaction)" if pruning.is_of_tokens else "term weights (sparse encoders)"
            )
            raise InputError(f"--prune {text} is for {vectors}, and the model gives {kind}", "leave it out")
        if pruning.is_of_tokens and task == "query":
            raise InputError(f"--prune {text} merges tokens of documents, and these are queries", "leave it out")
        return pruning

    @classmethod
    def in_graph(cls, text: str) -> Pruning:
        """Read a rule that a graph computes.

        Raises:
            OptionError: it cannot.
        """
        pruning = cls.of(text)
        if pruning.rule not in _IN_GRAPH:
            raise OptionError(
                f"no graph computes {pruning.rule}, which would cost more than the encoder's head",
                f"pass --prune {pruning} to infer, encode and evaluate, or one of {', '.join(_IN_GRAPH)}",
            )
        return pruning

    @classmethod
    def of_model(cls, model: ModelFile) -> Pruning | None:
        """Return the rule of a model's graph; None if its metadata does not state one.

        Raises:
            InputError: the metadata is malformed.
        """
        stated = model.metadata.get(PRUNE_KEY)
        try:
            return None if stated is None else cls.in_graph(stated)
        except OptionError as error:
            raise InputError(f"the metadata {PRUNE_KEY} of {model.path}: {error.message}", "export it again") from None

    def __str__(self) -> str:
        return parse_pruning(f"{self.rule}:{self.number}")

    @property
    def name(self) -> str:
        """The rule, for messages."""
        return f"pruned by {self}"

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata read by `of_model`."""
        return {PRUNE_KEY: str(self)}

    @property
    def is_of_tokens(self) -> bool:
        """Whether it is for token vectors, and not for terms."""
        return self.rule == POOL_FACTOR

    def kept(self, indptr: NDArray[np.int64], weights: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which terms of N texts stay, bool [T]; of equal weights, those with the lower id.

        With `alpha_mass`, the term that crosses the share is left out, so that a text may keep none.

        Args:
            indptr: int64 [N + 1], as in SparseVectors.
            weights: float32 [T].

        Raises:
            InputError: a weight is not positive, and the rule is one of OpenSearch's.
        """
        if self.rule != "max_active_dims" and (weights <= 0).any():
            raise InputError(
                f"{self.rule} is for positive weights, and a term weighs {weights.min():g}", "use max_active_dims"
            )
        counts = np.diff(indptr)
        rows = np.repeat(np.arange(len(counts)), counts)
        number = np.float32(self.number)
        if self.rule == "abs_value":
            return np.asarray(weights >= number)
        if self.rule == "max_ratio":
            filled = np.flatnonzero(counts)
            largest = np.zeros(len(counts), np.float32)
            largest[filled] = np.maximum.reduceat(weights, indptr[filled]) if len(filled) else 0
            return np.asarray(weights >= (number * largest)[rows])
        order = np.lexsort((-np.abs(weights), rows))  # heaviest first in each text; stable
        stays = np.arange(len(weights)) - indptr[rows] < self.number
        if self.rule == "alpha_mass":
            for start, end in pairwise(indptr):
                row = weights[order[start:end]]
                share = number * np.float32(row.sum(dtype=np.float64))
                stays[start:end] = np.cumsum(row, dtype=np.float32) <= share
        kept = np.zeros(len(weights), np.bool_)
        kept[order[stays]] = True
        return kept

    def build(self, build: Builder, value: Value) -> Value:
        """Append the rule to a graph: `value` is [N, V]; what is not a number stays."""
        value = build.cast(value)
        if self.rule in COUNTS:
            return LargestTerms(int(self.number)).build(build, value, value)
        least = build.number(self.number)
        if self.rule == "max_ratio":
            least = build.op("Mul", build.reduce("ReduceMax", value, keepdims=1), least)
        return build.op("Where", build.op("Less", value, least), build.number(0.0), value)

    def nearest(self, pruned: NDArray[np.floating], weights: Floats) -> Floats:
        """Return the weights closest to `weights` among all that are pruned to `pruned`: float [N, V].

        A rounding error may move a term across the threshold; weights that this rule cannot give are infinite.
        """
        nearest = pruned.astype(np.float64)
        is_kept = nearest != 0
        sizes = np.where(is_kept, np.abs(nearest), np.inf)
        if self.rule in COUNTS:
            counts = is_kept.sum(axis=1, keepdims=True)
            least = np.where(counts < self.number, 0.0, sizes.min(axis=1, keepdims=True))
            nearest[(counts > self.number)[:, 0]] = np.inf
        else:
            number = np.float32(self.number)
            largest = pruned.astype(np.float32).max(axis=1, keepdims=True)
            least = number * largest if self.rule == "max_ratio" else np.full_like(largest, number)
            nearest[is_kept & (nearest < least * (1 - np.finfo(pruned.dtype).eps))] = np.inf
        return np.where(is_kept, nearest, np.clip(weights, -least, least))

    def pool(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Merge the token vectors of a document, float32 [S, W], to about one `pool_factor`-th: [S', W].

        Clusters by Ward's linkage of cosine distances become their means, of length 1. The first token stays.
        """
        hint = "pip install 'onnxtool-cli[evaluate]'"
        hierarchy = imported("scipy.cluster.hierarchy", "pool_factor needs scipy", hint)
        merged = vectors[_PROTECTED:]
        count = max(int(len(merged) // self.number), 1)
        if count < len(merged):
            distances = np.clip(1 - merged @ merged.T, 0, 2)
            linkage = hierarchy.linkage(distances[np.triu_indices(len(merged), 1)], method="ward")
            _, places = np.unique(hierarchy.fcluster(linkage, count, criterion="maxclust"), return_inverse=True)
            sums = np.zeros((places.max() + 1, merged.shape[1]), np.float32)
            np.add.at(sums, places, merged)
            vectors = np.concatenate([vectors[:_PROTECTED], sums / np.bincount(places)[:, None].astype(np.float32)])
        return np.asarray(normalize(vectors), np.float32)
