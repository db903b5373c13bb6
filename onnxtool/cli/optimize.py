"""`onnxtool optimize`: fuse and convert an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from onnxtool.cli.choices import PathType
from onnxtool.cli.options import derived_options, dry_run_option, model_argument, report_options
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, emit_plan, format_bytes, format_duration
from onnxtool.cli.stats import summary_blocks
from onnxtool.cli.streams import say
from onnxtool.cli.verify import size_blocks, verdict, verification_blocks
from onnxtool.optimize.options import OptimizeOptions
from onnxtool.optimize.report import (
    Candidate,
    FusionCount,
    KeptNode,
    OptimizeReport,
    Quantization,
    Ranking,
    Speed,
    VocabularyCut,
)


@click.command(
    epilog="Example: onnxtool optimize --model_path models/splade-cocondenser-ensembledistil.onnx --stats",
)
@model_argument("model_path")
@derived_options(options=OptimizeOptions)
@click.option(
    "--data",
    type=PathType(),
    metavar="DIR",
    help="With --precision auto, a test collection on which no candidate may meet --fail_if; see evaluate.",
)
@click.option(
    "--fail_if",
    multiple=True,
    metavar="EXPR",
    help="Reject a candidate on --data by this gate, e.g. 'ndcg@10<-0.5%' against the input; may be repeated.",
)
@click.option("--measure", multiple=True, metavar="NAME", help="Measure to compute on --data, as in evaluate.")
@click.option("--stats", is_flag=True, help="Print summaries of both graphs.")
@dry_run_option
@report_options
def command(
    options: OptimizeOptions,
    *,
    data: Path | None,
    fail_if: tuple[str, ...],
    measure: tuple[str, ...],
    stats: bool,
    dry_run: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Fuse an ONNX file's operators for an execution provider, and convert it to another precision.

    The passes run in a fixed order and report their changes; the result is kept only after it has been compared with
    the input on several shapes and masks.
    """
    from onnxtool.optimize.run import (  # imports all passes, which --help does not need
        optimize_model,
        plan_optimization,
    )

    if data is None and (fail_if or measure):
        raise click.UsageError(f"{'--fail_if' if fail_if else '--measure'} is for a test collection: pass --data DIR")
    if data is not None and options.precision != "auto":
        raise click.UsageError(
            f"--data chooses among precisions, and --precision is {options.precision}: pass --precision auto, or run "
            "onnxtool evaluate on the result"
        )
    judge = None
    if data is not None:
        from onnxtool.evaluation.options import EvaluateOptions
        from onnxtool.evaluation.run import judge_by_retrieval

        judge = judge_by_retrieval(
            options.model_path, data, EvaluateOptions(fail_if=fail_if, measures=measure, provider=options.provider)
        )
    if dry_run:
        emit_plan(plan_optimization(options), format_name)
        return
    with progress(quiet=quiet):
        report = optimize_model(options, judge=judge)
    blocks = [*optimize_blocks(report, stats=stats), verdict(report.verification, report.output)]
    emit(report, blocks, format_name)
    if report.warning:
        say(f"warning: {report.warning}")


