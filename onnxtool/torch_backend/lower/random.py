"""Random numbers, drawn in PyTorch like in eager mode: users seed, save and restore its generator.

PyTorch's own generator draws numbers sequentially, in one thread on most processors. In a fast dropout mask, element i
has the i-th number of Philox4x64 (Salmon et al. 2011), so threads can draw parts of a mask, and the result does not
depend on the number of threads. A mask's key comes from PyTorch's generator: seeds, saved states and activation
checkpointing keep their usual meaning.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    compute_elementwise_output_strides,
)

aten = torch.ops.aten

DropoutMask = Callable[[torch.Tensor, float], torch.Tensor]


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the mask as eager PyTorch does on the CPU, from the same numbers, and apply it."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p >= 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = _bernoulli_like(x, 1 - p, torch.bool)
    return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask


def noise_like(
    x: torch.Tensor,
    *,
    draw: Callable[..., torch.Tensor],
    in_place: str,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Draw numbers with the shape of `x` but without its values, so that drawing need not wait for them.

    `draw` takes a shape, and `in_place` names the same method of a tensor.
    """
    if memory_format not in (None, torch.preserve_format) or layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    dtype, device = dtype or x.dtype, device or x.device
    strides = _strides_like(x)
    return (
        draw(x.shape, dtype=dtype, device=device)
        if strides is None
        else drawn_in_place(x.shape, strides, in_place, (), dtype=dtype, device=device)
    )


def bernoulli(x: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """Draw as `x.bernoulli_(p)` does, which is traced as this operator; `torch.bernoulli(x, p)` has other memory."""
    return NotImplemented if _strides_like(x) is None else _bernoulli_like(x, p, x.dtype)


def _bernoulli_like(x: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    strides = _strides_like(x)
    if strides is None:
        return aten.bernoulli.p(torch.empty(x.shape, dtype=dtype, device=x.device), p)
    return drawn_in_place(x.shape, strides, "bernoulli_", (p,), dtype=dtype, device=x.device)


def _strides_like(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of `torch.empty_like(x)`; None if it is contiguous."""
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    return None if list(order) == list(range(x.dim())) else compute_elementwise_output_strides(x)


def has_scaled_mask(x: torch.Tensor, p: float) -> bool:
    """Return whether `DROPOUT_MASKS` has a mask for dropout of `x`, which must be on the CPU."""
    return isinstance(p, int | float) and 0 < p < 1 and x.device.type == "cpu" and x.is_floating_point()


def eager_dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return the factor of `x` in dropout, 0 with probability p, else 1 / (1 - p), from eager PyTorch's numbers."""
    return _bernoulli_like(x, 1 - p, x.dtype) / (1 - p)


def _fast_dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return a mask whose memory is filled in order, in the layout of `x`."""
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    numbers = fast_dropout_mask([x.shape[dim] for dim in order], p, dtype=x.dtype, device=x.device)
    if list(order) == list(range(x.dim())):
        return numbers
    return numbers.permute([order.index(dim) for dim in range(x.dim())])


DROPOUT_MASKS: dict[str, DropoutMask] = {"eager": eager_dropout_mask, "fast": _fast_dropout_mask}
"""Functions that draw a tensor's dropout factor, by the option `dropout`."""


@torch.library.custom_op("onnxtool::drawn_in_place", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[untyped-decorator]  # PyTorch has no types here
def drawn_in_place(
    size: Sequence[int],
    stride: Sequence[int],
    method: str,
    arguments: Sequence[float],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return new memory that a method such as `normal_` has filled.

    The strides decide which element gets which number, and even by which algorithm numbers are drawn.
    """
    memory: torch.Tensor = getattr(torch.empty_strided(size, stride, dtype=dtype, device=device), method)(*arguments)
    return memory


@drawn_in_place.register_fake  # type: ignore[untyped-decorator]  # PyTorch has no types here
def _(
    size: Sequence[int],
    stride: Sequence[int],
    method: str,
    arguments: Sequence[float],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


_BLOCK = 2**15
"""Elements per pass: they fit the cache, and PyTorch starts no threads for so few."""
_LEAST_OF_A_THREAD = 2 * _BLOCK
_CLOSE = 1e-4
_KEYS = 2**63 - 1


@torch.library.custom_op("onnxtool::fast_dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[untyped-decorator]  # PyTorch has no types here
def fast_dropout_mask(size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `size` on `device`, which is the CPU: 0 with probability p, 0 < p < 1, else 1 / (1 - p).

    The probability is p in steps of 2**-16 if that is within 1e-4 of p, else of 2**-32; the factor uses the rounded
    probability, so that its mean is 1. Activation checkpointing finds the generator by `device`.
    """
    mask = torch.empty(size, dtype=dtype, device=device)
    key = int(torch.randint(_KEYS, ()))
    flat, bits = mask.view(-1), _bits(p)
    threads = max(1, min(torch.get_num_threads(), flat.numel() // _LEAST_OF_A_THREAD))
    length = -(-flat.numel() // (threads * _BLOCK)) * _BLOCK
    parts = [(flat[start : start + length], start) for start in range(0, flat.numel(), length or 1)]
    futures = [_pool(os.getpid(), threads - 1).submit(_fill, part, p, bits, key, start) for part, start in parts[1:]]
    for part, start in parts[:1]:
        _fill(part, p, bits, key, start)
    for other in futures:
        other.result()
    return mask


@fast_dropout_mask.register_fake  # type: ignore[untyped-decorator]  # PyTorch has no types here
def _(size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _bits(p: float) -> int:
    """Return the number of bits per draw: 16 if p is a multiple of 2**-16, or close to one."""
    return 16 if abs(round(p * 2**16) / 2**16 - p) <= _CLOSE * min(p, 1 - p) else 32


def _fill(part: torch.Tensor, p: float, bits: int, key: int, start: int) -> None:
    """Write a mask's elements starting at `start`, a multiple of `_BLOCK`, to `part`."""
    numbers_of_a_draw = 64 // bits
    dropped = min(max(round(p * 2**bits), 1), 2**bits - 1)
    factor = 2**bits / (2**bits - dropped)
    least = dropped - 2 ** (bits - 1)  # as a signed number
    signed = np.int16 if bits == 16 else np.int32
    generator = np.random.Philox(key=key, counter=start // numbers_of_a_draw // 4)  # one count gives four draws
    for first in range(0, part.numel(), _BLOCK):
        block = part[first : first + _BLOCK]
        draws = generator.random_raw(-(-block.numel() // numbers_of_a_draw))
        numbers = torch.from_numpy(draws.view(signed))[: block.numel()]
        block.copy_(numbers.ge_(least)).mul_(factor)


@functools.lru_cache(maxsize=1)
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads of this process: a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, "onnxtool-dropout")
