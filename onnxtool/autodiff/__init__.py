"""Differentiate ONNX graphs; gradients are ONNX graphs of standard operators, which every onnxruntime supports."""

from __future__ import annotations

from onnxtool.autodiff.engine import differentiate as differentiate
from onnxtool.autodiff.expansion import LOWEST_OPSET as LOWEST_OPSET
from onnxtool.autodiff.expansion import prepare as prepare
