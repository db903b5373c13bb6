"""Base classes of sentence-transformers modules after the transformer: one computation in two forms.

`build` appends it to a graph; `runtime.computed_modules` makes it a separate model for graphs that end before it.
`reference` is a few lines of PyTorch from the module's definition, used to verify exports; the caller passes PyTorch
in, because this package does not import it. Modes of Pooling have the same two forms.

Shape letters: B batch, S sequence, H hidden, N numbers per token, W width of a vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, StoredModule, positive
from onnxtool.reports import Json

Mask = NDArray[np.bool_]

# The input of graphs that exclude prompts from pooling: int64 [B, S], 0 for tokens that the model reads but does not
# pool. Padding may be either.
POOLING_MASK = "pooling_mask"

_SMALLEST_SUM = 1e-9  # lower bound of the divisor for sums of weights


@dataclass(frozen=True)
class PoolingMode:
    """One mode of Pooling, [B, S, H] to [B, H], over the pooled tokens.

    If a text has none, the result is the same as from sentence-transformers for that text by itself: zeros, the first
    token for `cls`, and -inf for `max`.

    Attributes:
        flag: its name in configurations before version 5.4.
        build: the operators, with a mask float [B, S]; or with weights, see `is_weighted`.
        reference: the PyTorch form (torch, states, mask int64 [B, S]).
        is_weighted: whether the mask holds each token's position, counted from 1 over all tokens that the model reads,
            instead of 1.
    """

    flag: str
    build: Callable[[Builder, Value, Value], Value]
    reference: Callable[[Any, Any, Any], Any]
    is_weighted: bool = False


def behind_prompts(mask: Mask, lengths: Sequence[int] | NDArray[np.int64]) -> Mask:
    """Return the mask of pooled tokens, bool [B, S], for texts that begin with a prompt.

    Args:
        mask: bool [B, S], true for real tokens.
        lengths: lengths of the B prompts, in tokens.
    """
    return np.asarray(mask & (mask.cumsum(axis=1) > np.asarray(lengths)[:, None]))


def some_prompts(mask: Mask) -> Mask:
    """Return such a mask for prompts of various lengths, each shorter than its text, for verifying graphs."""
    counts = mask.sum(axis=1)
    return behind_prompts(mask, counts * (1 + np.arange(len(mask)) % 3) // 4)


def build_places(build: Builder, real: Value) -> Value:
    """Append each token's position, counted from 1 at the first real token, for a mask float [B, S]."""
    ones = build.op("Add", build.op("Sub", real, real), build.number(1.0))
    return build.op("Sub", build_count(build, ones), build.cast(build.op("ArgMax", real, axis=1, keepdims=1)))


def places_in_torch(torch: Any, mask: Any) -> Any:
    """Return the same for a mask int64 [B, S]."""
    return torch.arange(1, mask.shape[1] + 1, device=mask.device) - mask.argmax(dim=1, keepdim=True)


def _build_mean(build: Builder, states: Value, real: Value, *, root: bool = False) -> Value:
    """Divide the sum over tokens by the sum of weights [B, S], or by its square root."""
    total = build.reduce("ReduceSum", build.op("Mul", states, build.as_weights(real)))
    count = build.op("Max", build.reduce("ReduceSum", real, keepdims=1), build.number(_SMALLEST_SUM))
    return build.op("Div", total, build.op("Sqrt", count) if root else count)


def _build_largest(build: Builder, states: Value, real: Value) -> Value:
    is_real = build.op("Greater", build.as_weights(real), build.number(0.0))
    return build.reduce("ReduceMax", build.op("Where", is_real, states, build.number(float("-inf"))))


def build_count(build: Builder, real: Value) -> Value:
    """Append the running sum over tokens of a mask float [B, S]: it is largest first at the last real token."""
    return build.op("CumSum", real, build.constant(np.array(1, dtype=np.int64)))


def _mean_in_torch(torch: Any, states: Any, mask: Any, *, root: bool = False) -> Any:
    """Reimers and Gurevych, Sentence-BERT, 2019, section 3."""
    real = mask.unsqueeze(-1).to(states.dtype)
    count = real.sum(dim=1).clamp(min=_SMALLEST_SUM)
    return (states * real).sum(dim=1) / (count.sqrt() if root else count)


def _last_in_torch(torch: Any, states: Any, mask: Any) -> Any:
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last] * mask.any(dim=1, keepdim=True)


