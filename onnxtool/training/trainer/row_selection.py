"""Which rows of a batch go through the output head of a transformers model, and how the head gets only those.

Letters: B sequences, S positions, R = B * S rows, N selected rows, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from onnxtool.training.graphs.ignored_rows import IGNORE_INDEX

NUM_SPARE = 4
"""Rows selected in addition to the labeled ones, with an ignored label.

TorchDynamo compiles sizes of 0 and 1 separately, and a loss that shifts its labels has one row less.
"""


def labeled_rows(
    model: torch.nn.Module, inputs: Mapping[str, Any], shifts: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the inputs with the labels of the selected rows only, [1, N], and the indices of these rows, int64 [N].

    Args:
        model: the model that takes the inputs. If it makes its decoder inputs from the labels, that happens here.
        inputs: with labels int [B, S].
        shifts: whether the logits at a position are for the label of the next one. The loss also shifts the selected
            labels, so they are moved one position to the right.
    """
    labels = inputs["labels"]
    targets = functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX) if shifts else labels
    flat = targets.reshape(-1)
    labeled = (flat != IGNORE_INDEX).nonzero().view(-1)
    before = 1 if shifts else 0
    selected = functional.pad(flat[labeled].unsqueeze(0), (before, NUM_SPARE - before), value=IGNORE_INDEX)
    return {**_with_decoder_inputs(model, inputs), "labels": selected}, functional.pad(labeled, (0, NUM_SPARE))


def _with_decoder_inputs(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs)
    if given or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return dict(inputs)
    return {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])}


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the layer that computes the logits of `model`, or None if it is not clear which one does.

    It is the layer that transformers calls output embeddings, otherwise the only direct child of the model with as many
    outputs as there are classes.
    """
    embeddings = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if embeddings is not None:
        return embeddings if hasattr(embeddings, "out_features") else None
    num_labels = getattr(getattr(model, "config", None), "num_labels", None)
    layers = [layer for layer in model.children() if getattr(layer, "out_features", None) == num_labels]
    return layers[0] if num_labels is not None and len(layers) == 1 else None


def modules_around(head: torch.nn.Module, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose input rows can be selected, the one with the most layers first.

    These are the part of the model that contains the head, such as `cls` of BERT with its transform, and the head.
    """
    base = getattr(model, "base_model", None)
    parts = [part for part in model.children() if part is not base and any(head is inner for inner in part.modules())]
    return [*(part for part in parts if part is not head), head]


class RowSelection:
    """Passes only the selected rows to a module, as a forward pre-hook that does nothing while `rows` is None.

    Attributes:
        rows: int64 [N], the rows to pass on; None for all.
        module: the module that gets fewer rows.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.rows: torch.Tensor | None = None
        self.module: torch.nn.Module | None = None
        for module in modules:
            module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments with rows [1, N, H] of the first one, [..., H], if this is the selected module."""
        if self.rows is None or module is not self.module:
            return None
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.rows).unsqueeze(0), *arguments[1:])
