"""Time a model: on made-up inputs or texts, alone or in turns with another, and against an earlier report."""

from onnxtool.benchmarking.measurement import benchmark
from onnxtool.benchmarking.options import BenchmarkOptions

__all__ = ["BenchmarkOptions", "benchmark"]
