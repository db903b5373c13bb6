"""What turns images and sound into the inputs of a tiny model: its own kind of processor, at the size of the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

# Those that transformers' auto mapping lacks have what their papers name.
_OTHER_IMAGE_PROCESSORS = {
    "dinov2_with_registers": {"pil": "BitImageProcessorPil"},
    "hgnet_v2": {"pil": "ConvNextImageProcessorPil"},
}
_IMAGE_SIZE = 64


def image_size(config: Any) -> tuple[int, int]:
    """Return height and width of the images of a model."""
    part = getattr(config, "vision_config", None) or config
    size = getattr(part, "image_size", None)
    if size is None and isinstance(positions := getattr(part, "n_positions", None), int):
        size = math.isqrt(positions)  # a token a pixel
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return (size, size) if isinstance(size, int) else (_IMAGE_SIZE, _IMAGE_SIZE)


def save_image_processor(config: Any, folder: Path) -> None:
    """Write preprocessor_config.json for a model of `config` into `folder`.

    Raises:
        KeyError: no image processor is known for its type.
        ImportError: it needs a package that is not installed.
    """
    kind = config.model_type
    names = _OTHER_IMAGE_PROCESSORS.get(kind) or IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    processor = getattr(transformers, names.get("pil") or names["torchvision"])()
    height, width = image_size(config)
    for field in ("size", "crop_size"):
        if before := getattr(processor, field, None):
            after = {"height": height, "width": width, "shortest_edge": height}
            setattr(processor, field, {edge: after[edge] for edge, length in dict(before).items() if length})
    processor.do_center_crop = bool(getattr(processor, "crop_size", None))
    if getattr(processor, "crop_pct", None):
        processor.crop_pct = 1.0
    if kind == "siglip2":
        vision = config.vision_config
        processor.patch_size, processor.max_num_patches = vision.patch_size, vision.num_patches
    if kind == "imagegpt":
        # Colours are the model's words: as many as it has, less the one that starts an image.
        levels = [-1 + 2 * step / 7 for step in range(8)]
        clusters = [[red, green, blue] for red in levels for green in levels for blue in levels]
        processor.clusters = clusters[: config.vocab_size - 1]
    processor.save_pretrained(folder)


def feature_extractor(config: Any) -> Any:
    """Return the feature extractor of a model of sound, at the sizes of its configuration.

    Raises:
        KeyError: none is known for its type.
        ImportError: it needs a package that is not installed.
    """
    kind = config.model_type
    name = _OTHER_EXTRACTORS.get(kind) or FEATURE_EXTRACTOR_MAPPING_NAMES[kind]
    return getattr(transformers, name)(**_EXTRACTOR_SIZES.get(name, lambda _config: {})(config))


# wav2vec2-bert reads what SeamlessM4T's extractor makes, whatever the auto mapping says.
_OTHER_EXTRACTORS = {
    "wav2vec2-bert": "SeamlessM4TFeatureExtractor",
    "speech-encoder-decoder": "Wav2Vec2FeatureExtractor",
    "moonshine_streaming": "Wav2Vec2FeatureExtractor",
}


def _whisper_sizes(config: Any) -> dict[str, Any]:
    part = getattr(config, "audio_config", None) or config
    frames = 2 * part.max_source_positions  # the encoder halves them
    return {"feature_size": part.num_mel_bins, "chunk_length": max(1, frames // 100)}


_EXTRACTOR_SIZES: dict[str, Any] = {
    "WhisperFeatureExtractor": _whisper_sizes,
    "ASTFeatureExtractor": lambda config: {"max_length": config.max_length, "num_mel_bins": config.num_mel_bins},
    # Those that normalize over the whole layer were trained with a mask, the others without.
    "Wav2Vec2FeatureExtractor": lambda config: {
        "return_attention_mask": getattr(config, "feat_extract_norm", "layer") == "layer"
    },
}
