"""An earlier JSON report that gates refer to; refused if its figures are not comparable.

With another checkpoint, machine, provider, number of threads or kind of inputs, figures are not comparable, so each is
an error, not a warning. Other package versions may be what a gate is about; they are noted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult
from onnxtool.benchmarking.samples import TimedShape
from onnxtool.errors import GateError, ModelFileError, shorten
from onnxtool.model_file import ModelFile
from onnxtool.reading import read_json
from onnxtool.reports import Json, from_json, to_json

_REMAKE = "make a new one: onnxtool infer --benchmark … --format json --output baseline.json"
_HERE = "measure a baseline of the same kind here, or write the gate without a sign"


@dataclass(frozen=True)
class Baseline:
    """An earlier report.

    Attributes:
        figures: figures of the whole run.
        shapes: shapes by name, e.g. `8x128`.
        versions: versions by package.
    """

    path: Path
    figures: dict[str, Json]
    shapes: Mapping[str, TimedShape]
    versions: Mapping[str, Json]

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read the report at `path`.

        Raises:
            GateError: the file is missing, or is not a benchmark report with raw latencies.
        """
        try:
            document = read_json(path)
        except OSError as error:
            raise GateError(f"cannot read the baseline {path}: {error.strerror}", _REMAKE) from error
        except ValueError as error:
            raise GateError(f"the baseline {path} is not JSON: {error}", _REMAKE) from error
        try:
            document = from_json(dict[str, Any], document)
            shapes = dict(_shape(result) for result in from_json(tuple[Any, ...], document["results"], "results"))
            environment = from_json(dict[str, Any], document["environment"], "environment")
            versions = from_json(dict[str, Any], environment["versions"], "versions")
        except (KeyError, TypeError, ValueError) as error:
            raise GateError(f"the baseline {path} is not a benchmark report: {error}", _REMAKE) from error
        return cls(path, {name: value for name, value in document.items() if name != "results"}, shapes, versions)

    def check(self, now: BenchmarkReport) -> None:
        """Refuse a baseline that was measured under other conditions.

        Raises:
            GateError: provider, threads, inputs, machine or checkpoint differ.
        """
        for what, theirs, ours in self._conditions(now):
            if theirs != ours:
                raise GateError(
                    f"the baseline {self.path} is of another {what}: {_short(theirs)}, and this is {_short(ours)}",
                    _HERE,
                )

    def _conditions(self, now: BenchmarkReport) -> Iterator[tuple[str, Json, Json]]:
        environment, identity = self.figures.get("environment"), self.figures.get("identity")
        if not isinstance(environment, dict) or not isinstance(identity, dict):
            raise GateError(f"the baseline {self.path} does not say what it was measured on", _REMAKE)
        ours, model = now.environment, now.identity
        yield "provider", self.figures.get("provider"), now.provider
        yield "machine", environment.get("cpu"), ours.cpu
        yield "number of cores", environment.get("num_cores"), ours.num_cores
        yield "device", environment.get("gpu"), ours.gpu
        yield "number of threads", self.figures.get("threads"), now.threads
        yield "number of inter-op threads", environment.get("inter_threads"), ours.inter_threads
        yield "use of IOBinding", environment.get("io_binding"), ours.io_binding
        yield "kind of inputs", self.figures.get("inputs"), now.inputs
        yield "set of texts", identity.get("inputs_sha256"), model.inputs_sha256
        yield "model, by its inputs", identity.get("inputs"), to_json(model.inputs)
        yield "model, by its outputs", identity.get("outputs"), to_json(model.outputs)
        theirs, ours_sizes = identity.get("sizes"), model.sizes
        for name, size in theirs.items() if isinstance(theirs, dict) else ():
            yield f"model, by its {name}", size, ours_sizes.get(name, size)  # a file of another tool says nothing
        if identity.get("task") and model.task:
            yield "model, by its task", identity.get("task"), model.task

    def shape(self, name: str) -> TimedShape:
        """Return the shape of that name.

        Raises:
            GateError: the baseline has no such shape.
        """
        if name not in self.shapes:
            raise GateError(
                f"the baseline {self.path} has no shape {name}; it has {', '.join(self.shapes)}",
                "time the same --batch_size and --sequence_length, or make a new baseline",
            )
        return self.shapes[name]

    def model_again(self, now: BenchmarkReport) -> Path | None:
        """Return the measured file if it still exists and would be run in the same way.

        It can then be timed again, in turns with the model, so that machine drift cancels out. This is not done if
        other package versions are installed, because their effect has to show.
        """
        identity = self.figures.get("identity")
        sha256 = identity.get("sha256") if isinstance(identity, dict) else None
        name = self.figures.get("model")
        if not isinstance(name, str) or not isinstance(sha256, str) or dict(self.versions) != now.environment.versions:
            return None
        path = Path(name)
        return path if path.suffix == ".onnx" and path.is_file() and _hash_of(path) == sha256 else None

    def notes(self, now: BenchmarkReport, results: Sequence[BenchmarkResult]) -> Iterator[str]:
        """Report how the measured medians compare, and the changes since then that a gate may be about."""
        for result in results:
            p50, base = result.latency_ms.p50, float(np.median(np.concatenate(self.shape(result.name).blocks)))
            change = f"{p50 / base - 1.0:+.1%}"
            yield f"{result.name}: p50 is {p50:.2f} ms, and was {base:.2f} ms in the baseline ({change}, as measured)"
        for name, version in now.environment.versions.items():
            if self.versions.get(name) not in (version, None):
                yield f"{name} is {version}, and was {self.versions[name]} in the baseline"
        identity = self.figures.get("identity")
        source = identity.get("source") if isinstance(identity, dict) else None
        if source and source != now.identity.source:
            yield f"the model was exported from {now.identity.source!r}, that of the baseline from {source!r}"


def _hash_of(path: Path) -> str:
    """Hash the model at `path`; an empty string if it cannot be read."""
    try:
        return sha256_of(ModelFile.open(path))
    except (ModelFileError, OSError):
        return ""


def sha256_of(model: ModelFile) -> str:
    """Hash the graph file and its external data, sorted by name."""
    digest = hashlib.sha256()
    for path in (model.path, *(model.path.parent / location for location in model.external_locations)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _shape(value: Json) -> tuple[str, TimedShape]:
    result = from_json(dict[str, Any], value, "a result")
    latencies = from_json(tuple[float, ...], result["latencies_ms"], "latencies_ms")
    sizes = from_json(tuple[int, ...], result["block_sizes"], "block_sizes")
    if not latencies or len(latencies) != sum(sizes) or min(sizes) < 1 or min(latencies) <= 0:
        raise ValueError("its raw latencies are not whole")
    blocks = tuple(np.split(np.asarray(latencies), np.cumsum(sizes)[:-1]))
    name = f"{result['batch_size']}x{'texts' if result.get('tokens') else result['sequence_length']}"
    return name, TimedShape(value, blocks)


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(shorten(text, 80))
