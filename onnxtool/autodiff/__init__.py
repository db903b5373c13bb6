"""Gradients of ONNX graphs as ONNX graphs, of standard operators that every onnxruntime has."""

from __future__ import annotations

from onnxtool.autodiff.engine import differentiate
from onnxtool.autodiff.preparation import LOWEST_OPSET, prepare

__all__ = ["LOWEST_OPSET", "differentiate", "prepare"]
