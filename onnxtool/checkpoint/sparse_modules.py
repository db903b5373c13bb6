"""Modules of sparse encoders: from token logits, or from a vector, to term weights.

The definitions follow sentence-transformers 6.2. Shape letters: B batch, S sequence, V vocabulary, W width of
a vector, L latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import Builder, PoolingModule, Value, count_setting, stored_tensors
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, StoredModule, positive
from onnxtool.reports import Json

_DEVIATION_EPSILON = 1e-5  # epsilon of SparseAutoEncoder's standard deviations


@dataclass(frozen=True)
class SpladePooling(PoolingModule):
    """Weigh the terms of a vocabulary: float [B, S, V] to [B, V].

    Attributes:
        strategy: `max` over tokens (Formal et al., 2021, arXiv:2109.10086), or the older `sum` (arXiv:2107.05720).
        activation: `relu` for log(1 + relu(x)), `log1p_relu` for a second logarithm on top (arXiv:2504.14839).
    """

    pools_tokens = True
    keys = frozenset(("embedding_dimension", "word_embedding_dimension", "pooling_strategy", "activation_function"))

    strategy: str = "max"
    activation: str = "relu"

    STRATEGIES: ClassVar[tuple[str, ...]] = ("max", "sum")
    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("relu", "log1p_relu")

    @classmethod
    def read(cls, stored: StoredModule) -> SpladePooling:
        """Read strategy and activation."""
        strategy = str(stored.settings.get("pooling_strategy", "max"))
        activation = str(stored.settings.get("activation_function", "relu"))
        if strategy not in cls.STRATEGIES or activation not in cls.ACTIVATIONS:
            raise stored.files.refuse(
                f"{stored.files.label} weighs terms by {strategy} of {activation}, which onnxtool does not compute; it "
                f"knows {' and '.join(cls.STRATEGIES)} of {' and '.join(cls.ACTIVATIONS)}"
            )
        return cls(strategy, activation)

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it; with `max`, logarithms are taken once per term, not once per token and term."""
        real = build.as_weights(build.cast(mask, value.dtype))
        masked = build.op("Mul", value, real)  # padding counts as 0, the minimum of relu
        if self.strategy == "max":
            return self._build_activation(build, build.reduce("ReduceMax", masked))
        return build.reduce("ReduceSum", self._build_activation(build, masked))

    def _build_activation(self, build: Builder, value: Value) -> Value:
        weights = build.cast(build.op("Relu", value))
        for _ in range(2 if self.activation == "log1p_relu" else 1):
            weights = build.op("Log", build.op("Add", weights, build.number(1.0)))
        return weights

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply the definition: activate every token's logits, then pool."""
        weights = torch.log1p(torch.relu(value * mask.unsqueeze(-1)))
        if self.activation == "log1p_relu":
            weights = torch.log1p(weights)
        return weights.max(dim=1).values if self.strategy == "max" else weights.sum(dim=1)

    @property
    def description(self) -> str:
        """Write out the formula."""
        return (
            f"the {self.strategy} of {'log(1 + log(1 + relu))' if self.activation == 'log1p_relu' else 'log(1 + relu)'}"
        )


@dataclass(frozen=True)
class LargestTerms(PoolingModule):
    """Keep the `max_active_dims` terms of largest weight, and set the others to 0: float [B, V].

    Of equal weights, the one with the smaller index stays.
    """

    count: int

    @classmethod
    def read(cls, stored: StoredModule) -> LargestTerms:
        """Read it from the settings of the encoder."""
        return cls(count_setting(stored, "max_active_dims"))

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it; a vocabulary smaller than the count is kept whole."""
        size = build.op("Gather", build.op("Shape", value), build.integers(1), axis=0)
        count = build.op("Min", build.integers(self.count), size)
        _, places = build.ops("TopK", build.op("Abs", value), count, outputs=2, axis=1)
        kept = build.op("GatherElements", value, places, axis=1)
        return build.op("ScatterElements", build.op("Sub", value, value), places, kept, axis=1)

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Sort in PyTorch."""
        places = torch.sort(value.abs(), dim=1, descending=True, stable=True).indices[:, : self.count]
        return torch.zeros_like(value).scatter(1, places, value.gather(1, places))

    @property
    def description(self) -> str:
        """Name the number of terms."""
        return f"the {self.count} largest terms"


