"""Differentiate ONNX graphs; gradients are ONNX graphs of standard operators, which every onnxruntime supports."""

from __future__ import annotations

from onnxtool.autodiff.engine import differentiate
from onnxtool.autodiff.expansion import LOWEST_OPSET, prepare

__all__ = ["LOWEST_OPSET", "differentiate", "prepare"]
