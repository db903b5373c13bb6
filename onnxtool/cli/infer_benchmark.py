"""`onnxtool infer --benchmark`: time a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.cli.benchmark_blocks import benchmark_blocks, benchmark_csv
from onnxtool.cli.options import Result
from onnxtool.cli.progress import progress
from onnxtool.errors import GateError
from onnxtool.infer.options import InferOptions


def run_benchmark(options: InferOptions, timing: BenchmarkOptions, plot: Path | None, output: Result) -> int:
    """Time a model on the texts of `options`, or on generated inputs, and print the report.

    Returns: The exit code, which is 1 if a gate fails.

    Raises:
        UsageError: a gate or a baseline cannot be used, or the plot cannot be drawn as asked.
    """
    from onnxtool.benchmarking import benchmark
    from onnxtool.infer.run import given_texts

    if plot is not None:
        from onnxtool.cli.latency_plot import check_plot, draw_latencies

        check_plot(plot)
        output.check(plot)
    try:
        with progress(quiet=output.quiet):
            report = benchmark(options.model_path, replace(timing, texts=tuple(given_texts(options))))
    except GateError as error:
        raise click.UsageError(f"{error.message}\n{error.hint}") from error
    if plot is not None:
        draw_latencies(report, plot, force=output.force)
    if output.format_name == "csv":
        output.write(benchmark_csv(report))
    else:
        output.emit(report, benchmark_blocks(report))
    for gate in report.gates:
        if gate.met or not gate.decided:
            click.echo(f"gate failed: {gate}", err=True)
    return 1 if any(gate.met for gate in report.gates) else 0
