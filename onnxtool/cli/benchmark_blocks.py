"""How a benchmark is shown: blocks for text and Markdown, and CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, Comparison, GateOutcome
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_bytes, format_duration
from onnxtool.cli.streams import printable
from onnxtool.runtime.timing import LatencySummary

# Columns of the CSV beside those of the run.
_LATENCIES = ("min", "p50", "p90", "p95", "p99", "max", "mean", "stdev")
_RESULT = ("throughput_samples_per_s", "throughput_tokens_per_s", "spread", "drift", "waited_share", "peak_rss_bytes")


def benchmark_blocks(report: BenchmarkReport) -> list[Block]:
    """Lay out the timings, a row per shape, with their warnings and the machine."""
    return [
        Facts(
            [
                ("Model", report.model),
                ("Provider", report.provider),
                ("Threads", str(report.threads)),
                ("Load", format_duration(report.load_ms)),
                ("First run", format_duration(report.first_run_ms)),
                ("Peak memory", format_bytes(report.peak_rss_bytes)),
                ("Warm-up", f"{report.warmup} runs of each shape, not counted"),
            ]
        ),
        Heading("Latency and throughput"),
        _latencies(report.results),
        *_warnings(report),
        *_texts(report.results),
        *_transfers(report.results),
        *(_comparison(report, report.comparison) if report.comparison else ()),
        *_gates(report.gates),
        *_machine(report),
    ]


def _latencies(results: Sequence[BenchmarkResult]) -> Table:
    columns = ("batch", "sequence", "runs", "p50 ms", "p95 ms", "p99 ms", "mean ms", "samples/s", "tokens/s")
    rows = [
        (
            str(result.batch_size),
            f"up to {result.sequence_length}" if result.tokens else str(result.sequence_length),
            str(result.runs),
            f"{result.latency_ms.p50:.2f}",
            f"{result.latency_ms.p95:.2f}",
            f"{result.latency_ms.p99:.2f}",
            f"{result.latency_ms.mean:.2f} ± {result.latency_ms.stdev:.2f}",
            f"{result.throughput_samples_per_s:.1f}",
            f"{result.throughput_tokens_per_s:.0f}",
        )
        for result in results
    ]
    return Table(columns, rows, frozenset(columns))


def _warnings(report: BenchmarkReport) -> Iterator[Block]:
    for result in report.results:
        if not result.trusted:
            yield Note(f"{result.name} is unreliable: {'; '.join(result.warnings)}")
    for warning in report.warnings:
        yield Note(f"unreliable: {warning}")
    for note in report.notes:
        yield Note(note)


def _texts(results: Sequence[BenchmarkResult]) -> Iterator[Block]:
    rows: list[Sequence[str]] = []
    for result in results:
        tokens, stages = result.tokens, result.stages_ms
        if tokens is None or stages is None:
            continue
        if not rows:
            cut = f", {tokens.num_truncated} of them cut" if tokens.num_truncated else ""
            yield Heading("Texts")
            lengths = (
                f"{tokens.min} to {tokens.max}, median {tokens.median:g}, mean {tokens.mean:.1f}, p95 {tokens.p95:g}"
            )
            facts = [("Texts", f"{tokens.num_texts}{cut}"), ("Tokens of a text", lengths)]
            yield Facts([*facts, ("Tokens a second, above", "those of texts, without padding")])
        pool = f"{stages.pool.p50:.2f}" if stages.pool else "-"
        rows.append(
            (
                str(result.batch_size),
                f"{tokens.padding_share:.1%}",
                f"{stages.tokenize.p50:.2f}",
                f"{result.latency_ms.p50:.2f}",
                pool,
                f"{stages.total.p50:.2f}",
                f"{stages.total.p95:.2f}",
            )
        )
    if rows:
        stage_columns = ("tokenize p50 ms", "model p50 ms", "pool p50 ms", "total p50 ms", "total p95 ms")
        columns = ("batch", "padding", *stage_columns)
        yield Table(columns, rows, frozenset(columns))


def _transfers(results: Sequence[BenchmarkResult]) -> Iterator[Block]:
    rows = []
    for result in results:
        if result.transfer_ms is not None:
            times = result.transfer_ms
            parts: tuple[LatencySummary, ...] = (times.host_to_device, times.compute, times.device_to_host)
            rows.append((result.name, *(f"{part.p50:.3f}" for part in parts)))
    if rows:
        columns = ("shape", "to the device p50 ms", "compute p50 ms", "to the host p50 ms")
        yield Heading("Copies and computation, timed apart")
        yield Table(columns, rows, frozenset(columns[1:]))


def _comparison(report: BenchmarkReport, comparison: Comparison) -> Iterator[Block]:
    yield Heading(f"In turns with {comparison.other}")
    yield Facts(
        [
            ("Provider", comparison.provider),
            ("Load", format_duration(comparison.load_ms)),
            ("Outputs compared", ", ".join(comparison.outputs) or "none"),
            ("Ratio", "its latency over the model's; above 1, the model is the faster one"),
        ]
    )
    columns = ("batch", "sequence", "pairs", "p50 ms", "its p50 ms", "ratio", "95 %", "max_abs_error", "cosine")
    rows = []
    for result, other in zip(report.results, comparison.results, strict=True):
        low, high = other.ratio_interval
        rows.append(
            (
                str(other.batch_size),
                f"up to {other.sequence_length}" if result.tokens else str(other.sequence_length),
                str(other.pairs),
                f"{result.latency_ms.p50:.2f}",
                f"{other.latency_ms.p50:.2f}",
                f"{other.ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                "-" if other.max_abs_error is None else f"{other.max_abs_error:.3g}",
                "-" if other.cosine_min is None else f"{other.cosine_min:.6f}",
            )
        )
    yield Table(columns, rows, frozenset(columns))
    for note in comparison.notes:
        yield Note(note)


def _gates(gates: Sequence[GateOutcome]) -> Iterator[Block]:
    if not gates:
        return
    yield Heading("Gates")
    columns = ("gate", "shape", "value", "base", "change", "95 %", "verdict")
    rows = []
    for gate in gates:
        interval = gate.change_interval
        verdict = "met" if gate.met else "not met"
        rows.append(
            (
                gate.expression,
                gate.shape or "-",
                f"{gate.value:.6g}",
                "-" if gate.base_value is None else f"{gate.base_value:.6g}",
                "-" if gate.change is None else f"{gate.change:+.1%}",
                "-" if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
                verdict if gate.decided else f"{verdict}, undecided",
            )
        )
    yield Table(columns, rows, frozenset(columns[2:6]))
    if any(gate.change_interval for gate in gates):
        yield Note("values against a base leave out what other processes took, so they may be below those above")


def _machine(report: BenchmarkReport) -> Iterator[Block]:
    environment = report.environment
    before, after = environment.load_average_before, environment.load_average_after
    load = "" if before is None or after is None else f", load average {before:.1f} before and {after:.1f} after"
    rows = [("Processor", f"{environment.cpu}, {environment.num_cores} cores{load}")]
    if environment.gpu:
        taken = "" if report.peak_vram_bytes is None else f", {format_bytes(report.peak_vram_bytes)} taken"
        rows.append(("Device", f"{environment.gpu}{taken}"))
    if report.peak_rss_load_bytes is not None:
        runs = max((result.peak_rss_bytes or 0 for result in report.results), default=0)
        rows.append(
            (
                "Peak memory of loading and of runs",
                f"{format_bytes(report.peak_rss_load_bytes)}, {format_bytes(runs) if runs else 'not known'}",
            )
        )
    if environment.io_binding:
        rows.append(("IOBinding", "inputs and outputs lie in bound buffers"))
    if environment.inter_threads:
        rows.append(("Inter-op threads", str(environment.inter_threads)))
    if environment.disabled_optimizers:
        rows.append(("Optimizers left out, as the file asks", ", ".join(environment.disabled_optimizers)))
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items())))
    yield Heading("Machine and session")
    yield Facts(rows)


def benchmark_csv(report: BenchmarkReport) -> str:
    """Return a line of column names and a line for each shape; latencies are in milliseconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["model", "provider", "threads", "inputs", "batch_size", "sequence_length", "runs"]
        + [f"{name}_ms" for name in _LATENCIES]
        + [*_RESULT, "trusted", "load_ms", "first_run_ms", "compared_with", "ratio", "ratio_low", "ratio_high"]
    )
    compared = report.comparison.results if report.comparison else ()
    for place, result in enumerate(report.results):
        other = compared[place] if compared else None
        name = printable(report.comparison.other) if report.comparison else ""
        writer.writerow(
            [printable(report.model), report.provider, report.threads, report.inputs]
            + [result.batch_size, result.sequence_length, result.runs]
            + [getattr(result.latency_ms, name) for name in _LATENCIES]
            + [getattr(result, name) for name in _RESULT]
            + [result.trusted, report.load_ms, report.first_run_ms, name]
            + ([other.ratio, *other.ratio_interval] if other else ["", "", ""])
        )
    return text.getvalue()
