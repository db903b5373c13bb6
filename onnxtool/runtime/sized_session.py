"""Files of fixed sizes, run as the model that they were made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import SizedFile
from onnxtool.reports import short_repr
from onnxtool.runtime.running import CachedRun, Session
from onnxtool.runtime.sizes import Sizes, best_batches, input_axes, label, rows_axis


@short_repr
@dataclass(frozen=True)
class SizedSession(Session):
    """Sessions of files of fixed sizes, which are opened when they are needed, as one session of their model.

    Inputs of other sizes are filled up: rows with the last row, other axes with zeros, which masks have for padding.
    What that adds to the outputs is cut off. More rows than any file has are run in several batches.

    Attributes:
        files: those that belong to the model, the smallest first.
        open_file: opens one.
        rows: the axis of the rows, of which any number can be run; see `rows_axis`.
        axes: the dynamic axes of each input.
    """

    files: Sequence[SizedFile] = ()
    open_file: Callable[[ModelFile], Session] | None = None
    rows: str = ""
    axes: Sequence[tuple[str, Mapping[int, str]]] = ()
    _opened: dict[str, Session] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def run_unchecked(self, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the batch, or several, on the files whose sizes need the least padding.

        Raises:
            InputError: no file is large enough.
            SessionError: onnxruntime fails on these inputs.
        """
        input_sizes, rows = self._sizes_of(feeds), self.rows
        every = [file.sizes for file in self.files]
        if input_sizes in every:
            return self._fitting(input_sizes)[1].run_unchecked(feeds)
        large = [
            sizes for sizes in every if all(axis == rows or sizes[axis] >= size for axis, size in input_sizes.items())
        ]
        if not large:
            raise self._too_large(input_sizes)
        costs = [(sizes.get(rows, 1), prod(sizes.values()) // sizes.get(rows, 1)) for sizes in large]
        places = best_batches([0] * input_sizes.get(rows, 1), costs)
        parts = [{name: array[part] for name, array in feeds.items()} if rows else feeds for part in places]
        outputs = [self._run(part, self._sizes_of(part)) for part in parts]
        if len(outputs) == 1:
            return outputs[0]
        return [np.concatenate(arrays) for arrays in zip(*outputs, strict=True)]

    def cached(self, carried: Mapping[str, str]) -> CachedRun:
        """Refuse: the sizes of a cache grow with each run.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.model.path} has fixed sizes, and text is written token by token", "use the file without"
        )

    def _sizes_of(self, feeds: Mapping[str, NDArray[Any]]) -> Sizes:
        sizes: Sizes = {}
        for name, axes in self.axes:
            for place, axis in axes.items():
                size = feeds[name].shape[place] if feeds[name].ndim > place else 0
                if not size:
                    raise InputError(
                        f"the input {name} of {self.model.path} has no {axis}: its shape is {[*feeds[name].shape]}",
                        "give it at least one row and one token",
                    )
                if sizes.setdefault(axis, size) != size:
                    raise InputError(
                        f"the axis {axis} has the sizes {sizes[axis]} and {size} in the inputs of {self.model.path}",
                        "give all inputs the same number of rows and tokens",
                    )
        return sizes

    def _run(self, feeds: Mapping[str, NDArray[Any]], input_sizes: Sizes) -> list[NDArray[Any]]:
        sizes, session = self._fitting(input_sizes)
        outputs = session.run_unchecked(self._filled(feeds, sizes))
        if sizes == input_sizes:
            return outputs
        cut = []
        for info, array in zip(self.model.structure.outputs, outputs, strict=True):
            if any(isinstance(size, str) and size not in input_sizes for size in info.shape) or None in info.shape:
                raise InputError(
                    f"the output {info.name} of {self.model.path.name} has sizes {list(info.shape)}, and what padding "
                    "adds to them is unknown",
                    "name the axes of its inputs and outputs alike, or give it inputs of one of its sizes",
                )
            cut.append(array[tuple(slice(input_sizes[size] if isinstance(size, str) else None) for size in info.shape)])
        return cut

    def _fitting(self, sizes: Sizes) -> tuple[Sizes, Session]:
        """Return the smallest sizes that hold inputs, and the session of their file."""
        for stated in self.files:
            if all(stated.sizes[axis] >= size for axis, size in sizes.items()):
                with self._lock:
                    if stated.file not in self._opened:
                        assert self.open_file is not None  # noqa: S101  as `open_sizes` sets it
                        self._opened[stated.file] = self.open_file(self.model.sized(stated))  # unless it was replaced
                    return stated.sizes, self._opened[stated.file]
        raise self._too_large(sizes)

    def _too_large(self, sizes: Sizes) -> InputError:
        known = ", ".join(label(file.sizes) for file in self.files)
        return InputError(
            f"{self.model.path} has files for {' x '.join(sizes)} of {known}, and the inputs are {label(sizes)}",
            "cut the inputs, or make the files with a larger --sizes",
        )

    def _filled(self, feeds: Mapping[str, NDArray[Any]], sizes: Sizes) -> dict[str, NDArray[Any]]:
        filled = {}
        for name, axes in self.axes:
            array = feeds[name]
            for place, axis in axes.items():
                missing = [(0, 0)] * array.ndim
                missing[place] = (0, sizes[axis] - array.shape[place])
                if missing[place][1]:
                    array = np.pad(array, missing, mode="edge" if axis == self.rows else "constant")
            filled[name] = array
        return filled


def open_sizes(model: ModelFile, open_file: Callable[[ModelFile], Session]) -> SizedSession:
    """Open the smallest of the files of fixed sizes that belong to a model, and prepare the others, as one session.

    Raises:
        ModelFileError: one is missing, or is another file or of other sizes than stated.
        OnnxtoolError: one cannot be opened.
    """
    axes = dict(input_axes(model))
    for stated in model.sizes:
        file, sizes = model.sized(stated), stated.sizes
        shapes = {info.name: info.shape for info in file.structure.inputs}
        fixed = {
            info.name: tuple(sizes.get(axes[info.name].get(place, ""), size) for place, size in enumerate(info.shape))
            for info in model.structure.inputs
        }
        if shapes != fixed:
            raise InputError(
                f"{file.path} does not have the sizes that {model.path} states", "run onnxtool optimize --sizes again"
            )
    files = sorted(model.sizes, key=lambda stated_file: prod(stated_file.sizes.values()))
    first = open_file(model.sized(files[0]))
    return SizedSession(
        **{name: value for name, value in vars(first).items() if name != "model"},
        model=model,
        files=files,
        open_file=open_file,
        rows=rows_axis(model),
        axes=[*axes.items()],
        _opened={files[0].file: first},
    )
