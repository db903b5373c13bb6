"""Which opsets a file can be asked for."""

from __future__ import annotations

from onnxtool.errors import ExportError
from onnxtool.runtime.opsets import highest_opset, runtime_version

LOWEST_OPSET = 13  # what heads are written in


def check_opset(opset: int | None) -> None:
    """Refuse an opset that no way to trace can give, before anything is loaded; None is the exporter's own.

    Raises:
        ExportError: torch cannot write it by the onnx that is installed, or onnxruntime cannot read it.
    """
    if opset is None:
        return
    import torch

    highest = highest_opset()
    if not LOWEST_OPSET <= opset <= highest:
        raise ExportError(
            f"no opset {opset}: torch {torch.__version__} writes, and onnxruntime {runtime_version()} reads, "
            f"{LOWEST_OPSET} to {highest}",
            "leave --opset out for the exporter's own, or pass one of these",
        )
