"""What turns images and sound into the inputs of a tiny model: its own kind of processor, at the size of the model.

The files are written from tables: the classes themselves need Pillow, torchvision or more to be built.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

# Those that transformers' auto mapping lacks have what their papers name.
_OTHER_IMAGE_PROCESSORS = {"dinov2_with_registers": "BitImageProcessor", "hgnet_v2": "ConvNextImageProcessor"}
# How these say their size; the others say height and width.
_BY_SHORTEST_EDGE = frozenset(
    {
        *("BitImageProcessor", "CLIPImageProcessor", "ConvNextImageProcessor", "LevitImageProcessor"),
        *("MobileNetV1ImageProcessor", "MobileNetV2ImageProcessor", "MobileViTImageProcessor"),
        *("PoolFormerImageProcessor", "TextNetImageProcessor"),
    }
)
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
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    kind = config.model_type
    name = _OTHER_IMAGE_PROCESSORS.get(kind) or IMAGE_PROCESSOR_MAPPING_NAMES[kind]["torchvision"]
    height, width = image_size(config)
    content: dict[str, Any] = {"image_processor_type": name, "do_resize": True, "do_rescale": True}
    if name == "Siglip2ImageProcessor":
        vision = config.vision_config
        content |= {"patch_size": vision.patch_size, "max_num_patches": vision.num_patches}
    elif name == "ImageGPTImageProcessor":
        # Colours are the model's words: as many as it has, less the one that starts an image.
        levels = [-1 + 2 * step / 7 for step in range(8)]
        clusters = [[red, green, blue] for red in levels for green in levels for blue in levels]
        content |= {"size": {"height": height, "width": width}, "clusters": clusters[: config.vocab_size - 1]}
    elif name in _BY_SHORTEST_EDGE:
        content["size"] = {"shortest_edge": height}
        if name != "ConvNextImageProcessor":
            content |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
        else:
            content["crop_pct"] = 1.0
    else:
        content["size"] = {"height": height, "width": width}
        content["crop_size"] = {"height": height, "width": width}
    if name not in ("ImageGPTImageProcessor", "MobileViTImageProcessor"):
        content |= {"do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def feature_extractor(config: Any) -> Any:
    """Return the feature extractor of a model of sound, at the sizes of its configuration.

    Raises:
        ValueError: none is known for its type.
        ImportError: it needs a package that is not installed.
    """
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    kind = config.model_type
    name = FEATURE_EXTRACTOR_MAPPING_NAMES.get(kind)
    name = _OTHER_EXTRACTORS.get(kind, name)
    if name is None:
        raise ValueError(f"no feature extractor is known for {kind}")
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
