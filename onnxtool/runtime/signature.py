"""The kinds of a graph's inputs, as far as its names, axes and nodes tell.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from onnxtool.graph.operators import LOOKUPS
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Node, Tensor, read_nodes
from onnxtool.reports import TensorInfo

# Operators through which an index stays an index on its way to the table, in any of their inputs; the first ones do not
# change it.
_MOVERS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Transpose", "Expand"})
_FORWARDERS = _MOVERS | {"Concat", "Add", "Sub", "Clip", "Min", "Max", "Where"}
# Operators that pass on the values of their first input in a recognizable form.
_CARRIERS = _MOVERS | {"Add", "Concat", "Div", "Mul", "Pad", "Sub"}
IDS, MASK, TOKEN_TYPES = "input_ids", "attention_mask", "token_type_ids"
INTEGERS, FLOATS = ("int64", "int32"), ("float32", "float16", "float64")
_SOUND = re.compile(r"audio|wav|sound|speech|signal|pcm|input_values", re.IGNORECASE)
_OF_SOUNDS = frozenset({"Conv", "ConvInteger", "QLinearConv", "STFT"})
_FEWEST_POSITIONS = 9
SUM = " + "  # between names of axes whose sizes are added, as in `past_sequence + sequence`


def has_past(inputs: Sequence[TensorInfo]) -> bool:
    """Whether a model takes a cache of earlier tokens."""
    return any(isinstance(size, str) and any(map(is_past, size.split(SUM))) for info in inputs for size in info.shape)


def is_past(name: str) -> bool:
    """Whether the name of an axis is that of earlier tokens."""
    return "past" in name.lower()


def index_bounds(model: ModelFile) -> dict[str, int]:
    """Return the number of rows of the table that each integer input of the model indexes.

    Found by following the input to the Gather (or EmbedLayerNormalization) that looks it up, so that random ids cover
    the whole vocabulary and never leave it. If the path from `input_ids` to its table cannot be followed, its bound is
    the size of the largest table in any lookup. Inputs that index nothing are not in the result.
    """
    bounds: dict[str, int] = {}
    largest = 0
    names = [value.name for value in model.structure.inputs if not is_mask(value)]
    for name, table in tables(model, names, _FORWARDERS):
        rows = table.dims[0]
        largest = max(largest, rows)
        if name is not None:
            bounds[name] = min(bounds.get(name, rows), rows)
    if largest and any(value.name == IDS for value in model.structure.inputs):
        bounds.setdefault(IDS, largest)
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
    return {name for name, _ in tables(model, names, _MOVERS)} - {None} == {MASK}


def tables(model: ModelFile, names: Iterable[str], forwarders: AbstractSet[str]) -> Iterator[tuple[str | None, Tensor]]:
    """Yield the input of `names` in each lookup, or None for anything else, and the table.

    An index is followed through operators of the types in `forwarders`.
    """
    matrices = {tensor.name: tensor for tensor in model.structure.initializers if len(tensor.dims) >= 2}
    origin = {name: name for name in names}  # a value and the input that it forwards
    for node in read_nodes(model.path):
        forwarded = [value for value in node.inputs if value in origin]
        if node.op_type in forwarders and node.outputs and forwarded:
            origin[node.outputs[0]] = origin[forwarded[0]]
        for place, of_table in LOOKUPS.get((node.domain, node.op_type), ()):
            ids, table = (node.inputs[at] if at < len(node.inputs) else "" for at in (place, of_table))
            rows = matrices.get(table)
            if ids and rows is not None:
                yield origin.get(ids), rows


def is_mask(info: TensorInfo) -> bool:
    """Whether an input is a padding mask, judging by its name, the only evidence in a graph."""
    return "mask" in info.name and len(info.shape) == 2


def is_text(info: TensorInfo) -> bool:
    """Whether an input holds token ids, or a mask of tokens: int [B, S]."""
    return len(info.shape) == 2 and (is_mask(info) or info.dtype in INTEGERS)


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
    is_row = info.dtype in FLOATS and len(info.shape) == 2 and not isinstance(info.shape[1], int)
    # An input that the main graph does not read is for a branch or a body, of which only the operators are known.
    reads = uses.get(info.name, ())
    convolved = any(node.op_type in _OF_SOUNDS for node, _ in reads) or (not reads and bool(_OF_SOUNDS & operators))
    return is_row and not is_mask(info) and (convolved or bool(_SOUND.search(info.name)))


def is_used_as_mask(info: TensorInfo, uses: Mapping[str, Sequence[tuple[Node, int]]]) -> bool:
    """Whether a float input [B, S] is a mask by its use: subtracted from one, or multiplied once it is raised."""
    places = {(node.op_type, place) for node, place in uses.get(info.name, ())}
    is_raised = ("Unsqueeze", 0) in places and bool({("Mul", 0), ("Mul", 1)} & places)
    return info.dtype in FLOATS and len(info.shape) == 2 and (is_raised or ("Sub", 1) in places)


def num_positions(model: ModelFile) -> int | None:
    """Return the number of token positions of a graph; None if no table of positions can be identified.

    The table is as wide as the id table, and is looked up by a position input, or by a counter or constant.
    """
    names = [info.name for info in model.structure.inputs if not is_mask(info)]
    sizes = [(name, table.dims) for name, table in tables(model, names, _FORWARDERS)]
    widths = {dims[1] for name, dims in sizes if name is not None}
    places = [dims[0] for name, dims in sizes if (name is None and dims[1] in widths) or "position" in (name or "")]
    rows = max(places, default=0)
    if rows < _FEWEST_POSITIONS:  # of a segment table
        return None
    # If positions are computed from the ids, as in RoBERTa, the first two rows are for padding.
    return rows - 2 if "CumSum" in model.structure.ops else rows
