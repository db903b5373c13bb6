"""Check that documents packed into one sequence do not attend to each other.

Without a mask between them, a model silently trains on documents that it should not see together: if it also gets an
`attention_mask`, has a cache, or never reads `position_ids` as boundaries.
Letters: B sequences, S positions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from onnxtool.errors import TrainingError
from onnxtool.training.trainer.losses import Batch, predicts_next, without_adapters

_LOGGER = logging.getLogger(__name__)
_NO_DOCUMENT = -1


class PackedDocuments:
    """Refuses packed batches whose documents change each other's outputs.

    The first packed batch with the same arguments is run three times in eager PyTorch, without dropout: unchanged, and
    with other tokens in its first and in its last document. Masked tokens contribute exactly zero, so the outputs of
    all other documents must be identical to the last bit, in every precision.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._checked: set[tuple[str, ...]] = set()

    def require_separate(self, inputs: Batch) -> None:
        """Check a batch if it is the first packed one with these arguments.

        Raises:
            TrainingError: its documents attend to each other, or this cannot be determined.
        """
        if not isinstance(inputs, Mapping) or tuple(sorted(inputs)) in self._checked:
            return
        documents = _documents(inputs)
        packed = None if documents is None else next((row for row in documents if len(_present(row)) > 1), None)
        if documents is None or packed is None:
            return
        row = int((documents == packed).all(-1).nonzero()[0])
        with torch.no_grad(), _without_dropout(self._model):
            expected = self._outputs(inputs, documents)
            for document in (_present(packed)[0], _present(packed)[-1]):
                changed = torch.zeros_like(documents, dtype=torch.bool)
                changed[row] = packed == document
                unchanged = (documents != _NO_DOCUMENT) & ~changed
                outputs = self._outputs(_with_other_tokens(inputs, changed, self._num_tokens()), documents)
                if not torch.equal(outputs[unchanged], expected[unchanged]):
                    raise TrainingError(
                        f"documents of a packed batch attend to each other in {self._name()}", self._way_out(inputs)
                    )
        self._checked.add(tuple(sorted(inputs)))
        _LOGGER.info("packed documents do not attend to each other: %d in a sequence", len(_present(packed)))

    def _outputs(self, inputs: Mapping[str, Any], documents: torch.Tensor) -> torch.Tensor:
        """Return the model's first output, [B, S, ...]."""
        outputs = self._model(**{name: value for name, value in inputs.items() if name != "labels"})
        first: Any = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        if first.shape[:2] != documents.shape:
            raise TrainingError(
                f"a packed batch, and the first output of {self._name()} is not one for each position",
                "train without packing: one document in each sequence",
            )
        return first

    def _num_tokens(self) -> int:
        embeddings: Any = self._model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def _name(self) -> str:
        return type(without_adapters(self._model)).__name__

    def _way_out(self, inputs: Mapping[str, Any]) -> str:
        if "attention_mask" in inputs:
            return "leave attention_mask out of the batch: with one, models do not read boundaries from position_ids"
        if "position_ids" not in inputs:
            return "let the collator give position_ids, which restart in each document"
        if predicts_next(self._model) and getattr(getattr(self._model, "config", None), "use_cache", False):
            return "set model.config.use_cache = False: with a cache, models do not read boundaries from position_ids"
        return "this model does not read boundaries from position_ids: train without packing, with a collator that pads"


def _documents(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the document number of each position in its sequence, int [B, S]; -1 for padding.

    None if nothing in the batch says where documents begin.
    """
    positions, numbers, ends = (inputs.get(name) for name in ("position_ids", "seq_idx", "cu_seq_lens_q"))
    if isinstance(positions, torch.Tensor) and positions.dim() == 2:
        documents = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    elif isinstance(numbers, torch.Tensor) and numbers.dim() == 2:
        documents = numbers.clone()
    elif isinstance(ends, torch.Tensor) and ends.numel() > 1:
        documents = torch.bucketize(torch.arange(int(ends[-1]), device=ends.device), ends[1:], right=True)[None]
    else:
        return None
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == documents.shape:
        documents = documents.masked_fill(mask == 0, _NO_DOCUMENT)
    return documents


def _present(row: torch.Tensor) -> list[int]:
    """Return the document numbers in a sequence, in order."""
    return [number for number in row.unique().tolist() if number != _NO_DOCUMENT]


def _with_other_tokens(inputs: Mapping[str, Any], changed: torch.Tensor, num_tokens: int) -> dict[str, Any]:
    """Return the inputs with different tokens at the given positions, bool [B, S]."""
    if (ids := inputs.get("input_ids")) is not None:
        return {**inputs, "input_ids": torch.where(changed, (ids + 1) % num_tokens, ids)}
    embeddings = inputs["inputs_embeds"]
    return {**inputs, "inputs_embeds": torch.where(changed[..., None], -embeddings, embeddings)}


@contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Switch to evaluation, and afterwards back to training for the parts that were in it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
