"""`onnxtool encode`: encode a collection on several machines, by a plan that they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from onnxtool.cli.commands import SUBCOMMANDS
from onnxtool.cli.infer_corpus import corpus_progress
from onnxtool.cli.options import LocationType, derived_options, output_options, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.encoding.locations import Location
from onnxtool.encoding.options import VectorOptions
from onnxtool.encoding.parts import PartOptions
from onnxtool.encoding.progress_files import ProgressOptions
from onnxtool.encoding.report import MergeReport, PartReport, PlanReport, RunReport, StatusReport
from onnxtool.encoding.workers import RunOptions

_PURPOSES = SUBCOMMANDS["encode"]
_plan_option = click.option(
    "--plan",
    type=LocationType(),
    required=True,
    metavar="NAME.plan.json",
    help="The plan, beside the folder of vectors.",
)
_report_output = output_options("Write the result to this file instead of stdout.")


class _OrderedGroup(click.Group):
    """A group whose help lists commands in the order in which they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_PURPOSES)


@click.group(
    cls=_OrderedGroup,
    no_args_is_help=False,
    epilog="Example: onnxtool encode status --plan vectors.plan.json",
)
def command() -> None:
    """Encode a collection on several machines: plan it once, encode parts of it anywhere, and merge them.

    The files are byte for byte those of `onnxtool infer --input FILE --output NAME/`, which does all three at once.
    """


