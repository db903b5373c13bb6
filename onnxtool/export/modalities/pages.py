"""Retrievers of pages as pictures (ColPali): a page, or a query, to a vector for each of its tokens.

Letters of shapes: B batch, S tokens of a query, P tokens of a page, W width of a vector.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.tasks import LATE_INTERACTION, TASK_OF_PICTURES
from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.processing import PROCESSOR_FILE, run

# Of the classes of transformers 5.23 that are retrievers of pages, the one whose pages all have the same tokens.
_SAME_TOKENS = "ColPaliForRetrieval"
_SUFFIX = "ForRetrieval"
_TASKS = (TASK_OF_PICTURES, LATE_INTERACTION)
_PICTURE = (64, 48, 3)


def is_of_pages(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a retriever of pages."""
    return checkpoint.architecture.endswith(_SUFFIX)


def restrict_to_pages(model: Any, checkpoint: Checkpoint) -> Any:
    """Make the forward of a retriever of pages that of pages or of queries; leave any other model as it is.

    A page is `pixel_values` alone, float [B, 3, H, W] to [B, P, W]: the tokens beside the picture are always the same,
    and become constants. A query is what the tokenizer gives, [B, S] to [B, S, W], zeros for padding.

    Raises:
        CheckpointError: the checkpoint has no processor, or it does not run.
        ExportError: the model's tokens depend on the picture, or the task is another.
    """
    if not is_of_pages(checkpoint):
        return model
    if checkpoint.architecture != _SAME_TOKENS:
        raise ExportError(
            f"{checkpoint.architecture} reads other tokens beside each picture, by its size, and onnxtool does not "
            "make these",
            f"of the retrievers of pages, {_SAME_TOKENS} is exported",
        )
    if checkpoint.task not in _TASKS:
        raise ExportError(
            f"{checkpoint.architecture} encodes pages and queries by themselves",
            f"export each: {' and '.join(f'--task {task}' for task in _TASKS)}",
        )
    if checkpoint.task == TASK_OF_PICTURES:
        forward = _page_forward(model, _page_tokens(checkpoint))
    else:
        forward = _query_forward(model)
    model.forward = types.MethodType(forward, model)
    return model


def _page_tokens(checkpoint: Checkpoint) -> Any:
    """Return the tokens beside each picture, as the checkpoint's own processor makes them: int64 [P]."""
    processor = checkpoint.load_processor("processor")
    blank = np.full(_PICTURE, 255, np.uint8)
    inputs = run(lambda: processor(images=[blank, blank], return_tensors="pt"), "processor", PROCESSOR_FILE)
    tokens, mask, types_of = (inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    if not (tokens[0] == tokens[1]).all() or not mask.all() or types_of.any():
        raise ExportError(
            f"the processor of {checkpoint.source.model_name} gives other tokens for each picture",
            "save it again with transformers 5.23",
        )
    return tokens[0].clone()


def _page_forward(model: Any, tokens: Any) -> Any:
    import torch

    whole = type(model).forward

    def forward(self: Any, pixel_values: Any) -> dict[str, Any]:
        ids = tokens.to(pixel_values.device)[None].expand(pixel_values.shape[0], -1)
        inputs = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        return {TOKENS: whole(self, input_ids=ids, pixel_values=pixel_values, **inputs).embeddings}

    return forward


def _query_forward(model: Any) -> Any:
    import torch

    whole = type(model).forward

    def forward(self: Any, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        types_of = torch.zeros_like(input_ids)
        outputs = whole(self, input_ids=input_ids, attention_mask=attention_mask, token_type_ids=types_of)
        return {TOKENS: outputs.embeddings}

    return forward
