"""Read the rules of a tokenizer.json as what a graph can do, or refuse the first one that it cannot.

The tokenizers library shows what rules do to each single character of Unicode; the types of the rules say which of them
look at single characters alone. Everything else is refused by name.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Precompiled
from tokenizers.pre_tokenizers import WhitespaceSplit

from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.graph.text_input import Frame, Segment
from onnxtool.graph.tokenizers import (
    BPE_OPERATORS,
    END,
    LONG,
    RESERVED,
    SPACE,
    UNKNOWN,
    AddedToken,
    ByteBpe,
    GraphTokenizer,
    Unigram,
    WordPiece,
    ranges,
)
from onnxtool.reports import Json

# Rules that treat each character alone, but for the order of marks.
_CHARACTER_NORMALIZERS = frozenset(("BertNormalizer", "Lowercase", "NFD", "NFKD", "StripAccents"))
_CHARACTER_SPLITTERS = frozenset(("BertPreTokenizer", "WhitespaceSplit", "Punctuation"))
_SEPARATOR = "\u16a0"  # a letter that no rule changes, which keeps characters apart
_BATCH_SIZE = 1 << 12
_SEVERAL_SPACES = {"Regex": " {2,}"}
# Sums of its multiples are exact in float32, so only their order decides between segmentations of equal score.
SCORE_STEP = 2.0**-16
_LETTER, _ACCENT = "e", "\u0301"
_PAIR = ("a", "b")
_HINT = "leave --tokenizer out, and tokenize where the file runs with the tokenizer.json next to it"


def read_tokenizer(
    text_tokenizer: TextTokenizer, most_tokens: int, *, is_pair: bool = False, prompt: str = "", num_prompt: int = 0
) -> tuple[GraphTokenizer, Frame]:
    """Return a tokenizer as a graph can do it, and how it makes rows of its ids.

    Args:
        text_tokenizer: the tokenizer.
        most_tokens: the maximum number of tokens of a row.
        is_pair: whether it reads pairs of texts.
        prompt: a text before each text, or before the first of a pair.
        num_prompt: the number of tokens at the start of a row that are not pooled.

    Raises:
        InputError: a graph cannot express one of its rules.
    """
    content = json.loads(text_tokenizer.content)
    padding, truncation = content["padding"], content["truncation"]
    tokenizer = Tokenizer.from_str(text_tokenizer.content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    frame = Frame(
        _segments(tokenizer, is_pair=is_pair, adds_special=text_tokenizer.adds_special),
        most_tokens,
        padding["pad_id"],
        padding["pad_type_id"],
        cuts_left=truncation["direction"] == "Left",
        pads_left=padding["direction"] == "Left",
        prompt=prompt,
        num_prompt=num_prompt,
    )
    return _rules(tokenizer, content), frame


def _rules(tokenizer: Tokenizer, content: Mapping[str, Any]) -> GraphTokenizer:
    """Return a tokenizer without truncation, padding and framing tokens."""
    readers: dict[str, Callable[[], GraphTokenizer]] = {
        "WordPiece": lambda: _word_piece(tokenizer, content),
        "BPE": lambda: _byte_bpe(content),
        "Unigram": lambda: _unigram(content),
    }
    kind = str(content["model"].get("type"))
    if kind not in readers:
        raise _refused(f"the model {kind}")
    return readers[kind]()


def _segments(tokenizer: Tokenizer, *, is_pair: bool, adds_special: bool) -> tuple[Segment, ...]:
    """Return the parts of a tokenized text, or pair, as the tokenizer frames it."""
    second = _PAIR[1] if is_pair else None
    encoded = tokenizer.encode(_PAIR[0], second, add_special_tokens=adds_special)
    segments: list[Segment] = []
    for token_id, text, segment_id in zip(encoded.ids, encoded.sequence_ids, encoded.type_ids, strict=True):
        last = segments[-1] if segments else Segment(-1)
        if text is not None and last.text == text:
            continue  # one more token of it
        ids = () if text is not None else (token_id,)
        if text is None and last.text is None and last.segment_id == segment_id:
            segments[-1] = Segment(None, (*last.ids, *ids), segment_id)
        else:
            segments.append(Segment(text, ids, segment_id))
    if [segment.text for segment in segments if segment.text is not None] != [0, 1][: 1 + is_pair]:
        raise _refused("a template that leaves a text out, or turns two around")
    return tuple(segments)


def _steps(rule: Json, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the types and settings of the rules in a sequence."""
    if isinstance(rule, dict):
        inner = rule.get(key) if rule.get("type") == "Sequence" else None
        if isinstance(inner, list):
            for step in inner:
                yield from _steps(step, key)
        else:
            yield str(rule.get("type")), rule


