"""Unpadding: rows of padding are left out of a transformer's layers where loss and gradients stay the same.

Texts of a batch are padded to the longest one; most of the work of a layer is done row by row, and is lost on padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onnxtool.errors import first_line
from onnxtool.training.graphs.rows import IGNORE_INDEX
from onnxtool.training.trainer.fewer_rows import (
    HALF_TOLERANCE,
    INFERENCE,
    MODEL_ERRORS,
    OUTPUTS,
    TOLERANCE,
    RefusalError,
    RowReport,
    kind_of,
    state_restored,
)
from onnxtool.training.trainer.losses import Batch, ComputeLoss
from onnxtool.training.trainer.unpadded_layers import Region, RowLayout, enter, leave

NOT_ALLOWED = "unpadding is off"
NO_LAYERS = "the model is not one stack of transformers' layers whose attention is sdpa"
NO_MASK = "the inputs have no input_ids with an attention_mask of one number for each position"
NOT_AT_ONE_END = "the padding of the batch is not at one end of its sequences"
LABELED = "rows of padding have labels"
NOT_FOUND = "the model does not embed the input_ids of the inputs"
FLAT = "the loss of this batch has no gradient to compare"
CHECKPOINTED = "activation checkpointing runs the layers a second time, outside the model"
DENSE = "little of the batch is padding"

_LOGGER = logging.getLogger(__name__)
_TOKENS = "input_ids"
_MASK = "attention_mask"
_LABELS = "labels"
# With less padding, gathering rows around each attention costs what it saves.
_DENSE_SHARE = 0.9
_SEED = 0


@dataclass(frozen=True)
class UnpaddingCheck:
    """Computes a loss with and without the rows of padding, and compares loss and gradients.

    In the batch that it takes, the shortest sequence has one token. A loss that reads a position by its number, other
    than the one that is a token in every batch, reads padding there. The padded model runs with noise in the rows of
    padding, after every layer: where they do not count, their weights are exactly zero, and the loss is the same to the
    last bit; a loss that reads them in any way is not. What remains is whether each row is computed by itself, which
    the loss without padding and its gradients show. All runs draw the same random numbers and restore the model's
    buffers and PyTorch's generators.

    Attributes:
        compute: returns the loss of the batch, see `_shortened`.
        layouts: those of the batch.
    """

    model: torch.nn.Module
    compute: Callable[[], Any]
    regions: Sequence[Region]
    layouts: tuple[RowLayout, ...]

    def reason_against(self, with_head: bool) -> str:
        """Return why the rows of padding must stay, or an empty string.

        With `with_head`, the output head computes fewer rows as well.
        """
        with state_restored(self.model):
            try:
                self._require_equal(with_head)
            except RefusalError as refusal:
                return str(refusal)
        return ""

    def _require_equal(self, with_head: bool) -> None:
        expected, gradients = self._step((), with_head)
        if not (expected.isfinite() and _norm(gradients) > 0):
            raise RefusalError(FLAT)
        with torch.no_grad():
            noisy = self._loss(self.layouts, with_head, has_noise=True)
        if not all(region.was_used for region in self.regions):
            raise RefusalError(NOT_FOUND)
        if not torch.equal(noisy, expected):
            raise RefusalError("the loss depends on the rows of padding")
        loss, unpadded_gradients = self._step(self.layouts, with_head)
        differences = [a - b for a, b in zip(unpadded_gradients, gradients, strict=True)]
        worst = torch.stack([(loss - expected).abs() / expected.abs(), _norm(differences) / _norm(gradients)]).max()
        tolerance = TOLERANCE.get(expected.dtype, HALF_TOLERANCE)
        if torch.is_autocast_enabled(expected.device.type):
            tolerance = HALF_TOLERANCE
        if not worst <= tolerance:
            raise RefusalError(f"the loss without padding differs by {float(worst):.2g} (tolerance {tolerance:g})")

    def _loss(self, layouts: tuple[RowLayout, ...], with_head: bool, has_noise: bool = False) -> torch.Tensor:
        torch.manual_seed(_SEED)
        enter(self.regions, layouts, with_head)
        for region in self.regions:
            region.has_noise = has_noise
        try:
            loss: Any = self.compute()
        except MODEL_ERRORS as error:
            raise RefusalError(f"the loss without padding fails: {first_line(error)}") from error
        finally:
            for region in self.regions:
                region.has_noise = False
            leave(self.regions)
        return loss

    def _step(self, layouts: tuple[RowLayout, ...], with_head: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the loss, and its gradients with respect to the trained parameters."""
        loss = self._loss(layouts, with_head)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise RefusalError("the loss is not one number with a gradient")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        try:
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        except RuntimeError as error:
            raise RefusalError(f"the gradients without padding fail: {first_line(error)}") from error
        return loss.detach(), [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm()


class Unpadding:
    """Decides for each batch whether the rows of padding are left out.

    They are if the inputs have an `attention_mask` with enough padding, the model is known, and a check on the first
    such batch shows that loss and gradients stay the same (`UnpaddingCheck`). Otherwise all rows are computed, and the
    report says why.

    Attributes:
        regions: the parts of the model that compute fewer rows.
        report: the statistics so far.
    """

    def __init__(self, model: torch.nn.Module, *, allowed: bool = True) -> None:
        self._model = model
        self.regions = Region.all_of(model) if allowed else []
        self._reason = NOT_ALLOWED if not allowed else "" if self.regions else NO_LAYERS
        self._plans: dict[tuple[object, ...], dict[str, tuple[bool, str]]] = {}
        self.report = RowReport("unpadding", "in the layers")
        self._batch = 0, 0, ""

    def count_batch(self) -> None:
        """Count the batch of the last `layouts`, after its step, by what the model did in it."""
        num_rows, num_tokens, reason = self._batch
        if not reason and not all(region.was_used for region in self.regions):
            reason = NOT_FOUND
        self.report = self.report.with_batch(num_rows, num_rows if reason else num_tokens, reason)

    def layouts(
        self,
        compute_loss: ComputeLoss,
        inputs: Batch,
        return_outputs: bool,
        num_items: torch.Tensor | None,
        are_labels_pruned: bool,
    ) -> tuple[tuple[RowLayout, ...], bool]:
        """Return the layouts of a batch, none if all rows are computed; and whether the head leaves rows out as well.

        Args:
            compute_loss: the loss.
            inputs: the batch, with all labels.
            return_outputs: whether the model's outputs are asked for.
            num_items: passed to the loss.
            are_labels_pruned: whether the output head gets the labeled rows of a padded batch.
        """
        texts = list(_texts(inputs))
        masks = [mask for _, mask in texts]
        num_rows = sum(mask.numel() for mask in masks)
        num_tokens = sum(int((mask != 0).sum()) for mask in masks)
        reason, with_head = self._reason_for_all(inputs, masks, return_outputs), False
        if not reason:
            is_dense = num_tokens > _DENSE_SHARE * num_rows
            plans = self._plans.setdefault(
                (self._model.training, num_items is None, are_labels_pruned, kind_of(inputs)), {}
            )
            sides = {side for mask in masks if (side := _side(mask)) is not None}
            known = [plans[side] for side in sides or plans if side in plans]
            if len(sides) > 1 or "" in sides:
                reason = NOT_AT_ONE_END
            elif known:  # the first of them that leaves rows out, even if few, in the graph that there is
                with_head, reason = min(known, key=lambda plan: plan[1])
            elif is_dense:
                reason = DENSE
            else:
                (side,) = sides
                some = _shortened(inputs, masks, is_left=side == "left")

                def compute() -> Any:
                    copied = dict(some) if isinstance(some, Mapping) else some  # a loss may take some out
                    return compute_loss(self._model, copied, False, num_items)

                with_head, reason = self._plan(compute, some, are_labels_pruned)
                if reason != FLAT:  # otherwise the next batch is tried
                    plans[side] = with_head, reason
        self._batch = num_rows, num_tokens, reason
        return (() if reason else tuple(RowLayout.of(*text) for text in texts)), with_head

    def _reason_for_all(self, inputs: Batch, masks: list[torch.Tensor], return_outputs: bool) -> str:
        """Return why all rows are computed regardless of their number and the check, or an empty string."""
        if self._reason or return_outputs:
            return self._reason or OUTPUTS
        if not masks:
            return NO_MASK
        if not torch.is_grad_enabled():
            return INFERENCE
        if any(region.is_checkpointed for region in self.regions):
            return CHECKPOINTED
        labels = _labels(inputs, masks)
        is_labeled = labels is not None and bool(((labels != IGNORE_INDEX) & (masks[0] == 0)).any())
        return LABELED if is_labeled else ""

    def _plan(self, compute: Callable[[], Any], inputs: Batch, are_labels_pruned: bool) -> tuple[bool, str]:
        """Return whether the head leaves rows out as well, and why none may be left out, or an empty string."""
        layouts = tuple(RowLayout.of(*text) for text in _texts(inputs))
        check = UnpaddingCheck(self._model, compute, self.regions, layouts)
        reason = ""
        has_head = not are_labels_pruned and any(len(region.ends) > 1 for region in self.regions)
        for with_head in (True, False) if has_head else (False,):
            reason = check.reason_against(with_head)
            if not reason:
                return with_head, ""
        if reason != FLAT:
            _LOGGER.warning("the rows of padding are computed as well: %s", reason)
        return False, reason


def _texts(inputs: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and their attention mask, both int or bool [B, S], in mappings and sequences of inputs."""
    if isinstance(inputs, Mapping):
        for key, mask in inputs.items():
            ids = inputs.get(f"{str(key).removesuffix(_MASK)}{_TOKENS}") if str(key).endswith(_MASK) else None
            if isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.dim() == 2:
                if mask.shape == ids.shape and not mask.is_floating_point():
                    yield ids, mask
            elif not isinstance(mask, torch.Tensor):
                yield from _texts(mask)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _texts(value)


def _side(mask: torch.Tensor) -> str | None:
    """Return the end at which every sequence has its padding; None without padding, "" for any other mask."""
    is_token = mask != 0
    if is_token.all():
        return None
    falls = is_token[:, :-1] >= is_token[:, 1:]
    rises = is_token[:, :-1] <= is_token[:, 1:]
    if is_token[:, 0].all() and falls.all():
        return "right"
    return "left" if is_token[:, -1].all() and rises.all() else ""


def _labels(inputs: Batch, masks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the labels in a batch, int [B, S], if there is one for each position."""
    labels = inputs.get(_LABELS) if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape != masks[0].shape:
        return None
    return labels


def _shortened(inputs: Batch, masks: Sequence[torch.Tensor], *, is_left: bool) -> Batch:
    """Return the inputs with one token in the shortest sequence, and without labels."""
    shorter = {}
    for mask in masks:
        shortest = int((mask != 0).sum(-1).argmin())
        shorter[id(mask)] = mask.clone()
        shorter[id(mask)][shortest, slice(0, -1) if is_left else slice(1, None)] = 0
    labels = _labels(inputs, masks)
    if labels is not None:
        shorter[id(labels)] = labels.masked_fill(shorter[id(masks[0])] == 0, IGNORE_INDEX)
    return _replaced(inputs, shorter)


def _replaced(inputs: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """Replace tensors in nested mappings and sequences, by their identity."""
    if isinstance(inputs, Mapping):
        return {key: _replaced(value, replacements) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(_replaced(value, replacements) for value in inputs)
    return replacements.get(id(inputs), inputs)
