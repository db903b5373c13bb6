"""Time training steps in onnxruntime and in PyTorch, in turns, and continue with the faster one."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from onnxtool.torch_backend.report import StepTimes

_LOGGER = logging.getLogger(__name__)
PLACEMENTS = ("measured", "onnxruntime")
_LEAST_PARAMETERS = 1_000_000  # steps of smaller models take milliseconds, and are not worth measuring
_SAMPLES = 6  # of each way
_UNTIMED = 2  # first steps of each way, which compile or allocate memory
_MILLISECONDS = 1e3


@dataclass
class _TimedStep:
    """A step under way: where it runs, its time so far, and the size of its inputs."""

    in_onnxruntime: bool
    num_graphs: int
    num_elements: int
    seconds: float = 0.0


@dataclass
class StepChoice:
    """Decides where the next step runs. A step is forward and backward, without what lies between them.

    The losses of both ways are equal up to rounding and draw the same random numbers, so that turns do not change what
    a model learns. Texts of a batch have any length: the times are compared by element of the inputs.

    Attributes:
        is_on: whether steps are measured; otherwise all of them run in onnxruntime.
        times: the result; None before there is one.
    """

    is_on: bool
    times: StepTimes | None = None
    _num_steps: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _samples: dict[bool, list[tuple[float, float]]] = field(default_factory=lambda: {True: [], False: []})

    @classmethod
    def of(cls, placement: str, model: torch.nn.Module) -> StepChoice:
        """Measure the steps of a model on the CPU that is large enough for it to matter."""
        parameters = list(model.parameters())
        is_large = sum(value.numel() for value in parameters) >= _LEAST_PARAMETERS
        return cls(placement == "measured" and is_large and all(value.device.type == "cpu" for value in parameters))

    @property
    def in_onnxruntime(self) -> bool:
        """Whether the next step runs in onnxruntime."""
        if self.times is not None:
            return self.times.in_onnxruntime
        return not self.is_on or self._num_steps[True] <= self._num_steps[False]

    def begin(self, inputs: Any, num_graphs: int) -> _TimedStep | None:
        """Return the step that begins; None if it is not measured, which is so in several processes."""
        if torch.are_deterministic_algorithms_enabled() or torch.distributed.is_initialized():
            self.is_on = False  # timings are not reproducible, and ranks could disagree
        if not self.is_on or self.times is not None or not torch.is_grad_enabled():
            return None
        size = sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        return _TimedStep(self.in_onnxruntime, num_graphs, size, -time.perf_counter())

    def forward_ended(self, step: _TimedStep, loss: torch.Tensor, count_graphs: Any) -> None:
        """Wait for the backward pass, and count the step when it is through.

        Args:
            step: the step.
            loss: its loss, whose backward pass is measured as well.
            count_graphs: returns the number of compiled graphs; a step that compiled one does not count.
        """
        step.seconds += time.perf_counter()

        def begun(_gradient: torch.Tensor) -> None:
            start = time.perf_counter()

            def ended() -> None:
                step.seconds += time.perf_counter() - start
                self._count(step, compiled=count_graphs() != step.num_graphs)

            torch.autograd.Variable._execution_engine.queue_callback(ended)  # noqa: SLF001 - as PyTorch's own wrappers

        loss.register_hook(begun)

    def _count(self, step: _TimedStep, *, compiled: bool) -> None:
        way = step.in_onnxruntime
        if self.times is not None or compiled:
            return
        self._num_steps[way] += 1
        if self._num_steps[way] <= _UNTIMED or not step.num_elements:
            return
        self._samples[way].append((step.seconds / step.num_elements, step.seconds))
        if min(map(len, self._samples.values())) < _SAMPLES:
            return
        ours, theirs = (statistics.median(rate for rate, _ in self._samples[way]) for way in (True, False))
        ours_ms = _MILLISECONDS * statistics.median(seconds for _, seconds in self._samples[True])
        self.times = StepTimes(ours <= theirs, ours_ms, ours_ms * theirs / ours, _SAMPLES)
        _LOGGER.log(logging.INFO if self.times.in_onnxruntime else logging.WARNING, "%s", self.times)
