"""The shapes of a benchmark, one after the other in one session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onnxtool.benchmarking.comparison import AnswerError, Other, compare_answers, compared_shape
from onnxtool.benchmarking.contenders import SessionContender
from onnxtool.benchmarking.judgement import Judge, side_of
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkResult, ComparedShape, GateOutcome, StageTimes, TransferTimes
from onnxtool.benchmarking.rounds import Limits, Turns
from onnxtool.benchmarking.samples import Block, latencies, median_interval, robust_spread, waited_share
from onnxtool.benchmarking.samples import drift as drift_of
from onnxtool.benchmarking.stages import time_stages
from onnxtool.benchmarking.trust import Figures, shape_warnings
from onnxtool.benchmarking.workload import TextReader, Workload
from onnxtool.runtime.kernel import ReferenceKernel
from onnxtool.runtime.timing import peak_rss_bytes, reset_peak_rss, summarize_latencies

_PATIENCE_S = 30.0  # for a shape on which a gate is not decided
_LONGER = Limits(float("inf"), 3.0)


@dataclass(frozen=True)
class _Extras:
    """What is known of a shape beside its blocks."""

    peak_rss_bytes: int | None = None
    stages_ms: StageTimes | None = None
    transfer_ms: TransferTimes | None = None


@dataclass
class Grid:
    """Times one shape after the other, and collects what was found out.

    Attributes:
        first_run_ms: of the session; None until there was one.
        answers: how far the model's outputs are from the other's, for each shape.
    """

    contender: SessionContender
    other: Other | None
    options: BenchmarkOptions
    judge: Judge
    reader: TextReader | None
    on_progress: Callable[[str], None]
    kernel: ReferenceKernel = field(default_factory=ReferenceKernel)
    first_run_ms: float | None = None
    results: list[BenchmarkResult] = field(default_factory=list)
    compared: list[ComparedShape] = field(default_factory=list)
    answers: list[AnswerError] = field(default_factory=list)
    gates: list[GateOutcome] = field(default_factory=list)

    def time(self, workload: Workload) -> None:
        """Time a shape, alone or in turns with the other model, and longer where a gate is not decided."""
        self.on_progress(f"timing {workload.description}")
        if self.first_run_ms is None:
            start = time.perf_counter()
            self.contender.session.run_unchecked(workload.batches[0])
            self.first_run_ms = (time.perf_counter() - start) * 1e3
        if self.other is not None:
            self.answers.append(compare_answers(self.contender, self.other, workload))
        contenders = [self.contender] if self.other is None else [self.contender, self.other.contender]
        turns = Turns([[one.prepare(feeds) for feeds in workload.batches] for one in contenders], self.kernel)
        turns.warm_up(self.options.warmup)
        knows_peak = self.other is None and reset_peak_rss()
        turns.take(Limits(*self.options.stop_after))
        outcomes = self._judge_longer(workload, turns)
        extras = _Extras(
            peak_rss_bytes() if knows_peak else None,
            time_stages(self.reader.model, workload) if self.reader else None,
            self.contender.time_transfers(workload.batches[0]),
        )
        self.results.append(self._result(workload, turns.blocks[0], extras))
        self.gates += outcomes
        if self.other is not None:
            pairs = list(zip(*turns.blocks, strict=True))
            self.compared.append(compared_shape(workload, pairs, self.answers[-1], threads=self._host_threads))

    def _judge_longer(self, workload: Workload, turns: Turns) -> list[GateOutcome]:
        """Answer the gates, and take more runs while one of them is not decided and there is patience left."""
        end = time.perf_counter() + _PATIENCE_S
        while True:
            outcomes = self._judge(workload, turns)
            open_gates = [outcome.expression for outcome in outcomes if not outcome.decided]
            if not open_gates or time.perf_counter() >= end:
                return outcomes
            self.on_progress(f"timing {workload.description} longer, as {', '.join(open_gates)} is not decided")
            turns.take(_LONGER)

    def _judge(self, workload: Workload, turns: Turns) -> list[GateOutcome]:
        if not self.judge.gates:
            return []
        result = self._result(workload, turns.blocks[0], _Extras())
        side = side_of(result, turns.blocks[0], threads=self._host_threads)
        if self.other is None:
            return self.judge.outcomes(result, (side, None))
        other = self._result(workload, turns.blocks[1], _Extras())
        return self.judge.outcomes(result, (side, side_of(other, turns.blocks[1], threads=self._host_threads)))

    @property
    def _host_threads(self) -> int:
        """Threads that compute on the host; 0 where one of the two is on a device."""
        session = self.contender.session
        on_host = session.provider == "cpu" and (self.other is None or self.other.provider == "cpu")
        return session.threads if on_host else 0

    def _result(self, workload: Workload, blocks: Sequence[Block], extras: _Extras) -> BenchmarkResult:
        samples = latencies(blocks)
        summary = summarize_latencies(samples)
        runs_per_s = 1e3 / summary.mean
        middle = median_interval(blocks)
        threads, repeats = self._host_threads, len(workload.batches) == 1
        warnings = tuple(shape_warnings(Figures(blocks, threads, middle, repeats)))
        return BenchmarkResult(
            batch_size=workload.batch_size,
            sequence_length=workload.sequence_length,
            runs=len(samples),
            latency_ms=summary,
            throughput_samples_per_s=workload.batch_size * runs_per_s,
            throughput_tokens_per_s=workload.tokens_per_batch * runs_per_s,
            latencies_ms=tuple(samples),
            core_ms=tuple(core for block in blocks for core in block.core_ms),
            preemptions=tuple(count for block in blocks for count in block.preemptions),
            block_sizes=tuple(len(block.latencies_ms) for block in blocks),
            kernel_ms=tuple(block.kernel_ms for block in blocks),
            p50_interval_ms=middle,
            spread=robust_spread(samples),
            drift=drift_of(samples),
            waited_share=waited_share(blocks, threads),
            peak_rss_bytes=extras.peak_rss_bytes,
            tokens=workload.tokens,
            stages_ms=extras.stages_ms,
            transfer_ms=extras.transfer_ms,
            trusted=not warnings,
            warnings=warnings,
        )
