"""Combined modalities: an encoder's input with a decoder's ids, or two encoders side by side (CLIP)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxtool.export.modalities.modality import DECODER_SEQUENCE, Axis, Feeds, Modality, Sizes
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.recipes import IDS, Recipe

_LONGEST = 64


@dataclass(frozen=True)
class WithDecoder:
    """The encoder's inputs, plus decoder ids: int64 [batch_size, decoder_sequence].

    Attributes:
        vocabulary_size: the number of ids the decoder knows.
        start_id: the first token of every text.
        longest: the maximum number of decoder tokens; None for no limit.
        pad_id: the padding after texts shorter than others in the batch, which some decoders (FSMT's) detect among the
            ids themselves; None if they do not.
    """

    encoder: Modality
    vocabulary_size: int
    start_id: int
    longest: int | None
    pad_id: int | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The encoder's axes, and the decoder length."""
        return (*self.encoder.axes, Axis(DECODER_SEQUENCE, 5, 6, when_fixed=1 << (self._long.bit_length() - 1)))

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make random inputs for both."""
        return self._add(self.encoder.feeds(sizes, seed=seed), sizes[DECODER_SEQUENCE], seed)

    def sample(self, fixed: Sizes) -> Feeds:
        """Return the encoder's sample with decoder ids added: one text is shorter, so that there is padding."""
        return self._add(self.encoder.sample(fixed), fixed.get(DECODER_SEQUENCE, 5), seed=1, ragged=True)

    def cases(self, fixed: Sizes) -> list[Case]:
        """The encoder's cases, combined with texts of several lengths, some again with padding.

        Cases that differ only in padding get the same text.
        """
        cases: list[Case] = []
        seeds: dict[str, int] = {}
        for number, case in enumerate(self.encoder.cases(fixed)):
            seed = seeds[case.description] = seeds.get(case.like, number)
            length = fixed.get(DECODER_SEQUENCE, self._lengths[seed % len(self._lengths)])
            cases.append(replace(case, feeds=self._add(dict(case.feeds), length, seed)))
            if self.pad_id is not None and length > 1 and number < len(self._lengths):
                feeds = self._add(dict(case.feeds), length, seed, ragged=True)
                description = f"{case.description}, padding in the decoder"
                cases.append(replace(case, description=description, feeds=feeds, like=""))
        return cases

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The encoder's kinds, and the decoder ids."""
        return {**self.encoder.recipes, "decoder_input_ids": self._ids}

    @property
    def _ids(self) -> Recipe:
        return Recipe(IDS, self.vocabulary_size, first=self.start_id, pad=self.pad_id)

    @property
    def _long(self) -> int:
        return min(self.longest or _LONGEST, _LONGEST)

    @property
    def _lengths(self) -> tuple[int, ...]:
        """Return the decoder input lengths for the cases; 1 is the first step of generation."""
        return (5, 1, 9, self._long, 2, 7)

    def _add(self, feeds: Feeds, length: int, seed: int, *, ragged: bool = False) -> Feeds:
        batch = len(next(iter(feeds.values())))
        # Rows of two or three lengths, shorter ones first.
        missing = (np.arange(batch)[:, None] + 1) % min(length, 3) if ragged else np.zeros((batch, 1), np.int64)
        content = np.arange(length)[None] < length - missing
        ids = self._ids.draw((batch, length), content, np.random.default_rng(seed))
        return {**feeds, "decoder_input_ids": ids}


@dataclass(frozen=True)
class SideBySide:
    """Two modalities with a batch each: every text is compared with every image."""

    parts: tuple[Modality, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of all parts, which have different names."""
        return tuple(axis for part in self.parts for axis in part.axes)

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make random inputs for all parts."""
        return _merge(part.feeds(sizes, seed=seed) for part in self.parts)

    def sample(self, fixed: Sizes) -> Feeds:
        """Return the samples to trace all parts on."""
        return _merge(part.sample(fixed) for part in self.parts)

    def cases(self, fixed: Sizes) -> list[Case]:
        """Combine the cases of the parts; parts with fewer cases repeat theirs."""
        columns = [part.cases(fixed) for part in self.parts]
        cases = []
        for row in range(max(map(len, columns))):
            picked = [column[row % len(column)] for column in columns]
            description = " and ".join(case.description for case in picked)
            cases.append(Case(description, _merge(dict(case.feeds) for case in picked), None))
        return cases

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The kinds of all parts."""
        return {name: kind for part in self.parts for name, kind in part.recipes.items()}


def _merge(parts: Iterable[Feeds]) -> Feeds:
    return {name: array for part in parts for name, array in part.items()}
