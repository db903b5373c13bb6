"""Make a release: run the steps whose inputs changed, and write a folder that is complete, or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onnxtool.benchmarking import BenchmarkOptions, benchmark
from onnxtool.encoding.manifest import file_sha256
from onnxtool.encoding.sources import find_sources
from onnxtool.errors import GateError, InputError, OutputExistsError
from onnxtool.evaluation import EvaluateOptions, evaluate_model
from onnxtool.evaluation.collection import open_collection
from onnxtool.evaluation.measures import Difference, Measure
from onnxtool.evaluation.run import check_evaluation
from onnxtool.export import ExportOptions, export_model
from onnxtool.export.target import layout
from onnxtool.export.targets import find_target
from onnxtool.model_file import ModelFile, staged
from onnxtool.model_file.licenses import License
from onnxtool.model_file.metadata import HEAD_KEY, TASK_KEY, WEIGHTS_KEY
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.release.bom import BOM_NAME, bom_text
from onnxtool.release.card import CARD_NAME, card_text
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
    VerifiedStep,
    facts_text,
    read_facts,
)
from onnxtool.release.report import ReleaseReport, StepReport
from onnxtool.release.signing import require_library, sign
from onnxtool.release.store import Made, Step, Store, digest_of, files_in
from onnxtool.reports import Json, to_json
from onnxtool.runtime.machine import processor_name
from onnxtool.stats import summarize_model
from onnxtool.summary.gates import parse_gate

_PACKAGES = ("onnxtool", "onnxruntime", "onnx", "torch", "transformers", "numpy", "tokenizers")
_QUANTIZED_ONLY = ("activations", "cpu", "max_error", "calibration")
_QUANTIZED = ("int8", "int4")
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "spiece", "added_tokens", "sentencepiece")


@checked
def make_release(config: ReleaseConfig, *, force: bool = False, dry_run: bool = False) -> ReleaseReport:
    """Export, optimize, verify and evaluate what changed since the last call, and write the folder of the release.

    Args:
        config: what it is made of.
        force: whether to replace a release that is there.
        dry_run: say which steps would run and why, and run none.

    Raises:
        GateError: a gate on quality is met, or the license is none of those that are allowed; no folder is written.
        OutputExistsError: the folder is there, and is no release or `force` is not set.
        OnnxtoolError: a step failed.
    """
    run = _Release(config, dry_run=dry_run)
    _check_output(config.output, force=force or dry_run)
    _check_inputs(config)
    run.run_steps()
    if dry_run:
        return run.report("")
    facts = run.facts()
    _write(config, facts, run.sources)
    return run.report(str(config.output), facts)


class _Release:
    """A release under way.

    Attributes:
        sources: path in the release to file, of all that goes into it but what is made of the record.
    """

    def __init__(self, config: ReleaseConfig, *, dry_run: bool) -> None:
        self.config = config
        self.sources: dict[str, Path] = {}
        self._store = Store(config.work)
        self._dry_run = dry_run
        self._steps: list[StepReport] = []
        self._waiting = False  # for a step that did not run
        self._made: dict[str, Made] = {}

    def run_steps(self) -> None:
        """Run what has to run, in order; with `dry_run`, find out what that is."""
        config = self.config
        exported = self._run("export", self._export)
        if exported is not None:
            self._license(exported)  # before the steps that take minutes
        for precision in config.precisions:
            self._run(f"optimize {precision}", lambda one=precision: self._optimize(one, exported))
        if config.data is not None:
            for precision in config.precisions:
                self._run(f"evaluate {precision}", lambda one=precision: self._evaluate(one, exported))
        if config.benchmark is not None:
            for precision in config.precisions:
                self._run(f"benchmark {precision}", lambda one=precision: self._benchmark(one))
        for target in config.targets:
            self._run(f"target {target}", lambda one=target: self._target(one))

    def _run(self, name: str, step_of: Any) -> Made | None:
        import time

        if self._waiting:  # what it depends on is not there yet
            self._steps.append(StepReport(name, "to run", "a step before it runs", 0.0))
            return None
        step: Step = step_of()
        reason = self._store.reason(step)
        if self._dry_run:
            self._steps.append(StepReport(name, "to run" if reason else "unchanged", reason, 0.0))
            self._waiting = bool(reason) and not name.startswith(("evaluate", "benchmark", "target"))
            return None if reason else self._store.run(step)
        start = time.perf_counter()
        made = self._store.run(step)
        self._made[name] = made
        seconds = time.perf_counter() - start
        self._steps.append(StepReport(name, "ran" if made.reason else "unchanged", made.reason, seconds))
        return made

    def _file(self, precision: str) -> str:
        first = precision == self.config.precisions[0]
        return f"{self.config.name}{'' if first else f'-{precision}'}.onnx"

    def _of_export(self) -> dict[str, Json]:
        """What an export depends on."""
        config = self.config
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
        return {"checkpoint": content, "options": to_json(config.export), "versions": to_json(_versions())}

    def _export(self) -> Step:
        config = self.config

        def make(folder: Path) -> Json:
            options = ExportOptions(
                config.checkpoint, output=folder / f"{config.name}.onnx", revision=config.revision, **config.export
            )
            _export_one(options)
            return None

        return Step("export", {**self._of_export(), "name": config.name}, make)

    def _license(self, exported: Made) -> License:
        """Return the license of the checkpoint.

        Raises:
            GateError: it is none of those that are allowed.
        """
        config = self.config
        found = License.of_file(ModelFile.open(exported.folder / f"{config.name}.onnx").metadata)
        if config.allowed_licenses and not found.is_among(config.allowed_licenses):
            hint = "add it to allowed_licenses" if found.is_known else "state it in the checkpoint's card: license: ID"
            raise GateError(
                f"the license is {found}, and {config.path} allows {', '.join(config.allowed_licenses)}",
                f"no release was written; {hint}",
            )
        return found

    def _target(self, name: str) -> Step:
        config, target = self.config, find_target(name)

        def make(folder: Path) -> Json:
            output = folder if target.reads_folder else folder / f"{config.name}.onnx"
            options = ExportOptions(
                config.checkpoint,
                output=output,
                target=name,
                revision=config.revision,
                **{"force": True, **config.export},
            )
            _export_one(options)
            return str(layout(target, output, config.name).graph.relative_to(folder))

        return Step(f"target {name}", {**self._of_export(), "target": name, "name": config.name}, make)

    def _optimize(self, precision: str, exported: Made | None) -> Step:
        assert exported is not None  # noqa: S101  it waits else
        config = self.config
        chosen = {
            name: value
            for name, value in config.optimize.items()
            if precision in _QUANTIZED or name not in _QUANTIZED_ONLY
        }
        if precision != "int8":
            chosen = {name: value for name, value in chosen.items() if name not in ("activations", "cpu")}
        source = exported.folder / f"{config.name}.onnx"

        def make(folder: Path) -> Json:
            options = OptimizeOptions(
                source,
                output=folder / self._file(precision),
                provider=config.provider,
                precision=precision,
                timing=False,
                **chosen,
            )
            optimize_model(options)
            return None

        inputs = {
            "export": to_json(exported.files),
            "options": to_json(_with_digests(chosen)),
            "provider": config.provider,
            "versions": to_json(_versions()),
        }
        return Step(f"optimize {precision}", inputs, make)

    def _evaluate(self, precision: str, exported: Made | None) -> Step:
        config = self.config
        assert exported is not None  # noqa: S101  it waits else
        assert config.data is not None  # noqa: S101
        path = self._made_or_kept(f"optimize {precision}") / self._file(precision)
        base = self._base(precision)
        asked: dict[str, Any] = {"provider": config.provider, **config.evaluate}
        gates = tuple(asked.get("fail_if", ()))
        if base is None:
            gates = tuple(gate for gate in gates if not parse_gate(gate).sign)
        collection = open_collection(config.data, asked.get("split", "test"))
        sources, _ = find_sources(collection.corpus)
        texts = {str(place): one for place, one in enumerate((*collection.files, *(one.path for one in sources)))}

        def make(_folder: Path) -> Json:
            options = EvaluateOptions(
                **{
                    **asked,
                    "against": None if base is None else str(base),
                    "fail_if": gates,
                    "model_name": str(exported.folder / config.name),
                    "cache": config.work / "vectors",
                }
            )
            report = evaluate_model(path, config.data or "", options)
            if met := [gate.text for gate in report.gates if gate.met]:
                raise GateError(f"{precision} is not good enough: {'; '.join(met)}", "no release was written")
            against = report.against
            return to_json(
                {
                    "split": report.split,
                    "num_documents": report.num_documents,
                    "num_queries": report.num_queries,
                    "measures": report.measures,
                    "differences": {} if against is None else against.measures,
                    "base": "" if base is None else base.name,
                }
            )

        inputs = {
            "model": file_sha256(path),
            "base": "" if base is None else file_sha256(base),
            "collection": digest_of(texts),
            "options": to_json({**asked, "fail_if": gates}),
            "versions": to_json(_versions()),
        }
        return Step(f"evaluate {precision}", inputs, make)

    def _base(self, precision: str) -> Path | None:
        """Return what a file is compared with: the first precision, and that with the last release."""
        first = self.config.precisions[0]
        if precision != first:
            return self._made_or_kept(f"optimize {first}") / self._file(first)
        if self.config.last is None:
            return None
        facts = read_facts(self.config.last)
        return self.config.last / facts.models[0].path if facts.models else None

    def _benchmark(self, precision: str) -> Step:
        config = self.config
        path = self._made_or_kept(f"optimize {precision}") / self._file(precision)
        asked: dict[str, Any] = {"provider": config.provider, **(config.benchmark or {})}

        def make(_folder: Path) -> Json:
            report = benchmark(path, BenchmarkOptions(**asked))
            return to_json(
                [
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
            )

        inputs = {"model": file_sha256(path), "options": to_json(asked), "processor": processor_name()}
        return Step(f"benchmark {precision}", inputs, make)

    def _made_or_kept(self, name: str) -> Path:
        return self._store.folder / name.replace(" ", "-") / "files"

    def facts(self) -> ReleaseFacts:
        """Gather what is known once all steps are done, and `sources`.

        Raises:
            GateError: the license is none of those that are allowed.
        """
        config = self.config
        files: list[ReleasedFile] = []
        models: list[ReleasedModel] = []

        def add(path: str, source: Path, role: str, precision: str = "", target: str = "") -> None:
            self.sources[path] = source
            files.append(ReleasedFile(path, file_sha256(source), source.stat().st_size, role, precision, target))

        for precision in config.precisions:
            made = self._made[f"optimize {precision}"]
            name = self._file(precision)
            for inside in made.files:
                add(inside, made.folder / inside, MODEL if inside == name else WEIGHTS, precision)
            models.append(self._model(name, made.folder / name, precision))
        exported = self._made["export"]
        for inside in exported.files:
            if inside.startswith(f"{config.name}/"):
                add(inside, exported.folder / inside, _role(inside))
        for target in config.targets:
            made = self._made[f"target {target}"]
            for inside in made.files:
                path = f"{target}/{inside}"
                is_model = inside.endswith(".onnx")
                is_weights = Path(inside).name.startswith(f"{Path(made.result).name}.data")
                add(
                    path,
                    made.folder / inside,
                    MODEL if is_model else WEIGHTS if is_weights else _role(inside),
                    "",
                    target,
                )
                if is_model:
                    models.append(_model(path, made.folder / inside))
        metadata = ModelFile.open(exported.folder / f"{config.name}.onnx").metadata
        is_local = Path(config.checkpoint).is_dir()
        provenance = Provenance(
            source=metadata.get("onnxtool.source", ""),
            is_on_hub=not is_local,
            revision=metadata.get("onnxtool.revision", ""),
            weights_sha256=metadata.get(WEIGHTS_KEY, ""),
            model_type=metadata.get("model_type", ""),
            architecture=metadata.get("onnxtool.architecture", ""),
            task=metadata.get(TASK_KEY, ""),
            head=metadata.get(HEAD_KEY, ""),
            date=metadata.get("onnxtool.date", ""),
        )
        return ReleaseFacts(
            name=config.name,
            provenance=provenance,
            license=self._license(exported),
            command=f"onnxtool release --config {config.path.name}",
            versions=_versions(),
            files=tuple(sorted(files, key=lambda file: file.path)),
            models=tuple(models),
        )

    def _model(self, name: str, path: Path, precision: str) -> ReleasedModel:
        model = _model(name, path)
        config = self.config
        if config.data is not None:
            found = self._made[f"evaluate {precision}"].result
            result = EvaluationResult(
                collection=config.data.name,
                split=found["split"],
                num_documents=found["num_documents"],
                num_queries=found["num_queries"],
                measures={key: Measure(**value) for key, value in found["measures"].items()},
                base=found["base"],
                differences={key: Difference(**value) for key, value in found["differences"].items()},
            )
            model = replace(model, evaluations=(result,))
        if config.benchmark is not None:
            rows = self._made[f"benchmark {precision}"].result
            model = replace(model, latency=tuple(LatencyRow(**row) for row in rows))
        return model

    def report(self, output: str, facts: ReleaseFacts | None = None) -> ReleaseReport:
        """Sum up."""
        return ReleaseReport(
            name=self.config.name,
            output=output,
            steps=tuple(self._steps),
            license="" if facts is None else str(facts.license),
            num_files=0 if facts is None else len(facts.files) + 3,
            size_bytes=0 if facts is None else sum(file.size_bytes for file in facts.files),
            models=() if facts is None else facts.models,
            signed=facts is not None and self.config.is_signed,
            notes=() if facts is None else tuple(_notes(self.config, facts)),
        )


def verified_steps(metadata_steps: tuple[dict[str, Json], ...]) -> tuple[VerifiedStep, ...]:
    """Return how the steps of a file were verified, as its stamps say."""
    names = {
        "reference": "reference",
        "num_cases": "cases",
        "max_abs_error": "max_abs_error",
        "atol": "atol",
        "rtol": "rtol",
        "cosine_min": "cosine_min",
        "cosine_required": "cosine_required",
        "provider": "verified_on",
    }
    return tuple(
        VerifiedStep(
            step=str(step["step"]),
            error=step.get("error"),  # type: ignore[arg-type]  # JSON
            **{field: step[key] for field, key in names.items()},  # type: ignore[arg-type]
        )
        for step in metadata_steps
        if step.get("verified")
    )


def _export_one(options: ExportOptions) -> None:
    """Export a checkpoint that becomes one file.

    Raises:
        InputError: it encodes queries and documents by different models.
    """
    if export_model(options).partner is not None:
        raise InputError(
            f"{options.model_name} encodes queries and documents by different models, and a release is of one file",
            'add route = "query" or "document" to [export], and release each',
        )


def _model(name: str, path: Path) -> ReleasedModel:
    file = ModelFile.open(path)
    return ReleasedModel(name, summarize_model(path).num_parameters, verified_steps(file.steps))


def _role(name: str) -> str:
    return TOKENIZER if Path(name).name.startswith(_TOKENIZER_FILES) else SIDECAR


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        for package in (name, f"{name}-gpu"):
            try:
                found[name] = version(package)
            except PackageNotFoundError:
                continue
    return found


def _with_digests(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the contents of files in place of their paths."""
    return {
        name: file_sha256(value) if isinstance(value, Path) and value.is_file() else value
        for name, value in options.items()
    }


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


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse a folder that is not a release's, and one that is where `force` is not set.

    Raises:
        OutputExistsError: it is one.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / FACTS_NAME).is_file():
        raise OutputExistsError(f"{output} is there, and is no release", "name another output in the configuration")
    if not force:
        raise OutputExistsError(f"the release {output} is there", "pass --force to replace it")


def _check_inputs(config: ReleaseConfig) -> None:
    """Refuse what a later step would refuse, before the first one takes its time.

    Raises:
        OnnxtoolError: the key, the last release, the collection, a measure or a gate is wrong.
    """
    if config.is_signed:
        require_library()
        _signer(config)
    if config.last is not None:
        read_facts(config.last)
    if config.data is not None:
        base = config.precisions[0]  # of gates that are relative
        check_evaluation(None, config.data, EvaluateOptions(**{**config.evaluate, "against": base}))


def _write(config: ReleaseConfig, facts: ReleaseFacts, sources: Mapping[str, Path]) -> None:
    """Write the folder as a whole: whatever stops it, the old release stands or the new one does."""
    output = config.output
    output.mkdir(parents=True, exist_ok=True)
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
    """Return what `sign` signs with; secrets come from the environment variables that the configuration names.

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
