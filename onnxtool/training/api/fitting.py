"""The usual training loop over batches, which reports the progress of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtool.errors import InputError
from onnxtool.options import checked
from onnxtool.training.api.module import Module
from onnxtool.training.api.optimizer import LinearLRScheduler, Optimizer


@dataclass(frozen=True)
class Progress:
    """An optimizer step.

    Attributes:
        step: its number, from 1.
        loss: the mean over the batches that were accumulated for it.
        learning_rate: the learning rate of this step.
    """

    step: int
    loss: float
    learning_rate: float


@checked
def fit(
    module: Module,
    optimizer: Optimizer,
    batches: Iterable[Sequence[Any]],
    *,
    scheduler: LinearLRScheduler | None = None,
    accumulate: int = 1,
    on_step: Callable[[Progress], None] = lambda _progress: None,
) -> list[float]:
    """Train on each batch once, a tuple of the module's inputs, and return the loss of each optimizer step.

    Gradients of `accumulate` batches are summed before a step, as in PyTorch; for their mean, divide the loss in the
    model. Batches that remain at the end make a step as well.

    Raises:
        InputError: `accumulate` is below 1, a batch does not fit the module, or the loss has several values.
    """
    if accumulate < 1:
        raise InputError(f"gradients of {accumulate} batches cannot be accumulated", "give 1 or more")
    losses: list[float] = []
    accumulated: list[float] = []

    def step() -> None:
        rate = optimizer.get_learning_rate()
        optimizer.step()
        module.lazy_reset_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(sum(accumulated) / len(accumulated))
        accumulated.clear()
        on_step(Progress(optimizer.num_steps, losses[-1], rate))

    module.train()
    module.lazy_reset_grad()
    for batch in batches:
        outputs = module(*batch)
        accumulated.append(_loss_of(outputs))
        if len(accumulated) == accumulate:
            step()
    if accumulated:
        step()
    return losses


def _loss_of(outputs: Any) -> float:
    """Return the loss of a step, float [] or [1], the first of its outputs.

    Raises:
        InputError: it has several values.
    """
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    values = np.asarray(loss.numpy() if hasattr(loss, "numpy") else loss)
    if values.size != 1:
        raise InputError(f"the loss is {list(values.shape)}, and a step needs one value", "take its mean in the model")
    return float(values.reshape(-1)[0])
