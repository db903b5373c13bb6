"""The contents of a file's inputs, and sizes that it runs on: the stamp that export writes.

A graph states names, dtypes and axes. It does not state that a text must end with an end token, that an image must be
at least as large as a patch, or how many ids a decoder knows. Code that generates inputs for a file (verification,
calibration, timing) reads this here. The stamp is metadata, and so untrusted: everything in it is checked against the
graph, and bounded.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError, ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import INPUTS_KEY
from onnxtool.reading import parse_json
from onnxtool.reports import TensorInfo, from_json, to_json
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.signature import FLOATS, INTEGERS, is_mask

IDS, MASK, NORMAL, GIVEN = "ids", "mask", "normal", "given"
_WORDS = "words"  # of texts; never stamped
# Allowed dtypes for each kind of input.
_DTYPES = {IDS: INTEGERS, MASK: (*INTEGERS, "bool", *FLOATS), NORMAL: FLOATS, GIVEN: INTEGERS}
# Exclusive upper bounds of integers that are not ids, such as image pixels; those of int8 wrap around.
_BELOW = {"bool": 2, "uint8": 256, "int8": 256, **dict.fromkeys(("int16", "uint16", "uint32", "uint64"), 100)}
_TEXTS = np.array(["a cat", "two dogs", "rain", "", "42", "Zürich"], object)

_MOST_CHARACTERS = 1 << 18
_MOST_CASES = 64
_MOST_ELEMENTS = 1 << 28  # of all cases together: a dozen batches of large images
_LARGEST_ID = 1 << 31
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Recipe:
    """The contents of an input.

    Attributes:
        kind: `ids` below a number; `mask`, ones where there is content; `normal`, numbers from a standard normal
            distribution, like normalized images and audio; `given`, integers that belong to a shape, such as image
            sizes.
        below: for ids, the exclusive upper bound.
        first: the ids at the start of every row.
        last: the ids at the end of every row's content, and nowhere else.
        pad: the id after a row's content, and nowhere else.
    """

    kind: str
    below: int = 0
    first: int | None = None
    last: int | None = None
    pad: int | None = None

    @classmethod
    def plain(cls, info: TensorInfo, below: int) -> Recipe:
        """Choose by dtype and name, with ids below `below`.

        Raises:
            InputError: no values can be generated in that dtype.
        """
        if is_mask(info) and info.dtype in {*_DTYPES[MASK], *_BELOW}:
            return cls(MASK)
        if info.dtype in INTEGERS:
            return cls(IDS, below)
        if info.dtype in _BELOW:
            return cls(IDS, _BELOW[info.dtype])
        if info.dtype in (*FLOATS, "string"):
            return cls(_WORDS if info.dtype == "string" else NORMAL)
        raise InputError(
            f"cannot generate values for the input {info.name} of dtype {info.dtype}",
            "pass arrays of your own with --sample_inputs; or --no_verify, and compare the result by hand",
        )

    @property
    def excluded(self) -> set[int]:
        """The ids that are not drawn."""
        return {token for token in (self.last, self.pad) if token is not None}

    def misfit(self, dtype: str) -> str:
        """Return why it cannot be the recipe of an input of this dtype; empty if it can."""
        if dtype not in _DTYPES.get(self.kind, ()):
            return f"{dtype} holds {self.kind[:60]!r}"
        if self.kind != IDS:
            return ""
        if not 1 <= self.below <= _LARGEST_ID:
            return f"below is {self.below}, not a number from 1 to {_LARGEST_ID}"
        if any(token >= self.below for token in (*self.excluded, self.first or 0)):
            return f"first, last or pad is not below {self.below}"
        return "no ids are left" if len(self.excluded) >= self.below else ""

    def draw(
        self, dims: Sequence[int], content: NDArray[np.bool_] | None, generator: np.random.Generator
    ) -> NDArray[Any]:
        """Draw values of shape `dims`; `content`, bool [B, S] or of that shape, is false on padding; None for none."""
        if self.kind == NORMAL:
            return np.asarray(generator.standard_normal(dims))
        if self.kind == MASK:
            return np.ones(dims) if content is None else content
        if self.kind == _WORDS:
            words = np.arange(math.prod(dims)) + int(generator.integers(len(_TEXTS)))
            return np.asarray(_TEXTS[words.reshape(dims) % len(_TEXTS)])
        ids = np.asarray(generator.integers(0, self.below, dims))
        for _ in self.excluded:  # each round moves an id past one that must not occur
            ids = np.where(np.isin(ids, list(self.excluded)), (ids + 1) % self.below, ids)
        if len(dims) < 2:
            return ids
        if self.first is not None:
            ids[:, 0] = self.first
        everywhere = np.ones(tuple(dims[:2]), dtype=bool)
        content = everywhere if content is None or content.shape != everywhere.shape else content
        if self.last is not None:
            last = content.shape[1] - 1 - content[:, ::-1].argmax(axis=1)
            ids[np.arange(len(ids)), last] = self.last
        if self.pad is not None:
            ids[~content] = self.pad
        return ids


@dataclass(frozen=True)
class CaseSizes:
    """Sizes that a file runs on.

    Attributes:
        case: a description for reports.
        shapes: sizes by input name.
        content: by input name, the part of each row that is content, one number for each axis after the batch; inputs
            that are content everywhere are omitted.
        padded_left: whether content is at the end of a row, after the padding.
        masked: whether outputs only have a meaning where the first mask of the inputs is 1.
        given: the integers of `given` inputs, nested lists by input name.
    """

    case: str
    shapes: dict[str, tuple[int, ...]]
    content: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    padded_left: bool = False
    masked: bool = False
    given: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, recipes: Mapping[str, Recipe]) -> CaseSizes | None:
        """Describe a case; None if its padding lies within its content."""
        real = {name: _real(array, recipes[name]) for name, array in case.feeds.items()}
        padded = {name: content for name, content in real.items() if not content.all()}
        described = cls(
            case.description,
            {name: array.shape for name, array in case.feeds.items()},
            {name: tuple(_extent(row) for row in content) for name, content in padded.items()},
            masked=case.valid is not None,
            given={name: array.tolist() for name, array in case.feeds.items() if recipes[name].kind == GIVEN},
        )
        for sizes in (described, replace(described, padded_left=True)):
            if all(np.array_equal(sizes.content_of(name), content) for name, content in padded.items()):
                return sizes
        return None

    @property
    def num_elements(self) -> int:
        """The number of elements of all inputs together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def misfits(self, inputs: Sequence[TensorInfo], recipes: Mapping[str, Recipe]) -> Iterator[str]:
        """Yield what is wrong with the sizes for a graph with `inputs`."""
        if len(self.case) > _LONGEST_NAME or not self.case.isprintable():
            yield "it has no readable name"
        if self.shapes.keys() != {info.name for info in inputs} or not self.shapes.keys() <= recipes.keys():
            yield "it names other inputs than the graph"
        if not self.content.keys() | self.given.keys() <= self.shapes.keys():
            yield "it says what is in other inputs than those of the graph"
        for info in inputs:
            shape = self.shapes[info.name]
            if len(shape) != len(info.shape):
                yield f"{info.name} has {len(info.shape)} axes"
            for size, dimension in zip(shape, info.shape, strict=True):
                if size < 1 or (isinstance(dimension, int) and dimension != size):
                    yield f"{info.name} has an axis of {dimension} where the case has {size}"
            rows = self.content.get(info.name)
            if rows is not None and not _fits(rows, shape):
                yield f"its content does not fit {info.name}"
            if recipes[info.name].kind == GIVEN and not _has_shape(self.given.get(info.name), shape):
                yield f"it gives no integers [{', '.join(map(str, shape))}] for {info.name}"

    def content_of(self, name: str) -> NDArray[np.bool_]:
        """Return the positions of an input's content: a block at the start of each row, or at its end."""
        content = np.zeros(self.shapes[name], dtype=bool)
        for row, extents in zip(content, self.content[name], strict=True):
            block = zip(row.shape, extents, strict=True)
            row[tuple(slice(size - part, None) if self.padded_left else slice(part) for size, part in block)] = True
        return content


