"""Read a user's samples, and apply a user's input shapes; separate because command options must not import numpy."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.reading import open_regular
from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.feeds import MOST_BYTES, is_mask
from onnxtool.runtime.nesting import is_nested, is_part


def shaped(inputs: Sequence[TensorInfo], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorInfo]:
    """Apply `shapes` to the inputs of a graph by name; a named axis has the same size in all inputs.

    Axes without a name get a unique one.

    Raises:
        InputError: an input does not exist, or a shape does not fit its input.
    """
    known = [info.name for info in inputs]
    if unknown := sorted(shapes.keys() - set(known)):
        raise InputError(
            f"the model has no input {unknown[0]}, of which a shape is given", f"its inputs are {', '.join(known)}"
        )
    named: dict[str, int] = {}
    for info in inputs:
        sizes = shapes.get(info.name)
        if sizes is None:
            continue
        _require_fit(info, sizes, "--input_shape")
        for dimension, size in zip(info.shape, sizes, strict=False):
            if isinstance(dimension, str) and named.setdefault(dimension, size) != size:
                raise InputError(
                    f"the axis {dimension} is {named[dimension]} and, in {info.name}, {size}",
                    "an axis has one size in all inputs; see them with onnxtool stats",
                )
    found = []
    for info in inputs:
        names = (f"{info.name}.{axis}" if size is None else size for axis, size in enumerate(info.shape))
        own = tuple(size if isinstance(size, int) else named.get(size, size) for size in names)
        found.append(info._replace(shape=shapes.get(info.name, own)))
    return found


def read_sample(path: Path, inputs: Sequence[TensorInfo]) -> Case:
    """Read the inputs of one run, named after `inputs`.

    Raises:
        InputError: the file cannot be read, or does not fit the inputs.
    """
    arrays = _read(path)
    feeds: dict[str, NDArray[Any]] = {}
    for info in inputs:
        own = {name: array for name, array in arrays.items() if name == info.name or is_part(name, info)}
        if not own and not info.dtype.startswith(("optional", "sequence")):
            raise InputError(
                f"{path} has no array for the input {info.name}", f"its arrays are {', '.join(arrays) or 'none'}"
            )
        feeds |= own if is_nested(info) else {info.name: _fitting(info, own[info.name], str(path))}
    if unknown := [name for name in arrays if name not in feeds]:
        raise InputError(
            f"{path} has an array {unknown[0]}, and the model has no such input",
            f"its inputs are {', '.join(info.name for info in inputs)}",
        )
    masks = [feeds[info.name] for info in inputs if is_mask(info)]
    return Case(path.stem, feeds, masks[0] != 0 if masks else None)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    hint = "write it with numpy.savez; numbers and texts only, nothing that needs pickle"
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:  # a pipe would wait for a writer
            num_bytes = sum(entry.file_size for entry in archive.infolist())
        if num_bytes > MOST_BYTES:
            raise InputError(f"{path} holds {num_bytes:,} bytes", f"at most {MOST_BYTES:,} are read for one run")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise InputError(f"no such file: {path}", hint) from None
    except InputError:
        raise
    except Exception as error:  # zip and numpy fail in many ways
        raise InputError(f"{path} cannot be read as .npz: {error}", hint) from error


def _fitting(info: TensorInfo, array: NDArray[Any], place: str) -> NDArray[Any]:
    if info.dtype == "string" and array.dtype.kind in "US":
        array = array.astype(str).astype(object)
    elif str(array.dtype) != info.dtype:
        raise InputError(
            f"{info.name} in {place} is {array.dtype}, and the model takes {info.dtype}",
            f"convert it with .astype({info.dtype!r})",
        )
    _require_fit(info, array.shape, place)
    return array


def _require_fit(info: TensorInfo, sizes: Sequence[int], place: str) -> None:
    """Refuse sizes that contradict the graph; a missing shape allows any rank."""
    fixed = zip(info.shape, sizes, strict=False)
    ranks_differ = bool(info.shape) and len(info.shape) != len(sizes)
    if ranks_differ or any(isinstance(wanted, int) and wanted != size for wanted, size in fixed):
        wanted = ", ".join("?" if size is None else str(size) for size in info.shape)
        raise InputError(
            f"{info.name} has the shape [{', '.join(map(str, sizes))}] in {place}, and the model takes [{wanted}]",
            "give it the sizes that the file fixes; see them with onnxtool stats",
        )
