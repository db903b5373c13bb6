"""The loop that times: blocks of runs, of one contender or of several in turns.

A block is a few runs one right after the other, so that caches and the threads that spin between two operators are as
in an application that serves one request after another. Between blocks the reference kernel is timed; the run after it,
or after another contender's block, does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onnxtool.benchmarking.samples import Block
from onnxtool.runtime.disturbance import count_preemptions, waiting_clock
from onnxtool.runtime.kernel import ReferenceKernel

Call = Callable[[], object]

_BLOCKS = 20  # as many as a shape is divided into
_RUNS_OF_BLOCK = 5  # at least, so that the run that does not count is no more than a sixth


@dataclass(frozen=True)
class Limits:
    """What stops a shape: the first that is met. `duration_s` is for each contender."""

    runs: float
    duration_s: float

    @property
    def runs_of_block(self) -> float:
        """Runs after which a block ends."""
        return self.runs if math.isinf(self.runs) else max(_RUNS_OF_BLOCK, math.ceil(self.runs / _BLOCKS))

    @property
    def seconds_of_block(self) -> float:
        """Seconds after which a block of enough runs ends."""
        return self.duration_s / _BLOCKS


@dataclass(frozen=True)
class _Stop:
    """What ends a block.

    Attributes:
        limits: of the shape.
        left: what is left of them.
        count: how many runs the block of another contender in this round has, so that both run the same inputs.
    """

    limits: Limits
    left: Limits
    count: int | None

    def is_met(self, runs: int, seconds: float) -> bool:
        """Whether a block of so many runs, which took so long, ends."""
        if self.count is not None:
            return runs >= self.count
        is_long = runs >= _RUNS_OF_BLOCK and seconds >= self.limits.seconds_of_block
        return is_long or runs >= min(self.limits.runs_of_block, self.left.runs) or seconds >= self.left.duration_s


@dataclass
class Turns:
    """Blocks of contenders in turns; each is a cycle of calls, one for each batch of inputs.

    Attributes:
        blocks: those that were taken, for each contender.
    """

    contenders: Sequence[Sequence[Call]]
    kernel: ReferenceKernel
    blocks: list[list[Block]] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)
    _num_rounds: int = 0

    def __post_init__(self) -> None:
        self.blocks = [[] for _ in self.contenders]
        self._places = [0 for _ in self.contenders]

    def warm_up(self, runs: int) -> None:
        """Run each contender so often, without counting."""
        for calls in self.contenders:
            for place in range(runs):
                calls[place % len(calls)]()

    def take(self, limits: Limits) -> None:
        """Take blocks until a limit is met: one of each contender a round, the other way round in every second round.

        What came first in one round comes last in the next, so that neither gains from its place.
        """
        end = time.perf_counter() + limits.duration_s * len(self.contenders)
        num_runs = 0
        with waiting_clock() as waited_ns:
            while True:
                order = range(len(self.contenders))
                count: int | None = None
                for which in order if self._num_rounds % 2 == 0 else reversed(order):
                    left = Limits(limits.runs - num_runs, max(0.0, end - time.perf_counter()))
                    count = self._take_block(which, _Stop(limits, left, count), waited_ns)
                self._num_rounds += 1
                num_runs += count or 0
                if num_runs >= limits.runs or time.perf_counter() >= end:
                    return

    def _take_block(self, which: int, stop: _Stop, waited_ns: Callable[[], int] | None) -> int:
        """Take a block of one contender, and return how many runs it has."""
        kernel_ms = self.kernel.time_ms()
        if self.blocks[which] or len(self.contenders) > 1:
            self._settle(which)
        begin, waited = time.perf_counter(), waited_ns() if waited_ns else 0
        latencies_ns, core_ns, preemptions = self._runs(which, stop)
        self.blocks[which].append(
            Block(
                tuple(latency / 1e6 for latency in latencies_ns),
                tuple(core / 1e6 for core in core_ns),
                tuple(preemptions),
                (waited_ns() - waited) / 1e6 if waited_ns else None,
                kernel_ms,
                (time.perf_counter() - begin) * 1e3,
            )
        )
        return len(latencies_ns)

    def _runs(self, which: int, stop: _Stop) -> tuple[list[int], list[int], list[int]]:
        clock, core_clock = time.perf_counter_ns, time.thread_time_ns
        latencies_ns: list[int] = []
        core_ns: list[int] = []
        preemptions: list[int] = []
        begin = clock()
        while True:
            call = self._next(which)
            leaves, core = count_preemptions(), core_clock()
            start = clock()
            outputs = call()
            end = clock()
            core_ns.append(core_clock() - core)
            preemptions.append(count_preemptions() - leaves)
            latencies_ns.append(end - start)
            # Freed here, not when the next run assigns them: that would be inside its time.
            del outputs
            if stop.is_met(len(latencies_ns), (end - begin) / 1e9):
                return latencies_ns, core_ns, preemptions

    def _settle(self, which: int) -> None:
        """Run what comes next without counting it, and without leaving it out."""
        calls = self.contenders[which]
        calls[self._places[which] % len(calls)]()

    def _next(self, which: int) -> Call:
        calls, place = self.contenders[which], self._places[which]
        self._places[which] = place + 1
        return calls[place % len(calls)]
