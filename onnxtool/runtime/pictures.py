"""Prepare images, pages and queries for pages with the checkpoint's own transformers processor.

The Pillow processors are used even if torchvision is installed, because torchvision resizes with different arithmetic.
Settings come from a checkpoint and images from anywhere, so both are bounded before memory is allocated.

Shape letters: B batch, H height, W width, S tokens, T tiles, N patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit
from onnxtool.checkpoint.page_modules import PROCESSOR_NAMES, page_limit, require_known_pages
from onnxtool.checkpoint.picture_files import MAX_PIXELS
from onnxtool.checkpoint.sentence_modules import SentenceModules
from onnxtool.checkpoint.token_modules import read_mask
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError, first_line
from onnxtool.model_file import PIXELS
from onnxtool.reading import require_small_settings
from onnxtool.reports import short_repr
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.tokens import load_by_transformers

if TYPE_CHECKING:
    from PIL.Image import Image

GRID = "image_grid_thw"
# Possible inputs of a page graph.
PAGE_INPUTS = ("input_ids", "attention_mask", PIXELS, GRID)
Feeds = dict[str, NDArray[Any]]

_TILED, _PATCHED = "Idefics3ImageProcessor", "Qwen2VLImageProcessor"
# The image processors of dual encoders: one image becomes pixels of one size. How they grow with their settings is
# known, and bounded.
_CLASSES = (
    *("CLIPImageProcessor", "ChineseCLIPImageProcessor", "BitImageProcessor", "SiglipImageProcessor"),
    *("BlipImageProcessor", "ViTImageProcessor", "DeiTImageProcessor", "EfficientNetImageProcessor"),
    "OwlViTImageProcessor",
)
_PAGE_CLASSES = {"ColPaliProcessor": "SiglipImageProcessor", "ColQwen2Processor": _PATCHED,
                 "ColModernVBertProcessor": _TILED}  # fmt: skip
_SIZES = ("size", "crop_size", "pad_size")
_MOST_PARTS = _MOST_TOKENS = 1 << 17  # maximum tiles or patches of a page, and tokens: more than any retriever takes


@short_repr
@dataclass(frozen=True)
class PictureProcessor:
    """A transformers image processor. Threads may share it."""

    processor: Any
    files: CheckpointFiles

    @classmethod
    def of(cls, files: CheckpointFiles) -> PictureProcessor:
        """Load it from preprocessor_config.json, or from the image part of processor_config.json.

        Raises:
            OnnxtoolError: there is none, transformers cannot load it, or it does not belong to a dual encoder.
        """
        return cls(_load_image_processor(files, _CLASSES), files)

    def prepare(self, picture: Image) -> Feeds:
        """Return the pixels of an RGB image: float32 [3, H, W].

        Raises:
            InputError: its aspect ratio would make it too large, or the processor fails.
        """
        _require_small(self.processor, picture, self.files)
        outputs = _run(lambda: self.processor([picture], return_tensors="np"), self.files)
        return {PIXELS: _finite(np.asarray(outputs[PIXELS][0]), self.files)}


@dataclass(frozen=True, eq=False)
class PageProcessor:
    """A transformers processor, which converts a page to pixels and their placeholder tokens.

    Attributes:
        processor: the class named in the checkpoint.
        files: the checkpoint.
        limit: the maximum number of tokens of a page or query; None for no limit.
        kept_ids: if not empty, only vectors of these tokens count.
    """

    processor: Any
    files: CheckpointFiles
    limit: Limit | None
    kept_ids: frozenset[int]

    @classmethod
    def of(cls, folder: CheckpointFolder, name: str | None = None) -> PageProcessor:
        """Load the processor of a checkpoint.

        Args:
            folder: the checkpoint's folder.
            name: the class that the graph was exported for; None for any supported one.

        Raises:
            OnnxtoolError: it is another one, its files are malformed, or it has unsupported settings.
        """
        class_name, settings = require_known_pages(folder)
        if class_name != (name or class_name):
            raise folder.refuse(f"{folder.label} has another processor than {name}, whose inputs the graph takes")
        path = folder.locate("tokenizer.json")
        TextTokenizer(folder)  # refuses a file that the library would trust
        if path is None:
            raise folder.refuse(f"{folder.label} has no tokenizer.json")
        image_processor = _load_image_processor(folder, (_PAGE_CLASSES[class_name],))
        tokenizer = load_by_transformers(path.parent)
        mask = read_mask(SentenceModules.of(folder))

        def make() -> Any:
            import transformers

            return getattr(transformers, class_name)(image_processor, tokenizer, **settings)

        processor = _run(make, folder)
        return cls(processor, folder, page_limit(folder), frozenset() if mask is None else mask.kept_ids)

    def prepare(self, picture: Image) -> Feeds:
        """Return the model's inputs for an RGB image, without a batch axis.

        `input_ids` and `attention_mask` int64 [S], `pixel_values` float32, and what else the image processor gives.

        Raises:
            InputError: the image does not have the proportions of a page, or the processor fails.
        """
        num_parts = _require_small(self.processor.image_processor, picture, self.files)
        num_tokens = num_parts * getattr(self.processor, "image_seq_len", 1)
        if not isinstance(num_tokens, int) or not 0 <= num_tokens <= _MOST_TOKENS:
            raise InputError(
                f"a page would have {num_tokens} tokens", "check image_seq_len in the settings of the processor"
            )
        outputs = _run(lambda: self.processor.process_images(images=[picture]), self.files)
        feeds = {name: outputs[name][0].numpy() for name in PAGE_INPUTS if name in outputs}
        num_tokens = len(feeds["input_ids"])
        if self.limit is not None and num_tokens > self.limit.tokens:
            raise InputError(
                f"a page of {picture.width} x {picture.height} pixels has {num_tokens} tokens, more than "
                f"{self.limit.tokens} ({self.limit.source})",
                "make the page smaller: sentence-transformers cuts its tokens, and then refuses it",
            )
        if not self.counted(feeds["input_ids"]).any():
            raise InputError(
                "keep_only_token_ids of MultiVectorMask has no token of pages", "the list belongs to another model"
            )
        return {**feeds, PIXELS: _finite(feeds[PIXELS], self.files)}

    def read_query(self, query: str) -> Feeds:
        """Return the tokens of a query formatted by the processor, truncated to the limit: int64 [1, S] each.

        Raises:
            InputError: the processor fails.
        """
        cut = {} if self.limit is None else {"truncation": True, "max_length": self.limit.tokens}
        outputs = _run(lambda: self.processor.process_queries(text=[query], **cut), self.files)
        return {name: value.numpy() for name, value in outputs.items()}

    def counted(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tokens count, in any shape."""
        return np.isin(ids, list(self.kept_ids)) if self.kept_ids else np.ones_like(ids, dtype=bool)


