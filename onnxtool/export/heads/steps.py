"""What stands between a transformer's outputs and a vector for each text: the modules of sentence-transformers.

Each step is written twice: as ONNX operators, and as a few lines of PyTorch from the module's definition, by which
exports are verified. The definitions are those of sentence-transformers 6.2.

Letters of shapes: B batch, S sequence, H hidden, V vocabulary, W width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from onnxtool.export.heads.builder import Builder

_TINY = 1e-9  # what sums of weights are divided by at least
_SHORTEST = 1e-12  # the same for lengths of vectors


class Step(Protocol):
    """One module."""

    def build(self, build: Builder, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Append the module to a graph: `value` is what came before, `mask` int64 [B, S]."""
        ...

    def reference(self, value: Any, mask: Any) -> Any:
        """Compute the module in PyTorch, on tensors of the same shapes."""
        ...

    def width(self, before: int) -> int:
        """Return the width of a vector after the module, of one that had `before`.

        Raises:
            ValueError: the module takes vectors of another width.
        """
        ...


@dataclass(frozen=True)
class Splade:
    """Weigh the terms of a vocabulary: float [B, S, V] to [B, V].

    Attributes:
        strategy: `max` over tokens (Formal et al., 2021, arXiv:2109.10086), or the older `sum` (arXiv:2107.05720).
        activation: `relu` for log(1 + relu(x)), `log1p_relu` for the logarithm of that once more (arXiv:2504.14839).
    """

    strategy: str = "max"
    activation: str = "relu"

    STRATEGIES = ("max", "sum")
    ACTIVATIONS = ("relu", "log1p_relu")

    def build(self, build: Builder, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Append it. Logarithms are monotonic: with `max` they are taken once a term, not once a token and term."""
        real = build.as_weights(build.cast(mask, value.dtype))
        masked = build.op("Mul", value, real)  # padding counts as 0, which relu would give it anyway
        if self.strategy == "max":
            return self._activate(build, build.reduce("ReduceMax", masked))
        return build.reduce("ReduceSum", self._activate(build, masked))

    def _activate(self, build: Builder, value: ir.Value) -> ir.Value:
        weights = build.cast(build.op("Relu", value))
        for _ in range(2 if self.activation == "log1p_relu" else 1):
            weights = build.op("Log", build.op("Add", weights, build.number(1.0)))
        return weights

    def reference(self, value: Any, mask: Any) -> Any:
        """Apply the definition: every token's logits are activated, and then pooled."""
        import torch

        weights = torch.log1p(torch.relu(value * mask.unsqueeze(-1)))
        if self.activation == "log1p_relu":
            weights = torch.log1p(weights)
        return weights.max(dim=1).values if self.strategy == "max" else weights.sum(dim=1)

    def width(self, before: int) -> int:
        """Keep the vocabulary."""
        return before


@dataclass(frozen=True)
class Pool:
    """Make one vector of the states of real tokens: float [B, S, H] to [B, M * H] for M modes."""

    modes: tuple[str, ...] = ("mean",)

    def build(self, build: Builder, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Append each mode, and their concatenation."""
        real = build.cast(mask)
        states = build.cast(value)
        pooled = [_POOLINGS[mode][0](build, states, real) for mode in self.modes]
        return pooled[0] if len(pooled) == 1 else build.op("Concat", *pooled, axis=1)

    def reference(self, value: Any, mask: Any) -> Any:
        """Compute each mode, and concatenate."""
        import torch

        return torch.cat([_POOLINGS[mode][1](value, mask) for mode in self.modes], dim=1)

    def width(self, before: int) -> int:
        """Multiply by the number of modes."""
        return len(self.modes) * before


@dataclass(frozen=True, eq=False)
class Dense:
    """Project: float [B, W] to [B, W'], with an activation.

    Attributes:
        name: of the module's folder, after which the weights are called.
        weight: float32 [W', W].
        bias: float32 [W'], or None.
        activation: one of ACTIVATIONS.
        residual: float32 [W', W], what the input is multiplied with to be added to the result; None for no such sum.
    """

    name: str
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str
    residual: NDArray[np.float32] | None = None

    def build(self, build: Builder, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Append it."""
        weights = [build.weight(self.weight, f"{self.name}.linear.weight")]
        if self.bias is not None:
            weights.append(build.weight(self.bias, f"{self.name}.linear.bias"))
        result = ACTIVATIONS[self.activation](build, build.op("Gemm", value, *weights, transB=1))
        if self.residual is None:
            return result
        residual = build.op("Gemm", value, build.weight(self.residual, f"{self.name}.residual.weight"), transB=1)
        return build.op("Add", result, residual)

    def reference(self, value: Any, mask: Any) -> Any:
        """Apply torch's own linear layer and activation."""
        import torch

        def tensor(array: NDArray[np.float32]) -> Any:
            return torch.from_numpy(array).to(value)

        bias = None if self.bias is None else tensor(self.bias)
        linear = torch.nn.functional.linear(value, tensor(self.weight), bias)
        result = getattr(torch.nn, self.activation)()(linear)
        return result if self.residual is None else result + value @ tensor(self.residual).T

    def width(self, before: int) -> int:
        """Take vectors of its weight's columns."""
        rows, columns = self.weight.shape
        if columns != before:
            raise ValueError(f"{self.name} takes vectors of {columns} numbers, and is given {before}")
        return int(rows)


@dataclass(frozen=True)
class Normalize:
    """Scale to length 1: float [B, W]. A vector of zeros stays."""

    def build(self, build: Builder, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Append it."""
        norm = build.reduce("ReduceL2", value, keepdims=1)
        return build.op("Div", value, build.op("Max", norm, build.number(_SHORTEST)))

    def reference(self, value: Any, mask: Any) -> Any:
        """Apply torch's own."""
        import torch

        return torch.nn.functional.normalize(value, p=2, dim=-1, eps=_SHORTEST)

    def width(self, before: int) -> int:
        """Keep the width."""
        return before


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Normalize mean and variance: float [B, W].

    Attributes:
        name: of the module's folder.
        weight: float32 [W].
        bias: float32 [W].
    """

    name: str
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    EPSILON = 1e-5  # torch's default, which sentence-transformers does not change

    def build(self, build: Builder, value: ir.Value, mask: ir.Value) -> ir.Value:
        """Append it as plain operators; LayerNormalization is younger than the opsets that are exported."""
        centred = build.op("Sub", value, build.reduce("ReduceMean", value, keepdims=1))
        variance = build.reduce("ReduceMean", build.op("Mul", centred, centred), keepdims=1)
        deviation = build.op("Sqrt", build.op("Add", variance, build.number(self.EPSILON)))
        scaled = build.op(
            "Mul", build.op("Div", centred, deviation), build.weight(self.weight, f"{self.name}.norm.weight")
        )
        return build.op("Add", scaled, build.weight(self.bias, f"{self.name}.norm.bias"))

    def reference(self, value: Any, mask: Any) -> Any:
        """Apply torch's own."""
        import torch

        weight, bias = torch.from_numpy(self.weight).to(value), torch.from_numpy(self.bias).to(value)
        return torch.nn.functional.layer_norm(value, value.shape[-1:], weight, bias, self.EPSILON)

    def width(self, before: int) -> int:
        """Take vectors of its weight's size."""
        if self.weight.shape != (before,):
            raise ValueError(f"{self.name} takes vectors of {self.weight.size} numbers, and is given {before}")
        return before


def _gelu(build: Builder, value: ir.Value) -> ir.Value:
    """Append x / 2 * (1 + erf(x / sqrt(2))); the operator Gelu came with opset 20."""
    erf = build.op("Erf", build.op("Mul", value, build.number(0.5**0.5)))
    return build.op("Mul", build.op("Mul", value, build.number(0.5)), build.op("Add", erf, build.number(1.0)))


# Activations of Dense, by their class in torch.nn, with its defaults.
ACTIVATIONS: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    "Identity": lambda _build, value: value,
    "Tanh": lambda build, value: build.op("Tanh", value),
    "ReLU": lambda build, value: build.op("Relu", value),
    "GELU": _gelu,
    "SiLU": lambda build, value: build.op("Mul", value, build.op("Sigmoid", value)),
    "Sigmoid": lambda build, value: build.op("Sigmoid", value),
}


def _sum(build: Builder, states: ir.Value, real: ir.Value) -> ir.Value:
    return build.reduce("ReduceSum", build.op("Mul", states, build.as_weights(real)))


def _divide(build: Builder, total: ir.Value, weights: ir.Value, *, root: bool = False) -> ir.Value:
    """Divide [B, H] by the sum of weights [B, S], or by the root of that."""
    count = build.op("Max", build.reduce("ReduceSum", weights, keepdims=1), build.number(_TINY))
    return build.op("Div", total, build.op("Sqrt", count) if root else count)


def _build_weighted_mean(build: Builder, states: ir.Value, real: ir.Value) -> ir.Value:
    ones = build.op("Add", build.op("Sub", real, real), build.number(1.0))
    positions = build.op("CumSum", ones, build.constant(np.array(1, dtype=np.int64)))
    padding = build.cast(build.op("ArgMax", real, axis=1, keepdims=1))
    weights = build.op("Mul", build.op("Sub", positions, padding), real)
    return _divide(build, _sum(build, states, weights), weights)


def _weighted_mean(states: Any, mask: Any) -> Any:
    """Weigh the first real token with 1, the next with 2, and so on (Muennighoff, 2022, arXiv:2202.08904)."""
    import torch

    positions = torch.arange(1, states.shape[1] + 1, device=states.device) - mask.argmax(dim=1, keepdim=True)
    weights = (positions * mask).unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=_TINY)


def _build_maximum(build: Builder, states: ir.Value, real: ir.Value) -> ir.Value:
    is_real = build.op("Greater", build.as_weights(real), build.number(0.0))
    return build.reduce("ReduceMax", build.op("Where", is_real, states, build.number(float("-inf"))))


def _build_last(build: Builder, states: ir.Value, real: ir.Value) -> ir.Value:
    """Take the token at which the count of real tokens is first complete, wherever the padding is."""
    return build.pick(states, build.op("CumSum", real, build.constant(np.array(1, dtype=np.int64))))


def _last(states: Any, mask: Any) -> Any:
    import torch

    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


def _first(states: Any, mask: Any) -> Any:
    import torch

    return states[torch.arange(len(states), device=states.device), mask.argmax(dim=1)]


def _mean(states: Any, mask: Any, *, root: bool = False) -> Any:
    """Reimers and Gurevych, Sentence-BERT, 2019, section 3."""
    real = mask.unsqueeze(-1).to(states.dtype)
    count = real.sum(dim=1).clamp(min=_TINY)
    return (states * real).sum(dim=1) / (count.sqrt() if root else count)


_Pooling = tuple[Callable[["Builder", "ir.Value", "ir.Value"], "ir.Value"], Callable[[Any, Any], Any]]
_POOLINGS: dict[str, _Pooling] = {
    "cls": (lambda build, states, real: build.pick(states, real), _first),
    "max": (
        _build_maximum,
        lambda states, mask: states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).max(dim=1).values,
    ),
    "mean": (lambda build, states, real: _divide(build, _sum(build, states, real), real), _mean),
    "mean_sqrt_len_tokens": (
        lambda build, states, real: _divide(build, _sum(build, states, real), real, root=True),
        lambda states, mask: _mean(states, mask, root=True),
    ),
    "weightedmean": (_build_weighted_mean, _weighted_mean),
    "lasttoken": (_build_last, _last),
}
