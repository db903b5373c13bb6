"""The record of a release in its folder, the source of the card and the bill of materials."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

from onnxtool.checkpoint.sentence_modules import stays_inside
from onnxtool.errors import InputError
from onnxtool.evaluation.measures import Measure, MeasureDifference
from onnxtool.model_file.metadata import License
from onnxtool.reading import parse_json, read_text
from onnxtool.reports import Json, from_json, short_repr, to_json
from onnxtool.runtime.providers import PROVIDERS

FACTS_NAME = "release.json"

MODEL, WEIGHTS, TOKENIZER, SIDECAR = "model", "weights", "tokenizer", "sidecar"
ROLES = (MODEL, WEIGHTS, TOKENIZER, SIDECAR)

_FORMAT = 1
_MAX_SHOWN = 200  # characters of a differing line
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WAY_OUT = "make the release again: onnxtool release --config release.toml"


@dataclass(frozen=True)
class Provenance:
    """The origin of a model, as stamped by `export`.

    Attributes:
        source: an id on the hub, or the name of the folder that the checkpoint was in.
        is_on_hub: whether `source` is an id on the hub.
        revision: the commit on the hub; empty for a folder.
        weights_sha256: digest of the checkpoint's weights.
        model_type: model type in its configuration, e.g. `bert`.
        architecture: the class in transformers.
        task: the task in transformers, e.g. `feature-extraction`.
        head: what the graph computes on top of the model, e.g. `embedding`.
        date: the day of the release, if set by SOURCE_DATE_EPOCH; otherwise empty.
    """

    source: str
    is_on_hub: bool = False
    revision: str = ""
    weights_sha256: str = ""
    model_type: str = ""
    architecture: str = ""
    task: str = ""
    head: str = ""
    date: str = ""


@dataclass(frozen=True)
class ReleasedFile:
    """A file of the release, but for the record, card, bill of materials and signature, which are made from it.

    Attributes:
        path: the path relative to the release folder, with `/`.
        role: one of `ROLES`; `weights` is what a model needs next to its graph: external data, and its
            files of fixed sizes.
        precision: precision of a model and its weights, e.g. `int8`; otherwise empty.
        target: the consumer that the file is for; empty if it is for any.
    """

    path: str
    sha256: str
    size_bytes: int
    role: str
    precision: str = ""
    target: str = ""


@dataclass(frozen=True)
class VerifiedStep:
    """The stamped verification of a step that made a model file.

    Attributes:
        step: `export` or `optimize`.
        reference: the reference for the outputs.
        num_cases: number of inputs tried.
        provider: where the model ran.
        error: 1 - cosine of a quantized model's outputs; None if nothing was quantized.
    """

    step: str
    reference: str
    num_cases: int
    max_abs_error: float
    atol: float
    rtol: float
    cosine_min: float
    cosine_required: float
    provider: str
    error: float | None = None


def verified_steps(metadata_steps: tuple[dict[str, Json], ...]) -> tuple[VerifiedStep, ...]:
    """Return the verifications of a file's steps, from its stamps."""
    names = dict.fromkeys(("reference", "max_abs_error", "atol", "rtol", "cosine_min", "cosine_required"), "")
    names |= {"num_cases": "cases", "provider": "verified_on"}
    return tuple(
        VerifiedStep(
            step=str(step["step"]),
            error=step.get("error"),  # type: ignore[arg-type]  # JSON
            **{field: step[key or field] for field, key in names.items()},  # type: ignore[arg-type]
        )
        for step in metadata_steps
        if step.get("verified")
    )


@short_repr
@dataclass(frozen=True)
class EvaluationResult:
    """The retrieval quality of a model file.

    Attributes:
        collection: the name of the test collection.
        measures: means with their intervals, by name.
        base: the model or system to compare with; empty without a comparison.
        differences: differences from the base, by name.
    """

    collection: str
    split: str
    num_documents: int
    num_queries: int
    measures: Mapping[str, Measure]
    base: str = ""
    differences: Mapping[str, MeasureDifference] = field(default_factory=dict)


@dataclass(frozen=True)
class LatencyRow:
    """The duration of a run with one shape.

    Attributes:
        cpu: the class of the processor, e.g. its name and its best instructions for int8.
        threads: threads per operator.
    """

    cpu: str
    threads: int
    batch_size: int
    sequence_length: int
    p50_ms: float
    p95_ms: float
    throughput_samples_per_s: float


@short_repr
@dataclass(frozen=True)
class ReleasedModel:
    """A model file and its measurements.

    Attributes:
        path: the path of its `ReleasedFile`.
        num_parameters: number of elements of all weights.
        inputs: the dtype of each input.
        verification: verification of each step, oldest first.
        latency: empty if not measured.
    """

    path: str
    num_parameters: int = 0
    inputs: Mapping[str, str] = field(default_factory=dict)
    verification: tuple[VerifiedStep, ...] = ()
    evaluations: tuple[EvaluationResult, ...] = ()
    latency: tuple[LatencyRow, ...] = ()


