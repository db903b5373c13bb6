"""Pictures become the pixels that transformers makes of them; hostile files and settings end in one clear error."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.image_utils import load_image

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.picture_files import MAX_PIXELS, find_pictures, read_picture
from onnxtool.checkpoint.picture_processing import PictureProcessor
from onnxtool.errors import InputError

SMALL = {"size": {"shortest_edge": 32}, "crop_size": {"height": 40, "width": 24}}


def noise(height: int, width: int, channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw areas and edges of all colours: uint8 [H, W, C]."""
    coarse = np.random.default_rng(height).integers(0, 256, (height // 7 + 2, width // 7 + 2, channels), np.uint8)
    return np.array([np.array(Image.fromarray(plane).resize((width, height), 3)) for plane in np.moveaxis(coarse, 2, 0)]
                    ).transpose(1, 2, 0)  # fmt: skip


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


def processor_of(folder: Path, name: str, settings: dict[str, Any]) -> PictureProcessor:
    content = {"image_processor_type": name, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return PictureProcessor.of(CheckpointFolder(folder))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("CLIPImageProcessor", SMALL),
        ("CLIPImageProcessorFast", {"size": 30, "crop_size": 33, "resample": 2}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 32, "longest_edge": 48}, "do_center_crop": None}),
        ("CLIPImageProcessor", {"do_resize": False, "crop_size": [33, 90], "do_rescale": False}),
        ("ChineseCLIPImageProcessor", {"size": [30, 50], "do_center_crop": False, "do_normalize": False}),
        ("SiglipImageProcessor", {"size": 40, "image_mean": 0.3, "image_std": [0.2, 0.3, 0.4], "resample": 5}),
        ("ViTImageProcessor", {"size": 40, "rescale_factor": 0.01, "resample": 0}),
        ("BlipImageProcessor", {"size": 40, "do_convert_rgb": None, "resample": 4}),
        ("DeiTImageProcessor", {"size": 40, "crop_size": 32, "resample": 1}),
        ("EfficientNetImageProcessor", {"size": 40}),
        ("EfficientNetImageProcessor", {"size": 40, "include_top": False, "rescale_offset": True}),
    ],
)
def test_pixels_are_those_of_transformers(name: str, settings: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    """Bit for bit those of its processors with Pillow, from the files themselves and from what it saves again."""
    ours = processor_of(tmp_path, name, settings)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for picture in sorted(pictures.iterdir()):
        with Image.open(picture) as opened:  # given its path, transformers leaves an animation open
            expected = theirs([load_image(opened)], return_tensors="np")["pixel_values"][0]
        found = ours.prepare(read_picture(picture))["pixel_values"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected, err_msg=picture.name)
    theirs.save_pretrained(tmp_path / "saved")
    assert PictureProcessor.of(CheckpointFolder(tmp_path / "saved")) == ours


def test_settings_nested_in_those_of_the_processor_win(tmp_path: Path) -> None:
    """Transformers 5 saves them so, and reads them before the file of earlier versions."""
    nested = {"image_processor": {"feature_extractor_type": "CLIPFeatureExtractor", **SMALL}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert processor_of(tmp_path, "ViTImageProcessor", {}).size == {"shortest_edge": 32}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Qwen2VLImageProcessor", {}, "names the image processor Qwen2VLImageProcessor, which onnxtool does not"),
        (None, {}, "names the image processor of no class"),
        (["CLIPImageProcessor"], {}, "names the image processor of no class"),
        ("CLIPImageProcessor", {"do_sharpen": True}, "settings that onnxtool does not follow: do_sharpen True"),
        ("CLIPImageProcessor", {"do_pad": True, "pad_size": 9}, "does not follow: do_pad True; pad_size 9"),
        ("CLIPImageProcessor", {"include_top": True}, "does not follow: include_top True"),
        ("CLIPImageProcessor", {"auto_map": {"AutoImageProcessor": "evil.Processor"}}, "does not follow: auto_map"),
        ("CLIPImageProcessor", {"data_format": "channels_last"}, "does not follow: data_format"),
        ("CLIPImageProcessor", {"do_resize": "yes"}, "do_resize is 'yes', and not true or false"),
        ("CLIPImageProcessor", {"size": None}, "size is None, and not height and width"),
        ("CLIPImageProcessor", {"size": {"height": 9}}, "and not height and width, or the shortest edge"),
        ("CLIPImageProcessor", {"size": {"height": 9, "width": -9}}, "and not height and width"),
        ("CLIPImageProcessor", {"size": 10**9}, "and not height and width"),
        ("CLIPImageProcessor", {"crop_size": {"shortest_edge": 9}}, "has no height and width"),
        ("CLIPImageProcessor", {"resample": 9}, "resample is 9, and not a filter"),
        ("CLIPImageProcessor", {"image_std": [1, 1, 0]}, "cannot be divided by 0"),
        ("CLIPImageProcessor", {"image_mean": [1, 1]}, "not a number for each of 3 colours"),
        ("CLIPImageProcessor", {"rescale_factor": float("inf")}, "rescale_factor is inf, which is no number"),
        ("CLIPImageProcessor", {"rescale_factor": 10**400}, "rescale_factor is 1000"),
    ],
)
def test_settings_that_are_not_followed_are_refused(
    name: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """By name and value."""
    with pytest.raises(InputError) as raised:
        processor_of(tmp_path, name, settings)
    assert message in raised.value.message


def _bomb(path: Path, size: int) -> None:
    """Write a picture that says to have many pixels, in 60 bytes."""
    parts = {b"IHDR": struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(b"")}
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
            for name, part in parts.items()
        )
    )


