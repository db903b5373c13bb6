"""Our own decompositions: express what torch.onnx cannot translate in operators that it can.

`lower/decisions.py` says which operator each one is for. A decomposition takes its operator's arguments. If it returns
NotImplemented, the operator is left to its translation or stays in PyTorch. It matches the operator for NaN, infinities
and empty tensors, and needs no more memory than a few times its arguments and results. Those that draw random numbers
are in `lower/random.py`.

Shape letters of scatters: N indexable positions, M indices, R values at each position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp.decompositions import silu_backward, split


def relu(x: torch.Tensor) -> torch.Tensor:
    """Replace negative integers with zero; floats are left to the translation."""
    return NotImplemented if x.dtype.is_floating_point else torch.where(x > 0, x, torch.zeros_like(x))


def silu_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of `x * sigmoid(x)` from that product, which a gated layer recomputes anyway."""
    if x.dtype not in (torch.float32, torch.float64):
        return silu_backward(gradient, x)  # computes in float32
    sigmoid = torch.sigmoid(x)
    return gradient * (sigmoid + x * sigmoid * (1 - sigmoid))


def clamp(x: torch.Tensor, first: float | None = None, second: float | None = None) -> torch.Tensor:
    """Return NaN for a limit that is NaN; ONNX's Clip ignores such a limit."""
    is_open = all(limit is None or limit == limit for limit in (first, second))
    return NotImplemented if is_open else x * math.nan


def sign(x: torch.Tensor) -> torch.Tensor:
    """Return 1, 0 or -1, and 0 for NaN, where ONNX's Sign returns NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype) if x.dtype.is_floating_point else NotImplemented


def scaled_term(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    value: float = 1,
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return `x + join(value * first, second)`: if scaled last, the product or quotient could overflow first."""
    return x + join(first if value == 1 else first * value, second)


def divide_integers(x: torch.Tensor, y: torch.Tensor | float, *, rounding_mode: str | None = None) -> torch.Tensor:
    """Round the quotient of integers without float32, which the translation divides in."""
    if rounding_mode is None or x.dtype.is_floating_point or not _is_integral(y):
        return NotImplemented
    floor = torch.floor_divide(x, y)
    if rounding_mode == "floor":
        return floor
    return torch.where((floor < 0) & (floor * y != x), floor + 1, floor)


def _is_integral(y: torch.Tensor | float) -> bool:
    return isinstance(y, int) or (isinstance(y, torch.Tensor) and not y.dtype.is_floating_point)


