"""The activations of torch.nn that modules and rerankers name, in NumPy and as operators.

A checkpoint stores the class alone, so arguments are the defaults of torch.nn. Classes with parameters of their own
(PReLU), those that change the width (GLU) and those over an axis (Softmax) are no activations of this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.reports import Json

Floats = NDArray[np.floating[Any]]
# What `build` is called with: a Builder of the graph and values of onnx_ir, whose packages are siblings of this one.
Builder = Any
Value = Any

_SELU_ALPHA, _SELU_GAMMA = 1.6732632423543772, 1.0507009873554805  # Klambauer et al., 2017, arXiv:1706.02515
_LEAKY_SLOPE = 0.01
_RRELU_SLOPE = (1 / 8 + 1 / 3) / 2  # what RReLU does outside training
_SHRINKAGE = 0.5


@dataclass(frozen=True)
class Activation:
    """An activation of torch.nn with its defaults, in NumPy and as operators."""

    apply: Callable[[Floats], Floats]
    build: Callable[[Builder, Value], Value]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(logits: Floats) -> NDArray[np.float64]:
    """Turn each logit into a probability of its own, in float64."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64))))


def _softplus(values: Floats) -> Floats:
    return np.asarray(np.logaddexp(0.0, values))


def _hard_sigmoid(values: Floats) -> Floats:
    return np.asarray(np.clip(values / 6.0 + 0.5, 0.0, 1.0))


def _elu(values: Floats) -> Floats:
    return np.where(values > 0, values, np.expm1(np.minimum(values, 0.0)))


def _leaky(slope: float) -> Activation:
    return Activation(
        lambda values: np.where(values >= 0, values, slope * values),
        lambda build, value: build.op("LeakyRelu", value, alpha=slope),
    )


def _clip(lowest: float, highest: float) -> Activation:
    return Activation(
        lambda values: np.clip(values, lowest, highest),
        lambda build, value: build.op("Clip", value, build.number(lowest), build.number(highest)),
    )


def _operator(op_type: str, apply: Callable[[Floats], Floats], **attributes: float) -> Activation:
    """Make an activation that is one operator."""
    return Activation(apply, lambda build, value: build.op(op_type, value, **attributes))


def _build_gelu(build: Builder, value: Value) -> Value:
    """Append x / 2 * (1 + erf(x / sqrt(2))); the operator Gelu came with opset 20."""
    erf = build.op("Erf", build.op("Mul", value, build.number(0.5**0.5)))
    return build.op("Mul", build.op("Mul", value, build.number(0.5)), build.op("Add", erf, build.number(1.0)))


def _build_hard_sigmoid(build: Builder, value: Value) -> Value:
    return build.op("HardSigmoid", value, alpha=1 / 6, beta=0.5)


# By their class in torch.nn.
ACTIVATIONS: dict[str, Activation] = {
    "Identity": Activation(lambda values: values, lambda _build, value: value),
    "Tanh": _operator("Tanh", np.tanh),
    "ReLU": _operator("Relu", lambda values: np.maximum(values, 0.0)),
    "GELU": Activation(lambda values: np.asarray(values * 0.5 * (1.0 + _erf(values / math.sqrt(2.0)))), _build_gelu),
    "SiLU": Activation(
        lambda values: np.asarray(values * sigmoid(values)),
        lambda build, value: build.op("Mul", value, build.op("Sigmoid", value)),
    ),
    "Sigmoid": _operator("Sigmoid", sigmoid),
    "ELU": _operator("Elu", _elu),
    "CELU": _operator("Elu", _elu),  # differs for other alphas than 1
    "SELU": _operator(
        "Selu",
        lambda values: _SELU_GAMMA * np.where(values > 0, values, _SELU_ALPHA * np.expm1(np.minimum(values, 0.0))),
        alpha=_SELU_ALPHA,
        gamma=_SELU_GAMMA,
    ),
    "LeakyReLU": _leaky(_LEAKY_SLOPE),
    "RReLU": _leaky(_RRELU_SLOPE),
    "ReLU6": _clip(0.0, 6.0),
    "Hardtanh": _clip(-1.0, 1.0),
    "Hardsigmoid": Activation(_hard_sigmoid, _build_hard_sigmoid),
    "Hardswish": Activation(
        lambda values: values * _hard_sigmoid(values),
        lambda build, value: build.op("Mul", value, _build_hard_sigmoid(build, value)),
    ),
    "Softplus": _operator("Softplus", _softplus),
    "LogSigmoid": Activation(
        lambda values: -_softplus(-values),
        lambda build, value: build.op("Neg", build.op("Softplus", build.op("Neg", value))),
    ),
    "Mish": Activation(
        lambda values: values * np.tanh(_softplus(values)),
        lambda build, value: build.op("Mul", value, build.op("Tanh", build.op("Softplus", value))),
    ),
    "Softsign": _operator("Softsign", lambda values: values / (1.0 + np.abs(values))),
    "Tanhshrink": Activation(
        lambda values: values - np.tanh(values), lambda build, value: build.op("Sub", value, build.op("Tanh", value))
    ),
    "Hardshrink": _operator(
        "Shrink", lambda values: np.where(np.abs(values) > _SHRINKAGE, values, 0.0), lambd=_SHRINKAGE, bias=0.0
    ),
    "Softshrink": _operator(
        "Shrink",
        lambda values: np.sign(values) * np.maximum(np.abs(values) - _SHRINKAGE, 0.0),
        lambd=_SHRINKAGE,
        bias=_SHRINKAGE,
    ),
}


def activation_name(path: Json) -> str | None:
    """Return the entry of ACTIVATIONS that a checkpoint names by its class in torch.nn; None where it is another."""
    package, _, name = str(path).rpartition(".")
    return name if name in ACTIVATIONS and (package == "torch.nn" or package.startswith("torch.nn.")) else None
