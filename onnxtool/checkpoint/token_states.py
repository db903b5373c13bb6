"""Which states of a transformer's tokens are pooled, where they are not those of its last layer.

Letters of shapes: B batch, S sequence, H hidden, L layers that are weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.pooling_module import require_no_others
from onnxtool.checkpoint.sentence_modules import SentenceModules, as_object
from onnxtool.reports import Json

WEIGHTED = "WeightedLayerPooling"
_STATES = "hidden_states"
_KEYS = frozenset(("embedding_dimension", "word_embedding_dimension", "layer_start", "num_hidden_layers"))


@dataclass(frozen=True, eq=False)
class TokenStates:
    """The states of one layer, or a mean of those of several.

    Attributes:
        start: the layer, where 0 is what comes before the first, and -1 the last; of several, the first.
        weights: float32 [L], of `start` and all layers behind it; None for one layer.
    """

    start: int
    weights: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, modules: SentenceModules, files: CheckpointFiles) -> TokenStates | None:
        """Read which are pooled; None for those of the last layer.

        Raises:
            OnnxtoolError: the weights of layers are missing, of another shape, or their sum is 0.
        """
        if WEIGHTED in modules.kinds[1:2]:
            # sentence-transformers passes over this module where the model is not told to give all states.
            return _weighted(modules, files) if files.read("config.json").get("output_hidden_states") is True else None
        config = as_object(modules.transformer.get("modality_config"))
        layer = stated_layer(as_object(config.get("message", config.get("text"))).get("method_output_name"))
        return None if layer is None else cls(layer)

    def choose(self, torch: Any, states: Sequence[Any]) -> Any:
        """Return what is pooled of PyTorch's states before and behind each layer, each float [B, S, H]."""
        if self.weights is None:
            return states[self.start]
        weights = torch.from_numpy(self.weights).to(states[-1])
        return (weights[:, None, None, None] * torch.stack(tuple(states[self.start :]))).sum(dim=0) / weights.sum()

    def fits(self, num_states: int) -> bool:
        """Whether a model has the layers: `num_states` counts what comes before the first one too."""
        if self.weights is not None:
            return num_states - self.start == len(self.weights)
        return -num_states <= self.start < num_states


def stated_layer(output: Json) -> int | None:
    """Return the layer of an output such as `["hidden_states", -2]`; None for any other."""
    match output:
        case [name, int(layer)] if name == _STATES and not isinstance(layer, bool):
            return layer
    return None


def _weighted(modules: SentenceModules, files: CheckpointFiles) -> TokenStates:
    stored = modules.modules[1]
    start, unknown = stored.settings.get("layer_start", 4), sorted(set(stored.settings) - _KEYS)
    if unknown or not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise files.refuse(
            f"{stored.file('config.json')} of {files.label} has settings that onnxtool does not know: "
            f"{', '.join(unknown) or f'layer_start {start!r}'}"
        )
    tensors = files.read_tensors(stored.folder)
    require_no_others(stored, tensors, ("layer_weights",))
    weights = tensors.get("layer_weights")
    if weights is None or weights.ndim != 1 or not np.isfinite(weights).all() or not weights.sum():
        found = "missing" if weights is None else f"of shape {list(weights.shape)}, not finite, or of sum 0"
        raise files.refuse(f"layer_weights in {stored.folder} of {files.label} is {found}; it is one for each layer")
    return TokenStates(start, weights)
