"""The options of `onnxtool infer --benchmark`, and how its figures are laid out."""

from __future__ import annotations

from collections.abc import Sequence

import click

from onnxtool.cli.options import Command, CountList
from onnxtool.cli.render import Block, Facts, Heading, Table, format_bytes, format_duration
from onnxtool.reports import BenchmarkReport

# In the order of the help.
_OPTIONS = (
    click.option("--benchmark", is_flag=True, help="Time the model on random inputs in place of texts."),
    click.option(
        "--batch_size", "batch_sizes", type=CountList(), default="1,8", show_default=True, help="Batch sizes to time."
    ),
    click.option(
        "--sequence_length",
        "sequence_lengths",
        type=CountList(),
        default="16,128",
        show_default=True,
        help="Sequence lengths to time.",
    ),
    click.option("--runs", type=click.IntRange(min=1), help="Stop a shape after so many runs.  [default: 100 or 5 s]"),
    click.option(
        "--duration",
        "duration_s",
        type=click.FloatRange(min=0, min_open=True),
        help="Stop a shape after so many seconds; with --runs, after whichever comes first.",
    ),
    click.option(
        "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Runs of a shape that do not count."
    ),
)


def benchmark_options(command: Command) -> Command:
    """Add the options of `--benchmark`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def benchmark_blocks(report: BenchmarkReport) -> list[Block]:
    """Lay out what was timed, a row a shape."""
    facts = Facts(
        [
            ("Model", report.model),
            ("Provider", report.provider),
            ("Threads", str(report.threads)),
            ("Load", format_duration(report.load_ms)),
            ("First run", format_duration(report.first_run_ms)),
            ("Peak memory", format_bytes(report.peak_rss_bytes)),
            ("Warm-up", f"{report.warmup} runs of each shape, not counted"),
        ]
    )
    columns = ("batch", "sequence", "runs", "p50 ms", "p95 ms", "p99 ms", "mean ms", "samples/s", "tokens/s")
    rows: list[Sequence[str]] = []
    for result in report.results:
        latency = result.latency_ms
        rows.append(
            (
                str(result.batch_size),
                str(result.sequence_length),
                str(result.runs),
                f"{latency.p50:.2f}",
                f"{latency.p95:.2f}",
                f"{latency.p99:.2f}",
                f"{latency.mean:.2f} ± {latency.stdev:.2f}",
                f"{result.throughput_samples_per_s:.1f}",
                f"{result.throughput_tokens_per_s:.0f}",
            )
        )
    return [facts, Heading("Latency and throughput"), Table(columns, rows, frozenset(columns))]
