"""Images, pages and queries become what transformers makes of them; hostile settings end in one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.image_utils import load_image

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.page_modules import page_limit, require_known_pages
from onnxtool.checkpoint.picture_files import read_picture
from onnxtool.errors import InputError
from onnxtool.runtime.pictures import PageProcessor, PictureProcessor
from tests.retrieval.tiny_pages import colmodernvbert_processor, colqwen2_processor, write_pages

SMALL = {"size": {"shortest_edge": 32}, "crop_size": {"height": 40, "width": 24}}
MAKERS: dict[str, Callable[..., Any]] = {"ColModernVBert": colmodernvbert_processor, "ColQwen2": colqwen2_processor}


def noise(height: int, width: int, channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw areas and edges of all colours: uint8 [H, W, C]."""
    coarse = np.random.default_rng(height).integers(0, 256, (height // 7 + 2, width // 7 + 2, channels), np.uint8)
    planes = [np.array(Image.fromarray(plane).resize((width, height), 3)) for plane in np.moveaxis(coarse, 2, 0)]
    return np.array(planes).transpose(1, 2, 0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of every kind."""
    folder = tmp_path_factory.mktemp("pictures")
    plain = Image.fromarray(noise(60, 80))
    turned = Image.Exif()
    turned[0x112] = 6
    plain.save(folder / "plain.png")
    plain.save(folder / "turned.jpg", exif=turned)
    plain.convert("CMYK").save(folder / "four_colours.jpg")
    plain.convert("1").save(folder / "one_bit.png")
    palette = plain.quantize(7)
    palette.save(folder / "palette.png")
    palette.save(folder / "palette_with_transparency.png", transparency=2)
    plain.save(folder / "animation.gif", save_all=True, append_images=[Image.fromarray(noise(50, 80))])
    Image.fromarray(noise(200, 61)).save(folder / "high.webp")
    Image.fromarray(noise(20, 17)).save(folder / "small.bmp")
    Image.fromarray(noise(60, 80, 4), "RGBA").save(folder / "alpha.png")
    Image.fromarray(noise(60, 80, 1)[..., 0].astype(np.uint16) * 257).save(folder / "sixteen_bits.png")
    return folder


def processor_of(folder: Path, name: Any, settings: dict[str, Any]) -> PictureProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name, **settings}))
    return PictureProcessor.of(CheckpointFolder(folder))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("CLIPImageProcessor", SMALL),
        ("CLIPImageProcessorFast", {"size": 30, "crop_size": 33, "resample": 2}),
        ("SiglipImageProcessor", {"size": {"height": 40, "width": 30}, "do_convert_rgb": None}),
    ],
)
def test_pixels_are_those_of_transformers(name: str, settings: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    """Bit for bit those of its processors with Pillow, of files of every kind."""
    ours = processor_of(tmp_path, name, settings)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for picture in sorted(pictures.iterdir()):
        with Image.open(picture) as opened:  # given its path, transformers leaves an animation open
            expected = theirs([load_image(opened)], return_tensors="np")["pixel_values"][0]
        found = ours.prepare(read_picture(picture))["pixel_values"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected, err_msg=picture.name)


def test_settings_nested_in_those_of_the_processor_win(tmp_path: Path) -> None:
    """Transformers 5 saves them so, and reads them before the file of earlier versions."""
    nested = {"image_processor": {"feature_extractor_type": "CLIPFeatureExtractor", **SMALL}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    processor = processor_of(tmp_path, "ViTImageProcessor", {})
    assert processor.prepare(Image.new("RGB", (50, 60)))["pixel_values"].shape == (3, 40, 24)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Qwen2VLImageProcessor", {}, "names the image processor Qwen2VLImageProcessor, which onnxtool does not"),
        (None, {}, "the processor of "),
        (["CLIPImageProcessor"], {}, "the processor of "),
        ("Mine", {"auto_map": {"AutoImageProcessor": "evil.Processor"}}, "contains custom code"),
        ("CLIPImageProcessor", {"size": {"height": 9}}, "size must have one of"),
        ("CLIPImageProcessor", {"size": 10**9}, "would become up to 1000000000000000000 pixels"),
        ("CLIPImageProcessor", {"crop_size": {"height": 9, "width": 99999}}, "would become up to 9999800001 pixels"),
        ("CLIPImageProcessor", {"size": {"shortest_edge": "9"}}, "make no sense"),
        ("CLIPImageProcessor", {"resample": 9}, "fails: "),
        ("CLIPImageProcessor", {"image_std": [1, 1, 0]}, "not finite numbers"),
        ("CLIPImageProcessor", {"image_mean": [1, 1]}, "fails: mean must have 3 elements"),
        ("CLIPImageProcessor", {"rescale_factor": float("inf")}, "not finite numbers"),
    ],
)
def test_settings_that_make_no_sense_are_one_error(
    name: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """When the processor is loaded, or with the first image; no code of the checkpoint runs."""
    (tmp_path / "evil.py").write_text("raise SystemExit(3)")
    with pytest.raises(InputError) as raised:
        processor_of(tmp_path, name, settings).prepare(Image.new("RGB", (50, 50), "red"))
    assert message in raised.value.message


def test_proportions_that_make_a_small_picture_huge_are_refused(tmp_path: Path) -> None:
    """The shortest edge of a line is one pixel."""
    with pytest.raises(InputError, match=r"65536 x 1 pixels would become up to 3288334336 pixels"):
        processor_of(tmp_path, "CLIPImageProcessor", {}).prepare(Image.new("RGB", (1 << 16, 1)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ColModernVBert", {"after_text": True, "size": {"longest_edge": 33}}),
        ("ColModernVBert", {"do_image_splitting": False}),
        ("ColQwen2", {}),
        ("ColQwen2", {"min_pixels": 64, "max_pixels": 300, "temporal_patch_size": 1, "resample": 2}),
    ],
)
def test_pages_are_those_of_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit: pixels, sizes and tokens."""
    processor = MAKERS[name](**settings)
    processor.save_pretrained(tmp_path)
    ours = PageProcessor.of(CheckpointFolder(tmp_path), f"{name}Processor")
    for page in write_pages(tmp_path / "pages"):
        picture = read_picture(page)
        expected = processor.process_images(images=[picture])
        found = ours.prepare(picture)
        assert set(expected) - set(found) <= {"pixel_attention_mask"}
        for key, array in found.items():
            assert array.dtype == expected[key][0].numpy().dtype
            np.testing.assert_array_equal(array, expected[key][0].numpy(), err_msg=f"{page.name} {key}")


@pytest.mark.parametrize(("name", "prefix"), [("ColModernVBert", "Look for: "), ("ColQwen2", ""), ("ColQwen2", "Q: ")])
def test_queries_are_those_of_transformers(name: str, prefix: str, tmp_path: Path) -> None:
    """With the prefix of the file; an empty one is none, for which each has its own."""
    processor = MAKERS[name]()
    processor.save_pretrained(tmp_path)
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"query_prefix": prefix}))
    found = PageProcessor.of(CheckpointFolder(tmp_path)).read_query("a cat")
    processor.query_prefix = prefix or processor.query_prefix
    expected = processor.process_queries(text=["a cat"])
    assert set(found) == set(expected)
    np.testing.assert_array_equal(found["input_ids"], expected["input_ids"].numpy())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ColQwen2", {"processor_class": "NeoMMEProcessor"}, "names the processor 'NeoMMEProcessor'"),
        ("ColQwen2", {"processor_class": ["ColQwen2Processor"]}, "names the processor ['ColQwen2Processor']"),
        ("ColQwen2", {"processor_class": None}, "names the processor None"),
        ("ColQwen2", {"images_kwargs": {"do_resize": False}}, "does not support: images_kwargs"),
        ("ColQwen2", {"audio_tokenizer": {"audio_tokenizer_name_or_path": "a/b"}}, "does not support: audio_tokenizer"),
        ("ColQwen2", {"visual_prompt_prefix": 3}, "the processor of "),
        ("ColModernVBert", {"image_seq_len": -1}, "tokens"),
        ("ColQwen2", {"image_processor": {"image_processor_type": "CLIPImageProcessor"}}, "which onnxtool does not"),
        ("ColQwen2", {"image_processor.size": {"min_pixels": "a"}}, "the processor of "),
        ("ColQwen2", {"image_processor.patch_size": "4"}, "make no sense"),
        ("ColModernVBert", {"image_processor.max_image_size": {"longest_edge": 0}}, "make no sense"),
        ("ColModernVBert", {"image_processor.max_image_size": None}, "make no sense"),
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
        {"": settings, "image_processor": settings["image_processor"]}[place if inner else ""][inner or key] = value
    file.write_text(json.dumps(settings))
    tokenizer_file.write_text(json.dumps(tokenizer))
    with pytest.raises(InputError) as raised:
        PageProcessor.of(CheckpointFolder(tmp_path), f"{name}Processor").prepare(Image.new("RGB", (16, 16)))
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("name", "settings", "size", "message"),
    [
        ("ColQwen2", {}, (300, 1), "aspect ratio must be smaller than 200"),
        ("ColQwen2", {"do_resize": False}, (30, 32), "the processor of "),
        ("ColQwen2", {"min_pixels": 1 << 40, "max_pixels": 1 << 41}, (8, 8), "would become up to"),
        ("ColQwen2", {"patch_size": 1, "merge_size": 1, "min_pixels": 1 << 20, "max_pixels": 1 << 20}, (8, 8), "parts"),
        ("ColQwen2", {"temporal_patch_size": 10**9}, (8, 8), "would become up to"),
        ("ColModernVBert", {"max_image_size": {"longest_edge": 1}, "size": {"longest_edge": 999}}, (8, 8), "parts"),
        ("ColModernVBert", {"max_image_size": {"longest_edge": 99999}}, (8, 8), "would become up to"),
        ("ColModernVBert", {"tokens_of_tile": 10**9}, (8, 8), "a page would have 26000000000 tokens"),
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


def test_a_processor_without_a_name_is_that_of_the_model(tmp_path: Path) -> None:
    """As transformers finds it."""
    colqwen2_processor().save_pretrained(tmp_path)
    for name in ("processor_config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(settings | {"processor_class": None}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "colqwen2"}))
    assert require_known_pages(CheckpointFolder(tmp_path))[0] == "ColQwen2Processor"


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
        require_known_pages(write_modules(tmp_path, change, file))
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
    ("name", "content", "message"),
    [
        ("processor_config.json", '{"processor_class": "ColQwen', "is malformed: not JSON"),
        ("processor_config.json", "[]", "is malformed: "),
        ("tokenizer_config.json", b"\xff\xfe", "is malformed: not JSON"),
        ("tokenizer.json", '{"version": "1.0"', "cannot read"),
        ("modules.json", '[{"type": "sentence_transformers.models.Transformer", "path": "../.."}]', "path"),
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
