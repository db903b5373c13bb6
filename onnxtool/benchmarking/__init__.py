"""Time a model on generated inputs or texts, by itself or in turns with another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.benchmarking.measurement import benchmark as benchmark
    from onnxtool.benchmarking.options import BenchmarkOptions as BenchmarkOptions

_MODULES = {
    "benchmark": "onnxtool.benchmarking.measurement",
    "BenchmarkOptions": "onnxtool.benchmarking.options",
}

__all__ = ["BenchmarkOptions", "benchmark"]

__getattr__ = lazy_names(__name__, _MODULES)
