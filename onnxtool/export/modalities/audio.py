"""Audio, as prepared by the model's feature extractor: samples [B, T] or features [B, T, F] and [B, F, T]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import CheckpointError
from onnxtool.export.modalities.modality import (
    BATCH,
    NUM_FRAMES,
    NUM_SAMPLES,
    PROCESSOR_FILE,
    Axis,
    Feeds,
    Sizes,
    disagreement,
    prepare,
    scaled,
    usual_sizes,
)
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.recipes import MASK, NORMAL, Recipe

_SECONDS, _OTHER_SECONDS = 1.0, 1.37
_SAMPLING_RATE = 16_000


@dataclass(frozen=True)
class AudioInputs:
    """Prepared audio.

    Attributes:
        extractor: the feature extractor.
        prepared: its result for one second, for the inputs that the model takes: [1, …] each.
        moving: input name to the axis that follows the audio's length; inputs without such an axis are omitted.
        time: the name of that axis, with its sizes for one second and for a little more.
    """

    extractor: Any
    prepared: Mapping[str, NDArray[Any]]
    moving: Mapping[str, int]
    time: Axis | None

    @classmethod
    def of(cls, model: Any, extractor: Any, accepted: Sequence[str]) -> AudioInputs:
        """Determine what the extractor provides and the model takes; `accepted` are the parameters of its forward.

        Raises:
            CheckpointError: the extractor does not run.
            ExportError: they have no input in common.
        """
        offered, longer = (_prepare(extractor, [_sound(extractor, length)]) for length in (_SECONDS, _OTHER_SECONDS))
        prepared = {name: array for name, array in offered.items() if name in accepted}
        if not {"input_values", "input_features"} & set(prepared):
            raise disagreement(model, accepted, "feature extractor", offered)
        moving = {
            name: axis
            for name, array in prepared.items()
            for axis in range(1, array.ndim)
            if array.shape[axis] != longer[name].shape[axis]
        }
        main = "input_values" if "input_values" in prepared else "input_features"
        if main not in moving:
            return cls(extractor, prepared, {}, None)
        axis = moving[main]
        name = NUM_SAMPLES if prepared[main].ndim == 2 else NUM_FRAMES
        time = Axis(name, prepared[main].shape[axis], longer[main].shape[axis])
        return cls(extractor, prepared, moving, time)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """B, and T if it follows the audio's length."""
        batch = Axis(BATCH, 2, 3, may_fail=False, when_fixed=1)
        return (batch,) if self.time is None else (batch, self.time)

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make noise: standard normal, like normalized audio."""
        return self._fill([1.0] * sizes[BATCH], sizes, seed)

    def sample(self, fixed: Sizes) -> Feeds:
        """Return noise, with one shorter row if there is a mask."""
        return self._fill([1.0, 0.6][: fixed.get(BATCH, 2)], usual_sizes(self) | dict(fixed), seed=1)

    def cases(self, fixed: Sizes) -> list[Case]:
        """Several batches and lengths, rows of different lengths, silence, real audio."""
        usual, full = usual_sizes(self), (1.0,)
        wanted: list[tuple[str, tuple[float, ...], float]] = [
            ("one row", full, 1.0),
            ("several rows", full * 5, 1.0),
            ("a short sound", full * 2, 0.6),
            ("a long sound", full * 2, 2.3),
            ("an odd length", full * 3, 1.371),
            ("ragged", (1.0, 0.6, 0.35), 1.0),
            ("ragged, long", (0.3, 1.0), 1.8),
        ]
        cases = []
        for seed, (description, shares, factor) in enumerate(wanted):
            if factor != 1.0 and (self.time is None or self.time.name in fixed):
                continue
            sizes = usual | ({self.time.name: int(self.time.usual * factor)} if self.time else {}) | dict(fixed)
            feeds = self._fill(list(shares[: fixed.get(BATCH, len(shares))]), sizes, seed)
            cases.append(Case(description, feeds, None))
        quiet = self._fill([1.0] * fixed.get(BATCH, 2), usual | dict(fixed), seed=9)
        cases.append(Case("almost silent", scaled(quiet, 0.01), None))
        for seconds in (_SECONDS, _OTHER_SECONDS):
            real = _prepare(self.extractor, [_sound(self.extractor, seconds)] * fixed.get(BATCH, 2))
            feeds = {name: real[name] for name in self.prepared}
            if seconds == _SECONDS or self.time is None or self.time.name not in fixed:
                cases.append(Case(f"a sound of {seconds:g} s", feeds, None))
        return cases

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Masks, and numbers like normalized audio."""
        return {name: Recipe(MASK if "mask" in name else NORMAL) for name in self.prepared}

    def _fill(self, shares: list[float], sizes: Sizes, seed: int) -> Feeds:
        """Make one row for each of `shares`, the fraction of it that is audio; the rest is padding, by the mask."""
        generator = np.random.default_rng(seed)
        feeds: Feeds = {}
        for name, array in self.prepared.items():
            dims = [len(shares), *array.shape[1:]]
            axis = self.moving.get(name)
            if axis is not None and self.time is not None:
                dims[axis] = sizes[self.time.name]
            if "mask" in name:
                lengths = np.maximum(1, (np.array(shares) * dims[1]).astype(int))
                feeds[name] = (np.arange(dims[1])[None] < lengths[:, None]).astype(array.dtype)
            else:
                feeds[name] = generator.standard_normal(dims).astype(array.dtype)
        return feeds


def _prepare(extractor: Any, sounds: list[NDArray[np.float32]]) -> Feeds:
    rate = _rate(extractor)
    return prepare(lambda: extractor(sounds, sampling_rate=rate, return_tensors="pt"), "feature extractor")


def _rate(extractor: Any) -> int:
    rate = getattr(extractor, "sampling_rate", None)
    if rate is None:
        return _SAMPLING_RATE
    if not isinstance(rate, int) or isinstance(rate, bool) or rate <= 0:
        raise CheckpointError(
            f"the checkpoint's feature extractor has the sampling_rate {rate!r}, which is not a number of samples",
            f"correct it in {PROCESSOR_FILE}",
        )
    return rate


def _sound(extractor: Any, seconds: float) -> NDArray[np.float32]:
    """Synthesize a rising tone with overtones under a slow envelope, somewhat like a voice: float32 [T]."""
    time = np.arange(int(seconds * _rate(extractor))) / _rate(extractor)
    tone = sum(np.sin(2 * np.pi * (110 + 60 * time) * k * time) / k for k in (1, 2, 3, 5))
    return (tone * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * time)) * 0.2).astype(np.float32)
