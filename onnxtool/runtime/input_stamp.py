"""The stamp of a file's inputs, written by export: the kind of each input, and the shapes that were verified.

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
from onnxtool.reports import Json, TensorInfo, from_json, to_json
from onnxtool.runtime.comparison import Case

IDS, MASK, NORMAL, GIVEN = "ids", "mask", "normal", "given"
_INTEGERS, _FLOATS = ("int64", "int32"), ("float32", "float16", "float64")
# Allowed dtypes for each kind of input.
_DTYPES = {IDS: _INTEGERS, MASK: (*_INTEGERS, "bool", *_FLOATS), NORMAL: _FLOATS, GIVEN: _INTEGERS}

_MOST_CHARACTERS = 1 << 18
_MOST_CASES = 64
_MOST_NAMES = 64  # of special ids, and of a case's given inputs
_LARGEST_AXIS = 1 << 22  # samples in four minutes of audio
_MOST_GIVEN = 1 << 14  # tokens in a few pages
_MOST_ELEMENTS = 1 << 28  # of all cases together: a dozen batches of large images
_LARGEST_ID = 1 << 31
_LONGEST_NAME = 200


@dataclass(frozen=True)
class InputKind:
    """The contents of an input.

    Attributes:
        kind: `ids` below a number; `mask`, ones where there is content; `normal`, numbers from a standard normal
            distribution, like normalized images and audio; `given`, integers that belong to a shape, such as image
            sizes.
        below: for ids, the exclusive upper bound.
        never: ids that do not occur, such as image placeholders.
        first: the ids at the start of every row.
        last: the ids at the end of every row's content, and nowhere else.
        pad: the id after a row's content, and nowhere else.
    """

    kind: str
    below: int = 0
    never: tuple[int, ...] = ()
    first: int | None = None
    last: int | None = None
    pad: int | None = None

    def misfits(self, name: str) -> Iterator[str]:
        """Yield what is wrong with the ids of the input `name`."""
        special = {*self.never, *(token for token in (self.last, self.pad) if token is not None)}
        if not 1 <= self.below <= _LARGEST_ID:
            yield f"below of {name} is {self.below}, not a number from 1 to {_LARGEST_ID}"
        if any(token >= self.below for token in (*special, self.first or 0)):
            yield f"never, first, last or pad of {name} is not below {self.below}"
        if len(self.never) > _MOST_NAMES:
            yield f"it has more than {_MOST_NAMES} ids that never occur in {name}"
        if len(special) >= self.below:
            yield f"it leaves no ids for {name}"

    def draw(
        self, dims: Sequence[int], content: NDArray[np.bool_] | None, generator: np.random.Generator
    ) -> NDArray[Any]:
        """Draw values of shape `dims`; `content`, bool [B, S] or of that shape, is false on padding; None for none."""
        if self.kind == NORMAL:
            return generator.standard_normal(dims)
        if self.kind == MASK:
            return np.ones(dims) if content is None else content
        ids = generator.integers(0, self.below, dims)
        excluded = {*self.never, *(token for token in (self.last, self.pad) if token is not None)}
        for _ in excluded:  # each round moves an id past one that must not occur
            ids = np.where(np.isin(ids, list(excluded)), (ids + 1) % self.below, ids)
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
class StampedCase:
    """Shapes that a file runs on.

    Attributes:
        case: a description for reports.
        shapes: sizes by input name.
        content: by input name, the part of each row that is content, one number for each axis after the batch; inputs
            that are content everywhere are omitted.
        padding: `left` if content is at the end of a row, after the padding; `right`; empty without padding.
        compare: `content` if outputs only have a meaning at content positions, otherwise `all`.
        given: the integers of `given` inputs, nested lists by input name.
    """

    case: str
    shapes: dict[str, tuple[int, ...]]
    content: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    padding: str = ""
    compare: str = "all"
    given: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, kinds: Mapping[str, InputKind]) -> StampedCase | None:
        """Describe a case; None if its padding lies within its content."""
        real = {name: _real(array, kinds[name]) for name, array in case.feeds.items()}
        padded = {name: where for name, where in real.items() if not where.all()}
        content = {name: tuple(_extent(row) for row in where) for name, where in padded.items()}
        shapes = {name: tuple(array.shape) for name, array in case.feeds.items()}
        given = {name: array.tolist() for name, array in case.feeds.items() if kinds[name].kind == GIVEN}
        for left in (False, True):
            if all(np.array_equal(_block(shapes[name], content[name], left=left), padded[name]) for name in padded):
                padding = ("left" if left else "right") if content else ""
                compare = "all" if case.valid is None else "content"
                return cls(case.description, shapes, content, padding, compare, given)
        return None

    @property
    def num_elements(self) -> int:
        """The number of elements of all inputs together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def is_too_large(self) -> bool:
        """Whether a reader would refuse the case."""
        given = any(math.prod(self.shapes[name]) > _MOST_GIVEN for name in self.given)
        return given or any(size > _LARGEST_AXIS for shape in self.shapes.values() for size in shape)

    def misfits(self, inputs: Sequence[TensorInfo], kinds: Mapping[str, InputKind]) -> Iterator[str]:
        """Yield what is wrong with the case for a graph with `inputs`."""
        if len(self.case) > _LONGEST_NAME or not self.case.isprintable():
            yield "a case has no readable name"
        if self.shapes.keys() != {info.name for info in inputs} or not self.shapes.keys() <= kinds.keys():
            yield f"it names other inputs than the graph in {self.case}"
        if not all(1 <= size <= _LARGEST_AXIS for shape in self.shapes.values() for size in shape):
            yield f"a size in {self.case} is not a number from 1 to {_LARGEST_AXIS}"
        for name, rows in self.content.items():
            if name not in self.shapes:
                yield f"it names the content of {name[:60]!r} in {self.case}, which is no input"
            batch, *sizes = self.shapes[name] or (0,)
            if len(rows) != batch or any(len(row) != len(sizes) for row in rows):
                yield f"it says of another number of rows or axes where {name} has content in {self.case}"
            if any(part > size for row in rows for part, size in zip(row, sizes, strict=True)):
                yield f"it says of more than all of {name} that it is content in {self.case}"
        if self.padding not in ("", "left", "right") or self.compare not in ("content", "all"):
            yield f"it has other padding than left or right in {self.case}, or compares something else"
        if misfit := _misfit(self, inputs):
            yield f"it does not fit the graph in {self.case}: {misfit}"
        for name, kind in kinds.items():
            if kind.kind == GIVEN and not _is_given(self.given.get(name), self.shapes[name]):
                yield f"it gives no integers [{', '.join(map(str, self.shapes[name]))}] for {name} in {self.case}"

    def content_of(self, name: str) -> NDArray[np.bool_] | None:
        """Return the positions of an input's content; None for everywhere."""
        if name not in self.content:
            return None
        return _block(self.shapes[name], self.content[name], left=self.padding == "left")


