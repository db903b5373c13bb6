"""Tiny retrievers whose pages have as many tokens as their size asks for, and the processors of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

# Height and width of pages: wide, high, square, tiny, one that is a tile, and odd ones.
SIZES = ((60, 80), (90, 40), (33, 33), (16, 16), (5, 9), (31, 250))
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_MODERN = ("<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def write_pages(folder: Path) -> list[Path]:
    """Write a page of each of SIZES."""
    folder.mkdir()
    for number, (height, width) in enumerate(SIZES):
        coarse = np.random.default_rng(number).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


def colmodernvbert_processor(*, after_text: bool = False, tokens_of_tile: int = 4, **settings: Any) -> Any:
    """Make a processor; with `after_text`, its tokenizer frames a text with tokens of its own."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer((*_MODERN, *tiles), pad="<pad>", eos="</s>", bos="<s>", frames=after_text)
    pixels = Idefics3ImageProcessorPil(
        **({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}} | settings)
    )
    return transformers.ColModernVBertProcessor(pixels, tokenizer, image_seq_len=tokens_of_tile)


def colqwen2_processor(**settings: Any) -> Any:
    """Make a processor."""
    tokenizer = _tokenizer(_QWEN, pad="<|endoftext|>", eos="<|im_end|>")
    pixels = Qwen2VLImageProcessorPil(
        **({"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}} | settings)
    )
    return transformers.ColQwen2Processor(pixels, tokenizer)


def colmodernvbert(folder: Path) -> Any:
    """Save a model with its processor, and return the processor."""
    processor = colmodernvbert_processor()
    ids = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    text = _TEXT | ids | {
        "model_type": "modernbert", "vocab_size": len(processor.tokenizer), "num_hidden_layers": 2,
        "global_attn_every_n_layers": 2, "local_attention": 16, "max_position_embeddings": 512,
    }  # fmt: skip
    vision = _TEXT | {
        "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "num_hidden_layers": 1,
        "vision_use_head": False,
    }  # fmt: skip
    vlm = transformers.ModernVBertConfig(
        text_config=text, vision_config=vision, pixel_shuffle_factor=2, image_token_id=processor.image_token_id
    )
    config = transformers.ColModernVBertConfig(vlm_config=vlm, embedding_dim=8)
    return _save(transformers.ColModernVBertForRetrieval(config), folder, processor)


def colqwen2(folder: Path) -> Any:
    """Save a model with its processor, and return the processor."""
    processor = colqwen2_processor()
    text = _TEXT | {
        "vocab_size": len(processor.tokenizer), "num_hidden_layers": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 3, "mlp_ratio": 2, "patch_size": 4}
    names = {"image": "image_pad", "video": "im_start", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{of}_token_id": processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for of, name in names.items()}
    vlm = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    config = transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=8)
    return _save(transformers.ColQwen2ForRetrieval(config), folder, processor)


def colpali(folder: Path) -> Any:
    """Save a model with its processor, and return the processor."""
    tokenizer = _tokenizer(("<pad>", "<eos>", "<bos>", "<image>"), pad="<pad>", eos="<eos>", bos="<bos>")
    pixels = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    pixels.image_seq_length = 16
    processor = transformers.ColPaliProcessor(pixels, tokenizer)
    text = _TEXT | {
        "model_type": "gemma", "vocab_size": len(tokenizer), "num_hidden_layers": 1, "num_key_value_heads": 1,
        "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    vision = _TEXT | {
        "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "num_hidden_layers": 1,
        "projection_dim": 32, "vision_use_head": False,
    }  # fmt: skip
    vlm = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=processor.image_token_id, projection_dim=32
    )
    config = transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=8)
    return _save(transformers.ColPaliForRetrieval(config), folder, processor)


def embed(model: Any, processor: Any, pages: Sequence[Path]) -> list[Any]:
    """Return what the model makes of what the processor makes, one page at a time: float [S, W] each."""
    with torch.inference_mode():
        made = [processor.process_images(images=[Image.open(page).convert("RGB")]) for page in pages]
        return [model(**inputs).embeddings[0] for inputs in made]


def _save(model: Any, folder: Path, processor: Any) -> Any:
    """Save a model with weights that are large enough for a step that is left out to show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor


def _tokenizer(special: Sequence[str], *, pad: str, eos: str, bos: str | None = None, frames: bool = False) -> Any:
    """Make a tokenizer of bytes, as those of both models are, with special tokens first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(special))
    if frames:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=[(bos, 1), (eos, 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=2048, pad_token=pad, eos_token=eos, bos_token=bos
    )
