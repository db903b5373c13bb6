"""`onnxtool encode`: encode a collection with several processes, or on several machines."""

from __future__ import annotations

from collections.abc import Callable

import click

from onnxtool.cli.choices import LocationType
from onnxtool.cli.commands import SUBCOMMANDS
from onnxtool.cli.entry import TableGroup
from onnxtool.cli.options import derived_options, model_argument, report_options
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.cli.streams import say
from onnxtool.encoding.locations import Location
from onnxtool.encoding.options import CorpusPlaces, PartOptions, RunOptions, VectorOptions
from onnxtool.encoding.report import MergeReport, PartReport, RunReport, StatusReport

_PURPOSES = SUBCOMMANDS["encode"]
_WHAT = "--model_path model.onnx --input corpus.jsonl --output vectors/"
_output_option = click.option(
    "--output", type=LocationType("folder"), required=True, metavar="NAME/", help="The folder of vectors."
)


class _EncodeGroup(TableGroup):
    """The group of the commands that encode."""

    table = _PURPOSES


@click.group(
    cls=_EncodeGroup,
    no_args_is_help=False,
    epilog="Example: onnxtool encode status --output vectors/",
)
def command() -> None:
    """Encode a collection with several processes, or in parts on several machines that are then merged.

    The files are byte for byte those of `onnxtool infer --input FILE --output NAME/`, which encodes in one process.
    """


@command.command(short_help=_PURPOSES["run"], epilog=f"Example: onnxtool encode run {_WHAT} --processes 2")
@model_argument("model_path")
@derived_options(places=CorpusPlaces, options=VectorOptions, run=RunOptions)
@report_options
def run(
    places: CorpusPlaces,
    options: Callable[[], VectorOptions],
    run: Callable[[], RunOptions],
    *,
    format_name: str,
    quiet: bool,
) -> int:
    """Encode all remaining splits of a collection with several processes, and publish them as merge does.

    A process that dies ends the run with an error that names the shard and its texts; the same command resumes. With
    --engine ray, the processes run on the nodes of the cluster that RAY_ADDRESS names.
    """
    from onnxtool.encoding import encode_parts

    with progress(quiet=quiet):
        report = encode_parts(places.model_path, places.corpus, places.output, options(), run())
    emit(report, _merge_blocks(report), format_name)
    return _exit_code(report)


@command.command(short_help=_PURPOSES["part"], epilog=f"Example: onnxtool encode part {_WHAT} --part 2/7")
@model_argument("model_path")
@derived_options(places=CorpusPlaces, options=VectorOptions, part=PartOptions)
@report_options
def part(
    places: CorpusPlaces,
    options: Callable[[], VectorOptions],
    part: Callable[[], PartOptions],
    *,
    format_name: str,
    quiet: bool,
) -> None:
    """Encode one part of a collection's splits, on any machine that can access the folder.

    A split is a piece of the collection, determined only by the sizes of its files; every machine passes the same
    options except for --part. Finished splits are left as they are, so the same command resumes after being killed at
    any moment. A process that dies is an error that names the shard and its texts.
    """
    from onnxtool.encoding import encode_part

    with progress(quiet=quiet):
        report = encode_part(places.model_path, places.corpus, places.output, options(), part())
    emit(report, _part_blocks(report), format_name)


@command.command(short_help=_PURPOSES["merge"], epilog="Example: onnxtool encode merge --output vectors/")
@_output_option
@click.option("--read_back", is_flag=True, help="Read every file again, even from a store that verified its uploads.")
@click.option(
    "--strict", is_flag=True, help="Publish nothing if an id occurs twice; by default its first text is kept."
)
@report_options
def merge(*, output: Location, read_back: bool, strict: bool, format_name: str, quiet: bool) -> int:
    """Check the digests of every shard's files, and write the manifest and the rejected lines.

    Missing or damaged splits are listed in the form that `onnxtool encode part --splits` takes; nothing is then
    written, and the exit code is 1.
    """
    del quiet  # this takes as long as reading the files
    from onnxtool.encoding import merge_parts

    report = merge_parts(output, read_back=read_back, strict=strict)
    emit(report, _merge_blocks(report), format_name)
    return _exit_code(report)


def _exit_code(report: MergeReport) -> int:
    if report.to_do:
        say(f"splits to do: {report.to_do}")
    return 1 if report.to_do else 0


@command.command(short_help=_PURPOSES["status"], epilog="Example: onnxtool encode status --output vectors/")
@_output_option
@report_options
def status(*, output: Location, format_name: str, quiet: bool) -> None:
    """Show how many splits are done, and the combined speed of all machines."""
    del quiet
    from onnxtool.encoding import corpus_status

    report = corpus_status(output)
    emit(report, _status_blocks(report), format_name)


def _part_blocks(report: PartReport) -> list[Block]:
    return [
        Facts(
            [
                ("Output", report.output),
                ("Splits", report.splits or "none: there are more parts than splits"),
                ("Encoded", _encoded(report)),
                ("Texts", f"{report.num_encoded} by this run"),
                ("Time", f"{format_duration(report.seconds * 1e3)}, {report.texts_per_s:.1f} texts/s"),
            ]
        ),
        *(Note(note) for note in report.notes),
    ]


def _encoded(report: PartReport) -> str:
    before = report.num_splits - report.num_encoded_splits
    return (
        f"{report.num_encoded_splits} of {report.num_splits} splits{f'; {before} were done before' if before else ''}"
    )


def _merge_blocks(report: MergeReport) -> list[Block]:
    """Lay out what was published, and the work of a run."""
    if report.to_do:
        return [Heading("Splits that cannot be merged"), Table(("problem", "splits"), [*report.problems.items()])]
    splits, texts = str(report.num_splits), str(report.num_texts)
    work: list[tuple[str, str]] = []
    if isinstance(report, RunReport):
        splits += f", {report.num_encoded_splits} of them by this run"
        texts += f", {report.num_encoded} of them by this run"
        work = [
            ("Time", f"{format_duration(report.seconds * 1e3)}, {report.texts_per_s:.1f} texts/s"),
            ("Processes", f"{report.processes}, engine {report.engine}"),
        ]
    optional = (
        (report.num_rejects, "Rejected lines", f"{report.num_rejects}, in {report.rejects_path}"),
        (report.num_removed, "Removed", f"{report.num_removed} files that workers left which were killed"),
    )
    facts = [
        ("Output", f"{report.output}: {report.num_files} files, {format_bytes(report.size_bytes)}"),
        ("Manifest", report.manifest),
        ("Splits", splits),
        ("Shards", str(report.num_shards)),
        ("Texts", texts),
        *([("Passages", str(report.num_passages))] if report.num_passages else ()),
        ("Tokens", str(report.num_tokens)),
        *work,
        *((name, text) for count, name, text in optional if count),
    ]
    return [Facts(facts), *map(Note, report.notes)]


def _status_blocks(report: StatusReport) -> list[Block]:
    facts = [
        ("Output", report.output),
        ("Splits", f"{report.num_done} of {report.num_splits} are done, {report.share:.1%}"),
        ("Texts", str(report.num_texts)),
    ]
    if report.texts_per_s is not None:
        facts.append(("Rate", f"{report.texts_per_s:.1f} texts/s"))
    if report.seconds_left is not None:
        facts.append(("Time left", format_duration(report.seconds_left * 1e3)))
    if report.half_written:
        facts.append(("Stages", f"{len(report.half_written)}, of workers that write or that were killed"))
    facts.append(("To do", report.to_do) if report.to_do else ("Merged", "yes" if report.merged else "not yet"))
    return [Facts(facts)]
