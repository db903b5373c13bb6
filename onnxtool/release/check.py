"""Check a release: every byte against its record, and the outputs of its models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxtool.encoding.manifest import file_sha256
from onnxtool.errors import InputError, OnnxtoolError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import WEIGHTS_KEY, License
from onnxtool.options import StrPath, checked
from onnxtool.progress import counted
from onnxtool.reading import MOST_BYTES, read_text
from onnxtool.release.bom import BOM_NAME, bom_text, check_bom
from onnxtool.release.card import CARD_NAME, card_text
from onnxtool.release.facts import FACTS_NAME, ReleasedModel, ReleaseFacts, first_difference, read_facts, verified_steps
from onnxtool.release.signing import SIGNATURE_NAME, verify_signature
from onnxtool.reports import short_repr
from onnxtool.runtime.comparison import ReferenceOutputs, run_reference, verify
from onnxtool.runtime.difference import Tolerance
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session

_NONE, _NOT_VERIFIED, _REFUSED, _VERIFIED = "none", "not verified", "refused", "verified"


@short_repr
@dataclass(frozen=True)
class CheckReport:
    """The result of checking a release against its record.

    Attributes:
        problems: the problems found; empty if there are none.
        num_files: number of files, as in ReleaseReport.
        signature: `verified`, `refused`, `none`, or `not verified` if no public key was given.
        verified: model files that were run again and compared, with the largest difference.
        alone: model files that were run but not compared, because their inputs or outputs have a consumer's format.
    """

    release: str
    problems: tuple[str, ...]
    num_files: int
    signature: str
    verified: dict[str, float]
    alone: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


@checked
def check_release(
    folder: StrPath,
    *,
    public_key: StrPath | None = None,
    identity: str = "",
    issuer: str = "",
) -> CheckReport:
    """Compare the release in `folder` with its record, and run its models again.

    This checks the digest of each file, missing and extra files, the model card and the bill of materials, which are
    regenerated from the record, the stamps in the models, the signature, if any, and the outputs of every precision
    against the first.

    Args:
        folder: a release.
        public_key: the signer's public key; without it, and without an identity, the signature is not verified, which
            the report states.
        identity: Sigstore identity of the signer instead, e.g. an email address; needs the network.
        issuer: OpenID Connect issuer of the identity.

    Raises:
        InputError: the folder is not a release.
    """
    folder, public_key = Path(folder), None if public_key is None else Path(public_key)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder", "pass the folder of a release to --check")
    expected = public_key is not None or bool(identity or issuer)
    signature = _NONE
    problems: list[str] = []
    if (folder / SIGNATURE_NAME).exists():
        signature = _NOT_VERIFIED
        if expected:
            try:
                verify_signature(folder, public_key, identity=identity, issuer=issuer)
                signature = _VERIFIED
            except OnnxtoolError as error:
                signature = _REFUSED
                problems.append(error.message)
    elif expected:
        problems.append(f"{folder} has no signature")
    try:
        facts = read_facts(folder)
    except InputError as error:
        if not (folder / FACTS_NAME).is_file():
            raise
        return CheckReport(str(folder), (*problems, error.message), 0, signature, {})
    problems += changes(folder, facts)
    verified: dict[str, float] = {}
    alone: list[str] = []
    if not problems:  # modified files are not run
        problems += _stamps(folder, facts)
        problems += _outputs(folder, facts, verified, alone)
    return CheckReport(str(folder), tuple(problems), facts.num_files, signature, verified, tuple(alone))


def changes(folder: Path, facts: ReleaseFacts) -> Iterator[str]:
    """Yield how the files of a folder differ from a record."""
    yield from _files(folder, facts)
    yield from _documents(folder, facts)


def _files(folder: Path, facts: ReleaseFacts) -> Iterator[str]:
    """Yield problems with the files."""
    known = {file.path: file for file in facts.files}
    generated = {FACTS_NAME, CARD_NAME, BOM_NAME, *([SIGNATURE_NAME] if facts.signed else [])}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield f"{name} is a symbolic link"
        elif not path.is_dir() and name not in known and name not in generated:
            yield f"{name} is not in the record"
    if facts.signed and not (folder / SIGNATURE_NAME).is_file():
        yield f"{SIGNATURE_NAME} is missing: the record says that the release is signed"
    for file in counted(facts.files, "reading file"):
        path = folder / file.path
        if not path.is_file():
            yield f"{file.path} is missing"
        elif path.is_symlink() or path.stat().st_size != file.size_bytes or file_sha256(path) != file.sha256:
            yield f"{file.path} is not the file that was released"


def _documents(folder: Path, facts: ReleaseFacts) -> Iterator[str]:
    """Yield problems with the card and the bill of materials."""
    for name, text in ((CARD_NAME, card_text(facts)), (BOM_NAME, bom_text(facts))):
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size > MOST_BYTES:
            yield f"{name} has more than {MOST_BYTES} bytes"
        elif difference := first_difference(read_text(path, errors="replace"), text):
            yield f"{name} is not the one that the record makes: {difference}"
    try:
        check_bom(bom_text(facts))
    except OnnxtoolError as error:
        yield error.message


def _stamps(folder: Path, facts: ReleaseFacts) -> Iterator[str]:
    """Yield contradictions between models and the record."""
    for model in facts.models:
        file = ModelFile.open(folder / model.path)
        if verified_steps(file.steps) != model.verification:
            yield f"{model.path} was verified otherwise than the record says"
        if License.of_file(file.metadata) != facts.license:
            yield f"{model.path} is under {License.of_file(file.metadata)}, and the record says {facts.license}"
        if file.metadata.get(WEIGHTS_KEY, "") != facts.provenance.weights_sha256:
            yield f"{model.path} was made from other weights than the record says"


def _outputs(folder: Path, facts: ReleaseFacts, verified: dict[str, float], alone: list[str]) -> Iterator[str]:
    """Run all models, and yield those that differ from the first by more than the tolerance.

    Models with consumer-specific inputs or outputs are run `alone`, on their own inputs, without a comparison.
    """
    first, *candidates = facts.models
    reference_file = ModelFile.open(folder / first.path).with_sizes()
    session = open_session(reference_file, provider="cpu")
    expected = run_reference(session.run, input_cases(reference_file), name=first.path)
    form = _form(session)
    del session
    if not _is_finite(expected):
        yield f"{first.path} gives what is not a number"
    for model in candidates:
        candidate = open_session(ModelFile.open(folder / model.path).with_sizes(), provider="cpu")
        if _form(candidate) != form:
            alone.append(model.path)
            cases = input_cases(ModelFile.open(folder / model.path))
            if not _is_finite(run_reference(candidate.run, cases, name=model.path)):
                yield f"{model.path} gives what is not a number"
            continue
        result = verify(candidate.run, expected, _tolerance(model))
        verified[model.path] = result.max_abs_error
        if not result.passed:
            yield f"{model.path} gives other outputs than {first.path}: cosine {result.cosine_min:.6g} at least"


def _form(session: Session) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(session.input_names), frozenset(session.output_names)


def _is_finite(reference: ReferenceOutputs) -> bool:
    runs = zip(reference.cases, reference.outputs, strict=True)
    arrays = (case.meaningful(array) for case, outputs in runs for array in outputs.values())
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def _tolerance(model: ReleasedModel) -> Tolerance:
    """Return the widest tolerance with which the steps of a model were verified."""
    steps = model.verification
    return Tolerance(
        2 * max((step.atol for step in steps), default=1e-4),
        2 * max((step.rtol for step in steps), default=1e-4),
        1 - 2 * (1 - min((step.cosine_required for step in steps), default=0.9999)),
    )
