"""Sum rows with the same index, correctly with several threads.

ScatterND with reduction=add races on duplicate indices on onnxruntime's CPU provider, so it is not used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor

# Up to this number of rows a matrix product is faster than adding single elements: 0.6 ms against 1.7 ms with
# ScatterElements for 1024 rows added to 128 rows of 256, and 2 ms both for 512 rows (onnxruntime 1.31, one thread).
_MAX_GEMM_ROWS = 128


def add_rows(
    build: Builder, rows: Tensor, indices: Tensor, *, shape: Tensor, rank: int, num_rows: int | None = None
) -> Tensor:
    """Return zeros of `shape` with `rows` added at `indices` of the first axis.

    Args:
        build: of the graph.
        rows: [*I, *R].
        indices: int32 or int64 [*I], possibly with duplicate and negative ones.
        shape: int64 [rank], the sizes [N, *R].
        rank: of the result.
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
    """Sum the gradients of one value; rows that are scattered into zeros are scattered into the sum of the others.

    So a tied embedding table needs memory for one gradient of its size, instead of three.
    """
    scatters = [_scatter_into_zeros(gradient) for gradient in gradients]
    others = [gradient for gradient, node in zip(gradients, scatters, strict=True) if node is None]
    if not others:
        others, scatters = [gradients[0]], scatters[1:]
    total = others[0] if len(others) == 1 else build.op("Add" if len(others) == 2 else "Sum", *others)
    for node in [scatter for scatter in scatters if scatter is not None]:
        places, pieces = (build.tensor(value) for value in node.inputs[1:3] if value is not None)
        axis = node.attributes.get_int("axis", 0) or 0
        total = build.op("ScatterElements", total, places, pieces, axis=axis, reduction="add")
    return total


def _scatter_into_zeros(gradient: Tensor) -> ir.Node | None:
    """Return the node that adds rows to zeros, if that is how a gradient is made."""
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


def add_along(
    build: Builder, pieces: Tensor, positions: Tensor, *, axis: int, rank: int, size: Tensor, unique: bool = False
) -> Tensor:
    """Return zeros with `pieces`, [..., P, ...], added at `positions`, int64 [P], of one axis.

    The axis has the size `size`, int64 [1], in the result. `unique` says that all positions differ.
    """
    old = pieces.size()
    before = [old.slice(0, axis)] if axis else []
    after = [old.slice(axis + 1, rank)] if axis + 1 < rank else []
    shape = build.concat(*before, size, *after)
    places = positions.reshape([-1 if place == axis else 1 for place in range(rank)]).expand(old)
    zeros = build.zeros(shape, pieces.dtype)
    reduction = "none" if unique else "add"
    return build.op("ScatterElements", zeros, places, pieces, axis=axis, reduction=reduction)
