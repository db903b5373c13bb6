"""Read texts like transformers: its tokens are compared with a model's files on difficult texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.files import ROLES
from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.checkpoint.limits import Limit, Text
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.tokenizer_guard import panics_as_exceptions, require_harmless
from onnxtool.checkpoint.tokenizer_library import EffectiveTokenizer, lower_case
from onnxtool.errors import CheckpointError, InputError, OnnxtoolError, first_line, shorten
from onnxtool.guarded import in_time
from onnxtool.reading import read_text, require_small_settings
from onnxtool.runtime.quiet import quiet

# Return the ids of texts and pairs, cut to a number of tokens; None for no limit.
ReadTokens = Callable[[Sequence[Text], int | None], list[list[int]]]

# Room for text, besides special tokens, in truncated inputs.
_ROOM = 8
# Numbers of the tokenizer's own tokens, and of words of its vocabulary, that are tested in texts.
_OWN_TOKENS, _WORDS, _WORDS_A_TEXT = 24, 200, 20
_SHOWN = 8
_MOST_SECONDS = 60.0  # for a few hundred short texts; Python's slowest tokenizers take one
_FETCH_AGAIN = "the folder may be incomplete or damaged; pass --model_name with the checkpoint"


@dataclass(frozen=True)
class OwnTokenizer:
    """A checkpoint's tokenizer in transformers, the reference for all readers of its files.

    Attributes:
        tokenizer: transformers tokenizer, set up like in sentence-transformers.
        label: the checkpoint's name in errors.
        adds_special: whether special tokens are added around a text.
        error: the error class to raise.
    """

    tokenizer: Any
    label: str
    adds_special: bool = True
    error: type[OnnxtoolError] = CheckpointError

    def check(
        self,
        reader: str,
        read_tokens: ReadTokens,
        texts: Sequence[Text],
        hint: str = "save the tokenizer again with its save_pretrained(...)",
    ) -> None:
        """Refuse a reader whose ids of texts, whole or truncated, differ.

        Args:
            reader: description of the reader.
            read_tokens: reads the texts from the written files.
            texts: texts and pairs, see `hard_texts`.
            hint: the default hint.

        Raises:
            OnnxtoolError: the ids differ.
        """
        framing = len(self.ids([""], None)[0])
        for limit in (None, 2 * framing + _ROOM):  # a pair has up to two texts' special tokens
            for kind in (str, tuple):
                of_kind = [text for text in texts if isinstance(text, kind)]
                expected = self.ids(of_kind, limit) if of_kind else []
                actual = read_tokens(of_kind[: len(expected)], limit)
                for text, expected_ids, actual_ids in zip(of_kind, expected, actual, strict=False):
                    if expected_ids != actual_ids:
                        raise self._difference(reader, (text, expected_ids, actual_ids), hint)

    def ids(self, texts: Sequence[Any], limit: int | None) -> list[list[int]]:
        """Return transformers' ids of texts; nothing for pairs that its tokenizer does not accept."""
        columns = list(map(list, zip(*texts, strict=True))) if isinstance(texts[0], tuple) else [list(texts)]
        cut = {} if limit is None else {"max_length": limit}
        tokenize = partial(
            self.tokenizer, *columns, add_special_tokens=self.adds_special, truncation=limit is not None, **cut
        )
        try:
            with quiet(), panics_as_exceptions():
                return [list(ids) for ids in in_time(tokenize, _MOST_SECONDS)["input_ids"]]
        except TimeoutError:
            raise self.error(
                f"{type(self.tokenizer).__name__} of {self.label} takes more than {_MOST_SECONDS:.0f} s for texts of a "
                "few words",
                "take another version of transformers, or the tokenizer that the model was trained with",
            ) from None
        except Exception as error:  # the second text of some is words of a page, or a table
            if len(columns) > 1:
                return []
            raise self.error(
                f"{type(self.tokenizer).__name__} of {self.label} cannot read plain texts: {error}",
                "take another version of transformers, or the tokenizer that the model was trained with",
            ) from error

    def _difference(self, reader: str, first: tuple[Text, list[int], list[int]], hint: str) -> OnnxtoolError:
        text, own, other = first
        place = next((index for index, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), 0)
        part = slice(max(0, place - 1), max(0, place - 1) + _SHOWN)
        shown = shorten(repr(text), 80)
        name = type(self.tokenizer).__name__
        if getattr(self.tokenizer, "split_special_tokens", False):
            hint = (
                "tokenizer.json cannot say split_special_tokens; take it out of tokenizer_config.json if no text has "
                "special tokens in it"
            )
        elif getattr(self.tokenizer, "backend_tokenizer", None) is None:
            hint = (
                f"{name} runs in Python and does not read tokenizer.json, which is of another tokenizer; remove that "
                "file, and feed ids"
            )
        return self.error(
            f"{reader} would read other tokens than {name} of {self.label}: of {shown} it makes {other[part]} from "
            f"token {part.start} on, not {own[part]}",
            hint,
        )