def _load_image_processor(files: CheckpointFiles, classes: tuple[str, ...]) -> Any:
    """Load the image processor of a checkpoint, and refuse classes not in `classes`."""
    paths = {name: files.locate(name) for name in PROCESSOR_NAMES if files.read_object(name)}
    path = next((path for path in paths.values() if path is not None), None)
    if path is None:
        raise files.refuse(
            f"{files.label} does not say how images are prepared: it has no {PROCESSOR_NAMES[0]}",
            "pass --model_name with the checkpoint's folder",
        )

    def load() -> Any:
        from transformers import AutoImageProcessor

        require_small_settings(path.parent)
        return AutoImageProcessor.from_pretrained(
            path.parent, backend="pil", local_files_only=True, trust_remote_code=False
        )

    processor = _run(load, files)
    name = type(processor).__name__.removesuffix("Pil")
    if name not in classes:
        raise files.refuse(
            f"{' and '.join(paths)} of {files.label} names the image processor {name}, which onnxtool does not run "
            f"here; it runs {', '.join(classes)}",
            "prepare images with transformers for this checkpoint",
        )
    return processor


def _run(call: Callable[[], Any], files: CheckpointFiles) -> Any:
    """Return the output of a processor."""
    try:
        with quiet():
            return call()
    except ImportError as error:
        raise files.refuse(
            f"images are prepared by transformers, which cannot be loaded: {first_line(error)}",
            "pip install 'onnxtool-cli[images]'",
        ) from error
    except Exception as error:  # settings are not validated, and fail on first use
        raise files.refuse(
            f"the processor of {files.label} fails: {first_line(error)}",
            "check the settings in preprocessor_config.json and processor_config.json, or the proportions of the image",
        ) from error


def _require_small(processor: Any, picture: Image, files: CheckpointFiles) -> int:
    """Refuse settings that would make an image too large, and return the maximum number of its parts."""
    settings, name = processor.to_dict(), type(processor).__name__.removesuffix("Pil")
    try:
        pixels, num_parts = _growth(settings, name, picture)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise files.refuse(
            f"the settings of the image processor of {files.label} make no sense: {first_line(error)}",
            "check preprocessor_config.json and processor_config.json",
        ) from None
    if pixels > MAX_PIXELS or num_parts > _MOST_PARTS:
        raise files.refuse(
            f"an image of {picture.width} x {picture.height} pixels would become up to {pixels:.0f} pixels in "
            f"{num_parts:.0f} parts by the settings of the image processor of {files.label}",
            "cut the image if its proportions are none of an image, or check the settings",
        )
    return num_parts


def _growth(settings: Mapping[str, Any], name: str, picture: Image) -> tuple[float, int]:
    """Return the maximum number of pixels of an image in any step, and of its parts."""
    ratio = max(picture.width, picture.height) / min(picture.width, picture.height)
    if name == _PATCHED:  # to an area, with both sides rounded up to a number of patches
        patch, factor = settings["patch_size"], settings["patch_size"] * settings["merge_size"]
        size = settings["size"] if settings["do_resize"] else {"own": picture.width * picture.height}
        area = max(size.values())
        pixels = (sqrt(area * ratio) + factor) * (sqrt(area / ratio) + factor)
        return pixels * settings["temporal_patch_size"], int(pixels // patch**2)
    longest: int = max(side for key in _SIZES for side in dict(settings.get(key) or {}).values() if side is not None)
    if name == _TILED:  # the longer side gets this length, rounded up to whole tiles
        edge = settings["max_image_size"]["longest_edge"]
        longest = longest if settings["do_resize"] else max(picture.size)
        return float(max(longest + edge, edge) ** 2), (longest // edge + 1) ** 2 + 1
    return longest**2 * ratio, 1  # the shorter side gets this length, and the other one scales with it


def _finite(pixels: NDArray[Any], files: CheckpointFiles) -> NDArray[Any]:
    if not np.isfinite(pixels).all():
        raise files.refuse(
            f"the image processor of {files.label} makes pixels that are not finite numbers",
            "check image_mean, image_std and rescale_factor in its settings",
        )
    return pixels
