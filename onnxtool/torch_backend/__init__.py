"""`torch.compile` through onnxruntime: forward and backward graphs become sessions; PyTorch runs the rest."""

from __future__ import annotations

from onnxtool.torch_backend.backend import OrtBackend, explain, onnxtool_backend, register
from onnxtool.torch_backend.options import OrtBackendOptions
from onnxtool.torch_backend.report import Explanation
from onnxtool.torch_backend.translator import dump_onnx

__all__ = [
    "Explanation",
    "OrtBackend",
    "OrtBackendOptions",
    "dump_onnx",
    "explain",
    "onnxtool_backend",
]

register()
