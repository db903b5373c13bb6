"""Gradients of operators that move elements: reshape, split, copy, gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule

# Up to this number of rows, a matrix product is faster than adding single elements: 0.6 ms compared with 1.7 ms with
# ScatterElements for 1024 rows added to 128 rows of 256, and 2 ms each for 512 rows (onnxruntime 1.31, one thread).
_MAX_GEMM_ROWS = 128


def add_rows(
    build: Builder, rows: Tensor, indices: Tensor, *, shape: Tensor, rank: int, num_rows: int | None = None
) -> Tensor:
    """Return zeros of `shape` with `rows` added at `indices` of the first axis.

    Args:
        build: adds nodes to the graph.
        rows: [*I, *R].
        indices: int32 or int64 [*I], possibly with duplicate and negative ones.
        shape: int64 [rank], the sizes [N, *R].
        rank: rank of the result.
        num_rows: N if it is fixed.
    """
    if num_rows is not None and num_rows <= _MAX_GEMM_ROWS and rank == 2:
        return _add_with_gemm(build, rows, indices, shape, num_rows)
    flat = rows.reshape(build.concat([-1], shape.slice(1, rank))) if rank > 1 else rows.reshape([-1])
    places = indices.reshape([-1, *[1] * (rank - 1)])
    if rank > 1:
        places = places.expand(flat.size())
    return build.op("ScatterElements", build.zeros(shape, rows.dtype), places, flat, axis=0, reduction="add")


def add_up(build: Builder, gradients: Sequence[Tensor]) -> Tensor:
    """Sum the gradients of a value; rows to scatter into zeros are instead scattered into the sum of the others.

    A tied embedding table thus needs memory for one gradient of its size instead of three.
    """
    scatters = [_scatter_into_zeros(gradient) for gradient in gradients]
    addends = [gradient for gradient, node in zip(gradients, scatters, strict=True) if node is None]
    if not addends:
        addends, scatters = [gradients[0]], scatters[1:]
    total = addends[0] if len(addends) == 1 else build.op("Add" if len(addends) == 2 else "Sum", *addends)
    for node in [scatter for scatter in scatters if scatter is not None]:
        places, pieces = (build.tensor(value) for value in node.inputs[1:3] if value is not None)
        axis = node.attributes.get_int("axis", 0) or 0
        total = build.op("ScatterElements", total, places, pieces, axis=axis, reduction="add")
    return total


def _scatter_into_zeros(gradient: Tensor) -> ir.Node | None:
    """Return the node that adds rows to zeros, if a gradient is made that way."""
    node = gradient.value.producer()
    if node is None or node.op_type != "ScatterElements" or node.attributes.get_string("reduction", "none") != "add":
        return None
    zeros = node.inputs[0].producer() if node.inputs[0] is not None else None
    number = zeros.inputs[0] if zeros is not None and zeros.op_type == "Expand" else None
    constant = None if number is None else number.const_value
    return None if constant is None or constant.numpy().any() else node


def _add_with_gemm(build: Builder, rows: Tensor, indices: Tensor, shape: Tensor, num_rows: int) -> Tensor:
    """Multiply with the one-hot matrix of the indices."""
    flat = rows.reshape(build.concat([-1], shape.slice(1, 2)))
    places = indices.reshape([-1, 1])
    numbers = build.constant(range(num_rows), indices.dtype)
    hits = build.where(places < 0, places + num_rows, places).equals(numbers)
    return build.op("Gemm", hits.cast(rows.dtype), flat, transA=1)


PADDING_INDEX = "onnxtool.padding_index"
"""The metadata key of a Gather that holds nn.Embedding's `padding_idx`; that row has no gradient."""


def _reshaped(n: Backward) -> Tensor:
    if n.attribute("allowzero", 0) or 0 in (n.x(0).shape or ()):  # otherwise 0 would copy a size of the gradient
        return n.build.op("Reshape", n.dy, n.x(0).size(), allowzero=1)
    return n.dy.reshape(n.x(0).size())


def _transpose(n: Backward) -> Tensor:
    order = n.attribute("perm", list(range(len(n.shape())))[::-1])
    return n.dy.transpose([order.index(axis) for axis in range(len(order))])


def _concat(n: Backward) -> Tensor:
    axis = n.axis(0)
    pieces = [n.x(place) for place in range(len(n.node.inputs))]
    known = [None if piece.shape is None else piece.shape[axis] for piece in pieces]
    fixed = [size for size in known if isinstance(size, int)]
    sizes = n.build.axes(fixed) if len(fixed) == len(known) else None
    if sizes is None:
        sizes = n.build.concat(*(piece.size().slice(axis, axis + 1) for piece in pieces))
    return n.build.ops("Split", n.dy, sizes, outputs=len(pieces), axis=axis)[n.index]


