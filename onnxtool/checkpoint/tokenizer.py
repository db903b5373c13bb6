"""Convert texts to the model's inputs with its own tokenizer.json, and ids back to tokens.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Encoding, Tokenizer

from onnxtool.checkpoint.files import FRAMING_ROLES, ROLES, stated_token
from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.checkpoint.limits import PLAIN, EncodedText, Limit, ReadOptions, Text, TokenOffsets, WholeText, bounded
from onnxtool.checkpoint.module_forms import POOLING_MASK, behind_prompts
from onnxtool.checkpoint.tokenizer_guard import require_harmless, tokenizer_errors
from onnxtool.checkpoint.tokenizer_library import EffectiveTokenizer, lower_case, prefix_tokens
from onnxtool.errors import InputError, first_line
from onnxtool.guarded import in_time
from onnxtool.reading import read_text
from onnxtool.reports import Json

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGEST_INDEX = 2**31 - 1
# The part that is read of a huge text must contain at least this multiple of the kept tokens.
_ENOUGH = 2
# Time limit for a tokenizer with regular expressions on a busy machine; a slow one reads 500,000 characters per second.
_MAX_SECONDS, _SLOWEST = 10.0, 20_000

_MAX_TOKENS_PER_LETTER = 1_000  # with the tokens that frame it


class TextTokenizer:
    """The tokenizer of a checkpoint.

    The truncation and padding settings in tokenizer.json are replaced: in many checkpoints they are left over from the
    last training run (all-MiniLM-L6-v2: pad everything to 128) and do not describe the model.

    Attributes:
        rules: the tokenizer.json, as transformers reads it.
    """

    def __init__(self, folder: CheckpointFolder, effective: EffectiveTokenizer | None = None) -> None:
        """Read the tokenizer in `folder`.

        Args:
            folder: a folder with a tokenizer.json.
            effective: transformers' reading of the files in the folder; None if it matches tokenizer.json.

        Raises:
            InputError: the tokenizers library cannot read it.
        """
        self._folder = folder
        self._path = folder.locate(TOKENIZER_NAME) or folder.path / TOKENIZER_NAME
        try:
            stored = folder.embedded or read_text(self._path)
        except PermissionError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}", "check its permissions") from error
        except (OSError, UnicodeDecodeError) as error:
            raise self._unreadable(first_line(error)) from error
        content = stored if effective is None or effective.content is None else effective.content
        self.rules = content
        self._is_plain = require_harmless(content, self._unreadable)
        with tokenizer_errors(self._unreadable):
            self._tokenizer = Tokenizer.from_str(content)
        self._config = {**folder.read_object("tokenizer_config.json"), **(effective.settings if effective else {})}
        self._pad_id, self._pad_segment_id, self._pad_side = self._padding()
        truncation = (self._tokenizer.truncation or {}) if folder.embedded else {}
        self._cut_side = _side(self._config, "truncation_side", truncation.get("direction", "right"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        with tokenizer_errors(self._unreadable):
            num_tokens = len(self._tokenizer.encode("a").ids)
        if num_tokens > _MAX_TOKENS_PER_LETTER:  # each text would take as long
            raise self._unreadable(f"it makes {num_tokens:,} tokens of a text of one letter")
        if folder.sentence_modules.lower_cases:
            lower_case(self._tokenizer)
        if prefixes := folder.sentence_modules.prefixes:
            with tokenizer_errors(self._failing):
                self._tokenizer.add_special_tokens(
                    prefix_tokens(
                        prefixes,
                        self._tokenizer.get_vocab(with_added_tokens=True),
                        lambda text: self._tokenizer.encode(text, add_special_tokens=False).tokens,
                    )
                )
        self.adds_special = folder.sentence_modules.adds_special_tokens

    @property
    def content(self) -> str:
        """A tokenizer.json that says all, also which side is padded and cut, and whether special tokens are added."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        if not self.adds_special:
            copy.post_processor = None
        copy.enable_padding(direction=self._pad_side, pad_id=self._pad_id, pad_type_id=self._pad_segment_id)
        copy.enable_truncation(_LARGEST_INDEX, direction=self._cut_side)
        return copy.to_str()

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """The tokens that are found in a text before anything else of it is read."""
        return tuple(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    @property
    def pads_left(self) -> bool:
        """Whether padding precedes the text."""
        return self._pad_side == "left"

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, including added ones."""
        return self._tokenizer.get_vocab_size()

    @cached_property
    def mask_token(self) -> str | None:
        """The mask token of a masked language model, or None if the tokenizer has none."""
        return self.named_token("mask_token")

    @cached_property
    def framing_ids(self) -> frozenset[int]:
        """The ids of the tokens that pad, open, separate and close texts, and are not terms of them."""
        tokens = [self.named_token(name) for name in FRAMING_ROLES]
        ids = [self._tokenizer.token_to_id(token) for token in tokens if token is not None]
        return frozenset({self._pad_id, *(token_id for token_id in ids if token_id is not None)})

    def expand(self, text: EncodedText, length: int, token_id: int, *, attended: bool) -> EncodedText:
        """Extend a text to at least `length` tokens, with `token_id` in the place of padding.

        Args:
            text: the tokenized text.
            length: the minimum length of the result; longer texts are unchanged.
            token_id: the token to add.
            attended: whether the model attends to the added tokens.
        """
        count = length - len(text)
        if count <= 0:
            return text
        ids, segments = (token_id,) * count, (self._pad_segment_id,) * count
        added = EncodedText(ids, segments, (True,) * count, truncated=False, attended=(attended,) * count)
        first, second = (added, text) if self.pads_left else (text, added)
        return replace(
            text,
            ids=first.ids + second.ids,
            segment_ids=first.segment_ids + second.segment_ids,
            is_special=first.is_special + second.is_special,
            attended=tuple(seen for part in (first, second) for seen in (part.attended or (True,) * len(part))),
            offsets=None if text.offsets is None else text.offsets.framed(count, before=self.pads_left),
        )

    @property
    def expanding_tokens(self) -> tuple[str | None, str | None]:
        """The default tokens for query expansion; the first one that exists is used."""
        return self.named_token("mask_token"), self.named_token("eos_token")

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The ids of all special tokens of the checkpoint, like transformers' `all_special_ids`."""
        named: list[Json] = [self.named_token(name) for name in ROLES]
        for key in ("extra_special_tokens", "additional_special_tokens"):
            stated = self._config.get(key)
            values = stated.values() if isinstance(stated, dict) else stated if isinstance(stated, list) else ()
            named += [value.get("content") if isinstance(value, dict) else value for value in values]
        ids = [self._tokenizer.token_to_id(token) for token in named if isinstance(token, str)]
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def unknown_ids(self) -> frozenset[int]:
        """The id of the unknown token; empty if the tokenizer has none."""
        token = self.named_token("unk_token")
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return frozenset(() if token_id is None else (token_id,))

    def named_token(self, name: str) -> str | None:
        """Return a token by its role, such as `bos_token`; None if the checkpoint names none."""
        return stated_token(name, self._config, self._folder.read_object("special_tokens_map.json"))

    def id_of(self, token: str) -> int | None:
        """Return the id of `token`, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str:
        """Return the token as spelled in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or f"[{token_id}]"

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """All tokens as spelled in the vocabulary, by id, up to the largest: ids may have gaps."""
        return tuple(map(self.token, range(max(self._tokenizer.get_vocab().values(), default=-1) + 1)))

    def vocabulary_of(self, width: int) -> tuple[str, ...]:
        """Return the vocabulary of a model, which may be wider: vocabularies are padded to multiples of 64."""
        known = self.vocabulary
        return known + tuple(map(self.token, range(len(known), width))) if width > len(known) else known

    def word(self, token_id: int) -> str:
        """Return the token as it appears in text, e.g. `Paris` for byte-level `ĠParis`."""
        return self._decode([token_id], skip_special_tokens=False).strip() or self.token(token_id)

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return self._decode(list(ids), skip_special_tokens=True)

    def require_room(self, limit: Limit, *, is_pair: bool = False) -> None:
        """Refuse a limit that leaves no room for any token of the text.

        Raises:
            InputError: special tokens take up all of it.
        """
        special = self._tokenizer.num_special_tokens_to_add(is_pair=is_pair) if self.adds_special else 0
        if limit.tokens <= special:
            raise InputError(
                f"{limit.source} allows {limit.tokens} tokens, and {special} of them are special ones",
                "export the model for longer texts",
            )

    def encode(
        self, texts: Sequence[Text], limit: Limit | None = None, options: ReadOptions = PLAIN
    ) -> list[EncodedText]:
        """Tokenize each of `texts`, truncated to `limit`.

        May be called from several threads at once.

        Args:
            texts: texts, and pairs of texts.
            limit: the maximum number of tokens per text, including special ones.
            options: tokenization options.

        Raises:
            InputError: a text is not valid Unicode, or the limit leaves no room for it.
        """
        if limit is None:
            return [whole.encoded for whole in self._encode_whole(texts, options)]
        side = options.cut_side or self._cut_side
        # Positions in a truncated tail would differ from positions in the text.
        whole = options.with_offsets and side == "left"
        parts = list(texts) if whole else [bounded(text, limit, side) for text in texts]
        whole_texts = self._encode_whole(parts, options)
        for position, (text, part) in enumerate(zip(texts, parts, strict=True)):
            # The part read of a huge text may have too few tokens to determine the truncation.
            if part is not text and min(map(len, whole_texts[position].parts)) < _ENOUGH * limit.tokens:
                whole_texts[position] = self._encode_whole([text], options)[0]
        return [text.cut(limit, side, keeps_first=options.keeps_first) for text in whole_texts]

    def encode_windows(
        self, texts: Sequence[Text], limit: Limit, overlap: int, options: ReadOptions = PLAIN
    ) -> list[list[EncodedText]]:
        """Tokenize each of `texts` in full, in windows of `limit` tokens; each window repeats the first text of a pair.

        Args:
            texts: texts, and pairs of texts.
            limit: the maximum number of tokens per window, including special ones.
            overlap: number of tokens shared by neighbouring windows.
            options: tokenization options.

        Raises:
            InputError: a text is not valid Unicode, or the limit leaves no room for windows with that overlap.
        """
        return [whole.windows(limit, overlap, options.num_leading) for whole in self._encode_whole(texts, options)]

    def count_prompt(self, prompt: str, limit: Limit | None) -> int:
        """Return the number of leading prompt tokens, counted as in sentence-transformers.

        This is the tokenized prompt by itself, truncated to `limit`, without a special token at its end, whether added
        by the tokenizer or part of the prompt.
        """
        (alone,) = self.encode([prompt], limit)
        return len(alone) - int(len(alone) > 0 and (alone.is_special[-1] or alone.ids[-1] in self._special_ids))

    def pad(self, texts: Sequence[EncodedText], sequence_length: int | None = None) -> dict[str, NDArray[np.int64]]:
        """Collate `texts` into arrays: input_ids, attention_mask and token_type_ids, each int64 [B, S].

        Also pooling_mask if a text has a prompt that is excluded from pooling.

        Args:
            texts: B texts, none longer than S.
            sequence_length: S; None for the length of the longest text.
        """
        longest = sequence_length or max(len(text) for text in texts)
        ids = np.full((len(texts), longest), self._pad_id, np.int64)
        segments = np.full_like(ids, self._pad_segment_id)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            position = slice(longest - len(text), longest) if self.pads_left else slice(0, len(text))
            ids[row, position], segments[row, position] = text.ids, text.segment_ids
            mask[row, position] = 1 if text.attended is None else text.attended
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
        prompts = [text.num_prompt for text in texts]
        return {**arrays, POOLING_MASK: behind_prompts(mask > 0, prompts).astype(np.int64)} if any(prompts) else arrays

    def _encode_whole(self, texts: Sequence[Text], options: ReadOptions) -> list[WholeText]:
        with_offsets = options.with_offsets
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        call = partial(encode, list(texts), add_special_tokens=self.adds_special and options.adds_special)
        try:
            with tokenizer_errors(self._failing):
                encodings = call() if self._is_plain else in_time(call, _MAX_SECONDS + _size(texts) / _SLOWEST)
        except TimeoutError:
            raise self._failing(f"its rules take too long for {_size(texts):,} characters") from None
        except TypeError:  # raised for a string that is not valid UTF-8
            require_unicode(texts)
            raise
        return [_whole(*item, with_offsets=with_offsets) for item in zip(encodings, texts, strict=True)]

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        with tokenizer_errors(self._failing):
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _unreadable(self, reason: str) -> InputError:
        return InputError(
            f"cannot read {self._path}: {reason}", "save it again with a newer transformers, or pass --model_name"
        )

    def _failing(self, reason: str) -> InputError:
        return InputError(
            f"{self._path} cannot read this text: {reason}",
            "the file is damaged or malicious; take it from the checkpoint again, or pass --model_name",
        )

    def _padding(self) -> tuple[int, int, str]:
        """Return the padding id, segment and side from tokenizer_config.json, else tokenizer.json, else config.json.

        A side in the model's stamp replaces that of the tokenizer.
        """
        stored = self._tokenizer.padding or {}
        side = _side(self._config, "padding_side", stored.get("direction", "right"))
        side = self._folder.padding if self._folder.padding in ("left", "right") else side
        segment_id = self._config.get("pad_token_type_id", stored.get("pad_type_id", 0))
        token = self.named_token("pad_token")
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        if token_id is None:
            # Any id will do as a last resort: the mask tells the model to ignore padding.
            token_id = stored.get("pad_id", self._folder.read_object("config.json").get("pad_token_id") or 0)
        return _index(token_id), _index(segment_id), side


def _size(texts: Sequence[Text]) -> int:
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)


