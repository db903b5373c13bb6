"""Ignored-label pruning: rows with an ignored label skip the output head; loss and gradients stay the same.

Most tokens in masked language modeling have no label, and the head is most of a small model's work. The labeled rows
are found before the compiled graph and are one of its inputs, with one dynamic size; the graph gathers them. A check in
eager PyTorch shows that this changes neither the loss nor its gradients.

Letters: B sequences, S positions, R = B * S rows, N rows that go through the head, C classes, H the hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo import maybe_mark_dynamic
from torch.nn import functional

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
from onnxtool.training.trainer.losses import Batch, ComputeLoss, predicts_next, without_adapters

NUM_SPARE = 4
"""Rows selected in addition to the labeled ones, with an ignored label.

TorchDynamo compiles sizes of 0 and 1 separately, and a loss that shifts its labels has one row fewer.
"""


def labeled_rows(
    model: torch.nn.Module, inputs: Mapping[str, Any], shifts: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the inputs with only the selected rows' labels, [1, N], and the indices of these rows, int64 [N].

    Args:
        model: the model that takes the inputs. If it makes its decoder inputs from the labels, this is done here.
        inputs: with labels int [B, S].
        shifts: whether the logits at a position predict the label of the next one. The loss also shifts the selected
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
    decoder_inputs = {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs)
    if decoder_inputs or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return dict(inputs)
    return {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])}


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the layer that computes the logits of `model`, or None if it cannot be determined.

    It is the layer that transformers calls output embeddings, or else the model's only direct child with as many
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

    These are the head and the part of the model that contains it, such as BERT's `cls` with its transform.
    """
    base = getattr(model, "base_model", None)
    parts = [part for part in model.children() if part is not base and any(head is inner for inner in part.modules())]
    return [*(part for part in parts if part is not head), head]


