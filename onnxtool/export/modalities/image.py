"""Images, as prepared by the model's image processor.

Shape letters: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.export.modalities.modality import (
    BATCH,
    HEIGHT,
    WIDTH,
    Axis,
    Feeds,
    Sizes,
    disagreement,
    prepare,
    scaled,
    usual_sizes,
)
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.recipes import GIVEN, IDS, MASK, NORMAL, Recipe

_PICTURES = ("pixel_values", "input_ids")  # the second holds a color number for each pixel
# Axes of known inputs that may vary; for others only the first, which is the batch.
_MASK = ("pixel_mask", 3)
_AXES: dict[tuple[str, int], dict[int, str]] = {
    ("pixel_values", 4): {2: HEIGHT, 3: WIDTH},
    _MASK: {1: HEIGHT, 2: WIDTH},
}
# The fraction of height and width that is image, row by row; the rest is padding. Less than half, so that a mask scaled
# down to features a few pixels wide still has a zero.
_SHARES = ((0.4, 0.7), (1.0, 1.0), (0.7, 0.4))
_PICTURE_SIZES = ((480, 640), (300, 200), (224, 224))


@dataclass(frozen=True)
class ImageInputs:
    """Prepared images.

    Attributes:
        processor: the image processor.
        prepared: its result for one image, for the inputs that the model takes: [1, …] each.
        batch_axis: the name of axis B.
    """

    processor: Any
    prepared: Mapping[str, NDArray[Any]]
    batch_axis: str = BATCH

    @classmethod
    def of(cls, model: Any, processor: Any, accepted: Sequence[str]) -> ImageInputs:
        """Determine what the processor provides and the model takes; `accepted` are the parameters of its forward.

        Raises:
            CheckpointError: the processor does not run.
            ExportError: they have no pixel input in common.
        """
        offered = _prepare(processor, [draw_picture(*_PICTURE_SIZES[0])])
        prepared = {name: array for name, array in offered.items() if name in accepted}
        if not any(name.startswith(_PICTURES) for name in prepared):
            raise disagreement(model, accepted, "image processor", offered)
        return cls(processor, prepared)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """B, and H and W if the pixel inputs have them."""
        axes = [Axis(self.batch_axis, 2, 3, may_fail=False, when_fixed=1)]
        for name, array in self.prepared.items():
            for position, axis in _AXES.get((name, array.ndim), {}).items():
                if axis not in [known.name for known in axes]:
                    axes.append(Axis(axis, array.shape[position], 2 * array.shape[position], is_covered=True))
        return tuple(axes)

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make noise: standard normal, like normalized images."""
        generator = np.random.default_rng(seed)
        return {name: self._random(name, array, sizes, generator) for name, array in self.prepared.items()}

    def sample(self, fixed: Sizes) -> Feeds:
        """Return noise of the usual size, with one smaller row if there is a mask."""
        return self._ragged(usual_sizes(self) | dict(fixed), seed=1)

    def cases(self, fixed: Sizes) -> list[Case]:
        """Several batches and sizes, images smaller than their batch, black, high-contrast and real ones."""
        usual = usual_sizes(self)
        wanted: list[tuple[str, dict[str, int]]] = [
            ("one image", {self.batch_axis: 1}),
            ("several images", {self.batch_axis: 5}),
        ]
        for axis in self.axes[1:]:
            wanted += [
                (f"twice the {axis.name}", {axis.name: 2 * axis.usual}),
                (f"an odd {axis.name}", {axis.name: axis.usual + axis.usual // 2 + 1}),
            ]
        if len(self.axes) > 1:
            wanted.append(("twice as large", {axis.name: 2 * axis.usual for axis in self.axes[1:]}))
        cases = []
        for seed, (description, sizes) in enumerate(wanted):
            if any(name in fixed for name in sizes if name != self.batch_axis):
                continue
            feeds = self.feeds(usual | sizes | dict(fixed), seed=seed)
            cases.append(Case(description, feeds, None))
        plain = self.feeds(usual | dict(fixed), seed=7)
        cases.append(Case("black images", scaled(plain, 0.0), None))
        cases.append(Case("strong contrast", scaled(plain, 3.0), None))
        cases.append(Case("other noise", self.feeds(usual | {self.batch_axis: 3} | dict(fixed), seed=8), None))
        if self._has_mask:
            ragged = self._ragged(usual | {self.batch_axis: 3} | dict(fixed), seed=9)
            attended = {**ragged, _MASK[0]: np.ones_like(ragged[_MASK[0]])}
            cases += [Case("ragged", ragged, None), Case("ragged, padding attended", attended, None)]
        return cases + self._real(fixed)

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Pixels, masks over them, color numbers, and sizes as the processor provides them."""
        return {name: self._kind(name, array) for name, array in self.prepared.items()}

    def _kind(self, name: str, array: NDArray[Any]) -> Recipe:
        if np.issubdtype(array.dtype, np.floating):
            return Recipe(NORMAL)
        if "mask" in name:
            return Recipe(MASK)
        return Recipe(IDS, int(array.max()) + 1) if name in _PICTURES else Recipe(GIVEN)

    def _real(self, fixed: Sizes) -> list[Case]:
        batch = fixed.get(self.batch_axis, 2)
        shown = {f"an image of {height} x {width}": [(height, width)] * batch for height, width in _PICTURE_SIZES}
        if self._has_mask and batch > 1:
            shown["images of several sizes"] = [_PICTURE_SIZES[row % len(_PICTURE_SIZES)] for row in range(batch)]
        cases = []
        for description, sizes in shown.items():
            real = _prepare(self.processor, [draw_picture(*size) for size in sizes])
            feeds = {name: real[name] for name in self.prepared}
            if all(self._fits(name, array, fixed) for name, array in feeds.items()):
                cases.append(Case(description, feeds, None))
        return cases

    @property
    def _has_mask(self) -> bool:
        name, rank = _MASK
        return name in self.prepared and self.prepared[name].ndim == rank

    def _ragged(self, sizes: Sizes, seed: int) -> Feeds:
        """Make noise; by the mask, part of most rows is padding, which also contains noise."""
        feeds = self.feeds(sizes, seed=seed)
        if self._has_mask:
            for row, picture in enumerate(feeds[_MASK[0]]):
                height, width = (
                    max(1, int(share * size)) for share, size in zip(_SHARES[row % 3], picture.shape, strict=True)
                )
                picture[height:], picture[:, width:] = 0, 0
        return feeds

    def _fits(self, name: str, array: NDArray[Any], fixed: Sizes) -> bool:
        axes = _AXES.get((name, array.ndim), {})
        return all(
            array.shape[position] == (fixed.get(axes[position]) or size if position in axes else size)
            for position, size in enumerate(self.prepared[name].shape)
            if position > 0 and (position not in axes or axes[position] in fixed)
        )

    def _random(self, name: str, array: NDArray[Any], sizes: Sizes, generator: np.random.Generator) -> NDArray[Any]:
        axes = _AXES.get((name, array.ndim), {})
        dims = [sizes.get(axes.get(position, ""), size) for position, size in enumerate(array.shape)]
        dims[0] = sizes[self.batch_axis] * array.shape[0]
        if np.issubdtype(array.dtype, np.floating):
            return generator.standard_normal(dims).astype(array.dtype)
        if axes:  # a mask over pixels, all of which count here
            return np.ones(dims, dtype=array.dtype)
        if name in _PICTURES:
            return generator.choice(array.reshape(-1), dims).astype(array.dtype)
        return np.repeat(array, sizes[self.batch_axis], axis=0)


def _prepare(processor: Any, pictures: list[NDArray[np.uint8]]) -> Feeds:
    return prepare(lambda: processor(images=pictures, return_tensors="pt"), "image processor")


def draw_picture(height: int, width: int) -> NDArray[np.uint8]:
    """Draw a gradient with a bright disc and dark stripes: edges, areas and colors, uint8 [H, W, 3]."""
    rows, columns = np.mgrid[0:height, 0:width] / (height, width)[0]
    disc = ((rows - 0.5) ** 2 + (columns - 0.5) ** 2 < 0.09)[..., None] * 120
    stripes = ((columns * 16).astype(int) % 2)[..., None] * 40
    gradient = np.stack([rows, columns, 1 - rows], axis=-1) * 130
    picture: NDArray[np.uint8] = np.clip(gradient + disc - stripes, 0, 255).astype(np.uint8)
    return picture
