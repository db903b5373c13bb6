"""Generate inputs from a model's signature, for verification and timing.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.pooling_module import POOLING_MASK, some_prompts
from onnxtool.errors import InputError
from onnxtool.graph.operators import OPERATORS
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Node, read_nodes
from onnxtool.reports import TensorInfo
from onnxtool.runtime.input_stamp import IDS, NORMAL, InputKind
from onnxtool.runtime.nesting import is_nested

# Operators through which an index stays an index on its way to the table, in any of their inputs; the first ones do not
# change it.
_MOVERS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Transpose", "Expand"})
_FORWARDERS = _MOVERS | {"Concat", "Add", "Sub", "Clip", "Min", "Max", "Where"}
MASK, TOKEN_TYPES = "attention_mask", "token_type_ids"
_FEWEST_ROWS = 2
_INDEX_DTYPES = ("int64", "int32")
# Integers that are not ids, such as image pixels: lower bound, and exclusive upper bound.
_OTHER_INTEGERS = {"uint8": (0, 256), "int8": (-128, 128), "int16": (-99, 100)} | dict.fromkeys(
    ("uint16", "uint32", "uint64"), (0, 100)
)
_WORDS = np.array(["a cat", "two dogs", "rain", "", "42", "Zürich"], object)
_FLOATS = ("float32", "float16", "float64")
_BATCH_AXIS = "batch_size"
_BATCH = re.compile(r"batch|^(n|b|bs|bsz)$", re.IGNORECASE)
_SEQUENCE = re.compile(r"seq|len|time|token|^(s|t|l)$", re.IGNORECASE)
_SOUND = re.compile(r"audio|wav|sound|speech|signal|pcm|input_values", re.IGNORECASE)
# Operators that pass on the values of their first input in a recognizable form.
_CARRIERS = _MOVERS | {"Add", "Concat", "Div", "Mul", "Pad", "Sub"}
_OF_SOUNDS = frozenset({"Conv", "ConvInteger", "QLinearConv", "STFT"})
MOST_BYTES = 1 << 30  # of the generated inputs of one run, as float64
_NUM_ELEMENTS = 3  # of a sequence
_FEWEST_POSITIONS = 9
_SUM = " + "  # between names of axes whose sizes are added, as in `past_sequence + sequence`
LONGEST_CASE = 1024  # with a longer window, a check would cost more than the work that it checks


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


def has_past(inputs: Sequence[TensorInfo]) -> bool:
    """Whether a model takes a cache of earlier tokens."""
    return any(isinstance(size, str) and any(map(_is_past, size.split(_SUM))) for info in inputs for size in info.shape)


def _is_past(name: str) -> bool:
    return "past" in name.lower()


def _ragged(description: str, parts: Sequence[float], sequence_length: int, padding: str) -> FeedShape:
    lengths = tuple(max(1, round(part * sequence_length)) for part in parts)
    return FeedShape(description, lengths, sequence_length, padding)


def index_bounds(model: ModelFile) -> dict[str, int]:
    """Return the number of rows of the table that each integer input of the model indexes.

    Found by following the input to the Gather (or EmbedLayerNormalization) that looks it up, so that random ids cover
    the whole vocabulary and never leave it. If the path from `input_ids` to its table cannot be followed, its bound is
    the size of the largest table in any lookup. Inputs that index nothing are not in the result.
    """
    bounds: dict[str, int] = {}
    largest = 0
    names = [value.name for value in model.structure.inputs if not is_mask(value)]
    for name, (rows, *_) in _tables(model, names, _FORWARDERS):
        largest = max(largest, rows)
        if name is not None:
            bounds[name] = min(bounds.get(name, rows), rows)
    if largest and any(value.name == "input_ids" for value in model.structure.inputs):
        bounds.setdefault("input_ids", largest)
    return bounds


def names_are_exchanged(model: ModelFile) -> bool:
    """Whether the names of a graph's mask and token types are swapped.

    `torch.onnx.export` names inputs by position, and scripts pass a tokenizer's output in its own order: token types
    before the mask, while BERT's `forward` takes them after it. The graph then looks up token types with the input that
    is called the mask.
    """
    names = {MASK, TOKEN_TYPES}
    if not names <= {value.name for value in model.structure.inputs}:
        return False
    return {name for name, _ in _tables(model, names, _MOVERS)} - {None} == {MASK}


def _tables(
    model: ModelFile, names: Iterable[str], forwarders: AbstractSet[str]
) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """Yield the input of `names` in each lookup, or None for anything else, and the table sizes."""
    sizes = {tensor.name: tensor.dims for tensor in model.structure.initializers if len(tensor.dims) >= 2}
    origin = {name: name for name in names}  # a value and the input that it forwards
    for node in read_nodes(model.path):
        forwarded = [value for value in node.inputs if value in origin]
        if node.op_type in forwarders and node.outputs and forwarded:
            origin[node.outputs[0]] = origin[forwarded[0]]
        for indices, table in _lookups(node):
            if table in sizes:
                yield origin.get(indices), sizes[table]


def _lookups(node: Node) -> Iterable[tuple[str, str]]:
    row = OPERATORS.get((node.domain, node.op_type))
    if row is not None:
        named = row.named(node.inputs)
        pairs = ((named[indices], named[table]) for indices, table in row.lookups)
        yield from ((indices, table) for indices, table in pairs if indices and table)


def random_feeds(
    inputs: Sequence[TensorInfo],
    shape: FeedShape,
    bounds: dict[str, int],
    *,
    seed: int = 0,
    kinds: Mapping[str, InputKind] | None = None,
) -> dict[str, NDArray[Any]]:
    """Make one array for each of `inputs`, taking the sizes of named axes from `shape`.

    Masks follow the lengths of `shape`; other integers are drawn below their bound (see `index_bounds`), also on
    padding, to reveal a mask that is not applied; floats are standard normal. The first axis of a tensor is the batch,
    and every other named axis is the sequence, except for the axes in the sizes of `shape`. Ids with a stamped kind
    follow the stamp.

    Raises:
        InputError: an input has a dtype or shape that cannot be generated.
    """
    generator = np.random.default_rng(seed)
    inputs = [part for info in inputs for part in _parts(info)]
    num_bytes = 8 * sum(math.prod(_dimension(info, axis, shape) for axis in range(len(info.shape))) for info in inputs)
    if num_bytes > MOST_BYTES:
        raise InputError(
            f"random inputs of {shape.batch_size} x {shape.sequence_length} would take {num_bytes:,} bytes, and at "
            f"most {MOST_BYTES:,} are made up",
            "say what the sizes are: --input_shape NAME:1,128",
        )
    return {info.name: np.asarray(_random_array(info, shape, bounds, kinds or {}, generator)) for info in inputs}


def _parts(info: TensorInfo) -> Iterator[TensorInfo]:
    """Yield the arrays that an input consists of; see `runtime.nesting`."""
    if not is_nested(info):
        yield info
        return
    kind, _, element = info.dtype.partition("(")
    element = element.removesuffix(")")
    if kind == "optional":
        yield from _parts(info._replace(dtype=element))
    elif kind == "sequence":
        for number in range(_NUM_ELEMENTS):
            yield from _parts(info._replace(name=f"{info.name}[{number}]", dtype=element))
    else:
        keys, _, values = element.partition(", ")
        yield TensorInfo(f"{info.name}.keys", keys, (_NUM_ELEMENTS,))
        yield TensorInfo(f"{info.name}.values", values, (_NUM_ELEMENTS,))


def is_mask(info: TensorInfo) -> bool:
    """Whether an input is a padding mask, judging by its name, the only evidence in a graph."""
    return "mask" in info.name and len(info.shape) == 2


def _random_array(
    info: TensorInfo,
    shape: FeedShape,
    bounds: dict[str, int],
    kinds: Mapping[str, InputKind],
    generator: np.random.Generator,
) -> NDArray[Any]:
    dims = [_dimension(info, axis, shape) for axis in range(len(info.shape))]
    if is_mask(info):
        return _mask(info, dims, shape).astype(_numpy_dtype(info))
    if info.dtype in _INDEX_DTYPES and info.name.endswith(".keys"):  # of a map, where keys are unique
        return np.arange(*dims).astype(info.dtype)
    if info.dtype in (*_INDEX_DTYPES, *_FLOATS):
        plain = InputKind(NORMAL) if info.dtype in _FLOATS else InputKind(IDS, bounds.get(info.name, _FEWEST_ROWS))
        kind = kinds.get(info.name, plain)
        return (kind if kind.kind == IDS else plain).draw(dims, shape.mask, generator).astype(info.dtype)
    if info.dtype == "bool":
        return generator.integers(0, 2, dims).astype(bool)
    if info.dtype in _OTHER_INTEGERS:
        return generator.integers(*_OTHER_INTEGERS[info.dtype], dims).astype(info.dtype)
    if info.dtype == "string":
        words = np.arange(math.prod(dims)) + int(generator.integers(len(_WORDS)))
        return _WORDS[words.reshape(dims) % len(_WORDS)]
    raise InputError(
        f"cannot generate values for the input {info.name} of dtype {info.dtype}",
        "onnxruntime takes no arrays of it: pass --no_verify, and compare the result by hand",
    )


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


def _dimension(info: TensorInfo, axis: int, shape: FeedShape) -> int:
    dimension = info.shape[axis]
    if isinstance(dimension, int):
        return dimension
    if dimension is not None and dimension in shape.sizes:
        return shape.sizes[dimension]
    return shape.batch_size if axis == 0 or dimension == _BATCH_AXIS else _length(dimension, shape)


def _length(dimension: int | str | None, shape: FeedShape) -> int:
    """Return the size of an axis other than the batch: the past, the sequence, or both together."""
    return sum(_part_of_length(name, shape) for name in str(dimension).split(_SUM))


def _part_of_length(name: str, shape: FeedShape) -> int:
    if name.isdecimal():  # of `past_sequence_length + 1`
        return int(name)
    past = shape.past_length if _is_past(name) or "total" in name.lower() else 0
    return past if _is_past(name) else past + shape.sizes.get(name, shape.sequence_length)


@dataclass(frozen=True)
class FixedSizes:
    """The sizes fixed by the inputs of a file.

    Attributes:
        batch_size: B; None if dynamic.
        sequence_length: S; 1 if no input has a sequence, None if dynamic.
        batch_names: the names of batch axes, in any position.
        other_names: the names of leading axes that are not a batch.
    """

    batch_size: int | None
    sequence_length: int | None
    batch_names: frozenset[str] = frozenset()
    other_names: frozenset[str] = frozenset()

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


def is_text(info: TensorInfo) -> bool:
    """Whether an input holds token ids, or a mask of tokens: int [B, S]."""
    return len(info.shape) == 2 and (is_mask(info) or info.dtype in _INDEX_DTYPES)


def input_uses(model: ModelFile) -> dict[str, list[tuple[Node, int]]]:
    """Return, for each input, the nodes and positions that its values reach through operators that only move them.

    In arithmetic, only the first operand is followed: the factor of a mask is not a mask.
    """
    origin = {info.name: info.name for info in model.structure.inputs}
    uses: dict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in read_nodes(model.path):
        for place, value in enumerate(node.inputs):
            if value in origin:
                uses[origin[value]].append((node, place))
        if node.op_type in _CARRIERS and node.outputs and node.inputs[:1] and node.inputs[0] in origin:
            origin[node.outputs[0]] = origin[node.inputs[0]]
    return uses


def holds_samples(
    info: TensorInfo, uses: Mapping[str, Sequence[tuple[Node, int]]], operators: AbstractSet[str] = frozenset()
) -> bool:
    """Whether an input is a row of audio samples, hundreds of which are one step of the model of these `operators`."""
    is_row = info.dtype in _FLOATS and len(info.shape) == 2 and not isinstance(info.shape[1], int)
    # An input that the main graph does not read is for a branch or a body, of which only the operators are known.
    reads = uses.get(info.name, ())
    convolved = any(node.op_type in _OF_SOUNDS for node, _ in reads) or (not reads and bool(_OF_SOUNDS & operators))
    return is_row and not is_mask(info) and (convolved or bool(_SOUND.search(info.name)))


def is_used_as_mask(info: TensorInfo, uses: Mapping[str, Sequence[tuple[Node, int]]]) -> bool:
    """Whether a float input [B, S] is a mask by its use: subtracted from one, or multiplied once it is raised."""
    places = {(node.op_type, place) for node, place in uses.get(info.name, ())}
    is_raised = ("Unsqueeze", 0) in places and bool({("Mul", 0), ("Mul", 1)} & places)
    return info.dtype in _FLOATS and len(info.shape) == 2 and (is_raised or ("Sub", 1) in places)


def num_positions(model: ModelFile) -> int | None:
    """Return the number of token positions of a graph; None if no table of positions can be identified.

    The table is as wide as the id table, and is looked up by a position input, or by a counter or constant.
    """
    names = [info.name for info in model.structure.inputs if not is_mask(info)]
    tables = list(_tables(model, names, _FORWARDERS))
    widths = {sizes[1] for name, sizes in tables if name is not None}
    places = [sizes[0] for name, sizes in tables if (name is None and sizes[1] in widths) or "position" in (name or "")]
    rows = max(places, default=0)
    if rows < _FEWEST_POSITIONS:  # of a segment table
        return None
    # If positions are computed from the ids, as in RoBERTa, the first two rows are for padding.
    return rows - 2 if "CumSum" in model.structure.ops else rows


def _numpy_dtype(info: TensorInfo) -> np.dtype[Any]:
    try:
        return np.dtype(info.dtype)
    except TypeError:
        raise InputError(f"the input {info.name} is of dtype {info.dtype}", "verify this model by hand") from None
