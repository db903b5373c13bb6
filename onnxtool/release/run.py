"""Make a release: a complete folder or nothing, and nothing where the folder holds it already.

All inputs are checked before the first step, and digested, which tells whether a release is current.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnxtool.benchmarking.measurement import benchmark
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.checkpoint.folder import is_path
from onnxtool.encoding.locations import Location
from onnxtool.encoding.manifest import file_sha256
from onnxtool.encoding.sources import find_sources
from onnxtool.errors import GateError, InputError, OutputExistsError
from onnxtool.evaluation.options import EvaluateOptions
from onnxtool.evaluation.run import check_evaluation, evaluate_model, needs_base
from onnxtool.export.options import ExportOptions
from onnxtool.export.run import export_model, stamped_date
from onnxtool.export.source import Source
from onnxtool.export.targets import TARGETS
from onnxtool.model_file import ModelFile, check_not_input, check_writable, staged
from onnxtool.model_file.commits import PARTIAL
from onnxtool.model_file.metadata import HEAD_KEY, TASK_KEY, WEIGHTS_KEY, License
from onnxtool.optimize.options import BLOCKS, EIGHT_BITS, QUANTIZED, OptimizeOptions
from onnxtool.optimize.run import optimize_model
from onnxtool.options import Options, checked
from onnxtool.progress import tell
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
from onnxtool.release.signing import fingerprint, sign
from onnxtool.release.variants import export_variants
from onnxtool.reports import short_repr, to_json
from onnxtool.runtime.machine import processor_name
from onnxtool.stats import summarize_model
from onnxtool.summary.gates import parse_gate
from onnxtool.version import versions_of


@short_repr
@dataclass(frozen=True)
class ReleaseReport:
    """A release that was made; in a dry run, what the folder holds.

    Attributes:
        output: its folder; empty in a dry run.
        num_files: the files of the folder: those that release.json lists, and those that are made from it.
        license: the checkpoint's license.
        models: the model files, with their measurements.
        signed: whether the files include a signature.
        unchanged: whether the folder held this release already, and was left as it is.
    """

    name: str
    output: str = ""
    license: str = ""
    num_files: int = 0
    size_bytes: int = 0
    models: tuple[ReleasedModel, ...] = ()
    signed: bool = False
    notes: tuple[str, ...] = ()
    unchanged: bool = False


@checked
def make_release(config: ReleaseConfig, *, force: bool = False, dry_run: bool = False) -> ReleaseReport:
    """Export, optimize, verify and evaluate, and write the folder of the release.

    A folder that already holds this release, made from the same inputs, is left as it is.

    Args:
        config: the configuration of the release.
        force: whether to replace an existing release.
        dry_run: check the inputs, report what the folder holds, and write nothing.

    Raises:
        GateError: a gate on quality is met, or the license is not among the allowed ones; no folder is written.
        OutputExistsError: the folder exists and is not a release, or `force` is not set and it holds another one.
        OnnxtoolError: an input is wrong, or a step failed.
    """
    output, is_there = config.output, _holds_release(config.output)
    inputs = checked_inputs(config)
    change = _change(output, inputs) if is_there else ""
    if dry_run:
        return ReleaseReport(config.name, notes=(_plan(output, is_there, change),))
    unchanged = is_there and not force
    if unchanged and change:
        raise OutputExistsError(f"{output} holds another release: {change}", "pass --force to replace it")
    facts = read_facts(output) if unchanged else _write(config, inputs)
    return ReleaseReport(
        name=config.name,
        output=str(output),
        license=str(facts.license),
        num_files=facts.num_files,
        size_bytes=sum(file.size_bytes for file in facts.files),
        models=facts.models,
        signed=facts.signed,
        notes=tuple(_notes(config, facts)),
        unchanged=unchanged,
    )


def _plan(output: Path, is_there: bool, change: str) -> str:
    if is_there and not change:
        return f"{output} holds this release already"
    return f"{output} holds another release ({change}); --force replaces it" if is_there else f"{output} is not there"


def _holds_release(output: Path) -> bool:
    """Return whether there is a release in a folder, perhaps with a part of its files, which a killed run left.

    Raises:
        OutputExistsError: there is something else.
        OutputWriteError: the folder cannot be written, or is an input.
    """
    check_not_input(output)
    check_writable(output / FACTS_NAME, force=True)
    if (output / FACTS_NAME).is_file():
        return True
    files = [path.relative_to(output) for path in output.rglob("*") if path.is_file()] if output.is_dir() else [output]
    if files and all(path.parts[0].endswith(PARTIAL) for path in files):  # what killed runs left is removed by now
        raise OutputExistsError(
            f"another run is making a release in {output}", "wait for it, or name another output in the configuration"
        )
    if files and output.exists():
        raise OutputExistsError(f"{output} exists and is not a release", "name another output in the configuration")
    return False


def _change(output: Path, inputs: Mapping[str, str]) -> str:
    """Return how the release in a folder differs from one of these inputs; empty if it is the same."""
    try:
        facts = read_facts(output)
    except InputError as error:
        return error.message
    before = facts.inputs
    if changed := [name for name in {**inputs, **before} if inputs.get(name) != before.get(name)]:
        return f"{', '.join(changed)} changed"
    return next(changes(output, facts), "")


def _write(config: ReleaseConfig, inputs: Mapping[str, str]) -> ReleaseFacts:
    """Write the folder atomically: if interrupted, either the old release remains or the new one is complete."""
    output = config.output
    with staged(output / FACTS_NAME, force=True, root=output) as staging:
        folder, staging.manifest = staging.folder, staging.model_path
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as work:
            facts = make_contents(config, inputs, folder, Path(work))
        tell(f"writing {output}")
        for name, text in ((FACTS_NAME, facts_text(facts)), (CARD_NAME, card_text(facts)), (BOM_NAME, bom_text(facts))):
            (folder / name).write_text(text, encoding="utf-8")
        if config.is_signed:
            sign(folder, **signer(config))
        written = set(files_in(folder))
        staging.obsolete += [output / name for name in files_in(output) if name not in written]
    return facts


def _notes(config: ReleaseConfig, facts: ReleaseFacts) -> Iterator[str]:
    if not config.is_signed:
        yield "the release is not signed: name a private key with key in the configuration, or identity_token"
    if config.data is None:
        yield "its retrieval quality was not measured: name a test collection with data in the configuration"
    if facts.license.id == "unknown":
        yield "its license is unknown: state it in the checkpoint's card"
    if config.last is not None:
        before = read_facts(config.last)
        old, new = (sum(file.size_bytes for file in release.files) for release in (before, facts))
        yield f"the last release, {config.last}, has {len(before.files)} files and {old:,} bytes; this one {new:,}"


# Fields of a configuration that are no options: places, secrets, and inputs whose contents count.
_NO_OPTIONS = {
    *("path", "output", "checkpoint", "revision", "last", "data"),
    *("key", "key_password", "identity_token"),
}


def checked_inputs(config: ReleaseConfig) -> dict[str, str]:
    """Return what a release depends on, by name, and refuse whatever a later step would refuse.

    Contents count, not paths and times.

    Raises:
        OnnxtoolError: an option, the checkpoint, the key, the last release, the collection, a measure or a gate is
            wrong.
    """
    all_options(config)
    options = {field_.name: getattr(config, field_.name) for field_ in fields(config) if field_.name not in _NO_OPTIONS}
    inputs = {
        "checkpoint": _checkpoint(config),
        "options": _digest(_contents(options)),
        "versions": _digest(versions_of(_PACKAGES)),
        "date": stamped_date(),
    }
    if config.is_signed:
        inputs["signer"] = "identity" if config.key is None else fingerprint(config.key, signer(config)["password"])
    if config.last is not None:
        read_facts(config.last)
        inputs["last release"] = file_sha256(config.last / FACTS_NAME)
    if config.data is not None:
        base = config.precisions[0]  # for relative gates
        evaluation = EvaluateOptions(**{**config.evaluate, "against": base})
        _, _, collection = check_evaluation(None, config.data, evaluation)
        sources, _ = find_sources(collection.corpus)
        texts = (*collection.files, *(source.path for source in sources))
        inputs["collection"] = digest_of({str(place): path for place, path in enumerate(texts)})
    if config.benchmark is not None:
        inputs["processor"] = processor_name()
    return inputs


def signer(config: ReleaseConfig) -> dict[str, Any]:
    """Return the credentials for `sign`; secrets come from the environment variables named in the configuration.

    Raises:
        InputError: a variable is not set.
    """
    credentials: dict[str, Any] = {"key": config.key, "password": ""}
    for argument, variable in (("password", config.key_password), ("identity_token", config.identity_token)):
        if variable is not None:
            if not os.environ.get(variable):
                raise InputError(f"{config.path}: the environment variable {variable} is not set", f"set {variable}")
            credentials[argument] = os.environ[variable]
    return credentials


def _checkpoint(config: ReleaseConfig) -> str:
    """Return the commit on the hub, or a digest of the folder, and of the one that its adapter is for."""
    folder = Path(config.checkpoint)
    if folder.is_dir():
        base = str(Source.find(config.checkpoint).adapter.get("base_model_name_or_path") or "")
        of_base = files_in(Path(base)) if base and Path(base).is_dir() else {}
        return digest_of({**files_in(folder), **{f"base/{name}": path for name, path in of_base.items()}})
    if is_path(config.checkpoint):
        raise InputError(
            f"{config.path}: no such folder: {config.checkpoint}", "check the path, or name an id such as org/name"
        )
    if config.revision is None:
        raise InputError(
            f"{config.path} names {config.checkpoint}, and no commit of it",
            'add revision = "COMMIT" at its top: a release is made from one state of a checkpoint',
        )
    return f"{config.checkpoint}@{config.revision}"


def _contents(value: Any) -> Any:
    """Return a value with digests of the files and folders that it names."""
    if isinstance(value, Mapping):
        return {name: _contents(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_contents(item) for item in value]
    if isinstance(value, Path) and value.exists():
        return digest_of(files_in(value) if value.is_dir() else {"": value})
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(to_json(value), sort_keys=True).encode()).hexdigest()


def digest_of(paths: Mapping[str, Location]) -> str:
    """Return a hash of the names and contents of files."""
    running = hashlib.sha256()
    for name in sorted(paths):
        running.update(f"{len(name)} {name} {file_sha256(paths[name])}\n".encode())
    return running.hexdigest()


_PACKAGES = ("onnxruntime", "onnx", "torch", "transformers", "numpy", "tokenizers")
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "spiece", "added_tokens", "sentencepiece")
# Options of [optimize] by the precisions that accept them; all others apply to every precision.
_TAKEN_BY = {
    "activations": EIGHT_BITS,
    "cpu": ("int8",),
    "max_error": QUANTIZED,
    "calibration": QUANTIZED,
    "embeddings": BLOCKS,
}
_STAMPS = {
    "source": "onnxtool.source",
    "revision": "onnxtool.revision",
    "weights_sha256": WEIGHTS_KEY,
    "model_type": "model_type",
    "architecture": "onnxtool.architecture",
    "task": TASK_KEY,
    "head": HEAD_KEY,
    "date": "onnxtool.date",
}


def make_contents(config: ReleaseConfig, inputs: Mapping[str, str], folder: Path, work: Path) -> ReleaseFacts:
    """Make the models of a release and the files next to them in `folder`, and return the record.

    Args:
        config: the configuration of the release.
        inputs: what the release depends on, for the record.
        folder: an empty folder.
        work: a folder for files that are not part of the release.

    Raises:
        GateError: a gate on quality is met, or the license is not among the allowed ones.
        OnnxtoolError: a step failed.
    """
    exported = work / f"{config.name}.onnx"
    _export(_export_options(config, exported))
    metadata = ModelFile.open(exported).metadata
    license_ = License.of_file(metadata)
    _check_license(config, license_)
    if (work / config.name).is_dir():
        shutil.copytree(work / config.name, folder / config.name)
    models = []
    for precision in config.precisions:
        path = folder / file_name(config, precision)
        tell(f"making {path.name}")
        optimize_model(_optimize_options(config, precision, exported, path))
        models.append(
            replace(
                _model(folder, path.name),
                evaluations=tuple(_evaluate(config, precision, path, work)),
                latency=tuple(_time(config, path)),
            )
        )
    for target in config.targets:
        tell(f"making the files for {target}")
        (folder / target).mkdir()
        export_variants(_export_options(config, folder / target, target), settings=partial(_optimize_options, config))
    return ReleaseFacts(
        name=config.name,
        provenance=Provenance(
            is_on_hub=not Path(config.checkpoint).is_dir(),
            **{field: metadata.get(key, "") for field, key in _STAMPS.items()},
        ),
        license=license_,
        provider=config.provider,
        command=f"onnxtool release --config {config.path.name}",
        versions=versions_of(_PACKAGES),
        files=(files := tuple(_files(config, folder))),
        models=(*models, *(_model(folder, file.path) for file in files if file.target and file.role == MODEL)),
        signed=config.is_signed,
        inputs=inputs,
    )


def file_name(config: ReleaseConfig, precision: str) -> str:
    """Return the name of the plain file in a precision."""
    return f"{config.name}{'' if precision == config.precisions[0] else f'-{precision}'}.onnx"


def all_options(config: ReleaseConfig) -> list[Options]:
    """Return the options of every step, each of which refuses values that it does not take.

    Raises:
        OptionError: one of them does.
    """
    place = config.output / f"{config.name}.onnx"
    return [
        *(_export_options(config, place, target) for target in ("plain", *config.targets)),
        *(_optimize_options(config, precision, place, place) for precision in config.precisions),
        _benchmark_options(config),
    ]


def _export_options(config: ReleaseConfig, output: Path, target: str = "plain") -> ExportOptions:
    opened = (precision for precision in config.precisions if precision in TARGETS[target].variants)
    return ExportOptions(
        config.checkpoint,
        output=output,
        target=target,
        precisions=",".join(opened),
        revision=config.revision,
        force=True,
        **config.export,
    )


def _optimize_options(config: ReleaseConfig, precision: str, source: Path, output: Path) -> OptimizeOptions:
    chosen = {name: value for name, value in config.optimize.items() if precision in _TAKEN_BY.get(name, (precision,))}
    return OptimizeOptions(source, output=output, provider=config.provider, precision=precision, timing=False, **chosen)


def _benchmark_options(config: ReleaseConfig) -> BenchmarkOptions:
    return BenchmarkOptions(**{"provider": config.provider, **(config.benchmark or {})})


def _export(options: ExportOptions) -> None:
    """Export a checkpoint that becomes one file.

    Raises:
        InputError: it encodes queries and documents with different models.
    """
    if export_model(options).partner is not None:
        raise InputError(
            f"{options.model_name} encodes queries and documents by different models, and a release is of one file",
            'add route = "query" or "document" to [export], and release each',
        )


def _check_license(config: ReleaseConfig, model_license: License) -> None:
    """Refuse a checkpoint whose license is not among the allowed ones.

    Raises:
        GateError: it is not.
    """
    if config.allowed_licenses and not model_license.is_among(config.allowed_licenses):
        hint = (
            "add it to allowed_licenses" if model_license.is_known else "state it in the checkpoint's card: license: ID"
        )
        raise GateError(
            f"the license is {model_license}, and {config.path} allows {', '.join(config.allowed_licenses)}",
            f"no release was written; {hint}",
        )


def _model(folder: Path, name: str) -> ReleasedModel:
    summary = summarize_model(folder / name)
    inputs = {graph_input.name: graph_input.dtype for graph_input in summary.inputs}
    return ReleasedModel(name, summary.num_parameters, inputs, verified_steps(ModelFile.open(folder / name).steps))


def _evaluate(config: ReleaseConfig, precision: str, path: Path, work: Path) -> Iterator[EvaluationResult]:
    """Measure a model on the test collection, and compare it with the first precision, or that with the last release.

    Raises:
        GateError: a gate is met.
    """
    if config.data is None:
        return
    if precision == config.precisions[0]:
        base = _last(config)
        name = "" if base is None else f"{base.parent.name}/{base.name}"  # files of two releases have one name
    else:
        base = path.with_name(name := file_name(config, config.precisions[0]))
    gates = config.evaluate.get("fail_if", ())
    own = {
        "against": None if base is None else str(base),
        "fail_if": tuple(gate for gate in gates if base is not None or not needs_base(parse_gate(gate))),
        "model_name": str(work / config.name),
        "cache": work / ".vectors",
    }
    options = EvaluateOptions(**{"provider": config.provider, **config.evaluate, **own})
    report = evaluate_model(path, config.data, options)
    if met := [gate.text for gate in report.gates if gate.met]:
        raise GateError(f"{precision} is not good enough: {'; '.join(met)}", "no release was written")
    yield EvaluationResult(
        config.data.name,
        report.split,
        report.num_documents,
        report.num_queries,
        report.measures,
        name,
        {} if report.against is None else report.against.measures,
    )


def _last(config: ReleaseConfig) -> Path | None:
    """Return the first file of the last release; None without one."""
    if config.last is None:
        return None
    facts = read_facts(config.last)
    return config.last / facts.models[0].path if facts.models else None


def _time(config: ReleaseConfig, path: Path) -> Iterator[LatencyRow]:
    if config.benchmark is None:
        return
    report = benchmark(path, _benchmark_options(config))
    for result in report.results:
        yield LatencyRow(
            processor_name(),
            report.threads,
            result.batch_size,
            result.sequence_length,
            result.latency_ms.p50,
            result.latency_ms.p95,
            result.throughput_samples_per_s,
        )


def _files(config: ReleaseConfig, folder: Path) -> Iterator[ReleasedFile]:
    """Describe the files of a folder."""
    precisions = {
        part.name: precision
        for precision in config.precisions
        for part in ModelFile.open(folder / file_name(config, precision)).files
    }
    mains = {file_name(config, precision) for precision in config.precisions}
    for path, source in files_in(folder).items():
        top, _, inside = path.partition("/")
        target = top if inside and top in config.targets else ""
        role = _role(source.name) if path in mains or path not in precisions else WEIGHTS
        yield ReleasedFile(path, file_sha256(source), source.stat().st_size, role, precisions.get(path, ""), target)


def _role(name: str) -> str:
    if name.endswith(".onnx"):
        return MODEL
    if ".onnx.data" in name or name.endswith(".onnx_data"):
        return WEIGHTS
    return TOKENIZER if name.startswith(_TOKENIZER_FILES) else SIDECAR


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files below a folder, by their path in it; hidden files, such as git's or the hub's, are left out."""
    files = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            files[inside.as_posix()] = path
    return files
