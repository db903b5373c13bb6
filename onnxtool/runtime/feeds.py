"""Inputs generated from a model's signature, for verification and for timing.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.pooling_modes import POOLING_MASK, some_prompts
from onnxtool.errors import InputError
from onnxtool.graph.operators import OPERATORS
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Node, read_nodes
from onnxtool.reports import TensorInfo
from onnxtool.runtime.input_stamp import IDS, InputKind

# What keeps an index an index on its way to the table, in whichever of its inputs it stands: the first change none.
_MOVERS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Transpose", "Expand"})
_FORWARDERS = _MOVERS | {"Concat", "Add", "Sub", "Clip", "Min", "Max", "Where"}
MASK, TOKEN_TYPES = "attention_mask", "token_type_ids"
_DEFAULT_INDEX_BOUND = 2
_INDEX_DTYPES = ("int64", "int32")
_BATCH_AXIS = "batch_size"
PAST_AXIS = "past_sequence"
_SUM = " + "  # between the names of axes whose sizes add up, as in `past_sequence + sequence`
LONGEST_CASE = 1024  # a longer window would make a check cost more than what it checks


@dataclass(frozen=True)
class FeedShape:
    """What to make inputs for.

    Attributes:
        description: what this shape is about, for reports.
        lengths: real tokens of each of the B rows, at most `sequence_length`.
        sequence_length: S; the rest of a row is padding.
        padding: the side on which it is put, `right` or `left`.
        past_length: P, tokens before these of which a model with a cache is handed keys and values; the first third of
            the first row's is padding.
        sizes: those of axes that are neither batch nor sequence, such as the height of pictures, by their names.
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
    """Return the shapes that a model is verified on; S is at most `longest`, and at most 1024.

    One row, several, a single token, rows of one, a length no power of two divides, rows of all lengths padded on the
    right and on the left (which alone shows the mask of a causal model), and one as long as the model takes: axes that
    were fixed at the traced shape, masks that are not applied and position tables that end early each fail on one of
    them. The longest comes first: some models (BigBird) take a short text as the reason to compute otherwise from then
    on.
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
        # Beyond the windows of local attention (128 for ModernBERT), masks and rows have to hold as well.
        _ragged("ragged, long rows", (1.0, 0.55), min(160, longest), "right"),
        FeedShape.full(1, 1, "a single token"),
    )


def padding_alone(longest: int | None) -> FeedShape:
    """Return a shape with a row of padding alone, as in a batch that is filled up to its size; for models with a mask.

    What such a row pools over, or attends to, is nothing: a division by it is where half precision gives NaN.
    """
    length = min(longest or LONGEST_CASE, 7)
    return FeedShape("a row of padding alone", (length, 0, max(1, length // 2)), length)


def past_shapes(longest: int | None) -> tuple[FeedShape, ...]:
    """Return the shapes that a model with a cache is verified on as well: steps after some tokens of the past."""
    longest = min(longest or LONGEST_CASE, LONGEST_CASE)
    past_length = min(11, longest // 2)
    shapes = (
        FeedShape.full(3, 1, f"a step, {past_length} tokens before it"),
        FeedShape.full(2, min(7, longest // 2), f"several tokens, {past_length} before them"),
    )
    return tuple(replace(shape, past_length=past_length) for shape in shapes) if past_length else ()


def has_past(inputs: Sequence[TensorInfo]) -> bool:
    """Whether a model is handed a cache of earlier tokens."""
    return any(isinstance(size, str) and PAST_AXIS in size.split(_SUM) for info in inputs for size in info.shape)


def _ragged(description: str, parts: Sequence[float], sequence_length: int, padding: str) -> FeedShape:
    lengths = tuple(max(1, round(part * sequence_length)) for part in parts)
    return FeedShape(description, lengths, sequence_length, padding)


def index_bounds(model: ModelFile) -> dict[str, int]:
    """Return how many rows the table has that each integer input of the model indexes.

    Found by following the input to the Gather (or EmbedLayerNormalization) that looks it up, so that random ids cover
    the whole vocabulary and never leave it. Where the way from `input_ids` to its table cannot be followed, its bound
    is that of the largest table that anything looks up. An input that indexes nothing is not in the result.
    """
    bounds: dict[str, int] = {}
    largest = 0
    names = [value.name for value in model.structure.inputs if not is_mask(value)]
    for name, rows in _tables(model, names, _FORWARDERS):
        largest = max(largest, rows)
        if name is not None:
            bounds[name] = min(bounds.get(name, rows), rows)
    if largest and any(value.name == "input_ids" for value in model.structure.inputs):
        bounds.setdefault("input_ids", largest)
    return bounds


def names_are_exchanged(model: ModelFile) -> bool:
    """Whether a graph has its mask and its token types under each other's names.

    `torch.onnx.export` names inputs by their places, and scripts hand it what a tokenizer gives in the tokenizer's
    order: token types before the mask, which is the other way round in `forward` of BERT. The graph then looks up the
    types of tokens by what is called the mask.
    """
    names = {MASK, TOKEN_TYPES}
    if not names <= {value.name for value in model.structure.inputs}:
        return False
    return {name for name, _ in _tables(model, names, _MOVERS)} - {None} == {MASK}


def _tables(model: ModelFile, names: Iterable[str], forwarders: AbstractSet[str]) -> Iterator[tuple[str | None, int]]:
    """Yield for each lookup the input of `names` that it looks up, None for something else, and the table's rows."""
    rows = {tensor.name: tensor.dims[0] for tensor in model.structure.initializers if len(tensor.dims) >= 2}
    origin = {name: name for name in names}  # a value and the input that it forwards
    for node in read_nodes(model.path):
        forwarded = [value for value in node.inputs if value in origin]
        if node.op_type in forwarders and node.outputs and forwarded:
            origin[node.outputs[0]] = origin[forwarded[0]]
        for indices, table in _lookups(node):
            if table in rows:
                yield origin.get(indices), rows[table]


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
    sizes: Mapping[str, int] | None = None,
) -> dict[str, NDArray[Any]]:
    """Make one array for each of `inputs`, filling named axes from `shape`.

    Masks follow the lengths of `shape`; other integers are drawn below their bound (see `index_bounds`), padding
    included, so that a mask which is not applied shows; floats are standard normal. The first axis of a tensor is the
    batch, and every other named axis the sequence, but for those in `sizes`. Ids whose kind is stamped are drawn as it
    says.

    Raises:
        InputError: an input is of a dtype or shape for which none can be generated.
    """
    generator = np.random.default_rng(seed)
    shape = replace(shape, sizes=sizes or {})
    return {info.name: _random_array(info, shape, bounds, kinds or {}, generator) for info in inputs}


