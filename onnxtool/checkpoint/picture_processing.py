"""Prepare pictures as the image processor of a checkpoint does, with NumPy and Pillow alone.

The definitions are those of the processors of transformers 5.23 that use Pillow. Those that use torchvision, which
transformers prefers where it is installed, resize by other arithmetic.

Letters of shapes: B batch, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.picture_files import MAX_PIXELS
from onnxtool.checkpoint.sentence_modules import as_object, is_number, positive
from onnxtool.errors import InputError
from onnxtool.reports import Json, short_repr

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR_NAME = "preprocessor_config.json"
_NESTED_NAME, _NESTED_KEY = "processor_config.json", "image_processor"
PROCESSOR_NAMES = (PROCESSOR_NAME, _NESTED_NAME)

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, _BILINEAR, BICUBIC = 1, 2, 3
_LARGEST_FILTER = 5

Pixels = NDArray[np.float32]
Feeds = dict[str, NDArray[Any]]
PIXELS = "pixel_values"
_Processor = TypeVar("_Processor")


@dataclass(frozen=True)
class PictureClass:
    """What an image processor does where its file says nothing.

    Attributes:
        size: as the file would say it; so is `crop_size`.
        squares: whether a single number for the size is both height and width.
        converts: whether it converts colours by itself (do_convert_rgb).
        own: the settings that it has beside those of all.
    """

    size: Mapping[str, int]
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    resample: int = BICUBIC
    crop_size: Mapping[str, int] | None = None
    crops: bool = False
    squares: bool = True
    converts: bool = True
    own: Collection[str] = ()


# What EfficientNet divides by the standard deviation once more, and what subtracts 1 from scaled pixels.
_INCLUDE_TOP, _RESCALE_OFFSET = "include_top", "rescale_offset"
_SQUARE_224 = {"height": 224, "width": 224}
_CLIP = PictureClass({"shortest_edge": 224}, crop_size=_SQUARE_224, crops=True, squares=False)
_CLASSES: Mapping[str, PictureClass] = {
    "CLIPImageProcessor": _CLIP,
    "ChineseCLIPImageProcessor": _CLIP,
    "BitImageProcessor": _CLIP,
    "SiglipImageProcessor": PictureClass(_SQUARE_224, HALF, HALF, squares=False),
    "BlipImageProcessor": PictureClass({"height": 384, "width": 384}),
    "ViTImageProcessor": PictureClass(_SQUARE_224, HALF, HALF, _BILINEAR, converts=False),
    "DeiTImageProcessor": PictureClass(
        {"height": 256, "width": 256}, HALF, HALF, crop_size=_SQUARE_224, crops=True, converts=False
    ),
    "EfficientNetImageProcessor": PictureClass(
        {"height": 346, "width": 346},
        HALF,
        HALF,
        crop_size={"height": 289, "width": 289},
        converts=False,
        own=(_INCLUDE_TOP, _RESCALE_OFFSET),
    ),
    "OwlViTImageProcessor": PictureClass(
        {"height": 768, "width": 768}, crop_size={"height": 768, "width": 768}, crops=False
    ),
}
_OFF = (None, False)
# Settings beside those that are followed: the values which change nothing.
_HARMLESS: Mapping[str, Callable[[Json], bool]] = {
    "do_pad": lambda value: value in _OFF,
    "pad_size": lambda value: value is None,
    "use_square_size": lambda value: value in _OFF,
    "data_format": lambda value: value in (None, "channels_first"),
    "input_data_format": lambda value: value is None,
    **dict.fromkeys(
        # Names of classes; how and on what device pixels are computed.
        ("image_processor_type", "feature_extractor_type", "processor_class", "_valid_processor_keys",
         "device", "disable_grouping", "return_tensors", "image_seq_length", "use_fast", "backend"),
        lambda _value: True,
    ),
}  # fmt: skip
FOLLOWED = frozenset(
    ("do_resize", "size", "default_to_square", "resample", "do_convert_rgb", "do_center_crop", "crop_size",
     "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
)  # fmt: skip


@short_repr
@dataclass(frozen=True)
class PixelScaling:
    """What becomes of colours.

    Attributes:
        whitens: whether pixels of the colour that the file calls transparent become white.
        scale: what pixels are multiplied by; None for nothing.
        shift: what is added to pixels that were scaled.
        normalizations: one after the other, what is subtracted of each channel, and what it is divided by then.
    """

    whitens: bool
    scale: float | None
    shift: float
    normalizations: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]

    @classmethod
    def of(cls, read: SettingsReader, kind: PictureClass) -> PixelScaling:
        """Read it from the settings of an image processor.

        Raises:
            ValueError: a setting makes no sense.
        """
        rescales, normalizes = read.flag("do_rescale", default=True), read.flag("do_normalize", default=True)
        divides_again = _INCLUDE_TOP in kind.own and read.flag(_INCLUDE_TOP, default=True)
        means = [read.channels("image_mean", kind.mean)] if normalizes else []
        means += [(0.0, 0.0, 0.0)] if divides_again else []
        std = read.channels("image_std", kind.std) if means else HALF
        if 0.0 in std:
            raise ValueError(f"image_std is {list(std)}, and pixels cannot be divided by 0")
        return cls(
            whitens=read.flag("do_convert_rgb", default=kind.converts),
            scale=read.number("rescale_factor", 1 / 255) if rescales else None,
            shift=-1.0 if _RESCALE_OFFSET in kind.own and read.flag(_RESCALE_OFFSET, default=False) else 0.0,
            normalizations=tuple((mean, std) for mean in means),
        )

    def opened(self, picture: Image) -> Image:
        """Return the RGB picture as its colours are looked up."""
        return _whitened(picture) if self.whitens else picture

    def apply(self, pixels: NDArray[Any]) -> Pixels:
        """Scale and normalize pixels: uint8 [..., 3, H, W] to float32."""
        if self.scale is not None:
            pixels = (pixels.astype(np.float64) * self.scale).astype(np.float32) + np.float32(self.shift)
        pixels = pixels.astype(np.float32)
        for mean, std in self.normalizations:
            pixels = (pixels - np.array(mean, np.float32)[:, None, None]) / np.array(std, np.float32)[:, None, None]
        return np.ascontiguousarray(pixels)


@short_repr
@dataclass(frozen=True)
class PictureProcessor:
    """How pixels are made of a picture.

    Attributes:
        size: `height` and `width`, or `shortest_edge`, with `longest_edge` where there is a limit; None for no resize.
        resample: the filter, by Pillow's number.
        crop: height and width that are cut out of the middle; None for no crop.
        scaling: what becomes of colours.
    """

    size: Mapping[str, int] | None
    resample: int
    crop: tuple[int, int] | None
    scaling: PixelScaling

    @classmethod
    def of(cls, files: CheckpointFiles) -> PictureProcessor:
        """Read preprocessor_config.json, or the part of processor_config.json that is for pictures.

        Raises:
            OnnxtoolError: there is none, its class or one of its settings is not computed here, or it is malformed.
        """
        return read_settings(files, _CLASSES, cls._read)

    @classmethod
    def _read(cls, read: SettingsReader, kind: PictureClass) -> PictureProcessor:
        crops = read.flag("do_center_crop", default=kind.crops)
        squares = read.flag("default_to_square", default=kind.squares)
        resizes = read.flag("do_resize", default=True)
        scaling = PixelScaling.of(read, kind)
        crop = read.size("crop_size", kind.crop_size or {}, squares=True) if crops else None
        if crop is not None and "height" not in crop:
            raise ValueError(f"crop_size is {crop}, and has no height and width")
        return cls(
            size=read.size("size", kind.size, squares=squares) if resizes else None,
            resample=read.filter(kind.resample) if resizes else kind.resample,
            crop=None if crop is None else (crop["height"], crop["width"]),
            scaling=scaling,
        )

    def prepare(self, picture: Image) -> Feeds:
        """Return the pixels of an RGB picture: float32 [3, H, W].

        Raises:
            InputError: it would become too large by its proportions.
        """
        picture = self.scaling.opened(picture)
        if self.size is not None:
            picture = resized(picture, *self._size_of(picture.height, picture.width), self.resample)
        pixels: NDArray[Any] = np.asarray(picture).transpose(2, 0, 1)
        if self.crop is not None:
            pixels = _cropped(pixels, *self.crop)
        return {PIXELS: self.scaling.apply(pixels)}

    def _size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after the resize."""
        size = self.size or {}
        if "height" in size:
            return size["height"], size["width"]
        short, long = sorted((height, width))
        edge, limit = size["shortest_edge"], size.get("longest_edge")
        if limit is None or long / short * edge <= limit:
            other = int(edge * long / short)
        else:
            edge, other = round(limit * short / long), int(limit * short / long * long / short)
        return (other, edge) if width <= height else (edge, other)


