"""`onnxtool verify`: compare a file with its source; and how export and optimize lay out a verification."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from onnxtool.agreement import VerifyOptions
from onnxtool.cli.choices import CheckpointType, PathType
from onnxtool.cli.options import Result, derived_options, refused_gates, result_options
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_shape, verification_figures
from onnxtool.cli.streams import say
from onnxtool.model_file.metadata import FIGURES
from onnxtool.model_file.wire.structure import layer_of
from onnxtool.runtime.sizes import SizeResult, label
from onnxtool.verification import Verification

_MOST_PARTS = 20  # that are listed


@click.command(epilog="Example: onnxtool verify models/all-MiniLM-L6-v2-optimized.onnx models/all-MiniLM-L6-v2.onnx")
@click.argument("model", type=PathType())
@click.argument("reference", type=CheckpointType())
@derived_options(options=VerifyOptions)
@result_options()
def command(options: VerifyOptions, *, model: Path, reference: str, result: Result) -> int:
    """Compare the ONNX file MODEL with REFERENCE: an ONNX file, or a checkpoint given as a folder or hub id.

    Both run on many lengths, batch sizes and paddings, or on --sample_inputs. Exits with 1 if an output differs by more
    than the tolerance.

    With --consumer, MODEL is a folder that `export --target` has written, and REFERENCE its checkpoint: the consumer
    answers texts by its default and by each file, and every answer is compared with PyTorch's.

    With --layers, the first part of MODEL that differs is named, as in encoder.layer.3.attention.

    With --texts or --data alone, both are encoders, and drift is measured: whether an index built with REFERENCE serves
    the queries of MODEL.
    """
    if options.consumer is not None:
        return _run_in_consumer(options, model, reference, result)
    if options.layers:
        return _compare_layers(options, model, reference, result)
    if options.texts is not None or options.data is not None:
        return _measure_drift(options, model, Path(reference), result)
    from onnxtool.agreement import verify
    from onnxtool.runtime.comparison import failure

    with progress(quiet=result.quiet):
        verification = verify(model, reference, options)
    result.emit(verification, verification_blocks(verification))
    if verification.passed:
        return 0
    say(f"verification failed: {failure(verification, '').message}; --layers names the first part that differs")
    return 1


def _run_in_consumer(options: VerifyOptions, folder: Path, checkpoint: str, result: Result) -> int:
    from onnxtool.consumers import verify_in_consumer

    with progress(quiet=result.quiet):
        report = verify_in_consumer(folder, checkpoint, options)
    rows = [
        (
            opened.file or "(default)",
            opened.precision,
            f"{opened.batch_size}{f' {opened.role}' if opened.role else ''}",
            "none" if opened.error is None else f"{opened.error:.2g}",
            f"{opened.bound:.2g}",
            "yes" if opened.passed else "NO",
        )
        for opened in report.results
    ]
    columns = ("file", "precision", "batch", "error", "bound", "passed")
    blocks: list[Block] = [
        Facts([("Consumer", report.consumer), ("Checkpoint", report.checkpoint), ("Texts", str(report.num_texts))]),
        Table(columns, rows, frozenset({"error", "bound"})),
        *map(Note, report.notes),
        *(
            Note(f"{opened.file or '(default)'}, batch {opened.batch_size}: {opened.reason}")
            for opened in report.results
            if opened.reason
        ),
    ]
    result.emit(report, blocks)
    if report.passed:
        return 0
    failed = [opened for opened in report.results if not opened.passed]
    say(f"{len(failed)} of {len(report.results)} answers differ from PyTorch's in {report.consumer}")
    return 1


def _compare_layers(options: VerifyOptions, model: Path, reference: str, result: Result) -> int:
    from onnxtool.agreement import compare_layers

    with progress(quiet=result.quiet):
        report = compare_layers(model, reference, options)
    rows = []
    for layer, together in groupby(report.parts, key=lambda part: layer_of(part.scope)):
        parts = list(together)
        worst = max(parts, key=lambda part: (part.differs, part.own_error / part.bound))
        figures = (worst.precision, f"{worst.own_error:.1e}", f"{worst.bound:.1e}", f"{parts[-1].error:.1e}")
        rows.append((layer, *figures, _bar(parts[-1].error), "DIFFERS" if worst.differs else ""))
    columns = ("part", "computes in", "alone", "allowed", "so far", "1e-8 to 1", "")
    differing = [part for part in report.parts if part.differs]
    names = [(part.scope, f"{part.own_error:.1e}", f"{part.batch_error:.1e}", part.model_value) for part in differing]
    blocks: list[Block] = [
        Heading(f"Parts of {report.model}, and of {report.reference}, to {report.output}"),
        Facts([("Inputs", ", ".join(dict.fromkeys(report.cases)))]),
        Table(columns, rows, frozenset(columns[2:5])),
    ]
    if differing:
        shown = ("part", "alone", "by its batch", "value at its end")
        blocks += [Heading("What differs"), Table(shown, names[:_MOST_PARTS], frozenset(shown[1:3]))]
        if len(names) > _MOST_PARTS:
            blocks.append(Note(f"and {len(names) - _MOST_PARTS} parts more, which --format json lists"))
    blocks.append(Facts([("First part that differs", report.first or "none"), ("Because", report.reason)]))
    result.emit(report, blocks)
    return 0 if report.passed else 1


def _bar(error: float) -> str:
    """Draw an error between 1e-8 and 1, two marks a power of ten."""
    return "#" * (round(2 * (8 + math.log10(error))) if 1e-8 < error < 1 else 16 * (error >= 1))


def _measure_drift(options: VerifyOptions, model: Path, base: Path, result: Result) -> int:
    from onnxtool.cli.evaluate import gate_blocks, say_failed
    from onnxtool.evaluation.drift import measure_drift
    from onnxtool.evaluation.options import DriftOptions

    drift = DriftOptions(texts=options.texts, data=options.data, fail_if=options.fail_if, provider=options.provider)
    with progress(quiet=result.quiet), refused_gates():
        report = measure_drift(model, base, drift)
    figures = (
        ("Cosine with the old vector", report.cosine_mean),
        ("The least", report.cosine_min),
        ("Neighbours kept by new queries over old vectors", report.neighbours_kept),
        ("Neighbours kept among new vectors", report.own_neighbours_kept),
        ("Kendall's tau of both queries over old vectors", report.kendall_tau),
    )
    columns = ("measure", "old", "new", "mixed", "change", "from", "to")
    rows = [
        (
            *(name, *(f"{figure.mean:.4f}" for figure in (measure.base, measure.model, measure.mixed))),
            *(f"{value:+.4f}" for value in (measure.change.change, measure.change.low, measure.change.high)),
        )
        for name, measure in report.measures.items()
    ]
    kept = "yes" if report.keeps_index else "no"
    facts = [(name, f"{value:.4f}") for name, value in figures if value is not None]
    blocks: list[Block] = [
        Heading(f"Drift of {report.model} from {report.base}, {report.kind}, on {report.num_texts:,} texts"),
        Facts([*facts, ("Relation", report.relation)]),
    ]
    if rows:
        blocks += [Heading("New queries over the old index (mixed)"), Table(columns, rows, frozenset(columns[1:]))]
    blocks += [Heading("The old index can be kept"), Facts([(kept, report.reason)]), *gate_blocks(report.gates)]
    result.emit(report, blocks)
    say_failed(report.gates)
    return 0 if report.passed else 1


def verdict(verification: Verification | None, output: str) -> Block:
    """Conclude with the command's output, and whether it was verified."""
    return Facts([("Not verified" if verification is None else "Verified", output)])


