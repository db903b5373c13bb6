"""A benchmark as a table for spreadsheets: a row a shape."""

from __future__ import annotations

import csv
import io

from onnxtool.benchmarking.report import BenchmarkReport
from onnxtool.cli.printable import printable

_LATENCIES = ("min", "p50", "p90", "p95", "p99", "max", "mean", "stdev")
_RESULT = ("throughput_samples_per_s", "throughput_tokens_per_s", "spread", "drift", "waited_share", "peak_rss_bytes")


def benchmark_csv(report: BenchmarkReport) -> str:
    """Write a line of names and a line for each shape; latencies are milliseconds."""
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