@dataclass(frozen=True)
class InputStamp:
    """The inputs that a file takes.

    Attributes:
        inputs: recipes by input name; some inputs may be missing.
        cases: sizes of all inputs that the file runs on; empty if fixed sizes cannot describe them.
    """

    inputs: dict[str, Recipe]
    cases: tuple[CaseSizes, ...] = ()

    @classmethod
    def of(cls, inputs: Sequence[TensorInfo], recipes: Mapping[str, Recipe], cases: Iterable[Case]) -> InputStamp:
        """Describe a file's inputs by the cases that it was verified on.

        Anything that a reader would refuse is left out: inputs of a target that have other dtypes, cases that do not
        fit the graph or are too large. So are cases that differ from another only in their content.
        """
        dtypes = {info.name: info.dtype for info in inputs}
        stamp = cls({name: recipe for name, recipe in recipes.items() if not recipe.misfit(dtypes.get(name, ""))})
        for case in cases:
            feeds = {name: array for name, array in case.feeds.items() if name in dtypes}
            if case.rows or not feeds.keys() <= stamp.inputs.keys():
                continue
            sizes = CaseSizes.of(replace(case, feeds=feeds), stamp.inputs)
            if sizes is None or any(replace(sizes, case=known.case) == known for known in stamp.cases):
                continue
            longer = replace(stamp, cases=(*stamp.cases, sizes))
            if next(longer.misfits(inputs), None) is None and len(longer.json) <= _MOST_CHARACTERS:
                stamp = longer
        return stamp

    @classmethod
    def read_from(cls, model: ModelFile) -> InputStamp | None:
        """Read the stamp of a file; None if it has none, or if it describes the inputs behind a tokenizer.

        Raises:
            ModelFileError: it is malformed, does not fit the graph, or asks for inputs that are too large.
        """
        text = model.metadata.get(INPUTS_KEY)
        if text is None or model.text_input is not None:
            return None
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"it has {len(text)} characters")
            stamp: InputStamp = from_json(cls, parse_json(text))
            for misfit in stamp.misfits(model.structure.inputs):
                raise ValueError(misfit)
        except ValueError as error:
            raise ModelFileError(
                f"the metadata {INPUTS_KEY} of {model.path} is of no use: {error}",
                "it was edited, or the graph has other inputs now; export the model again",
            ) from None
        return stamp

    def misfits(self, inputs: Sequence[TensorInfo]) -> Iterator[str]:
        """Yield what contradicts the graph, or is too large; what comes after the first may be wrong itself."""
        dtypes = {info.name: info.dtype for info in inputs}
        for name, recipe in self.inputs.items():
            if name not in dtypes:
                yield f"it names the input {name[:60]!r}, which the graph does not have"
            if misfit := recipe.misfit(dtypes[name]):
                yield f"in {name}, {misfit}"
        if len(self.cases) > _MOST_CASES:
            yield f"it has {len(self.cases)} cases, and there may be at most {_MOST_CASES}"
        for number, case in enumerate(self.cases):
            yield from (f"in case {number}, {misfit}" for misfit in case.misfits(inputs, self.inputs))
        if sum(case.num_elements for case in self.cases) > _MOST_ELEMENTS:
            yield f"it asks for inputs of more than {_MOST_ELEMENTS} numbers"

    @property
    def json(self) -> str:
        """The value of the metadata."""
        return json.dumps(to_json(self), separators=(",", ":"))

    @property
    def names_of_ids(self) -> list[str]:
        """The inputs that are ids."""
        return [name for name, recipe in self.inputs.items() if recipe.kind == IDS]

    def num_tokens(self, sizes: CaseSizes) -> int:
        """Return the length of the longest text of a case; 0 without any."""
        return max((sizes.shapes[name][1] for name in self.names_of_ids if len(sizes.shapes[name]) > 1), default=0)

    def fixed_length(self, inputs: Sequence[TensorInfo]) -> int | None:
        """Return the fixed length of the file's ids, or 1 without ids; None if texts may be longer."""
        return None if self._text_axes(inputs) or not self.cases else self.num_tokens(self.cases[0]) or 1

    def resized(self, inputs: Sequence[TensorInfo], batch_size: int, sequence_length: int) -> CaseSizes:
        """Return the first case with texts of one length, without padding, and everything else as it is there."""
        usual, texts = self.cases[0], self._text_axes(inputs)
        shapes: dict[str, tuple[int, ...]] = {}
        for info in inputs:
            sizes = zip(usual.shapes[info.name][1:], info.shape[1:], strict=True)
            shapes[info.name] = (batch_size, *(sequence_length if axis in texts else size for size, axis in sizes))
        # A mask over patches depends on the given sizes; a mask over tokens is all ones.
        content = {name: rows for name, rows in usual.content.items() if shapes[name][1:] == usual.shapes[name][1:]}
        content = {name: tuple(rows[row % len(rows)] for row in range(batch_size)) for name, rows in content.items()}
        given = {name: [rows[row % len(rows)] for row in range(batch_size)] for name, rows in usual.given.items()}
        return replace(usual, shapes=shapes, content=content, given=given)

    def _text_axes(self, inputs: Sequence[TensorInfo]) -> set[str]:
        """Return the names of the axes along which texts may be longer."""
        axes = {axis for info in inputs if info.name in self.names_of_ids for axis in info.shape[1:]}
        return {axis for axis in axes if isinstance(axis, str)}

    def make_case(self, sizes: CaseSizes, inputs: Sequence[TensorInfo], seed: int) -> Case:
        """Make random inputs of these sizes, in the dtypes of the graph."""
        content = {name: sizes.content_of(name) for name in sizes.content}
        feeds = make_feeds(inputs, self.inputs, sizes.shapes, content, seed=seed, given=sizes.given)
        masks = [info.name for info in inputs if self.inputs[info.name].kind == MASK and len(info.shape) == 2]
        return Case(sizes.case, feeds, feeds[masks[0]] != 0 if masks and sizes.masked else None)


