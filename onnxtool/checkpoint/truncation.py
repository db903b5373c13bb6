"""What is left of a text that has more tokens than a model takes: its beginning, its end, or windows over all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from onnxtool.checkpoint.limits import Limit
from onnxtool.errors import InputError
from onnxtool.reports import short_repr

Value = TypeVar("Value")

# A text, or a pair of texts.
Text = str | tuple[str, str]

# A text is huge from so many characters on for each token that is kept of it, and from so many in all.
_CHARACTERS_A_TOKEN, _LEAST_HUGE = 64, 1 << 14


@dataclass(frozen=True)
class ReadOptions:
    """How texts are read.

    Attributes:
        with_offsets: whether to say where in the text the tokens are, which costs time.
        cut_side: on which side long texts are cut, `left` or `right`; None for what the tokenizer says.
        keeps_first: whether the first text of a pair stays whole; else the longer one is cut first.
        num_leading: so many characters of a text, which are a prompt, stand in each of its windows; needs offsets.
        adds_special: whether tokens are put around a text; a chat template writes its own.
    """

    with_offsets: bool = False
    cut_side: str | None = None
    keeps_first: bool = False
    num_leading: int = 0
    adds_special: bool = True


PLAIN = ReadOptions()


@short_repr
@dataclass(frozen=True)
class TokenOffsets:
    """Where in the texts the tokens are.

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

    def framed(self, count: int, *, before: bool) -> TokenOffsets:
        """Return them with `count` added tokens before or behind."""
        nowhere, places = (-1,) * count, ((0, 0),) * count
        if before:
            return TokenOffsets(nowhere + self.parts, places + self.spans, nowhere + self.words, self.first)
        return TokenOffsets(self.parts + nowhere, self.spans + places, self.words + nowhere, self.first)


@short_repr
@dataclass(frozen=True)
class EncodedText:
    """A text, or a pair of texts, as the model reads it, without padding.

    Attributes:
        ids: the tokens, special ones included.
        segment_ids: the segment of each token.
        is_special: whether the tokenizer added the token, for each.
        truncated: whether the text was longer than the limit; windows are not truncated.
        offsets: where in the texts the tokens are; None where that was not asked for.
        num_prompt: so many tokens at the start are not pooled over, because they are a prompt.
        attended: whether the model sees the token, for each; None where it sees all.
        counted: whether the vector of the token counts, for each, in late interaction; None where all count.
    """

    ids: tuple[int, ...]
    segment_ids: tuple[int, ...]
    is_special: tuple[bool, ...]
    truncated: bool
    offsets: TokenOffsets | None = None
    num_prompt: int = 0
    attended: tuple[bool, ...] | None = None
    counted: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def keep(self, kept: Sequence[range], *, truncated: bool, first: int = 0) -> EncodedText:
        """Return the tokens of `kept` alone, ranges of positions in their order."""
        offsets = self.offsets
        if offsets is not None:
            offsets = TokenOffsets(
                _taken(offsets.parts, kept), _taken(offsets.spans, kept), _taken(offsets.words, kept), first
            )
        special = _taken(self.is_special, kept)
        return EncodedText(_taken(self.ids, kept), _taken(self.segment_ids, kept), special, truncated, offsets)


