"""Losses of other libraries' trainers in a form that is compiled once: numbers of a schedule, and pooling in a loop."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


class ChangingNumbers:
    """Passes Python numbers that changed since an earlier step to the compiled step as float32 tensors [].

    TorchDynamo compiles the value of a module's number into the graph. The weights of the regularizers of
    sentence-transformers' SpladeLoss, for example, grow at every step. A number that never changes stays what it is,
    because a loss may decide by it.
    """

    def __init__(self, loss: object, model: torch.nn.Module) -> None:
        """Find the modules whose numbers are watched.

        Args:
            loss: a module, or modules by name; anything else has no numbers.
            model: whose modules are not watched: a layer may need its number as a number.
        """
        parts: Iterable[Any] = loss.values() if isinstance(loss, Mapping) else (loss,)
        of_model = set(model.modules())
        found = (module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules())
        self._modules = [module for module in found if module not in of_model]
        self._first: dict[tuple[int, str], float] = {}
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Put the tensors in the place of the numbers, and the numbers back at the end."""
        changed: list[tuple[dict[str, Any], str, float, torch.Tensor]] = []
        for index, module in enumerate(self._modules):
            attributes = vars(module)
            for name, value in attributes.items():
                key = index, name
                if type(value) is float and (key in self._tensors or self._first.setdefault(key, value) != value):
                    tensor = self._tensors.setdefault(key, torch.empty(()))
                    changed.append((attributes, name, value, tensor.fill_(value)))
        try:
            for attributes, name, _, tensor in changed:
                attributes[name] = tensor
            yield
        finally:
            for attributes, name, value, _ in changed:
                attributes[name] = value


# The loop of `SpladePooling.forward` (sentence-transformers 6.2) has one turn unless `chunk_size` is set, and its
# bounds are the length of the texts: TorchDynamo would compile each length by itself.
# Letters: B texts, S positions, V words.


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
