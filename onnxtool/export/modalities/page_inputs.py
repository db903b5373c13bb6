"""Pages as the processor of a retriever prepares them: pixels, and a token for each part of a page.

Letters of shapes: B batch, S tokens, P tiles or patches of a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.picture_files import picture_of
from onnxtool.errors import ExportError
from onnxtool.export.modalities.image import draw_picture
from onnxtool.export.modalities.processing import disagreement, prepare, scaled
from onnxtool.export.modalities.sizes import BATCH, SEQUENCE, Axis, Feeds, Sizes, usual_sizes
from onnxtool.model_file.metadata import PLACEHOLDER_KEY, PLACEHOLDERS_KEY, PROCESSOR_KEY
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.input_stamp import GIVEN, MASK, NORMAL, InputKind
from onnxtool.runtime.pictures import GRID, PIXELS

_IDS, _MASK = "input_ids", "attention_mask"
# Of several proportions: retrievers cut each otherwise. A tile of a real model is work for a second, so that there are
# few of them in all cases.
_PAGES = ((640, 480), (120, 30), (40, 120))


@dataclass(frozen=True)
class PageInputs:
    """Prepared pages.

    Attributes:
        processor: the checkpoint's own.
        prepared: what it makes of one page: [1, …] each.
        image_id: the id of the token that stands for a part of a page.
        unit: patches in a square that becomes one token, as height and width; 1 where pages are tiles.
    """

    processor: Any
    prepared: Mapping[str, NDArray[Any]]
    image_id: int
    unit: int

    @classmethod
    def of(cls, processor: Any, accepted: Sequence[str], model: Any, image_id: int) -> PageInputs:
        """Find out what the processor gives for a page; `accepted` are the parameters of the model's forward.

        Raises:
            CheckpointError: the processor does not run.
            ExportError: it does not give what the model takes.
        """
        offered = _prepare(processor, [_PAGES[0]])
        if any(name not in offered for name in accepted) or not (offered[_IDS] == image_id).any():
            raise disagreement(model, accepted, "processor", offered)
        unit = processor.image_processor.merge_size if GRID in offered else 1
        return cls(processor, {name: offered[name] for name in accepted}, image_id, unit)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """B, S and P, of which no file has a use that fixes one."""
        parts, step = "num_patches" if GRID in self.prepared else "num_tiles", self.unit**2
        return (
            Axis(BATCH, 2, 3, may_fail=False),
            Axis(SEQUENCE, 16, 19, may_fail=False),
            Axis(parts, 2 * step, 3 * step, may_fail=False),
        )

    @property
    def metadata(self) -> dict[str, str]:
        """What a file says of its inputs: whose they are, and which token stands for pixels, how often.

        `onnxtool.image_tokens` is the number of these tokens for one of P.
        """
        count = int((self.prepared[_IDS] == self.image_id).sum())
        return {
            PROCESSOR_KEY: type(self.processor).__name__,
            PLACEHOLDER_KEY: str(self.image_id),
            PLACEHOLDERS_KEY: str(Fraction(count, self.prepared[PIXELS].shape[1])),
        }

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make noise, and tokens of a page in any order."""
        generator = np.random.default_rng(seed)
        batch, length, parts = (sizes[axis.name] for axis in self.axes)
        feeds: Feeds = {}
        for name, array in self.prepared.items():
            if name == PIXELS:
                feeds[name] = generator.standard_normal((batch, parts, *array.shape[2:])).astype(array.dtype)
            elif name == GRID:
                feeds[name] = np.array([[1, self.unit, parts // self.unit]] * batch, array.dtype)
            else:
                feeds[name] = generator.choice(array.reshape(-1), (batch, length))
        return feeds

    def sample(self, fixed: Sizes) -> Feeds:
        """Return noise, of which the last row is smaller than the others."""
        self._require_open(fixed)
        return self._ragged(usual_sizes(self), seed=1)

    def cases(self, fixed: Sizes) -> list[Case]:
        """Real pages of several proportions, alone and together, and noise of few and of many parts."""
        self._require_open(fixed)
        batch, length, parts = (axis.name for axis in self.axes)
        usual, step = usual_sizes(self), self.unit**2
        return [
            self._page(_PAGES[:1]),
            self._page(_PAGES[1:]),
            Case("one part", self.feeds({batch: 1, length: 1, parts: step}), None),
            Case("many tokens, few parts", self.feeds({batch: 2, length: 300, parts: step}, seed=2), None),
            Case("few tokens, many parts", self.feeds({batch: 1, length: 7, parts: 5 * step}, seed=4), None),
            Case("little contrast", scaled(self.feeds(usual, seed=5), 0.1), None),
            Case("strong contrast", scaled(self.feeds(usual, seed=6), 3.0), None),
            Case("pages of several sizes, noise", self._ragged(usual | {batch: 3, parts: 3 * step}, seed=3), None),
        ]

    @property
    def kinds(self) -> Mapping[str, InputKind]:
        """Pixels, masks, and the tokens and sizes of a page, which random ones would not be."""
        kinds = {PIXELS: NORMAL, _MASK: MASK}
        return {name: InputKind(kinds.get(name, GIVEN)) for name in self.prepared}

    def _page(self, pages: Sequence[tuple[int, int]]) -> Case:
        feeds = _prepare(self.processor, pages)
        shown = " and ".join(f"{height} x {width}" for height, width in pages)
        return Case(f"pages of {shown}", {name: feeds[name] for name in self.prepared}, None)

    def pages(self) -> Feeds:
        """Return all that the processor gives for pages of several sizes, which are padded to one."""
        return _prepare(self.processor, _PAGES[1:])

    def _ragged(self, sizes: Sizes, seed: int) -> Feeds:
        feeds = self.feeds(sizes, seed=seed)
        feeds[_MASK] = np.ones_like(feeds[_MASK])
        feeds[_MASK][-1, -5:] = 0
        if GRID in feeds:
            feeds[GRID][-1, 2] -= self.unit
        return feeds

    def _require_open(self, fixed: Sizes) -> None:
        if fixed:
            raise ExportError(
                f"a file with {', '.join(f'{axis} fixed to {size}' for axis, size in fixed.items())} would take pages "
                "of one size",
                "pass --exporter auto, which tries those that leave sizes open",
            )


def _prepare(processor: Any, pages: Sequence[tuple[int, int]]) -> Feeds:
    pictures = [picture_of(draw_picture(*size)) for size in pages]
    return prepare(lambda: processor.process_images(images=pictures, return_tensors="pt"), "processor")
