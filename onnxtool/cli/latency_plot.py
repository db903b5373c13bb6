"""Plot a benchmark: every run of each shape as a point, with the median and the 95th percentile."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click

from onnxtool.benchmarking.report import BenchmarkReport
from onnxtool.cli.streams import printable
from onnxtool.errors import OutputWriteError
from onnxtool.model_file import staged

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