def resized(picture: Image, height: int, width: int, resample: int) -> Image:
    """Resize a picture.

    Raises:
        InputError: it would become too large by its proportions.
    """
    if not 0 < height * width <= MAX_PIXELS:
        raise InputError(
            f"a picture of {picture.width} x {picture.height} pixels becomes one of {width} x {height} by the "
            "settings of the image processor",
            "cut the picture: its proportions are none of a picture",
        )
    return picture.resize((width, height), resample=resample)


def _whitened(picture: Image) -> Image:
    """Put a picture whose file calls one of its colours transparent before white, as transformers does."""
    if picture.info.get("transparency") is None:
        return picture
    from PIL import Image

    clear = picture.convert("RGBA")
    white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, clear).convert("RGB")


def _cropped(pixels: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Cut the middle out of [3, H, W]; what the picture does not have is 0."""
    before, wanted = pixels.shape[1:], (height, width)
    for axis, (size, target) in enumerate(zip(before, wanted, strict=True), start=1):
        start = (size - target) // 2
        if size < target:
            first = math.ceil((target - size) / 2)
            margins = [(0, 0)] * 3
            margins[axis] = (first, target - size - first)
            pixels = np.pad(pixels, margins)
        else:
            pixels = pixels.take(range(start, start + target), axis)
    return pixels


@dataclass(frozen=True)
class SettingsReader:
    """Reads settings by their type. As in transformers, null is no default: it is off, or missing where needed."""

    settings: Mapping[str, Json]

    def flag(self, key: str, *, default: bool) -> bool:
        """Return whether something is done."""
        value = self.settings.get(key, default)
        if not isinstance(value, bool | None):
            raise ValueError(f"{key} is {value!r}, and not true or false")
        return bool(value)

    def number(self, key: str, default: float) -> float:
        """Return a finite number."""
        value = self.settings.get(key, default)
        if not is_number(value):
            raise ValueError(f"{key} is {value!r}, which is no number")
        return float(value)

    def channels(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return a finite number for each colour."""
        value = self.settings.get(key, list(default))
        numbers = value if isinstance(value, list) else [value] * 3
        if len(numbers) != 3 or not all(map(is_number, numbers)):
            raise ValueError(f"{key} is {value!r}, and not a number for each of 3 colours")
        return tuple(float(one) for one in numbers if is_number(one))

    def filter(self, default: int) -> int:
        """Return the filter of a resize."""
        value = self.settings.get("resample", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_FILTER:
            raise ValueError(f"resample is {value!r}, and not a filter of Pillow (0 to {_LARGEST_FILTER})")
        return value

    def size(self, key: str, default: Mapping[str, int], *, squares: bool) -> dict[str, int]:
        """Return height and width, or the shortest edge, which may have a limit for the longest."""
        value = self.settings.get(key, dict(default))
        if isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        elif not isinstance(value, dict):
            value = {"height": value, "width": value} if squares else {"shortest_edge": value}
        numbers = {name: number for name, one in value.items() if (number := positive(one)) is not None}
        known = set(numbers) in ({"height", "width"}, {"shortest_edge"}, {"shortest_edge", "longest_edge"})
        if len(numbers) != len(value) or not known or max(numbers.values()) ** 2 > MAX_PIXELS:
            raise ValueError(f"{key} is {self.settings.get(key)!r}, and not height and width, or the shortest edge")
        return numbers


def read_settings(
    files: CheckpointFiles,
    classes: Mapping[str, PictureClass],
    read: Callable[[SettingsReader, PictureClass], _Processor],
) -> _Processor:
    """Return what `read` makes of the settings of a checkpoint's image processor.

    Args:
        files: the checkpoint.
        classes: the image processors that are computed, by name.
        read: reads the settings of one; raises ValueError where they make no sense.

    Raises:
        OnnxtoolError: there are none, the class or one of its settings is not computed, or they are malformed.
    """
    file, settings = _settings(files)
    name = _class_name(settings)
    kind = classes.get(name)
    if kind is None:
        raise files.refuse(
            f"{file} of {files.label} names the image processor {name or 'of no class'}, which onnxtool does not "
            f"compute; it computes {', '.join(classes)}",
            "prepare pictures with transformers for this checkpoint",
        )
    unknown = [
        f"{key} {value!r}"
        for key, value in settings.items()
        if value is not None and key not in FOLLOWED and key not in kind.own and not _is_harmless(key, value)
    ]
    if unknown:
        raise files.refuse(
            f"{file} of {files.label} has settings that onnxtool does not follow: {'; '.join(unknown)[:300]}",
            "prepare pictures with transformers for this checkpoint",
        )
    try:
        return read(SettingsReader(settings), kind)
    except ValueError as error:
        raise files.malformed(file, str(error)) from None


def _is_harmless(key: str, value: Json) -> bool:
    return key in _HARMLESS and _HARMLESS[key](value)


def _settings(files: CheckpointFiles) -> tuple[str, Mapping[str, Json]]:
    """Return the settings of the image processor and the file that has them; nested ones win, as in transformers."""
    nested = files.read(_NESTED_NAME).get(_NESTED_KEY)
    if isinstance(nested, dict):
        return _NESTED_NAME, nested
    settings = files.read(PROCESSOR_NAME)
    if not settings:
        raise files.refuse(
            f"{files.label} does not say how pictures are prepared: it has no {PROCESSOR_NAME}",
            "pass --model_name with the checkpoint's folder",
        )
    return PROCESSOR_NAME, as_object(settings)


def _class_name(settings: Mapping[str, Json]) -> str:
    """Return the class of the image processor, by its present name; empty where the file names none."""
    name = settings.get("image_processor_type")
    if name is None:
        older = settings.get("feature_extractor_type")
        name = older.replace("FeatureExtractor", "ImageProcessor") if isinstance(older, str) else None
    return name.removesuffix("Fast").removesuffix("Pil") if isinstance(name, str) else ""
