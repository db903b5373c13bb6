"""Make a release: run the steps whose inputs changed, and write either a complete folder or nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxtool.encoding.manifest import file_sha256
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.evaluation import EvaluateOptions
from onnxtool.evaluation.run import check_evaluation
from onnxtool.model_file import ModelFile, check_not_input, staged
from onnxtool.model_file.metadata import HEAD_KEY, TASK_KEY, WEIGHTS_KEY
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.reading import read_bytes
from onnxtool.release.bom import BOM_NAME, bom_text
from onnxtool.release.card import CARD_NAME, card_text
from onnxtool.release.check import changes
from onnxtool.release.config import ReleaseConfig
from onnxtool.release.facts import (
    FACTS_NAME,
    MODEL,
    SIDECAR,
    TOKENIZER,
    WEIGHTS,
    EvaluationResult,
    LatencyRow,
    Provenance,
    ReleasedFile,
    ReleasedModel,
    ReleaseFacts,
    facts_text,
    read_facts,
    verified_steps,
)
from onnxtool.release.signing import require_library, sign
from onnxtool.release.steps import (
    EXPORT,
    Step,
    checked_license,
    exported_file,
    file_name,
    release_steps,
    versions,
)
from onnxtool.release.store import Made, Store, files_in
from onnxtool.reports import from_json, short_repr
from onnxtool.stats import summarize_model

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "spiece", "added_tokens", "sentencepiece")


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step.

    Attributes:
        state: `ran`, `unchanged`, or in a dry run `to run`.
        reason: why it ran; otherwise empty.
    """

    name: str
    state: str
    reason: str
    seconds: float


@short_repr
@dataclass(frozen=True)
class ReleaseReport:
    """A release that was made; in a dry run, what would be done.

    Attributes:
        output: its folder; empty in a dry run.
        num_files: the files of the folder: those that release.json lists, and those that are made from it.
        license: the checkpoint's license.
        models: the model files, with their measurements.
        signed: whether the files include a signature.
        unchanged: whether the folder held this release already, and was left as it is.
    """

    name: str
    output: str
    steps: tuple[StepReport, ...]
    license: str
    num_files: int
    size_bytes: int
    models: tuple[ReleasedModel, ...]
    signed: bool
    notes: tuple[str, ...] = ()
    unchanged: bool = False


@checked
def make_release(config: ReleaseConfig, *, force: bool = False, dry_run: bool = False) -> ReleaseReport:
    """Export, optimize, verify and evaluate what changed since the last call, and write the folder of the release.

    A folder that already holds this release, made from the same inputs, is left as it is.

    Args:
        config: the configuration of the release.
        force: whether to replace an existing release.
        dry_run: report which steps would run and why, and run none.

    Raises:
        GateError: a gate on quality is met, or the license is not among the allowed ones; no folder is written.
        OutputExistsError: the folder exists and is not a release, or `force` is not set and it holds another one.
        OnnxtoolError: a step failed.
    """
    output, is_there = config.output, _holds_release(config.output)
    _check_inputs(config)
    made, steps = _run_steps(release_steps(config), Store(config.work), dry_run=dry_run or (is_there and not force))
    change = next((f"{step.name} runs again, because {step.reason}" for step in steps if step.state == "to run"), "")
    facts, sources = (None, {}) if change else _collect(config, made)
    if is_there and facts is not None:
        change = _change(output, facts)
    if dry_run:
        notes = (_plan(output, is_there, change),)
        return ReleaseReport(config.name, "", tuple(steps), "", 0, 0, (), signed=False, notes=notes)
    unchanged = is_there and not force
    if facts is None or (unchanged and change):
        raise OutputExistsError(f"{output} holds another release: {change}", "pass --force to replace it")
    if not unchanged:
        _write(config, facts, sources)
    return ReleaseReport(
        name=config.name,
        output=str(config.output),
        steps=tuple(steps),
        license=str(facts.license),
        num_files=facts.num_files,
        size_bytes=sum(file.size_bytes for file in facts.files),
        models=facts.models,
        signed=config.is_signed,
        notes=tuple(_notes(config, facts)),
        unchanged=unchanged,
    )


