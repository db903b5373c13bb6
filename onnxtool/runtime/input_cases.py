"""Inputs to run a file on: a user's samples, from its export's stamp, or generated from the graph."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.graph.operators import OPERATORS
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.model_file.wire import Node, read_nodes
from onnxtool.reading import open_regular
from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.feeds import (
    LONGEST_CASE,
    MASK,
    MOST_BYTES,
    TOKEN_TYPES,
    FeedShape,
    FixedSizes,
    has_past,
    holds_samples,
    index_bounds,
    input_uses,
    is_mask,
    is_text,
    is_used_as_mask,
    names_are_exchanged,
    num_positions,
    padding_alone,
    past_shapes,
    random_feeds,
    verification_shapes,
)
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.input_stamp import IDS, InputKind, InputStamp, StampedCase
from onnxtool.runtime.nesting import is_nested, is_part

_SAMPLES_IN_A_STEP = 640  # twice the samples in a step of wav2vec2, and enough for its first step
_LONGEST = 64  # for a model without a maximum length, and without a table of positions
# Rows, height and width: of multiples of 32, which detectors ask for, and of others.
_PICTURES = ((1, 64, 64), (2, 96, 160), (1, 224, 224), (3, 37, 53), (1, 48, 320))
_PIXELS = ("uint8", "float32", "float16", "float64")
_MOST_ALIKE = 3  # cases with the same shapes and masks: other values reveal what a single case hides


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
    inputs = model.structure.inputs
    stamp = InputStamp.read(model)
    if stamp is not None and stamp.cases and not given.shapes:
        short = tuple(case for case in stamp.cases if longest is None or _num_tokens(case, stamp.kinds) <= longest)
        stamp = replace(stamp, cases=short or stamp.cases)
        return (stamp if has_past(inputs) else stamp.with_padding_alone()).make_cases(inputs)
    length = model.metadata_number(MAX_LENGTH_KEY) or (stamp is None and num_positions(model)) or _LONGEST
    length = min(length, longest or length)
    exchanged = names_are_exchanged(model)
    masked = any(is_mask(info) for info in inputs) and not exchanged
    maker = _Maker.of(model, given)
    more = past_shapes(length) if has_past(maker.inputs) else (padding_alone(length),) * masked
    pictures = maker.picture_shapes() if stamp is None else ()
    cases: list[Case] = []
    alike: Counter[object] = Counter()
    for seed, shape in enumerate((*(pictures or verification_shapes(length)), *more)):
        shape, feeds = maker.make(shape, seed)
        if exchanged:  # a fully masked row has no meaning
            feeds[MASK], feeds[TOKEN_TYPES] = feeds[TOKEN_TYPES], feeds[MASK]
        key = shape.mask.tobytes() if masked else 0, *(array.shape for array in feeds.values())
        alike[key] += 1
        if alike[key] <= _MOST_ALIKE or stamp is not None:
            other = ", other values" if any(case.description == shape.description for case in cases) else ""
            cases.append(Case(f"{shape.description}{other}", feeds, shape.mask if masked else None))
    return cases


def turning_cases(model: ModelFile, turns: Mapping[str, Collection[int]], given: GivenInputs = NO_INPUTS) -> list[Case]:
    """Return inputs at the sizes where a graph switches to another computation, and one below and above.

    Args:
        model: the file.
        turns: the sizes, by axis name; sizes without a name are text lengths.
        given: required input shapes.
    """
    inputs, stamp = model.structure.inputs, InputStamp.read(model)
    stamped = stamp if stamp is not None and stamp.cases and not given.shapes else None
    maker, most = _Maker.of(model, given), min(model.metadata_number(MAX_LENGTH_KEY) or LONGEST_CASE, LONGEST_CASE)
    masked = any(is_mask(info) for info in inputs) and not names_are_exchanged(model)
    texts = {"", *(info.shape[1] for info in inputs if is_text(info))}
    shapes: dict[tuple[object, ...], FeedShape] = {}
    for axis, size in sorted({(axis, n + d) for axis, sizes in turns.items() for n in sizes for d in (-1, 0, 1)}):
        if not 1 <= size <= most:
            continue
        shape = FeedShape.full(*((size, min(8, most)) if axis in maker.fixed.batch_names else (1, size)))
        if axis not in texts | maker.fixed.batch_names:
            if stamped is not None:  # it says which images the model takes
                continue
            shape = replace(FeedShape.full(1, min(8, most), f"{axis} of {size}"), sizes={axis: size})
        if stamped is None:
            shape = maker.fixed.fit(shape)
        elif stamped.fixed_length(inputs) not in (None, shape.sequence_length):
            continue
        shapes[shape.batch_size, shape.sequence_length, *shape.sizes.items()] = shape
    cases = []
    for seed, shape in enumerate(shapes.values()):
        if stamped is None:
            feeds = maker.make(shape, seed, in_samples=False)[1]
        else:
            feeds = stamped.make_sized(inputs, shape.batch_size, shape.sequence_length, seed=seed)
        cases.append(Case(f"where the graph turns, {shape.description}", feeds, shape.mask if masked else None))
    return cases


@dataclass(frozen=True)
class _Maker:
    """Generate inputs that fit a graph.

    Attributes:
        inputs: the inputs, in the given shapes.
        uses: the readers of each.
        bounds: bounds of ids, see `index_bounds`.
        kinds: the kinds from the stamp.
        operators: the graph's operators, including branches and bodies.
    """

    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    fixed: FixedSizes
    uses: Mapping[str, Sequence[tuple[Node, int]]]
    bounds: dict[str, int]
    kinds: Mapping[str, InputKind] | None
    operators: AbstractSet[str]

    @classmethod
    def of(cls, model: ModelFile, given: GivenInputs) -> _Maker:
        stamp, structure = InputStamp.read(model), model.structure
        inputs = shaped(structure.inputs, given.shapes)
        kinds = None if stamp is None else stamp.kinds
        fixed, operators = FixedSizes.of(inputs), structure.ops.keys()
        return cls(inputs, structure.outputs, fixed, input_uses(model), index_bounds(model), kinds, operators)

    def make(
        self, shape: FeedShape, seed: int, *, in_samples: bool = True
    ) -> tuple[FeedShape, dict[str, NDArray[Any]]]:
        """Return `shape` adapted to the graph, shortened if too large, and matching inputs."""
        if in_samples and any(holds_samples(info, self.uses, self.operators) for info in self.inputs):
            shape = _in_samples(shape)
        shape = self.fixed.fit(shape)
        while True:
            try:
                feeds = random_feeds(self.inputs, shape, self.bounds, seed=seed, kinds=self.kinds)
                break
            except InputError:
                if shape.sequence_length == 1:
                    raise
                shape = self.fixed.fit(shape.halved())
                if shape.sequence_length == self.fixed.sequence_length:
                    raise
        for info in self.inputs:
            if is_used_as_mask(info, self.uses) and feeds[info.name].shape == shape.mask.shape:
                feeds[info.name] = shape.mask.astype(info.dtype)
        return shape, with_operands(feeds, self.uses, self.outputs)

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


def sized_feeds(
    model: ModelFile, shape: FeedShape, *, seed: int = 0, given: GivenInputs = NO_INPUTS
) -> dict[str, NDArray[Any]]:
    """Make random inputs of B rows of S tokens without padding, from the stamp or the graph.

    Sizes fixed by the graph or by `given` are kept.

    Raises:
        ModelFileError: the stamp cannot be used.
        InputError: the stamp has other sizes, or an input of the graph cannot be generated.
    """
    inputs = model.structure.inputs
    stamp = InputStamp.read(model)
    if (
        stamp is not None
        and stamp.cases
        and not given.shapes
        and stamp.fixed_length(inputs) in (None, shape.sequence_length)
    ):
        return stamp.make_sized(inputs, shape.batch_size, shape.sequence_length, seed=seed)
    return _Maker.of(model, given).make(shape, seed, in_samples=False)[1]


def names_of_ids(model: ModelFile) -> list[str]:
    """Return the inputs that are ids of tokens, `input_ids` first: as stamped, else those that look up a table."""
    stamp = InputStamp.read(model)
    stamped = {} if stamp is None else stamp.kinds
    names = [name for name, kind in stamped.items() if kind.kind == IDS] or list(index_bounds(model))
    names += [info.name for info in model.structure.inputs if info.name == "input_ids" and info.name not in names]
    return sorted(names, key=lambda name: name != "input_ids")


def _num_tokens(case: StampedCase, kinds: Mapping[str, InputKind]) -> int:
    """Return the length of the longest text of a case; 0 without any."""
    texts = (case.shapes[name] for name, kind in kinds.items() if kind.kind == IDS)
    return max((shape[1] for shape in texts if len(shape) > 1), default=0)


def _in_samples(shape: FeedShape) -> FeedShape:
    lengths = tuple(length * _SAMPLES_IN_A_STEP for length in shape.lengths)
    return replace(shape, lengths=lengths, sequence_length=shape.sequence_length * _SAMPLES_IN_A_STEP)


_SHAPE, _RATIO, _PARTS, _PLACES = "shape", "ratio", "parts", "places"
# By operator and place: the shape that the graph declares for its output, that over the shape of its first input, the
# parts that it is split in, one axis after another, or a number.
_OPERANDS: Mapping[tuple[str, int], str | float] = {
    ("ConstantOfShape", 0): _SHAPE,
    ("CumProd", 1): 0,
    ("CumSum", 1): 0,
    ("Expand", 1): _SHAPE,
    ("MaxUnpool", 2): _SHAPE,
    ("NonMaxSuppression", 3): 0.5,
    ("NonMaxSuppression", 4): 0.5,
    ("Reshape", 1): _SHAPE,
    ("Resize", 2): _RATIO,
    ("Resize", 3): _SHAPE,
    ("Slice", 2): 2,
    ("Slice", 3): _PLACES,
    ("Slice", 4): 1,
    ("Split", 1): _PARTS,
    ("SplitToSequence", 1): 1,
    ("Squeeze", 1): _PLACES,
    ("Unsqueeze", 1): _PLACES,
    ("Upsample", 1): _RATIO,
}


def with_operands(
    feeds: Mapping[str, NDArray[Any]],
    uses: Mapping[str, Sequence[tuple[Node, int]]],
    outputs: Sequence[TensorInfo],
) -> dict[str, NDArray[Any]]:
    """Replace inputs among `feeds` whose operator accepts few values; others stay."""
    shapes = {info.name: info.shape for info in outputs}
    found = dict(feeds)
    for name, array in feeds.items():
        for node, place in uses.get(name, ()):
            rule = _OPERANDS.get((node.op_type, place))
            if rule is None or node.inputs[place] != name:
                continue
            value = _value(rule, array, feeds.get(node.inputs[0]), [shapes.get(output, ()) for output in node.outputs])
            if value is not None and value.shape == array.shape:
                found[name] = value.astype(array.dtype)
                break
    return found


def _value(
    rule: str | float, array: NDArray[Any], data: NDArray[Any] | None, outputs: Sequence[Sequence[Any]]
) -> NDArray[Any] | None:
    if not isinstance(rule, str):
        return np.full(array.shape, rule)
    if rule == _PLACES:
        return np.arange(array.size).reshape(array.shape)
    if not all(isinstance(size, int) for shape in outputs for size in shape):
        return None
    if rule == _SHAPE:  # some take the last axes alone
        return np.array(outputs[0][-array.size :])
    if data is None or any(len(shape) != data.ndim for shape in outputs):
        return None
    if rule == _RATIO:
        return np.asarray(np.array(outputs[0]) / np.array(data.shape))[-array.size :]
    sums = np.sum(np.array(outputs), axis=0)
    axis = next((axis for axis, size in enumerate(data.shape) if sums[axis] == size), None)
    return None if axis is None else np.array([shape[axis] for shape in outputs])


_IDS = "input_ids"
_PIECE = 1 << 14  # rows at a time: the table of a large model is a gigabyte


def extreme_case(model: ModelFile, cases: Sequence[Case]) -> Case | None:
    """Return a case like the first of several rows, of which one has the largest embeddings and another the smallest.

    Activation outliers start at a few tokens, which random ids rarely hit. None for a model without ids, or whose table
    of them is not found or does not hold floats.
    """
    usual = next((case for case in cases if _is_full(case)), None)
    norms = _norms(model) if usual is not None else None
    if usual is None or norms is None:
        return None
    ids = usual.feeds[_IDS]
    stamp = InputStamp.read(model)
    kind = None if stamp is None else stamp.kinds.get(_IDS)
    special: list[int] = []  # tokens that stay where they are, and stand nowhere else
    if kind is not None and kind.kind == IDS:
        special = [token for token in (*kind.never, kind.first, kind.last, kind.pad) if token is not None]
        norms = norms[: kind.below]
    order = [token for token in np.argsort(norms).tolist() if token not in special]
    if len(order) < 2:
        return None
    length = ids.shape[1]
    rows = np.stack([np.resize(order[::-1][:length], length), np.resize(order[:length], length)])
    extreme = ids.copy()
    keep = np.isin(ids[:2], special)
    extreme[:2] = np.where(keep, ids[:2], rows)
    return Case("tokens of the largest and the smallest embeddings", {**usual.feeds, _IDS: extreme}, usual.valid)


def _is_full(case: Case) -> bool:
    ids = case.feeds.get(_IDS)
    is_text = ids is not None and ids.ndim == 2 and len(ids) > 1 and ids.shape[1] > 1
    return is_text and (case.valid is None or bool(case.valid.all()))


def _norms(model: ModelFile) -> NDArray[np.float32] | None:
    """Return the norms of the embeddings of all ids: float32 [V]."""
    ids, tables = {_IDS}, set[str]()
    for node in read_nodes(model.path):
        if node.op_type == "Cast" and node.inputs[0] in ids:
            ids.add(node.outputs[0])
        row = OPERATORS.get((node.domain, node.op_type))
        named = row.named(node.inputs) if row is not None else {}
        tables |= {named[table] or "" for indices, table in (row.lookups if row else ()) if named[indices] in ids}
    floats = {tensor.name for tensor in model.structure.initializers if tensor.dtype in ("float32", "float16")}
    name = next(iter(tables & floats), None)
    tensor = None if name is None else load_model(model.path).graph.initializers[name].const_value
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
