"""Files of adapters in onnxruntime's format: values for inputs of a graph that have a default."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import ModelFileError, first_line
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import digest_of_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SessionAdapter:
    """An adapter for the runs of a session, which onnxruntime maps from its file.

    Raises:
        ModelFileError: onnxruntime cannot read it.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        self._path, self._adapter, self.options = path, ort.LoraAdapter(), ort.RunOptions()
        try:
            self._adapter.Load(str(path))
        except Exception as error:  # onnxruntime has no error class of its own
            raise ModelFileError(
                f"onnxruntime cannot read the adapter {path}: {first_line(error)}", "export the model again"
            ) from error
        self.options.add_active_adapter(self._adapter)  # of two, the first would win without a word

    @cached_property
    def values(self) -> dict[str, Any]:
        """Its onnxruntime values by input name, for bound runs, which ignore the options' adapters."""
        import onnxruntime as ort

        self._read = ort.AdapterFormat.read_adapter(str(self._path))  # owns the memory of the values
        return dict(self._read.get_parameters())


def adapter_file(graph: Path, name: str) -> str:
    """Return the name of the file of an adapter next to a graph."""
    return f"{graph.stem}.{name}.onnx_adapter"


def with_each_adapter(
    model: ModelFile, feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> tuple[Mapping[str, NDArray[Any]], ...]:
    """Return inputs for a model with the values of each of its adapters, one after another, and then without any."""
    adapters = [
        SessionAdapter(path) for adapter in model.adapters if (path := model.with_adapter(adapter.name).adapter)
    ]
    values = [{name: value.numpy().copy() for name, value in adapter.values.items()} for adapter in adapters]
    return tuple({**inputs, **chosen} for chosen in (*values, {}) for inputs in feeds)


def copy_adapters(model: ModelFile, folder: Path) -> None:
    """Copy the files of a model's adapters.

    Raises:
        ModelFileError: one is not the file that was written with the model.
    """
    for adapter in model.adapters:
        shutil.copy(str(model.with_adapter(adapter.name).adapter), folder / adapter.file)


def write_adapter(path: Path, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Write the values of inputs, and return the digest of the file: onnxruntime does not compare its model_version."""
    import onnxruntime as ort

    file = ort.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    file.export_adapter(str(path))
    return digest_of_blocks(path)
