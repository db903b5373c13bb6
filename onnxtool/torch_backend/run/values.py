"""Tensors of PyTorch and values of onnxruntime as views of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnxruntime.capi import _pybind_state as binding

_NAMES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
NUMPY_TYPES: dict[torch.dtype, type] = {
    torch.bool: np.bool_,
    **{getattr(torch, name): getattr(np, name) for name in _NAMES},
}
CPU = binding.OrtDevice(binding.OrtDevice.cpu(), binding.OrtDevice.default_memory(), 0)


def ort_device(device: torch.device) -> Any:
    """Return onnxruntime's device for a device of PyTorch."""
    if device.type == "cuda":
        return binding.OrtDevice(binding.OrtDevice.cuda(), binding.OrtDevice.default_memory(), device.index or 0)
    return CPU


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy whose memory holds its values in the order of its dimensions."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def wrap(tensors: Sequence[torch.Tensor], devices: Sequence[Any]) -> Any:
    """Return a vector of values that are views of dense `tensors`, which have to outlive it."""
    vector = binding.OrtValueVector()
    vector.reserve(len(tensors))
    try:
        vector.push_back_batch(
            tensors,
            [tensor.data_ptr() for tensor in tensors],
            [NUMPY_TYPES[tensor.dtype] for tensor in tensors],
            [tensor.shape for tensor in tensors],
            devices,
        )
    except (KeyError, RuntimeError, ValueError):  # bfloat16 has no NumPy type, and empty tensors have no address
        return _wrap_one_by_one(tensors)
    return vector


def _wrap_one_by_one(tensors: Sequence[torch.Tensor]) -> Any:
    vector = binding.OrtValueVector()
    for tensor in tensors:
        plain = tensor.detach()
        if plain.dtype is torch.bool:
            vector.push_back(binding.OrtValue.from_dlpack(plain.view(torch.uint8).__dlpack__(), True))
        else:
            vector.push_back(binding.OrtValue.from_dlpack(plain.__dlpack__(), False))
    return vector


def unwrap(vector: Any) -> list[torch.Tensor]:
    """Return tensors that own the values of `vector`; booleans come as bytes from some versions."""
    tensors: list[torch.Tensor] = vector.to_dlpacks(torch._C._from_dlpack)
    return tensors
