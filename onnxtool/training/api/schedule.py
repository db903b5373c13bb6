"""Learning rates that change with the steps."""

from __future__ import annotations

from onnxtool.errors import ArtifactError
from onnxtool.training.api.optimizer import Optimizer


class LinearLRScheduler:
    """From zero up to a learning rate in the first steps, and down to zero in the others.

    The optimizer has the rate of its first step once this is made; call `step` after each of its steps.

    Args:
        optimizer: whose learning rate is set, by the steps it has made.
        warmup_step_count: steps that go up.
        total_step_count: all steps.
        initial_lr: the rate at the end of the warm-up.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not 0 <= warmup_step_count <= total_step_count:
            raise ArtifactError(
                f"{warmup_step_count} steps of warm-up of {total_step_count} in all", "give fewer than all"
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
