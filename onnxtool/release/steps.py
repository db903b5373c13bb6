"""The steps of a release as data: inputs from other steps, dependencies, and actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtool.benchmarking import BenchmarkOptions, benchmark
from onnxtool.encoding.manifest import file_sha256
from onnxtool.encoding.sources import find_sources
from onnxtool.errors import GateError, InputError
from onnxtool.evaluation import EvaluateOptions, evaluate_model
from onnxtool.evaluation.collection import open_collection
from onnxtool.evaluation.run import needs_base
from onnxtool.export import ExportOptions, export_model
from onnxtool.export.target import find_target, layout
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import License
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.release.config import ReleaseConfig
from onnxtool.release.facts import LatencyRow, read_facts
from onnxtool.release.store import Made, Task, digest_of, files_in
from onnxtool.reports import Json, to_json
from onnxtool.runtime.machine import processor_name
from onnxtool.summary.gates import parse_gate
from onnxtool.version import __version__, installed

EXPORT = "export"

_PACKAGES = ("onnxruntime", "onnx", "torch", "transformers", "numpy", "tokenizers")
# Options of [optimize] by the precisions that accept them; all others apply to every precision.
_TAKEN_BY = {
    "activations": ("int8",),
    "cpu": ("int8",),
    "max_error": ("int8", "int4"),
    "calibration": ("int8", "int4"),
}


@dataclass(frozen=True)
class Step:
    """A step of a release.

    Attributes:
        reads: names of the steps whose results it reads.
        prepare: makes the task from these results, by name.
        check: refuses a bad result before later steps start.
    """

    name: str
    reads: tuple[str, ...]
    prepare: Callable[[Mapping[str, Made]], Task]
    check: Callable[[Made], object] = lambda _made: None


def release_steps(config: ReleaseConfig) -> list[Step]:
    """Return the steps of a release, each after the steps that it reads."""
    steps = [_export(config), *(_optimize(config, precision) for precision in config.precisions)]
    if config.data is not None:
        steps += [_evaluate(config, precision, config.data) for precision in config.precisions]
    if config.benchmark is not None:
        steps += [_benchmark(config, precision, config.benchmark) for precision in config.precisions]
    return [*steps, *(_target(config, target) for target in config.targets)]


def file_name(config: ReleaseConfig, precision: str) -> str:
    """Return the name of the plain file in a precision."""
    return f"{config.name}{'' if precision == config.precisions[0] else f'-{precision}'}.onnx"


def exported_file(config: ReleaseConfig, exported: Made) -> ModelFile:
    """Open the file that the step `export` made."""
    return ModelFile.open(exported.folder / f"{config.name}.onnx")


def checked_license(config: ReleaseConfig, exported: Made) -> License:
    """Return the license of the checkpoint.

    Raises:
        GateError: it is not among the allowed licenses.
    """
    found = License.of_file(exported_file(config, exported).metadata)
    if config.allowed_licenses and not found.is_among(config.allowed_licenses):
        hint = "add it to allowed_licenses" if found.is_known else "state it in the checkpoint's card: license: ID"
        raise GateError(
            f"the license is {found}, and {config.path} allows {', '.join(config.allowed_licenses)}",
            f"no release was written; {hint}",
        )
    return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the contents of the files."""
    found = {name: installed(f"{name}-gpu") or installed(name) for name in _PACKAGES}
    return {"onnxtool": __version__, **{name: version for name, version in found.items() if version}}


def _export(config: ReleaseConfig) -> Step:
    def make(folder: Path) -> Json:
        _export_one(
            ExportOptions(
                config.checkpoint, output=folder / f"{config.name}.onnx", revision=config.revision, **config.export
            )
        )
        return None

    return Step(
        EXPORT, (), lambda _made: Task(_of_checkpoint(config), make), lambda made: checked_license(config, made)
    )


def _target(config: ReleaseConfig, name: str) -> Step:
    target = find_target(name)

    def make(folder: Path) -> Json:
        output = folder if target.reads_folder else folder / f"{config.name}.onnx"
        asked = {"force": True, **config.export}
        _export_one(ExportOptions(config.checkpoint, output=output, target=name, revision=config.revision, **asked))
        return str(layout(target, output, config.name).graph.relative_to(folder))

    return Step(f"target {name}", (), lambda _made: Task({**_of_checkpoint(config), "target": name}, make))


def _of_checkpoint(config: ReleaseConfig) -> dict[str, Json]:
    """Return the inputs of an export."""
    folder = Path(config.checkpoint)
    if folder.is_dir():
        content: Json = digest_of(files_in(folder))
    elif config.revision is None:
        raise InputError(
            f"{config.path} names {config.checkpoint}, and no commit of it",
            'add revision = "COMMIT" at its top: a release is made from one state of a checkpoint',
        )
    else:
        content = f"{config.checkpoint}@{config.revision}"
    stated = {"checkpoint": content, "options": to_json(config.export), "name": config.name}
    return {**stated, "versions": to_json(versions())}