@command.command(
    short_help=_PURPOSES["plan"],
    epilog="Example: onnxtool encode plan --model_path models/tiny-splade.onnx --input corpus.jsonl --output vectors/",
)
@click.option("--model_path", type=LocationType(), required=True, help="The ONNX file.")
@click.option(
    "--input",
    "corpus",
    type=LocationType(),
    required=True,
    help="The collection: a file, or a folder of files; of a test collection, its documents.",
)
@derived_options(options=VectorOptions)
@click.option(
    "--output", type=LocationType(), required=True, metavar="NAME/", help="The folder that vectors will go to."
)
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    default=0,
    show_default="one for each core",
    help="Processes that read the collection.",
)
@click.option("--force", is_flag=True, help="Replace a plan that exists, and the vectors that were made by it.")
@report_options
def plan(
    options: VectorOptions,
    *,
    model_path: Location,
    corpus: Location,
    output: Location,
    workers: int,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Read a collection once, and write NAME.plan.json: its shards, where each begins, and a digest of its texts.

    The same collection gives the same plan. Its paths are relative to its folder. Model, collection and output may lie
    in an object store, as s3://BUCKET/NAME, or in another filesystem, as hdfs://HOST/NAME.
    """
    from onnxtool.encoding import make_plan

    with corpus_progress(quiet=quiet):
        report = make_plan(model_path, corpus, output, options, workers=workers, force=force)
    emit(report, _plan_blocks(report), format_name)


@command.command(
    short_help=_PURPOSES["part"], epilog="Example: onnxtool encode part --plan vectors.plan.json --part 2/7"
)
@_plan_option
@derived_options(options=PartOptions, files=ProgressOptions)
@_report_output
@report_options
def part(
    options: PartOptions,
    files: ProgressOptions,
    *,
    plan: Location,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Encode a part of the shards of a plan, on any machine that sees the folder.

    Shards that are done are left as they are, so that the same command goes on after a kill at any moment. Model,
    checkpoint, collection and versions have to be those of the plan. A text that ends the process that encodes, or
    needs more than --memory_limit, is rejected with its id, and the others go on.
    """
    from onnxtool.encoding import encode_part

    with corpus_progress(quiet=quiet, files=files):
        report = encode_part(plan, options)
    emit(report, _part_blocks(report), format_name, output=output, force=force)


@command.command(
    short_help=_PURPOSES["run"], epilog="Example: onnxtool encode run --plan vectors.plan.json --workers 2"
)
@_plan_option
@derived_options(options=RunOptions, files=ProgressOptions)
@_report_output
@report_options
def run(
    options: RunOptions,
    files: ProgressOptions,
    *,
    plan: Location,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Encode all shards of a plan that are not done by several processes, and publish them as merge does.

    A process that dies is started again. A text that ends a process by itself, or needs more than --memory_limit, is
    rejected with its id, and the others go on. With --engine ray, the processes run on the nodes of the cluster that
    RAY_ADDRESS names.
    """
    from onnxtool.encoding import encode_plan

    with corpus_progress(quiet=quiet, files=files):
        report = encode_plan(plan, options)
    emit(report, _run_blocks(report), format_name, output=output, force=force)
    if report.to_do:
        click.echo(f"shards to do: {report.to_do}", err=True)
    return 1 if report.to_do else 0


@command.command(short_help=_PURPOSES["merge"], epilog="Example: onnxtool encode merge --plan vectors.plan.json")
@_plan_option
@click.option("--read_back", is_flag=True, help="Read every file again, also of a store, which checked what it got.")
@_report_output
@report_options
def merge(*, plan: Location, read_back: bool, output: Path | None, force: bool, format_name: str, quiet: bool) -> int:
    """Check every shard of a plan by the digests of its files, and write the manifest and the rejected lines.

    Where shards are missing or wrong, they are listed as `onnxtool encode part --shards` takes them, nothing is
    written, and the exit code is 1.
    """
    del quiet  # it takes as long as reading the files
    from onnxtool.encoding import merge_parts

    report = merge_parts(plan, read_back=read_back)
    emit(report, _merge_blocks(report), format_name, output=output, force=force)
    if report.to_do:
        click.echo(f"shards to do: {report.to_do}", err=True)
    return 1 if report.to_do else 0


@command.command(short_help=_PURPOSES["status"], epilog="Example: onnxtool encode status --plan vectors.plan.json")
@_plan_option
@_report_output
@report_options
def status(*, plan: Location, output: Path | None, force: bool, format_name: str, quiet: bool) -> None:
    """Show how many shards of a plan are done, and how fast all machines together are."""
    del quiet
    from onnxtool.encoding import corpus_status

    report = corpus_status(plan)
    emit(report, _status_blocks(report), format_name, output=output, force=force)


def _plan_blocks(report: PlanReport) -> list[Block]:
    blocks: list[Block] = [
        Facts(
            [
                ("Plan", f"{report.plan}, {format_bytes(report.size_bytes)}"),
                ("Output", report.output),
                ("Shards", str(report.num_shards)),
                ("Texts", str(report.num_texts)),
                ("Time", format_duration(report.seconds * 1e3)),
            ]
        ),
        *(Note(note) for note in report.notes),
    ]
    if report.rejects:
        rows = [(reason, str(count)) for reason, count in report.rejects.items()]
        blocks += [Heading("Rejected lines"), Table(("reason", "lines"), rows, frozenset({"lines"}))]
    return blocks


def _part_blocks(report: PartReport) -> list[Block]:
    return [
        Facts(
            [
                ("Output", report.output),
                ("Shards", report.shards or "none: there are more parts than shards"),
                ("Encoded", _encoded(report)),
                ("Texts", f"{report.num_texts}, {report.num_encoded} of them by this run"),
                ("Time", f"{format_duration(report.seconds * 1e3)}, {report.texts_per_s:.1f} texts/s"),
                *_lost(report),
            ]
        )
    ]


def _lost(report: PartReport | RunReport) -> list[tuple[str, str]]:
    facts = []
    if report.num_deaths:
        facts.append(("Workers that died", f"{report.num_deaths}, and were started again"))
    if report.num_left_out:
        facts.append(("Texts that no worker can run", str(report.num_left_out)))
    return facts


def _encoded(report: PartReport) -> str:
    before = report.num_shards - report.num_encoded_shards
    return (
        f"{report.num_encoded_shards} of {report.num_shards} shards{f'; {before} were done before' if before else ''}"
    )


def _merge_blocks(report: MergeReport) -> list[Block]:
    if report.to_do:
        return _problem_blocks(report.problems)
    facts = [
        ("Output", f"{report.output}: {report.num_files} files, {format_bytes(report.size_bytes)}"),
        ("Manifest", report.manifest),
        ("Shards", str(report.num_shards)),
        ("Texts", str(report.num_texts)),
        *([("Passages", str(report.num_passages))] if report.num_passages else ()),
        ("Tokens", str(report.num_tokens)),
    ]
    if report.num_rejects:
        facts.append(("Rejected lines", f"{report.num_rejects}, in {report.rejects_path}"))
    if report.num_removed:
        facts.append(("Removed", f"{report.num_removed} files that workers left which were killed"))
    return [Facts(facts), *(Note(note) for note in report.notes)]


def _run_blocks(report: RunReport) -> list[Block]:
    if report.to_do:
        return _problem_blocks(report.problems)
    facts = [
        ("Output", f"{report.output}: {format_bytes(report.size_bytes)}"),
        ("Manifest", report.manifest),
        ("Shards", f"{report.num_shards}, {report.num_encoded_shards} of them by this run"),
        ("Texts", f"{report.num_texts}, {report.num_encoded} of them by this run"),
        ("Tokens", str(report.num_tokens)),
        ("Time", f"{format_duration(report.seconds * 1e3)}, {report.texts_per_s:.1f} texts/s"),
        ("Workers", f"{report.workers}, engine {report.engine}"),
        *_lost(report),
    ]
    if report.num_rejects:
        facts.append(("Rejected lines", f"{report.num_rejects}, in {report.rejects_path}"))
    return [Facts(facts), *(Note(note) for note in report.notes)]


def _problem_blocks(problems: Mapping[str, str]) -> list[Block]:
    rows = [(reason, shards) for reason, shards in problems.items()]
    return [Heading("Shards that cannot be merged"), Table(("problem", "shards"), rows)]


def _status_blocks(report: StatusReport) -> list[Block]:
    facts = [
        ("Output", report.output),
        ("Shards", f"{report.num_done} of {report.num_shards} are done"),
        ("Texts", f"{report.num_encoded} of {report.num_texts}, {report.share:.1%}"),
    ]
    if report.texts_per_s is not None:
        facts.append(("Rate", f"{report.texts_per_s:.1f} texts/s"))
    if report.seconds_left is not None:
        facts.append(("Time left", format_duration(report.seconds_left * 1e3)))
    if report.half_written:
        count = len(report.half_written)
        facts.append(("Half-written files", f"{count}, of workers that write or that were killed; merge removes them"))
    facts.append(("To do", report.to_do) if report.to_do else ("Merged", "yes" if report.merged else "not yet"))
    return [Facts(facts)]
