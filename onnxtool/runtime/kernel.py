"""A fixed computation that tells a slower machine from a slower model between two benchmarks.

A baseline is measured on another day: clock frequency, load on the same physical core, memory traffic of other
processes and the host of a virtual machine may differ. They affect this kernel as they affect a model. It does what a
transformer does: products of a few rows with weights that are read from memory, and a function of each element of what
fits in the second-level cache. numpy computes it on one thread: a slower release of onnxruntime has to show in the
comparison and must not cancel.
"""

from __future__ import annotations

import time

import numpy as np

# 16 x 1024 x 16 is as large a product as OpenBLAS computes on one thread (interface/gemm.c: 4 * 65536).
_ROWS, _DEPTH, _COLUMNS = 16, 1024, 16
_PRODUCTS = 128  # 8 MB of weights
_ELEMENTS = 1 << 16
_FUNCTIONS = 30  # so often that both parts take about as long
_REPEATS = 3


class ReferenceKernel:
    """Times the kernel by the processor time of the thread, which excludes other processes."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._rows = generator.standard_normal((_ROWS, _DEPTH), dtype=np.float32)
        self._weights = generator.standard_normal((_PRODUCTS, _DEPTH, _COLUMNS), dtype=np.float32)
        self._product = np.empty((_ROWS, _COLUMNS), np.float32)
        self._elements = generator.standard_normal(_ELEMENTS, dtype=np.float32)
        self._result = np.empty_like(self._elements)
        self.time_ms()

    def time_ms(self) -> float:
        """Return the processor time of the kernel in milliseconds, the least of three."""
        return min(self._once() for _ in range(_REPEATS)) / 1e6

    def _once(self) -> int:
        start = time.thread_time_ns()
        for weight in self._weights:
            np.matmul(self._rows, weight, out=self._product)
        for _ in range(_FUNCTIONS):
            np.tanh(self._elements, out=self._result)
        return time.thread_time_ns() - start
