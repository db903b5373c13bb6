"""Pooling of sentence-transformers' SPLADE models without the loop over chunks, so that one graph serves all lengths.

The loop of `SpladePooling.forward` (sentence-transformers 6.2) has one turn unless `chunk_size` is set, and its bounds
are the length of the texts: TorchDynamo would compile each length by itself.
Letters: B texts, S positions, V words.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch


class WholeTexts:
    """Pools all positions at once in each module of a model that would do so in one turn of its loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        # The same methods at every step: TorchDynamo compiles another one again.
        self._methods = [
            (module, types.MethodType(_forward, module)) for module in model.modules() if _takes_one_turn(module)
        ]

    @contextlib.contextmanager
    def in_one_turn(self) -> Iterator[None]:
        """Put the methods in the place of the modules' own inside of the block."""
        for module, method in self._methods:
            vars(module)["forward"] = method
        try:
            yield
        finally:
            for module, _ in self._methods:
                del vars(module)["forward"]


def _takes_one_turn(module: torch.nn.Module) -> bool:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    is_pooling = name.startswith("sentence_transformers.sparse_encoder.") and name.endswith(".SpladePooling")
    return is_pooling and "forward" not in vars(module) and not max(getattr(module, "chunk_size", None) or 0, 0)


def _forward(self: Any, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add `sentence_embedding` [B, V], pooled from the logits `token_embeddings` [B, S, V] where the mask is 1."""
    if "cu_seq_lens_q" in features:
        result: dict[str, torch.Tensor] = type(self).forward(self, features)
        return result
    logits = features["token_embeddings"]
    weights = (logits * features["attention_mask"].unsqueeze(-1).to(logits.dtype)).relu().log1p()
    if self.activation_function == "log1p_relu":
        weights = weights.log1p()
    pooled = weights.max(1).values if self.pooling_strategy == "max" else weights.sum(1)
    if self.embedding_dimension is None:
        self.embedding_dimension = pooled.shape[1]
    features["sentence_embedding"] = pooled
    return features
