"""How `onnxtool infer` runs a benchmark, and what happens to its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.benchmark_blocks import benchmark_blocks, benchmark_csv
from onnxtool.cli.options import progress
from onnxtool.cli.render import emit, write_out
from onnxtool.errors import GateError
from onnxtool.model_file import check_writable

if TYPE_CHECKING:
    from onnxtool.benchmarking import BenchmarkOptions


def run_benchmark(
    model_path: Path,
    options: BenchmarkOptions,
    *,
    plot: Path | None,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Time a model and print the report; return the exit code, which is 1 where a gate is met.

    Raises:
        UsageError: a gate or a baseline cannot be used, or the plot cannot be drawn as asked.
    """
    from onnxtool.benchmarking import benchmark

    if plot is not None:
        from onnxtool.cli.latency_plot import check_plot, draw_latencies

        check_plot(plot)
        check_writable(plot, force=force)
    try:
        with progress(quiet=quiet) as on_progress:
            report = benchmark(model_path, options, on_progress=on_progress)
    except GateError as error:
        raise click.UsageError(f"{error.message}\n{error.hint}") from error
    if plot is not None:
        draw_latencies(report, plot, force=force)
    if format_name == "csv":
        write_out(benchmark_csv(report), output=output, force=force)
    else:
        emit(report, benchmark_blocks(report), format_name, output=output, force=force)
    for gate in report.gates:
        if gate.met or not gate.decided:
            click.echo(f"gate {gate}", err=True)
    return 1 if any(gate.met for gate in report.gates) else 0