_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated.png": (lambda path: path.write_bytes(_png()[: len(_png()) // 2]), "image file is truncated"),
    "text.png": (lambda path: path.write_text("a cat"), "cannot identify image file"),
    "empty.jpg": (lambda path: path.write_bytes(b""), "cannot identify image file"),
    "program.eps": (lambda path: path.write_bytes(_EPS), "cannot identify image file"),
    "large.png": (lambda path: _bomb(path, 12_000), "a picture of 12000 x 12000 pixels, more than"),
    "bomb.png": (lambda path: _bomb(path, 100_000), "could be decompression bomb"),
    "folder.png": (lambda path: path.mkdir(), "Is a directory"),
    "missing.png": (lambda path: None, "no such picture"),
    "name\0.png": (lambda path: None, "embedded null byte"),
}


def _png() -> bytes:
    import io

    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_picture_is_one_error(name: str, tmp_path: Path) -> None:
    """Pictures come from anywhere; formats that run other programs are not decoded."""
    path = tmp_path / name
    write, message = HOSTILE[name]
    write(path)
    with pytest.raises(InputError, match=message):
        read_picture(path)


def test_proportions_that_make_a_small_picture_huge_are_refused(tmp_path: Path) -> None:
    """The shortest edge of a line is one pixel."""
    Image.new("RGB", (1 << 16, 1)).save(tmp_path / "line.png")
    processor = processor_of(tmp_path, "CLIPImageProcessor", {})
    with pytest.raises(InputError, match=r"becomes one of 14680064 x 224"):
        processor.prepare(read_picture(tmp_path / "line.png"))
    assert MAX_PIXELS < 14680064 * 224


def test_pictures_of_a_folder_and_of_lists(pictures: Path, tmp_path: Path) -> None:
    """A folder gives those whose suffix is known by their names; lists name them, and say an id."""
    (tmp_path / "pages").mkdir()
    for name in ("b.png", "a.JPG", "notes.txt", ".hidden.png"):
        (tmp_path / "pages" / name).write_bytes(b"")
    assert [picture.id for picture in find_pictures(tmp_path / "pages")] == ["a.JPG", "b.png"]
    (tmp_path / "list.txt").write_text("pages/b.png\n\npages/a.JPG\n")
    assert [picture.path for picture in find_pictures(tmp_path / "list.txt")] == [
        tmp_path / "pages/b.png",
        tmp_path / "pages/a.JPG",
    ]
    (tmp_path / "list.jsonl").write_text('{"id": 7, "image": "pages/b.png"}\n')
    assert [(picture.id, picture.path.name) for picture in find_pictures(tmp_path / "list.jsonl")] == [("7", "b.png")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("list.txt", "../outside.png", ":1 names '../outside.png', outside the folder of the list"),
        ("list.txt", "a.png\n/etc/passwd", ":2 names '/etc/passwd', outside the folder of the list"),
        ("list.txt", "link.png", ":1 names 'link.png', outside the folder of the list"),
        ("list.txt", "a\0b.png", "which is no path"),
        ("list.txt", "\n", "has no pictures"),
        ("list.jsonl", "{", ":1 is not JSON"),
        ("list.jsonl", "[1]", ":1 has no id"),
        ("list.jsonl", '{"id": "a"}', ":1 has no image that is a path"),
        ("list.jsonl", '{"id": "a", "image": "../b.png"}', ":1 names '../b.png', outside"),
        ("list.csv", "a.png", "is no folder of pictures and no list"),
        ("pages", None, "has no pictures"),
        ("missing.txt", None, "no such input file"),
    ],
)
def test_a_list_names_pictures_below_it(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    """Lists come with pictures from elsewhere: no path leaves their folder, not by a link either."""
    folder = tmp_path / "inside"
    (folder / "pages").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(b"")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(InputError) as raised:
        find_pictures(folder / name)
    assert message in raised.value.message
