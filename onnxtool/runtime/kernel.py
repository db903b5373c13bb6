"""A fixed piece of arithmetic by which two benchmarks tell a slower machine from a slower model.

A baseline is measured on another day: the clock of the processor, the neighbour on the same physical core and the host
of a virtual machine may be others. What they do to a model they do to this kernel as well, which is a product of two
float32 matrices that fit in the cache, computed by numpy on one thread. It is not onnxruntime's, as a slower release of
that has to show in the comparison and must not be divided away.
"""

from __future__ import annotations

import time

import numpy as np

# As wide as OpenBLAS computes on one thread (interface/gemm.c: up to 4 * 65536 multiplications).
_WIDTH = 64
_PRODUCTS = 20
_REPEATS = 3


class ReferenceKernel:
    """Times the kernel. The processor time of the thread counts, in which other processes have no part."""

    def __init__(self) -> None:
        values = np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH), dtype=np.float32)
        self._values, self._result = values, np.empty_like(values)
        self.time_ms()

    def time_ms(self) -> float:
        """Return the processor time of the kernel in milliseconds, the least of three."""
        return min(self._once() for _ in range(_REPEATS)) / 1e6

    def _once(self) -> int:
        start = time.thread_time_ns()
        for _ in range(_PRODUCTS):
            np.matmul(self._values, self._values, out=self._result)
        return time.thread_time_ns() - start
