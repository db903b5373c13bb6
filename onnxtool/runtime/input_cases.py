"""Inputs to run a file on: a user's samples, from its export's stamp, or generated from the graph.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import POOLING_MASK, some_prompts
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.model_file.wire import Node
from onnxtool.reading import open_regular
from onnxtool.reports import Dimension, TensorInfo
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.recipes import InputStamp, Recipe, make_feeds
from onnxtool.runtime.running import is_nested, is_part
from onnxtool.runtime.signature import (
    FLOATS,
    IDS,
    MASK,
    SUM,
    TOKEN_TYPES,
    has_past,
    holds_samples,
    index_bounds,
    input_uses,
    is_mask,
    is_past,
    is_text,
    is_used_as_mask,
    names_are_exchanged,
    num_positions,
    tables,
)

LONGEST_CASE = 1024  # with a longer window, a check would cost more than the work that it checks
_SAMPLES_IN_A_STEP = 640  # twice the samples in a step of wav2vec2, and enough for its first step
_LONGEST = 64  # for a model without a maximum length, and without a table of positions
# Rows, height and width: of multiples of 32, which detectors ask for, and of others.
_PICTURES = ((1, 64, 64), (2, 96, 160), (1, 224, 224), (3, 37, 53), (1, 48, 320))
_PIXELS = ("uint8", *FLOATS)
_MOST_ALIKE = 3  # cases with the same shapes and masks: other values reveal what a single case hides
_MOST_BYTES = 1 << 30  # of the inputs of one run, generated ones as float64
_FEWEST_ROWS = 2
_BATCH_AXIS = "batch_size"
_BATCH = re.compile(r"batch|^(n|b|bs|bsz)$", re.IGNORECASE)
_SEQUENCE = re.compile(r"seq|len|time|token|^(s|t|l)$", re.IGNORECASE)
_PIECE = 1 << 14  # rows at a time: the table of a large model is a gigabyte


def input_cases(model: ModelFile, *, longest: int | None = None, given: GivenInputs = NO_INPUTS) -> list[Case]:
    """Return inputs of many shapes and masks: given ones, the stamp's, or ones suggested by the graph's axes.

    Args:
        model: the file.
        longest: maximum number of tokens, unless the file takes no shorter text; None for the file's own limit.
        given: samples, which are then the only cases, or shapes.

    Raises:
        ModelFileError: the stamp cannot be used.
        InputError: an input of the graph cannot be generated, or the given inputs do not fit it.
    """
    if given.samples:
        return [read_sample(path, model.structure.inputs) for path in given.samples]
    maker = _InputMaker(model, given)
    stamp = maker.stamp
    if maker.has_stamped_cases:
        short = [case for case in stamp.cases if longest is None or stamp.num_tokens(case) <= longest]
        return [stamp.make_case(case, maker.inputs, seed) for seed, case in enumerate(short or stamp.cases)]
    length = model.metadata_number(MAX_LENGTH_KEY) or (not stamp.inputs and num_positions(model)) or _LONGEST
    length = min(length, longest or length)
    more = past_shapes(length) if has_past(maker.inputs) else (padding_alone(length),) * maker.is_masked
    pictures = () if stamp.inputs else maker.picture_shapes()
    cases: list[Case] = []
    alike: Counter[object] = Counter()
    for seed, shape in enumerate((*(pictures or verification_shapes(length)), *more)):
        case = maker.case(shape, seed, in_samples=True)
        key = case.valid is not None and case.valid.tobytes(), *(array.shape for array in case.feeds.values())
        alike[key] += 1
        if alike[key] <= _MOST_ALIKE or stamp.inputs:
            other = ", other values" if any(case.description == earlier.description for earlier in cases) else ""
            cases.append(replace(case, description=f"{case.description}{other}"))
    return cases


def turning_cases(model: ModelFile, turns: Mapping[str, Collection[int]], given: GivenInputs = NO_INPUTS) -> list[Case]:
    """Return inputs at the sizes where a graph switches to another computation, and one below and above.

    Args:
        model: the file.
        turns: the sizes, by axis name; sizes without a name are text lengths.
        given: required input shapes.
    """
    maker, most = _InputMaker(model, given), min(model.metadata_number(MAX_LENGTH_KEY) or LONGEST_CASE, LONGEST_CASE)
    texts = {"", *(info.shape[1] for info in model.structure.inputs if is_text(info))}
    shapes: dict[tuple[object, ...], FeedShape] = {}
    for axis, size in sorted({(axis, n + d) for axis, sizes in turns.items() for n in sizes for d in (-1, 0, 1)}):
        shape = FeedShape.full(*((size, min(8, most)) if axis in maker.fixed.batch_names else (1, size)))
        if axis not in texts | maker.fixed.batch_names:
            shape = replace(FeedShape.full(1, min(8, most), f"{axis} of {size}"), sizes={axis: size})
        if not 1 <= size <= most or not maker.may_turn(shape):
            continue
        fitted = maker.fixed.fit(shape)
        shapes[fitted.batch_size, fitted.sequence_length, *fitted.sizes.items()] = shape
    cases = [maker.case(shape, seed) for seed, shape in enumerate(shapes.values())]
    return [replace(case, description=f"where the graph turns, {case.description}") for case in cases]


def sized_feeds(
    model: ModelFile, shape: FeedShape, *, seed: int = 0, given: GivenInputs = NO_INPUTS
) -> dict[str, NDArray[Any]]:
    """Make random inputs of B rows of S tokens without padding, from the stamp or the graph.

    Sizes fixed by the graph or by `given` are kept.

    Raises:
        ModelFileError: the stamp cannot be used.
        InputError: an input of the graph cannot be generated.
    """
    return dict(_InputMaker(model, given).case(shape, seed).feeds)


def fixed_sizes(model: ModelFile, given: GivenInputs = NO_INPUTS) -> FixedSizes:
    """Return the sizes that a file fixes by its graph, the given shapes and its stamp."""
    maker = _InputMaker(model, given)
    usual = maker.stamp.fixed_length(maker.inputs) if maker.has_stamped_cases else None
    return replace(maker.fixed, usual_length=usual)


class _InputMaker:
    """Generates inputs that fit a graph.

    Attributes:
        stamp: what export wrote about the inputs; empty for other files.
        has_stamped_cases: whether it says which sizes the file runs on, and the user does not.
        inputs: the inputs, in the given shapes.
        fixed: the sizes that these fix.
    """

    def __init__(self, model: ModelFile, given: GivenInputs) -> None:
        self._model = model
        self.stamp = InputStamp.read_from(model) or InputStamp({})
        self.has_stamped_cases = bool(self.stamp.cases) and not given.shapes
        self.inputs = shaped(model.structure.inputs, given.shapes)
        self.fixed = FixedSizes.of(self.inputs)

    @cached_property
    def _uses(self) -> Mapping[str, Sequence[tuple[Node, int]]]:
        return input_uses(self._model)

    @cached_property
    def _bounds(self) -> dict[str, int]:
        return index_bounds(self._model)

    @cached_property
    def is_exchanged(self) -> bool:
        return names_are_exchanged(self._model)

    @property
    def is_masked(self) -> bool:
        """Whether outputs only have a meaning where a mask is 1; with exchanged names, a row without has none."""
        return any(is_mask(info) for info in self.inputs) and not self.is_exchanged

    def may_turn(self, shape: FeedShape) -> bool:
        """Whether the file may run on such a shape: its stamp says which images it takes, and lengths may be fixed."""
        length = self.stamp.fixed_length(self.inputs)
        return not self.has_stamped_cases or (not shape.sizes and length in (None, shape.sequence_length))

    def case(self, shape: FeedShape, seed: int, *, in_samples: bool = False) -> Case:
        """Make inputs of `shape`, adapted to the graph, and shortened if they are too large."""
        is_stamped = self.has_stamped_cases and self.may_turn(shape)
        shape = self.fixed.fit(_in_samples(shape) if in_samples and self._holds_samples else shape)
        if is_stamped:
            sizes = self.stamp.resized(self.inputs, shape.batch_size, shape.sequence_length)
            feeds = self.stamp.make_case(sizes, self.inputs, seed).feeds
        else:
            shape, feeds = self._generate(shape, seed)
        return Case(shape.description, feeds, shape.mask if self.is_masked else None)

    def _generate(self, shape: FeedShape, seed: int) -> tuple[FeedShape, dict[str, NDArray[Any]]]:
        shortest = (1, self.fixed.sequence_length)
        while _num_bytes(self.inputs, shape) > _MOST_BYTES and shape.sequence_length not in shortest:
            shape = self.fixed.fit(shape.halved())
        feeds = random_feeds(self.inputs, shape, self._bounds, seed=seed, recipes=self.stamp.inputs)
        for info in self.inputs:
            if is_used_as_mask(info, self._uses) and feeds[info.name].shape == shape.mask.shape:
                feeds[info.name] = shape.mask.astype(info.dtype)
        if self.is_exchanged:
            feeds[MASK], feeds[TOKEN_TYPES] = feeds[TOKEN_TYPES], feeds[MASK]
        return shape, feeds

    @property
    def _holds_samples(self) -> bool:
        operators = self._model.structure.ops.keys()
        return any(holds_samples(info, self._uses, operators) for info in self.inputs)

    def picture_shapes(self) -> tuple[FeedShape, ...]:
        """Return shapes for an image model with dynamic sizes; none for other models."""
        free = [
            [size for size in info.shape if isinstance(size, str) and size not in self.fixed.batch_names]
            for info in self.inputs
            if len(info.shape) == 4 and info.dtype in _PIXELS
        ]
        channels = any(3 in info.shape for info in self.inputs)
        names = next((names for names in free if len(set(names)) > 1 or (names and channels)), [])
        if not names or any(info.dtype in ("int64", "int32") and len(info.shape) == 2 for info in self.inputs):
            return ()
        sizes = [(3, height, width)[-len(names) :] for _, height, width in _PICTURES]
        return tuple(
            FeedShape(
                f"images of {rows} x {height} x {width}", (1,) * rows, 1, sizes=dict(zip(names, size, strict=True))
            )
            for (rows, height, width), size in zip(_PICTURES, sizes, strict=True)
        )


@dataclass(frozen=True)
class FeedShape:
    """The shape of generated inputs.

    Attributes:
        description: description of the shape, for reports.
        lengths: real tokens of each of the B rows, at most `sequence_length`.
        sequence_length: S; the rest of a row is padding.
        padding: the padding side, `right` or `left`.
        past_length: P, number of earlier tokens whose keys and values a model with a cache gets; in the first row, the
            first third of them is padding.
        sizes: sizes of axes that are neither batch nor sequence, such as the height of images, by name.
    """

    description: str
    lengths: tuple[int, ...]
    sequence_length: int
    padding: str = "right"
    past_length: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def full(cls, batch_size: int, sequence_length: int, description: str = "") -> FeedShape:
        """Make a shape of `batch_size` rows without padding."""
        return cls(
            description or f"{batch_size} x {sequence_length}",
            (sequence_length,) * batch_size,
            sequence_length,
        )

    def halved(self) -> FeedShape:
        """Make a shape of half the length."""
        lengths, length = tuple((part + 1) // 2 for part in self.lengths), (self.sequence_length + 1) // 2
        return replace(self, description=f"{len(lengths)} x {length}", lengths=lengths, sequence_length=length)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True where there is a real token: bool [B, S]."""
        position = np.arange(self.sequence_length)[None, :]
        lengths = np.array(self.lengths)[:, None]
        if self.padding == "left":
            return position >= self.sequence_length - lengths
        return position < lengths

    @property
    def is_ragged(self) -> bool:
        """Whether any row has padding."""
        return min(self.lengths) < self.sequence_length


