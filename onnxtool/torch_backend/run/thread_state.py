"""State of the calling thread around a session: denormal numbers, and PyTorch's OpenMP threads.

Denormal numbers, below 1.2e-38 in float32, count as zero while a session runs. A masked softmax gives thousands of
them, and processors take over a hundred cycles for each.

After a kernel, PyTorch's OpenMP threads wait busily for the next one, for some milliseconds. Where there are as many of
them as cores, they slow down the threads of onnxruntime. To start new ones costs the next kernel some 60 microseconds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_SMALLEST = 5e-324
_SOFT = 1  # omp_pause_soft of OpenMP 5.0: settings stay as they are


def denormals_are_zero() -> bool:
    """Whether denormal numbers count as zero in this thread."""
    return _SMALLEST == 0.0


@contextmanager
def flush_denormals(wanted: bool = True) -> Iterator[None]:
    """Let denormal numbers count as zero in this thread, or not, and restore its state at the end."""
    before = denormals_are_zero()
    if before is not wanted:
        torch.set_flush_denormal(wanted)
    try:
        yield
    finally:
        if before is not denormals_are_zero():
            torch.set_flush_denormal(before)


def end_openmp_threads() -> None:
    """End the OpenMP threads of the calling thread, where it has some; the next kernel starts new ones.

    Does nothing where PyTorch has one thread, or an OpenMP that cannot pause.
    """
    if torch.get_num_threads() > 1:
        _pause_resource()(_SOFT)


@functools.cache
def _pause_resource() -> Callable[[int], int]:
    """Return the function `omp_pause_resource_all` of the OpenMP that PyTorch has loaded."""
    try:
        function = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # an older OpenMP, or Windows, where a name needs its library
        return lambda _kind: 0
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function
