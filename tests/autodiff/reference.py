"""Operators in float64 that onnx.reference computes in float32, in part or not at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_scan import Scan as ForwardScan

Array = NDArray[Any]


class Erf(OpRun):
    """In float64, where that of onnx.reference goes through float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x)),)


class Gelu(OpRun):
    """In float64, where that of onnx.reference goes through float32."""

    op_domain = ""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        return (torch.nn.functional.gelu(torch.tensor(x), approximate=approximate).numpy(),)


class Pad(OpRun):
    """With pads below zero, which crop."""

    op_domain = ""

    def _run(
        self, x: Array, pads: Array, number: Array | None = None, axes: Array | None = None, mode: str = "constant"
    ) -> tuple[Array]:
        places = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
        around = np.zeros((x.ndim, 2), np.int64)
        around[list(places)] = pads.reshape(2, -1).T
        cropped = x[tuple(slice(max(0, -a), size - max(0, -b)) for size, (a, b) in zip(x.shape, around, strict=True))]
        if mode == "constant":
            return (np.pad(cropped, around.clip(0), constant_values=0 if number is None else number),)
        return (np.pad(cropped, around.clip(0), "edge" if mode == "edge" else "reflect"),)


class Scan(ForwardScan):
    """In both directions, the same one for all inputs and results."""

    op_domain = ""

    def __init__(self, node: onnx.NodeProto, parameters: Any) -> None:
        without = onnx.NodeProto()
        without.CopyFrom(node)
        del without.attribute[:]
        without.attribute.extend(one for one in node.attribute if not one.name.endswith("directions"))
        self._backward = any(1 in one.ints for one in node.attribute if one.name.endswith("directions"))
        super().__init__(without, parameters)

    def _run(self, *inputs: Array, **options: Any) -> tuple[Array, ...]:
        states = len(inputs) - self.num_scan_inputs
        for name in ("scan_input_directions", "scan_output_directions"):
            options.pop(name, None)
        results = super()._run(*self._turn(inputs, states), **options)
        return self._turn(results, states)

    def _turn(self, values: tuple[Array, ...], states: int) -> tuple[Array, ...]:
        if not self._backward:
            return values
        return (*values[:states], *(value[::-1] for value in values[states:]))


class FakeQuant(OpRun):
    """Round to integers and back, and say which elements were within their range."""

    op_domain = "com.microsoft"

    def _run(
        self, x: Array, scale: Array, zero: Array, quant_min: int = 0, quant_max: int = 255
    ) -> tuple[Array, Array]:
        number = np.rint(x / scale) + zero
        return (number.clip(quant_min, quant_max) - zero) * scale, (quant_min <= number) & (number <= quant_max)


class ScaledSum(OpRun):
    """Add up to three inputs, each times a number."""

    op_domain = "com.microsoft"

    def _run(self, *inputs: Array, scale_0: float = 1, scale_1: float = 1, scale_2: float = 1) -> tuple[Array]:
        return (np.sum([one * scale for one, scale in zip(inputs, (scale_0, scale_1, scale_2), strict=False)], 0),)


OPERATORS = (Erf, FakeQuant, Gelu, Pad, ScaledSum, Scan)
