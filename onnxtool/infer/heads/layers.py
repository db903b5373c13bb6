"""What sentence-transformers computes behind the pooling, where the graph ends before it.

Letters of shapes: N texts, W width of the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import InputError
from onnxtool.infer.pooling import Floats, normalize, sigmoid
from onnxtool.reports import Json

Vectors = NDArray[np.float32]
Layer = Callable[[Vectors], Vectors]

_EPSILON = 1e-5  # torch's default for LayerNorm, which sentence-transformers does not change
_VECTOR = "sentence_embedding"

_erf = np.vectorize(math.erf, otypes=[np.float64])

# By their class in torch.nn, with its defaults.
ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "Identity": lambda values: values,
    "Tanh": np.tanh,
    "ReLU": lambda values: np.maximum(values, 0.0),
    "GELU": lambda values: np.asarray(values * 0.5 * (1.0 + _erf(values / math.sqrt(2.0)))),
    "SiLU": lambda values: np.asarray(values * sigmoid(values)),
    "Sigmoid": sigmoid,
}


def find_activation(path: Json) -> Callable[[Floats], Floats] | None:
    """Return the activation that a checkpoint names by its class in torch.nn, or None where it is another."""
    package, _, name = str(path).rpartition(".")
    return ACTIVATIONS.get(name) if package == "torch.nn" or package.startswith("torch.nn.") else None


@dataclass(frozen=True, eq=False)
class Dense:
    """Project the vectors: float32 [N, W] to [N, W'].

    Attributes:
        weight: float32 [W', W].
        bias: float32 [W'], or None.
        residual: float32 [W', W], what is added of the vectors themselves; None for nothing.
    """

    weight: Vectors
    bias: Vectors | None
    activation: Callable[[Floats], Floats]
    residual: Vectors | None

    def __call__(self, vectors: Vectors) -> Vectors:
        """Apply the layer."""
        linear = vectors @ self.weight.T
        if self.bias is not None:
            linear += self.bias
        result = self.activation(linear)
        if self.residual is not None:
            result = result + vectors @ self.residual.T
        return np.asarray(result, np.float32)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Normalize mean and variance of each vector, float32 [N, W]."""

    weight: Vectors
    bias: Vectors

    def __call__(self, vectors: Vectors) -> Vectors:
        """Apply the layer."""
        centred = vectors - vectors.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + _EPSILON)
        return np.asarray(centred / deviation * self.weight + self.bias, np.float32)


def scale(vectors: Vectors) -> Vectors:
    """Scale each vector to length one."""
    return np.asarray(normalize(vectors), np.float32)


def read_layers(folder: CheckpointFolder) -> tuple[Layer, ...]:
    """Read what the checkpoint's modules compute behind its Pooling, in their order.

    Raises:
        InputError: a module is none that is computed here, or its weights are missing or do not fit.
    """
    layers = []
    for module in folder.modules:
        reader = _READERS.get(module.kind)
        if reader is None:
            raise InputError(
                f"the checkpoint computes embeddings with {module.kind}, which this graph does not",
                f"use sentence-transformers for this checkpoint; onnxtool computes {', '.join(_READERS)}",
            )
        layer = reader(folder, module.folder, folder.settings(module))
        if layer is not None:
            layers.append(layer)
    return tuple(layers)


def _no_layer(folder: CheckpointFolder, name: str, settings: Mapping[str, Json]) -> None:
    """Transformer and Pooling come before; Dropout is for training."""


def _read_normalize(folder: CheckpointFolder, name: str, settings: Mapping[str, Json]) -> Layer:
    _require_vectors(folder, name, settings)
    return scale


def _read_dense(folder: CheckpointFolder, name: str, settings: Mapping[str, Json]) -> Layer:
    _require_vectors(folder, name, settings)
    stated = settings.get("activation_function", "torch.nn.Tanh")
    activation = find_activation(stated)
    if activation is None:
        raise InputError(
            f"{name} in {folder.path} is activated by {stated}, which is not computed here",
            f"use sentence-transformers for this checkpoint; onnxtool computes {', '.join(ACTIVATIONS)} of torch.nn",
        )
    columns, rows = settings.get("in_features"), settings.get("out_features")
    weights = folder.module_weights(name)
    weight = _tensor(folder, name, weights, "linear.weight", (rows, columns))
    bias = _tensor(folder, name, weights, "linear.bias", (rows,)) if settings.get("bias", True) else None
    residual: Vectors | None = None
    if settings.get("use_residual") is True:
        shape = (rows, columns)
        residual = (
            np.eye(len(weight), dtype=np.float32)
            if rows == columns
            else _tensor(folder, name, weights, "residual.weight", shape)
        )
    return Dense(weight, bias, activation, residual)


def _read_layer_norm(folder: CheckpointFolder, name: str, settings: Mapping[str, Json]) -> Layer:
    weights, shape = folder.module_weights(name), (settings.get("dimension"),)
    return LayerNorm(
        _tensor(folder, name, weights, "norm.weight", shape), _tensor(folder, name, weights, "norm.bias", shape)
    )


# By the kinds of modules.json.
_READERS: dict[str, Callable[[CheckpointFolder, str, Mapping[str, Json]], Layer | None]] = {
    "Transformer": _no_layer,
    "Pooling": _no_layer,
    "Dropout": _no_layer,
    "Normalize": _read_normalize,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
}


def _require_vectors(folder: CheckpointFolder, name: str, settings: Mapping[str, Json]) -> None:
    """Refuse a module of a multi-vector encoder, which works on tokens."""
    names = {settings.get("module_input_name") or _VECTOR, settings.get("module_output_name") or _VECTOR}
    if names != {_VECTOR}:
        raise InputError(
            f"{name} in {folder.path} works on {', '.join(map(str, sorted(names, key=str)))}, not on one vector a text",
            "use sentence-transformers for a checkpoint of several vectors a text",
        )


def _tensor(
    folder: CheckpointFolder, name: str, weights: Mapping[str, NDArray[np.float32]], key: str, shape: tuple[Json, ...]
) -> Vectors:
    tensor = weights.get(key)
    if tensor is None or tensor.shape != shape:
        found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise InputError(
            f"{key} in {name} of {folder.path} is {found}, and its config.json says {list(shape)}",
            "the folder mixes two models; pass --model_name with the right one",
        )
    return tensor