def _split(n: Backward) -> Tensor:
    pieces = [n.dys(place) for place in range(len(n.node.outputs))]
    return n.build.op("Concat", *pieces, axis=n.attribute("axis", 0))


def _slice(n: Backward) -> Tensor:
    """Pad with zeros if all steps are 1; otherwise write the elements back, axis by axis."""
    steps = n.constant(4)
    if not n.has(4) or (steps is not None and (steps == 1).all()):
        return _pad_slice(n)
    places = n.constant(3)
    if n.has(3) and places is None:
        raise Refusal("its axes are not constant")
    rank = len(n.shape())
    axes = [int(axis) % rank for axis in (range(n.sizes(4)[0]) if places is None else places)]
    gradient = n.dy
    for place, axis in enumerate(axes):
        bounds = [n.x(bound).slice(place, place + 1) for bound in (1, 2)]
        step = n.x(4).slice(place, place + 1)
        size = n.x(0).size().slice(axis, axis + 1)
        positions = n.build.op("Slice", _range(n, size), *bounds, n.build.constant([0], bounds[0].dtype), step)
        gradient = n.build.add_along(gradient, positions, axis=axis, rank=rank, size=size, unique=True)
    return gradient


def _pad_slice(n: Backward) -> Tensor:
    build, shape = n.build, n.x(0).size()
    starts, ends = n.x(1).cast(shape.dtype), n.x(2).cast(shape.dtype)
    axes = n.x(3).cast(shape.dtype) if n.has(3) else _range(n, starts.size())
    sizes = build.op("Gather", shape, axes)

    def count(bounds: Tensor) -> Tensor:
        """Convert bounds to non-negative indices, and clip them to the size."""
        positive = build.where(bounds < 0, bounds + sizes, bounds)
        return build.op("Max", build.op("Min", positive, sizes), build.constant(0, shape.dtype))

    start = count(starts)
    after = sizes - build.op("Max", start, count(ends))
    return _padded(n, start, after, axes)


def _padded(n: Backward, before: Tensor, after: Tensor, axes: Tensor) -> Tensor:
    """Pad the gradient along `axes`, with a size for every axis if the rank is known.

    onnxruntime moves a Transpose after a Pad and reorders the sizes but ignores the input `axes` (seen in 1.31.1),
    which makes the product fail.
    """
    build = n.build
    if n.x(0).shape is None:
        return build.op("Pad", n.dy, build.concat(before, after), None, axes)
    none = build.constant([0] * len(n.shape()), before.dtype)
    sizes = [build.op("ScatterElements", none, axes, part, axis=0) for part in (before, after)]
    return build.op("Pad", n.dy, build.concat(*sizes))


def _range(n: Backward, size: Tensor) -> Tensor:
    """Return 0, 1, ... below `size`, int64 [1]."""
    first, step = (n.build.constant(number, size.dtype) for number in (0, 1))
    return n.build.op("Range", first, size.reshape([]), step)


def _gather(n: Backward) -> Tensor:
    """Move the axis to the front, sum the rows of each index, and move the axis back."""
    rank, num_indices = len(n.shape(0)), len(n.shape(1))
    axis = n.axis(0)
    size = n.x(0).size()
    index_axes = list(range(axis, axis + num_indices))
    rows = _padding_masked(n).transpose(
        [*index_axes, *(place for place in range(rank - 1 + num_indices) if place not in index_axes)]
    )
    front = [axis, *(place for place in range(rank) if place != axis)]
    shape = size if axis == 0 else n.build.op("Gather", size, n.build.axes(front))
    known = n.shape()[axis]
    num_rows = known if isinstance(known, int) else None
    added = add_rows(n.build, rows, n.x(1), shape=shape, rank=rank, num_rows=num_rows)
    return added.transpose([front.index(place) for place in range(rank)])


def _padding_masked(n: Backward) -> Tensor:
    """Return the gradient of the output, with zeros for rows read at the padding index."""
    padding = n.node.metadata_props.get(PADDING_INDEX)
    if padding is None:
        return n.dy
    indices, rank = n.x(1), len(n.shape(0))
    is_padding = indices.equals(n.build.constant(int(padding), indices.dtype))
    aligned = is_padding.reshape(n.build.concat(indices.size(), [1] * (rank - 1))) if rank > 1 else is_padding
    return n.build.where(aligned, 0.0, n.dy)