def optimize_blocks(report: OptimizeReport, *, stats: bool) -> list[Block]:
    """Describe an optimization: the passes, the verification, and summaries on request."""
    blocks: list[Block] = []
    if stats:
        blocks += summary_blocks(report.before, "Original ONNX model summary")
        blocks += summary_blocks(report.after, "Optimized ONNX model summary")
    before, after = report.before, report.after
    facts = [
        ("Optimized", f"{before.path} for {report.provider} in {report.precision}"),
        ("Output", report.output),
        ("Nodes", f"{before.num_nodes} -> {after.num_nodes}"),
        ("Size", f"{format_bytes(before.size_bytes)} -> {format_bytes(after.size_bytes)}"),
        ("Fused", ", ".join(_fusion(count) for count in report.fusions)),
        *_speed(report.speed),
        ("Time", ", ".join(f"{stage} {format_duration(ms)}" for stage, ms in report.duration_ms.items())),
    ]
    rows = [
        (result.name, str(result.num_changes), format_duration(result.duration_ms))
        for result in report.passes
        if result.num_changes
    ]
    unchanged = len(report.passes) - len(rows)
    blocks += [
        *([Heading("Optimization")] if stats else []),
        Facts(facts),
        *(
            [
                Heading(f"Passes that changed the graph ({unchanged} others found nothing to do)"),
                Table(("pass", "changes", "time"), rows, frozenset({"changes", "time"})),
            ]
            if rows
            else [Note(f"none of {unchanged} passes found anything to change")]
        ),
        *(Note(f"{result.name}: {result.note}") for result in report.passes if result.note),
        *(_unfused(count) for count in report.fusions if count.expected is not None and count.found < count.expected),
        *_vocabulary(report.vocabulary),
        *_elsewhere(report),
        *map(Note, report.notes),
        *_candidates(report.candidates),
        *_quantized(report.quantization, report.ranking),
        *_kept(report.kept_float32),
        *verification_blocks(report.verification),
        *size_blocks(report.sizes),
        *([Note(f"not timed: {report.not_timed}")] if report.not_timed else []),
        *([Note(report.warning)] if report.warning else []),
    ]
    return blocks


def _speed(speed: Speed | None) -> list[tuple[str, str]]:
    if speed is None:
        return []
    low, high = speed.interval
    times = f"{format_duration(speed.before_ms)} -> {format_duration(speed.after_ms)} on one thread"
    return [("Speed", f"{speed.ratio:.2f} times the input's ({low:.2f} to {high:.2f}), {speed.shape}: {times}")]


def _fusion(count: FusionCount) -> str:
    expected = "" if count.expected is None else f" of {count.expected}"
    return f"{count.kind} {count.found}{expected}"


def _candidates(candidates: Sequence[Candidate]) -> list[Block]:
    """Describe what was tried on this machine, and why a candidate was ruled out or not judged."""
    if not candidates:
        return []
    shapes = tuple(dict.fromkeys(shape for candidate in candidates for shape in candidate.latency_ms))
    measures = tuple(dict.fromkeys(name for candidate in candidates for name in candidate.quality))
    rows = []
    for tried in candidates:
        latencies = [f"{tried.latency_ms[shape]:.4g} ms" if shape in tried.latency_ms else "" for shape in shapes]
        size = "" if tried.size_bytes is None else format_bytes(tried.size_bytes)
        error = "" if tried.error is None else f"{tried.error:.2g}"
        verdict = "chosen" if tried.chosen else tried.reason or (tried.not_judged and f"not judged: {tried.not_judged}")
        quality = [f"{tried.quality[name]:.4f}" if name in tried.quality else "" for name in measures]
        provider = tried.provider if len({candidate.provider for candidate in candidates}) > 1 else ""
        name = " ".join(filter(None, (provider, tried.precision, tried.activations)))
        rows.append((name, *latencies, size, error, *quality, verdict))
    figures = (*shapes, "size", "error", *measures)
    return [
        Heading("Candidates on this machine"),
        Table(("precision", *figures, "verdict"), rows, frozenset(figures)),
    ]


