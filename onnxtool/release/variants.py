"""Write the files that a consumer opens in several precisions, each verified, with its error against the export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxtool.errors import TargetError
from onnxtool.export.options import DTYPES, ExportOptions
from onnxtool.export.report import ExportReport
from onnxtool.export.run import export_model
from onnxtool.export.sidecar_files import CARD, with_section
from onnxtool.export.targets import TARGETS, Target
from onnxtool.model_file import ModelFile
from onnxtool.optimize.options import BLOCKS, QUANTIZED, OptimizeOptions
from onnxtool.optimize.report import OptimizeReport
from onnxtool.optimize.run import optimize_model
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.reading import read_text
from onnxtool.reports import short_repr
from onnxtool.verification import Verification

# Return the options that make a file in a precision, given the path of the exported file and its own.
Settings = Callable[[str, Path, Path], OptimizeOptions]


@short_repr
@dataclass(frozen=True)
class Variant:
    """A file in one precision.

    Attributes:
        files: its names in the folder; a consumer may open the same bytes by several.
        error: the largest 1 - cosine of an output, or of a row of one, against the export: on calibration texts for
            quantized files, otherwise on the inputs of the verification; None if it was not measured.
        max_abs_error: the largest difference of an output on the inputs of the verification.
        verification: the comparison with the export.
    """

    precision: str
    files: tuple[str, ...]
    size_bytes: int
    error: float | None
    max_abs_error: float | None
    verification: Verification | None


@short_repr
@dataclass(frozen=True)
class VariantsReport:
    """An export, and the files next to it.

    Attributes:
        export: the export, whose file the others are made from and compared with.
        variants: the others, in the order of the precisions.
    """

    export: ExportReport
    variants: tuple[Variant, ...]


@checked
def export_variants(options: ExportOptions, *, settings: Settings | None = None) -> VariantsReport:
    """Export a checkpoint for a target, and write the files in `options.precisions` that it opens next to the export.

    All files appear together, or none. Each is made from the exported file and compared with it; the README.md of the
    folder lists them with their errors.

    Args:
        options: export options.
        settings: makes the options of each file; None for the defaults of `optimize_model`.

    Raises:
        TargetError: the target opens no file in one of the precisions.
        OnnxtoolError: as `export_model` and `optimize_model`.
    """
    target, variants = TARGETS[options.target], list[Variant]()
    precisions = [name for name in target.precisions(options.precisions) if target.variants[name]]
    depth = len(Path(target.graph).parts) - 1

    def by_default(precision: str, source: Path, output: Path) -> OptimizeOptions:
        bound = options.max_error if precision in QUANTIZED else None
        return OptimizeOptions(
            source, output=output, precision=precision, max_error=bound, verify=options.verify, timing=False
        )

    make = by_default if settings is None else settings

    def add_files(graph: Path, place: Path) -> None:
        variants.extend(_write(graph, precision, target, make) for precision in precisions)
        if not variants:
            return
        card = place.parents[depth] / CARD
        before = read_text(card) if card.is_file() else f"# {place.parents[depth].name}\n"
        text = with_section(before, f"## Files\n\n{_table(graph, variants, options)}")
        (graph.parents[depth] / CARD).write_text(text, encoding="utf-8")

    return VariantsReport(export_model(options, add_files=add_files), tuple(variants))


def _write(graph: Path, precision: str, target: Target, make: Settings) -> Variant:
    """Write the files in one precision next to the exported graph."""
    first, *copies = (graph.with_name(name) for name in target.variants[precision])
    tell(f"making {first.name}")
    options = make(precision, graph, first)
    report = optimize_model(replace(options, embeddings=target.embeddings) if precision in BLOCKS else options)
    if target.data_suffix and ModelFile.open(first).external_locations:
        raise TargetError(
            f"the weights of {first.name} need a file of their own, which {target.title} does not look for",
            f"leave {precision} out of --precisions, or pass one with fewer bits",
        )
    for other in copies:
        shutil.copyfile(first, other)
    return Variant(precision, target.variants[precision], first.stat().st_size, *_errors(report), report.verification)


def _errors(report: OptimizeReport) -> tuple[float | None, float | None]:
    """Return 1 - cosine and the largest difference from the export; None for what was not measured."""
    compared = report.verification
    if report.quantization is not None:
        error: float | None = report.quantization.error
    else:
        error = None if compared is None else 1 - compared.cosine_min
    return error, None if compared is None else compared.max_abs_error


def _table(graph: Path, variants: Sequence[Variant], options: ExportOptions) -> str:
    """Return the table of the files as Markdown."""
    compared = "compared with PyTorch" if options.verify else "not verified"
    rows = [(graph.name, DTYPES[options.dtype], graph.stat().st_size, f"the export, {compared}")]
    for variant in variants:
        error = "not measured" if variant.error is None else f"1 - cosine at most {variant.error:.2g}"
        rows += [(name, variant.precision, variant.size_bytes, error) for name in variant.files]
    lines = [f"| {name} | {precision} | {size / 1e6:.1f} | {error} |" for name, precision, size, error in rows]
    return "\n".join(("| file | precision | MB | error against the first |", "|---|---|---:|---|", *lines))
