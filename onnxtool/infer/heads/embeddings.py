"""Sentence encoders: one vector per text.

Shape letters: B batch, S sequence, H hidden size, M modes of pooling, N texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.module_forms import Floats, PoolingModule
from onnxtool.checkpoint.module_settings import TokenStates
from onnxtool.checkpoint.pooling_modules import Pooling, modules_before, normalize, read_pooling_modules
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import Batch, VectorHead, require_finite
from onnxtool.infer.vectors import DenseVectors

EMBEDDING = "sentence_embedding"
SIDE = "text_embeds"  # output of a dual encoder of texts and images


def _by_tokens(vectors: DenseVectors, counts: DenseVectors) -> DenseVectors:
    return np.asarray((vectors * counts).sum(axis=0) / counts.sum())


def _by_root_of_tokens(vectors: DenseVectors, counts: DenseVectors) -> DenseVectors:
    """Return the sum over all tokens, divided by the square root of their number."""
    return np.asarray((vectors * np.sqrt(counts)).sum(axis=0) / np.sqrt(counts.sum()))


# Combine the windows of a text, float32 [windows, H], with their token counts [windows, 1]. Shared tokens count twice.
# The state of a first or last token, and weights by position, belong to one window and cannot be combined.
_JOINED: dict[str, Callable[[DenseVectors, DenseVectors], DenseVectors]] = {
    "mean": _by_tokens,
    "mean_sqrt_len_tokens": _by_root_of_tokens,
    "max": lambda vectors, _counts: np.asarray(vectors.max(axis=0)),
}


@dataclass(frozen=True)
class Embeddings(VectorHead[DenseVectors]):
    """Vectors from the graph, or its hidden states pooled according to the checkpoint.

    Attributes:
        before: modules on token states; empty if the graph contains them.
        pooling: the pooling, here or in the graph; None if it is in the graph and unknown.
        after: modules after pooling; empty if the graph contains them.
        in_graph: whether the graph contains all of it.
        normalizes: whether the last module scales vectors to length one.
        is_stated: whether the checkpoint states the pooling.
    """

    kind = "similarities"

    before: tuple[PoolingModule, ...]
    pooling: Pooling | None
    after: tuple[PoolingModule, ...]
    in_graph: bool
    normalizes: bool = False
    is_stated: bool = False

    @classmethod
    def of(cls, folder: CheckpointFolder, *, in_graph: bool) -> Embeddings:
        """Read the pooling of a graph from the checkpoint.

        Raises:
            InputError: the graph does not contain it, and it is not supported here.
        """
        modules = folder.sentence_modules
        stated = modules.first_of("Pooling")
        pooling = None if stated is None else Pooling.read(stated)
        computed = () if in_graph else read_pooling_modules(modules, Pooling)
        if not in_graph and TokenStates.of(modules, folder) is not None:
            raise InputError(
                f"{folder.path} pools other states than those of the last layer, which its graph gives",
                "export it with its head (--head auto)",
            )
        place = modules_before(computed, Pooling)
        if pooling is None and not in_graph:
            pooling = Pooling()
        before, after = computed[:place], computed[place + 1 :]
        return cls(before, pooling, after, in_graph, "Normalize" in modules.kinds, stated is not None)

    @property
    def includes_prompt(self) -> bool:
        """Whether prompt tokens are pooled too."""
        return self.pooling is None or self.pooling.includes_prompt

    @property
    def pools_in_graph(self) -> bool:
        """Whether the graph contains the pooling."""
        return self.in_graph

    @property
    def note(self) -> str:
        """Warn if the pooling is a guess."""
        if self.is_stated or self.in_graph:
            return ""
        return "the checkpoint does not say how to pool; these are means over the tokens"

    def pool(self, batch: Batch) -> DenseVectors:
        """Return float32 [B, M * H].

        Raises:
            InputError: a text has no token after its prompt, and the maximum over none is undefined.
            SessionError: a value is not a finite number.
        """
        if "max" in self._modes and not batch.pooled.any(axis=1).all():
            raise InputError(
                "a text has no token behind its prompt, and the checkpoint pools the largest values over these",
                "leave such texts out, or pass a shorter prompt",
            )
        if self.in_graph or self.pooling is None:
            vectors = batch.output(2, EMBEDDING, SIDE).astype(np.float32)
        else:
            from onnxtool.runtime.computed_modules import compute

            states: Floats = batch.output(3, "last_hidden_state", "token_embeddings")
            vectors = compute((*self.before, self.pooling), states, batch.mask, batch.pooled)
        require_finite(vectors, "embedding")
        return vectors

    @property
    def _modes(self) -> tuple[str, ...]:
        return () if self.pooling is None else self.pooling.modes

    def require_windows(self) -> None:
        """Allow windows if all modes are means or maxima over the tokens."""
        positional = sorted(set(self._modes) - set(_JOINED))
        if positional or not self._modes:
            reason = f"pools by {', '.join(positional)}" if positional else "does not say how it pools"
            raise InputError(
                f"the model {reason}, and vectors of the windows of a text do not make a vector of the text then",
                f"cut long texts (--long truncate); windows go with {', '.join(_JOINED)}",
            )

    def join(self, vectors: DenseVectors, windows: Sequence[Sequence[EncodedText]]) -> DenseVectors:
        """Combine the windows of N texts, before the modules after pooling: float32 [N, M * H].

        For vectors already normalized by the graph, it is their token-weighted mean, normalized again.
        """
        joined, start = [], 0
        for group in windows:
            rows = vectors[start : start + len(group)]
            start += len(group)
            joined.append(rows if len(group) == 1 else self._join_one(rows, group))
        return np.concatenate(joined)

    def _join_one(self, rows: DenseVectors, windows: Sequence[EncodedText]) -> DenseVectors:
        counts = np.array([[len(text) - text.num_prompt] for text in windows], np.float32)
        parts = np.split(rows, len(self._modes), axis=1)
        joined = np.concatenate([_JOINED[mode](part, counts) for mode, part in zip(self._modes, parts, strict=True)])
        scales = self.in_graph and self.normalizes
        return np.asarray(normalize(joined[None]) if scales else joined[None], np.float32)

    def finish(self, vectors: DenseVectors) -> DenseVectors:
        """Apply the modules after pooling: float32 [N, H]."""
        if self.after:
            from onnxtool.runtime.computed_modules import compute

            vectors = compute(self.after, vectors)
        require_finite(vectors, "embedding")
        return vectors