def _gather_elements(n: Backward) -> Tensor:
    zeros = n.build.zeros(n.x(0).size(), n.dy.dtype)
    return n.build.op("ScatterElements", zeros, n.x(1), n.dy, axis=n.attribute("axis", 0), reduction="add")


def _gather_nd(n: Backward) -> Tensor:
    """Compute the flat index of each row, and sum rows with the same index."""
    build, batch = n.build, n.attribute("batch_dims", 0)
    depth = n.sizes(1)[-1]
    rank, shape = len(n.shape()), n.x(0).size()
    sizes = [shape.slice(axis, axis + 1) for axis in range(batch + depth)]
    rows = n.x(1).reshape([-1, depth])
    number = build.axes([0])
    if batch:
        lead = build.op("ReduceProd", shape.slice(0, batch), keepdims=1)
        each = build.op("Div", rows.size().slice(0, 1), build.op("Max", lead, build.axes([1])))
        number = _range(n, lead).reshape([-1, 1]).expand(build.concat(lead, each)).reshape([-1])
    for place in range(depth):
        index = rows.slice(place, place + 1, axis=1).reshape([-1])
        size = sizes[batch + place]
        number = number * size + build.where(index < 0, index + size, index)
    row_shape = shape.slice(batch + depth, rank)
    flat = build.concat(build.op("ReduceProd", shape.slice(0, batch + depth), keepdims=1), row_shape)
    updates = n.dy.reshape(build.concat([-1], row_shape)) if rank > batch + depth else n.dy.reshape([-1])
    return add_rows(build, updates, number, shape=flat, rank=rank - batch - depth + 1).reshape(shape)


def _scatter_data(n: Backward) -> Tensor:
    """Return the gradient of the data, zero where it was overwritten."""
    if _reduction(n) == "add":
        return n.dy
    zeros = n.build.zeros(n.x(2).size(), n.dy.dtype)
    if n.node.op_type == "ScatterND":
        return n.build.op("ScatterND", n.dy, n.x(1), zeros)
    return n.build.op("ScatterElements", n.dy, n.x(1), zeros, axis=n.attribute("axis", 0))


def _scatter_updates(n: Backward) -> Tensor:
    """Return the gradient of the updates."""
    _reduction(n)
    if n.node.op_type == "ScatterND":
        return n.build.op("GatherND", n.dy, n.x(1))
    return n.build.op("GatherElements", n.dy, n.x(1), axis=n.attribute("axis", 0))


def _reduction(n: Backward) -> str:
    reduction = n.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise Refusal(f"with the reduction {reduction}")
    return reduction


def _top_k(n: Backward) -> Tensor:
    zeros = n.build.zeros(n.x(0).size(), n.dy.dtype)
    return n.build.op("ScatterElements", zeros, n.y(1), n.dy, axis=n.attribute("axis", -1))


def _pad(n: Backward) -> Tensor:
    mode = n.attribute("mode", "constant")
    axes = n.x(3) if n.has(3) else None
    if mode == "constant":
        if axes is None:
            return n.build.op("Pad", n.dy, -n.x(1))
        halves = -n.x(1).reshape([2, -1])
        first, last = (n.build.op("Gather", halves, n.build.constant(half, ir.DataType.INT64)) for half in (0, 1))
        return _padded(n, first, last, axes)
    rank, pads = len(n.shape()), n.constant(1)
    places = n.constant(3) if axes is not None else range(rank)
    if places is None:
        raise Refusal(f"its axes are not constant, and the mode is {mode}")
    gradient = n.dy
    for place, axis in enumerate(int(axis) % rank for axis in places):
        ends = [place, place + len(places)]
        if pads is None or pads[ends].any():
            size = n.x(0).size().slice(axis, axis + 1)
            around = n.build.op("Gather", n.x(1), n.build.axes(ends))
            positions = n.build.op("Pad", _range(n, size), around, mode=mode)
            gradient = n.build.add_along(gradient, positions, axis=axis, rank=rank, size=size)
    return gradient


def _pad_value(n: Backward) -> Tensor:
    """Return the gradient of the padding value: everything that does not flow to the data."""
    total, inside = (n.build.op("ReduceSum", gradient, keepdims=0) for gradient in (n.dy, _pad(n)))
    return (total - inside).reshape(n.x(2).size())


