"""`onnxtool release`: make or check a complete, described and signed folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.choices import PathType
from onnxtool.cli.options import FORMATS, shown_options
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes
from onnxtool.cli.streams import say
from onnxtool.progress import tell

if TYPE_CHECKING:
    from onnxtool.release import CheckReport, ReleaseReport


@click.command(epilog="Example: onnxtool release --config release.toml")
@click.option("--config", type=PathType(), metavar="FILE", help="TOML file that describes the release.")
@click.option("--output", type=PathType("folder"), metavar="DIR", help="Folder of the release; overrides --config.")
@click.option("--check", type=PathType(), metavar="DIR", help="Check the release in this folder instead of making one.")
@click.option("--public_key", type=PathType(), metavar="FILE", help="Public key of the signer, for --check.")
@click.option("--identity", default="", metavar="WHO", help="Sigstore identity of the signer, e.g. an email address.")
@click.option("--issuer", default="", metavar="URL", help="OpenID Connect issuer that vouches for --identity.")
@click.option(
    "--push",
    metavar="ID",
    help="Upload the release to this hub repository once it passes its check; the token is read from HF_TOKEN.",
)
@click.option("--private", is_flag=True, help="Make the --push repository private if it is new.")
@click.option("--dry_run", is_flag=True, help="Check the inputs, and say what the folder holds, without writing.")
@click.option("--force", is_flag=True, help="Replace an existing release.")
@shown_options(FORMATS)
def command(
    *,
    config: Path | None,
    output: Path | None,
    check: Path | None,
    public_key: Path | None,
    identity: str,
    issuer: str,
    push: str | None,
    private: bool,
    dry_run: bool,
    force: bool,
    format_name: str,
    quiet: bool,
) -> int:
    """Make a release from a checkpoint: export, optimize, verify, evaluate, describe and sign.

    The folder is written as a whole: models of every precision and target, tokenizer, model card, bill of materials,
    digests, and a signature if a key is given. A failed gate leaves no folder. A folder that already holds the release
    of the same inputs is left as it is.
    """
    if (config is None) == (check is None):
        raise click.UsageError("pass either --config, to make a release, or --check, to check one")
    signer = {"--public_key": public_key, "--identity": identity, "--issuer": issuer}
    given = [name for name, value in signer.items() if value]
    if given and check is None and push is None:
        raise click.UsageError(f"{given[0]} is for --check and --push")
    if bool(identity) != bool(issuer) or len(given) == 3:
        raise click.UsageError("pass either --public_key, or --identity and --issuer")
    if check is not None and (output is not None or force):
        raise click.UsageError(f"--check writes nothing; leave out {'--force' if output is None else '--output'}")
    if dry_run and (check is not None or push is not None):
        raise click.UsageError(f"--dry_run writes nothing; leave out {'--check' if check else '--push'}")
    if private and push is None:
        raise click.UsageError("--private is for --push")
    from onnxtool.release.check import check_release
    from onnxtool.release.config import read_config
    from onnxtool.release.publishing import push as upload
    from onnxtool.release.run import make_release

    made = checked = None
    with progress(quiet=quiet):
        if config is not None:
            asked = read_config(config)
            asked = asked if output is None else replace(asked, output=output)
            made = make_release(asked, force=force, dry_run=dry_run)
            check = check if push is None else asked.output
        if check is not None:
            checked = check_release(check, public_key=public_key, identity=identity, issuer=issuer)
            if push is not None and checked.passed:
                tell(f"uploading to {push}")
                checked = replace(checked, uploaded=upload(check, push, private=private))
    blocks = [*(release_blocks(made) if made else []), *(check_blocks(checked) if checked else [])]
    emit({"release": made, "check": checked} if made and checked else made or checked, blocks, format_name)
    if checked is None or checked.passed:
        return 0
    for problem in checked.problems:
        say(f"problem: {problem}")
    return 1


def release_blocks(report: ReleaseReport) -> list[Block]:
    """Lay out the contents of the release."""
    if not report.output:
        return [*map(Note, report.notes), Note("nothing was written")]
    rows = []
    for model in report.models:
        found = next(iter(model.evaluations), None)
        measures = "" if found is None else ", ".join(f"{name} {one.mean:.4f}" for name, one in found.measures.items())
        cosine = min((step.cosine_min for step in model.verification), default=None)
        rows.append((model.path, "" if cosine is None else f"{cosine:.6f}", measures))
    return [
        Heading("Release"),
        Facts(
            [
                ("Name", report.name),
                ("License", report.license),
                ("Files", f"{report.num_files}, with the record and what is made from it"),
                ("Size", format_bytes(report.size_bytes)),
                ("Signed", "yes" if report.signed else "no"),
            ]
        ),
        Table(("model", "least cosine", "measures"), rows, frozenset({"least cosine"})),
        *map(Note, report.notes),
        Facts([("Unchanged" if report.unchanged else "Written", report.output)]),
    ]


def check_blocks(report: CheckReport) -> list[Block]:
    """Lay out the checks and the problems found."""
    facts = [
        ("Release", report.release),
        ("Files", str(report.num_files)),
        ("Signature", report.signature),
        *((f"Run again: {name}", f"largest difference {error:.3g}") for name, error in report.verified.items()),
        *((f"Run alone: {name}", "not compared: its inputs or outputs are a consumer's own") for name in report.alone),
        ("Verdict", "as released" if report.passed else f"{len(report.problems)} problems"),
        *([("Uploaded", report.uploaded)] if report.uploaded else []),
    ]
    blocks: list[Block] = [Heading("Check"), Facts(facts)]
    if report.problems:
        blocks.append(Table(("problem",), [(problem,) for problem in report.problems]))
    if report.signature == "not verified":
        blocks.append(Note("the signature was not verified: pass --public_key, or --identity and --issuer"))
    return blocks
