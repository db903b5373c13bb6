"""Normalization of values in half precision by parameters in float32, as under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """Compute in the type of the parameters, and return the result, mean and reciprocal of the deviation.

    PyTorch's kernel for the CPU does so, but its fake tensors say that both have the type of `x`. ONNX has one type for
    values and parameters.
    """
    parameter = bias if weight is None else weight
    if parameter is None or parameter.dtype is x.dtype or x.device.type != "cpu":
        return NotImplemented
    result, mean, deviation = aten.native_layer_norm.default(x.to(parameter.dtype), shape, weight, bias, eps)
    return result.to(x.dtype), mean, deviation