@dataclass(frozen=True)
class WholeText:
    """A text, or a pair of texts, before anything is cut off.

    Attributes:
        parts: the positions of the tokens of each text, which stand together; all others the tokenizer added.
    """

    encoded: EncodedText
    parts: tuple[range, ...]

    def cut(self, limit: Limit, side: str, *, keeps_first: bool = False) -> EncodedText:
        """Return what is left within `limit`; what the tokenizer added stays.

        Raises:
            InputError: nothing of the text would be left.
        """
        if len(self.encoded) <= limit.tokens:
            return self.encoded
        lengths = [len(part) for part in self.parts]
        room = limit.tokens - (len(self.encoded) - sum(lengths))
        if len(lengths) == 2:
            if keeps_first:
                _require_room(lengths[0], room, limit, least=1)
                lengths[1] = room - lengths[0]
            else:
                _require_room(0, room, limit, least=2)
                lengths = list(longest_first((lengths[0], lengths[1]), room))
        else:
            _require_room(0, room, limit, least=1)
            lengths = [room]
        kept = [
            part[len(part) - length :] if side == "left" else part[:length]
            for part, length in zip(self.parts, lengths, strict=True)
        ]
        return self.encoded.keep(_with_framing(len(self.encoded), self.parts, kept), truncated=True)

    def windows(self, limit: Limit, overlap: int, num_leading: int = 0) -> list[EncodedText]:
        """Return windows of at most `limit` tokens over the last text; what comes before it is in each of them.

        Args:
            limit: the most tokens of a window.
            overlap: tokens that neighbours share.
            num_leading: the tokens of so many characters at the start of the first text are in each window as well.

        Raises:
            InputError: windows with that overlap have no room.
        """
        if len(self.encoded) <= limit.tokens:
            return [self.encoded]
        cut = self.parts[-1]
        if num_leading and len(self.parts) == 1:  # of a pair the first text is whole in each window
            assert self.encoded.offsets is not None  # noqa: S101  as ReadOptions says
            spans = self.encoded.offsets.spans
            cut = cut[sum(spans[place][1] <= num_leading for place in cut) :]
        taken = len(self.encoded) - len(cut)
        _require_room(taken, limit.tokens, limit, least=overlap + 1)
        room = limit.tokens - taken
        return [
            self.encoded.keep(
                _with_framing(len(self.encoded), [cut], [cut[start : start + room]]), truncated=False, first=start
            )
            for start in window_starts(len(cut), room, overlap)
        ]


def bounded(text: Text, limit: Limit, side: str) -> Text:
    """Return so much of a huge text as decides how it is cut: reading megabytes for 512 tokens takes seconds.

    It ends at a space, and what is made of the text before that does not depend on what follows. A text that is not
    huge is returned itself.
    """
    size = max(_LEAST_HUGE, _CHARACTERS_A_TOKEN * limit.tokens)
    if isinstance(text, str):
        return _bounded_part(text, size, side)
    if max(map(len, text)) <= size:
        return text
    return _bounded_part(text[0], size, side), _bounded_part(text[1], size, side)


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
    start = 0
    yield start
    while start + room < length:
        start += room - overlap
        yield start


def _taken(values: tuple[Value, ...], kept: Sequence[range]) -> tuple[Value, ...]:
    return tuple(chain.from_iterable(values[part.start : part.stop] for part in kept))


def _with_framing(length: int, parts: Sequence[range], kept: Sequence[range]) -> list[range]:
    """Return the positions that are `kept` of the parts, with all tokens before, between and after the parts."""
    taken, end = [], 0
    for part, left in sorted(zip(parts, kept, strict=True), key=lambda pair: (pair[0].start, pair[0].stop)):
        taken += [range(end, part.start), left]
        end = part.stop
    return [*taken, range(end, length)]


def _require_room(taken: int, room: int, limit: Limit, *, least: int) -> None:
    """Refuse to cut a text where the other tokens leave fewer than `least` for it."""
    if room - taken < least:
        raise InputError(
            f"{limit.source} allows {limit.tokens} tokens, which leaves {max(room - taken, 0)} for the text beside "
            f"the other tokens: fewer than {least}",
            "shorten the query, let windows share fewer tokens, or export the model for longer texts",
        )


def _bounded_part(text: str, size: int, side: str) -> str:
    if len(text) <= size:
        return text
    if side == "left":
        end = text[-size:]
        return end[max(end.find(" "), 0) :]
    beginning = text[:size]
    return beginning[: beginning.rfind(" ")] if " " in beginning else beginning