def make_feeds(
    inputs: Iterable[TensorInfo],
    recipes: Mapping[str, Recipe],
    shapes: Mapping[str, Sequence[int]],
    content: Mapping[str, NDArray[np.bool_]],
    *,
    seed: int,
    given: Mapping[str, Any] | None = None,
) -> dict[str, NDArray[Any]]:
    """Make an array for each of `inputs`; ids without content of their own follow the mask of their shape."""
    generator = np.random.default_rng(seed)
    masks = [mask for name, mask in content.items() if recipes[name].kind == MASK]
    feeds: dict[str, NDArray[Any]] = {}
    for info in inputs:
        recipe, dims = recipes[info.name], tuple(shapes[info.name])
        positions = content.get(info.name)
        if positions is None and recipe.kind == IDS:
            positions = next((mask for mask in masks if mask.shape == dims[:2]), None)
        values = (given or {})[info.name] if recipe.kind == GIVEN else recipe.draw(dims, positions, generator)
        feeds[info.name] = np.asarray(values).astype(object if info.dtype == "string" else info.dtype)
    return feeds


def _real(array: NDArray[Any], recipe: Recipe) -> NDArray[np.bool_]:
    """Return the positions of an input's content without looking at other inputs."""
    if recipe.kind != MASK and recipe.pad is None:
        return np.ones(array.shape, dtype=bool)
    real: NDArray[np.bool_] = array != (0 if recipe.kind == MASK else recipe.pad)
    if recipe.first is not None:  # T5 begins with the token that it pads with
        real[:, 0] = True
    return real


def _extent(row: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the number of content positions along each axis."""
    axes = range(row.ndim)
    return tuple(int(row.any(axis=tuple(other for other in axes if other != axis)).sum()) for axis in axes)


def _fits(content: Sequence[Sequence[int]], shape: Sequence[int]) -> bool:
    """Whether an input has such content: for each row, a part of each axis."""
    if len(content) != (*shape, 0)[0] or any(len(row) != len(shape) - 1 for row in content):
        return False
    return all(part <= size for row in content for part, size in zip(row, shape[1:], strict=True))


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    """Whether nested lists hold integers in exactly this shape."""
    try:
        array = np.array(value)
    except ValueError:  # ragged
        return False
    return array.dtype.kind == "i" and array.shape == tuple(shape)
