"""Average pools, and gradients of them, as sums of windows, which onnxruntime has an operator for.

Letters: a window of size k moves by s over an input of n values with p zeros on each side, and gives o values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

aten = torch.ops.aten


def average_pool(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    rank: int,
) -> torch.Tensor:
    """Pool with windows that reach beyond the border, or with a divisor of the caller's.

    Pools with neither are left to the translation.
    """
    if not ceil_mode and divisor_override is None:
        return NotImplemented
    k, p = _each(kernel_size, rank), _each(padding, rank)
    s = _each(stride, rank) if len(stride) else k
    n = x.shape[-rank:]
    pool = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
    o = [_num_windows(*sizes, ceil_mode) for sizes in zip(n, k, s, p, strict=True)]
    widths = [(p[i], (o[i] - 1) * s[i] + k[i] - n[i] - p[i]) for i in range(rank)]
    means = pool(_padded(x, widths), k, s)
    for i in range(rank):
        counts = _counts(n[i], k[i], s[i], p[i], o[i], count_include_pad, x)
        divisor = counts if divisor_override is None else torch.ones_like(counts)
        means = means * (k[i] / divisor).reshape([-1] + [1] * (rank - 1 - i))
    return means if divisor_override is None else means / divisor_override


def average_pool_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    rank: int,
) -> torch.Tensor:
    """Set the gradients s apart, with zeros between them, and sum windows of them."""
    k, p = _each(kernel_size, rank), _each(padding, rank)
    s = _each(stride, rank) if len(stride) else k
    n, o = x.shape[-rank:], gradient.shape[-rank:]
    widths = []
    for i in range(rank):
        if divisor_override is None:
            counts = _counts(n[i], k[i], s[i], p[i], o[i], count_include_pad, x)
            gradient = gradient / counts.reshape([-1] + [1] * (rank - 1 - i))
        gradient = _spread(gradient, i - rank, s[i])
        widths.append((k[i] - 1 - p[i], n[i] + p[i] - o[i] * s[i]))
    pool = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
    volume = 1
    for size in k:
        volume *= size
    sums = pool(_padded(gradient, widths), k, [1] * rank) * volume
    return sums if divisor_override is None else sums / divisor_override


def adaptive_average_pool(x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """Average windows that share the input evenly, one dimension after the other."""
    for place, num_windows in enumerate(output_size):
        x = _adaptive_means(x, place - len(output_size), num_windows)
    return x


def adaptive_average_pool_backward(gradient: torch.Tensor, x: torch.Tensor, *, rank: int) -> torch.Tensor:
    """Give each value its share of the windows that it is in, one dimension after the other."""
    for dim in range(-rank, 0):
        gradient = _adaptive_shares(gradient, dim, x.shape[dim])
    return gradient


def _adaptive_means(x: torch.Tensor, dim: int, o: int) -> torch.Tensor:
    n = x.shape[dim]
    windows = torch.arange(o, device=x.device)
    starts, ends = windows * n // o, -(-(windows + 1) * n // o)
    widest = 1 + (n - 1) // o + (1 if n % o else 0)
    return _sum_of_ranges(x, dim, starts, ends - starts, widest) / _along(ends - starts, dim).to(x.dtype)


def _adaptive_shares(gradient: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    o = gradient.shape[dim]
    windows = torch.arange(o, device=gradient.device)
    sizes = -(-(windows + 1) * n // o) - windows * n // o
    values = torch.arange(n, device=gradient.device)
    first, last = values * o // n, -(-(values + 1) * o // n)
    widest = 1 + (o - 1) // n + (1 if o % n else 0)
    return _sum_of_ranges(gradient / _along(sizes, dim).to(gradient.dtype), dim, first, last - first, widest)


def _sum_of_ranges(
    x: torch.Tensor, dim: int, starts: torch.Tensor, lengths: torch.Tensor, longest: int
) -> torch.Tensor:
    """Return at each place of `starts` the sum of as many values of `x` from there as `lengths` says."""
    total = x.index_select(dim, starts)
    for step in range(1, longest):
        values = x.index_select(dim, (starts + step).clamp(max=x.shape[dim] - 1))
        total = total + torch.where(_along(lengths, dim) > step, values, torch.zeros_like(values))
    return total


def _along(vector: torch.Tensor, dim: int) -> torch.Tensor:
    """Shape a vector to lie along a dimension counted from the last."""
    return vector.reshape([-1] + [1] * (-1 - dim))


def _each(sizes: Sequence[int], rank: int) -> list[int]:
    return list(sizes) * rank if len(sizes) == 1 else list(sizes)


def _num_windows(n: int, k: int, s: int, p: int, ceil_mode: bool) -> int:
    """Return o; a window that begins in the zeros on the right is none."""
    num = (n + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
    return num - 1 if ceil_mode and (num - 1) * s >= n + p else num


def _counts(n: int, k: int, s: int, p: int, o: int, with_padding: bool, x: torch.Tensor) -> torch.Tensor:
    """Return how many values each window is the mean of."""
    starts = torch.arange(o, device=x.device) * s - p
    ends = (starts + k).clamp(max=n + p)
    if not with_padding:
        starts, ends = starts.clamp(min=0), ends.clamp(max=n)
    return (ends - starts).to(x.dtype)


def _spread(x: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """Put `step - 1` zeros behind each value."""
    if step == 1:
        return x
    dim = dim % x.dim()
    wide = aten.constant_pad_nd.default(x.unsqueeze(dim + 1), [0, 0] * (x.dim() - 1 - dim) + [0, step - 1])
    return wide.reshape([*x.shape[:dim], x.shape[dim] * step, *x.shape[dim + 1 :]])


def _padded(x: torch.Tensor, widths: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Put zeros before and behind the last dimensions; what is less than none is cut off."""
    for place, (_, after) in enumerate(widths):
        if after < 0:
            x = x.narrow(place - len(widths), 0, x.shape[place - len(widths)] + after)
    flat = [width for before, after in reversed(widths) for width in (before, max(after, 0))]
    return aten.constant_pad_nd.default(x, flat) if any(flat) else x
