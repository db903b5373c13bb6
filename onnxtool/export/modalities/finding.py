"""Determine a model's modality from its forward parameters, or restrict its forward to one side of the model.

A dual encoder such as CLIP has two sides: images or texts, each mapped to a vector in a shared space.

Shape letters: B batch, S sequence, H hidden, W width of the shared space.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_settings import TokenStates
from onnxtool.checkpoint.tasks import RANKING, TASK_OF_PICTURES, TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.audio import AudioInputs
from onnxtool.export.modalities.combined import SideBySide, WithDecoder
from onnxtool.export.modalities.image import ImageInputs
from onnxtool.export.modalities.modality import Modality, usual_sizes
from onnxtool.export.modalities.pages import find_page_inputs, restrict_to_pages
from onnxtool.export.modalities.text import FEW_IDS, TextInputs, token_of, vocabulary_size
from onnxtool.export.signature import run_own_forward, run_torch_tensors

# Far above float32 rounding, and far below the effect of a different formula.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Side:
    """One side of a dual encoder.

    Attributes:
        task: the task that users select it with.
        method: the model's method that encodes it.
        features: the method's result, float [B, W].
        embeddings: what the model's own forward turns that into before comparing both sides, float [B, W].
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
    """Return the side that `task` selects; None if the model is not a dual encoder, or the task is another."""
    side = next((side for side in SIDES if side.task == task), None)
    return side if all(hasattr(model, other.method) for other in SIDES) else None


def restrict(model: Any, checkpoint: Checkpoint) -> Any:
    """Replace the forward of a dual encoder or page retriever with that of the side its task selects.

    Other models are unchanged. Only this model instance's forward is replaced: exporters look at its class,
    configuration and weights, which stay.
    """
    if checkpoint.is_of_pages:
        return restrict_to_pages(model, checkpoint)
    side = find_side(model, checkpoint.task)
    if side is not None:
        encode, name = getattr(model, side.method), side.features

        def forward(_self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: encode(*args, **kwargs).pooler_output}

        forward.__signature__ = _signature_with_self(encode)  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)
    return model


def _signature_with_self(method: Any) -> Any:
    """Return a bound method's signature as a function's, whose first parameter will be bound again."""
    own = inspect.signature(method)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    kept = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    return own.replace(parameters=[first, *kept], return_annotation=inspect.Signature.empty)


def scales_to_length_one(model: Any, modality: Modality, both_sides: Modality, side: Side) -> bool:
    """Determine by running the model whether its own forward scales a side's features before comparing them.

    Args:
        model: a dual encoder, restricted to `side`.
        modality: the inputs of the restricted model.
        both_sides: the inputs of its own forward: texts and images.
        side: the side it is restricted to.

    Raises:
        ExportError: it compares neither these features, nor the features at length one.
    """
    feeds = both_sides.feeds(usual_sizes(both_sides), seed=3)
    forward_outputs = run_own_forward(model, feeds)
    names = modality.feeds(usual_sizes(modality))
    own = run_torch_tensors(model, {name: feeds[name] for name in names})[side.features]
    features: NDArray[Any] = own.float().cpu().numpy()
    if side.embeddings in forward_outputs and features.ndim == 2:
        compared = forward_outputs[side.embeddings].float().cpu().numpy()
        if compared.shape == features.shape:
            if np.abs(compared - features).max() <= _TOLERANCE * np.abs(features).max():
                return False
            if np.abs(compared - features / np.linalg.norm(features, axis=-1, keepdims=True)).max() <= _TOLERANCE:
                return True
    raise ExportError(
        f"{type(model).__name__} does not compare what its {side.method} gives ({side.embeddings} of its forward is "
        "something else)",
        "this model is not a dual encoder like CLIP; export it with another --task",
    )