def verification_shapes(longest: int | None) -> tuple[FeedShape, ...]:
    """Return the shapes on which a model is verified; S is at most `longest`, and at most 1024.

    One row, several, a single token, rows of one, a length no power of two divides, rows of all lengths padded on the
    right and on the left (only the latter reveals the mask of a causal model), and one of the maximum length: axes
    fixed at the traced shape, masks that are not applied and position tables that end early each fail on one of these.
    The longest comes first: after a short text, some models (BigBird) compute differently from then on.
    """
    longest = min(longest or LONGEST_CASE, LONGEST_CASE)
    return (
        FeedShape.full(1, longest, f"a long text, {longest} tokens"),
        FeedShape.full(1, min(8, longest), "one row"),
        FeedShape.full(6, min(16, longest), "several rows"),
        FeedShape.full(2, 1, "rows of a single token"),
        FeedShape.full(3, min(37, longest), "an odd length"),
        _ragged("ragged, padded right", (1.0, 0.6, 0.35, 0.1), min(23, longest), "right"),
        _ragged("ragged, padded left", (1.0, 0.6, 0.2), min(29, longest), "left"),
        _ragged("ragged, one long row", (0.05, 1.0, 0.5), min(61, longest), "right"),
        # Masks and rows must also be right beyond the windows of local attention (128 for ModernBERT).
        _ragged("ragged, long rows", (1.0, 0.55), min(160, longest), "right"),
        FeedShape.full(1, 1, "a single token"),
    )


