"""`onnxtool infer --benchmark`: time a model, and print or plot its latencies."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, Comparison, GateOutcome
from onnxtool.cli.options import Result
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_bytes, format_duration, table_of
from onnxtool.cli.streams import printable, say
from onnxtool.errors import GateError, OutputWriteError
from onnxtool.infer.options import InferOptions
from onnxtool.model_file import staged


def run_benchmark(options: InferOptions, timing: BenchmarkOptions, plot: Path | None, output: Result) -> int:
    """Time a model on the texts of `options`, or on generated inputs, and print the report.

    Returns: The exit code, which is 1 if a gate fails.

    Raises:
        UsageError: a gate or a baseline cannot be used, or the plot cannot be drawn as asked.
    """
    from onnxtool.benchmarking import benchmark
    from onnxtool.infer.run import given_texts

    if plot is not None:
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
            say(f"gate failed: {gate}")
    return 1 if any(gate.met for gate in report.gates) else 0


# CSV columns in addition to the run's own.
_LATENCIES = ("min", "p50", "p90", "p95", "p99", "max", "mean", "stdev")
_RESULT = ("throughput_samples_per_s", "throughput_tokens_per_s", "spread", "drift", "peak_rss_bytes")


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
        *_transfers(report.results),
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


def _transfers(results: Sequence[BenchmarkResult]) -> Iterator[Block]:
    rows = [
        {
            "shape": result.name,
            "to the device p50 ms": f"{times.host_to_device.p50:.3f}",
            "compute p50 ms": f"{times.compute.p50:.3f}",
            "to the host p50 ms": f"{times.device_to_host.p50:.3f}",
        }
        for result in results
        if (times := result.transfer_ms) is not None
    ]
    if rows:
        yield Heading("Copies and computation, timed apart")
        yield table_of(rows, names={"shape"})


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
            "base": "-" if gate.base_value is None else f"{gate.base_value:.6g}",
            "change": "-" if gate.change is None else f"{gate.change:+.1%}",
            "95 %": "{:+.1%} to {:+.1%}".format(*gate.change_interval) if gate.change_interval else "-",
            "verdict": f"{'failed' if gate.met else 'passed'}{'' if gate.decided else ', undecided'}",
        }
        for gate in gates
    ]
    yield table_of(rows, names={"gate", "shape", "verdict"})
    for note in dict.fromkeys(gate.note for gate in gates if gate.note):
        yield Note(note)


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
    """Return a header line and one line per shape; latencies are in milliseconds."""
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


_SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH_OF_POINTS = 0.5  # of the distance between two shapes
_LOGARITHMIC_FROM = 6.0  # the largest median over the smallest
_MAX_POINTS = 2000  # of a shape; more are one blot


def check_plot(path: Path) -> None:
    """Refuse an impossible plot now, rather than after an hour of timing.

    Raises:
        UsageError: the suffix is not an image format.
        OutputWriteError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise click.UsageError(f"cannot draw {path}: use a name that ends with {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise OutputWriteError(
            f"cannot draw {path}: matplotlib is not installed", "pip install 'onnxtool-cli[plot]', or leave out --plot"
        )


def draw_latencies(report: BenchmarkReport, path: Path, *, force: bool) -> None:
    """Draw `report` into the file at `path`.

    Raises:
        OutputExistsError: the file exists and `force` is not set.
        OutputWriteError: the file cannot be written.
    """
    # Nothing is displayed, so the backend named in the environment is ignored; matplotlib refuses unknown ones.
    os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except Exception as error:  # raised for an invalid matplotlibrc or a broken installation
        raise OutputWriteError(f"cannot draw {path}: matplotlib does not load: {error}", "leave out --plot") from error

    figure = Figure(figsize=(max(6.0, 2.0 + 1.3 * len(report.results)), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), report)
    with staged(path, force=force) as staging:
        figure.savefig(staging.model_path, format=path.suffix[1:].lower(), dpi=150)


def _draw(axes: Any, report: BenchmarkReport) -> None:
    for place, result in enumerate(report.results):
        samples = result.latencies_ms[:: max(1, len(result.latencies_ms) // _MAX_POINTS)]
        # Side by side in the order of the runs, so that a drift shows.
        step = _WIDTH_OF_POINTS / max(1, len(samples) - 1)
        across = [place - _WIDTH_OF_POINTS / 2 + index * step for index in range(len(samples))]
        axes.scatter(across, samples, s=8, color="tab:blue", alpha=0.45, linewidths=0, label=_once("a run", place))
        ends = (place - 0.36, place + 0.36)
        # Keep the numbers apart where the lines are close together.
        for name, style, above in (("p50", "-", "top"), ("p95", "--", "bottom")):
            value = getattr(result.latency_ms, name)
            text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
            axes.hlines(value, *ends, color="black", linestyles=style, linewidth=1.4, label=_once(name, place))
            axes.annotate(text, (ends[1], value), xytext=(3, 0), textcoords="offset points", va=above, fontsize=8)
    medians = [result.latency_ms.p50 for result in report.results]
    if max(medians) > _LOGARITHMIC_FROM * min(medians):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.15 * max(result.latency_ms.max for result in report.results))  # room for the legend
    axes.set_xlim(-0.6, len(report.results) - 0.2)
    labels = [f"{result.name.replace('x', ' x ')}{'' if result.trusted else ' *'}" for result in report.results]
    axes.set_xticks(range(len(labels)), labels)
    is_texts = report.inputs == "texts"
    note = "" if report.trusted else "     * unreliable, see the report"
    axes.set_xlabel(f"batch size x {'texts' if is_texts else 'sequence length (tokens)'}{note}")
    axes.set_ylabel("latency (ms)")
    axes.set_title(_title(report), fontsize=10)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.legend(loc="upper left", fontsize=8)


def _once(label: str, place: int) -> str:
    return label if place == 0 else "_nolegend_"


def _title(report: BenchmarkReport) -> str:
    # A dollar sign would start a formula, and file names are arbitrary.
    name = printable(Path(report.model).name).replace("$", r"\$")
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    return f"{name}: latency of a run on {report.provider}, {threads}\n{printable(report.environment.cpu)}"