def is_mask(info: TensorInfo) -> bool:
    """Whether an input is a padding mask, by its name, which is all that a graph says of it."""
    return "mask" in info.name and len(info.shape) == 2


def _random_array(
    info: TensorInfo,
    shape: FeedShape,
    bounds: dict[str, int],
    kinds: Mapping[str, InputKind],
    generator: np.random.Generator,
) -> NDArray[Any]:
    if info.name.startswith("encoder_") and is_mask(info) and isinstance(info.shape[1], int):
        # The decoder's lengths are not those of what the encoder has read, which may be of one length alone.
        parts = np.array(shape.lengths) / shape.sequence_length
        return (np.arange(info.shape[1]) < np.ceil(parts * info.shape[1])[:, None]).astype(_numpy_dtype(info))
    dims = [_dimension(info, axis, shape) for axis in range(len(info.shape))]
    if is_mask(info):
        mask = shape.mask
        if dims[1] == shape.past_length + shape.sequence_length:
            past = np.ones((shape.batch_size, shape.past_length), dtype=bool)
            past[0, : shape.past_length // 3] = False
            mask = np.concatenate([past, mask], axis=1)
        if info.name == POOLING_MASK:
            mask = some_prompts(mask)
        return mask.astype(_numpy_dtype(info))
    kind = kinds.get(info.name)
    if kind is not None and kind.kind == IDS:
        return kind.draw(dims, shape.mask, generator).astype(info.dtype)
    if info.dtype in _INDEX_DTYPES:
        bound = bounds.get(info.name, _DEFAULT_INDEX_BOUND)
        return generator.integers(0, bound, dims).astype(info.dtype)
    if info.dtype in ("float32", "float16", "float64"):
        return generator.standard_normal(dims).astype(info.dtype)
    if info.dtype == "bool":
        return generator.integers(0, 2, dims).astype(bool)
    raise InputError(
        f"cannot generate values for the input {info.name} of dtype {info.dtype}", "verify this model by hand"
    )


def _dimension(info: TensorInfo, axis: int, shape: FeedShape) -> int:
    dimension = info.shape[axis]
    wanted = shape.batch_size if axis == 0 or dimension == _BATCH_AXIS else _length(dimension, shape)
    if isinstance(dimension, int):
        # Ids and masks are [B, S] and nothing else; a fixed axis of any other tensor may be a hidden size.
        if dimension != wanted and len(info.shape) == 2 and (is_mask(info) or info.dtype in _INDEX_DTYPES):
            raise InputError(
                f"the input {info.name} is fixed to {dimension} on axis {axis}; {wanted} was asked for",
                "export the model with dynamic axes, or ask for its own shape",
            )
        return dimension
    return wanted


def _length(dimension: int | str | None, shape: FeedShape) -> int:
    """Return the size of an axis that is no batch: the past, the sequence, or both together."""
    if isinstance(dimension, str) and dimension in shape.sizes:
        return shape.sizes[dimension]
    names = str(dimension).split(_SUM)
    return sum(shape.past_length if name == PAST_AXIS else shape.sequence_length for name in names)


def _numpy_dtype(info: TensorInfo) -> np.dtype[Any]:
    try:
        return np.dtype(info.dtype)
    except TypeError:
        raise InputError(f"the input {info.name} is of dtype {info.dtype}", "verify this model by hand") from None
