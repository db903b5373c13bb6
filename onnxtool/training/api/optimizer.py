"""Run optimizer steps in place on a Module's parameters, schedule the learning rate, and loop over batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxtool.errors import ArtifactError, InputError
from onnxtool.options import checked
from onnxtool.training.api.module import Module
from onnxtool.training.api.session import BoundSession, Buffer
from onnxtool.training.graphs.names import GRADIENTS, LEARNING_RATE, MOMENTS, PARAMETERS, STEP, updated_name


class Optimizer:
    """Updates a module's parameters from their gradients.

    Args:
        optimizer_uri: the optimizer model.
        module: holds the parameters and gradients; its state keeps the step count and the learning rate.

    Raises:
        ArtifactError: the model is not an optimizer model, or the checkpoint's moments do not fit.
    """

    @checked
    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._module = module
        self._checkpoint = module.state.checkpoint
        self._session = BoundSession(Path(optimizer_uri), module.device, module.session_options)
        missing = {LEARNING_RATE, STEP, PARAMETERS, GRADIENTS} - set(self._session.input_names)
        if missing:
            raise ArtifactError(
                f"{optimizer_uri} has no input {', '.join(sorted(missing))}",
                "pass the optimizer model of the artifacts",
            )
        self._bind()

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return self._checkpoint.step

    def step(self) -> None:
        """Update the parameters; gradients are kept until `lazy_reset_grad`."""
        self._module.state.check_complete()
        step = self._checkpoint.step + 1
        self._session.feed(LEARNING_RATE, np.array([self._checkpoint.learning_rate], np.float32))
        self._session.feed(STEP, np.array([step], np.int64))
        self._session.run()
        self._checkpoint.step = step

    @checked
    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate for the next step."""
        self._checkpoint.learning_rate = float(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate for the next step."""
        return self._checkpoint.learning_rate

    def _bind(self) -> None:
        module, session = self._module, self._session
        buffers = {PARAMETERS: module.values, GRADIENTS: module.gradients}
        for name, moment in MOMENTS.items():
            if name not in session.input_names:
                continue
            buffers[name] = module.moment_buffers.setdefault(moment, Buffer(module.values.layout, module.device))
            saved = self._checkpoint.moments.get(moment, {})
            shapes = module.values.layout.shapes
            if any(shapes.get(parameter) != array.shape for parameter, array in saved.items()):
                raise ArtifactError(
                    f"the moments {moment} of the checkpoint do not fit the training model",
                    "they belong to other parameters; load the checkpoint that was saved with this model",
                )
            buffers[name].write(saved)
        for name, buffer in buffers.items():
            session.bind_input(name, buffer.layout.blocks, buffer.pointer)
            if updated_name(name) in session.output_names:
                session.bind_output(updated_name(name), buffer.layout.blocks, buffer.pointer)


class LinearLRScheduler:
    """Linear warm-up from zero to a learning rate, then linear decay to zero.

    It sets the optimizer's learning rate when it is created; call `step` after each optimizer step.

    Args:
        optimizer: the optimizer whose learning rate follows its number of steps.
        warmup_step_count: number of warm-up steps.
        total_step_count: total number of steps, including warm-up.
        initial_lr: the learning rate at the end of the warm-up.
    """

    @checked
    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not 0 <= warmup_step_count <= total_step_count:
            raise ArtifactError(
                f"{warmup_step_count} warm-up steps of {total_step_count} in all", "pass at most the total"
            )
        self._optimizer = optimizer
        self._warmup = warmup_step_count
        self._total = total_step_count
        self._initial = initial_lr
        self.step()

    def step(self) -> None:
        """Set the learning rate for the next step."""
        done = self._optimizer.num_steps
        if done < self._warmup:
            factor = done / self._warmup
        else:
            factor = max(0.0, (self._total - done) / max(1, self._total - self._warmup))
        self._optimizer.set_learning_rate(self._initial * factor)


@dataclass(frozen=True)
class Progress:
    """An optimizer step.

    Attributes:
        step: its number, from 1.
        loss: the mean loss over the batches accumulated for this step.
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
    """Train once on each batch, a tuple of the module's inputs, and return the loss of each optimizer step.

    The gradients of `accumulate` batches are summed before each step, as in PyTorch; for their mean, divide the loss in
    the model. Any batches left over at the end also make a step.

    Raises:
        InputError: `accumulate` is below 1, a batch does not fit the module, or the loss has more than one value.
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
    """Return the loss of a step, float [] or [1], the first output."""
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    values = np.asarray(loss.numpy() if hasattr(loss, "numpy") else loss)
    if values.size != 1:
        raise InputError(f"the loss is {list(values.shape)}, and a step needs one value", "take its mean in the model")
    return float(values.reshape(-1)[0])