def largest_norm(
    x: torch.Tensor,
    ord: float = 2,  # noqa: A002 - PyTorch's name
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the infinity norm as the extreme of magnitudes; other norms are left to the translation."""
    if not math.isinf(ord) or not x.dtype.is_floating_point:
        return NotImplemented
    extreme = aten.amax.default if ord > 0 else aten.amin.default
    magnitudes = x.to(dtype or x.dtype).abs()
    result: torch.Tensor = extreme(magnitudes, list(range(x.dim()) if dim is None else dim), keepdim)
    return result


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """Take every value one row and one column after the last; the translation adds up all others times zero."""
    matrices = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        return NotImplemented
    first = offset if offset >= 0 else -offset * columns
    count = min(rows + min(offset, 0), columns - max(offset, 0))
    if count <= 0 or matrices.stride(-2) != columns * matrices.stride(-1):
        return NotImplemented  # flat matrices are a copy, with another layout
    return aten.slice.Tensor(matrices.flatten(-2), -1, first, first + (count - 1) * (columns + 1) + 1, columns + 1)


def affine(
    x: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    small: float = 0,
) -> torch.Tensor:
    """Leave out `x` or the product if its factor is zero, including any NaN in it, as PyTorch does.

    PyTorch's kernel for matrices with fewer than `small` products does multiply them by zero.
    """
    multiplied = bool(alpha) or math.prod((*left.shape[1:], right.shape[-1])) < small
    if beta and multiplied:
        return NotImplemented
    if not multiplied:
        shape = product(left, right).shape
        return (x * beta if beta else torch.zeros_like(x)).expand(shape).clone()
    return product(left, right) * alpha


def summed_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sum of the products of matrices."""
    return torch.bmm(left, right).sum(0)


aten = torch.ops.aten


def over_extremes(
    x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False, *, reduce: torch._ops.OpOverload
) -> torch.Tensor:
    """Name all dimensions if none are named, as the translation requires."""
    if not x.dim():
        return x.clone()
    if dim:
        return NotImplemented
    result: torch.Tensor = reduce(x, list(range(x.dim())), keepdim)
    return result


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Swap two dimensions if there are two."""
    return aten.permute.default(x, [1, 0]) if x.dim() == 2 else aten.view.default(x, x.shape)


def repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """Expand a single value to the repeated dimensions."""
    if x.dim() or not repeats:
        return NotImplemented if repeats else x.clone()
    return aten.expand.default(x, repeats).clone(memory_format=torch.contiguous_format)


def same(x: torch.Tensor) -> torch.Tensor:
    """Return a view of all of `x`."""
    return aten.view.default(x, x.shape)


def layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """Compute in the parameter type, and return the result, mean and reciprocal deviation.

    PyTorch's CPU kernel does so, but its fake tensors report the type of `x` for both. ONNX has a single type for
    values and parameters.
    """
    parameter = bias if weight is None else weight
    if parameter is None or parameter.dtype is x.dtype or x.device.type != "cpu":
        return NotImplemented
    result, mean, deviation = aten.native_layer_norm.default(x.to(parameter.dtype), shape, weight, bias, eps)
    return result.to(x.dtype), mean, deviation


def unknown_parts(x: torch.Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Slice parts whose sizes are symbols: their translation is a sequence, which onnxscript's optimizer fails at."""
    if all(isinstance(size, int) for size in (sizes if isinstance(sizes, Sequence) else [sizes])):
        return NotImplemented  # type: ignore[no-any-return]
    if not isinstance(sizes, Sequence):
        return split(x, sizes, dim)  # type: ignore[no-any-return]
    ends = itertools.accumulate(sizes)
    return tuple(x.narrow(dim, end - size, size) for size, end in zip(sizes, ends, strict=True))


def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the softmax, with zeros in rows that are entirely minus infinity, as attention masks produce.

    Two numbers identify such a row, while PyTorch's decomposition compares every element: its softmax is NaN and its
    sum is minus infinity; the sum of a row with NaN or plus infinity is not.
    """
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    softmax = torch.softmax(x, dim, dtype)
    first, total = aten.slice.Tensor(softmax, dim, 0, 1), aten.sum.dim_IntList(x, [dim], True)
    is_masked = first.isnan() & (total == -torch.inf)
    return torch.where(is_masked, torch.zeros((), dtype=softmax.dtype, device=x.device), softmax)


def product(x: torch.Tensor, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply along one dimension after another."""
    x = x.to(output_dtype) if output_dtype else x
    for dim in sorted(range(x.dim()) if dims is None else dims, reverse=True):
        x = aten.prod.dim_int(x, dim)
    return x


def maximum_of_booleans(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any value along `dim` is true, and the index of the first; for booleans only."""
    is_left = x.dtype is not torch.bool or not x.dim()
    return NotImplemented if is_left else (x.any(dim, keepdim), x.to(torch.int32).argmax(dim, keepdim))


_INTEGERS = (torch.int64, torch.int32)


def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Add `values` to `x` at `indices` with one scatter; repeated indices add up.

    Writes that do not accumulate, and masks instead of indices, are left to the translation.
    """
    places = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if not accumulate or not places or any(index.dtype not in _INTEGERS for index in tensors):
        return NotImplemented
    tensors = list(torch.broadcast_tensors(*tensors))
    unindexed = [dim for dim in range(x.dim()) if dim not in places]
    # If the indexed dimensions are not adjacent, the index dimensions come first.
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rank = tensors[0].dim()
    shape = [x.shape[dim] for dim in unindexed]
    values = values.expand([*shape[:first], *tensors[0].shape, *shape[first:]])
    values = values.permute([*range(first, first + rank), *range(first), *range(first + rank, values.dim())])
    linear = _linear([index.long() for index in tensors], [x.shape[dim] for dim in places]).reshape(-1, 1)
    order = [*places, *unindexed]
    ordered = x.permute(order)
    num_places, num_values = math.prod([x.shape[dim] for dim in places]), math.prod(shape)
    rows = ordered.reshape(num_places, num_values)  # [N, R]
    added = values.reshape(linear.shape[0], num_values)  # [M, R]
    result = aten.scatter_add.default(rows, 0, linear.expand(linear.shape[0], num_values), added)
    return result.reshape(ordered.shape).permute([order.index(dim) for dim in range(x.dim())])


def index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Add slices of `source` to the slices of `x` selected by `index`, with one scatter along `dim`.

    PyTorch's decompositions of this and of `index_copy` take negative indices, for which its operators raise.
    """
    if not x.dim():
        return index_add(x.reshape(1), 0, index.reshape(-1), source.reshape(-1), alpha=alpha).reshape(())
    source = source if alpha == 1 else source * alpha
    return aten.scatter_add.default(x, dim, _places(x, dim, index, source), source)


def index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write slices of `source` to the slices of `x` selected by `index`, with one scatter along `dim`."""
    if not x.dim():
        return index_copy(x.reshape(1), 0, index.reshape(-1), source.reshape(-1)).reshape(())
    return aten.scatter.src(x, dim, _places(x, dim, index, source), source)


def index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Write `value` to the slices of `x` selected by `index`, which may count from the end."""
    if not x.dim():
        return index_fill(x.reshape(1), 0, index, value).reshape(())
    index = index.reshape(-1)
    places = torch.where(index < 0, index + x.shape[dim], index)
    shape = [*x.shape]
    shape[dim] = index.shape[0]
    filling = value.to(x.dtype) if isinstance(value, torch.Tensor) else torch.scalar_tensor(value, dtype=x.dtype)
    return index_copy(x, dim, places, filling.expand(shape))


def _places(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the indices of slices along `dim`, for each element of the slices `source`."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return index.long().reshape(shape).expand(source.shape)


def diagonal_scatter(
    x: torch.Tensor, diagonal: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Write `diagonal` onto a diagonal of `x` with one scatter along both dimensions, flattened."""
    places = [dim1 % x.dim(), dim2 % x.dim()]
    unindexed = [dim for dim in range(x.dim()) if dim not in places]
    order = [*unindexed, *places]
    ordered = x.permute(order)
    steps = torch.arange(diagonal.shape[-1], device=x.device)
    rows, columns = steps + max(-offset, 0), steps + max(offset, 0)
    shape = [x.shape[dim] for dim in unindexed]
    flat = ordered.reshape([*shape, x.shape[places[0]] * x.shape[places[1]]])
    linear = (rows * x.shape[places[1]] + columns).expand(diagonal.shape)
    result = aten.scatter.src(flat, -1, linear, diagonal)
    return result.reshape(ordered.shape).permute([order.index(dim) for dim in range(x.dim())])


def scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """Divide a scattered sum by a scattered count; only for float means, others are left to the translation."""
    if reduce != "mean" or not x.dtype.is_floating_point:
        return NotImplemented
    source = source.reshape(()) if not index.dim() else source[tuple(slice(size) for size in index.shape)]
    before = torch.ones_like(x) if include_self else torch.zeros_like(x)
    counts = aten.scatter_add.default(before, dim, index, torch.ones_like(source))
    start = x if include_self else torch.where(counts > 0, torch.zeros_like(x), x)
    return aten.scatter_add.default(start, dim, index, source) / counts.clamp(min=1)


def _linear(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the indices into several dimensions as one index into the flattened dimensions.

    An index outside of its dimension stays outside of all of them.
    """
    positive = [torch.where(index < 0, index + size, index) for index, size in zip(indices, sizes, strict=True)]
    linear = positive[0]
    for index, size in zip(positive[1:], sizes[1:], strict=True):
        linear = torch.where((linear < 0) | (index < 0) | (index >= size), -1, linear * size + index)
    return linear
