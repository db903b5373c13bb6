"""Describe the artifacts for a program on a target: JavaScript, or a phone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onnxtool.errors import ArtifactError
from onnxtool.reports import TensorInfo
from onnxtool.runtime.quiet import quiet
from onnxtool.training.api.session import BLOCK_SIZE
from onnxtool.training.artifacts.report import ArtifactReport, PhoneBuild
from onnxtool.training.checkpoints import Array, Checkpoint
from onnxtool.training.options import TrainingTarget
from onnxtool.version import __version__

DESCRIPTION = "training.json"
OPERATORS = "required_operators.config"
VERSION = 1
PHONES = (TrainingTarget.android, TrainingTarget.ios)
# Artifacts for another target, or for none, remove these.
OBSOLETE = (DESCRIPTION, OPERATORS)
# The tensor types of onnxruntime in JavaScript; NumPy calls strings `object`.
_DTYPES = frozenset(
    ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


def target_files(target: TrainingTarget) -> tuple[str, ...]:
    """Return the file names for a target."""
    return (DESCRIPTION, OPERATORS) if target in PHONES else (DESCRIPTION,)


def write_target_files(
    target: TrainingTarget, report: ArtifactReport, checkpoint: Checkpoint, folder: Path
) -> list[Path]:
    """Write the target's files next to the artifacts in `folder`, and return their paths.

    Raises:
        ArtifactError: the target cannot read the artifacts.
    """
    data = sorted(folder.glob("*.data"))
    if data:
        raise ArtifactError(
            f"{data[0].name.removesuffix('.data')} has constants of more than 1.9 GB, which no {target} can hold",
            "train or freeze them with --train and --freeze, so that the checkpoint has them",
        )
    document = _describe(report, checkpoint)
    (folder / DESCRIPTION).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in target_files(target)]


def describe_build(models: Sequence[Path], folder: Path) -> PhoneBuild:
    """Write the operators and types of the `.ort` files in `folder` to one file there, and describe the build."""
    with quiet():
        from onnxruntime.tools.ort_format_model import create_config_from_models
        from onnxruntime.tools.reduced_build_config_parser import parse_config

        path = folder / OPERATORS
        create_config_from_models(models, path, True)
        # The file mentions the temporary folder.
        path.write_text(path.read_text(encoding="utf-8").replace(f"{folder}{os.sep}", ""), encoding="utf-8")
        found, _types = parse_config(str(path))
    operators = {
        domain: {int(version): tuple(sorted(names)) for version, names in sorted(sets.items())}
        for domain, sets in sorted(found.items())
    }
    return PhoneBuild(OPERATORS, operators)


def _describe(report: ArtifactReport, checkpoint: Checkpoint) -> dict[str, object]:
    """Return the content of training.json."""
    return {
        "version": VERSION,
        "loss": report.outputs[0].name,
        "loss_function": report.loss,
        "optimizer": report.optimizer or None,
        "block_size": BLOCK_SIZE,
        "schedule": {"name": "constant"},
        "inputs": _values(report.inputs),
        "outputs": _values(report.outputs),
        "labels": report.labels,
        "parameters": {"trained": _arrays(checkpoint.trainable), "frozen": _arrays(checkpoint.frozen)},
        "made_with": {"onnxtool": __version__, "opset": report.opset, "onnxruntime": ">=1.17"},
    }


def _values(tensors: Iterable[TensorInfo]) -> list[dict[str, object]]:
    return [{"name": tensor.name, "dtype": _dtype(tensor), "shape": list(tensor.shape)} for tensor in tensors]


def _arrays(arrays: Mapping[str, Array]) -> list[dict[str, object]]:
    return _values(TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items())


def _dtype(tensor: TensorInfo) -> str:
    if tensor.dtype in _DTYPES:
        return tensor.dtype
    if tensor.dtype == "object":
        return "string"
    raise ArtifactError(
        f"{tensor.name} is {tensor.dtype}, which onnxruntime has no tensors of in JavaScript", "convert it to float32"
    )