def _whole(encoding: Encoding, text: Text, *, with_offsets: bool) -> WholeText:
    stated = encoding.sequence_ids  # None where the tokenizer added the token
    offsets = None
    if with_offsets:
        parts = tuple(-1 if part is None else part for part in stated)
        words = _words(encoding, parts, (text,) if isinstance(text, str) else text)
        offsets = TokenOffsets(parts, tuple(encoding.offsets), words)
    special = tuple([part is None for part in stated])
    whole = EncodedText(tuple(encoding.ids), tuple(encoding.type_ids), special, truncated=False, offsets=offsets)
    return WholeText(whole, tuple([_range_of(stated, part) for part in range(encoding.n_sequences)]))


def _words(encoding: Encoding, parts: tuple[int, ...], texts: tuple[str, ...]) -> tuple[int, ...]:
    """Number the words of each part; for tokenizers without a pre-tokenizer, words are separated by spaces."""
    stated = tuple(-1 if word is None else word for word in encoding.word_ids)
    if any(word > 0 for word in stated):
        return stated
    words: list[int] = []
    word = end_before = 0
    for position, (part, (start, end)) in enumerate(zip(parts, encoding.offsets, strict=True)):
        if part < 0 or (position and parts[position - 1] != part):
            word = end_before = 0
        if part >= 0:
            # A space begins a word, whether or not its token contains more than the space.
            begins = texts[part][start : start + 1].isspace() or texts[part][end_before:start].isspace()
            word += begins and end_before > 0
            end_before = end
        words.append(word if part >= 0 else -1)
    return tuple(words)


def _range_of(parts: Sequence[int | None], part: int) -> range:
    """Return the positions of a part's tokens; an empty range at the start if it has none."""
    count = parts.count(part)
    start = parts.index(part) if count else 0
    return range(start, start + count)


def require_unicode(texts: Sequence[Text], first: int = 1) -> None:
    """Refuse lone surrogates, which JSON and file names can hold but no tokenizer can read.

    Raises:
        InputError: a text contains one; texts are numbered from `first`.
    """
    for number, text in enumerate(texts, start=first):
        for part in text if isinstance(text, tuple) else (text,):
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputError(
                    f"text {number} has half of a surrogate pair, U+{ord(part[error.start]):04X}, "
                    f"as character {error.start + 1}",
                    "it is not valid Unicode; replace that character",
                ) from None


def _side(config: dict[str, Json], key: str, default: str = "right") -> str:
    return "left" if config.get(key, default) == "left" else "right"


def _index(value: Json) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_INDEX:
        return value
    return 0