def _plan(output: Path, is_there: bool, change: str) -> str:
    if is_there and not change:
        return f"{output} holds this release already"
    return f"{output} holds another release ({change}); --force replaces it" if is_there else f"{output} is not there"


def _run_steps(steps: Sequence[Step], store: Store, *, dry_run: bool) -> tuple[dict[str, Made], list[StepReport]]:
    """Run the necessary steps in order; with `dry_run`, only determine which these are."""
    made: dict[str, Made] = {}
    reports: list[StepReport] = []
    for step in steps:
        if not made.keys() >= set(step.reads):  # in a dry run
            reports.append(StepReport(step.name, "to run", "a step before it runs", 0.0))
            continue
        start = time.perf_counter()
        task = step.prepare(made)
        if dry_run and (reason := store.reason(step.name, task)):
            reports.append(StepReport(step.name, "to run", reason, 0.0))
            continue
        found = made[step.name] = store.run(step.name, task)
        seconds = time.perf_counter() - start
        reports.append(StepReport(step.name, "ran" if found.reason else "unchanged", found.reason, seconds))
        step.check(found)
    return made, reports


def _collect(config: ReleaseConfig, made: Mapping[str, Made]) -> tuple[ReleaseFacts, dict[str, Path]]:
    """Return the facts of a release from the results of its steps, and its files by their path in the release.

    Files derived from the record are not among them.
    """
    sources: dict[str, Path] = {}
    files: list[ReleasedFile] = []
    models: list[ReleasedModel] = []

    def add(path: str, source: Path, role: str, precision: str = "", target: str = "") -> None:
        sources[path] = source
        files.append(ReleasedFile(path, file_sha256(source), source.stat().st_size, role, precision, target))

    for precision in config.precisions:
        optimized = made[f"optimize {precision}"]
        name = file_name(config, precision)
        for inside in optimized.files:
            add(inside, optimized.folder / inside, MODEL if inside == name else WEIGHTS, precision)
        models.append(replace(_model(name, optimized.folder / name), **_measurements(config, made, precision)))
    exported = made[EXPORT]
    for inside in exported.files:
        if inside.startswith(f"{config.name}/"):
            add(inside, exported.folder / inside, _role(inside))
    for target in config.targets:
        delivered = made[f"target {target}"]
        for inside in delivered.files:
            path = f"{target}/{inside}"
            is_model = inside.endswith(".onnx")
            is_weights = Path(inside).name.startswith(f"{Path(delivered.result).name}.data")
            role = MODEL if is_model else WEIGHTS if is_weights else _role(inside)
            add(path, delivered.folder / inside, role, target=target)
            if is_model:
                models.append(_model(path, delivered.folder / inside))
    metadata = exported_file(config, exported).metadata
    stamps = {
        "source": "onnxtool.source",
        "revision": "onnxtool.revision",
        "weights_sha256": WEIGHTS_KEY,
        "model_type": "model_type",
        "architecture": "onnxtool.architecture",
        "task": TASK_KEY,
        "head": HEAD_KEY,
        "date": "onnxtool.date",
    }
    facts = ReleaseFacts(
        name=config.name,
        provenance=Provenance(
            is_on_hub=not Path(config.checkpoint).is_dir(),
            **{field: metadata.get(key, "") for field, key in stamps.items()},
        ),
        license=checked_license(config, exported),
        provider=config.provider,
        command=f"onnxtool release --config {config.path.name}",
        versions=versions(),
        files=tuple(sorted(files, key=lambda file: file.path)),
        models=tuple(models),
        signed=config.is_signed,
    )
    return facts, sources


