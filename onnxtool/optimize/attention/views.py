"""Find the tensor behind a view and its layout by moving element indices through the operators.

Exporters split heads and transpose matrices in a dozen forms, with shapes computed from other shapes. One method
handles all of them: number the elements of the first tensor, let the operators move the numbers, and see where they end
up. The linear layers in front of the heads are matched here too.

Shape letters: B batch, S queries, L keys, H heads, D size of a head, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import attribute, is_weight, only_consumer, operands, producer, scalar, tensor_of
from onnxtool.graph.shapes import Shapes

Indices = NDArray[np.int64]

_LONGEST_CHAIN = 10
_RESHAPES = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")
VIEWS = ("Transpose", "Expand", "Cast", "Mul", "Div", *_RESHAPES)
"""The operators of a scaled view."""


class HeadLayout(Enum):
    """The layout of the heads of q, k or v in a tensor."""

    FLAT = "B, S, H * D"
    HEADS_INSIDE = "B, S, H, D"
    HEADS_OUTSIDE = "B, H, S, D"
    COLUMNS = "B, H, D, S"
    TIME_FIRST = "S, B, H * D"


@dataclass(frozen=True)
class Heads:
    """The operand of a MatMul of an attention.

    Attributes:
        source: the tensor, in one of the layouts.
        num_heads: the tensor's number of heads.
        scale: the factor between the tensor and the operand.
        repeats: how many consecutive heads of the operand each head of the tensor becomes.
    """

    source: ir.Value
    layout: HeadLayout
    num_heads: int
    head_size: int
    scale: float
    repeats: int = 1


def find_heads(
    value: ir.Value,
    shapes: Shapes,
    num_heads: int,
    *,
    transposed: bool = False,
    repeated: bool = False,
    in_columns: bool = False,
) -> Heads | None:
    """Find the first tensor whose heads `value`, [B, H, S, D] or [B * H, S, D], is a view of.

    Args:
        value: an operand of a MatMul.
        shapes: the shapes of the graph.
        num_heads: H.
        transposed: whether the last two axes of `value` are swapped, as for keys.
        repeated: whether the tensor may have fewer heads than `value`, which repeats each one equally often.
        in_columns: whether to accept COLUMNS if there is no other layout; SqueezeBERT's convolutions produce it.
    """
    shape = shapes.prime_shape(value)
    if shape is None or len(shape) not in (3, 4):
        return None
    head_size = shapes.fixed(value, -2 if transposed else -1)
    if head_size is None:
        return None
    heads = None
    for source, scale, chain in _chains_above(value, shapes):
        shown = _layout_of(value, source, chain, shapes, (num_heads, head_size), transposed=transposed)
        if shown is None or (shown[1] > 1 and not repeated):
            continue
        layout, repeats = shown
        if layout is HeadLayout.COLUMNS and (heads is not None or not in_columns):
            continue
        heads = Heads(source, layout, num_heads // repeats, head_size, scale, repeats)
        # Linear layers give the flat layout; there is nothing to find above it.
        if layout is HeadLayout.FLAT:
            break
    return heads


def find_joined(value: ir.Value, shapes: Shapes, num_heads: int) -> ir.Value | None:
    """Find the value [B, S, H * D] that is `value`, [B, H, S, D] or [B * H, S, D], with its heads joined.

    None if there is none, or if anything else reads a value in between.
    """
    chain: list[ir.Node] = []
    current = value
    while len(chain) < _LONGEST_CHAIN:
        node = only_consumer(current, "Transpose", *_RESHAPES)
        if node is None or (node.inputs[0] is not current):
            return None
        chain.append(node)
        current = node.outputs[0]
        if shapes.rank(current) == 3 and all(
            _is_joined(value, current, chain, shapes, probe, num_heads) for probe in shapes.small
        ):
            return current
    return None


def _is_joined(
    value: ir.Value, joined: ir.Value, chain: Sequence[ir.Node], shapes: Shapes, probe: int, num_heads: int
) -> bool:
    shape, wanted_shape = shapes.prime_shape(value, probe), shapes.prime_shape(joined, probe)
    if shape is None or wanted_shape is None:
        return False
    indices = _number(shape)
    moved = _move(indices, chain, shapes, probe)
    if moved is None:
        return False
    outside = indices.reshape(-1, num_heads, *indices.shape[-2:])
    wanted = outside.transpose(0, 2, 1, 3).reshape(outside.shape[0], outside.shape[2], -1)
    return np.array_equal(moved, wanted)


def _chains_above(value: ir.Value, shapes: Shapes) -> Iterator[tuple[ir.Value, float, list[ir.Node]]]:
    """Yield `value` and each value that it is a scaled view of, with the scale and the nodes in between."""
    chain: list[ir.Node] = []
    scale, current = 1.0, value
    yield current, scale, chain
    while len(chain) < _LONGEST_CHAIN:
        node = producer(current, *VIEWS)
        step = None if node is None else _step_above(node)
        if node is None or step is None:
            return
        current, factor = step
        scale *= factor
        chain = [node, *chain]
        if shapes.prime_shape(current) is None:
            continue
        yield current, scale, chain


def _step_above(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return the value that a node is a view of, and the factor; None if it does more than that."""
    first = node.inputs[0]
    if first is None:
        return None
    if node.op_type == "Cast":
        return (first, 1.0) if first.dtype is not None and first.dtype == node.outputs[0].dtype else None
    if node.op_type not in ("Mul", "Div"):
        return first, 1.0
    second = node.inputs[1]
    factor = scalar(second)
    if factor is not None:
        return (first, factor) if node.op_type == "Mul" else (first, 1.0 / factor) if factor else None
    factor = scalar(first)
    return (second, factor) if node.op_type == "Mul" and factor is not None and second is not None else None


