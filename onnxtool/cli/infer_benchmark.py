"""The options of `onnxtool infer --benchmark`, and what becomes of its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.benchmark_blocks import benchmark_blocks
from onnxtool.cli.options import Command, CountList, PathType, progress
from onnxtool.cli.render import emit, write_out
from onnxtool.errors import GateError
from onnxtool.model_file import check_writable
from onnxtool.runtime.bounds import MAX_BATCH_SIZE, MAX_DURATION_S, MAX_RUNS, MAX_SEQUENCE_LENGTH, MAX_THREADS

if TYPE_CHECKING:
    from onnxtool.benchmarking import BenchmarkOptions

# Parameters that mean nothing without --benchmark.
BENCHMARK_PARAMETERS = frozenset(
    {"batch_sizes", "sequence_lengths", "runs", "duration_s", "warmup", "inter_threads", "io_binding", "compare"}
    | {"baseline", "fail_if", "plot"}
)

# In the order of the help.
_OPTIONS = (
    click.option(
        "--benchmark",
        is_flag=True,
        help="Time the model: on the texts of --text and --input, else on made-up inputs of several shapes.",
    ),
    click.option(
        "--batch_size",
        "batch_sizes",
        type=CountList(MAX_BATCH_SIZE),
        default="1,8",
        show_default=True,
        help="Batch sizes to time.",
    ),
    click.option(
        "--sequence_length",
        "sequence_lengths",
        type=CountList(MAX_SEQUENCE_LENGTH),
        default="16,128",
        show_default=True,
        help="Sequence lengths to time; texts have their own.",
    ),
    click.option(
        "--runs", type=click.IntRange(1, MAX_RUNS), help="Stop a shape after so many runs.  [default: 100 or 5 s]"
    ),
    click.option(
        "--duration",
        "duration_s",
        type=click.FloatRange(min=0, min_open=True, max=MAX_DURATION_S),
        help="Stop a shape after so many seconds; with --runs, after whichever comes first.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, MAX_RUNS),
        default=3,
        show_default=True,
        help="Runs of a shape that do not count.",
    ),
    click.option(
        "--inter_threads",
        type=click.IntRange(0, MAX_THREADS),
        default=0,
        help="Operators that may run at once.  [default: one after the other]",
    ),
    click.option(
        "--io_binding", is_flag=True, help="Bind inputs and outputs to buffers once, and time the computation alone."
    ),
    click.option(
        "--compare",
        metavar="MODEL_OR_ID",
        help="Time another ONNX file, a checkpoint in PyTorch, or the provider cpu or cuda, in turns with the model.",
    ),
    click.option(
        "--baseline", type=PathType(), metavar="FILE", help="An earlier report (--format json) for --fail_if."
    ),
    click.option(
        "--fail_if",
        multiple=True,
        metavar="EXPR",
        help="Exit with 1 where this holds for a shape: 'p50>20' in milliseconds, 'throughput_tokens_per_s<5000',"
        " 'p95>+10%' against --baseline or --compare, '8x128.p95>+10%' for one shape. May be given several times.",
    ),
    click.option(
        "--plot", type=PathType(), metavar="FILE", help="Draw the latencies of each shape: .png, .svg or .pdf."
    ),
)


def benchmark_options(command: Command) -> Command:
    """Add the options of `--benchmark`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def threads_option(command: Command) -> Command:
    """Add --threads."""
    return click.option(
        "--threads",
        type=click.IntRange(0, MAX_THREADS),
        default=0,
        show_default=True,
        help="Intra-op threads; 0: one a core.",
    )(command)


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
        from onnxtool.cli.benchmark_csv import benchmark_csv

        write_out(benchmark_csv(report), output=output, force=force)
    else:
        emit(report, benchmark_blocks(report), format_name, output=output, force=force)
    met = [gate for gate in report.gates if gate.met]
    _say([f"gate {gate}" for gate in report.gates if gate.met or not gate.decided])
    return 1 if met else 0


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)