def _measurements(config: ReleaseConfig, made: Mapping[str, Made], precision: str) -> dict[str, Any]:
    """Return quality and latency of a model file, by the fields of `ReleasedModel`."""
    found: dict[str, Any] = {}
    if config.data is not None:
        result = {"collection": config.data.name, **made[f"evaluate {precision}"].result}
        found["evaluations"] = (from_json(EvaluationResult, result),)
    if config.benchmark is not None:
        found["latency"] = from_json(tuple[LatencyRow, ...], made[f"benchmark {precision}"].result)
    return found


def _model(name: str, path: Path) -> ReleasedModel:
    summary = summarize_model(path)
    inputs = {one.name: one.dtype for one in summary.inputs}
    return ReleasedModel(name, summary.num_parameters, inputs, verified_steps(ModelFile.open(path).steps))


def _role(name: str) -> str:
    return TOKENIZER if Path(name).name.startswith(_TOKENIZER_FILES) else SIDECAR


def _notes(config: ReleaseConfig, facts: ReleaseFacts) -> Iterator[str]:
    if not config.is_signed:
        yield "the release is not signed: name a private key with key in the configuration, or identity_token"
    if config.data is None:
        yield "its retrieval quality was not measured: name a test collection with data in the configuration"
    if facts.license.id == "unknown":
        yield "its license is unknown: state it in the checkpoint's card"
    if config.last is not None:
        before = read_facts(config.last)
        old, new = (sum(file.size_bytes for file in one.files) for one in (before, facts))
        yield f"the last release, {config.last}, has {len(before.files)} files and {old:,} bytes; this one {new:,}"


def _holds_release(output: Path) -> bool:
    """Return whether there is a release in a folder.

    Raises:
        OutputExistsError: there is something else.
    """
    check_not_input(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / FACTS_NAME).is_file():
        raise OutputExistsError(f"{output} exists and is not a release", "name another output in the configuration")
    return True


def _change(output: Path, facts: ReleaseFacts) -> str:
    """Return how the release in a folder differs from one with these facts; empty if it is the same."""
    if read_bytes(output / FACTS_NAME) != facts_text(facts).encode():
        return f"{FACTS_NAME} differs"
    return next(changes(output, facts), "")


def _check_inputs(config: ReleaseConfig) -> None:
    """Refuse anything that a later step would refuse, before the first one starts.

    Raises:
        OnnxtoolError: the key, the last release, the collection, a measure or a gate is wrong.
    """
    if config.is_signed:
        require_library()
        _signer(config)
    if config.last is not None:
        read_facts(config.last)
    if config.data is not None:
        base = config.precisions[0]  # for relative gates
        check_evaluation(None, config.data, EvaluateOptions(**{**config.evaluate, "against": base}))


def _write(config: ReleaseConfig, facts: ReleaseFacts, sources: Mapping[str, Path]) -> None:
    """Write the folder atomically: if interrupted, either the old release remains or the new one is complete."""
    output = config.output
    with staged(output / FACTS_NAME, force=True, root=output) as staging:
        tell(f"writing {output}")
        for name, source in sources.items():
            place = staging.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
        for name, text in ((FACTS_NAME, facts_text(facts)), (CARD_NAME, card_text(facts)), (BOM_NAME, bom_text(facts))):
            (staging.folder / name).write_text(text, encoding="utf-8")
        if config.is_signed:
            sign(staging.folder, **_signer(config))
        written = set(files_in(staging.folder))
        staging.obsolete += [output / name for name in files_in(output) if name not in written]


def _signer(config: ReleaseConfig) -> dict[str, Any]:
    """Return the credentials for `sign`; secrets come from the environment variables named in the configuration.

    Raises:
        InputError: there is no such key, or a variable is not set.
    """
    if config.key is not None and not config.key.is_file():
        raise InputError(f"no such file: {config.key}, the key of {config.path}", "correct key, or leave it out")
    signer: dict[str, Any] = {"key": config.key}
    for argument, variable in (("password", config.key_password), ("identity_token", config.identity_token)):
        if variable is not None:
            if not os.environ.get(variable):
                raise InputError(f"{config.path}: the environment variable {variable} is not set", f"set {variable}")
            signer[argument] = os.environ[variable]
    return signer
