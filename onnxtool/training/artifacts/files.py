"""Write all artifacts to one folder: all files or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtool.errors import ArtifactError, OutputExistsError
from onnxtool.model_file import Staging, save_model, staged
from onnxtool.runtime.quiet import quiet, quiet_stdout_descriptor
from onnxtool.training.checkpoints.checkpoint import Checkpoint, write_checkpoint


@dataclass(frozen=True)
class Artifacts:
    """The models and the checkpoint to write.

    Attributes:
        models: the models by file name without extension, the training model first.
        folder: the folder of the forward model, whose external data they may still refer to.
        verify: gets the folder of the files before they are moved into place; if it raises, nothing is written.
    """

    models: Mapping[str, onnx.ModelProto]
    checkpoint: Checkpoint
    folder: Path | None
    verify: Callable[[Path], None] = lambda _folder: None


@dataclass(frozen=True)
class ArtifactFile:
    """A written file; the size includes its external data."""

    path: str
    size_bytes: int


def write_artifacts(
    artifacts: Artifacts, directory: Path, *, prefix: str, ort_format: bool, nominal: bool, force: bool
) -> tuple[ArtifactFile, ...]:
    """Write models and checkpoints to `directory`, with `prefix` before each name.

    Raises:
        OutputExistsError: a file exists and `force` is not set.
        OutputWriteError: they cannot be written.
        ArtifactError: the prefix leaves the directory.
    """
    if not prefix.isprintable():
        raise ArtifactError(f"the prefix {prefix!r} cannot begin the name of a file", "pass letters and digits")
    if Path(prefix).name != prefix and prefix:
        raise ArtifactError(f"the prefix {prefix!r} is a path", "pass the folder as artifact_directory")
    first = directory / f"{prefix}{next(iter(artifacts.models))}.onnx"
    names = [f"{prefix}{name}.onnx" for name in artifacts.models] + [f"{prefix}checkpoint"]
    if not force and (existing := [name for name in names if (directory / name).exists()]):
        raise OutputExistsError(
            f"{directory / existing[0]} already exists", "pass --force to replace it, or another --output"
        )
    with staged(first, force=force) as staging:
        written = [_write_model(proto, staging, prefix + name, artifacts) for name, proto in artifacts.models.items()]
        written.append(staging.folder / f"{prefix}checkpoint")
        write_checkpoint(artifacts.checkpoint, written[-1])
        artifacts.verify(staging.folder)
        if nominal:
            written.append(staging.folder / f"{prefix}nominal_checkpoint")
            nominal_checkpoint = Checkpoint(
                artifacts.checkpoint.trainable, artifacts.checkpoint.frozen, is_nominal=True
            )
            write_checkpoint(nominal_checkpoint, written[-1])
        if ort_format:
            written += [file for path in written[: len(artifacts.models)] for file in _to_ort_format(path)]
        sizes = {path.name: _size_of(path) for path in written}
    return tuple(ArtifactFile(str(directory / name), size) for name, size in sizes.items())


def _write_model(proto: onnx.ModelProto, staging: Staging, name: str, artifacts: Artifacts) -> Path:
    """Write a model into the staging folder; large constants go to its own external data."""
    model = ir.from_proto(proto)
    if artifacts.folder is not None:
        ir.external_data.set_base_dir(model.graph, artifacts.folder)
    return save_model(model, Staging(staging.folder, staging.root / f"{name}.onnx", staging.root))


def _to_ort_format(path: Path) -> tuple[Path, Path]:
    """Convert a model to the format of minimal builds of onnxruntime, with onnxruntime's own converter.

    Returns:
        The model, and the list of its operators that such a build is made from.

    Raises:
        ArtifactError: it fails, or the installed wheel has no converter.
    """
    try:
        with quiet(), quiet_stdout_descriptor():
            from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

            convert_onnx_models_to_ort(path, path.parent, [OptimizationStyle.Fixed])
    except ImportError as error:
        raise ArtifactError(
            f"this onnxruntime cannot write .ort files: {error}", "leave ort_format out, or install a wheel that can"
        ) from error
    except Exception as error:  # onnxruntime has no error of its own
        raise ArtifactError(
            f"onnxruntime cannot convert {path.name}: {str(error)[:300]}", "leave ort_format out"
        ) from error
    operators = path.with_suffix(".required_operators.config")
    # The file mentions the temporary folder.
    operators.write_text(operators.read_text(encoding="utf-8").replace(f"{path.parent}{os.sep}", ""), encoding="utf-8")
    return path.with_suffix(".ort"), operators


def _size_of(path: Path) -> int:
    """Return the bytes of a file and of external data beside it."""
    files = (path, path.with_name(f"{path.name}.data"))
    return sum(file.stat().st_size for file in files if file.exists())
