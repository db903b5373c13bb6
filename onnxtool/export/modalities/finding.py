"""Find the modality of a model from the parameters of its forward."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from onnxtool.checkpoint.tasks import RANKING, TASK_OF_PICTURES, TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.audio import AudioInputs
from onnxtool.export.modalities.combined import PaddedTexts, SideBySide, WithDecoder
from onnxtool.export.modalities.image import ImageInputs
from onnxtool.export.modalities.pages import find_page_inputs, is_of_pages
from onnxtool.export.modalities.sizes import Modality
from onnxtool.export.modalities.text import FEW_IDS, TextInputs, vocabulary_size

_DUAL_TASKS = ("zero-shot-image-classification",)
# For these, a model that may see pictures or hear sound as well is exported as one of text.
_TEXT_TASKS = (
    *("fill-mask", "text-classification", "token-classification", "feature-extraction"),
    *("text-generation", TASK_WITH_CACHE, RANKING),
    *("text2text-generation", TEXT_TO_TEXT_WITH_CACHE),
)
# Image GPT takes pictures as the numbers of their colours, under the name of a text's ids.
_PICTURE_TASKS = ("image-classification",)
_DECODER_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
_SOUNDS = ("input_values", "input_features")
# What the names of inputs have in them, by what goes in there: `pixel_values_videos`, `audio_input_features`.
_BESIDE_TEXT = {"pictures": ("pixel_values",), "sound": _SOUNDS}
# Encoder-decoders that do not generate shift their decoder's input out of the encoder's.
_NOT_GENERATING = ("Classification", "QuestionAnswering")


def find_modality(model: Any, checkpoint: Checkpoint, *, text: str | None = None) -> Modality:
    """Return what `model` takes, with the tokenizer or processor of its checkpoint to make it.

    Args:
        model: a transformers model.
        checkpoint: where it came from.
        text: what to trace a model of text on, beside a text of our own.

    Raises:
        CheckpointError: the checkpoint lacks the tokenizer or processor that this takes.
        ExportError: the processor does not fit the model, or the model takes something that onnxtool does not know.
    """
    parameters = inspect.signature(model.forward).parameters
    accepted = tuple(parameters)
    if checkpoint.task == TASK_OF_PICTURES and "pixel_values" not in accepted:
        raise ExportError(f"{type(model).__name__} takes no pictures", "leave --task out, or pass another one")
    modality: Modality
    if checkpoint.task == TASK_OF_PICTURES and is_of_pages(checkpoint) and "input_ids" in accepted:
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
        start = getattr(config, "decoder_start_token_id", None)
        longest = [size for name in _DECODER_LIMITS if isinstance(size := getattr(config, name, None), int)]
        ids = vocabulary_size(model) or FEW_IDS
        pad = getattr(config, "pad_token_id", None)
        return WithDecoder(
            modality,
            ids,
            start if isinstance(start, int) else 0,
            min(longest, default=None),
            pad if isinstance(pad, int) and 0 <= pad < ids else None,
        )
    return modality


def find_both_sides(model: Any, checkpoint: Checkpoint) -> Modality:
    """Return texts and pictures for a dual encoder, whichever side of it its forward encodes now.

    Raises:
        CheckpointError: the checkpoint lacks the tokenizer or the image processor.
        ExportError: they do not fit the model.
    """
    accepted = tuple(inspect.signature(type(model).forward).parameters)
    texts = TextInputs.of(model, checkpoint.load_tokenizer(), accepted)
    return _side_by_side(texts, ImageInputs.of(model, checkpoint.load_processor("image processor"), accepted))


def text_of(modality: Modality) -> TextInputs | None:
    """Return the part of a modality that is text; None where there is none."""
    if isinstance(modality, WithDecoder):
        return text_of(modality.encoder)
    if isinstance(modality, SideBySide):
        return next((text for part in modality.parts if (text := text_of(part)) is not None), None)
    if isinstance(modality, PaddedTexts):
        return modality.texts
    return modality if isinstance(modality, TextInputs) else None


def _reads(model: Any, checkpoint: Checkpoint, accepted: tuple[str, ...]) -> bool:
    """Whether a model of sound is exported as one of text, which it takes as well."""
    return "input_ids" in accepted and checkpoint.task in _TEXT_TASKS and not _is_dual(model)


def _left_out(accepted: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a file of text alone leaves out of a model that accepts these inputs."""
    return tuple(
        kind for kind, parts in _BESIDE_TEXT.items() if any(part in name for part in parts for name in accepted)
    )


def _is_dual(model: Any) -> bool:
    """Whether a model compares what two encoders make: it has a weight for how clearly they agree."""
    return any(name.startswith("logit_scale") for name, _ in model.named_parameters(recurse=False))


def _text_and_images(model: Any, checkpoint: Checkpoint, accepted: tuple[str, ...], text: str | None) -> Modality:
    # A dual encoder projects both into one space; models that read pictures among words need them placed by hand.
    dual = checkpoint.task in _DUAL_TASKS or _is_dual(model)
    if not dual and checkpoint.task not in _TEXT_TASKS:
        raise ExportError(
            f"{type(model).__name__} takes pictures among the words of a text (input_ids and pixel_values)",
            f"pass the --task of its text part ({', '.join(_TEXT_TASKS)}), or save a part of it alone",
        )
    texts = TextInputs.of(model, checkpoint.load_tokenizer(), accepted, text=text)
    if not dual:
        return replace(texts, left_out=_left_out(accepted))
    images = ImageInputs.of(model, checkpoint.load_processor("image processor"), accepted)
    return _side_by_side(texts, images)


def _side_by_side(texts: TextInputs, images: ImageInputs) -> SideBySide:
    return SideBySide((replace(texts, batch_axis="text_batch_size"), replace(images, batch_axis="image_batch_size")))
