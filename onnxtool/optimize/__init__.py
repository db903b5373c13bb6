"""Optimize ONNX files: fuse and convert with a list of passes, verify against the input, stamp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.lazy import lazy_names

if TYPE_CHECKING:
    from onnxtool.optimize.options import OptimizeOptions as OptimizeOptions
    from onnxtool.optimize.quantization.candidates import Judge as Judge
    from onnxtool.optimize.quantization.candidates import Judgement as Judgement
    from onnxtool.optimize.run import optimize_model as optimize_model

_MODULES = {
    "Judge": "onnxtool.optimize.quantization.candidates",
    "Judgement": "onnxtool.optimize.quantization.candidates",
    "OptimizeOptions": "onnxtool.optimize.options",
    "optimize_model": "onnxtool.optimize.run",
}

__all__ = ["Judge", "Judgement", "OptimizeOptions", "optimize_model"]

__getattr__ = lazy_names(__name__, _MODULES)