def with_padding(model: Any, modality: Modality, side: Side) -> Modality:
    """Pad texts to the model's maximum if a side's result for a text depends on its padding.

    SigLIP's text encoder reads the last token, padding or not, and was trained on texts of one length.

    Raises:
        ExportError: the result depends on padding, but the model accepts any length.
    """
    if not isinstance(modality, TextInputs):
        return modality
    texts = modality.tokenize(["a", "a second text, which is longer than the first one"])
    length = texts["input_ids"].shape[1]
    short, longer_padding = (
        run_torch_tensors(model, {name: array[:1] for name, array in feeds.items()})[side.features].float()
        for feeds in (texts, modality.tokenize(["a"], length + 2))
    )
    if (short - longer_padding).abs().max() <= _TOLERANCE * short.abs().max():
        return modality
    if modality.longest is None:
        raise ExportError(
            f"{type(model).__name__} gives different vectors for more padding, but states no length to pad to",
            "set max_position_embeddings in its configuration, or model_max_length of its tokenizer",
        )
    return replace(modality, padded_length=modality.longest)


_DUAL_TASKS = ("zero-shot-image-classification",)
# For these, a model that could also take images or audio is exported for text.
_TEXT_TASKS = (
    *("fill-mask", "text-classification", "token-classification", "feature-extraction"),
    *("text-generation", TASK_WITH_CACHE, RANKING),
    *("text2text-generation", TEXT_TO_TEXT_WITH_CACHE),
)
# Image GPT takes images as color numbers, under the name of text ids.
_PICTURE_TASKS = ("image-classification",)
_DECODER_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
_SOUNDS = ("input_values", "input_features")
# Substrings of input names by their content: `pixel_values_videos`, `audio_input_features`.
_OTHER_INPUTS = {"images": ("pixel_values",), "sound": _SOUNDS}
# Encoder-decoders that do not generate derive the decoder input by shifting the encoder's.
_NOT_GENERATING = ("Classification", "QuestionAnswering")


def find_modality(model: Any, checkpoint: Checkpoint, *, text: str | None = None) -> Modality:
    """Return the inputs of `model`, with its checkpoint's tokenizer or processor to prepare them.

    Args:
        model: a transformers model.
        checkpoint: the checkpoint it comes from.
        text: a text to trace text models on, next to our own.

    Raises:
        CheckpointError: the checkpoint lacks the required tokenizer or processor.
        ExportError: the processor does not fit the model, or the model takes inputs that onnxtool does not know.
    """
    parameters = inspect.signature(model.forward).parameters
    accepted = tuple(parameters)
    if checkpoint.task == TASK_OF_PICTURES and "pixel_values" not in accepted:
        raise ExportError(f"{type(model).__name__} takes no images", "leave --task out, or pass another one")
    modality: Modality
    if checkpoint.task == TASK_OF_PICTURES and checkpoint.is_of_pages and "input_ids" in accepted:
        return find_page_inputs(model, checkpoint, accepted)
    if "pixel_values" in accepted and "input_ids" in accepted:
        modality = _text_and_images(model, checkpoint, accepted, text)
        if isinstance(modality, SideBySide):
            return modality
    elif "pixel_values" in accepted or checkpoint.task in _PICTURE_TASKS:
        modality = ImageInputs.of(model, checkpoint.load_processor("image processor"), accepted)
    elif any(name in accepted for name in _SOUNDS) and not _reads(model, checkpoint, accepted):
        modality = AudioInputs.of(model, checkpoint.load_processor("feature extractor"), accepted)
    else:
        texts = TextInputs.of(model, checkpoint.load_tokenizer(), accepted, text=text)
        modality = replace(texts, left_out=_left_out(accepted))
    config = getattr(model, "config", None)
    generates = not any(part in checkpoint.architecture for part in _NOT_GENERATING)
    if getattr(config, "is_encoder_decoder", False) and generates and "decoder_input_ids" in accepted:
        longest = [size for name in _DECODER_LIMITS if isinstance(size := getattr(config, name, None), int)]
        ids = vocabulary_size(model) or FEW_IDS
        start_id, pad_id = (token_of(role, config, ids) for role in ("decoder_start", "pad"))
        return WithDecoder(modality, ids, start_id or 0, min(longest, default=None), pad_id)
    return modality


