"""Maximum pooling: windows of adaptive pooling, and gradients as scatters to the positions of the maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onnxtool.torch_backend.lower.decompositions.average_pooling import adaptive_windows

aten = torch.ops.aten


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
    """Return the gradient from the positions of the maxima alone; the windows are not needed."""
    return max_pool_backward(gradient, x, indices, rank=3)


def adaptive_max_pool(x: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima of windows that divide the last dimensions evenly, and their positions in these, flattened.

    A NaN is the maximum of its window; of several, the last one counts.
    """
    rank = len(output_size)
    lead, sizes = list(x.shape[:-rank]), list(x.shape[-rank:])
    if all(isinstance(size, int) and size % num == 0 for size, num in zip(sizes, output_size, strict=True)):
        pool = aten.max_pool2d_with_indices.default if rank == 2 else aten.max_pool3d_with_indices.default
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
    """Return as many positions for each window as the widest one has, and which of them are inside."""
    starts, ends, widest = adaptive_windows(size, num_windows, device)
    places = starts[:, None] + torch.arange(widest, device=device)
    return places.clamp(max=size - 1), places < ends[:, None]
