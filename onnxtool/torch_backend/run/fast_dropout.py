"""The factors of dropout from a counter-based generator, which several threads draw at once.

PyTorch's own generator draws one number after another, in one thread on most processors. Here element i of a mask has
the i-th number of Philox4x64 (Salmon et al. 2011), so that threads draw parts of a mask, and any number of threads
draws the same one. The key of a mask comes from PyTorch's generator: a seed, a saved state and activation checkpointing
mean what they always mean.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

_BLOCK = 2**15
"""Elements of one pass: they fit the cache, and PyTorch starts no threads for so few."""
_LEAST_OF_A_THREAD = 2 * _BLOCK
_CLOSE = 1e-4
_KEYS = 2**63 - 1


@torch.library.custom_op("onnxtool::fast_dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[untyped-decorator]  # PyTorch has no types here
def fast_dropout_mask(size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `size` on `device`, which is the CPU: 0 with probability p, 0 < p < 1, else 1 / (1 - p).

    The probability is p in steps of 2**-16 where that is within 1e-4 of p, else of 2**-32; the factor is that of the
    rounded one, so that its mean is 1. Activation checkpointing finds the generator by `device`.
    """
    mask = torch.empty(size, dtype=dtype, device=device)
    key = int(torch.randint(_KEYS, ()))
    flat, bits = mask.view(-1), _bits(p)
    threads = max(1, min(torch.get_num_threads(), flat.numel() // _LEAST_OF_A_THREAD))
    length = -(-flat.numel() // (threads * _BLOCK)) * _BLOCK
    parts = [(flat[start : start + length], start) for start in range(0, flat.numel(), length or 1)]
    others = [_pool(os.getpid(), threads - 1).submit(_fill, part, p, bits, key, start) for part, start in parts[1:]]
    for part, start in parts[:1]:
        _fill(part, p, bits, key, start)
    for other in others:
        other.result()
    return mask


@fast_dropout_mask.register_fake  # type: ignore[untyped-decorator]  # PyTorch has no types here
def _(size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _bits(p: float) -> int:
    """Return of how many bits a number is: 16 where p is a multiple of 2**-16, or close to one."""
    return 16 if abs(round(p * 2**16) / 2**16 - p) <= _CLOSE * min(p, 1 - p) else 32


def _fill(part: torch.Tensor, p: float, bits: int, key: int, start: int) -> None:
    """Write the elements of a mask from `start` on, a multiple of `_BLOCK`, into `part`."""
    numbers_of_a_draw = 64 // bits
    dropped = min(max(round(p * 2**bits), 1), 2**bits - 1)
    factor = 2**bits / (2**bits - dropped)
    least = dropped - 2 ** (bits - 1)  # as a signed number
    signed = np.int16 if bits == 16 else np.int32
    generator = np.random.Philox(key=key, counter=start // numbers_of_a_draw // 4)  # a count gives four draws
    for first in range(0, part.numel(), _BLOCK):
        block = part[first : first + _BLOCK]
        draws = generator.random_raw(-(-block.numel() // numbers_of_a_draw))
        numbers = torch.from_numpy(draws.view(signed))[: block.numel()]
        block.copy_(numbers.ge_(least)).mul_(factor)


@functools.lru_cache(maxsize=1)
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(threads, "onnxtool-dropout")
