"""The output head of a model of transformers: where it is, and that it is called with chosen rows only.

Letters: R rows, the product of all axes but the last; N chosen rows; H the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the layer that makes the scores of `model`, or None where there is none to be sure of.

    It is the layer that transformers calls output embeddings, else the only layer right below the model that makes as
    many scores as there are classes.
    """
    embeddings = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if embeddings is not None:
        return embeddings if hasattr(embeddings, "out_features") else None
    num_labels = getattr(getattr(model, "config", None), "num_labels", None)
    layers = [layer for layer in model.children() if getattr(layer, "out_features", None) == num_labels]
    return layers[0] if num_labels is not None and len(layers) == 1 else None


def places_of(head: torch.nn.Module, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules before which rows can be dropped, the one with the most layers first.

    That is the part of the model that holds the head, such as `cls` of BERT with its transform, and the head alone.
    """
    base = getattr(model, "base_model", None)
    parts = [part for part in model.children() if part is not base and any(head is inner for inner in part.modules())]
    return [*(part for part in parts if part is not head), head]


class RowSelection:
    """Hands only some rows to a module of the model, as a forward pre-hook that does nothing until it is told to.

    Attributes:
        rows: int64 [N], the rows to hand over; None for all.
        place: the module whose rows they are.
    """

    def __init__(self, places: Sequence[torch.nn.Module]) -> None:
        self.rows: torch.Tensor | None = None
        self.place: torch.nn.Module | None = None
        for place in places:
            place.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments with rows [1, N, H] of the first one, [..., H], where this module is the place."""
        if self.rows is None or module is not self.place:
            return None
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.rows).unsqueeze(0), *arguments[1:])