def _export_one(options: ExportOptions) -> None:
    """Export a checkpoint that becomes one file.

    Raises:
        InputError: it encodes queries and documents with different models.
    """
    if export_model(options).partner is not None:
        raise InputError(
            f"{options.model_name} encodes queries and documents by different models, and a release is of one file",
            'add route = "query" or "document" to [export], and release each',
        )


def _optimize(config: ReleaseConfig, precision: str) -> Step:
    chosen = {name: value for name, value in config.optimize.items() if precision in _TAKEN_BY.get(name, (precision,))}

    def prepare(made: Mapping[str, Made]) -> Task:
        exported = made[EXPORT]

        def make(folder: Path) -> Json:
            options = OptimizeOptions(
                exported.folder / f"{config.name}.onnx",
                output=folder / file_name(config, precision),
                provider=config.provider,
                precision=precision,
                timing=False,
                **chosen,
            )
            optimize_model(options)
            return None

        inputs = {
            "export": to_json(exported.files),
            "file": file_name(config, precision),
            "options": to_json(_with_digests(chosen)),
            "provider": config.provider,
            "versions": to_json(versions()),
        }
        return Task(inputs, make)

    return Step(f"optimize {precision}", (EXPORT,), prepare)


def _evaluate(config: ReleaseConfig, precision: str, data: Path) -> Step:
    first = config.precisions[0]
    asked: dict[str, Any] = {"provider": config.provider, **config.evaluate}

    def prepare(made: Mapping[str, Made]) -> Task:
        path = made[f"optimize {precision}"].folder / file_name(config, precision)
        base = _last(config)
        if precision != first:
            base = made[f"optimize {first}"].folder / file_name(config, first)
        # Files of two releases have one name.
        base_name = "" if base is None else base.name if precision != first else f"{base.parent.name}/{base.name}"
        gates = tuple(gate for gate in asked.get("fail_if", ()) if base is not None or not needs_base(parse_gate(gate)))
        collection = open_collection(data, asked.get("split", "test"))
        sources, _ = find_sources(collection.corpus)
        texts = {str(place): one for place, one in enumerate((*collection.files, *(one.path for one in sources)))}

        def make(_folder: Path) -> Json:
            own = {
                "against": None if base is None else str(base),
                "fail_if": gates,
                "model_name": str(made[EXPORT].folder / config.name),
                "cache": config.work / "vectors",
            }
            report = evaluate_model(path, data, EvaluateOptions(**{**asked, **own}))
            if met := [gate.text for gate in report.gates if gate.met]:
                raise GateError(f"{precision} is not good enough: {'; '.join(met)}", "no release was written")
            return to_json(
                {
                    "split": report.split,
                    "num_documents": report.num_documents,
                    "num_queries": report.num_queries,
                    "measures": report.measures,
                    "differences": {} if report.against is None else report.against.measures,
                    "base": base_name,
                }
            )

        inputs = {
            "model": file_sha256(path),
            "base": "" if base is None else f"{base_name} {file_sha256(base)}",
            "collection": digest_of(texts),
            "options": to_json({**asked, "fail_if": gates}),
            "versions": to_json(versions()),
        }
        return Task(inputs, make)

    return Step(f"evaluate {precision}", tuple({EXPORT, f"optimize {first}", f"optimize {precision}"}), prepare)


def _last(config: ReleaseConfig) -> Path | None:
    """Return the first file of the last release; None without one."""
    if config.last is None:
        return None
    facts = read_facts(config.last)
    return config.last / facts.models[0].path if facts.models else None


def _benchmark(config: ReleaseConfig, precision: str, options: Mapping[str, Any]) -> Step:
    asked: dict[str, Any] = {"provider": config.provider, **options}

    def prepare(made: Mapping[str, Made]) -> Task:
        path = made[f"optimize {precision}"].folder / file_name(config, precision)

        def make(_folder: Path) -> Json:
            report = benchmark(path, BenchmarkOptions(**asked))
            rows = [
                LatencyRow(
                    processor_name(),
                    report.threads,
                    one.batch_size,
                    one.sequence_length,
                    one.latency_ms.p50,
                    one.latency_ms.p95,
                    one.throughput_samples_per_s,
                )
                for one in report.results
            ]
            return to_json(rows)

        inputs = {"model": file_sha256(path), "options": to_json(asked), "processor": processor_name()}
        return Task(inputs, make)

    return Step(f"benchmark {precision}", (f"optimize {precision}",), prepare)


def _with_digests(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with file contents instead of paths."""
    return {
        name: file_sha256(value) if isinstance(value, Path) and value.is_file() else value
        for name, value in options.items()
    }
