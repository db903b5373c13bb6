"""Cut pages into tiles or patches, as many as their size asks for: the image processors of retrievers of pages.

The definitions are those of transformers 5.23 that use Pillow.

Letters of shapes: T tiles, N patches, E edge of a tile, C numbers of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.picture_processing import (
    BICUBIC,
    HALF,
    LANCZOS,
    PIXELS,
    Feeds,
    PictureClass,
    PixelScaling,
    SettingsReader,
    read_settings,
    resized,
)
from onnxtool.checkpoint.sentence_modules import positive
from onnxtool.errors import InputError
from onnxtool.reports import Json

if TYPE_CHECKING:
    from PIL.Image import Image

GRID = "image_grid_thw"
_TILED, _PATCHED = "Idefics3ImageProcessor", "Qwen2VLImageProcessor"
_LARGEST_SIDE = 4096  # of a page that is cut into tiles
_HIGHEST_RATIO = 200  # of the sides of a page that is cut into patches
_MOST_PARTS = 1 << 16


@dataclass(frozen=True)
class CutPage:
    """A page as its image processor cuts it.

    Attributes:
        feeds: `pixel_values`, float32 [T, 3, E, E] or [N, C], and what belongs to it, without an axis for the batch.
        num_rows: rows of tiles; 0 where the page is one tile, or patches.
        num_columns: likewise.
        num_merged: how many tokens patches become; 0 for tiles, of which the checkpoint says it.
    """

    feeds: Feeds
    num_rows: int = 0
    num_columns: int = 0
    num_merged: int = 0


class PagePictures(Protocol):
    """Cuts pages."""

    def cut(self, picture: Image) -> CutPage:
        """Cut an RGB picture.

        Raises:
            InputError: its proportions are none of a page.
        """
        ...


@dataclass(frozen=True)
class TiledPages:
    """Pages as tiles of one size, with the whole page as the last one: Idefics 3's image processor.

    Attributes:
        size: what a page is resized to first: `longest_edge`, or `height` and `width`; None for no resize.
        edge: E.
        splits: whether there is more than the whole page.
        resample: the filter, by Pillow's number.
        scaling: what becomes of colours.
    """

    size: Mapping[str, int] | None
    edge: int
    splits: bool
    resample: int
    scaling: PixelScaling

    @classmethod
    def of(cls, read: SettingsReader, kind: PictureClass) -> TiledPages:
        """Read the settings.

        Raises:
            ValueError: one makes no sense.
        """
        _refuse_crop(read)
        size = _numbers(read, "size", kind.size, {"longest_edge"}, {"height", "width"})
        return cls(
            size=size if read.flag("do_resize", default=True) else None,
            edge=_numbers(read, "max_image_size", {"longest_edge": 364}, {"longest_edge"})["longest_edge"],
            splits=read.flag("do_image_splitting", default=True),
            resample=read.filter(kind.resample),
            scaling=PixelScaling.of(read, kind),
        )

    def cut(self, picture: Image) -> CutPage:
        """Cut an RGB picture into tiles, row by row."""
        picture, edge = self.scaling.opened(picture), self.edge
        if self.size is not None:
            picture = resized(picture, *self._first_size(picture.height, picture.width), self.resample)
        if not self.splits:
            return self._cut(resized(picture, edge, edge, self.resample), 0, 0)
        picture = resized(picture, *self._grid_size(picture.height, picture.width), self.resample)
        rows, columns = picture.height // edge, picture.width // edge
        if rows == columns == 1:
            return self._cut(picture, 0, 0)
        return self._cut(picture, rows, columns)

    def _cut(self, picture: Image, rows: int, columns: int) -> CutPage:
        _require_page(picture, rows * columns)
        edge, pixels = self.edge, np.asarray(picture).transpose(2, 0, 1)
        if rows:
            grid = pixels.reshape(3, rows, edge, columns, edge).transpose(1, 3, 0, 2, 4)
            whole = np.asarray(resized(picture, edge, edge, self.resample)).transpose(2, 0, 1)
            tiles = np.concatenate([grid.reshape(-1, 3, edge, edge), whole[None]])
        else:
            tiles = pixels[None]
        return CutPage({PIXELS: self.scaling.apply(tiles)}, rows, columns)

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        size = self.size or {}
        if "height" in size:
            return size["height"], size["width"]
        is_wide = width >= height
        height, width = _with_longest(height, width, size["longest_edge"])
        # The shorter side becomes even, though a square one is then no square.
        height, width = (height + height % 2, width) if is_wide else (height, width + width % 2)
        height, width = max(height, 1), max(width, 1)
        if max(height, width) > _LARGEST_SIDE:
            height, width = _with_longest(height, width, _LARGEST_SIDE)
        return max(height, 1), max(width, 1)

    def _grid_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width as multiples of E."""
        ratio = width / height
        if width >= height:
            width = _multiple(width, self.edge)
            return _multiple(int(width / ratio), self.edge), width
        height = _multiple(height, self.edge)
        return height, _multiple(int(height * ratio), self.edge)


