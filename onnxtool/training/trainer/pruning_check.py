"""Check in eager PyTorch that pruning rows with ignored labels changes neither the loss nor its gradients.

Letters: B sequences, S positions, R = B * S rows, N rows that go through the head, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onnxtool.errors import OnnxtoolError
from onnxtool.training.graphs.ignored_rows import IGNORE_INDEX
from onnxtool.training.trainer.losses import ComputeLoss
from onnxtool.training.trainer.row_selection import NUM_SPARE, RowSelection, labeled_rows

# Largest relative difference. Attention and linear layers sum in the same order in both runs, the loss does not; a
# wrong row has a relative error of about 1.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2
# What models raise that use labels or logits in another way than this check assumes.
_MODEL_ERRORS = (OnnxtoolError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_SEED = 0
_LABELED_SHARE = 0.5


@dataclass(frozen=True)
class Plan:
    """How to prune rows, or why not.

    Attributes:
        shifts: whether the logits at a position are for the label of the next one.
        module: the module that gets fewer rows.
        reason: why no row may be pruned; empty if rows may be pruned.
    """

    shifts: bool = False
    module: torch.nn.Module | None = None
    reason: str = ""


@dataclass(frozen=True)
class _Run:
    """A loss, float [], and its gradient with respect to the logits, [R, C]."""

    loss: torch.Tensor
    gradient: torch.Tensor


class _RefusalError(Exception):
    """The reason why no row may be pruned."""


class _LogitsHook:
    """Detaches the logits, as a forward hook of the output head, so that backward stops there.

    Attributes:
        logits: [..., C], of the last call.
        num_calls: how often the head was called.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, _module: torch.nn.Module, _arguments: object, logits: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.logits = logits.detach().requires_grad_()
        return self.logits.clone()  # models may scale their logits in place


class PruningCheck:
    """Computes a loss with all rows and with the labeled rows only, and compares loss and gradients.

    The labels are random, half of them ignored: those of the batch may all be the same. Both runs draw the same random
    numbers, as the model draws them in training, and restore its buffers and PyTorch's generators.
    """

    def __init__(
        self, model: torch.nn.Module, compute_loss: ComputeLoss, head: torch.nn.Module, selection: RowSelection
    ) -> None:
        self._model = model
        self._compute_loss = compute_loss
        self._head = head
        self._selection = selection

    def first_correct(self, inputs: Mapping[str, Any], num_items: torch.Tensor | None, plans: Iterable[Plan]) -> Plan:
        """Return the first of `plans` that changes nothing, otherwise a plan with the reason why the first one does.

        Args:
            inputs: of the model, with labels int [B, S].
            num_items: passed to the loss.
            plans: the best one first.
        """
        inputs = {**inputs, "labels": self._random_labels(inputs["labels"])}
        reasons = []
        with _state_restored(self._model):
            try:
                expected = self._run_all_rows(inputs, num_items)
            except _RefusalError as refusal:
                return Plan(reason=str(refusal))
            for plan in plans:
                try:
                    self._require_equal(plan, expected, inputs, num_items)
                except _RefusalError as refusal:
                    reasons.append(str(refusal))
                else:
                    return plan
        return Plan(reason=reasons[0])

    def _random_labels(self, labels: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        classes = torch.randint(0, self._head.out_features, labels.shape, generator=generator)
        is_labeled = torch.rand(labels.shape, generator=generator) < _LABELED_SHARE
        return torch.where(is_labeled, classes, IGNORE_INDEX).to(labels)

    def _run_all_rows(self, inputs: Mapping[str, Any], num_items: torch.Tensor | None) -> _Run:
        run = self._run(inputs, num_items)
        if run.gradient.shape[0] != inputs["labels"].numel():
            raise _RefusalError(
                f"the output head gets {run.gradient.shape[0]} rows, and there are {inputs['labels'].numel()} labels"
            )
        if not run.gradient.any():
            raise _RefusalError("the loss does not depend on the logits of the output head")
        return run

    def _require_equal(
        self, plan: Plan, expected: _Run, inputs: Mapping[str, Any], num_items: torch.Tensor | None
    ) -> None:
        """Raise if pruning by `plan` gives another loss or other gradients than `expected`."""
        try:
            selected, rows = labeled_rows(self._model, inputs, plan.shifts)
        except _MODEL_ERRORS as error:
            raise _RefusalError(f"labels of fewer rows cannot be made: {_line(error)}") from error
        self._selection.rows, self._selection.module = rows, plan.module
        try:
            pruned = self._run(selected, num_items)
        finally:
            self._selection.rows = None
        if pruned.gradient.shape[0] != rows.numel():
            raise _RefusalError("the output head gets other rows than were selected")
        num_labeled = rows.numel() - NUM_SPARE
        of_labeled = expected.gradient[rows[:num_labeled]]
        largest = expected.gradient.abs().max()
        tolerance = TOLERANCE.get(expected.gradient.dtype, _HALF_TOLERANCE)
        worst = torch.stack(
            [
                (pruned.gradient[:num_labeled] - of_labeled).abs().max() / largest,
                pruned.gradient[num_labeled:].abs().max() / largest,
                (_norm(expected.gradient) - _norm(of_labeled)) / _norm(expected.gradient),  # gradients of ignored rows
                (pruned.loss - expected.loss).abs() / expected.loss.abs(),
            ]
        ).max()
        if not worst <= tolerance:
            raise _RefusalError(f"the loss of fewer rows differs by {float(worst):.2g} (tolerance {tolerance:g})")

    def _run(self, inputs: Mapping[str, Any], num_items: torch.Tensor | None) -> _Run:
        hook = _LogitsHook()
        handle = self._head.register_forward_hook(hook)
        torch.manual_seed(_SEED)
        try:
            with torch.enable_grad():
                loss: Any = self._compute_loss(self._model, dict(inputs), False, num_items)
                if hook.num_calls != 1:
                    raise _RefusalError(f"the output head is called {hook.num_calls} times")
                (gradient,) = torch.autograd.grad(loss, hook.logits)
        except _MODEL_ERRORS as error:
            raise _RefusalError(f"the loss of random labels fails: {_line(error)}") from error
        finally:
            handle.remove()
        return _Run(loss.detach(), gradient.flatten(0, -2))


@contextmanager
def _state_restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` and PyTorch's random generators after the block."""
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().norm()


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
