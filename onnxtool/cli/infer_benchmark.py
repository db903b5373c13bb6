"""`onnxtool infer --benchmark`: time a model, and print its latencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, GateOutcome, LatencyComparison
from onnxtool.cli.options import Result, refused_gates
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_bytes, format_duration, table_of
from onnxtool.cli.streams import say
from onnxtool.infer.options import InferOptions


def run_benchmark(options: InferOptions, timing: BenchmarkOptions, output: Result) -> int:
    """Time a model on the texts of `options`, or on generated inputs, and print the report.

    Returns: The exit code, which is 1 if a gate fails.

    Raises:
        UsageError: a gate cannot be used.
    """
    from onnxtool.benchmarking.measurement import benchmark
    from onnxtool.infer.run import given_texts

    with progress(quiet=output.quiet), refused_gates():
        report = benchmark(options.model_path, replace(timing, texts=tuple(given_texts(options))))
    output.emit(report, benchmark_blocks(report))
    for gate in report.gates:
        if gate.met or not gate.decided:
            say(f"gate {'failed' if gate.met else 'undecided'}: {gate}")
    return 1 if any(gate.met for gate in report.gates) else 0


def benchmark_blocks(report: BenchmarkReport) -> list[Block]:
    """Lay out the timings, one row per shape, with warnings and the machine."""
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
        *(_comparison(report, report.comparison) if report.comparison else ()),
        *_gates(report.gates),
        *_machine(report),
    ]


def _latencies(results: Sequence[BenchmarkResult]) -> Table:
    return table_of(
        [
            {
                "batch": str(result.batch_size),
                "sequence": _length(result, result.sequence_length),
                "runs": str(result.runs),
                "p50 ms": f"{result.latency_ms.p50:.2f}",
                "p95 ms": f"{result.latency_ms.p95:.2f}",
                "p99 ms": f"{result.latency_ms.p99:.2f}",
                "mean ms": f"{result.latency_ms.mean:.2f} ± {result.latency_ms.stdev:.2f}",
                "samples/s": f"{result.throughput_samples_per_s:.1f}",
                "tokens/s": "-" if result.throughput_tokens_per_s is None else f"{result.throughput_tokens_per_s:.0f}",
            }
            for result in results
        ]
    )


def _length(result: BenchmarkResult, sequence_length: int) -> str:
    return f"up to {sequence_length}" if result.tokens else str(sequence_length)


def _warnings(report: BenchmarkReport) -> Iterator[Block]:
    for result in report.results:
        if not result.trusted:
            yield Note(f"{result.name} is unreliable: {'; '.join(result.warnings)}")
    for warning in report.warnings:
        yield Note(f"unreliable: {warning}")
    for note in report.notes:
        yield Note(note)


def _texts(results: Sequence[BenchmarkResult]) -> Iterator[Block]:
    rows: list[dict[str, str]] = []
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
        rows.append(
            {
                "batch": str(result.batch_size),
                "padding": f"{tokens.padding_share:.1%}",
                "tokenize p50 ms": f"{stages.tokenize.p50:.2f}",
                "model p50 ms": f"{result.latency_ms.p50:.2f}",
                "pool p50 ms": f"{stages.pool.p50:.2f}" if stages.pool else "-",
                "total p50 ms": f"{stages.total.p50:.2f}",
                "total p95 ms": f"{stages.total.p95:.2f}",
            }
        )
    if rows:
        yield table_of(rows)


def _comparison(report: BenchmarkReport, comparison: LatencyComparison) -> Iterator[Block]:
    yield Heading(f"In turns with {comparison.other}")
    yield Facts(
        [
            ("Provider", comparison.provider),
            ("Load", format_duration(comparison.load_ms)),
            ("Outputs compared", ", ".join(comparison.outputs) or "none"),
            ("Ratio", "its latency over the model's; above 1, the model is the faster one"),
        ]
    )
    yield table_of(
        [
            {
                "batch": str(other.batch_size),
                "sequence": _length(result, other.sequence_length),
                "pairs": str(other.pairs),
                "p50 ms": f"{result.latency_ms.p50:.2f}",
                "its p50 ms": f"{other.latency_ms.p50:.2f}",
                "ratio": f"{other.ratio:.3f}",
                "95 %": "{:.3f} to {:.3f}".format(*other.ratio_interval),
                "max_abs_error": "-" if other.max_abs_error is None else f"{other.max_abs_error:.3g}",
                "cosine": "-" if other.cosine_min is None else f"{other.cosine_min:.6f}",
            }
            for result, other in zip(report.results, comparison.results, strict=True)
        ]
    )
    for note in comparison.notes:
        yield Note(note)


def _gates(gates: Sequence[GateOutcome]) -> Iterator[Block]:
    if not gates:
        return
    yield Heading("Gates")
    rows = [
        {
            "gate": gate.expression,
            "shape": gate.shape or "-",
            "value": f"{gate.value:.6g}",
            "95 %": "{:.6g} to {:.6g}".format(*gate.interval) if gate.interval else "-",
            "verdict": f"{'failed' if gate.met else 'passed'}{'' if gate.decided else ', undecided'}",
        }
        for gate in gates
    ]
    yield table_of(rows, names={"gate", "shape", "verdict"})


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
                "Memory at its peak",
                f"{format_bytes(report.peak_rss_load_bytes)} while loading, "
                + (f"{format_bytes(runs)} while running" if runs else "not measured while running"),
            )
        )
    if environment.disabled_optimizers:
        rows.append(("Optimizers left out, as the file asks", ", ".join(environment.disabled_optimizers)))
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items())))
    yield Heading("Machine and session")
    yield Facts(rows)
