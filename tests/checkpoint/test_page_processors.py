"""Pages are cut and written, and queries written, as the processors of transformers do; others are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.page_processors import (
    PageProcessor,
    page_limit,
    require_known_pages,
    require_known_queries,
    write_page_query,
)
from onnxtool.checkpoint.picture_files import read_picture
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from retrieval.tiny_pages import colmodernvbert_processor, colqwen2_processor, write_pages

MAKERS: dict[str, Callable[..., Any]] = {"ColModernVBert": colmodernvbert_processor, "ColQwen2": colqwen2_processor}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of several sizes."""
    return write_pages(tmp_path_factory.mktemp("written") / "pages")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ColModernVBert", {}),
        ("ColModernVBert", {"after_text": True, "size": {"longest_edge": 33}}),
        ("ColModernVBert", {"size": {"height": 40, "width": 24}, "resample": 3}),
        ("ColModernVBert", {"do_resize": False, "image_mean": [0.1, 0.2, 0.3]}),
        ("ColModernVBert", {"do_image_splitting": False, "do_normalize": False}),
        ("ColModernVBert", {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 512}, "do_pad": False}),
        ("ColQwen2", {}),
        ("ColQwen2", {"size": {"shortest_edge": 2000, "longest_edge": 9000}, "merge_size": 3, "patch_size": 2}),
        ("ColQwen2", {"min_pixels": 64, "max_pixels": 300, "temporal_patch_size": 1, "resample": 2}),
        ("ColQwen2", {"do_rescale": False, "do_convert_rgb": False}),
    ],
)
def test_pages_are_those_of_transformers(
    name: str, settings: dict[str, Any], pages: list[Path], tmp_path: Path
) -> None:
    """Bit for bit: pixels, sizes and tokens."""
    processor = MAKERS[name](**settings)
    processor.save_pretrained(tmp_path)
    ours = PageProcessor.of(CheckpointFolder(tmp_path), f"{name}Processor")
    is_huge = settings.get("size", {}).get("longest_edge", 0) > 1000
    for page in pages[: 1 if is_huge else None]:
        picture = read_picture(page)
        if is_huge or settings.get("do_resize") is False:
            picture = picture.crop((0, 0, 32, 2 if is_huge else 16))
        expected = processor.process_images(images=[picture])
        found = ours.prepare(picture)
        assert set(expected) - set(found) <= {"pixel_attention_mask"}
        for key, array in found.items():
            assert array.dtype == expected[key][0].numpy().dtype
            np.testing.assert_array_equal(array, expected[key][0].numpy(), err_msg=f"{page.name} {key}")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("prefix", [None, "", "Look for: "])
def test_queries_are_those_of_transformers(name: str, prefix: str | None, tmp_path: Path) -> None:
    """With the prefix of the file; an empty one is none, for which each has its own."""
    processor = MAKERS[name]()
    processor.save_pretrained(tmp_path)
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"query_prefix": prefix}))
    folder = CheckpointFolder(tmp_path)
    tokenizer = TextTokenizer(folder)
    found = tokenizer.encode([write_page_query("a cat", folder, tokenizer)])[0].ids
    if prefix:
        processor.query_prefix = prefix
    assert list(found) == processor.process_queries(text=["a cat"])["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ColQwen2", {"processor_class": "NeoMMEProcessor"}, "names the processor 'NeoMMEProcessor'"),
        ("ColQwen2", {"processor_class": ["ColQwen2Processor"]}, "names the processor ['ColQwen2Processor']"),
        ("ColQwen2", {"processor_class": None}, "names the processor None"),
        ("ColQwen2", {"images_kwargs": {"do_resize": False}}, "does not follow: images_kwargs"),
        ("ColQwen2", {"visual_prompt_prefix": 3}, "visual_prompt_prefix is 3, and no text"),
        ("ColQwen2", {"visual_prompt_prefix": "<|image_pad|><|image_pad|>"}, "has not one <|image_pad|>"),
        ("ColModernVBert", {"image_seq_len": -1}, "image_seq_len is no positive number"),
        ("ColModernVBert", {"image_seq_len": True}, "image_seq_len is no positive number"),
        ("ColQwen2", {"image_processor": {"image_processor_type": "CLIPImageProcessor"}}, "which onnxtool does not"),
        ("ColQwen2", {"image_processor.size": {"min_pixels": 3}}, "size is {'min_pixels': 3}, and not a number for"),
        ("ColQwen2", {"image_processor.size": 3}, "and not a number for longest_edge and shortest_edge"),
        ("ColQwen2", {"image_processor.max_pixels": 0}, "and not a number for longest_edge and shortest_edge"),
        ("ColQwen2", {"image_processor.patch_size": "4"}, "patch_size is '4', and no positive number"),
        ("ColQwen2", {"image_processor.do_center_crop": True}, "pages are not cropped"),
        ("ColQwen2", {"image_processor.max_frames": 3}, "does not follow: max_frames 3"),
        ("ColModernVBert", {"image_processor.size": {"shortest_edge": 9}}, "for longest_edge or height and width"),
        ("ColModernVBert", {"image_processor.max_image_size": {"longest_edge": 0}}, "and not a number for longest_"),
        ("ColModernVBert", {"image_processor.max_image_size": None}, "max_image_size is None, and not a number"),
        ("ColModernVBert", {"image_processor.do_image_splitting": 1}, "do_image_splitting is 1, and not true or"),
        ("ColModernVBert", {"tokenizer.truncation": True}, "tokenizer_config.json of"),
        ("ColModernVBert", {"tokenizer.do_resize": False}, "does not follow: do_resize False"),
        ("ColQwen2", {"tokenizer.image_token": "<|im_end|>"}, "has another image_token than <|image_pad|>"),
    ],
)
def test_processors_that_are_not_followed_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """By name and value, in one clear error, wherever it is said."""
    MAKERS[name]().save_pretrained(tmp_path)
    file, tokenizer_file = tmp_path / "processor_config.json", tmp_path / "tokenizer_config.json"
    settings, tokenizer = json.loads(file.read_text()), json.loads(tokenizer_file.read_text())
    if "processor_class" in change:
        tokenizer.pop("processor_class")
    for key, value in change.items():
        place, _, inner = key.partition(".")
        {"": settings, "image_processor": settings["image_processor"], "tokenizer": tokenizer}[place if inner else ""][
            inner or key
        ] = value
    file.write_text(json.dumps(settings))
    tokenizer_file.write_text(json.dumps(tokenizer))
    with pytest.raises(InputError) as raised:
        PageProcessor.of(CheckpointFolder(tmp_path), f"{name}Processor")
    assert message in raised.value.message