def verification_blocks(verification: Verification | None) -> list[Block]:
    """Describe a verification, or note that there was none."""
    if verification is None:
        return [Note("not verified (--no_verify): agreement with the source is unknown")]
    facts = [*verification_figures({name: getattr(verification, name) for name in FIGURES}).items()]
    if verification.own_variation is not None:
        facts.append(("It moves by itself, between optimization levels, by", f"{verification.own_variation:.3g}"))
    rows = [
        (
            case.description,
            format_shape(next(iter(case.inputs.values()))),
            f"{case.max_abs_error:.3g}",
            f"{case.cosine:.8f}",
            "yes" if case.passed else "NO",
        )
        for case in verification.cases
    ]
    columns = ("case", "shape", "max_abs_error", "cosine", "passed")
    blocks: list[Block] = [
        Heading("Verification"),
        Facts(facts),
        Table(columns, rows, frozenset({"max_abs_error", "cosine"})),
    ]
    if verification.refused:
        blocks.append(Note(f"left out, because {verification.reference} itself rejects them: {_refused(verification)}"))
    blocks += [Note(text) for text in _left_out(verification)]
    if verification.constant_outputs:
        blocks.append(
            Note(
                f"{verification.reference} gives the same for all inputs, which shows little of this file: "
                f"{', '.join(verification.constant_outputs)}"
            )
        )
    if verification.padding_effect is not None and verification.padding_effect > verification.atol:
        blocks.append(
            Note(
                f"what stands in the padding counts: other ids there move the outputs by "
                f"{verification.padding_effect:.2g}, so pad with the tokenizer's own token, or not at all"
            )
        )
    if verification.length_effect is not None and verification.length_effect > verification.atol:
        blocks.append(
            Note(
                "texts are padded to the fixed length of this file, which moves the outputs for a short one by "
                f"{verification.length_effect:.2g}, in {verification.reference} as well: answers for short texts are "
                "not those of the checkpoint"
            )
        )
    if verification.mask_effect is not None and verification.mask_effect <= verification.atol:
        blocks.append(
            Note(
                f"these weights do not show whether the mask is applied: ignoring it moves the outputs by "
                f"{verification.mask_effect:.2g} only"
            )
        )
    return blocks


