"""Call the tokenizers library as transformers and other consumers do.

transformers builds a tokenizer from tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json
and its own class. If these disagree, tokenizer.json loses: `do_lower_case`, `strip_accents` and tokens added later are
settings of the trained model. Tested with transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.files import ROLES, stated_token
from onnxtool.checkpoint.limits import Text
from onnxtool.reading import read_text
from onnxtool.reports import Json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_SIDES = ("padding_side", "truncation_side")
# Anserini's limit for vocabulary tokenizers; transformers uses 100.
_LONGEST_WORD = 200


@dataclass(frozen=True)
class EffectiveTokenizer:
    """A checkpoint's tokenizer as built by transformers.

    Attributes:
        content: tokenizer.json; None if the checkpoint's own is equivalent.
        settings: token roles, padding side and truncation side, as in tokenizer_config.json.
    """

    content: str | None
    settings: Mapping[str, Json]

    @classmethod
    def of(cls, tokenizer: Any, stored: Path | None) -> EffectiveTokenizer | None:
        """Serialize a transformers tokenizer; None for Python tokenizers, which have no tokenizer.json form.

        Truncation and padding stay as stored in the checkpoint, on the sides and with the token that transformers uses:
        consumers that follow them must not see the settings of the last call.

        Args:
            tokenizer: a transformers tokenizer.
            stored: the checkpoint's own tokenizer.json; None if it has none.
        """
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        settings = {name: getattr(tokenizer, name, None) for name in (*ROLES, *_SIDES)}
        stated: dict[str, Json] = {name: str(value) for name, value in settings.items() if value is not None}
        backend.no_truncation()
        backend.no_padding()
        if stored is None:
            return cls(backend.to_str(pretty=True), stated)
        before = Tokenizer.from_str(read_text(stored))
        if (truncation := before.truncation) is not None:
            backend.enable_truncation(**{**truncation, "direction": tokenizer.truncation_side})
        if (padding := before.padding) is not None:
            token = {"pad_id": tokenizer.pad_token_id, "pad_token": tokenizer.pad_token}
            changed = token if tokenizer.pad_token is not None else {}
            backend.enable_padding(**{**padding, **changed, "direction": tokenizer.padding_side})
        same = before.to_str() == backend.to_str()
        return cls(None if same else backend.to_str(pretty=True), stated)

    def missing(self, config: Mapping[str, Json], special_tokens: Mapping[str, Json]) -> dict[str, Json]:
        """Return the settings that are missing or different for readers of these two files.

        Args:
            config: the content of tokenizer_config.json, where the settings belong.
            special_tokens: the content of special_tokens_map.json, which transformers uses more fully than readers do.
        """
        sides = {name: config.get(name, "right") for name in _SIDES}
        stored = {name: stated_token(name, config, special_tokens) for name in ROLES} | sides
        return {name: value for name, value in self.settings.items() if stored[name] != value}


def lower_case(tokenizer: Tokenizer) -> None:
    """Lower-case texts first, as sentence-transformers does on top of the tokenizer's own rules.

    Tokenizers that already lower-case at any step are left alone.
    """
    from tokenizers import normalizers

    present: Any = tokenizer.normalizer
    is_sequence = isinstance(present, normalizers.Sequence)
    steps = list(present) if is_sequence else [] if present is None else [present]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def prefix_tokens(
    prefixes: Sequence[str], vocabulary: Collection[str], tokenize: Callable[[str], list[str]]
) -> list[AddedToken]:
    """Return the tokens to register so that each prefix is read as a single token.

    Older late-interaction encoders put the id of a token such as `[unused0]` before a text; as plain text, it would be
    split. As in sentence-transformers, this applies only to tokens in the vocabulary.

    Args:
        prefixes: prefixes of texts.
        vocabulary: all tokens, including added ones.
        tokenize: splits a text into tokens, without special ones.
    """
    from tokenizers import AddedToken

    added = []
    for prefix in prefixes:
        known = (
            spelling for spelling in (prefix, *prefix.split(None, 1)[:1]) if spelling.strip() and spelling in vocabulary
        )
        token = next(known, None)
        if token is not None and tokenize(token) != [token]:
            added.append(AddedToken(token, normalized=False, special=True))
    return added


def read_file(
    path: Path, texts: Sequence[Text], limit: int | None, special_tokens: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the ids of texts for a consumer that reads only tokenizer.json with the tokenizers library.

    Args:
        path: the file.
        texts: texts, and pairs of texts.
        limit: the maximum number of tokens, truncated at the end; None for no limit.
        special_tokens: the content of special_tokens_map.json, for a consumer that adds its tokens.
    """
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(read_text(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for token in (special_tokens or {}).values():
        if isinstance(token, str):
            tokenizer.add_special_tokens([token])
        elif isinstance(token, dict):
            tokenizer.add_special_tokens([AddedToken(**token)])
    if limit is not None:
        tokenizer.enable_truncation(limit)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def read_vocabulary(path: Path, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
    """Return the ids of texts for a consumer that reads only vocab.txt and lower-cases, such as Anserini.

    This follows the Deep Java Library's BertFullTokenizer: it recognizes no special tokens in a text, does not split
    Chinese characters and splits longer words than transformers does. Texts are truncated at the end to `limit` tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    lines = read_text(path).removesuffix("\n").split("\n")
    vocabulary = {token: token_id for token_id, token in enumerate(lines)}
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)  # noqa: S106
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=True, lowercase=True
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    framing = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=framing)
    if limit is not None:
        tokenizer.enable_truncation(limit)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