def _added(content: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Return the added tokens."""
    tokens = []
    for token in content["added_tokens"]:
        text = token["content"]
        if token["single_word"]:
            raise _refused(f"the added token {text!r} as a single word")
        if token["normalized"] and content["normalizer"] is not None:
            raise _refused(f"the added token {text!r}, which is looked for in normalized text")
        tokens.append(AddedToken(text, token["id"], (token["lstrip"], token["rstrip"])))
    return tuple(tokens)


def _word_piece(tokenizer: Tokenizer, content: Mapping[str, Any]) -> WordPiece:
    model, added = content["model"], _added(content)
    for kind, _ in _steps(content["normalizer"], "normalizers"):
        if kind not in _CHARACTER_NORMALIZERS:
            raise _refused(f"the normalizer {kind} in front of WordPiece")
    splits = list(_steps(content["pre_tokenizer"], "pretokenizers"))
    for kind, settings in splits:
        if kind not in _CHARACTER_SPLITTERS or settings.get("behavior", "Isolated") != "Isolated":
            raise _refused(f"the pre-tokenizer {kind} in front of WordPiece")
    if not splits:
        raise _refused("WordPiece over texts that are not split into words")
    if model["continuing_subword_prefix"] != "##":
        raise _refused(f"the prefix {model['continuing_subword_prefix']!r} of pieces inside words")
    if model["unk_token"] not in model["vocab"]:
        raise _refused(f"the unknown token {model['unk_token']!r}, which the vocabulary does not have")
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    splitter = tokenizer.pre_tokenizer
    table = _table(normalize, lambda text: [word for word, _ in splitter.pre_tokenize_str(text)])
    rules = WordPiece(added, model["vocab"], model["unk_token"], model["max_input_chars_per_word"], table)
    if len(rules.kinds) > 3:
        raise _refused(f"a normalizer that makes several words of {[*rules.kinds.values()][3][0]!r}")
    marks = [letter for letter in rules.letters if unicodedata.combining(letter)]
    for first, second in product(marks, repeat=2):
        if normalize(_LETTER + first + second) != _LETTER + table.get(first, first) + table.get(second, second):
            raise _refused(f"the marks {first + second!a} in the vocabulary, whose order the normalizer changes")
    return rules


def _table(normalize: Callable[[str], str], words: Callable[[str], list[str]]) -> dict[str, str]:
    """Return what each character becomes where it does not stay as it is, with spaces where words are split."""
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000 and chr(point) != _SEPARATOR]
    table: dict[str, str] = {}
    for start in range(0, len(characters), _BATCH_SIZE):
        part = characters[start : start + _BATCH_SIZE]
        text = normalize(_SEPARATOR + _SEPARATOR.join(part) + _SEPARATOR)
        texts = " ".join(words(text)).split(_SEPARATOR)[1:-1]
        table.update((key, text) for key, text in zip(part, texts, strict=True) if key != text)
    return table


def _byte_bpe(content: Mapping[str, Any]) -> ByteBpe:
    model, added = content["model"], _added(content)
    if content["normalizer"] is not None:
        kinds = ", ".join(kind for kind, _ in _steps(content["normalizer"], "normalizers"))
        raise _refused(f"the normalizer {kinds} in front of byte pairs")
    splits = list(_steps(content["pre_tokenizer"], "pretokenizers"))
    if [kind for kind, _ in splits] != ["ByteLevel"] or not splits[0][1].get("use_regex", True):
        raise _refused(f"the pre-tokenizer {', '.join(kind for kind, _ in splits) or 'none'} in front of byte pairs")
    if splits[0][1].get("add_prefix_space"):
        raise _refused("a space that is put before each text (add_prefix_space)")
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    for name in (*affixes, "dropout", "fuse_unk", "byte_fallback", "ignore_merges"):
        if model.get(name):
            raise _refused(f"{name} of byte pairs")
    vocabulary = {**model["vocab"], **{token.content: token.token_id for token in added}}
    added_texts = {token.content for token in added}
    operator = next((name for name, row in BPE_OPERATORS.items() if added_texts.issuperset(row)), None)
    if operator is None:
        needed = " or ".join(" ".join(row) for row in BPE_OPERATORS.values())
        raise _refused(f"byte pairs without the added tokens that operators look for ({needed})")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    return ByteBpe(added, vocabulary, merges, operator)


def _unigram(content: Mapping[str, Any]) -> Unigram:
    model, added = content["model"], _added(content)
    if model.get("byte_fallback") or model.get("unk_id") is None:
        raise _refused("Unigram with bytes for unknown characters, or without an unknown piece")
    pieces = tuple((str(piece), float(score)) for piece, score in model["vocab"])
    texts = {piece for piece, _ in pieces}
    if (
        len(texts) < len(pieces)
        or "" in texts
        or any(character in piece for piece in texts for character in ("\0", *RESERVED))
    ):
        raise _refused("pieces that are empty, stand twice, or have control characters")
    kinds = [kind for kind, _ in _steps(content["pre_tokenizer"], "pretokenizers")]
    if kinds not in (["WhitespaceSplit", "Metaspace"], ["Metaspace"]):
        raise _refused(f"the pre-tokenizer {', '.join(kinds) or 'none'} in front of Unigram")
    *_, (_, last) = _steps(content["pre_tokenizer"], "pretokenizers")
    if last.get("prepend_scheme") != "always" or last.get("replacement") != SPACE or not last.get("split", True):
        raise _refused("Metaspace that does not put a space before each word")
    steps = list(_steps(content["normalizer"], "normalizers"))
    order = [kind for kind, _ in steps]
    for kind, rule in steps:
        fits = {
            "Precompiled": True,
            "Strip": rule.get("strip_right") and not rule.get("strip_left"),
            "Replace": rule.get("pattern") == _SEVERAL_SPACES and rule.get("content") in (" ", SPACE)[: 3 - len(kinds)],
        }
        if not fits.get(kind) or order != [name for name in fits if name in order]:
            raise _refused(f"the normalizer {kind} in front of Unigram")
    if len(kinds) == 1 and "Replace" not in order:
        raise _refused("Metaspace over texts that may have several spaces in a row")
    maps = [rule["precompiled_charsmap"] for kind, rule in steps if kind == "Precompiled"]
    normalize = Precompiled(base64.b64decode(maps[0])).normalize_str if maps else str
    table, white = _table(normalize, lambda text: [text]), "".join(filter(_is_white, map(chr, range(0x110000))))
    marks, leading, pairs = _marks(normalize, table) if maps else (frozenset(), frozenset(), {})
    replaced = [(f"[{ranges(white)}]+({END}|$)", r"\1")] if "Strip" in order else []
    if len(kinds) == 2:
        spaces = dict.fromkeys(map(ord, white), " ")
        table = {key: text.translate(spaces) for key, text in (dict(zip(white, white, strict=True)) | table).items()}
    else:
        replaced.append((" +", SPACE))
    unknown = int(model["unk_id"])
    return Unigram(added, _model(pieces, unknown), len(pieces), unknown, table, marks, leading, pairs, tuple(replaced))


def _model(pieces: Sequence[tuple[str, float]], unknown: int) -> bytes:
    """Return a SentencePiece model that does not normalize words and has one more piece: see Unigram."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    for index, (piece, score) in enumerate((*pieces, pieces[unknown])):
        text, kind = (UNKNOWN, model.SentencePiece.UNKNOWN) if index == unknown else (piece, model.SentencePiece.NORMAL)
        model.pieces.add(piece=text, score=round(score / SCORE_STEP) * SCORE_STEP, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.unk_id = trainer.UNIGRAM, unknown
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    # A map of characters without rules: the operator writes to stderr if there is none.
    normalizer.precompiled_charsmap = (1024).to_bytes(4, "little") + bytes(1025)
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = normalizer.escape_whitespaces = False
    content: bytes = model.SerializeToString()
    return content


def _is_white(character: str) -> bool:
    """Return whether the tokenizers library takes a character for white space."""
    return character.isspace() and len(WhitespaceSplit().pre_tokenize_str(f"a{character}a")) > 1


def _marks(
    normalize: Callable[[str], str], table: Mapping[str, str]
) -> tuple[frozenset[str], frozenset[str], dict[str, str]]:
    """Find the characters that a map of characters treats together, with a letter and its accent: see Unigram."""
    letter, composed = _LETTER + _ACCENT, normalize(_LETTER + _ACCENT)
    if len(composed) != 1:
        raise _refused("a map of characters that does not compose letters with their accents")

    def alone(text: str) -> str:
        return "".join(table.get(character, character) for character in text)

    assigned = [
        character
        for character in map(chr, range(0x110000))
        if unicodedata.category(character) not in ("Cn", "Co", "Cs")
    ]
    marks = frozenset(
        character for character in assigned if normalize(letter + character) != composed + alone(character)
    )
    leading = frozenset(character for character in table if normalize(character + _ACCENT) == alone(character))
    forms = [form for character in assigned if len(form := unicodedata.normalize("NFD", character)) > 1]
    firsts, lasts = {unicodedata.normalize("NFC", form[:-1]) for form in forms}, {form[-1] for form in forms}
    seconds = [character for character in marks if unicodedata.normalize("NFD", character)[0] in lasts]
    combinations = [
        character + mark for character in firsts if len(character) == 1 and character not in table for mark in seconds
    ]
    short = [(character, normalize(character)) for character in sorted(combinations) if len(character.encode()) < LONG]
    return marks, leading, {character: text for character, text in short if text != alone(character)}


def _refused(rule: str) -> InputError:
    return InputError(f"the tokenizer has {rule}, which no graph can express", _HINT)
