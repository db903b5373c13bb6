"""Random numbers, drawn in PyTorch as eager PyTorch draws them: users seed, save and restore its generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

from onnxtool.torch_backend.run.fast_dropout import fast_dropout_mask

aten = torch.ops.aten

DropoutMask = Callable[[torch.Tensor, float], torch.Tensor]


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the mask as eager PyTorch does on the CPU, from the same numbers, and apply it."""
    if not train:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p >= 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = _draw_like(x, lambda shape: aten.bernoulli.p(torch.empty(shape, dtype=torch.bool, device=x.device), 1 - p))
    return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask


def noise_like(
    x: torch.Tensor,
    *,
    draw: Callable[..., torch.Tensor],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Draw numbers of the shape of `x` without its values, so that they need not wait for them."""
    if memory_format not in (None, torch.preserve_format) or layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    return _draw_like(x, lambda shape: draw(shape, dtype=dtype or x.dtype, device=device or x.device))


def has_scaled_mask(x: torch.Tensor, p: float) -> bool:
    """Whether there is a mask of `DROPOUT_MASKS` for the dropout of `x`: on the CPU."""
    return isinstance(p, int | float) and 0 < p < 1 and x.device.type == "cpu" and x.is_floating_point()


def eager_dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return the factor of `x` in dropout: 0 with probability p, else 1 / (1 - p), from eager PyTorch's numbers."""

    def draw(shape: list[int]) -> torch.Tensor:
        return aten.bernoulli.p(torch.empty(shape, dtype=x.dtype, device=x.device), 1 - p) / (1 - p)

    return _draw_like(x, draw)


def _fast_dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    return _draw_like(x, lambda shape: fast_dropout_mask(shape, p, dtype=x.dtype, device=x.device))


def _draw_like(x: torch.Tensor, draw: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
    """Return what `draw` makes for the memory of `x`, in the layout of `x`.

    Generators fill memory in its order: the layout decides which element gets which number.
    """
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    numbers = draw([x.shape[dim] for dim in order])
    if list(order) == list(range(x.dim())):
        return numbers
    return numbers.permute([order.index(dim) for dim in range(x.dim())])


DROPOUT_MASKS: dict[str, DropoutMask] = {"eager": eager_dropout_mask, "fast": _fast_dropout_mask}
"""What draws the factor of a tensor in dropout, by the option `dropout`."""