def test_a_processor_without_a_name_is_that_of_the_model(tmp_path: Path) -> None:
    """As transformers finds it."""
    colqwen2_processor().save_pretrained(tmp_path)
    for name in ("processor_config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(settings | {"processor_class": None}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "colqwen2"}))
    require_known_queries(CheckpointFolder(tmp_path))


FORWARD = {"method": "forward", "method_output_name": "embeddings"}
MODULES: dict[str, Any] = {
    "modules.json": [
        {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
        {"type": "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask", "path": "1_MultiVectorMask"},
    ],
    "sentence_bert_config.json": {
        "transformer_task": "retrieval",
        "modality_config": {"text": FORWARD, "image": FORWARD},
        "module_output_name": "token_embeddings",
    },
    "config_sentence_transformers.json": {"model_type": "MultiVectorEncoder", "prompts": {"query": "", "document": ""}},
    "1_MultiVectorMask/config.json": {"skiplist_words": [], "skiplist_tasks": ["document"]},
}


def write_modules(folder: Path, change: dict[str, Any] | None = None, file: str = "") -> CheckpointFolder:
    """Write what sentence-transformers saves beside a retriever of pages, with `change` in `file`."""
    (folder / "1_MultiVectorMask").mkdir()
    for name, content in MODULES.items():
        (folder / name).write_text(json.dumps({**content, **(change or {})} if name == file else content))
    return CheckpointFolder(folder)


def test_modules_of_a_retriever_cut_pages_and_queries_to_a_limit(tmp_path: Path) -> None:
    """Which is the tokenizer's, or that of the module; transformers alone cuts none."""
    processor = colqwen2_processor()
    processor.tokenizer.model_max_length = 64
    processor.save_pretrained(tmp_path)
    plain = PageProcessor.of(CheckpointFolder(tmp_path), "ColQwen2Processor")
    folder = write_modules(tmp_path)
    limited = PageProcessor.of(folder, "ColQwen2Processor")
    small, large = Image.new("RGB", (16, 16)), Image.new("RGB", (64, 64))
    np.testing.assert_array_equal(limited.prepare(small)["input_ids"], plain.prepare(small)["input_ids"])
    assert len(plain.prepare(large)["input_ids"]) == 93
    with pytest.raises(InputError, match=r"has 93 tokens, more than 64 \(model_max_length"):
        limited.prepare(large)
    settings = {**MODULES["sentence_bert_config.json"], "max_seq_length": 9}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    limit = page_limit(CheckpointFolder(tmp_path))
    assert limit is not None
    assert limit.tokens == 9


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("sentence_bert_config.json", {"query_length": 9}, "query_length 9"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task 'fill-mask'"),
        ("sentence_bert_config.json", {"modality_config": {"text": FORWARD}}, "modality_config {'text'"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length -1"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case True"),
        ("sentence_bert_config.json", {"processing_kwargs": {"image": {"do_resize": False}}}, "processing_kwargs"),
        ("config_sentence_transformers.json", {"prompts": {"query": "Q: "}}, "prompts {'query': 'Q: '}"),
        ("config_sentence_transformers.json", {"truncate_dim": 4}, "truncate_dim 4"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "dot"}, "similarity_fn_name 'dot'"),
        ("1_MultiVectorMask/config.json", {"keep_only_token_ids": "all"}, "keep_only_token_ids of 1_Multi"),
        ("1_MultiVectorMask/config.json", {"skiplist_words": ["a"]}, "skiplist_words ['a'] of MultiVectorMask"),
    ],
)
def test_modules_of_a_retriever_that_are_not_followed_are_refused(
    file: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """By name, value and file."""
    colqwen2_processor().save_pretrained(tmp_path)
    with pytest.raises(InputError) as raised:
        require_known_queries(write_modules(tmp_path, change, file))
    assert message in raised.value.message


def test_tokens_that_no_page_has_cannot_be_all_that_count(tmp_path: Path) -> None:
    """There would be no vector."""
    colqwen2_processor().save_pretrained(tmp_path)
    folder = write_modules(tmp_path, {"keep_only_token_ids": [9999]}, "1_MultiVectorMask/config.json")
    with pytest.raises(InputError, match="has no token of pages"):
        PageProcessor.of(folder, "ColQwen2Processor").prepare(Image.new("RGB", (16, 16)))


def test_a_processor_that_sentence_transformers_calls_otherwise_is_refused(tmp_path: Path) -> None:
    """Version 6.2 gives ColModernVBERT's pages no tokens, and fails on them."""
    colmodernvbert_processor().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="6.2 calls ColModernVBertProcessor so that pages have no tokens") as raised:
        require_known_pages(write_modules(tmp_path))
    assert "without modules.json" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "settings", "size", "message"),
    [
        ("ColQwen2", {}, (300, 1), "sides of a ratio above 200"),
        ("ColQwen2", {"do_resize": False}, (30, 32), "has no whole number of patches"),
        ("ColQwen2", {"min_pixels": 1 << 40, "max_pixels": 1 << 41}, (8, 8), "becomes one of"),
        ("ColQwen2", {"patch_size": 1, "merge_size": 1, "min_pixels": 1 << 20, "max_pixels": 1 << 20}, (8, 8), "parts"),
        ("ColModernVBert", {"max_image_size": {"longest_edge": 1}, "size": {"longest_edge": 999}}, (8, 8), "parts"),
        ("ColModernVBert", {"max_image_size": {"longest_edge": 99999}}, (8, 8), "becomes one of 99999 x 99999"),
        ("ColModernVBert", {"tokens_of_tile": 10**9}, (8, 8), "a page would have 17000000000 tokens"),
        ("ColQwen2", {"temporal_patch_size": 10**9}, (8, 8), "parts"),
    ],
)
def test_pages_of_hostile_sizes_end_in_one_error(
    name: str, settings: dict[str, Any], size: tuple[int, int], message: str, tmp_path: Path
) -> None:
    """Before memory is asked for."""
    MAKERS[name](**settings).save_pretrained(tmp_path)
    processor = PageProcessor.of(CheckpointFolder(tmp_path), f"{name}Processor")
    with pytest.raises(InputError) as raised:
        processor.prepare(Image.new("RGB", size))
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("processor_config.json", '{"processor_class": "ColQwen', "is malformed: not JSON"),
        ("processor_config.json", "[]", "is malformed: "),
        ("tokenizer_config.json", b"\xff\xfe", "is malformed: not JSON"),
        ("tokenizer.json", '{"version": "1.0"', "cannot read"),
        ("modules.json", '[{"type": "sentence_transformers.models.Transformer", "path": "../.."}]', "path"),
        ("modules.json", '[{"type": "sentence_transformers.models.Transformer"', "is malformed: not JSON"),
    ],
)
def test_damaged_files_end_in_one_error(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    """Each names the file."""
    colqwen2_processor().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as raised:
        PageProcessor.of(CheckpointFolder(tmp_path), "ColQwen2Processor")
    assert name in raised.value.message
    assert message in raised.value.message


def test_a_tokenizer_without_the_token_of_pictures_is_refused(tmp_path: Path) -> None:
    """It would be read as letters."""
    colqwen2_processor().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|image_pad|>", "<|picture_pad|>"))
    require_known_pages(CheckpointFolder(tmp_path))
    with pytest.raises(InputError, match="has no token <|image_pad|>"):
        PageProcessor.of(CheckpointFolder(tmp_path), "ColQwen2Processor")
