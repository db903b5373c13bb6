"""What becomes of texts that have more tokens than the model takes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtool.checkpoint.limits import EncodedText, Limit, ReadOptions, Text
from onnxtool.checkpoint.tokenizer import TextTokenizer, require_unicode
from onnxtool.errors import InputError
from onnxtool.infer.options import LongText, Overlap, check_overlap
from onnxtool.options import Options, checked

_OVERLAP = 4  # neighbouring windows share one token of so many


class LongTexts(Options):
    """How long texts are read.

    Attributes:
        way: `truncate` reads what fits, `window` reads all of a text in windows, and `fail` refuses it.
        overlap: tokens that neighbouring windows share; None for a quarter of what the model takes.
    """

    way: LongText = "truncate"
    overlap: Overlap = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.way, self.overlap)

    @classmethod
    @checked
    def of(cls, way: LongTexts | str) -> LongTexts:
        """Return `way`, made of its name where it is one.

        Raises:
            InputError: there is no such way.
        """
        return way if isinstance(way, LongTexts) else cls(way)

    @checked
    def read(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[Text],
        limit: Limit | None,
        options: ReadOptions,
        *,
        first: int = 1,
    ) -> list[list[EncodedText]]:
        """Read each of `texts` as windows that are no longer than `limit`.

        Args:
            tokenizer: reads them.
            texts: texts, and pairs of texts.
            limit: the most tokens of a window; None where there is no limit.
            options: how they are read.
            first: the number of the first text, for errors.

        Raises:
            InputError: a text is no Unicode text, or has no tokens or too many.
        """
        require_unicode(texts, first)
        if limit is None or self.way != "window":
            read = tokenizer.encode(texts, limit, options)
            if self.way == "fail" and limit is not None:
                _require_whole(read, limit, first)
            _require_tokens(texts, read, first)
            return [[text] for text in read]
        windows = tokenizer.encode_windows(texts, limit, self.overlap_of(limit), options)
        _require_tokens(texts, [group[0] for group in windows], first)
        return windows

    @checked
    def overlap_of(self, limit: Limit) -> int:
        """Return how many tokens neighbouring windows of `limit` share."""
        return limit.tokens // _OVERLAP if self.overlap is None else self.overlap


CUT = LongTexts()


def _require_whole(texts: Sequence[EncodedText], limit: Limit, first: int) -> None:
    for number, text in enumerate(texts, start=first):
        if text.truncated:
            raise InputError(
                f"text {number} has more than {limit.tokens} tokens ({limit.source})",
                "cut it (--long truncate), or read it in windows (--long window)",
            )


def _require_tokens(texts: Sequence[Text], read: Sequence[EncodedText], first: int) -> None:
    """Refuse a text without any token, which leaves nothing to pool over."""
    for number, (text, tokens) in enumerate(zip(texts, read, strict=True), start=first):
        if not len(tokens):
            raise InputError(
                f"text {number} has no tokens: {str(text)[:60]!r}",
                "leave it out; this tokenizer adds nothing to a text",
            )
