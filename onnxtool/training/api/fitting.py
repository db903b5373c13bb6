"""The usual loop: batches go through a module and its optimizer, and each step says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxtool.errors import InputError
from onnxtool.training.api.module import Module
from onnxtool.training.api.optimizer import Optimizer
from onnxtool.training.api.schedule import LinearLRScheduler


@dataclass(frozen=True)
class Progress:
    """A step of the optimizer.

    Attributes:
        step: its number, from 1.
        loss: the mean over the batches that were accumulated for it.
        learning_rate: that it was made with.
    """

    step: int
    loss: float
    learning_rate: float


def fit(
    module: Module,
    optimizer: Optimizer,
    batches: Iterable[Sequence[Any]],
    *,
    scheduler: LinearLRScheduler | None = None,
    accumulate: int = 1,
    on_step: Callable[[Progress], None] = lambda _progress: None,
) -> list[float]:
    """Train on each batch once, a tuple of the module's inputs, and return the loss of each step of the optimizer.

    Gradients of `accumulate` batches are added up before a step, as in PyTorch; divide the loss in the model where
    their mean is wanted. What remains at the end makes a step as well.

    Raises:
        InputError: `accumulate` is below 1, or a batch does not fit the module.
    """
    if accumulate < 1:
        raise InputError(f"gradients of {accumulate} batches cannot be accumulated", "give 1 or more")
    losses: list[float] = []
    waiting: list[float] = []

    def step() -> None:
        rate = optimizer.get_learning_rate()
        optimizer.step()
        module.lazy_reset_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(sum(waiting) / len(waiting))
        waiting.clear()
        on_step(Progress(optimizer.num_steps, losses[-1], rate))

    module.train()
    module.lazy_reset_grad()
    for batch in batches:
        outputs = module(*batch)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        waiting.append(float(loss if not hasattr(loss, "numpy") else loss.numpy()))
        if len(waiting) == accumulate:
            step()
    if waiting:
        step()
    return losses
