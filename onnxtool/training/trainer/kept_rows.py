"""Which rows of a batch have a label that counts, and the batch with the labels of these rows alone.

Letters: B sequences, S positions, R = B * S rows, N rows that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from onnxtool.training.graphs.label_rows import IGNORE_INDEX

NUM_SPARE = 4
"""Rows kept beyond those that count, with an ignored label.

TorchDynamo compiles sizes of 0 and 1 apart, and a loss that shifts has one row less.
"""


def kept_rows(model: torch.nn.Module, inputs: Mapping[str, Any], shifts: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the inputs with the labels of the kept rows, [1, N], and these rows, int64 [N].

    Args:
        model: whose inputs they are. Where it makes the inputs of its decoder of the labels, it does so here.
        inputs: with labels int [B, S].
        shifts: whether scores at a position are for the label of the next one. The loss shifts the kept labels as
            well, so that they are one place further on.
    """
    labels = inputs["labels"]
    wanted = functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX) if shifts else labels
    flat = wanted.reshape(-1)
    counting = (flat != IGNORE_INDEX).nonzero().view(-1)
    before = 1 if shifts else 0
    kept = functional.pad(flat[counting].unsqueeze(0), (before, NUM_SPARE - before), value=IGNORE_INDEX)
    return {**_with_decoder_inputs(model, inputs), "labels": kept}, functional.pad(counting, (0, NUM_SPARE))


def _with_decoder_inputs(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs)
    if given or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return dict(inputs)
    return {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])}