def _quantized(quantization: Quantization | None, ranking: Ranking | None) -> list[Block]:
    """Describe the quantized layers, the error, and the layers kept in higher precision."""
    if quantization is None:
        return []
    precision, kept = quantization.precision, [layer for layer in quantization.kept if not layer.by_name]
    num_layers, num_named = quantization.num_layers, len(quantization.kept) - len(kept)
    texts = f"{quantization.num_texts} texts" if quantization.num_texts else "random ids"
    layers = f"{num_layers - len(kept) - num_named} of {num_layers} layers"
    if quantization.finer:
        layers += f", {len(quantization.finer)} of them with float32 activations"
    if num_named:
        layers += f", {num_named} kept by name, {len(kept)} by measurement"
    if quantization.activations:
        layers += f" with {quantization.activations} activations, for {quantization.cpu} CPU"
    embeddings = f"{quantization.num_embeddings} embeddings"
    if quantization.embedding_precision not in ("", precision):
        embeddings += f" in {quantization.embedding_precision}"
    error = f"1 - cosine {quantization.error:.2g} at most, {quantization.mean_error:.2g} on average, {texts}"
    tokens = [] if quantization.tokens is None else [("Greedy tokens", str(quantization.tokens))]
    blocks: list[Block] = [
        Heading("Quantization"),
        Facts([(f"In {precision}", f"{layers}, {embeddings}"), ("Error", error), *tokens, *_ranking(ranking)]),
    ]
    if kept:
        columns = ("layer", "is kept in", f"its error in {precision}")
        rows = [
            (layer.name, layer.precision, "not tried" if layer.error is None else f"{layer.error:.2g}")
            for layer in kept
        ]
        blocks.append(Table(columns, rows, frozenset(columns[2:])))
    return [*blocks, Note(quantization.note)] if quantization.note else blocks


def _kept(nodes: Sequence[KeptNode]) -> list[Block]:
    """List the nodes that --keep_float32 keeps."""
    rows = [(node.name, node.operator, ", ".join(node.patterns)) for node in nodes]
    return [Heading("Kept in float32 by name"), Table(("node", "operator", "pattern"), rows)] if rows else []


def _vocabulary(cut: VocabularyCut | None) -> list[Block]:
    """Describe what is left of the vocabulary, and what the texts say about it."""
    if cut is None:
        return []
    gone = cut.weight_bytes_before - cut.weight_bytes
    facts = [
        ("Rows", f"{cut.rows_before:,} -> {cut.rows:,}"),
        ("Weights", f"{cut.weight_bytes_before:,} -> {cut.weight_bytes:,} bytes, {gone:,} fewer as predicted"),
        ("File before optimization", f"{cut.size_bytes_before:,} -> {cut.size_bytes:,} bytes"),
    ]
    if cut.num_run:
        suffix = f", others within {cut.largest_difference:.2g}" if cut.num_equal < cut.num_run else ""
        facts.append(("Outputs", f"{cut.num_equal:,} of {cut.num_run:,} texts equal the input's bit by bit{suffix}"))
    if cut.num_held_out:
        share = (
            f"{cut.num_changed:,} of {cut.num_held_out:,} ({cut.num_changed / cut.num_held_out:.1%}) get other tokens"
        )
        if cut.cosine_mean is not None:
            share += f", cosine {cut.cosine_mean:.4f} on average, {cut.cosine_min:.4f} at least"
        facts.append(("Held-out texts", share))
    if cut.terms is not None:
        before, after = cut.terms
        facts.append(("Terms of a text", f"{before:.1f} -> {after:.1f}, {cut.weight_lost:.1%} of the weight is lost"))
    return [Heading("Vocabulary"), Facts(facts), *map(Note, cut.notes)]


def _ranking(ranking: Ranking | None) -> list[tuple[str, str]]:
    if ranking is None:
        return []
    if ranking.overlap is None or ranking.kendall_tau is None:
        neighbours = f"all have the same {'score' if ranking.is_scores else 'vector'}, so that none is first"
    else:
        first = "best" if ranking.is_scores else "nearest"
        neighbours = f"{ranking.overlap:.1%} of the 10 {first} are the same, Kendall's tau {ranking.kendall_tau:.3f}"
    return [(f"On {ranking.num_texts} other texts", f"1 - cosine {ranking.error:.2g} at most, {neighbours}")]


def _elsewhere(report: OptimizeReport) -> list[Note]:
    if report.verification is None or report.verification.provider == report.provider:
        return []
    return [
        Note(
            f"verified on {report.verification.provider}, not on {report.provider}: an overflow of half precision "
            "would not show"
        )
    ]


def _unfused(count: FusionCount) -> Note:
    return Note(f"{count.found} of {count.expected} {count.kind}s are fused; --require_fusion makes that an error")