def hard_texts(tokenizer: Any) -> list[Text]:
    """Return texts that tokenizers disagree on, and some pairs, with this tokenizer's own tokens."""
    texts = [*HARD_TEXTS, *_with_own_tokens(tokenizer), *_with_words(tokenizer)]
    return [*texts, *zip(texts[5::3], texts[7::3], strict=False)]


def read_by_transformers(folder: Path, *, lower_cases: bool = False) -> ReadTokens:
    """Return the reader of a consumer that loads the tokenizer with transformers.

    Args:
        folder: folder with the tokenizer's files and config.json.
        lower_cases: whether it lower-cases like sentence-transformers.
    """
    checkpoint = CheckpointFolder(folder)
    tokenizer = load_by_transformers(folder)
    if lower_cases and checkpoint.sentence_modules.lower_cases:
        lower_case(tokenizer.backend_tokenizer)

    def read(texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        return OwnTokenizer(tokenizer, str(folder)).ids(texts, limit)

    return read


def read_folder(folder: CheckpointFolder) -> ReadTokens:
    """Return onnxtool's own reader for the files in a folder."""
    return _reader(TextTokenizer(folder))


def _reader(tokenizer: TextTokenizer) -> ReadTokens:
    def read(texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        most = None if limit is None else Limit(limit, "the comparison of tokens")
        return [list(encoded.ids) for encoded in tokenizer.encode(texts, most)]

    return read


def named_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens with a role, such as `[CLS]`."""
    return [str(token) for role in ROLES if (token := getattr(tokenizer, role, None)) is not None]


def _with_own_tokens(tokenizer: Any) -> Iterator[str]:
    """Yield texts with the tokens that are matched first, in various surroundings."""
    added = sorted(map(str, getattr(tokenizer, "added_tokens_encoder", {})))
    sampled = added[:: max(1, len(added) // _OWN_TOKENS)]
    for token in dict.fromkeys((*named_tokens(tokenizer), *sampled)):
        yield from (token, f"a {token} b", f"a{token}b", f" {token} {token}, ", f"{token.upper()} {token.lower()}")


def _with_words(tokenizer: Any) -> Iterator[str]:
    """Yield texts of words from the whole vocabulary."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:  # of characters or bytes, by the million
        return
    step = max(1, len(tokenizer) // _WORDS)
    tokens = tokenizer.convert_ids_to_tokens(list(range(0, len(tokenizer), step)))
    words = [token.lstrip("#Ġ▁") for token in tokens if token is not None]
    words = [word for word in words if word.isalnum()]
    yield from (" ".join(words[start : start + _WORDS_A_TEXT]) for start in range(0, len(words), _WORDS_A_TEXT))


def open_tokenizer(folder: CheckpointFolder) -> TextTokenizer:
    """Read a model's tokenizer like transformers.

    An export's tokenizer.json is equivalent, and its stamp says so. For other folders transformers is imported, which
    takes seconds.

    Raises:
        InputError: the tokenizer cannot be read, or differs from transformers'.
    """
    tokenizer = TextTokenizer(folder)
    return tokenizer if folder.has_settled_tokenizer else read_with_transformers(folder, tokenizer)


def read_with_transformers(folder: CheckpointFolder, tokenizer: TextTokenizer) -> TextTokenizer:
    """Return the tokenizer with the rules that transformers reads from all files of the folder.

    Args:
        folder: a folder with a tokenizer.json.
        tokenizer: the rules of that file alone, which are returned if no other file affects them.

    Raises:
        InputError: transformers cannot load the tokenizer, or reads other tokens.
    """
    path = folder.locate(TOKENIZER_NAME) or folder.path / TOKENIZER_NAME
    own = _ask_transformers(folder, path)
    if own is None:
        return tokenizer
    if folder.sentence_modules.lower_cases and hasattr(own, "backend_tokenizer"):
        lower_case(own.backend_tokenizer)
    tokenizer = TextTokenizer(folder, EffectiveTokenizer.of(own, path))
    checked = OwnTokenizer(own, folder.label, folder.sentence_modules.adds_special_tokens, InputError)
    checked.check("onnxtool", _reader(tokenizer), hard_texts(own))
    return tokenizer


def _ask_transformers(folder: CheckpointFolder, path: Path) -> Any:
    """Return the tokenizer as loaded by transformers; None if no file affects it."""
    if "model_type" not in folder.read_object("config.json") and folder.locate("tokenizer_config.json") is None:
        return None
    return load_by_transformers(path.parent)


def load_by_transformers(folder: Path) -> Any:
    """Load the tokenizer in `folder` as transformers does.

    Raises:
        InputError: transformers cannot load it, or is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(
            f"{folder / TOKENIZER_NAME} may say otherwise than the settings beside it, and transformers, which knows, "
            "is not installed",
            "pip install 'onnxtool-cli[export]'; or export the model with onnxtool, which writes one that says it all",
        ) from error
    path = folder / TOKENIZER_NAME
    if path.is_file():
        try:
            content = read_text(path, errors="surrogateescape")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", _FETCH_AGAIN) from error
        require_harmless(content, lambda reason: InputError(f"cannot read {path}: {reason}", _FETCH_AGAIN))
    try:
        require_small_settings(folder)
        with quiet(), panics_as_exceptions():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files fail in each tokenizer's own way
        raise InputError(
            f"transformers cannot load the tokenizer in {folder}: {first_line(error)}",
            _FETCH_AGAIN,
        ) from error


# ruff: noqa: RUF001  letters that look like others are hard to tell for tokenizers, too

# Texts that tokenizers disagree on, depending on settings, classes and versions.
HARD_TEXTS = (
    # Nothing, one character, case.
    *("", " ", "\t", "\n", ".", "a", "hello", "Hello, World!", "HELLO WORLD", "hElLo wOrLd"),
    *("İstanbul ISTANBUL ıI", "Straße STRASSE ẞ", "Σίσυφος ΟΔΟΣ ς", "ПРИВЕТ мир Ёж", "ǅ ﬁne ﬂow Ⅷ ⅷ ①"),
    # Accents, composed and not.
    *("café résumé naïve", "cafe\u0301 re\u0301sume\u0301", "ÀÉÎÕÜ àéîõü", "A\u030a \u00c5 \u212b"),
    *("Tiếng Việt", "Łódź Škoda", "\u0301", "a\u0301\u0327b", "ñandú Ñ", "Ünïcödé ÜNÏCÖDÉ", "œuvre Æsir"),
    # Scripts.
    *("中国人", "中 a国b 人", "日本語のテキスト", "カタカナ", "、。「引用」！", "ｶﾀｶﾅ ﾊﾞ", "ＡＢＣ ｆｕｌｌ １２３"),
    *("한국어 텍스트", "\u1112\u1161\u11ab", "𠀀𠀁", "مرحبا بالعالم", "مَرْحَبًا", "שלום עולם", "हिन्दी पाठ"),
    *("ภาษาไทยไม่มีช่องว่าง", "தமிழ்", "ქართული", "Ελληνικά"),
    # Spaces and invisible characters.
    *("a  b", "  leading", "trailing  ", " a b ", "tab\tand\t\ttab", "line\nbreak\n\nagain", "crlf\r\nline\r"),
    *("\u00a0no\u00a0break", "\u3000wide\u3000", "em\u2003space", "zero\u200bwidth", "join\u200d\u200cer"),
    *("\ufeffmark", "soft\u00adhyphen", "word\u2060joiner", "\u180e", "a\u2028b\u2029c", "vt\x0bff\x0c"),
    *("nul\x00nul", "bell\x07", "\x7fdel", "a\x85b", "\ufffd?", "\ue000 private", "\u0378", "\u202ertl\u202c"),
    # Punctuation, numbers, code.
    *("don't can't I'm we've they'll", "“quoted” ‘words’", "e.g., i.e.; a/b\\c", "a-b–c—d−e", "#tag @user $5"),
    *("100% ^_^ ~`|<>{}[]()*&=+", "... … !!! ?!", "1,234.56 3.14e-10 0x1F", "https://example.org/a?b=c&d=1#e"),
    *("C++ C# .NET", "snake_case camelCase kebab-case", "=== --- ___", "&amp; <br/>", "«»¿¡§¶†‡•", "™®© €£¥₹"),
    *("½ x² H₂O µ μ ∑∫√∞≠≤", "007 1234567890", "def f(x):\n    return x + 1\n", "    indented", "SELECT * FROM t;"),
    # Emoji.
    *("😀", "👩\u200d👩\u200d👧\u200d👦 family", "🇩🇪🇫🇷", "❤\ufe0f ❤", "👍🏽", "text😀text", "1\ufe0f\u20e3"),
    # Long words.
    *("antidisestablishmentarianism unaffable tokenization", "x" * 99, "x" * 100, "x" * 101, "ab" * 150),
    *("中" * 120, "_" * 120, "1" * 120, "é" * 101),
    # Characters that tokenizers insert themselves.
    *("Ġ Ċ ▁ ▁word Ġword", "## ##ing word##ing", "<0x0A> </w> @@", "<s> </s> <pad> <unk> <mask>"),
    *("[CLS] [SEP] [MASK] [PAD] [UNK]", "[mask] <MASK> [Mask]", "a<mask>b a [MASK] b[SEP]", "<|endoftext|>"),
    # One more token each time, for truncation.
    *(" ".join(["the"] * count) for count in range(2, 14)),
)
