"""The contents of a release: export, optimize, evaluate and time its models, in order, into one folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from onnxtool.benchmarking import BenchmarkOptions, benchmark
from onnxtool.encoding.manifest import file_sha256
from onnxtool.errors import GateError, InputError
from onnxtool.evaluation import EvaluateOptions, evaluate_model
from onnxtool.evaluation.run import needs_base
from onnxtool.export import ExportOptions, export_model
from onnxtool.export.targets import TARGETS
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import HEAD_KEY, TASK_KEY, WEIGHTS_KEY, License
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.options import BLOCKS, EIGHT_BITS, QUANTIZED
from onnxtool.options import Options
from onnxtool.progress import tell
from onnxtool.release.config import ReleaseConfig
from onnxtool.release.facts import (
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
    read_facts,
    verified_steps,
)
from onnxtool.release.variants import export_variants
from onnxtool.runtime.machine import processor_name
from onnxtool.stats import summarize_model
from onnxtool.summary.gates import parse_gate
from onnxtool.version import __version__, installed

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
    """Make the models of a release and the files beside them in `folder`, and return the record.

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
        versions=versions(),
        files=(files := tuple(_files(config, folder))),
        models=(*models, *(_model(folder, file.path) for file in files if file.target and file.role == MODEL)),
        signed=config.is_signed,
        inputs=inputs,
    )


def file_name(config: ReleaseConfig, precision: str) -> str:
    """Return the name of the plain file in a precision."""
    return f"{config.name}{'' if precision == config.precisions[0] else f'-{precision}'}.onnx"


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the contents of the files."""
    found = {name: installed(f"{name}-gpu") or installed(name) for name in _PACKAGES}
    return {"onnxtool": __version__, **{name: version for name, version in found.items() if version}}


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


def _check_license(config: ReleaseConfig, found: License) -> None:
    """Refuse a checkpoint whose license is not among the allowed ones.

    Raises:
        GateError: it is not.
    """
    if config.allowed_licenses and not found.is_among(config.allowed_licenses):
        hint = "add it to allowed_licenses" if found.is_known else "state it in the checkpoint's card: license: ID"
        raise GateError(
            f"the license is {found}, and {config.path} allows {', '.join(config.allowed_licenses)}",
            f"no release was written; {hint}",
        )


def _model(folder: Path, name: str) -> ReleasedModel:
    summary = summarize_model(folder / name)
    inputs = {one.name: one.dtype for one in summary.inputs}
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
    asked = EvaluateOptions(**{"provider": config.provider, **config.evaluate, **own})
    report = evaluate_model(path, config.data, asked)
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
    for one in report.results:
        yield LatencyRow(
            processor_name(),
            report.threads,
            one.batch_size,
            one.sequence_length,
            one.latency_ms.p50,
            one.latency_ms.p95,
            one.throughput_samples_per_s,
        )


def _files(config: ReleaseConfig, folder: Path) -> Iterator[ReleasedFile]:
    """Describe the files of a folder."""
    names = {file_name(config, precision): precision for precision in config.precisions}
    for path, source in files_in(folder).items():
        top, _, inside = path.partition("/")
        precision = next((names[one] for one in names if not inside and path.startswith(one)), "")
        target = top if inside and top in config.targets else ""
        yield ReleasedFile(path, file_sha256(source), source.stat().st_size, _role(source.name), precision, target)


def _role(name: str) -> str:
    if name.endswith(".onnx"):
        return MODEL
    if ".onnx.data" in name or name.endswith(".onnx_data"):
        return WEIGHTS
    return TOKENIZER if name.startswith(_TOKENIZER_FILES) else SIDECAR


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files below a folder, by their path in it; hidden files, such as git's or the hub's, are left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            found[inside.as_posix()] = path
    return found
