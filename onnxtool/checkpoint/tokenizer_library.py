"""Call the tokenizers library with files that may be damaged or made to do harm, and as transformers calls it.

The library raises bare Exception for whatever is wrong with a file. Where its Rust code panics, because of a template
without its tokens or a regular expression that gives up, it raises an error that is no Exception at all.

transformers builds a tokenizer from tokenizer.json and from tokenizer_config.json, special_tokens_map.json,
added_tokens.json and its own class, and where these disagree, tokenizer.json loses: `do_lower_case`, `strip_accents`
and tokens that were added later are settings of the model that was trained. Tested with transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.limits import Text
from onnxtool.errors import OnnxtoolError
from onnxtool.reading import read_text
from onnxtool.reports import Json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_PANIC = "PanicException"  # of pyo3, which exports it nowhere


@contextmanager
def tokenizer_errors(make: Callable[[str], OnnxtoolError]) -> Iterator[None]:
    """Raise what `make` makes of the reason where the library fails in the block; errors of others go through."""
    try:
        with panics_as_exceptions():
            yield
    except Exception as error:
        if type(error) is not Exception and type(error.__cause__).__name__ != _PANIC:  # Python's, such as a TypeError
            raise
        raise make(first_line(error)) from error


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Raise RuntimeError where Rust code panics in the block, for callers that handle what other libraries raise."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise RuntimeError(_reason_of_panic(error)) from error


def _reason_of_panic(error: BaseException) -> str:
    """Say what a panic of the library means."""
    text = first_line(error)
    if "retry-limit" in text:
        return "a regular expression in it takes too long for a text, and was given up"
    return f"the tokenizers library fails on it: {text}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# The roles of tokens, as tokenizer_config.json names them.
ROLES = ("pad_token", "cls_token", "sep_token", "bos_token", "eos_token", "unk_token", "mask_token")
_SIDES = ("padding_side", "truncation_side")
# As Anserini's tokenizer of a vocabulary has it; transformers' has 100.
_LONGEST_WORD = 200


@dataclass(frozen=True)
class EffectiveTokenizer:
    """What transformers makes of the tokenizer files of a checkpoint.

    Attributes:
        content: tokenizer.json; None where the checkpoint's own says the same.
        settings: the roles of tokens and the sides of padding and truncation, as in tokenizer_config.json.
    """

    content: str | None
    settings: Mapping[str, Json]

    @classmethod
    def of(cls, tokenizer: Any, stored: Path | None) -> EffectiveTokenizer | None:
        """Serialize a tokenizer of transformers; None for one that runs in Python, which no tokenizer.json can hold.

        Truncation and padding stay as the checkpoint stores them, on the sides and with the token that transformers
        uses: a consumer that follows them must not see those of the last call.

        Args:
            tokenizer: a tokenizer of transformers.
            stored: the checkpoint's own tokenizer.json; None where it has none.
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
        if (cut := before.truncation) is not None:
            backend.enable_truncation(**{**cut, "direction": tokenizer.truncation_side})
        if (padding := before.padding) is not None:
            token = {"pad_id": tokenizer.pad_token_id, "pad_token": tokenizer.pad_token}
            changed = token if tokenizer.pad_token is not None else {}
            backend.enable_padding(**{**padding, **changed, "direction": tokenizer.padding_side})
        same = before.to_str() == backend.to_str()
        return cls(None if same else backend.to_str(pretty=True), stated)

    def missing(self, config: Mapping[str, Json], special_tokens: Mapping[str, Json]) -> dict[str, Json]:
        """Return the settings that readers of two files do not find there, or find otherwise.

        Args:
            config: the content of tokenizer_config.json, in which the settings belong.
            special_tokens: that of special_tokens_map.json, of which transformers makes more than readers do.
        """
        sides = {name: config.get(name, "right") for name in _SIDES}
        found = {name: stated_token(name, config, special_tokens) for name in ROLES} | sides
        return {name: value for name, value in self.settings.items() if found[name] != value}


def stated_token(name: str, *configs: Mapping[str, Json]) -> str | None:
    """Return the token with a role from the first of `configs` that names one; None where none does."""
    for config in configs:
        value = config.get(name)
        if isinstance(value, dict):  # an added token with its flags
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None


def lower_case(tokenizer: Tokenizer) -> None:
    """Lower texts before all else, as sentence-transformers does on top of the tokenizer's own rules.

    It leaves a tokenizer alone that has a step for this, wherever that stands.
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
    """Return the tokens that have to be registered so that each prefix is read as the one token that it is.

    Older late-interaction encoders put the id of a token such as `[unused0]` before a text; written as text, it would
    be taken apart. As sentence-transformers, and only where the vocabulary has it.

    Args:
        prefixes: what stands before texts.
        vocabulary: all tokens, added ones too.
        tokenize: reads a text as tokens, without special ones.
    """
    from tokenizers import AddedToken

    found = []
    for prefix in prefixes:
        known = (one for one in (prefix, *prefix.split(None, 1)[:1]) if one.strip() and one in vocabulary)
        token = next(known, None)
        if token is not None and tokenize(token) != [token]:
            found.append(AddedToken(token, normalized=False, special=True))
    return found


def read_file(
    path: Path, texts: Sequence[Text], limit: int | None, special_tokens: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the ids of texts, as a consumer has them that reads a tokenizer.json by the tokenizers library alone.

    Args:
        path: the file.
        texts: texts, and pairs of texts.
        limit: the most tokens of a text, which is cut at its end; None for no limit.
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
    """Return the ids of texts, as a consumer has them that reads vocab.txt alone and lower-cases, such as Anserini.

    By the Deep Java Library's BertFullTokenizer: it knows no special tokens in a text, parts no Chinese characters and
    takes longer words to pieces than transformers does. A text of more tokens than `limit` is cut at its end.
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
