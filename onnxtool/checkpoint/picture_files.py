"""Read image files, given by name, folder or list. Images are untrusted.

Shape letters: H height, W width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.text_files import LineError, parsed_lines
from onnxtool.errors import InputError, first_line, imported
from onnxtool.reading import parse_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

# Suffixes that sentence-transformers treats as images. Pillow decodes no other formats here: some of them run external
# programs.
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")
LISTS = (".txt", ".jsonl")
# A file of 100 bytes may claim any image size. An A3 page at 600 dpi has 70 million pixels.
MAX_PIXELS = 1 << 27


@dataclass(frozen=True)
class PictureInput:
    """An image to run.

    Attributes:
        id: its id in the list, or its file name in the folder; None for a single image.
    """

    path: Path
    id: str | None = None


def read_picture(path: Path) -> Image:
    """Decode the image at `path` to RGB, rotated according to its EXIF data, like load_image of transformers.

    Animations yield their first frame. Palettes are resolved, alpha is dropped, and 16 bits become 8 as in Pillow.

    Raises:
        InputError: it is not an image of a known format, is damaged or too large, or Pillow is not installed.
    """
    pillow, operations = _pillow(), _pillow("ImageOps")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about large images, or damage in unused data
            with pillow.open(path, formats=_FORMATS) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise InputError(
                        f"{path} is an image of {width} x {height} pixels, more than {MAX_PIXELS}", "make it smaller"
                    )
                upright: Image = operations.exif_transpose(picture).convert("RGB")
                return upright
    except FileNotFoundError:
        raise InputError(f"no such image: {path}", "check the path") from None
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder", "pass it with --input") from error
    except PermissionError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check its permissions") from error
    except InputError:
        raise
    except Exception as error:  # decoders raise arbitrary errors on damaged files
        reason = first_line(error)
        raise InputError(
            f"cannot read {path} as an image: {reason}", f"use a file of one of the formats {', '.join(_FORMATS)}"
        ) from error


def blank_picture() -> Image:
    """Make a white image of 64 x 48 pixels.

    Raises:
        InputError: Pillow is not installed.
    """
    picture: Image = _pillow().new("RGB", (64, 48), "white")
    return picture


def picture_of(pixels: NDArray[np.uint8]) -> Image:
    """Make an image from pixels, uint8 [H, W, 3].

    Raises:
        InputError: Pillow is not installed.
    """
    picture: Image = _pillow().fromarray(pixels)
    return picture


def find_pictures(place: Path) -> tuple[PictureInput, ...]:
    """Return the images of a folder, sorted by name, or of a list.

    A list is a text file with one path per line, or JSON Lines with `id` and `image`. Paths are relative to the list's
    folder, and must stay inside it.

    Raises:
        InputError: there are none, the list cannot be read, or a path leaves its folder.
    """
    try:
        if place.is_dir():
            files = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
            pictures = tuple(PictureInput(path, path.name) for path in files if not path.name.startswith("."))
        elif place.suffix.lower() in LISTS:
            pictures = tuple(_listed(place))
        else:
            raise InputError(
                f"{place} is neither a folder nor a list of images",
                f"pass a folder, a list that ends in {' or '.join(LISTS)}, or single images with --image",
            )
    except FileNotFoundError:
        raise InputError(f"no such input file: {place}", "check --input") from None
    except OSError as error:
        raise InputError(f"cannot read {place}: {error.strerror}", "check --input") from error
    if not pictures:
        raise InputError(f"{place} has no images", f"images have these suffixes: {', '.join(SUFFIXES)}")
    return pictures


def _listed(place: Path) -> Iterator[PictureInput]:
    folder = place.parent.resolve()

    def parse(line: str) -> PictureInput:
        name, picture = _entry(line) if place.suffix.lower() == ".jsonl" else (line.strip(), line.strip())
        return PictureInput(_inside(folder, picture), name)

    return parsed_lines(place, parse)


def _entry(line: str) -> tuple[str, str]:
    """Read the id and path of an image from a JSON object."""
    hint = 'each line is an object such as {"id": "1", "image": "pages/1.png"}'
    try:
        entry: Any = parse_json(line)
    except ValueError as error:
        raise LineError(f"is not JSON: {error}", hint) from None
    name, picture = (entry.get("id"), entry.get("image")) if isinstance(entry, dict) else (None, None)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise LineError("has no id that is a string or an integer", hint)
    if not isinstance(picture, str) or not picture:
        raise LineError("has no image that is a path", hint, str(name))
    return str(name), picture


def _inside(folder: Path, name: str) -> Path:
    """Return the path of an image below `folder`, after following links."""
    try:
        path = (folder / name).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a NUL, a name too long, a ring of links
        raise LineError(f"names {name[:80]!r}, which is not a path: {error}", "name a file below the list") from None
    if not path.is_relative_to(folder):
        raise LineError(
            f"names {name[:80]!r}, outside the folder of the list", "put the list above the images, or copy them"
        )
    return path


def _pillow(module: str = "Image") -> Any:
    """Return a module of Pillow."""
    return imported(f"PIL.{module}", "images are read with Pillow", "pip install 'onnxtool-cli[images]'")
