"""Pooling, replication padding and their gradients, with operators that onnxruntime has.

Letters: a window of size k moves with stride s over n input values with p zeros on each side, giving o values.
"""

from __future__ import annotations

import math
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
    """Pool with windows that extend past the border (`ceil_mode`), or with `divisor_override`.

    Pooling with neither is left to the translation.
    """
    if not ceil_mode and divisor_override is None:
        return NotImplemented
    k, p = _each(kernel_size, rank), _each(padding, rank)
    s = _each(stride, rank) if len(stride) else k
    n = x.shape[-rank:]
    pool = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
    o = [_num_windows(*four, ceil_mode) for four in zip(n, k, s, p, strict=True)]
    widths = [(p[i], (o[i] - 1) * s[i] + k[i] - n[i] - p[i]) for i in range(rank)]
    means = pool(_padded(x, widths), k, s)
    for i, sizes in enumerate(zip(n, k, s, p, o, strict=True)):
        counts = _counts(sizes, count_include_pad, x)
        divisor = counts if divisor_override is None else torch.ones_like(counts)
        means = means * _along(k[i] / divisor, i - rank)
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
    """Add each window's gradient, divided by the window size, to all values in the window."""
    k, p = _each(kernel_size, rank), _each(padding, rank)
    s = _each(stride, rank) if len(stride) else k
    n, o = x.shape[-rank:], gradient.shape[-rank:]
    if divisor_override is not None:
        gradient = gradient / divisor_override
    elif count_include_pad and not ceil_mode:
        gradient = gradient / math.prod(k)
    else:
        for i, sizes in enumerate(zip(n, k, s, p, o, strict=True)):
            gradient = gradient / _along(_counts(sizes, count_include_pad, x), i - rank)
    return _padded(_added(gradient, k, s), [(-p[i], n[i] + p[i] - (o[i] - 1) * s[i] - k[i]) for i in range(rank)])