def _layout_of(
    value: ir.Value,
    source: ir.Value,
    chain: Sequence[ir.Node],
    shapes: Shapes,
    heads: tuple[int, int],
    *,
    transposed: bool,
) -> tuple[HeadLayout, int] | None:
    """Return the layout of the heads of `value` in `source` and their repetitions, the same for all sizes."""
    layouts: set[tuple[HeadLayout, int] | None] = set()
    for probe in shapes.small:
        shape = shapes.prime_shape(source, probe)
        if shape is None:
            return None
        moved = _move(_number(shape), chain, shapes, probe)
        if moved is None:
            return None
        if transposed:
            moved = moved.swapaxes(-1, -2)
        layouts.add(_name_layout(shape, moved, *heads))
    return layouts.pop() if len(layouts) == 1 else None


def _name_layout(
    shape: tuple[int, ...], moved: Indices, num_heads: int, head_size: int
) -> tuple[HeadLayout, int] | None:
    """Name the layout of a tensor of `shape` whose heads are `moved`, and how often each head is repeated."""
    indices = _number(shape)
    batch = moved.size // (num_heads * head_size * moved.shape[-2])
    if moved.size != batch * num_heads * moved.shape[-2] * head_size or not indices.size:
        return None
    repeats = max(1, moved.size // indices.size)
    moved = moved.reshape(batch, num_heads, moved.shape[-2], head_size)
    outside = (batch, num_heads // repeats, moved.shape[-2], head_size)
    inside = (batch, moved.shape[-2], num_heads // repeats, head_size)
    columns = (*outside[:2], head_size, moved.shape[-2])
    stored: tuple[tuple[HeadLayout, tuple[int, ...], Callable[[], Indices]], ...] = (
        (HeadLayout.HEADS_OUTSIDE, outside, lambda: indices),
        (HeadLayout.HEADS_INSIDE, inside, lambda: indices.transpose(0, 2, 1, 3)),
        (HeadLayout.FLAT, (*inside[:2], inside[2] * head_size), lambda: indices.reshape(inside).transpose(0, 2, 1, 3)),
        (HeadLayout.COLUMNS, columns, lambda: indices.swapaxes(2, 3)),
        (
            HeadLayout.TIME_FIRST,
            (inside[1], batch, inside[2] * head_size),
            lambda: indices.reshape(inside[1], batch, *inside[2:]).transpose(1, 2, 0, 3),
        ),
    )
    for layout, sizes, heads in stored:
        if shape == sizes and np.array_equal(np.repeat(heads(), repeats, axis=1), moved):
            return layout, repeats
    return None


def _move(indices: Indices, chain: Sequence[ir.Node], shapes: Shapes, probe: int) -> Indices | None:
    """Move the numbered elements through the nodes of a chain; None if a shape is unknown."""
    for node in chain:
        if node.op_type == "Transpose":
            indices = indices.transpose(attribute(node, "perm") or None)
        elif node.op_type in ("Expand", *_RESHAPES):
            shape = shapes.prime_shape(node.outputs[0], probe)
            if shape is None:
                return None
            if node.op_type == "Expand":
                indices = np.broadcast_to(indices, shape)
            elif indices.size != np.prod(shape):
                return None
            else:
                indices = indices.reshape(shape)
    return indices


def _number(shape: tuple[int, ...]) -> Indices:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


@dataclass(frozen=True)
class Linear:
    """`x @ weight + bias`.

    Attributes:
        x: [B, S, I].
        weight: an initializer [I, O].
        bias: an initializer [O], or None.
        part: the third of O, if one layer computes q, k and v; None for all of it.
    """

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    part: int | None = None


def find_linear(value: ir.Value, shapes: Shapes) -> Linear | None:
    """Match the linear layer that computes `value`, [B, S, O], or a third of a layer for q, k and v together."""
    split = producer(value, "Split")
    if split is not None and split.inputs[0] is not None and len(split.outputs) == 3:
        sizes = {shapes.fixed(output, -1) for output in split.outputs}
        whole = _whole(split.inputs[0], shapes)
        if whole is None or len(sizes) != 1 or None in sizes or attribute(split, "axis", 0) not in (-1, 2):
            return None
        return Linear(whole.x, whole.weight, whole.bias, split.outputs.index(value))
    return _whole(value, shapes)


def _whole(value: ir.Value, shapes: Shapes) -> Linear | None:
    add = producer(value, "Add")
    if add is not None:
        sides = operands(add, lambda side: is_weight(side, 1))
        if sides is None or (matmul := _matmul(sides[1])) is None:
            return None
        bias, weight = sides[0], matmul[1]
        return Linear(*matmul, bias) if tensor_of(bias).shape[0] == tensor_of(weight).shape[1] else None
    matmul = _matmul(value)
    return Linear(*matmul, None) if matmul is not None else _flattened(value, shapes)


def _matmul(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return x and weight of a MatMul."""
    node = producer(value, "MatMul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None or not is_weight(node.inputs[1], 2):
        return None
    return node.inputs[0], node.inputs[1]


def _flattened(value: ir.Value, shapes: Shapes) -> Linear | None:
    """Match `Reshape(Gemm(Reshape(x)))`, which flattens a batch of sequences to one matrix in between."""
    after = producer(value, "Reshape")
    gemm = None if after is None else producer(after.inputs[0], "Gemm")
    before = None if gemm is None else producer(gemm.inputs[0], "Reshape")
    if gemm is None or before is None or (x := before.inputs[0]) is None:
        return None
    is_plain = all(attribute(gemm, name, 1.0) == 1.0 for name in ("alpha", "beta"))
    is_plain = is_plain and not any(attribute(gemm, name, 0) for name in ("transA", "transB"))
    weight, bias = gemm.inputs[1], gemm.inputs[2] if len(gemm.inputs) > 2 else None
    if not is_plain or weight is None or not is_weight(weight, 2) or (bias is not None and not is_weight(bias, 1)):
        return None
    # Rows stay rows if the axes before the last are the same on both sides.
    outer, inner = shapes.shape(x), shapes.shape(value)
    if outer is None or inner is None or outer[:-1] != inner[:-1]:
        return None
    return Linear(x, weight, bias)
