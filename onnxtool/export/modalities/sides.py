"""The two sides of a dual encoder such as CLIP: pictures or texts, each to a vector in the space that both share.

Letters of shapes: B batch, W width of the space.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.errors import ExportError
from onnxtool.export.modalities.combined import PaddedTexts
from onnxtool.export.modalities.sizes import Modality, usual_sizes
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.signature import run_torch_tensors

# Far above the rounding of float32, and far below what another formula would give.
_SAME = 1e-4


@dataclass(frozen=True)
class Side:
    """One side of a dual encoder.

    Attributes:
        task: by which a user asks for it.
        method: the method of the model that encodes it.
        features: what the method gives, float [B, W].
        embeddings: what the model's own forward makes of that before it compares both sides, float [B, W].
    """

    task: str
    method: str
    features: str
    embeddings: str


SIDES = (
    Side(TASK_OF_PICTURES, "get_image_features", "image_features", "image_embeds"),
    Side("sentence-similarity", "get_text_features", "text_features", "text_embeds"),
)


def find_side(model: Any, task: str) -> Side | None:
    """Return the side that `task` asks for; None where the model is no dual encoder, or the task is another."""
    side = next((side for side in SIDES if side.task == task), None)
    return side if all(hasattr(model, one.method) for one in SIDES) else None


def restrict(model: Any, task: str) -> Any:
    """Make the forward of a dual encoder that of the side that `task` asks for; leave any other model as it is.

    The forward is replaced on this one model: its class, configuration and weights stay, which exporters look at.
    """
    side = find_side(model, task)
    if side is not None:
        encode, name = getattr(model, side.method), side.features

        def forward(_self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: encode(*args, **kwargs).pooler_output}

        forward.__signature__ = _signature_with_self(encode)  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)
    return model


def _signature_with_self(method: Any) -> Any:
    """Return the signature of a bound method as that of a function, whose first parameter is bound once more."""
    own = inspect.signature(method)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    kept = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    return own.replace(parameters=[first, *kept], return_annotation=inspect.Signature.empty)


def scales_to_length_one(model: Any, modality: Modality, both: Modality, side: Side) -> bool:
    """Find out by running the model whether its own forward scales the features of a side before it compares them.

    Args:
        model: a dual encoder, restricted to `side`.
        modality: what that takes.
        both: what its own forward takes: texts and pictures.
        side: which of them.

    Raises:
        ExportError: it compares neither these features, nor the features at length one.
    """
    feeds = both.feeds(usual_sizes(both), seed=3)
    restricted = vars(model).pop("forward")
    try:
        whole = run_torch_tensors(model, feeds)
    finally:
        model.forward = restricted
    names = modality.feeds(usual_sizes(modality))
    own = run_torch_tensors(model, {name: feeds[name] for name in names})[side.features]
    features: NDArray[Any] = own.float().cpu().numpy()
    if side.embeddings in whole and features.ndim == 2:
        compared = whole[side.embeddings].float().cpu().numpy()
        if compared.shape == features.shape:
            if np.abs(compared - features).max() <= _SAME * np.abs(features).max():
                return False
            if np.abs(compared - features / np.linalg.norm(features, axis=-1, keepdims=True)).max() <= _SAME:
                return True
    raise ExportError(
        f"{type(model).__name__} does not compare what its {side.method} gives ({side.embeddings} of its forward is "
        "something else)",
        "this model is no dual encoder as CLIP is; export it with another --task",
    )


def with_padding(model: Any, modality: Modality, side: Side) -> Modality:
    """Pad texts to the longest that the model takes where what a side makes of a text depends on its padding.

    SigLIP's text encoder reads the last token of all, padding or not, and was trained on texts of one length.

    Raises:
        ExportError: the model depends on it, and takes texts of any length.
    """
    if not isinstance(modality, TextInputs):
        return modality
    texts = modality.tokenize(["a", "a second text, which is longer than the first one"])
    length = texts["input_ids"].shape[1]
    short, alone = (
        run_torch_tensors(model, {name: array[:1] for name, array in feeds.items()})[side.features].float()
        for feeds in (texts, modality.tokenize(["a"], length + 2))
    )
    if (short - alone).abs().max() <= _SAME * short.abs().max():
        return modality
    if modality.longest is None:
        raise ExportError(
            f"{type(model).__name__} gives other vectors where a text has more padding, and says no length to pad to",
            "set max_position_embeddings in its configuration, or model_max_length of its tokenizer",
        )
    return PaddedTexts(modality, modality.longest)
