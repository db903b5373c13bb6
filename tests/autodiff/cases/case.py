"""One operator with inputs, and the same function written in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_NUMBERS = np.random.default_rng(20)


@dataclass(frozen=True)
class Case:
    """An operator to differentiate.

    Attributes:
        op_type: the operator.
        inputs: what it reads; those of float64 are differentiated by, in the precision of the test.
        torch: the same function of the same tensors, of which PyTorch knows the gradient.
        attributes: those of the node.
        note: tells the case from others of the operator.
        by: the places of the inputs to differentiate by; all of float64 where it is empty.
        outputs: how many outputs the node has; the loss is a weighted sum of all that are float.
        domain: that of the operator.
        opset: the version of the standard operators.
        fixed: the gradient needs sizes that are fixed.
        weights: the places of inputs whose sizes are always fixed.
        reference: onnx.reference computes the operator, so that finite differences can be taken in float64.
        onnxruntime: it has the operator; if not, onnx.reference runs the gradient in float32 as well.
        constants: the places of float inputs that are initializers.
        tolerance: the relative error allowed to float32 in onnxruntime.
        dequantized: its output goes through a DequantizeLinear with the same scale and zero point.
    """

    op_type: str
    inputs: tuple[Array | None, ...]
    torch: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    by: tuple[int, ...] = ()
    outputs: int = 1
    domain: str = ""
    opset: int = 20
    fixed: bool = False
    weights: tuple[int, ...] = ()
    reference: bool = True
    onnxruntime: bool = True
    constants: tuple[int, ...] = ()
    tolerance: float = 2e-5
    dequantized: bool = False

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.domain, self.op_type, self.note.replace(" ", "_")) if part)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The places of the inputs to differentiate by."""
        floats = [place for place, array in enumerate(self.inputs) if array is not None and array.dtype == np.float64]
        return self.by or tuple(place for place in floats if place not in self.constants)


def normal(*shape: int) -> Array:
    """Return normally distributed numbers, no two of them close to each other or to zero."""
    return _apart(_NUMBERS.normal(size=shape))


def positive(*shape: int) -> Array:
    """Return numbers between 0.2 and 2.2."""
    return _apart(_NUMBERS.uniform(0.2, 2.2, size=shape))


def inside(*shape: int) -> Array:
    """Return numbers between -0.9 and 0.9."""
    return _apart(_NUMBERS.uniform(-0.9, 0.9, size=shape))


def integers(*numbers: Any) -> Array:
    """Return int64."""
    return np.array(numbers, np.int64)


def flags(*shape: int) -> Array:
    """Return booleans."""
    return _NUMBERS.random(shape) < 0.5


def _apart(numbers: Array) -> Array:
    """Move numbers to places 1/64 apart or more, off zero: finite differences must not step over a kink."""
    order = numbers.reshape(-1).argsort()
    flat = numbers.reshape(-1).copy()
    for before, after in pairwise(order):
        flat[after] = max(flat[after], flat[before] + 1 / 64)
    flat[np.abs(flat) < 1 / 128] = 1 / 128
    return flat.reshape(numbers.shape)