@dataclass(frozen=True)
class ReleaseFacts:
    """The facts of a release.

    Attributes:
        name: the name of the release, e.g. `all-MiniLM-L6-v2`.
        provider: the execution provider that the models are for.
        command: the command that reproduces the release.
        versions: versions of the packages that affect the contents of the files, by name.
        files: by path.
        models: the model files among them, in the order of the card.
        signed: whether the release has a signature, which covers this record.
        inputs: what the release depends on, by name: digests, or short texts.
    """

    name: str
    provenance: Provenance
    license: License
    provider: str
    command: str
    versions: Mapping[str, str]
    files: tuple[ReleasedFile, ...]
    models: tuple[ReleasedModel, ...]
    signed: bool
    inputs: Mapping[str, str]

    @property
    def num_files(self) -> int:
        """Number of files in the release, including this record, the card, the bill of materials and the signature."""
        return len(self.files) + 3 + self.signed

    def __post_init__(self) -> None:
        """Refuse an invalid record.

        Raises:
            InputError: a path leaves the folder or occurs twice, a digest, the date or the provider is malformed, or a
                model is not among the files.
        """
        if self.provenance.date and not _is_day(self.provenance.date):
            raise _malformed(f"its date is {self.provenance.date[:40]!r}")
        if self.provider.partition("?")[0].partition(":")[0] not in PROVIDERS:
            raise _malformed(f"its provider is {self.provider[:40]!r}")
        known = {file.path: file.role for file in self.files}
        for file in self.files:
            is_plain = file.path.isprintable() and file.path == PurePosixPath(file.path).as_posix() != "."
            if not stays_inside(file.path) or not is_plain:
                raise _malformed(f"the path {file.path[:200]!r} is not one of a file in the folder of the release")
            if not _SHA256.fullmatch(file.sha256):
                raise _malformed(f"the sha256 of {file.path!r} is {file.sha256[:80]!r}")
            if file.role not in ROLES:
                raise _malformed(f"the role of {file.path!r} is {file.role[:80]!r}, and none of {', '.join(ROLES)}")
        if len(known) < len(self.files) or len({model.path for model in self.models}) < len(self.models):
            raise _malformed("a file is listed twice")
        stray = sorted({model.path for model in self.models} ^ {path for path, role in known.items() if role == MODEL})
        if stray:
            raise _malformed(f"{stray[0][:200]!r} is among either the files or the models, and not among both")


def facts_text(facts: ReleaseFacts) -> str:
    """Write the record; equal facts produce the same text."""
    fields: Any = to_json(facts)
    document = {"format": _FORMAT, **fields}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def parse_facts(text: str) -> ReleaseFacts:
    """Read a record, and refuse any that differs from the output of `facts_text` by even a byte.

    Raises:
        InputError: it is not such a record; the message names the place.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise _malformed(f"it is not JSON: {error}") from error
    version = document.pop("format", None) if isinstance(document, dict) else None
    if type(version) is not int or version != _FORMAT:
        raise _malformed(f"its format is {str(version)[:40]}, and this onnxtool reads {_FORMAT}")
    try:
        facts: ReleaseFacts = from_json(ReleaseFacts, document, "record", _is_plain)
    except ValueError as error:
        raise _malformed(str(error)) from error
    if facts_text(facts) != text:
        raise _malformed("it says the same in another form than onnxtool writes, so that it was edited")
    return facts


def read_facts(folder: Path) -> ReleaseFacts:
    """Read the record of the release in `folder`.

    Raises:
        InputError: there is none, or it is malformed.
    """
    path = folder / FACTS_NAME
    if not path.is_file():
        raise InputError(f"{folder} is not a release: it has no {FACTS_NAME}", _WAY_OUT)
    try:
        return parse_facts(read_text(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check its permissions") from error
    except UnicodeDecodeError as error:
        raise _malformed(f"it is not UTF-8: {error.reason}") from error


def first_difference(text: str, expected: str) -> str:
    """Describe the first line of `text` that differs from the expected one; empty if all bytes are equal."""
    if text == expected:
        return ""
    theirs, ours = text.splitlines(), expected.splitlines()
    for tag, start, end, first, last in difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if tag != "equal":
            actual, wanted = " ".join(theirs[start:end]), " ".join(ours[first:last])
            actual, wanted = actual[:_MAX_SHOWN], wanted[:_MAX_SHOWN]
            return f"line {start + 1} is {actual!r}, and by the record of the release {wanted!r}"
    return "its lines end otherwise than those by the record of the release"


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _is_plain(text: str) -> bool:
    """Whether a text has no control characters for a terminal or a card, except line ends."""
    return text.replace("\n", "").isprintable()


def _malformed(reason: str) -> InputError:
    return InputError(f"the record of the release ({FACTS_NAME}) is malformed: {reason}", _WAY_OUT)
