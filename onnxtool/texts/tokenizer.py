"""Turn texts into the model's inputs with its own tokenizer.json, and ids back into tokens.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, normalizers

from onnxtool.errors import InputError
from onnxtool.reports import Json
from onnxtool.texts.checkpoint_folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.texts.limits import Limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Tokens that frame a text; they stand for no term of it.
_FRAMING = ("pad_token", "cls_token", "sep_token", "bos_token", "eos_token")


@dataclass(frozen=True)
class EncodedText:
    """A text as the model reads it, without padding.

    Attributes:
        ids: the tokens, special ones included.
        segment_ids: the segment of each token.
        is_special: whether the tokenizer added the token, for each.
        truncated: whether the text was longer than the limit.
    """

    ids: tuple[int, ...]
    segment_ids: tuple[int, ...]
    is_special: tuple[bool, ...]
    truncated: bool

    def __len__(self) -> int:
        return len(self.ids)


class TextTokenizer:
    """The tokenizer of a checkpoint.

    What tokenizer.json says of truncation and padding is replaced: many checkpoints carry the settings of the
    last training run there (all-MiniLM-L6-v2: pad everything to 128), which are not those of the model.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        """Read the tokenizer in `folder`.

        Raises:
            InputError: the tokenizers library cannot read it.
        """
        self._folder = folder
        path = folder.path / TOKENIZER_NAME
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise InputError(
                f"cannot read {path}: {error}", "save it again with a newer transformers, or pass --model_name"
            ) from error
        self._config = folder.read("tokenizer_config.json")
        self._pad_id, self._pad_segment_id, self._pad_side = self._padding()
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if folder.read("sentence_bert_config.json").get("do_lower_case") is True:
            self._lower_case()

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._tokenizer.get_vocab_size()

    @cached_property
    def mask_token(self) -> str | None:
        """The token that a masked language model fills in, or None where this tokenizer has none."""
        return self._named_token("mask_token")

    @cached_property
    def framing_ids(self) -> frozenset[int]:
        """The ids of the tokens that pad, open, separate and close texts."""
        tokens = [self._named_token(name) for name in _FRAMING]
        ids = [self._tokenizer.token_to_id(token) for token in tokens if token is not None]
        return frozenset({self._pad_id, *(token_id for token_id in ids if token_id is not None)})

    def id_of(self, token: str) -> int | None:
        """Return the id of `token`, or None where there is no such token."""
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it."""
        # A model may have more rows than its tokenizer has tokens: vocabularies are padded to multiples of 64.
        return self._tokenizer.id_to_token(token_id) or f"[{token_id}]"

    def word(self, token_id: int) -> str:
        """Return the token as it reads in a text, e.g. `Paris` for byte-level `ĠParis`."""
        return self._tokenizer.decode([token_id]).strip() or self.token(token_id)

    def truncate_to(self, limit: Limit) -> None:
        """Cut texts to `limit` tokens from now on, special tokens included.

        Raises:
            InputError: the limit leaves no room for a token of the text.
        """
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if limit.tokens <= special:
            raise InputError(
                f"{limit.source} allows {limit.tokens} tokens, and {special} of them are special ones",
                "export the model for longer texts",
            )
        self._tokenizer.enable_truncation(limit.tokens, direction=_side(self._config, "truncation_side"))

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Read each of `texts`, cut to the limit."""
        return [
            EncodedText(
                ids=tuple(encoding.ids),
                segment_ids=tuple(encoding.type_ids),
                is_special=tuple(bool(flag) for flag in encoding.special_tokens_mask),
                truncated=bool(encoding.overflowing),
            )
            for encoding in self._tokenizer.encode_batch(list(texts))
        ]

    def pad(self, texts: Sequence[EncodedText], sequence_length: int | None = None) -> dict[str, NDArray[np.int64]]:
        """Put `texts` into arrays: input_ids, attention_mask and token_type_ids, each int64 [B, S].

        Args:
            texts: B texts, none longer than S.
            sequence_length: S; the longest of the texts where it is None.
        """
        longest = sequence_length or max(len(text) for text in texts)
        ids = np.full((len(texts), longest), self._pad_id, np.int64)
        segments = np.full_like(ids, self._pad_segment_id)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            place = slice(longest - len(text), longest) if self._pad_side == "left" else slice(0, len(text))
            ids[row, place], segments[row, place], mask[row, place] = text.ids, text.segment_ids, 1
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}

    def _padding(self) -> tuple[int, int, str]:
        """Return id, segment and side of padding: tokenizer_config.json, else tokenizer.json, else config.json."""
        stored = self._tokenizer.padding or {}
        side = _side(self._config, "padding_side", stored.get("direction", "right"))
        segment_id = self._config.get("pad_token_type_id", stored.get("pad_type_id", 0))
        token = self._named_token("pad_token")
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        if token_id is None:
            # Any id will do in the end: a model that reads padding is told to ignore it by the mask.
            token_id = stored.get("pad_id", self._folder.read("config.json").get("pad_token_id") or 0)
        return _index(token_id), _index(segment_id), side

    def _named_token(self, name: str) -> str | None:
        for config in (self._config, self._folder.read("special_tokens_map.json")):
            value = config.get(name)
            if isinstance(value, dict):  # an added token with its flags
                value = value.get("content")
            if isinstance(value, str):
                return value
        return None

    def _lower_case(self) -> None:
        """Lower texts before all else, which sentence-transformers does on top of the tokenizer's own rules."""
        present = self._tokenizer.normalizer
        lower = normalizers.Lowercase()
        self._tokenizer.normalizer = normalizers.Sequence([lower, present]) if present else lower


def _side(config: dict[str, Json], key: str, default: str = "right") -> str:
    return "left" if config.get(key, default) == "left" else "right"


def _index(value: Json) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
