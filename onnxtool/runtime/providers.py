"""Resolve the execution provider of a session, or explain what is missing.

onnxruntime lists a provider that was compiled in even if its driver is absent, and a session that cannot create it
falls back to the CPU with a line in a log (onnxruntime#23372). Here a provider either runs or raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from functools import cache
from typing import Annotated

from onnxtool.errors import ProviderError
from onnxtool.options import Option

# User-facing names, and onnxruntime's names.
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

Provider = Annotated[
    str,
    Option("Execution provider: cuda fails if unavailable, auto uses it if available.", choices=("auto", *PROVIDERS)),
]


def resolve_provider(name: str) -> str:
    """Resolve `auto`, `cpu` or `cuda` to the short name of a provider that can run here.

    `auto` is cuda if a session can start on it, else cpu.

    Raises:
        ProviderError: cuda was requested and cannot run.
    """
    if name == "auto":
        return "cpu" if cuda_problem() else "cuda"
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}", f"use one of auto, {', '.join(PROVIDERS)}")
    if name == "cuda" and (problem := cuda_problem()):
        raise ProviderError(f"the provider cuda cannot run here: {problem}", "fix that, or pass --provider cpu")
    return name


@cache
def cuda_problem() -> str:
    """Return what prevents CUDA from running here, or an empty string."""
    return cuda_device_problem() or _cuda_library_problem()


@cache
def cuda_device_problem() -> str:
    """Return what prevents onnxruntime from using a CUDA device, or an empty string."""
    import onnxruntime

    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return (
            f"onnxruntime {onnxruntime.__version__} was built without CUDA (the onnxruntime-gpu wheel has it; "
            "a plain onnxruntime installed beside it hides it)"
        )
    driver_name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(driver_name)
    except OSError:
        return f"no NVIDIA driver ({driver_name} not found)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver is installed but reports no device"
    return ""


def _cuda_library_problem() -> str:
    """Start a one-node session on CUDA; return why it does not start, or an empty string.

    A device without CUDA's and cuDNN's libraries is common, and `auto` must not fail on it.
    """
    import onnxruntime

    # Loads the libraries of NVIDIA's wheels, which are not on any search path; its output names missing ones.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()
    try:
        session = onnxruntime.InferenceSession(identity_model(17), providers=[PROVIDERS["cuda"]])
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no common base class
        return f"a session does not start: {error}"
    if session.get_providers()[:1] == [PROVIDERS["cuda"]]:
        return ""
    missing = [line for line in printed.getvalue().splitlines() if line.startswith("Failed to load")]
    return f"a session does not start: {(missing or ['CUDA or cuDNN is missing, or of another version'])[0]}"


def identity_model(opset: int) -> bytes:
    """Return a one-node model, to test whether a session starts."""
    from onnx import TensorProto, helper

    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])] for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", *ends)
    # The oldest version of the format suffices: onnxruntime also limits the newest.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)
    serialized: bytes = model.SerializeToString()
    return serialized


@cache
def highest_opset() -> int:
    """Return the newest ONNX opset that both onnxruntime and onnx support.

    onnxruntime reveals it only in the error for a graph that is too new, so one-node graphs are tried.
    """
    from onnx import defs

    newest = defs.onnx_opset_version()
    return next((opset for opset in range(newest, 1, -1) if _loads(opset)), 1)


def runtime_version() -> str:
    """Return the version of the installed onnxruntime, whichever package it comes from."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _loads(opset: int) -> bool:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(identity_model(opset), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  onnxruntime's exceptions have no common base class
        return False
    return True


# Larger sums of two neighbours do not fit 16 bits.
_ROWS, _WIDTH, _ACTIVATION, _WEIGHT = 4, 64, 255, 127

EXACT_PRODUCTS_OPTION = "session.x64quantprecision"
"""The session option that makes uint8 by int8 products exact if they would saturate, at the cost of speed."""


@cache
def products_saturate() -> bool:
    """Multiply the largest uint8 and int8 values, and return whether the result is too small.

    On x86 CPUs without VNNI, onnxruntime adds two products in 16 bits, where they saturate.
    """
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.full((_WIDTH, _WIDTH), _WEIGHT, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [_ROWS, _WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [_ROWS, _WIDTH])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((_ROWS, _WIDTH), _ACTIVATION, np.uint8)})
    return bool((found != _WIDTH * _ACTIVATION * _WEIGHT).any())