@dataclass(frozen=True)
class InputStamp:
    """The inputs that a file takes.

    Attributes:
        kinds: contents by input name; some inputs may be missing.
        cases: shapes of all inputs that the file runs on; empty if fixed shapes cannot describe them.
    """

    kinds: Mapping[str, InputKind]
    cases: tuple[StampedCase, ...]

    @classmethod
    def of(cls, inputs: Sequence[TensorInfo], kinds: Mapping[str, InputKind], cases: Iterable[Case]) -> InputStamp:
        """Describe a file's inputs by the cases that it was verified on.

        Cases that do not fit the graph, because a target has other inputs, are left out; so are cases that differ from
        another only in their content, and cases that exceed the limits for readers.
        """
        names = {info.name for info in inputs}
        dtypes = {info.name: info.dtype for info in inputs}
        kinds = {name: kind for name, kind in kinds.items() if dtypes.get(name) in _DTYPES[kind.kind]}
        described: list[StampedCase] = []
        seen: set[str] = set()
        elements, characters = _MOST_ELEMENTS, _MOST_CHARACTERS // 2  # the rest is for the kinds
        for case in cases:
            if case.rows or not names <= case.feeds.keys() or not names <= kinds.keys():
                continue
            feeds = {name: case.feeds[name] for name in case.feeds if name in names}
            stamped = StampedCase.of(Case(case.description, feeds, case.valid), kinds)
            if stamped is None or _misfit(stamped, inputs) or stamped.is_too_large:
                continue
            alike = json.dumps({**_written(stamped, _CASE), "case": ""}, sort_keys=True)
            fits = stamped.num_elements <= elements and len(alike) + _LONGEST_NAME <= characters
            if fits and alike not in seen and len(described) < _MOST_CASES:
                seen.add(alike)
                described.append(stamped)
                elements -= stamped.num_elements
                characters -= len(alike) + _LONGEST_NAME
        return cls(kinds, tuple(described))

    @classmethod
    def read(cls, model: ModelFile) -> InputStamp | None:
        """Read the stamp of a file; None if it has none.

        Raises:
            ModelFileError: it is malformed, does not fit the graph, or asks for inputs that are too large.
        """
        text = model.metadata.get(INPUTS_KEY)
        if text is None:
            return None
        try:
            stamp = cls._parse(text)
            for misfit in stamp.misfits(model.structure.inputs):
                raise ValueError(misfit)
        except ValueError as error:
            raise ModelFileError(
                f"the metadata {INPUTS_KEY} of {model.path} is of no use: {error}",
                "it was edited, or the graph has other inputs now; export the model again",
            ) from None
        return stamp

    @classmethod
    def _parse(cls, text: str) -> InputStamp:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters")
        try:
            found = parse_json(text)
        except ValueError:
            raise ValueError("it is no JSON") from None
        given = from_json(dict[str, Any], found, "it")
        entries = from_json(dict[str, dict[str, Any]], given.get("inputs"), "inputs")
        read = {
            name: from_json(InputKind, {**_KIND, **entry}, f"inputs[{name[:60]!r}]") for name, entry in entries.items()
        }
        kinds = {name: kind if kind.kind == IDS else InputKind(kind.kind) for name, kind in read.items()}
        cases = from_json(tuple[dict[str, Any], ...], given.get("cases"), "cases")
        return cls(kinds, from_json(tuple[StampedCase, ...], [{**_CASE, **case} for case in cases], "cases"))

    def misfits(self, inputs: Sequence[TensorInfo]) -> Iterator[str]:
        """Yield what contradicts the graph, or is too large; what comes after the first may be wrong itself."""
        dtypes = {info.name: info.dtype for info in inputs}
        for name, kind in self.kinds.items():
            if name not in dtypes:
                yield f"it names the input {name[:60]!r}, which the graph does not have"
            if dtypes[name] not in _DTYPES.get(kind.kind, ()):
                yield f"the input {name} of {dtypes[name]} holds {kind.kind[:60]!r}"
            if kind.kind == IDS:
                yield from kind.misfits(name)
        if len(self.cases) > _MOST_CASES:
            yield f"it has {len(self.cases)} cases, and there may be at most {_MOST_CASES}"
        for case in self.cases:
            yield from case.misfits(inputs, self.kinds)
        if sum(case.num_elements for case in self.cases) > _MOST_ELEMENTS:
            yield f"it asks for inputs of more than {_MOST_ELEMENTS} numbers"

    @property
    def json(self) -> str:
        """The value of the metadata."""
        stamp: dict[str, Json] = {
            "inputs": {name: _written(kind, _KIND) for name, kind in self.kinds.items()},
            "cases": [_written(case, _CASE) for case in self.cases],
        }
        return json.dumps(stamp, separators=(",", ":"))

    def make_cases(self, inputs: Sequence[TensorInfo]) -> list[Case]:
        """Make random inputs for every case, in the dtypes of the graph."""
        return [self._make(case, inputs, seed) for seed, case in enumerate(self.cases)]

    def with_padding_alone(self) -> InputStamp:
        """Add a case with one text of only padding, unless there is one, or no texts are padded."""
        texts = [
            case
            for case in self.cases
            if case.compare == "content" and case.content and all(len(case.shapes[name]) == 2 for name in case.content)
        ]
        if not texts or any((0,) in rows for case in texts for rows in case.content.values()):
            return self
        usual = max(texts, key=lambda case: len(next(iter(case.content.values()))))
        content = {name: ((0,), *rows[1:]) for name, rows in usual.content.items()}
        return replace(self, cases=(*self.cases, replace(usual, case="a row of padding alone", content=content)))

    def fixed_length(self, inputs: Sequence[TensorInfo]) -> int | None:
        """Return the fixed length of the file's ids, or 1 without ids; None if texts may be longer."""
        if not self.cases or self._text_axes(inputs):
            return None
        return max((shape[1] for shape in self._of_ids(self.cases[0])), default=1)

    def make_sized(
        self, inputs: Sequence[TensorInfo], batch_size: int, sequence_length: int, *, seed: int
    ) -> dict[str, NDArray[Any]]:
        """Make random inputs without padding: texts of one length, everything else as in the first case.

        Raises:
            InputError: the graph is fixed to other sizes.
        """
        usual, named = self.cases[0], self._text_axes(inputs)
        shapes: dict[str, tuple[int, ...]] = {}
        for info in inputs:
            rest = zip(usual.shapes[info.name][1:], info.shape[1:], strict=True)
            shapes[info.name] = (batch_size, *(sequence_length if name in named else size for size, name in rest))
        rows = [row % usual.shapes[inputs[0].name][0] for row in range(batch_size)]
        # A mask over patches depends on the given sizes; a mask over tokens is all ones.
        same = {name: one for name, one in usual.content.items() if shapes[name][1:] == usual.shapes[name][1:]}
        content = {name: tuple(one[row] for row in rows) for name, one in same.items()}
        given = {name: [value[row] for row in rows] for name, value in usual.given.items() if isinstance(value, list)}
        case = replace(usual, shapes=shapes, content=content, given=given)
        if misfit := _misfit(case, inputs):
            raise InputError(f"{misfit} for batches of {batch_size}", "ask for the sizes that the file is fixed to")
        return dict(self._make(case, inputs, seed).feeds)

    def _text_axes(self, inputs: Sequence[TensorInfo]) -> set[str]:
        """Return the names of the axes along which texts may be longer."""
        ids = (info for info in inputs if info.name in self.kinds and self.kinds[info.name].kind == IDS)
        return {axis for info in ids for axis in info.shape[1:] if isinstance(axis, str)}

    def _of_ids(self, case: StampedCase) -> list[tuple[int, ...]]:
        return [
            case.shapes[name] for name, kind in self.kinds.items() if kind.kind == IDS and len(case.shapes[name]) > 1
        ]

    def _make(self, case: StampedCase, inputs: Sequence[TensorInfo], seed: int) -> Case:
        generator = np.random.default_rng(seed)
        feeds = {info.name: self._array(info, case, generator).astype(info.dtype) for info in inputs}
        masks = [info.name for info in inputs if self.kinds[info.name].kind == MASK and len(info.shape) == 2]
        valid = feeds[masks[0]] != 0 if masks and case.compare == "content" else None
        return Case(case.case, feeds, valid)

    def _array(self, info: TensorInfo, case: StampedCase, generator: np.random.Generator) -> NDArray[Any]:
        kind, shape = self.kinds[info.name], case.shapes[info.name]
        if kind.kind == GIVEN:
            return np.array(case.given[info.name], dtype=np.int64)
        content = self._content(info.name, case) if kind.kind == IDS else case.content_of(info.name)
        return kind.draw(shape, content, generator)

    def _content(self, name: str, case: StampedCase) -> NDArray[np.bool_] | None:
        """Return the positions of an input's content, from the input itself or from the mask with its shape."""
        if name in case.content:
            return case.content_of(name)
        shape = case.shapes[name][:2]
        masks = (mask for mask, kind in self.kinds.items() if kind.kind == MASK and case.shapes.get(mask) == shape)
        return next((case.content_of(mask) for mask in masks), None)