@dataclass(frozen=True, eq=False)
class SparseAutoEncoder(PoolingModule):
    """Encode sparsely: float [B, W] to latents [B, L], keeping the `k` largest that are above 0.

    Contrastive sparse representation, CSR (Wen et al., 2025, arXiv:2503.01776).

    Attributes:
        name: of the module's folder.
        weight: float32 [L, W].
        pre_bias: float32 [W], subtracted from the vector.
        latent_bias: float32 [L].
        k: the maximum number of nonzero latents of a vector.
        standardizes: whether vectors get mean 0 and deviation 1 first.
    """

    keys = frozenset(("input_dim", "hidden_dim", "k", "k_aux", "normalize", "dead_threshold"))

    name: str
    weight: NDArray[np.float32]
    pre_bias: NDArray[np.float32]
    latent_bias: NDArray[np.float32]
    k: int
    standardizes: bool = False

    @classmethod
    def read(cls, stored: StoredModule) -> SparseAutoEncoder:
        """Read weights and k; SparseEncoder's own configuration overrides k."""
        settings, tensors = stored.settings, stored.files.read_tensors(stored.folder)
        width, latents = settings.get("input_dim"), settings.get("hidden_dim", 512)
        k = stored.files.read_object(ENCODER_NAME).get("max_active_dims") or settings.get("k", 8)
        # Encoder and decoder share the weight, and safetensors stores it under the alphabetically first name.
        tied = [name for name in ("encoder.weight", "decoder.linear.weight") if name in tensors] or ["encoder.weight"]
        if not np.array_equal(tensors.get(tied[0], ()), tensors.get(tied[-1], ())):
            raise stored.files.refuse(f"{' and '.join(tied)} in {stored.folder} differ, and SparseAutoEncoder has one")
        shapes: dict[str, tuple[Json, ...]] = dict.fromkeys(tied, (latents, width))
        *_, weight, pre_bias, latent_bias = stored_tensors(
            stored, tensors, {**shapes, "pre_bias": (width,), "latent_bias": (latents,)}
        )
        kept = positive(k)
        if kept is None or kept > len(weight):
            raise stored.files.refuse(
                f"{stored.folder} of {stored.files.label} keeps the {k} largest of {len(weight)} latents",
                "set k in its config.json, or max_active_dims in config_sentence_transformers.json, to one of them "
                "at least, and to all at most",
            )
        return cls(stored.folder, weight, pre_bias, latent_bias, kept, settings.get("normalize") is True)

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        if self.standardizes:
            value = self._build_standardized(build, value)
        centred = build.op("Sub", value, build.weight(self.pre_bias, f"{self.name}.pre_bias"))
        weights = (self.weight, "encoder.weight"), (self.latent_bias, "latent_bias")
        latents = build.op("Gemm", centred, *(build.weight(w, f"{self.name}.{name}") for w, name in weights), transB=1)
        largest, places = build.ops("TopK", latents, build.integers(self.k), outputs=2, axis=1)
        zeros = build.op("Expand", build.number(0.0), build.op("Shape", latents))
        return build.op("ScatterElements", zeros, places, build.op("Relu", largest), axis=1)

    def _build_standardized(self, build: Builder, value: Value) -> Value:
        """Append the vector minus its mean, divided by its standard deviation (with W - 1)."""
        centred = build.op("Sub", value, build.reduce("ReduceMean", value, keepdims=1))
        squares = build.reduce("ReduceSum", build.op("Mul", centred, centred), keepdims=1)
        deviation = build.op("Sqrt", build.op("Div", squares, build.number(self.pre_bias.size - 1)))
        return build.op("Div", centred, build.op("Add", deviation, build.number(_DEVIATION_EPSILON)))

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Encode with torch's own linear layer, and keep the largest."""
        weight, pre_bias, latent_bias = (
            torch.from_numpy(array).to(value) for array in (self.weight, self.pre_bias, self.latent_bias)
        )
        if self.standardizes:
            deviation, mean = torch.std_mean(value, dim=-1, keepdim=True)
            value = (value - mean) / (deviation + _DEVIATION_EPSILON)
        latents = torch.nn.functional.linear(value - pre_bias, weight, latent_bias)
        largest = latents.topk(self.k, dim=-1)
        return torch.zeros_like(latents).scatter(-1, largest.indices, largest.values.relu())