def padding_alone(longest: int | None) -> FeedShape:
    """Return a shape with a row of only padding, as in a batch that is filled up to its size; for models with a mask.

    Such a row pools over, and attends to, nothing: dividing by that count gives NaN in half precision.
    """
    length = min(longest or LONGEST_CASE, 7)
    return FeedShape("a row of padding alone", (length, 0, max(1, length // 2)), length)


def past_shapes(longest: int | None) -> tuple[FeedShape, ...]:
    """Return additional shapes for verifying a model with a cache: steps after some past tokens."""
    longest = min(longest or LONGEST_CASE, LONGEST_CASE)
    past_length = min(11, longest // 2)
    shapes = (
        FeedShape.full(3, 1, f"a step, {past_length} tokens before it"),
        FeedShape.full(2, min(7, longest // 2), f"several tokens, {past_length} before them"),
    )
    return tuple(replace(shape, past_length=past_length) for shape in shapes) if past_length else ()


def _ragged(description: str, parts: Sequence[float], sequence_length: int, padding: str) -> FeedShape:
    lengths = tuple(max(1, round(part * sequence_length)) for part in parts)
    return FeedShape(description, lengths, sequence_length, padding)


@dataclass(frozen=True)
class FixedSizes:
    """The sizes fixed by the inputs of a file.

    Attributes:
        batch_size: B; None if dynamic.
        sequence_length: S; 1 if no input has a sequence, None if dynamic.
        batch_names: the names of batch axes, in any position.
        other_names: the names of leading axes that are not a batch.
        usual_length: the length of a file that may be run on others, such as 1 for images of any size.
    """

    batch_size: int | None
    sequence_length: int | None
    batch_names: frozenset[str] = frozenset()
    other_names: frozenset[str] = frozenset()
    usual_length: int | None = None

    @classmethod
    def of(cls, inputs: Sequence[TensorInfo]) -> FixedSizes:
        """Read the sizes from the inputs; axes are identified by name, or by position if the name is not conclusive."""
        inputs = [info for info in inputs if info.shape]
        firsts = [info.shape[0] for info in inputs]
        later = {size for info in inputs for size in info.shape[1:]}
        names = {size for size in (*firsts, *later) if isinstance(size, str)}
        batch = {name for name in names if _BATCH.search(name)}
        batch |= {name for name in names.intersection(firsts) - later if not _SEQUENCE.search(name)}
        batch = batch or {name for name in firsts[:1] if isinstance(name, str)}
        # A recurrent state is [layers, B, width]; its batch axis is unnamed if the axes of other inputs are too.
        batch |= {
            f"{info.name}.1"
            for info in inputs
            if info.shape[1:2] == (f"{info.name}.1",) and len(info.shape) == 3 and isinstance(info.shape[0], int)
        } & (names if any(f"{info.name}.0" in batch for info in inputs) else set())
        texts = sorted((info for info in inputs if is_text(info)), key=is_mask)
        has_batch, has_sequence = bool(batch) or None in firsts, bool(names - batch) or None in later
        rows = next((info.shape[0] for info in texts if isinstance(info.shape[0], int)), None)
        if rows is None and not has_batch:
            rows = next((size for size in firsts if isinstance(size, int)), 1)
        length = texts[0].shape[1] if texts else None
        length = length if isinstance(length, int) else None if has_sequence else 1
        return cls(rows, length, frozenset(batch), frozenset(names.intersection(firsts) - batch))

    def fit(self, shape: FeedShape) -> FeedShape:
        """Adapt `shape` to the file: first its ragged rows, then their lengths proportionally."""
        rows, length = self.batch_size or shape.batch_size, self.sequence_length or shape.sequence_length
        # A row of only padding stays as it is.
        lengths = tuple(max(min(part, 1), round(part / shape.sequence_length * length)) for part in shape.lengths)
        sizes = {**dict.fromkeys(self.batch_names, rows), **dict.fromkeys(self.other_names, length), **shape.sizes}
        lengths = lengths[-rows:] if rows <= len(lengths) else tuple(np.resize(lengths, rows).tolist())
        if (rows, length) == (shape.batch_size, shape.sequence_length):
            return replace(shape, sizes=sizes)
        text = f"{rows} x {length}, padded {shape.padding}" if min(lengths) < length else f"{rows} x {length}"
        text = f"{shape.description}, {rows} at once" if shape.sizes else text
        return replace(shape, description=text, lengths=lengths, sequence_length=length, sizes=sizes)


def random_feeds(
    inputs: Sequence[TensorInfo],
    shape: FeedShape,
    bounds: Mapping[str, int],
    *,
    seed: int = 0,
    recipes: Mapping[str, Recipe] | None = None,
) -> dict[str, NDArray[Any]]:
    """Make one array for each of `inputs`, taking the sizes of named axes from `shape`.

    Masks follow the lengths of `shape`; other integers are drawn below their bound (see `index_bounds`), also on
    padding, to reveal a mask that is not applied; floats are standard normal. The first axis of a tensor is the batch,
    and every other named axis is the sequence, except for the axes in the sizes of `shape`. Ids with a stamped recipe
    follow the stamp.

    Raises:
        InputError: an input has a dtype or shape that cannot be generated.
    """
    if (num_bytes := _num_bytes(inputs, shape)) > _MOST_BYTES:
        raise InputError(
            f"random inputs of {shape.batch_size} x {shape.sequence_length} would take {num_bytes:,} bytes, and at "
            f"most {_MOST_BYTES:,} are made up",
            "say what the sizes are: --input_shape NAME:1,128",
        )
    chosen = {info.name: Recipe.plain(info, bounds.get(info.name, _FEWEST_ROWS)) for info in inputs}
    chosen |= {name: recipe for name, recipe in (recipes or {}).items() if recipe.below}
    shapes = {info.name: _dims(info, shape) for info in inputs}
    content = {info.name: _mask(info, shapes[info.name], shape) for info in inputs if is_mask(info)}
    return make_feeds(inputs, chosen, shapes, content, seed=seed)


def _num_bytes(inputs: Iterable[TensorInfo], shape: FeedShape) -> int:
    return sum(8 * math.prod(_dims(info, shape)) for info in inputs)


def _dims(info: TensorInfo, shape: FeedShape) -> tuple[int, ...]:
    return tuple(_size(dimension, axis, shape) for axis, dimension in enumerate(info.shape))


def _mask(info: TensorInfo, dims: Sequence[int], shape: FeedShape) -> NDArray[np.bool_]:
    """Return a mask of the lengths of `shape`, scaled if the mask has a length of its own."""
    rows, length = dims
    is_read_by_decoder = info.name.startswith("encoder_") and isinstance(info.shape[1], int)
    if is_read_by_decoder or length not in (shape.sequence_length, shape.past_length + shape.sequence_length):
        # The decoder's lengths differ from the encoder's, which may have a single fixed length.
        parts = np.resize(np.array(shape.lengths) / shape.sequence_length, rows)
        return np.asarray(np.arange(length) < np.ceil(parts * length)[:, None])
    mask = shape.mask
    if length == shape.past_length + shape.sequence_length:
        past = np.ones((shape.batch_size, shape.past_length), dtype=bool)
        past[0, : shape.past_length // 3] = False
        mask = np.concatenate([past, mask], axis=1)
    if info.name == POOLING_MASK:
        mask = some_prompts(mask)
    return mask if len(mask) == rows else np.resize(mask, (rows, length))


def _size(dimension: Dimension, axis: int, shape: FeedShape) -> int:
    """Return the size of an axis: fixed, by name, the batch, or the past and the sequence, alone or together."""
    if isinstance(dimension, int):
        return dimension
    if dimension is not None and dimension in shape.sizes:
        return shape.sizes[dimension]
    if axis == 0 or dimension == _BATCH_AXIS:
        return shape.batch_size
    return sum(_part_of_length(name, shape) for name in str(dimension).split(SUM))


def _part_of_length(name: str, shape: FeedShape) -> int:
    if name.isdecimal():  # of `past_sequence_length + 1`
        return int(name)
    past = shape.past_length if is_past(name) or "total" in name.lower() else 0
    return past if is_past(name) else past + shape.sizes.get(name, shape.sequence_length)


def _in_samples(shape: FeedShape) -> FeedShape:
    lengths = tuple(length * _SAMPLES_IN_A_STEP for length in shape.lengths)
    return replace(shape, lengths=lengths, sequence_length=shape.sequence_length * _SAMPLES_IN_A_STEP)


def names_of_ids(model: ModelFile) -> list[str]:
    """Return the inputs that are ids of tokens, `input_ids` first: as stamped, else those that look up a table."""
    stamp = InputStamp.read_from(model)
    names = (stamp.names_of_ids if stamp is not None else []) or list(index_bounds(model))
    names += [info.name for info in model.structure.inputs if info.name == IDS and info.name not in names]
    return sorted(names, key=lambda name: name != IDS)


def extreme_case(model: ModelFile, cases: Sequence[Case]) -> Case | None:
    """Return a case like the first of several rows, of which one has the largest embeddings and another the smallest.

    Activation outliers start at a few tokens, which random ids rarely hit. None for a model without ids, or whose table
    of them is not found or does not hold floats.
    """
    usual = next((case for case in cases if _is_full(case)), None)
    norms = _norms(model) if usual is not None else None
    if usual is None or norms is None:
        return None
    ids = usual.feeds[IDS]
    recipe = (InputStamp.read_from(model) or InputStamp({})).inputs.get(IDS, Recipe("ids", len(norms)))
    special = {*recipe.excluded, recipe.first}  # they stay where they are
    norms = norms[: recipe.below]
    order = [token for token in np.argsort(norms).tolist() if token not in special]
    if len(order) < 2:
        return None
    length = ids.shape[1]
    rows = np.stack([np.resize(order[::-1][:length], length), np.resize(order[:length], length)])
    extreme = ids.copy()
    keep = np.isin(ids[:2], [token for token in special if token is not None])
    extreme[:2] = np.where(keep, ids[:2], rows)
    return Case("tokens of the largest and the smallest embeddings", {**usual.feeds, IDS: extreme}, usual.valid)


def _is_full(case: Case) -> bool:
    ids = case.feeds.get(IDS)
    is_text = ids is not None and ids.ndim == 2 and len(ids) > 1 and ids.shape[1] > 1
    return is_text and (case.valid is None or bool(case.valid.all()))


def _norms(model: ModelFile) -> NDArray[np.float32] | None:
    """Return the norms of the embeddings of all ids: float32 [V]."""
    looked_up = (table for name, table in tables(model, (IDS,), {"Cast"}) if name is not None)
    table_name = next((table.name for table in looked_up if table.dtype in ("float32", "float16")), None)
    tensor = None if table_name is None else load_model(model.path).graph.initializers[table_name].const_value
    if tensor is None:
        return None
    table = tensor.numpy()
    pieces = [table[start : start + _PIECE].astype(np.float32) for start in range(0, len(table), _PIECE)]
    return np.concatenate([np.linalg.norm(piece, axis=1) for piece in pieces])


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
    infos = []
    for info in inputs:
        names = (f"{info.name}.{axis}" if size is None else size for axis, size in enumerate(info.shape))
        own = tuple(size if isinstance(size, int) else named.get(size, size) for size in names)
        infos.append(info._replace(shape=shapes.get(info.name, own)))
    return infos


def read_sample(path: Path, inputs: Sequence[TensorInfo]) -> Case:
    """Read the inputs of one run, named after `inputs`.

    Raises:
        InputError: the file cannot be read, or does not fit the inputs.
    """
    arrays = _load_arrays(path)
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


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    hint = "write it with numpy.savez; numbers and texts only, nothing that needs pickle"
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:  # a pipe would wait for a writer
            num_bytes = sum(entry.file_size for entry in archive.infolist())
        if num_bytes > _MOST_BYTES:
            raise InputError(f"{path} holds {num_bytes:,} bytes", f"at most {_MOST_BYTES:,} are read for one run")
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