# By sentence-transformers' names; several flags concatenate in this order.
POOLING_MODES: dict[str, PoolingMode] = {
    "cls": PoolingMode(
        "pooling_mode_cls_token",
        lambda build, states, real: build.pick(states, real),
        lambda torch, states, mask: states[torch.arange(len(states), device=states.device), mask.argmax(dim=1)],
    ),
    "max": PoolingMode(
        "pooling_mode_max_tokens",
        _build_largest,
        lambda _torch, states, mask: states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).max(dim=1).values,
    ),
    "mean": PoolingMode("pooling_mode_mean_tokens", _build_mean, _mean_in_torch),
    "mean_sqrt_len_tokens": PoolingMode(
        "pooling_mode_mean_sqrt_len_tokens",
        partial(_build_mean, root=True),
        partial(_mean_in_torch, root=True),
    ),
    # Muennighoff, 2022, arXiv:2202.08904.
    "weightedmean": PoolingMode("pooling_mode_weightedmean_tokens", _build_mean, _mean_in_torch, is_weighted=True),
    "lasttoken": PoolingMode(
        "pooling_mode_lasttoken",
        lambda build, states, real: build.pick(states, build_count(build, real)),
        _last_in_torch,
    ),
}


Floats = NDArray[np.floating[Any]]
# Arguments of `build`: a graph Builder and onnx_ir values, whose packages are siblings of this one.
Builder = Any
Value = Any


