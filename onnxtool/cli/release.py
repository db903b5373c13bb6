"""`onnxtool release`: make or check a complete, described and signed folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import click

from onnxtool.cli.options import FORMATS, derived_options, shown_options
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes
from onnxtool.cli.streams import say
from onnxtool.options import UNSET, Option, OptionalPath, Options

if TYPE_CHECKING:
    from onnxtool.release import CheckReport, ReleaseReport


_SIGNER = ("public_key", "identity", "issuer")


class _Request(Options):
    """A release to make or to check."""

    config: Annotated[OptionalPath, Option("TOML file that describes the release.", metavar="FILE")] = UNSET
    output: Annotated[
        OptionalPath, Option("Folder of the release; overrides --config.", metavar="DIR", writes="folder")
    ] = UNSET
    check: Annotated[OptionalPath, Option("Check the release in this folder instead of making one.", metavar="DIR")] = (
        UNSET
    )
    public_key: Annotated[OptionalPath, Option("Public key of the signer, for --check.", metavar="FILE")] = UNSET
    identity: Annotated[str, Option("Sigstore identity of the signer, e.g. an email address.", metavar="WHO")] = ""
    issuer: Annotated[str, Option("OpenID Connect issuer that vouches for --identity.", metavar="URL")] = ""
    dry_run: Annotated[bool, Option("Check the inputs, and say what the folder holds, without writing.")] = False
    force: Annotated[bool, Option("Replace an existing release.")] = False


@click.command(epilog="Example: onnxtool release --config release.toml")
@derived_options(request=_Request)
@shown_options(FORMATS)
def command(request: _Request, *, format_name: str, quiet: bool) -> int:
    """Make a release from a checkpoint: export, optimize, verify, evaluate, describe and sign.

    The folder is written as a whole: models of every precision and target, tokenizer, model card, bill of materials,
    digests, and a signature if a key is given. A failed gate leaves no folder. A folder that already holds the release
    of the same inputs is left as it is.
    """
    _check_request(request)
    from onnxtool.release.check import check_release
    from onnxtool.release.config import read_config
    from onnxtool.release.run import make_release

    if request.check is not None:
        with progress(quiet=quiet):
            checked = check_release(request.check, **{name: getattr(request, name) for name in _SIGNER})
        emit(checked, check_blocks(checked), format_name)
        for problem in checked.problems:
            say(f"problem: {problem}")
        return 0 if checked.passed else 1
    assert request.config is not None  # noqa: S101  as `_check_request` requires
    with progress(quiet=quiet):
        config = read_config(request.config)
        config = config if request.output is None else replace(config, output=request.output)
        report = make_release(config, force=request.force, dry_run=request.dry_run)
    emit(report, release_blocks(report), format_name)
    return 0


def _check_request(request: _Request) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: some do.
    """
    if (request.config is None) == (request.check is None):
        raise click.UsageError("pass either --config, to make a release, or --check, to check one")
    signer_options = [f"--{name}" for name in _SIGNER if getattr(request, name)]
    if signer_options and request.check is None:
        raise click.UsageError(f"{signer_options[0]} is for --check")
    if bool(request.identity) != bool(request.issuer) or len(signer_options) == 3:
        raise click.UsageError("pass either --public_key, or --identity and --issuer")
    if request.check is not None and (request.output is not None or request.force):
        unused = "--force" if request.output is None else "--output"
        raise click.UsageError(f"--check writes nothing; leave out {unused}")
    if request.dry_run and request.check is not None:
        raise click.UsageError("--dry_run writes nothing; leave out --check")


def release_blocks(report: ReleaseReport) -> list[Block]:
    """Lay out the contents of the release."""
    if not report.output:
        return [*map(Note, report.notes), Note("nothing was written")]
    rows = []
    for model in report.models:
        evaluation = next(iter(model.evaluations), None)
        means = {} if evaluation is None else {name: of.mean for name, of in evaluation.measures.items()}
        measures = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
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
    ]
    blocks: list[Block] = [Heading("Check"), Facts(facts)]
    if report.problems:
        blocks.append(Table(("problem",), [(problem,) for problem in report.problems]))
    if report.signature == "not verified":
        blocks.append(Note("the signature was not verified: pass --public_key, or --identity and --issuer"))
    return blocks
