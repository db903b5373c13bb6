"""Small dual encoders of texts and images, saved by sentence-transformers, and images to compare them on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import CLIPModel

from tests.retrieval.checkpoints import Case, draw, seeded, wordpiece

PICTURES = "pictures"
_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_VISION = {**_TEXT, "image_size": 32, "patch_size": 8}
_SIZES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_LENGTH, _WIDTH = 128, 16


def _base(folder: Path, model: torch.nn.Module, processor: str, **settings: Any) -> str:
    draw(model)
    model.eval().save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    content = {"image_processor_type": processor, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def _clip(folder: Path) -> str:
    tokenizer = wordpiece()
    ids = {"eos_token_id": tokenizer.sep_token_id, "bos_token_id": tokenizer.cls_token_id}
    text = {**_TEXT, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": _LENGTH}
    config = transformers.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=_WIDTH)
    return _base(folder, transformers.CLIPModel(config), "CLIPImageProcessor", **_SIZES)


def _siglip(folder: Path) -> str:
    text = {**_TEXT, "vocab_size": len(wordpiece()), "max_position_embeddings": _LENGTH}
    config = transformers.SiglipConfig(text_config=text, vision_config=_VISION)
    size = {"height": 32, "width": 32}
    return _base(folder, transformers.SiglipModel(config), "SiglipImageProcessor", size=size)


def _dual(
    *behind: Callable[[], torch.nn.Module],
    base: Callable[[Path], str] = _clip,
    first: Callable[..., torch.nn.Module] = Transformer,
    truncate_dim: int | None = None,
    **settings: Any,
) -> Callable[[Path, Path], None]:
    def make(folder: Path, place: Path) -> None:
        modules = [first(base(place), **settings), *(module() for module in behind)]
        SentenceTransformer(modules=modules, truncate_dim=truncate_dim, device="cpu").save_pretrained(str(folder))

    return make


def _projection() -> torch.nn.Module:
    return seeded(Dense(_WIDTH, 12))


def picture_cases() -> Iterator[Case]:
    """List the checkpoints."""
    yield Case("CLIP", PICTURES, _dual())
    yield Case("CLIP, saved as CLIPModel", PICTURES, _dual(first=CLIPModel))
    yield Case("CLIP, Normalize", PICTURES, _dual(Normalize))
    yield Case("CLIP, Dense and Normalize", PICTURES, _dual(_projection, Normalize))
    yield Case("CLIP, truncate_dim", PICTURES, _dual(truncate_dim=8))
    yield Case("CLIP, settings of images", PICTURES, _dual(processing_kwargs={"image": {"do_center_crop": False}}))
    yield Case("SigLIP, whose texts depend on their padding", PICTURES, _dual(base=_siglip))


def write_pictures(folder: Path) -> list[Path]:
    """Write images of several sizes and kinds."""
    folder.mkdir()
    for number, (height, width) in enumerate([(60, 80), (90, 40), (33, 35), (32, 32), (300, 200), (20, 17)]):
        coarse = np.random.default_rng(number).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.png")
        picture.save(folder / f"{number}.jpg")
    Image.open(folder / "0.png").convert("L").save(folder / "grey.png")
    Image.open(folder / "0.png").quantize(9).save(folder / "palette.png")
    Image.open(folder / "0.png").convert("RGBA").save(folder / "alpha.webp")
    exif = Image.Exif()
    exif[0x112] = 6
    Image.open(folder / "1.png").save(folder / "turned.jpg", exif=exif)
    return sorted(folder.iterdir())
