"""Write the files of a training to one folder, all at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtool.errors import ArtifactError, OutputExistsError
from onnxtool.model_file import Staging, save_model, staged
from onnxtool.training.checkpoints.checkpoint import Checkpoint, write_checkpoint

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Artifacts:
    """What is to be written.

    Attributes:
        models: file names without ending, the training model first.
        folder: where the external data of the forward model lies that they still refer to.
        check: looks at the files in their folder before anybody else can; what it raises leaves nothing behind.
    """

    models: Mapping[str, onnx.ModelProto]
    checkpoint: Checkpoint
    folder: Path | None
    check: Callable[[Path], None] = lambda _folder: None


@dataclass(frozen=True)
class ArtifactFile:
    """A file that was written; the size includes its external data."""

    path: str
    size_bytes: int


def write_artifacts(
    artifacts: Artifacts, directory: Path, *, prefix: str, ort_format: bool, nominal: bool, force: bool
) -> tuple[ArtifactFile, ...]:
    """Write models and checkpoints to `directory`, each name with `prefix` before it.

    Raises:
        OutputExistsError: one is there and `force` is not set.
        OutputWriteError: they cannot be written.
        ArtifactError: the prefix leaves the directory.
    """
    if not prefix.isprintable():
        raise ArtifactError(f"the prefix {prefix!r} cannot begin the name of a file", "pass letters and digits")
    if Path(prefix).name != prefix and prefix:
        raise ArtifactError(f"the prefix {prefix!r} is a path", "pass the folder as artifact_directory")
    first = directory / f"{prefix}{next(iter(artifacts.models))}.onnx"
    names = [f"{prefix}{name}.onnx" for name in artifacts.models] + [f"{prefix}checkpoint"]
    if not force and (there := [name for name in names if (directory / name).exists()]):
        raise OutputExistsError(
            f"{directory / there[0]} exists already", "pass --force to replace it, or another --output"
        )
    with staged(first, force=force) as staging:
        written = [_write_model(proto, staging, prefix + name, artifacts) for name, proto in artifacts.models.items()]
        written.append(staging.folder / f"{prefix}checkpoint")
        write_checkpoint(artifacts.checkpoint, written[-1])
        artifacts.check(staging.folder)
        if nominal:
            written.append(staging.folder / f"{prefix}nominal_checkpoint")
            bare = Checkpoint(artifacts.checkpoint.trainable, artifacts.checkpoint.frozen, is_nominal=True)
            write_checkpoint(bare, written[-1])
        if ort_format:
            written += [file for path in written[: len(artifacts.models)] for file in _to_ort_format(path)]
        sizes = {path.name: _size_of(path) for path in written}
    return tuple(ArtifactFile(str(directory / name), size) for name, size in sizes.items())


def _write_model(proto: onnx.ModelProto, staging: Staging, name: str, artifacts: Artifacts) -> Path:
    """Write a model into the staging folder; weights that stayed constants go to its own external data."""
    import onnx_ir as ir

    model = ir.from_proto(proto)
    if artifacts.folder is not None:
        ir.external_data.set_base_dir(model.graph, artifacts.folder)
    return save_model(model, Staging(staging.folder, staging.root / f"{name}.onnx", staging.root))


def _to_ort_format(path: Path) -> tuple[Path, Path]:
    """Convert a model to the format of minimal builds of onnxruntime, with onnxruntime's own converter.

    Returns:
        The model, and the list of its operators that such a build is made from.

    Raises:
        ArtifactError: it fails, or the installed wheel has none.
    """
    from onnxtool.runtime.quiet import quiet, quiet_stdout_descriptor

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
    # It says where the model was while it was written.
    operators.write_text(operators.read_text(encoding="utf-8").replace(f"{path.parent}{os.sep}", ""), encoding="utf-8")
    return path.with_suffix(".ort"), operators


def _size_of(path: Path) -> int:
    """Return the bytes of a file and of external data beside it."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*") if file.name in _own(path))


def _own(path: Path) -> tuple[str, str]:
    return path.name, f"{path.name}.data"
