"""What is left of a text that has more tokens than a model takes: its beginning, its end, or windows over all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class TokenPlaces:
    """Where in the texts the tokens stand.

    Attributes:
        parts: 0 for tokens of the text, or of the first of a pair; 1 for those of the second; -1 for what the
            tokenizer added.
        spans: first character, and the one behind the last, in the text that the token is of; (0, 0) where added.
        words: which word of that text; tokens of the same word have the same number. -1 where added.
        first: how many tokens of the text that is cut stand before this window.
    """

    parts: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    words: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True)
class EncodedText:
    """A text, or a pair of texts, as the model reads it, without padding.

    Attributes:
        ids: the tokens, special ones included.
        segment_ids: the segment of each token.
        is_special: whether the tokenizer added the token, for each.
        truncated: whether the text was longer than the limit; windows are not truncated.
        places: where the tokens stand; None where that was not asked for.
    """

    ids: tuple[int, ...]
    segment_ids: tuple[int, ...]
    is_special: tuple[bool, ...]
    truncated: bool
    places: TokenPlaces | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def keep(self, kept: Sequence[range], *, truncated: bool, first: int = 0) -> EncodedText:
        """Return the tokens of `kept` alone, ranges of places in their order."""
        places = self.places
        if places is not None:
            places = TokenPlaces(
                _taken(places.parts, kept), _taken(places.spans, kept), _taken(places.words, kept), first
            )
        special = _taken(self.is_special, kept)
        return EncodedText(_taken(self.ids, kept), _taken(self.segment_ids, kept), special, truncated, places)


def _taken(values: tuple[Value, ...], kept: Sequence[range]) -> tuple[Value, ...]:
    return tuple(value for part in kept for value in values[part.start : part.stop])


def longest_first(lengths: tuple[int, int], room: int) -> tuple[int, int]:
    """Return how many tokens are kept of the two texts of a pair, so that both together fit into `room`.

    The longer one is cut until both are of one length, then both. The same as the `longest_first` of the tokenizers
    library, which transformers and sentence-transformers cut pairs by.
    """
    if sum(lengths) <= room:
        return lengths
    shorter = min(*lengths, room // 2)
    return (shorter, room - shorter) if lengths[0] <= lengths[1] else (room - shorter, shorter)


def window_starts(length: int, room: int, overlap: int) -> Iterator[int]:
    """Yield the first token of each window of `room` tokens over `length`, neighbours sharing `overlap` of them."""
    step = room - overlap
    start = 0
    yield start
    while start + room < length:
        start += step
        yield start
