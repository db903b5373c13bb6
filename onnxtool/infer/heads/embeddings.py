"""Sentence encoders: one vector for each text.

Letters of shapes: B batch, S sequence, H hidden size, M modes of pooling, N texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.checkpoint.cutting import EncodedText
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import InputError
from onnxtool.infer.batches import Batch
from onnxtool.infer.heads.head import VectorHead, require_finite
from onnxtool.infer.heads.layers import Layer, read_layers, scale
from onnxtool.infer.pooling import pool, pooling_modes
from onnxtool.infer.vectors import DenseVectors

EMBEDDING = "sentence_embedding"


def _by_tokens(vectors: DenseVectors, counts: DenseVectors) -> DenseVectors:
    return np.asarray((vectors * counts).sum(axis=0) / counts.sum())


def _by_root_of_tokens(vectors: DenseVectors, counts: DenseVectors) -> DenseVectors:
    """Give the sum over all tokens, divided by the root of their number."""
    return np.asarray((vectors * np.sqrt(counts)).sum(axis=0) / np.sqrt(counts.sum()))


# What windows of a text, float32 [windows, H] with the number of their tokens [windows, 1], are together. What windows
# share counts twice. The state of a first or last token, and weights by position, are of one window and of no text.
_JOINED: dict[str, Callable[[DenseVectors, DenseVectors], DenseVectors]] = {
    "mean": _by_tokens,
    "mean_sqrt_len_tokens": _by_root_of_tokens,
    "max": lambda vectors, _counts: np.asarray(vectors.max(axis=0)),
}


@dataclass(frozen=True)
class Embeddings(VectorHead[DenseVectors]):
    """Vectors that the graph gives, or its hidden states pooled as the checkpoint says.

    Attributes:
        modes: how the tokens are pooled; several are concatenated.
        layers: what is computed behind that.
        in_graph: whether the graph has done all of it.
        scales: whether the last of it scales vectors to length one.
        is_stated: whether the checkpoint says how to pool.
        includes_prompt: whether the tokens of a prompt are pooled as well.
    """

    kind = "similarities"

    modes: tuple[str, ...]
    layers: tuple[Layer, ...]
    in_graph: bool
    scales: bool
    is_stated: bool
    includes_prompt: bool

    @classmethod
    def of(cls, folder: CheckpointFolder, *, in_graph: bool) -> Embeddings:
        """Read from the checkpoint how a graph is pooled, or was.

        Raises:
            InputError: the graph has not done it, and it cannot be computed here.
        """
        settings = folder.module_config("Pooling")
        if in_graph:
            modes = pooling_modes(settings) if settings is not None else ()
            layers: tuple[Layer, ...] = ()
        else:
            modes, layers = pooling_modes(settings or {}), read_layers(folder)
        scales = any(module.kind == "Normalize" for module in folder.modules)
        includes_prompt = (settings or {}).get("include_prompt") is not False
        if not includes_prompt and "weightedmean" in modes:
            raise InputError(
                f"the Pooling of {folder.path} leaves prompts out of weightedmean, which is not computed here",
                "use sentence-transformers for this checkpoint",
            )
        return cls(modes, layers, in_graph, scales, settings is not None, includes_prompt)

    @property
    def note(self) -> str:
        """Say where pooling is a guess."""
        if self.is_stated or self.in_graph:
            return ""
        return "the checkpoint does not say how to pool; these are means over the tokens"

    def pool(self, batch: Batch) -> DenseVectors:
        """Return float32 [B, M * H], or what the graph gives.

        Raises:
            SessionError: a value is not a finite number.
        """
        if self.in_graph:
            vectors = batch.output(2, EMBEDDING).astype(np.float32)
        else:
            states = batch.output(3, "last_hidden_state", "token_embeddings")
            vectors = np.asarray(pool(states, batch.pooled, self.modes), np.float32)
        require_finite(vectors, "embedding")
        return vectors

    def require_windows(self) -> None:
        """Allow them where all modes are means or largest values over the tokens."""
        others = sorted(set(self.modes) - set(_JOINED))
        if others or not self.modes:
            way = f"pools by {', '.join(others)}" if others else "does not say how it pools"
            raise InputError(
                f"the model {way}, and vectors of the windows of a text do not make a vector of the text then",
                f"cut long texts (--long truncate); windows go with {', '.join(_JOINED)}",
            )

    def join(self, vectors: DenseVectors, windows: Sequence[Sequence[EncodedText]]) -> DenseVectors:
        """Put the windows of N texts together, before what follows the pooling: float32 [N, M * H].

        Of vectors that the graph has scaled already, it is their mean by tokens, which is scaled again.
        """
        joined, start = [], 0
        for group in windows:
            rows = vectors[start : start + len(group)]
            start += len(group)
            joined.append(rows if len(group) == 1 else self._join_one(rows, group))
        return np.concatenate(joined)

    def _join_one(self, rows: DenseVectors, windows: Sequence[EncodedText]) -> DenseVectors:
        counts = np.array([[len(text) - text.num_prompt] for text in windows], np.float32)
        parts = np.split(rows, len(self.modes), axis=1)
        one = np.concatenate([_JOINED[mode](part, counts) for mode, part in zip(self.modes, parts, strict=True)])[None]
        return scale(one) if self.in_graph and self.scales else np.asarray(one, np.float32)

    def finish(self, vectors: DenseVectors) -> DenseVectors:
        """Compute what follows the pooling: float32 [N, H]."""
        for layer in self.layers:
            vectors = layer(vectors)
        require_finite(vectors, "embedding")
        return vectors
