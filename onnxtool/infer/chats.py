"""Read texts: truncate, split or refuse long ones, and render chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxtool.checkpoint.chat_templates import ChatTemplate, common_end
from onnxtool.checkpoint.limits import EncodedText, Limit, ReadOptions, Text
from onnxtool.checkpoint.tokenizer import TextTokenizer, require_unicode
from onnxtool.errors import InputError
from onnxtool.infer.options import LongText, Overlap, check_overlap
from onnxtool.options import Options, checked
from onnxtool.reports import short_repr

_OVERLAP = 4  # by default neighbouring windows share this fraction of their tokens


class LongTexts(Options):
    """Handling of long texts.

    Attributes:
        way: `truncate` reads the part that fits, `window` reads the whole text in windows, and `fail` refuses it.
        overlap: number of tokens shared by neighbouring windows; None for a quarter of the model's limit.
    """

    way: LongText = "truncate"
    overlap: Overlap = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.way, self.overlap)

    @classmethod
    @checked
    def of(cls, way: LongTexts | str) -> LongTexts:
        """Return `way`, converted if it is a name.

        Raises:
            InputError: there is no such way.
        """
        return way if isinstance(way, LongTexts) else cls(way)

    @checked
    def tokenize(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[Text],
        limit: Limit | None,
        options: ReadOptions,
        *,
        first: int = 1,
    ) -> list[list[EncodedText]]:
        """Tokenize each of `texts` as windows no longer than `limit`.

        Args:
            tokenizer: the tokenizer.
            texts: texts, and pairs of texts.
            limit: the maximum number of tokens per window; None for no limit.
            options: tokenization options.
            first: the number of the first text, for errors.

        Raises:
            InputError: a text is not valid Unicode, or has no tokens or too many.
        """
        require_unicode(texts, first)
        if limit is None or self.way != "window":
            encoded = tokenizer.encode(texts, limit, options)
            if self.way == "fail" and limit is not None:
                _require_whole(encoded, limit, first)
            _require_tokens(texts, encoded, first)
            return [[text] for text in encoded]
        windows = tokenizer.encode_windows(texts, limit, self.overlap_of(limit), options)
        _require_tokens(texts, [group[0] for group in windows], first)
        return windows

    @checked
    def overlap_of(self, limit: Limit) -> int:
        """Return the number of tokens shared by neighbouring windows of `limit`."""
        return limit.tokens // _OVERLAP if self.overlap is None else self.overlap


CUT = LongTexts()


def _require_whole(texts: Sequence[EncodedText], limit: Limit, first: int) -> None:
    for number, text in enumerate(texts, start=first):
        if text.truncated:
            raise InputError(
                f"text {number} has more than {limit.tokens} tokens ({limit.source})",
                "cut it (--long truncate), or read it in windows (--long window), unless the model writes text",
            )


def _require_tokens(texts: Sequence[Text], encoded: Sequence[EncodedText], first: int) -> None:
    """Refuse a text without any tokens, which leaves nothing to pool."""
    for number, (text, tokens) in enumerate(zip(texts, encoded, strict=True), start=first):
        if not len(tokens):
            raise InputError(
                f"text {number} has no tokens: {str(text)[:60]!r}",
                "leave it out; this tokenizer adds nothing to a text",
            )


_AS_WRITTEN = ReadOptions(adds_special=False)
_MOST_ENDS = 256  # cached entries: one per prompt, task and form of a text


@short_repr
@dataclass(frozen=True)
class Chats:
    """A template, and the tokenizer for its output. Threads may share it."""

    template: ChatTemplate
    tokenizer: TextTokenizer
    _ends: dict[tuple[str, str | None, bool], tuple[int, ...]] = field(default_factory=dict, compare=False)

    def tokenize(
        self,
        texts: Sequence[Text],
        prompt: str,
        limit: Limit | None,
        long: LongTexts,
        *,
        task: str | None = None,
        first: int = 1,
    ) -> list[list[EncodedText]]:
        """Tokenize each of N texts, or pairs of texts, as one window.

        Args:
            texts: texts, and pairs of texts.
            prompt: the system message; empty for none.
            limit: the maximum number of tokens; None for no limit.
            long: handling of longer texts; windows are not possible, because a template is for a whole text.
            task: as in ChatTemplate.render.
            first: the number of the first text, for errors.

        Raises:
            InputError: the template fails or omits part of a pair, or a text has no tokens or too many.
        """
        require_unicode(texts, first)
        if any(isinstance(text, tuple) for text in texts):
            self._takes_pairs  # noqa: B018  raises where it does not
        chats = self.template.render(texts, prompt, task)
        if long.way == "window":
            whole = self.tokenizer.encode(chats, None, _AS_WRITTEN)
            if limit is not None and any(len(chat) > limit.tokens for chat in whole):
                raise InputError(
                    "a text that is put into a chat template cannot be read in windows",
                    "cut it (--long truncate), or pass passages",
                )
        handling = replace(long, way="truncate", overlap=None) if long.way == "window" else long
        windows = handling.tokenize(self.tokenizer, chats, limit, _AS_WRITTEN, first=first)
        return [
            [self._with_end(window, text, prompt, task) if window.truncated else window for window in group]
            for text, group in zip(texts, windows, strict=True)
        ]

    @cached_property
    def _takes_pairs(self) -> None:
        self.template.require_pairs()

    def _with_end(self, window: EncodedText, text: Text, prompt: str, task: str | None) -> EncodedText:
        """Overwrite the last tokens of a truncated text with the template's ending."""
        if not self.template.restores_end:
            return window
        key = (prompt, task, isinstance(text, str))
        if key not in self._ends:
            if len(self._ends) >= _MOST_ENDS:
                self._ends.clear()
            chats = self.template.render(self.template.fillers(text), prompt, task)
            first, other = self.tokenizer.encode(chats, None, _AS_WRITTEN)
            self._ends[key] = common_end(first.ids, other.ids)
        end = self._ends[key][-len(window) :]
        return replace(window, ids=window.ids[: len(window) - len(end)] + end)
