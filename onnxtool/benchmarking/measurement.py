"""Time a model, and put together what was found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from onnxtool.benchmarking.baseline import Conditions
from onnxtool.benchmarking.comparison import Other, few_pairs, open_again, open_other
from onnxtool.benchmarking.contenders import SessionContender
from onnxtool.benchmarking.description import describe_environment, identify_model
from onnxtool.benchmarking.grid import Grid
from onnxtool.benchmarking.judgement import Judge, shape_names
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkReport, Comparison
from onnxtool.benchmarking.trust import MachineWatch
from onnxtool.benchmarking.workload import TextReader, Workload, check_lengths, made_up_workloads
from onnxtool.infer.loading import load
from onnxtool.model_file import ModelFile
from onnxtool.runtime.device_memory import DeviceMemory, device_memory
from onnxtool.runtime.disturbance import load_average
from onnxtool.runtime.session import Session, available_cores, open_session
from onnxtool.runtime.timing import peak_rss_bytes


def benchmark(
    model_path: Path,
    options: BenchmarkOptions | None = None,
    *,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> BenchmarkReport:
    """Time the model at `model_path` on every shape of the grid, or on texts, in one session.

    Throughput is what the mean latency gives. Latencies are those of onnxruntime's own call: tokenization, and
    anything done with the outputs, are not in them. With IOBinding, copies to a device are not in them either.

    Raises:
        CheckpointError: the checkpoint to compare with cannot be loaded.
        GateError: a gate is malformed or names no figure, or the baseline does not compare.
        InputError: an option makes no sense, a shape is longer than the model takes, or texts cannot be used.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load or run the model.
    """
    options = options or BenchmarkOptions()
    options.check()
    judge = Judge.open(options)
    if not options.texts:
        check_lengths(ModelFile.open(model_path), options)
    watch, memory = MachineWatch(), None if options.provider == "cpu" else device_memory()
    session, reader = _load(model_path, options, on_progress)
    memory = memory if session.provider == "cuda" else None
    peak_load = peak_rss_bytes()
    conditions = Conditions(
        session.provider,
        session.threads,
        "texts" if reader else "random",
        describe_environment(session, options, watch.load_before, memory),
        identify_model(session.model, reader),
    )
    judge.check(conditions, shape_names(options))
    other = _other(options, session, judge.model_again(conditions), on_progress)
    if other is not None and other.kind == "baseline":
        judge = replace(judge, in_turns=True)
    grid = Grid(SessionContender(session, options.io_binding), other, options, judge, reader, on_progress)
    for workload in _workloads(session.model, reader, options):
        grid.time(workload)
    report = _report(grid, conditions, tuple(watch.warnings(session.threads, available_cores())), peak_load)
    report = replace(report, peak_vram_bytes=_taken(memory))
    return replace(report, gates=(*report.gates, *judge.run_outcomes(report)))


def _load(
    path: Path, options: BenchmarkOptions, on_progress: Callable[[str], None]
) -> tuple[Session, TextReader | None]:
    """Open the session; where texts are run, with what turns them into inputs."""
    if not options.texts:
        on_progress(f"loading {path}")
        session = open_session(
            path, provider=options.provider, threads=options.threads, inter_threads=options.inter_threads
        )
        return session, None
    model = load(
        path,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
        inter_threads=options.inter_threads,
        on_progress=on_progress,
    )
    return model.session, TextReader.draw(model, options)


def _other(
    options: BenchmarkOptions, session: Session, again: Path | None, on_progress: Callable[[str], None]
) -> Other | None:
    """Load what is timed in turns with the model: what was asked for, else the model of the baseline `again`."""
    if options.compare is not None:
        on_progress(f"loading {options.compare}")
        return open_other(options, session)
    if again is not None:
        on_progress(f"loading {again}")
        return open_again(again, options, session)
    return None


def _workloads(model: ModelFile, reader: TextReader | None, options: BenchmarkOptions) -> Iterator[Workload]:
    if reader is None:
        yield from made_up_workloads(model, options)
    else:
        for batch_size in options.batch_sizes:
            yield reader.workload(batch_size)


def _report(grid: Grid, conditions: Conditions, warnings: tuple[str, ...], peak_load: int) -> BenchmarkReport:
    session, results = grid.contender.session, grid.results
    baseline, peaks = grid.judge.baseline, [result.peak_rss_bytes or 0 for result in results]
    return BenchmarkReport(
        model=str(session.model.path),
        provider=session.provider,
        threads=session.threads,
        load_ms=session.load_ms,
        first_run_ms=grid.first_run_ms or 0.0,
        peak_rss_bytes=peak_load if grid.other else max(peak_load, peak_rss_bytes(), *peaks),
        warmup=grid.options.warmup,
        results=tuple(results),
        environment=replace(conditions.environment, load_average_after=load_average()),
        identity=conditions.identity,
        inputs=conditions.inputs,
        peak_rss_load_bytes=peak_load,
        trusted=not warnings and all(result.trusted for result in results),
        warnings=warnings,
        notes=(*_text_notes(grid), *(baseline.notes(conditions, results) if baseline else ())),
        comparison=_comparison(grid),
        baseline="" if baseline is None else str(baseline.path),
        gates=tuple(grid.gates),
    )


def _comparison(grid: Grid) -> Comparison | None:
    other = grid.other
    if other is None:
        return None
    few = dict.fromkeys(note for note in map(few_pairs, grid.compared) if note)
    outputs = grid.answers[0].outputs
    unlike = [] if outputs else ["no output of one is an output of the other: whether they answer alike is not known"]
    return Comparison(
        other=other.name,
        kind=other.kind,
        provider=other.provider,
        load_ms=other.contender.load_ms,
        outputs=outputs,
        results=tuple(grid.compared),
        notes=(*other.notes, *unlike, *few),
    )


def _text_notes(grid: Grid) -> Iterator[str]:
    """Say which texts were run, where it was not all of them as often as each other."""
    reader = grid.reader
    if reader is None:
        return
    if len(reader.texts) < reader.num_given:
        yield f"{len(reader.texts)} of {reader.num_given} texts were drawn at random"
    for result in grid.results:
        batches = -(-len(reader.texts) // result.batch_size)
        if result.runs < batches:
            yield f"{result.runs} of {batches} batches of {result.batch_size} were timed, in an order drawn at random"


def _taken(before: DeviceMemory | None) -> int | None:
    """Return the device memory that was taken since."""
    after = None if before is None else device_memory()
    return None if before is None or after is None else max(0, after.used_bytes - before.used_bytes)
