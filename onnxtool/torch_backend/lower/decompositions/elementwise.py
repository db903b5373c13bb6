"""Functions made of a few ONNX operators, zero-dimensional tensors, normalization, softmax and products."""

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
