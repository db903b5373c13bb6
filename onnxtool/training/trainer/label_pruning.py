"""Ignored-label pruning: rows whose label is ignored skip the output head; loss and gradients stay the same.

Most tokens of a masked language model have no label, and the head is most of the work of a small one. The labeled rows
are found before the compiled graph and are one of its inputs, with one dynamic size; the graph gathers them.

Letters: B sequences, S positions, R = B * S rows, N rows that go through the head.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic

from onnxtool.training.graphs.ignored_rows import IGNORE_INDEX
from onnxtool.training.trainer.losses import Batch, ComputeLoss, predicts_next, without_adapters
from onnxtool.training.trainer.pruning_check import Plan, PruningCheck
from onnxtool.training.trainer.row_selection import RowSelection, labeled_rows, modules_around, output_head

NOT_ALLOWED = "label_sparsity is off"
NO_HEAD = "the output head of the model is not known"
OUTPUTS = "the outputs of all rows were asked for"
NO_LABELS = "the inputs have no labels of one class for each position"
INFERENCE = "inference mode has no gradients to compare"
DENSE = "nearly all rows are labeled"

_LOGGER = logging.getLogger(__name__)
# If more rows are labeled, gathering them costs what it saves.
_DENSE_SHARE = 0.9


@dataclass(frozen=True)
class SparsityReport:
    """What ignored-label pruning did so far; as a string, a text for people.

    Attributes:
        num_batches: calls of the model with its loss.
        num_sparse_batches: calls that pruned rows.
        num_rows: rows that have a label, ignored or not, in all batches.
        num_head_rows: rows that went through the output head.
        reasons: why batches were not pruned, and how many.
    """

    num_batches: int
    num_sparse_batches: int
    num_rows: int
    num_head_rows: int
    reasons: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        batches = f"{self.num_sparse_batches} of {self.num_batches} batches"
        rows = f"{self.num_head_rows} of {self.num_rows} rows through the output head"
        reasons = [f"  {count} x all rows: {reason}" for reason, count in self.reasons]
        return "\n".join([f"label sparsity: {batches}, {rows}", *reasons])


class LabelSparsity:
    """Decides for each batch which rows go through the output head.

    Rows are pruned if the inputs have integer `labels` for each position, the output head of the model is known, and a
    check on the first batch shows that loss and gradients stay the same (`PruningCheck`). Otherwise all rows go through
    the head, and the report says why.
    """

    def __init__(self, model: torch.nn.Module, *, allowed: bool = True) -> None:
        self._model = model
        self._head = output_head(without_adapters(model)) if allowed else None
        self._reason = NOT_ALLOWED if not allowed else NO_HEAD if self._head is None else ""
        modules = modules_around(self._head, without_adapters(model)) if self._head is not None else []
        likely = predicts_next(model)
        self._candidates = [Plan(shifts, module) for module in modules for shifts in (likely, not likely)]
        self.selection = RowSelection(modules)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._num_sparse, self._num_rows, self._num_head_rows = 0, 0, 0
        self._reasons: Counter[str] = Counter()

    def report(self) -> SparsityReport:
        """Return what happened so far."""
        return SparsityReport(
            self._num_sparse + self._reasons.total(),
            self._num_sparse,
            self._num_rows,
            self._num_head_rows,
            tuple(self._reasons.most_common()),
        )

    def prune(
        self, compute_loss: ComputeLoss, inputs: Batch, return_outputs: bool, num_items: torch.Tensor | None
    ) -> tuple[Batch, torch.Tensor | None]:
        """Return the inputs, and the rows that go through the head: int64 [N], or None for all rows.

        The labels among the inputs are then those of these rows, [1, N].
        """
        reason = self._reason_for_all(inputs, return_outputs)
        plan = Plan(reason=reason) if reason else self._plan(compute_loss, inputs, num_items)
        if plan.reason:
            self._count_all_rows(inputs, plan.reason)
            return inputs, None
        selected, rows = labeled_rows(self._model, inputs, plan.shifts)
        self._num_sparse += 1
        self._num_rows += inputs["labels"].numel()
        self._num_head_rows += rows.numel()
        maybe_mark_dynamic(rows, 0)
        maybe_mark_dynamic(selected["labels"], 1)
        self.selection.module = plan.module
        return selected, rows

    def _reason_for_all(self, inputs: Batch, return_outputs: bool) -> str:
        """Return why all rows go through the head whatever the check finds, or an empty string."""
        if self._reason or return_outputs:
            return self._reason or OUTPUTS
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return NO_LABELS
        if torch.is_inference_mode_enabled():
            return INFERENCE
        num_ignored = int((labels == IGNORE_INDEX).sum())
        return DENSE if num_ignored < (1 - _DENSE_SHARE) * labels.numel() else ""

    def _plan(self, compute_loss: ComputeLoss, inputs: Mapping[str, Any], num_items: torch.Tensor | None) -> Plan:
        key = (self._model.training, num_items is None, *sorted(inputs))
        if key not in self._plans:
            check = PruningCheck(self._model, compute_loss, self._head, self.selection)
            self._plans[key] = check.first_correct(inputs, num_items, self._candidates)
            if reason := self._plans[key].reason:
                _LOGGER.warning("all rows go through the output head: %s", reason)
        return self._plans[key]

    def _count_all_rows(self, inputs: Batch, reason: str) -> None:
        self._reasons[reason] += 1
        if isinstance(inputs, Mapping) and isinstance(labels := inputs.get("labels"), torch.Tensor):
            self._num_rows += labels.numel()
            self._num_head_rows += labels.numel()