def _refused(verification: Verification) -> str:
    """Return the skipped cases, each reason once."""
    cases: dict[str, list[str]] = {}
    for case in verification.refused:
        description, _, reason = case.partition(" (")
        cases.setdefault(reason, []).append(description)
    return "; ".join(", ".join(names) + (f" ({reason}" if reason else "") for reason, names in cases.items())


def _left_out(verification: Verification) -> Iterator[str]:
    """Say how many values of which outputs are not measured, and in how many cases nothing else was compared."""
    cases = verification.cases
    for name in sorted({name for case in cases for name in case.left_out}):
        counts = [case.left_out[name] for case in cases if name in case.left_out]
        nothing = sum(name in case.nothing_measured for case in cases)
        yield (
            f"{name}: {sum(counts):,} values in {len(counts)} of {len(cases)} cases are the same NaN, infinity or fill "
            f"as in {verification.reference}; they count as equal, and the others are measured without them"
            + (f"; in {nothing} of these cases there are no others" if nothing else "")
        )


def size_blocks(sizes: Sequence[SizeResult]) -> list[Block]:
    """Describe files of fixed sizes."""
    if not sizes:
        return []
    rows = []
    for size in sizes:
        compared = ("not compared", "")
        if size.verification is not None:
            compared = (f"{size.verification.max_abs_error:.2e}", str(len(size.verification.cases)))
        rows.append((size.file, label(size.sizes), str(size.num_nodes), str(size.num_computing), *compared))
    figures = ("nodes", "for sizes", "max_abs_error", "cases")
    return [
        Heading(f"Fixed sizes ({' x '.join(sizes[0].sizes)}), compared with the file of any size"),
        Table(("file", "sizes", *figures), rows, frozenset(figures)),
        *(Note(size.note) for size in sizes if size.note),
    ]
