"""Ends the wait of PyTorch's OpenMP threads before onnxruntime starts its own.

After a kernel they wait busily for the next one, some milliseconds long, and take the processor from the threads of
onnxruntime where there are as many of either as cores. A team that is gone costs its next kernel some 60 microseconds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: settings stay as they are


def pause() -> None:
    """End the calling thread's team of OpenMP threads, where it has one; the next kernel makes another.

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
