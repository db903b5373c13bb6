"""The trial of label sparsity: whether dropping rows leaves the loss and its gradients what they are.

Letters: B sequences, S positions, R = B * S rows, N rows that go through the head, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onnxtool.errors import OnnxtoolError
from onnxtool.training.graphs.label_rows import IGNORE_INDEX
from onnxtool.training.trainer.kept_rows import NUM_SPARE, kept_rows
from onnxtool.training.trainer.losses import ComputeLoss
from onnxtool.training.trainer.output_head import RowSelection

# Largest difference, as a part of the largest number. Attention and products sum in the same order in both runs, the
# loss does not; a wrong row is wrong by a part of about 1.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2
# What models raise that do something else with labels or scores than the trial supposes.
_REFUSALS = (OnnxtoolError, RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, AssertionError)
_SEED = 0
_COUNTING_SHARE = 0.5


@dataclass(frozen=True)
class Plan:
    """How to drop rows, or why not.

    Attributes:
        shifts: whether scores at a position are for the label of the next one.
        place: the module that gets fewer rows.
        reason: why none may be dropped; empty where they may.
    """

    shifts: bool = False
    place: torch.nn.Module | None = None
    reason: str = ""


@dataclass(frozen=True)
class _Run:
    """A loss, float [], and its gradient by the scores, [R, C]."""

    loss: torch.Tensor
    gradient: torch.Tensor


class _RefusalError(Exception):
    """The reason why no rows may be dropped."""


class _Probe:
    """Makes the scores a leaf, as a forward hook of the output head: gradients by them need none of the layers below.

    Attributes:
        scores: [..., C], of the last call.
        num_calls: of the head.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, _module: torch.nn.Module, _arguments: object, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.scores = scores.detach().requires_grad_()
        return self.scores.clone()  # models may scale their scores in place


class Trial:
    """Computes a loss with all rows and with those that count, in eager PyTorch, and compares.

    Labels are made up, half of them ignored: those of the batch may all be the same. Both runs draw the same random
    numbers, as the model draws them in training, and leave its buffers and PyTorch's generators as they were.
    """

    def __init__(
        self, model: torch.nn.Module, compute_loss: ComputeLoss, head: torch.nn.Module, selection: RowSelection
    ) -> None:
        self._model = model
        self._compute_loss = compute_loss
        self._head = head
        self._selection = selection

    def plan(self, inputs: Mapping[str, Any], num_items: torch.Tensor | None, plans: Iterable[Plan]) -> Plan:
        """Return the first of `plans` that is right, else one with the reason why the first is not.

        Args:
            inputs: of the model, with labels int [B, S].
            num_items: for the loss.
            plans: the best one first.
        """
        inputs = {**inputs, "labels": self._made_up(inputs["labels"])}
        reasons = []
        with _undone(self._model):
            try:
                whole = self._whole(inputs, num_items)
            except _RefusalError as refusal:
                return Plan(reason=str(refusal))
            for plan in plans:
                try:
                    self._try(plan, whole, inputs, num_items)
                except _RefusalError as refusal:
                    reasons.append(str(refusal))
                else:
                    return plan
        return Plan(reason=reasons[0])

    def _made_up(self, labels: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        classes = torch.randint(0, self._head.out_features, labels.shape, generator=generator)
        counts = torch.rand(labels.shape, generator=generator) < _COUNTING_SHARE
        return torch.where(counts, classes, IGNORE_INDEX).to(labels)

    def _whole(self, inputs: Mapping[str, Any], num_items: torch.Tensor | None) -> _Run:
        run = self._run(inputs, num_items)
        if run.gradient.shape[0] != inputs["labels"].numel():
            raise _RefusalError(
                f"the output head gets {run.gradient.shape[0]} rows, and there are {inputs['labels'].numel()} labels"
            )
        if not run.gradient.any():
            raise _RefusalError("the loss does not depend on the scores of the output head")
        return run

    def _try(self, plan: Plan, whole: _Run, inputs: Mapping[str, Any], num_items: torch.Tensor | None) -> None:
        """Raise where dropping rows after `plan` gives another loss or other gradients than `whole`."""
        try:
            kept, rows = kept_rows(self._model, inputs, plan.shifts)
        except _REFUSALS as error:
            raise _RefusalError(f"the labels of fewer rows cannot be made: {_line(error)}") from error
        self._selection.rows, self._selection.place = rows, plan.place
        try:
            sparse = self._run(kept, num_items)
        finally:
            self._selection.rows = None
        if sparse.gradient.shape[0] != rows.numel():
            raise _RefusalError("the output head gets other rows than were kept")
        counting = rows.numel() - NUM_SPARE
        expected = whole.gradient[rows[:counting]]
        largest = whole.gradient.abs().max()
        tolerance = TOLERANCE.get(whole.gradient.dtype, _HALF_TOLERANCE)
        worst = torch.stack(
            [
                (sparse.gradient[:counting] - expected).abs().max() / largest,
                sparse.gradient[counting:].abs().max() / largest,
                (_norm(whole.gradient) - _norm(expected)) / _norm(whole.gradient),  # of rows that do not count
                (sparse.loss - whole.loss).abs() / whole.loss.abs(),
            ]
        ).max()
        if not worst <= tolerance:
            raise _RefusalError(f"the loss of fewer rows differs by {float(worst):.2g} (tolerance {tolerance:g})")

    def _run(self, inputs: Mapping[str, Any], num_items: torch.Tensor | None) -> _Run:
        probe = _Probe()
        handle = self._head.register_forward_hook(probe)
        torch.manual_seed(_SEED)
        try:
            with torch.enable_grad():
                loss: Any = self._compute_loss(self._model, dict(inputs), False, num_items)
                if probe.num_calls != 1:
                    raise _RefusalError(f"the output head is called {probe.num_calls} times")
                (gradient,) = torch.autograd.grad(loss, probe.scores)
        except _REFUSALS as error:
            raise _RefusalError(f"the loss of made-up labels fails: {_line(error)}") from error
        finally:
            handle.remove()
        return _Run(loss.detach(), gradient.flatten(0, -2))


@contextmanager
def _undone(model: torch.nn.Module) -> Iterator[None]:
    """Leave the buffers of `model` and PyTorch's generators as they were."""
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