@dataclass(frozen=True)
class PatchedPages:
    """Pages as patches, in squares of those that become one token: Qwen2-VL's image processor.

    Attributes:
        bounds: the fewest and the most pixels that a page is resized to; None for no resize.
        patch: height and width of a patch.
        times: how often a patch is repeated, as a film would have it.
        merged: height and width of a square, in patches.
        resample: the filter, by Pillow's number.
        scaling: what becomes of colours.
    """

    bounds: tuple[int, int] | None
    patch: int
    times: int
    merged: int
    resample: int
    scaling: PixelScaling

    @classmethod
    def of(cls, read: SettingsReader, kind: PictureClass) -> PatchedPages:
        """Read the settings.

        Raises:
            ValueError: one makes no sense.
        """
        _refuse_crop(read)
        # Earlier names of the two, which win; beside them the size may be written by these names as well.
        earlier = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        size = read.settings.get("size")
        given: dict[str, Json] = dict(kind.size) if size is None else dict(size) if isinstance(size, dict) else {}
        for name, earlier_name in earlier.items():
            if (value := read.settings.get(earlier_name)) is not None:
                given[name] = value
                given.pop(earlier_name, None)
        bounds = _numbers(SettingsReader({"size": given}), "size", {}, {"shortest_edge", "longest_edge"})
        return cls(
            bounds=(bounds["shortest_edge"], bounds["longest_edge"]) if read.flag("do_resize", default=True) else None,
            patch=_count(read, "patch_size", 14),
            times=_count(read, "temporal_patch_size", 2),
            merged=_count(read, "merge_size", 2),
            resample=read.filter(kind.resample),
            scaling=PixelScaling.of(read, kind),
        )

    def cut(self, picture: Image) -> CutPage:
        """Cut an RGB picture into patches, square by square."""
        picture, factor = self.scaling.opened(picture), self.patch * self.merged
        if self.bounds is not None:
            picture = resized(picture, *self._size_of(picture), self.resample)
        if picture.height % factor or picture.width % factor:
            raise InputError(
                f"a page of {picture.width} x {picture.height} pixels has no whole number of patches, which are cut "
                f"from squares of {factor}",
                "set do_resize in the settings of the image processor",
            )
        rows, columns = picture.height // self.patch, picture.width // self.patch
        _require_page(picture, rows * columns * self.times)
        pixels = self.scaling.apply(np.asarray(picture).transpose(2, 0, 1))
        squares = pixels.reshape(
            3, rows // self.merged, self.merged, self.patch, columns // self.merged, self.merged, self.patch
        ).transpose(1, 4, 2, 5, 0, 3, 6)
        repeated = np.repeat(squares[..., None, :, :], self.times, axis=5)
        return CutPage(
            {PIXELS: repeated.reshape(rows * columns, -1), GRID: np.array([1, rows, columns], np.int64)},
            num_merged=rows * columns // self.merged**2,
        )

    def _size_of(self, picture: Image) -> tuple[int, int]:
        height, width, factor = picture.height, picture.width, self.patch * self.merged
        least, most = self.bounds or (1, 1)
        if max(height, width) / min(height, width) > _HIGHEST_RATIO:
            raise InputError(
                f"a page of {width} x {height} pixels has sides of a ratio above {_HIGHEST_RATIO}", "cut the picture"
            )
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > most:
            by = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / by / factor)) for side in (height, width))
        elif rows * columns * factor**2 < least:
            by = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * by / factor) for side in (height, width))
        return rows * factor, columns * factor


_CLASSES: Mapping[str, PictureClass] = {
    _TILED: PictureClass(
        {"longest_edge": 4 * 364}, HALF, HALF, LANCZOS,
        own=("max_image_size", "do_image_splitting", "return_row_col_info", "do_pad"),
    ),
    _PATCHED: PictureClass(
        {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        resample=BICUBIC,
        own=("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"),
    ),
}  # fmt: skip

OWN_SETTINGS = tuple(name for kind in _CLASSES.values() for name in kind.own)


def read_page_pictures(files: CheckpointFiles, name: str) -> PagePictures:
    """Read how the image processor `name` cuts pages.

    Raises:
        OnnxtoolError: the checkpoint has another one or none, or a setting is not computed, or malformed.
    """

    def read(settings: SettingsReader, kind: PictureClass) -> PagePictures:
        return (TiledPages if name == _TILED else PatchedPages).of(settings, kind)

    return read_settings(files, {name: _CLASSES[name]}, read)


def _numbers(read: SettingsReader, key: str, default: Mapping[str, int], *known: set[str]) -> dict[str, int]:
    """Return the positive numbers of an object that has exactly the names of one of `known`."""
    value = read.settings.get(key, dict(default))
    named = value if isinstance(value, dict) else {}
    numbers = {name: number for name, one in named.items() if (number := positive(one)) is not None}
    if set(named) not in known or len(numbers) != len(named):
        wanted = " or ".join(" and ".join(sorted(names)) for names in known)
        raise ValueError(f"{key} is {value!r}, and not a number for {wanted}")
    return numbers


def _count(read: SettingsReader, key: str, default: int) -> int:
    number = positive(read.settings.get(key, default))
    if number is None:
        raise ValueError(f"{key} is {read.settings[key]!r}, and no positive number")
    return number


def _refuse_crop(read: SettingsReader) -> None:
    if read.flag("do_center_crop", default=False):
        raise ValueError("do_center_crop is set, and pages are not cropped")


def _require_page(picture: Image, num_parts: int) -> None:
    if num_parts > _MOST_PARTS:
        raise InputError(
            f"a page of {picture.width} x {picture.height} pixels would be cut into {num_parts} parts",
            "check the sizes in the settings of the image processor",
        )


def _with_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Scale the longer side to `longest`, and the other one with it, rounded down."""
    ratio = width / height
    if width >= height:
        return int(longest / ratio), longest
    return longest, int(longest * ratio)


def _multiple(side: int, of: int) -> int:
    return math.ceil(side / of) * of