def sigmoid(logits: Floats) -> NDArray[np.float64]:
    """Convert each logit to an independent probability, in float64."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64))))


def _build_gelu(build: Builder, value: Value) -> Value:
    """Append x / 2 * (1 + erf(x / sqrt(2))); Gelu exists only from opset 20 on."""
    erf = build.op("Erf", build.op("Mul", value, build.number(0.5**0.5)))
    return build.op("Mul", build.op("Mul", value, build.number(0.5)), build.op("Add", erf, build.number(1.0)))


def _build_hard_sigmoid(build: Builder, value: Value) -> Value:
    return build.op("HardSigmoid", value, alpha=1 / 6, beta=0.5)


_Activation: TypeAlias = "Callable[[Builder, Value], Value]"


def _operator(op_type: str, **attributes: float) -> _Activation:
    """Return an activation that consists of one operator."""
    return lambda build, value: build.op(op_type, value, **attributes)


def _clip(lowest: float, highest: float) -> _Activation:
    return lambda build, value: build.op("Clip", value, build.number(lowest), build.number(highest))


# The activations of torch.nn with their defaults, by class name, as operators.
ACTIVATIONS: dict[str, _Activation] = {
    "Identity": lambda _build, value: value,
    "Tanh": _operator("Tanh"),
    "ReLU": _operator("Relu"),
    "GELU": _build_gelu,
    "SiLU": lambda build, value: build.op("Mul", value, build.op("Sigmoid", value)),
    "Sigmoid": _operator("Sigmoid"),
    "ELU": _operator("Elu"),
    "CELU": _operator("Elu"),  # differs for alpha != 1
    "SELU": _operator("Selu", alpha=1.6732632423543772, gamma=1.0507009873554805),  # Klambauer et al., 2017
    "LeakyReLU": _operator("LeakyRelu", alpha=0.01),
    "RReLU": _operator("LeakyRelu", alpha=(1 / 8 + 1 / 3) / 2),  # in evaluation mode
    "ReLU6": _clip(0.0, 6.0),
    "Hardtanh": _clip(-1.0, 1.0),
    "Hardsigmoid": _build_hard_sigmoid,
    "Hardswish": lambda build, value: build.op("Mul", value, _build_hard_sigmoid(build, value)),
    "Softplus": _operator("Softplus"),
    "LogSigmoid": lambda build, value: build.op("Neg", build.op("Softplus", build.op("Neg", value))),
    "Mish": lambda build, value: build.op("Mul", value, build.op("Tanh", build.op("Softplus", value))),
    "Softsign": _operator("Softsign"),
    "Tanhshrink": lambda build, value: build.op("Sub", value, build.op("Tanh", value)),
    "Hardshrink": _operator("Shrink", lambd=0.5, bias=0.0),
    "Softshrink": _operator("Shrink", lambd=0.5, bias=0.5),
}


def activation_name(path: Json) -> str | None:
    """Return the entry of ACTIVATIONS for a class in torch.nn; None for other classes."""
    package, _, name = str(path).rpartition(".")
    return name if name in ACTIVATIONS and (package == "torch.nn" or package.startswith("torch.nn.")) else None


_ALL = 2**31 - 1  # more than any vector has


class PoolingModule(ABC):
    """One module with its settings and weights.

    Attributes:
        pools_tokens: whether it maps [B, S, N] to one vector per text; other modules map vectors to vectors.
        reads: sentence-transformers' name of the transformer output that a pooling module reads.
        name: of the module's folder, which prefixes the names of its weights.
        keys: keys of its config.json that are supported or have no effect; None if sentence-transformers ignores
            unknown keys.
    """

    pools_tokens: ClassVar[bool] = False
    reads: ClassVar[str] = "token_embeddings"
    name: str
    keys: ClassVar[frozenset[str] | None] = None

    @classmethod
    def read(cls, stored: StoredModule) -> PoolingModule:
        """Read settings and weights.

        Raises:
            OnnxtoolError: they are not supported, or inconsistent; or no library lists such a module.
        """
        raise stored.files.refuse(f"{stored.kind} of {stored.files.label} is not a sentence-transformers module")

    @abstractmethod
    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append the module to a graph: `value` is the previous output, `mask` int64 [B, S]."""

    @abstractmethod
    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Compute the module in PyTorch, on tensors of the same shapes."""

    def width(self, before: int) -> int:
        """Return the output width of the module for vectors of width `before`: the rows of a weight, if it has one.

        Raises:
            ValueError: the module expects a different width.
        """
        weight = getattr(self, "weight", None)
        if weight is None:
            return before
        if weight.shape[-1] != before:
            raise ValueError(f"{self.name} takes vectors of {weight.shape[-1]} numbers, but is given {before}")
        return int(weight.shape[0])

    @property
    def on_tokens(self) -> bool:
        """Whether it maps token vectors to token vectors, [B, S, W]."""
        return False

    @property
    def description(self) -> str:
        """A short description."""
        return type(self).__name__


def count_setting(stored: StoredModule, key: str) -> int:
    """Return a positive integer setting of the encoder, an upper bound.

    Raises:
        OnnxtoolError: it is not.
    """
    value = stored.settings.get(key)
    count = positive(value)
    if count is None:
        raise stored.files.malformed(ENCODER_NAME, f"{key} is {value!r}, which is not a number above zero")
    return min(count, _ALL)


def stored_tensors(
    stored: StoredModule, tensors: Mapping[str, NDArray[np.float32]], shapes: Mapping[str, tuple[Json, ...]]
) -> list[NDArray[np.float32]]:
    """Return the weights of a module, which has no others than those of `shapes`.

    Raises:
        OnnxtoolError: one is missing, its shape does not match the settings, or there are others.
    """
    require_no_others(stored, tensors, shapes)
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            actual = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise stored.files.refuse(
                f"{name} in {stored.folder} of {stored.files.label} is {actual}, and its config.json says "
                f"{list(shape)}",
                "the folder mixes two models; take both from one",
            )
    return [tensors[name] for name in shapes]


def require_no_others(
    stored: StoredModule, tensors: Mapping[str, NDArray[np.float32]], known_names: Collection[str]
) -> None:
    """Refuse a module with unused weights.

    Raises:
        OnnxtoolError: there are some.
    """
    unused = sorted(tensors.keys() - set(known_names))
    if unused:
        raise stored.files.refuse(
            f"{stored.folder} of {stored.files.label} has weights that {stored.kind} does not use: {', '.join(unused)}",
            "the folder mixes two models, or its config.json was edited; take both from one",
        )


def require_known_keys(stored: StoredModule, known_keys: frozenset[str] | None) -> None:
    """Refuse a module with unknown settings; if `known_keys` is None, all are accepted.

    Raises:
        OnnxtoolError: it has one.
    """
    unknown = [] if known_keys is None else sorted(set(stored.settings) - known_keys)
    # Disabled flags of unknown modes have no effect; enabled ones are reported as unknown modes.
    unknown = [key for key in unknown if not key.startswith("pooling_mode_")]
    if unknown:
        raise stored.files.refuse(
            f"{stored.file('config.json')} of {stored.files.label} has the settings {', '.join(unknown)}, "
            "which onnxtool does not know"
        )
