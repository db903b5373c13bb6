"""`onnxtool release`: a folder that is complete, described and signed, or the check of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.choices import NameChoice
from onnxtool.cli.logs import log_options
from onnxtool.cli.options import FORMATS, PathType
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.cli.streams import printable

if TYPE_CHECKING:
    from onnxtool.release.report import CheckReport, ReleaseReport


@click.command(epilog="Example: onnxtool release --config release.toml")
@click.option("--config", type=PathType(), metavar="FILE", help="What the release is made of, in TOML.")
@click.option("--check", type=PathType(), metavar="DIR", help="Check the release in this folder, and make none.")
@click.option("--public_key", type=PathType(), metavar="FILE", help="Of the one who signed it, for --check.")
@click.option(
    "--push",
    metavar="ID",
    help="Upload the release to this repository of the hub, once it passes its check; HF_TOKEN is the token.",
)
@click.option("--private", is_flag=True, help="Make the repository of --push private, where it is new.")
@click.option("--dry_run", is_flag=True, help="Say which steps would run and why, and run none.")
@click.option("--force", is_flag=True, help="Replace a release that is there.")
@click.option(
    "--format",
    "format_name",
    type=NameChoice(FORMATS),
    default="text",
    show_default=True,
    help="How to print the result on stdout.",
)
@click.option("--quiet", is_flag=True, help="No progress on stderr; the result is still printed.")
@log_options
def command(
    *,
    config: Path | None,
    check: Path | None,
    public_key: Path | None,
    push: str | None,
    private: bool,
    dry_run: bool,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Make a release from a checkpoint: export, optimize, verify, evaluate, describe and sign.

    Steps whose inputs are those of the last run are not run again. What is written is a whole: models of every
    precision and target, tokenizer, model card, bill of materials, digests, and a signature where a key is named. A
    gate that is met leaves no folder.
    """
    if (config is None) == (check is None):
        raise click.UsageError("pass either --config, to make a release, or --check, to check one")
    if check is None and public_key is not None:
        raise click.UsageError("--public_key is for --check")
    if dry_run and (check is not None or push is not None):
        raise click.UsageError(f"--dry_run says which steps would run; leave out {'--check' if check else '--push'}")
    if private and push is None:
        raise click.UsageError("--private is for --push")
    from onnxtool.release.check import check_release
    from onnxtool.release.config import read_config
    from onnxtool.release.run import make_release

    blocks: list[Block] = []
    report: object
    with progress(quiet=quiet) as on_progress:
        if config is not None:
            made = make_release(read_config(config), force=force, dry_run=dry_run, on_progress=on_progress)
            report, blocks = made, release_blocks(made)
            folder = Path(made.output)
        if check is not None or push is not None:
            folder = folder if check is None else check
            checked = check_release(folder, public_key=public_key, on_progress=on_progress)
            report = checked if config is None else {"release": made, "check": checked}
            blocks += check_blocks(checked)
            if push is not None and checked.passed:
                from onnxtool.release.publishing import push as upload

                on_progress(f"uploading to {push}")
                url = upload(folder, push, private=private)
                blocks.append(Facts([("Uploaded", url)]))
    emit(report, blocks, format_name)
    if (check is not None or push is not None) and not checked.passed:
        for problem in checked.problems:
            click.echo(f"problem: {printable(problem)}", err=True)
        return 1
    return 0


def release_blocks(report: ReleaseReport) -> list[Block]:
    """Lay out what was done, and what the release holds."""
    steps = [
        (one.name, one.state, one.reason, format_duration(one.seconds * 1e3) if one.state == "ran" else "")
        for one in report.steps
    ]
    blocks: list[Block] = [Heading("Steps"), Table(("step", "state", "because", "time"), steps, frozenset({"time"}))]
    if not report.output:
        return [*blocks, Note("nothing was run")]
    rows = []
    for model in report.models:
        found = next(iter(model.evaluations), None)
        measures = "" if found is None else ", ".join(f"{name} {one.mean:.4f}" for name, one in found.measures.items())
        cosine = min((step.cosine_min for step in model.verification), default=None)
        rows.append((model.path, "" if cosine is None else f"{cosine:.6f}", measures))
    return [
        *blocks,
        Heading("Release"),
        Facts(
            [
                ("Name", report.name),
                ("License", report.license),
                ("Files", f"{report.num_files}, {format_bytes(report.size_bytes)}"),
                ("Signed", "yes" if report.signed else "no"),
            ]
        ),
        Table(("model", "least cosine", "measures"), rows, frozenset({"least cosine"})),
        *map(Note, report.notes),
        Facts([("Written", report.output)]),
    ]


def check_blocks(report: CheckReport) -> list[Block]:
    """Lay out what was checked, and what is wrong."""
    facts = [
        ("Release", report.release),
        ("Files", str(report.num_files)),
        ("Signature", report.signature),
        *((f"Run again: {name}", f"largest difference {error:.3g}") for name, error in report.verified.items()),
        ("Verdict", "as released" if report.passed else f"{len(report.problems)} problems"),
    ]
    blocks: list[Block] = [Heading("Check"), Facts(facts)]
    if report.problems:
        blocks.append(Table(("problem",), [(problem,) for problem in report.problems]))
    if report.signature == "not verified":
        blocks.append(Note("the signature was not verified: pass --public_key"))
    return blocks