def adaptive_average_pool(x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """Average windows that divide the input evenly, one dimension after another."""
    for place, num_windows in enumerate(output_size):
        x = _adaptive_means(x, place - len(output_size), num_windows)
    return x


def adaptive_average_pool_backward(gradient: torch.Tensor, x: torch.Tensor, *, rank: int) -> torch.Tensor:
    """Distribute the gradients of windows to the values in them, one dimension after another."""
    n, o = x.shape[-rank:], gradient.shape[-rank:]
    if all(n[i] % o[i] == 0 for i in range(rank)):
        k = [n[i] // o[i] for i in range(rank)]
        return _repeated(gradient / math.prod(k), k)
    for dim in range(-rank, 0):
        gradient = _adaptive_shares(gradient, dim, x.shape[dim])
    return gradient


def adaptive_windows(n: int, o: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the start and end of each of o windows over n values, and the size of the widest one."""
    windows = torch.arange(o, device=device)
    starts, ends = windows * n // o, -(-(windows + 1) * n // o)
    return starts, ends, 1 + (n - 1) // o + (1 if n % o else 0)


def _adaptive_means(x: torch.Tensor, dim: int, o: int) -> torch.Tensor:
    starts, ends, widest = adaptive_windows(x.shape[dim], o, x.device)
    return _sum_of_ranges(x, dim, starts, ends - starts, widest) / _along(ends - starts, dim).to(x.dtype)


def _adaptive_shares(gradient: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    o = gradient.shape[dim]
    windows = torch.arange(o, device=gradient.device)
    sizes = -(-(windows + 1) * n // o) - windows * n // o
    first, last, widest = adaptive_windows(o, n, gradient.device)  # the windows that each value belongs to
    return _sum_of_ranges(gradient / _along(sizes, dim).to(gradient.dtype), dim, first, last - first, widest)


def _sum_of_ranges(
    x: torch.Tensor, dim: int, starts: torch.Tensor, lengths: torch.Tensor, longest: int
) -> torch.Tensor:
    """Return, for each of `starts`, the sum of the next `lengths` values of `x`."""
    total = x.index_select(dim, starts)
    for step in range(1, longest):
        values = x.index_select(dim, (starts + step).clamp(max=x.shape[dim] - 1))
        total = total + torch.where(_along(lengths, dim) > step, values, torch.zeros_like(values))
    return total


def _along(vector: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshape a vector to lie along a dimension counted from the end."""
    return vector.reshape([-1] + [1] * (-1 - dim))


def _each(sizes: Sequence[int], rank: int) -> list[int]:
    return list(sizes) * rank if len(sizes) == 1 else list(sizes)


def _num_windows(n: int, k: int, s: int, p: int, ceil_mode: bool) -> int:
    """Return o; a window that starts in the zeros on the right does not count."""
    num = (n + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
    return num - 1 if ceil_mode and (num - 1) * s >= n + p else num


def _counts(sizes: Sequence[int], with_padding: bool, x: torch.Tensor) -> torch.Tensor:
    """Return the number of values in each window's average, for the sizes n, k, s, p and o."""
    n, k, s, p, o = sizes
    starts = torch.arange(o, device=x.device) * s - p
    ends = (starts + k).clamp(max=n + p)
    if not with_padding:
        starts, ends = starts.clamp(min=0), ends.clamp(max=n)
    return (ends - starts).to(x.dtype)


def _added(x: torch.Tensor, k: Sequence[int], s: Sequence[int]) -> torch.Tensor:
    """Add each value to all places in its window: a transposed convolution with ones, per channel."""
    rank = len(k)
    if list(s) == list(k):
        return _repeated(x, k)
    images = x.reshape([-1, 1, *x.shape[-rank:]])
    ones = torch.ones([1, 1, *k], dtype=x.dtype, device=x.device)
    added = aten.convolution.default(images, ones, None, s, [0] * rank, [1] * rank, True, [0] * rank, 1)
    return added.reshape([*x.shape[:-rank], *added.shape[-rank:]])


def _repeated(x: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    """Repeat each value `times` along the last dimensions.

    Concatenating copies takes onnxruntime a third of the time of expanding single values.
    """
    for place, num in enumerate(times):
        dim = x.dim() + place - len(times)
        shape = [*x.shape[:dim], x.shape[dim] * num, *x.shape[dim + 1 :]]
        x = x.expand(shape) if x.shape[dim] == 1 else torch.stack([x] * num, dim + 1).reshape(shape)
    return x.contiguous()


def _padded(x: torch.Tensor, widths: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Pad the last dimensions with zeros before and after; negative widths crop."""
    for place, (before, after) in enumerate(widths):
        dim = place - len(widths)
        if before < 0 or after < 0:
            x = x.narrow(dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
    flat = [max(width, 0) for pair in reversed(widths) for width in pair]
    return aten.constant_pad_nd.default(x, flat) if any(flat) else x


def max_pool_backward(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, *, rank: int) -> torch.Tensor:
    """Add each gradient at the position of its maximum, an index into the last `rank` dimensions, flattened."""
    lead = list(x.shape[:-rank])
    zeros = torch.zeros([*lead, math.prod(x.shape[-rank:])], dtype=gradient.dtype, device=x.device)
    rows = [*lead, math.prod(indices.shape[-rank:])]
    added = aten.scatter_add.default(zeros, -1, indices.reshape(rows), gradient.reshape(rows))
    return added.reshape(x.shape)


def max_pool3d_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient from only the positions of the maxima; the windows are not needed."""
    return max_pool_backward(gradient, x, indices, rank=3)


def adaptive_max_pool(x: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima of windows that divide the last dimensions evenly, and their flattened positions in these.

    A NaN is the maximum of its window; if there are several, the last one counts.
    """
    rank = len(output_size)
    lead, sizes = list(x.shape[:-rank]), list(x.shape[-rank:])
    if all(isinstance(size, int) and size % num == 0 for size, num in zip(sizes, output_size, strict=True)):
        pool = aten.max_pool2d_with_indices.default if rank == 2 else aten.max_pool3d_with_indices.default
        x = x.contiguous() if rank == 3 else x  # PyTorch refuses one volume in the layout of a batch of pictures
        result: tuple[torch.Tensor, torch.Tensor] = pool(x, [a // b for a, b in zip(sizes, output_size, strict=True)])
        return result
    places = torch.zeros([1] * (2 * rank), dtype=torch.int64, device=x.device)
    inside = torch.ones_like(places, dtype=torch.bool)
    num_places = 1
    for dim, (size, num_windows) in enumerate(zip(sizes, output_size, strict=True)):
        along, belongs = _windows(size, num_windows, x.device)  # [windows, positions in a window]
        shape = [1] * (2 * rank)
        shape[dim], shape[rank + dim] = along.shape
        places, inside = places * size + along.reshape(shape), inside & belongs.reshape(shape)
        num_places *= size
    places, inside = places.flatten(rank), inside.flatten(rank)
    flat = x.reshape([*lead, num_places])
    values = flat.index_select(-1, places.reshape(-1)).reshape([*lead, *places.shape])
    is_nan = values.isnan() & inside
    numbers = torch.where(inside & ~is_nan, values, torch.full_like(values, -math.inf))
    last_nan = (is_nan * torch.arange(1, places.shape[-1] + 1, device=x.device)).amax(-1)
    chosen = torch.where(last_nan > 0, last_nan - 1, numbers.argmax(-1))
    maxima = torch.where(last_nan > 0, torch.full_like(numbers[..., 0], math.nan), numbers.amax(-1))
    return maxima, places.expand(values.shape).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def _windows(size: int, num_windows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a position array as wide as the widest window for each window, and which positions are inside."""
    starts, ends, widest = adaptive_windows(size, num_windows, device)
    places = starts[:, None] + torch.arange(widest, device=device)
    return places.clamp(max=size - 1), places < ends[:, None]


def replication_pad_backward(gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Add the gradients of all copies of a border value to its own; negative widths crop."""
    for place, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):  # last dimension first
        dim, size = x.dim() - 1 - place, x.shape[-1 - place]
        copied = torch.arange(-before, size + after, device=x.device).clamp(0, size - 1)
        zeros = gradient.new_zeros([*gradient.shape[:dim], size, *gradient.shape[dim + 1 :]])
        gradient = zeros.index_add(dim, copied, gradient)
    return gradient
