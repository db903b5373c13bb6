"""What a report says of machine, settings and model, so that another report can tell whether it compares."""

from __future__ import annotations

import hashlib
import platform

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkEnvironment, ModelIdentity
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import TASK_KEY
from onnxtool.reports import TensorInfo
from onnxtool.runtime.device_memory import DeviceMemory
from onnxtool.runtime.machine import installed_versions, processor_name
from onnxtool.runtime.session import Session, available_cores, disabled_optimizers

# Stamped by export, under the names that onnxruntime's tutorials use.
_SIZES = ("model_type", "num_layers", "hidden_size", "num_heads")
_SOURCE_KEY = "onnxtool.source"


def describe_environment(
    session: Session, options: BenchmarkOptions, load_average: float | None, memory: DeviceMemory | None
) -> BenchmarkEnvironment:
    """Describe the machine, and the session as it was opened."""
    return BenchmarkEnvironment(
        cpu=processor_name(),
        num_cores=available_cores(),
        gpu=memory.name if memory else "",
        platform=platform.platform(),
        python=platform.python_version(),
        versions=installed_versions(),
        load_average_before=load_average,
        load_average_after=None,
        intra_threads=session.intra_threads,
        inter_threads=session.inter_threads,
        io_binding=options.io_binding,
        disabled_optimizers=tuple(disabled_optimizers(session.model)),
    )


def identify_model(model: ModelFile, inputs_sha256: str) -> ModelIdentity:
    """Say what tells this model, and what it runs on, from others."""
    return ModelIdentity(
        size_bytes=model.size_bytes,
        sha256=sha256_of(model),
        inputs={info.name: _type_of(info) for info in model.structure.inputs},
        outputs={info.name: _type_of(info) for info in model.structure.outputs},
        sizes={name: model.metadata[name] for name in _SIZES if name in model.metadata},
        task=model.metadata.get(TASK_KEY, ""),
        source=model.metadata.get(_SOURCE_KEY, ""),
        inputs_sha256=inputs_sha256,
    )


def sha256_of(model: ModelFile) -> str:
    """Hash the graph file and its external data, in the order of their names."""
    digest = hashlib.sha256()
    for path in (model.path, *(model.path.parent / location for location in model.external_locations)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _type_of(info: TensorInfo) -> str:
    """Write dtype and shape, e.g. `float32 [?, ?, 384]`; what an exporter calls a dynamic axis does not matter."""
    sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in info.shape)
    return f"{info.dtype} [{sizes}]"
