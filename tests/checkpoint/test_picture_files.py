"""Image files are found and decoded; hostile ones, and lists that leave their folder, end in one clear error."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onnxtool.checkpoint.picture_files import find_pictures, read_picture
from onnxtool.errors import InputError


def _bomb(path: Path, size: int) -> None:
    """Write an image that says to have many pixels, in 60 bytes."""
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
    "large.png": (lambda path: _bomb(path, 12_000), "an image of 12000 x 12000 pixels, more than"),
    "bomb.png": (lambda path: _bomb(path, 100_000), "could be decompression bomb"),
    "folder.png": (lambda path: path.mkdir(), r"folder\.png is a folder"),
    "missing.png": (lambda path: None, "no such image"),
    "name\0.png": (lambda path: None, "embedded null byte"),
}


def _png() -> bytes:
    import io

    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_picture_is_one_error(name: str, tmp_path: Path) -> None:
    """Images come from anywhere; formats that run other programs are not decoded."""
    path = tmp_path / name
    write, message = HOSTILE[name]
    write(path)
    with pytest.raises(InputError, match=message):
        read_picture(path)


def test_pictures_of_a_folder_and_of_lists(tmp_path: Path) -> None:
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
        ("list.txt", "a\0b.png", "which is not a path"),
        ("list.txt", "\n", "has no images"),
        ("list.jsonl", "{", ":1 is not JSON"),
        ("list.jsonl", "[1]", ":1 has no id"),
        ("list.jsonl", '{"id": "a"}', ":1 has no image that is a path"),
        ("list.jsonl", '{"id": "a", "image": "../b.png"}', ":1 names '../b.png', outside"),
        ("list.csv", "a.png", "is neither a folder nor a list"),
        ("pages", None, "has no images"),
        ("missing.txt", None, "no such input file"),
    ],
)
def test_a_list_names_pictures_below_it(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    """Lists come with images from elsewhere: no path leaves their folder, not by a link either."""
    folder = tmp_path / "inside"
    (folder / "pages").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(b"")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(InputError) as raised:
        find_pictures(folder / name)
    assert message in raised.value.message