class RowSelection:
    """Passes only the selected rows to a module, as a forward pre-hook that is inactive while `rows` is None.

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


Compute = Callable[[Mapping[str, Any]], Any]
"""Returns the loss of inputs that a check has changed."""
_SEED = 0
_LABELED_SHARE = 0.5


class PruningPlan(NamedTuple):
    """A way to prune rows.

    Attributes:
        shifts: whether the logits at a position predict the label of the next one.
        module: the module that gets fewer rows.
    """

    shifts: bool
    module: torch.nn.Module


class _HeadStep(NamedTuple):
    """A loss, float [], and its gradient with respect to the logits, [R, C]."""

    loss: torch.Tensor
    gradient: torch.Tensor


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().norm()


NOT_ALLOWED = "label_sparsity is off"
NO_HEAD = "the output head of the model is not known"
NO_LABELS = "the inputs have no labels of one class for each position"
DENSE = "nearly all rows are labeled"

_LOGGER = logging.getLogger(__name__)
# If more rows are labeled, gathering them costs as much as it saves.
_DENSE_SHARE = 0.9


class LabelSparsity:
    """Decides for each batch which rows go through the output head.

    Rows are pruned if the inputs have integer `labels` for each position, the model's output head is known, and a
    check on the first batch shows that loss and gradients stay the same. Otherwise all rows go through the head, and
    the report says why.

    Attributes:
        selection: passes the rows of a batch on.
        report: the statistics so far.
    """

    def __init__(self, model: torch.nn.Module, *, allowed: bool = True) -> None:
        self._model = model
        self._head = output_head(without_adapters(model)) if allowed else None
        self._reason = NOT_ALLOWED if not allowed else NO_HEAD if self._head is None else ""
        modules = modules_around(self._head, without_adapters(model)) if self._head is not None else []
        likely = predicts_next(model)
        self._candidates = [PruningPlan(shifts, module) for module in modules for shifts in (likely, not likely)]
        self.selection = RowSelection(modules)
        self._plans: dict[tuple[object, ...], PruningPlan | str] = {}
        self.report = RowReport("label sparsity", "through the output head")

    def prune(
        self, compute_loss: ComputeLoss, inputs: Batch, return_outputs: bool, num_items: torch.Tensor | None
    ) -> tuple[Batch, torch.Tensor | None]:
        """Return the inputs, and the rows that go through the head: int64 [N], or None for all rows.

        The inputs then have only the labels of these rows, [1, N].
        """
        plan = self._reason_for_all(inputs, return_outputs) or self._plan(
            lambda some: compute_loss(self._model, dict(some), False, num_items), inputs, num_items is None
        )
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        num_rows = labels.numel() if isinstance(labels, torch.Tensor) else 0
        if isinstance(plan, str):
            self.report = self.report.with_batch(num_rows, num_rows, plan)
            return inputs, None
        selected, rows = labeled_rows(self._model, inputs, plan.shifts)
        self.report = self.report.with_batch(num_rows, rows.numel(), "")
        maybe_mark_dynamic(rows, 0)
        maybe_mark_dynamic(selected["labels"], 1)
        self.selection.module = plan.module
        return selected, rows

    def _reason_for_all(self, inputs: Batch, return_outputs: bool) -> str:
        """Return why all rows go through the head regardless of the check, or an empty string."""
        if self._reason or return_outputs:
            return self._reason or OUTPUTS
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return NO_LABELS
        if torch.is_inference_mode_enabled():
            return INFERENCE
        num_ignored = int((labels == IGNORE_INDEX).sum())
        return DENSE if num_ignored < (1 - _DENSE_SHARE) * labels.numel() else ""

    def _plan(self, compute: Compute, inputs: Mapping[str, Any], is_mean: bool) -> PruningPlan | str:
        """Return how to prune, or why all rows go through the head."""
        key = (self._model.training, is_mean, kind_of(inputs))
        if key not in self._plans:
            self._plans[key] = plan = self._checked(compute, inputs)
            if isinstance(plan, str):
                _LOGGER.warning("all rows go through the output head: %s", plan)
        return self._plans[key]

    def _checked(self, compute: Compute, inputs: Mapping[str, Any]) -> PruningPlan | str:
        """Return the first plan that changes neither the loss nor its gradients, or the reason why the best one does.

        The labels are random, half of them ignored, because the batch's labels may all be the same. All runs draw the
        same random numbers, as the model draws them in training, and restore its buffers and PyTorch's generators.
        """
        inputs = {**inputs, "labels": self._random_labels(inputs["labels"])}
        reasons = []
        with state_restored(self._model):
            try:
                expected = self._step(compute, inputs)
                if expected.gradient.shape[0] != inputs["labels"].numel():
                    raise RefusalError(
                        f"the output head gets {expected.gradient.shape[0]} rows, and there are "
                        f"{inputs['labels'].numel()} labels"
                    )
                if not expected.gradient.any():
                    raise RefusalError("the loss does not depend on the logits of the output head")
            except RefusalError as refusal:
                return str(refusal)
            for plan in self._candidates:
                try:
                    self._require_equal(plan, expected, compute, inputs)
                except RefusalError as refusal:
                    reasons.append(str(refusal))
                else:
                    return plan
        return reasons[0]

    def _random_labels(self, labels: torch.Tensor) -> torch.Tensor:
        assert self._head is not None  # noqa: S101  without one, no batch is checked
        generator = torch.Generator().manual_seed(_SEED)
        classes = torch.randint(0, self._head.out_features, labels.shape, generator=generator)
        is_labeled = torch.rand(labels.shape, generator=generator) < _LABELED_SHARE
        return torch.where(is_labeled, classes, IGNORE_INDEX).to(labels)

    def _require_equal(
        self, plan: PruningPlan, expected: _HeadStep, compute: Compute, inputs: Mapping[str, Any]
    ) -> None:
        """Raise if pruning by `plan` changes the loss or gradients from `expected`."""
        try:
            selected, rows = labeled_rows(self._model, inputs, plan.shifts)
        except MODEL_ERRORS as error:
            raise RefusalError(f"labels of fewer rows cannot be made: {first_line(error)}") from error
        self.selection.rows, self.selection.module = rows, plan.module
        try:
            pruned = self._step(compute, selected)
        finally:
            self.selection.rows = None
        if pruned.gradient.shape[0] != rows.numel():
            raise RefusalError("the output head gets other rows than were selected")
        num_labeled = rows.numel() - NUM_SPARE
        of_labeled = expected.gradient[rows[:num_labeled]]
        largest = expected.gradient.abs().max()
        tolerance = TOLERANCE.get(expected.gradient.dtype, HALF_TOLERANCE)
        worst = torch.stack(
            [
                (pruned.gradient[:num_labeled] - of_labeled).abs().max() / largest,
                pruned.gradient[num_labeled:].abs().max() / largest,
                (_norm(expected.gradient) - _norm(of_labeled)) / _norm(expected.gradient),  # gradients of ignored rows
                (pruned.loss - expected.loss).abs() / expected.loss.abs(),
            ]
        ).max()
        if not worst <= tolerance:
            raise RefusalError(f"the loss of fewer rows differs by {float(worst):.2g} (tolerance {tolerance:g})")

    def _step(self, compute: Compute, inputs: Mapping[str, Any]) -> _HeadStep:
        """Compute the loss, and its gradient as far as the logits, which the head's output is detached for."""
        assert self._head is not None  # noqa: S101  as above
        logits: list[torch.Tensor] = []

        def detach(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> torch.Tensor:
            logits.append(output.detach().requires_grad_())
            return logits[-1].clone()  # models may scale their logits in place

        handle = self._head.register_forward_hook(detach)
        torch.manual_seed(_SEED)
        try:
            with torch.enable_grad():
                loss = compute(inputs)
                if len(logits) != 1:
                    raise RefusalError(f"the output head is called {len(logits)} times")
                (gradient,) = torch.autograd.grad(loss, logits)
        except MODEL_ERRORS as error:
            raise RefusalError(f"the loss of random labels fails: {first_line(error)}") from error
        finally:
            handle.remove()
        return _HeadStep(loss.detach(), gradient.flatten(0, -2))