def find_both_sides(model: Any, checkpoint: Checkpoint) -> Modality:
    """Return texts and images for a dual encoder, regardless of the side its forward encodes now.

    Raises:
        CheckpointError: the checkpoint lacks the tokenizer or the image processor.
        ExportError: they do not fit the model.
    """
    accepted = tuple(inspect.signature(type(model).forward).parameters)
    texts = TextInputs.of(model, checkpoint.load_tokenizer(), accepted)
    return _side_by_side(texts, ImageInputs.of(model, checkpoint.load_processor("image processor"), accepted))


def text_of(modality: Modality) -> TextInputs | None:
    """Return the text part of a modality, or None if there is none."""
    if isinstance(modality, WithDecoder):
        return text_of(modality.encoder)
    if isinstance(modality, SideBySide):
        return next((text for part in modality.parts if (text := text_of(part)) is not None), None)
    return modality if isinstance(modality, TextInputs) else None


def left_out_notes(modality: Modality, architecture: str) -> tuple[str, ...]:
    """Report which of the model's modalities a text file does not take; empty if it takes all."""
    text = text_of(modality)
    if text is None or not text.left_out:
        return ()
    return (f"takes text alone, though {architecture} takes {' and '.join(text.left_out)} as well",)


def _reads(model: Any, checkpoint: Checkpoint, accepted: tuple[str, ...]) -> bool:
    """Return whether an audio model is exported for text, which it also takes."""
    return "input_ids" in accepted and checkpoint.task in _TEXT_TASKS and not _is_dual(model)


def _left_out(accepted: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a text-only file leaves out of a model that accepts these inputs."""
    return tuple(
        kind for kind, parts in _OTHER_INPUTS.items() if any(part in name for part in parts for name in accepted)
    )


def _is_dual(model: Any) -> bool:
    """Return whether a model compares the results of two encoders: it has a weight for how clearly they agree."""
    return any(name.startswith("logit_scale") for name, _ in model.named_parameters(recurse=False))


def _text_and_images(model: Any, checkpoint: Checkpoint, accepted: tuple[str, ...], text: str | None) -> Modality:
    # A dual encoder projects both into one space; models that read images among words need them placed manually.
    dual = checkpoint.task in _DUAL_TASKS or _is_dual(model)
    if not dual and checkpoint.task not in _TEXT_TASKS:
        raise ExportError(
            f"{type(model).__name__} takes images among the words of a text (input_ids and pixel_values)",
            f"pass the --task of its text part ({', '.join(_TEXT_TASKS)}), or save only a part of it",
        )
    texts = TextInputs.of(model, checkpoint.load_tokenizer(), accepted, text=text)
    if not dual:
        return replace(texts, left_out=_left_out(accepted))
    images = ImageInputs.of(model, checkpoint.load_processor("image processor"), accepted)
    return _side_by_side(texts, images)


def _side_by_side(texts: TextInputs, images: ImageInputs) -> SideBySide:
    return SideBySide((replace(texts, batch_axis="text_batch_size"), replace(images, batch_axis="image_batch_size")))


_LAST, _ALL = "last_hidden_state", "hidden_states"


def give_states(model: Any, states: TokenStates) -> None:
    """Replace `last_hidden_state` in the results of `model`, float [B, S, H], in place.

    Raises:
        CheckpointError: when the model runs, if it does not have the layers.
    """
    import torch

    forward = model.forward

    @functools.wraps(forward)
    def forward_with_states(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **{**kwargs, "output_hidden_states": True})
        layers = outputs[_ALL]
        if not states.fits(len(layers)):
            raise CheckpointError(
                f"the checkpoint pools states from layer {states.start} on, with "
                f"{'no' if states.weights is None else len(states.weights)} weights, and its model has {len(layers)}",
                "the folder mixes two models; take both from one",
            )
        unchanged = {name: value for name, value in outputs.items() if name not in (_LAST, _ALL)}
        return type(outputs)(last_hidden_state=states.choose(torch, layers), **unchanged)

    model.forward = forward_with_states
