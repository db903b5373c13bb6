"""Let a model give the states that its checkpoint pools in place of those of its last layer."""

from __future__ import annotations

import functools
from typing import Any

from onnxtool.checkpoint.module_settings import TokenStates
from onnxtool.errors import CheckpointError

_LAST, _ALL = "last_hidden_state", "hidden_states"


def give_states(model: Any, states: TokenStates) -> None:
    """Replace `last_hidden_state` of what `model` returns, float [B, S, H], in place.

    Raises:
        CheckpointError: when the model runs, if it does not have the layers.
    """
    import torch

    forward = model.forward

    @functools.wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **{**kwargs, "output_hidden_states": True})
        layers = outputs[_ALL]
        if not states.fits(len(layers)):
            raise CheckpointError(
                f"the checkpoint pools states from layer {states.start} on, with "
                f"{'no' if states.weights is None else len(states.weights)} weights, and its model has {len(layers)}",
                "the folder mixes two models; take both from one",
            )
        others = {name: value for name, value in outputs.items() if name not in (_LAST, _ALL)}
        return type(outputs)(last_hidden_state=states.choose(torch, layers), **others)

    model.forward = chosen
