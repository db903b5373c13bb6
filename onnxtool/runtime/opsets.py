"""Which opsets the installed onnxruntime reads."""

from __future__ import annotations

from functools import cache

from onnxtool.runtime.providers import identity_model


@cache
def highest_opset() -> int:
    """Return the newest of ONNX's opsets that onnxruntime loads a graph of, and onnx knows.

    onnxruntime names it nowhere but in the error of a graph that is too new, so graphs of one node are tried.
    """
    from onnx import defs

    newest = defs.onnx_opset_version()
    return next((opset for opset in range(newest, 1, -1) if _loads(opset)), 1)


def runtime_version() -> str:
    """Return the version of the onnxruntime that is installed, whichever of its packages that is."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _loads(opset: int) -> bool:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(identity_model(opset), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  onnxruntime's exceptions have no root of their own
        return False
    return True
