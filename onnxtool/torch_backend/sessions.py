"""Create onnxruntime sessions, check that they fit their partitions, and set up the thread that calls them.

Denormal numbers, below 1.2e-38 in float32, count as zero while a session runs. A masked softmax produces thousands of
them, and processors take over a hundred cycles for each.

After a kernel, PyTorch's OpenMP threads spin for some milliseconds waiting for the next one. If there are as many of
them as cores, they slow down onnxruntime's threads. Starting new ones costs the next kernel about 60 microseconds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnxruntime as ort
import torch

from onnxtool.errors import ProviderError
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.session import tensor_type
from onnxtool.torch_backend.options import OrtBackendOptions, Provider
from onnxtool.torch_backend.partition import Partition

INPUTS_KEY = "onnxtool.inputs"
NUM_NODES_KEY = "onnxtool.num_nodes"
_BY_DEVICE = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
SILENT = 4  # errors are raised, not logged
_ERRORS = ort.capi.onnxruntime_pybind11_state
_BOTH = (_ERRORS.Fail, _ERRORS.InvalidArgument, _ERRORS.NotImplemented, _ERRORS.RuntimeException)
RUN_ERRORS = (*_BOTH, RuntimeError)
LOAD_ERRORS = (*_BOTH, _ERRORS.InvalidGraph, _ERRORS.InvalidProtobuf)


def open_model(
    model: bytes, options: OrtBackendOptions, providers: tuple[Provider, ...], num_threads: int
) -> ort.InferenceSession:
    """Load a model from memory, using `num_threads` threads unless the user's session options say otherwise.

    Raises:
        ProviderError: a provider cannot run here.
        LOAD_ERRORS: onnxruntime cannot load the model.
    """
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    _require_providers(names, ort.get_available_providers(), "onnxruntime has no provider")
    settings = options.ort_session_options or _session_options(options.flush_denormals, num_threads)
    chosen = [_with_stream(provider) for provider in providers]
    # The first session of a process permanently sets the thread that creates it.
    with flush_denormals(denormals_are_zero()):
        session = ort.InferenceSession(model, settings, providers=chosen, enable_fallback=0)
    _require_providers(names, session.get_providers(), "onnxruntime could not start the provider")
    return session


def _require_providers(names: Sequence[str], running: Sequence[str], problem: str) -> None:
    """Require all providers: onnxruntime continues without providers that it lacks or that do not start."""
    if _BY_DEVICE["cuda"] in names and (reason := cuda_problem()):
        raise ProviderError(f"CUDAExecutionProvider cannot run here: {reason}", "fix that, or take it from the options")
    if missing := [name for name in names if name not in running]:
        raise ProviderError(f"{problem} {', '.join(missing)}", f"use some of {', '.join(running)}")


def wrong_types(session: ort.InferenceSession, partition: Partition) -> dict[torch.fx.Node, str]:
    """Return the outputs of `partition` that the session returns with another type, each with that type.

    Otherwise, their bytes would be misread.
    """
    outputs = zip(partition.outputs, session.get_outputs(), strict=True)
    return {node: output.type for node, output in outputs if output.type != _type_of(node.meta["val"])}


def session_fits(session: ort.InferenceSession, partition: Partition) -> bool:
    """Return whether a cached session can serve `partition`, by its metadata, inputs, outputs and types."""
    metadata = session.get_modelmeta().custom_metadata_map
    used = metadata.get(INPUTS_KEY, "?").split()
    if not all(number.isdecimal() for number in (*used, metadata.get(NUM_NODES_KEY, "?"))):
        return False
    taken = [partition.inputs[index] for index in map(int, used) if index < len(partition.inputs)]
    if (len(taken), len(session.get_outputs())) != (len(session.get_inputs()), len(partition.outputs)):
        return False
    # Use the copied placeholders, which have values: a constant of the original graph has none.
    placeholders = partition.module.graph.find_nodes(op="placeholder")
    values = [placeholders[int(index)].meta["val"] for index in used]
    types = [value.type for value in session.get_inputs()]
    return types == list(map(_type_of, values)) and not wrong_types(session, partition)


def _type_of(value: object) -> str:
    """Return onnxruntime's type name for a fake value; sizes are integers."""
    if isinstance(value, torch.Tensor):
        return tensor_type(str(value.dtype).removeprefix("torch."))
    return "tensor(bool)" if isinstance(value, bool | torch.SymBool) else "tensor(int64)"


def select_providers(
    options: OrtBackendOptions, inputs: Iterable[object], outputs: Iterable[object]
) -> tuple[Provider, ...]:
    """Return the preferred, inferred and default providers, each once.

    `inputs` and `outputs` are a graph's fake values; outputs count if no input is a tensor.
    """
    inferred: list[Provider] = []
    if options.infer_execution_providers:
        inferred = _inferred(inputs) or _inferred(outputs)
    chosen: dict[str, Provider] = {}
    for provider in (*options.preferred_execution_providers, *inferred, *options.default_execution_providers):
        chosen.setdefault(provider if isinstance(provider, str) else provider[0], provider)
    return tuple(chosen.values()) or (_BY_DEVICE["cpu"],)


def _inferred(values: Iterable[object]) -> list[Provider]:
    """Return the provider for each device, GPU before CPU; sizes are always on the CPU."""
    types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return [_BY_DEVICE[device] for device in ("cuda", "cpu") if device in types]


def _session_options(flush_denormals: bool, num_threads: int) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.log_severity_level = SILENT
    settings.intra_op_num_threads = num_threads
    # Threads spin while waiting for the next node, but not after the last: then PyTorch's threads need the cores.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1")
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.add_session_config_entry("session.set_denormal_as_zero", str(int(flush_denormals)))
    return settings


def _with_stream(provider: Provider) -> Any:
    """Make CUDA run on PyTorch's stream, so that each waits for the other, in its precision. Not tested on a device."""
    name, settings = (provider, {}) if isinstance(provider, str) else provider
    if name != _BY_DEVICE["cuda"] or "user_compute_stream" in settings or not torch.cuda.is_available():
        return provider if isinstance(provider, str) else (name, dict(settings))
    stream = torch.cuda.current_stream().cuda_stream
    # onnxruntime's default is TF32, and PyTorch's is float32.
    precision = {"use_tf32": str(int(torch.backends.cuda.matmul.allow_tf32))}
    return name, {**precision, **settings, "user_compute_stream": str(stream)}


_SMALLEST = 5e-324
_SOFT = 1  # OpenMP 5.0's omp_pause_soft: settings are kept


def denormals_are_zero() -> bool:
    """Return whether denormal numbers count as zero in this thread."""
    return _SMALLEST == 0.0


@contextmanager
def flush_denormals(wanted: bool = True) -> Iterator[None]:
    """Set whether denormal numbers count as zero in this thread, and restore the previous state at the end."""
    before = denormals_are_zero()
    if before is not wanted:
        torch.set_flush_denormal(wanted)
    try:
        yield
    finally:
        if before is not denormals_are_zero():
            torch.set_flush_denormal(before)


def end_openmp_threads() -> None:
    """End the calling thread's OpenMP threads, if any; the next kernel starts new ones.

    Does nothing if PyTorch has one thread, or an OpenMP that cannot pause.
    """
    if torch.get_num_threads() > 1:
        _pause_resource()(_SOFT)


@functools.cache
def _pause_resource() -> Callable[[int], int]:
    """Return `omp_pause_resource_all` from the OpenMP that PyTorch has loaded."""
    try:
        function = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # an older OpenMP, or Windows, where a name needs its library
        return lambda _kind: 0
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function