def _one_hot_values(n: Backward) -> Tensor:
    """Return the gradients of the off value and the on value."""
    off, on = (n.build.constant(number, n.dy.dtype) for number in (0.0, 1.0))
    numbers = n.build.op("Concat", off.reshape([1]), on.reshape([1]), axis=0)
    hits = n.build.op("OneHot", n.x(0), n.x(1), numbers, axis=n.attribute("axis", -1))
    total, hit = (n.build.op("ReduceSum", gradient, keepdims=0).reshape([1]) for gradient in (n.dy, n.dy * hits))
    return n.build.op("Concat", total - hit, hit, axis=0)


def _compress(n: Backward) -> Tensor:
    """Write the selected elements back, along an axis or in the flat input."""
    positions = n.build.op("NonZero", n.x(1)).reshape([-1])
    if "axis" in n.node.attributes:
        rank, axis = len(n.shape()), n.axis(0)
        size = n.x(0).size().slice(axis, axis + 1)
        return n.build.add_along(n.dy, positions, axis=axis, rank=rank, size=size, unique=True)
    flat = n.build.op("Size", n.x(0)).reshape([1])
    return n.build.add_along(n.dy, positions, axis=0, rank=1, size=flat, unique=True).reshape(n.x(0).size())


def _reverse_sequence(n: Backward) -> Tensor:
    batch, time = n.attribute("batch_axis", 1), n.attribute("time_axis", 0)
    return n.build.op("ReverseSequence", n.dy, n.x(1), batch_axis=batch, time_axis=time)


def _tile(n: Backward) -> Tensor:
    """Insert an axis for the copies before each axis, and sum over it."""
    rank = len(n.shape())
    pairs = [part.reshape([-1, 1]) for part in (n.x(1), n.x(0).size())]
    shape = n.build.op("Concat", *pairs, axis=1).reshape([-1])
    return n.dy.reshape(shape).sum(range(0, 2 * rank, 2), keepdims=False)


def _cum_sum(n: Backward) -> Tensor:
    exclusive, reverse = n.attribute("exclusive", 0), n.attribute("reverse", 0)
    return n.build.op("CumSum", n.dy, n.x(1), exclusive=exclusive, reverse=1 - reverse)


def _depth_to_space(n: Backward) -> Tensor:
    block = n.attribute("blocksize", 1)
    if n.attribute("mode", "DCR") == "DCR":
        return n.build.op("SpaceToDepth", n.dy, blocksize=block)
    size = n.x(0).size()
    shape = n.build.concat(size.slice(0, 1), [-1], size.slice(2, 3), [block], size.slice(3, 4), [block])
    return n.dy.reshape(shape).transpose([0, 1, 3, 5, 2, 4]).reshape(size)


def _space_to_depth(n: Backward) -> Tensor:
    return n.build.op("DepthToSpace", n.dy, blocksize=n.attribute("blocksize", 1), mode=n.attribute("mode", "DCR"))


TENSOR: dict[str, Rule] = {
    "Compress": rule(_compress),
    "Concat": Rule((_concat,), variadic=True),
    "CumSum": rule(_cum_sum),
    "DepthToSpace": rule(_depth_to_space),
    "Expand": rule(lambda n: n.summed(n.dy, 0)),
    "Flatten": rule(_reshaped),
    "Gather": rule(_gather),
    "GatherElements": rule(_gather_elements),
    "GatherND": rule(_gather_nd),
    "OneHot": rule(None, None, _one_hot_values),
    "Pad": rule(_pad, None, _pad_value),
    "Range": rule(
        lambda n: n.build.op("ReduceSum", n.dy, keepdims=0),
        None,
        lambda n: n.build.op("ReduceSum", n.dy * _range(n, n.y().size()).cast(n.dy.dtype), keepdims=0),
    ),
    "Reshape": rule(_reshaped),
    "ReverseSequence": rule(_reverse_sequence),
    "ScatterElements": rule(_scatter_data, None, _scatter_updates),
    "ScatterND": rule(_scatter_data, None, _scatter_updates),
    "Slice": rule(_slice),
    "SpaceToDepth": rule(_space_to_depth),
    "Split": Rule((_split,), outputs=range(1 << 31)),
    "Squeeze": rule(_reshaped),
    "Tile": rule(_tile),
    "TopK": Rule((_top_k,)),
    "Transpose": rule(_transpose),
    "Trilu": rule(lambda n: n.build.op("Trilu", n.dy, n.x(1) if n.has(1) else None, upper=n.attribute("upper", 1))),
    "Unsqueeze": rule(_reshaped),
}
