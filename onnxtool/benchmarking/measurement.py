"""Time a model on every shape, and assemble the report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnxtool.benchmarking.comparison import (
    ComparedModel,
    OutputDifference,
    compare_outputs,
    compared_shape,
    few_pairs,
    open_compared,
)
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import (
    BenchmarkEnvironment,
    BenchmarkReport,
    BenchmarkResult,
    ComparedShape,
    LatencyComparison,
    check_report,
    read_gates,
    require_tokens,
    shape_names,
)
from onnxtool.benchmarking.rounds import (
    Floats,
    InterleavedRuns,
    RoundLimits,
    SessionRunner,
    drift,
    median_interval,
    robust_spread,
    shape_warnings,
)
from onnxtool.benchmarking.workload import (
    TextReader,
    Workload,
    check_lengths,
    fit_sizes,
    random_workloads,
    sample_workloads,
)
from onnxtool.infer.loading import load
from onnxtool.model_file import ModelFile
from onnxtool.options import StrPath, checked
from onnxtool.progress import Stage, tell
from onnxtool.runtime.machine import (
    DeviceMemory,
    available_cores,
    device_memory,
    installed_versions,
    peak_rss_bytes,
    processor_name,
    reset_peak_rss,
)
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import disabled_optimizers, open_session
from onnxtool.runtime.timing import summarize_latencies


@checked
def benchmark(
    model_path: StrPath,
    options: BenchmarkOptions | None = None,
) -> BenchmarkReport:
    """Time the model at `model_path` on every shape of the grid, or on texts, in one session.

    Throughput follows from the mean latency. Latencies measure onnxruntime's own call, without tokenization and
    post-processing. On a device, they include the copies of inputs and outputs.

    Raises:
        CheckpointError: the checkpoint to compare with cannot be loaded.
        GateError: a gate is malformed or names an unknown figure.
        InputError: an option is invalid, a shape exceeds the model's limit, or texts cannot be used.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load or run the model.
    """
    model_path, options = Path(model_path), options or BenchmarkOptions()
    samples: list[Workload] = []
    shapes = shape_names(options)
    if options.sample_inputs:
        samples = sample_workloads(ModelFile.open(model_path), options)
        shapes = [workload.name for workload in samples]
    gates = read_gates(options, shapes)
    if not options.texts and not samples:
        options = fit_sizes(ModelFile.open(model_path), options)
        check_lengths(ModelFile.open(model_path), options)
        shapes = shape_names(options)
    load_before, memory = _load_average(), None if options.provider == "cpu" else device_memory()
    session, reader = _load(model_path, options)
    memory = memory if session.on_device else None
    peak_rss_load = peak_rss_bytes()
    report = BenchmarkReport(
        model=str(session.model.path),
        provider=session.provider,
        threads=session.threads,
        load_ms=session.load_ms,
        first_run_ms=0.0,
        peak_rss_bytes=peak_rss_load,
        warmup=options.warmup,
        results=(),
        environment=_describe_environment(session, options, load_before, memory),
        inputs="texts" if reader else "samples" if samples else "random",
        peak_rss_load_bytes=peak_rss_load,
    )
    other = None
    if options.compare is not None:
        tell(f"loading {options.compare}")
        other = open_compared(options, session)
    timer = _ShapeTimer(SessionRunner(session), other, options, reader)
    workloads = samples or list(_workloads(session.model, reader, options))
    require_tokens(gates, has_tokens=all(workload.has_tokens for workload in workloads))
    for number, workload in enumerate(workloads):
        tell(Stage("timing shape", number, len(workloads), workload.description))
        timer.time(workload)
    threads, cores = session.threads, available_cores()
    warnings = (f"{threads} threads on {cores} cores wait for each other",) if threads > cores else ()
    report = _complete(report, timer, warnings)
    report = replace(report, peak_vram_bytes=_taken(memory))
    return replace(report, gates=tuple(check_report(gates, report)))


def _load(path: Path, options: BenchmarkOptions) -> tuple[Session, TextReader | None]:
    """Open the session, for texts with their tokenizer."""
    if not options.texts:
        tell(f"loading {path}")
        session = open_session(path, provider=options.provider, threads=options.threads)
        return session, None
    model = load(
        path,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
    )
    return model.session, TextReader.draw(model, options)


def _workloads(model: ModelFile, reader: TextReader | None, options: BenchmarkOptions) -> Iterator[Workload]:
    if reader is None:
        yield from random_workloads(model, options)
    else:
        for batch_size in options.batch_sizes:
            yield reader.workload(batch_size)


@dataclass
class _ShapeTimer:
    """Time one shape after another, and collect the results.

    Attributes:
        first_run_ms: the session's first run; None before it.
        differences: differences between the outputs of the model and the compared model, for each shape.
    """

    runner: SessionRunner
    other: ComparedModel | None
    options: BenchmarkOptions
    reader: TextReader | None
    first_run_ms: float | None = None
    results: list[BenchmarkResult] = field(default_factory=list)
    compared: list[ComparedShape] = field(default_factory=list)
    differences: list[OutputDifference] = field(default_factory=list)

    def time(self, workload: Workload) -> None:
        """Time a shape, by itself or in turns with the compared model."""
        if self.first_run_ms is None:
            start = time.perf_counter()
            self.runner.session.run_unchecked(workload.batches[0])
            self.first_run_ms = (time.perf_counter() - start) * 1e3
        if self.other is not None:
            self.differences.append(compare_outputs(self.runner, self.other, workload))
        runners = [self.runner] if self.other is None else [self.runner, self.other.runner]
        runs = InterleavedRuns([[runner.prepare(feeds) for feeds in workload.batches] for runner in runners])
        runs.warm_up(self.options.warmup)
        has_own_peak = self.other is None and reset_peak_rss()
        runs.take(RoundLimits(*self.options.stop_after))
        peak_bytes = peak_rss_bytes() if has_own_peak else None
        stages = self.reader.time_stages(workload) if self.reader else None
        result = self._result(workload, runs.blocks[0])
        self.results.append(replace(result, peak_rss_bytes=peak_bytes, stages_ms=stages))
        if self.other is not None:
            pairs = list(zip(*runs.blocks, strict=True))
            self.compared.append(compared_shape(workload, pairs, self.differences[-1]))

    def _result(self, workload: Workload, blocks: Sequence[Floats]) -> BenchmarkResult:
        samples = np.concatenate(blocks)
        summary = summarize_latencies(samples.tolist())
        runs_per_s, tokens = 1e3 / summary.mean, workload.tokens_per_batch
        middle = median_interval(blocks)
        warnings = tuple(shape_warnings(samples, middle, is_repeated=len(workload.batches) == 1))
        return BenchmarkResult(
            batch_size=workload.batch_size,
            sequence_length=workload.sequence_length,
            runs=len(samples),
            latency_ms=summary,
            throughput_samples_per_s=workload.batch_size * runs_per_s,
            throughput_tokens_per_s=None if tokens is None else tokens * runs_per_s,
            latencies_ms=tuple(samples.tolist()),
            p50_interval_ms=middle,
            spread=robust_spread(samples),
            drift=drift(samples),
            tokens=workload.tokens,
            trusted=not warnings,
            warnings=warnings,
        )


def _complete(report: BenchmarkReport, timer: _ShapeTimer, warnings: tuple[str, ...]) -> BenchmarkReport:
    """Add the timings to the figures known before."""
    results = tuple(timer.results)
    peaks = () if timer.other else (peak_rss_bytes(), *(result.peak_rss_bytes or 0 for result in results))
    return replace(
        report,
        first_run_ms=timer.first_run_ms or 0.0,
        peak_rss_bytes=max(report.peak_rss_bytes, *peaks, 0),
        results=results,
        environment=replace(report.environment, load_average_after=_load_average()),
        trusted=not warnings and all(result.trusted for result in results),
        warnings=warnings,
        notes=(*timer.runner.session.notes, *_text_notes(timer)),
        comparison=_comparison(timer),
    )


def _comparison(timer: _ShapeTimer) -> LatencyComparison | None:
    other = timer.other
    if other is None:
        return None
    few = dict.fromkeys(note for note in map(few_pairs, timer.compared) if note)
    outputs = timer.differences[0].outputs
    unlike = [] if outputs else ["the models have no output in common: whether their outputs agree is not known"]
    return LatencyComparison(
        other=other.name,
        kind=other.kind,
        provider=other.provider,
        load_ms=other.runner.load_ms,
        outputs=outputs,
        results=tuple(timer.compared),
        notes=(*other.notes, *unlike, *few),
    )


def _text_notes(timer: _ShapeTimer) -> Iterator[str]:
    """Report which texts were run, if not all of them equally often."""
    reader = timer.reader
    if reader is None:
        return
    if len(reader.texts) < reader.num_given:
        yield f"{len(reader.texts)} of {reader.num_given} texts were drawn at random"
    for result in timer.results:
        batches = -(-len(reader.texts) // result.batch_size)
        if result.runs < batches:
            yield f"{result.runs} of {batches} batches of {result.batch_size} were timed, in an order drawn at random"


def _taken(before: DeviceMemory | None) -> int | None:
    """Return the device memory allocated since."""
    after = None if before is None else device_memory()
    return None if before is None or after is None else max(0, after.used_bytes - before.used_bytes)


def _load_average() -> float | None:
    """Return the machine's load average over the last minute; None if unavailable."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _describe_environment(
    session: Session, options: BenchmarkOptions, load_average: float | None, memory: DeviceMemory | None
) -> BenchmarkEnvironment:
    """Describe the machine, and the session as it was opened."""
    return BenchmarkEnvironment(
        cpu=processor_name(),
        num_cores=available_cores(),
        gpu=memory.name if memory else "",
        platform=platform.platform(),
        python=platform.python_version(),
        versions=installed_versions(),
        load_average_before=load_average,
        load_average_after=None,
        intra_threads=session.intra_threads,
        disabled_optimizers=tuple(disabled_optimizers(session.model)),
    )