# What a stamp leaves out.
_KIND: dict[str, Json] = {"below": 0, "never": [], "first": None, "last": None, "pad": None}
_CASE: dict[str, Json] = {"content": {}, "padding": "", "compare": "all", "given": {}}


def _written(value: InputKind | StampedCase, defaults: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields that are set."""
    made: Any = to_json(value)
    return {name: one for name, one in made.items() if name not in defaults or one != defaults[name]}


def _real(array: NDArray[Any], kind: InputKind) -> NDArray[np.bool_]:
    """Return the positions of an input's content without looking at other inputs."""
    if kind.kind != MASK and kind.pad is None:
        return np.ones(array.shape, dtype=bool)
    real: NDArray[np.bool_] = array != (0 if kind.kind == MASK else kind.pad)
    if kind.first is not None:  # T5 begins with the token that it pads with
        real[:, 0] = True
    return real


def _extent(row: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the number of content positions along each axis."""
    axes = range(row.ndim)
    return tuple(int(row.any(axis=tuple(other for other in axes if other != axis)).sum()) for axis in axes)


def _block(shape: Sequence[int], sizes: Sequence[tuple[int, ...]], *, left: bool) -> NDArray[np.bool_]:
    """Return a block of content in each row: at its start or, with left padding, at its end."""
    content = np.zeros(tuple(shape), dtype=bool)
    for row, extents in zip(content, sizes, strict=True):
        if left:
            row[tuple(slice(size - part, None) for size, part in zip(row.shape, extents, strict=True))] = True
        else:
            row[tuple(slice(0, part) for part in extents)] = True
    return content


def _misfit(case: StampedCase, inputs: Sequence[TensorInfo]) -> str:
    """Return why a case does not fit the inputs of a graph; empty if it does."""
    for info in inputs:
        shape = case.shapes[info.name]
        if len(shape) != len(info.shape):
            return f"{info.name} has {len(info.shape)} axes"
        for size, dimension in zip(shape, info.shape, strict=True):
            if isinstance(dimension, int) and dimension != size:
                return f"{info.name} is fixed to {dimension} where the case has {size}"
    return ""


def _is_given(value: Json, shape: Sequence[int]) -> bool:
    """Whether nested lists hold integers in exactly this shape."""
    if math.prod(shape) > _MOST_GIVEN:
        return False
    if not shape:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_ID
    return isinstance(value, list) and len(value) == shape[0] and all(_is_given(part, shape[1:]) for part in value)
