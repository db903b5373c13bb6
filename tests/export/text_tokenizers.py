"""Tokenizers of the kinds that a graph can contain, trained on the spot, with a map of characters of their own."""
# ruff: noqa: S106  tokens are no passwords

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import count

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CLASSES = {  # of transformers
    "uncased WordPiece": "BertTokenizer",
    "cased WordPiece": "BertTokenizer",
    "RoBERTa": "RobertaTokenizer",
    "ModernBERT": "PreTrainedTokenizerFast",
    "XLM-R": "XLMRobertaTokenizer",
    "T5": "T5Tokenizer",
}
NAMES = tuple(CLASSES)
_SIZE = 6000


def train(name: str, texts: Sequence[str]) -> Tokenizer:
    """Return a small tokenizer of one of NAMES."""
    match name:
        case "uncased WordPiece" | "cased WordPiece":
            return _word_piece(texts, is_cased=name.startswith("cased"))
        case "RoBERTa":
            tokenizer = _byte_pairs(texts, ["<s>", "<pad>", "</s>", "<unk>"])
            tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
            tokenizer.post_processor = processors.RobertaProcessing(
                ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
            )
        case "ModernBERT":
            tokenizer = _byte_pairs(texts, ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]"])
            tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False)])
            tokenizer.post_processor = _template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", tokenizer)
        case "XLM-R":
            tokenizer = _unigram(texts, ["<s>", "<pad>", "</s>", "<unk>"])
            tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
            tokenizer.post_processor = _template("<s> $A </s>", "<s> $A </s> </s> $B </s>", tokenizer)
        case _:
            tokenizer = _unigram(texts, ["<pad>", "</s>", "<unk>"])
            tokenizer.add_special_tokens([f"<extra_id_{number}>" for number in range(4)])
            cut = normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")
            tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, *cut])
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.post_processor = _template("$A </s>", "$A </s> $B </s>", tokenizer)
    return tokenizer


def _template(single: str, pair: str, tokenizer: Tokenizer) -> processors.TemplateProcessing:
    framing = {part.split(":")[0] for part in single.split() if not part.startswith("$")}
    ids = [(token, tokenizer.token_to_id(token)) for token in sorted(framing)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _word_piece(texts: Sequence[str], *, is_cased: bool) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased, strip_accents=None)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Letters outside of the alphabet: some words with them are unknown.
    trainer = trainers.WordPieceTrainer(
        vocab_size=_SIZE, limit_alphabet=300, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = _template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", tokenizer)
    return tokenizer


def _byte_pairs(texts: Sequence[str], special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _unigram(texts: Sequence[str], special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Precompiled(character_map(like_sentencepiece()))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=_SIZE, special_tokens=list(special), unk_token="<unk>", show_progress=False
    )
    # A special token that a text spells would be a piece once more.
    tokenizer.train_from_iterator([text.replace("<", "") for text in texts], trainer)
    return tokenizer


def like_sentencepiece() -> dict[str, str]:
    """Return a part of SentencePiece's rules nmt_nfkc: what becomes of characters and sequences of them."""
    rules = {chr(point): "" for point in (*range(1, 9), 0xB, *range(0xE, 0x20), 0x7F, 0x8F, 0x9F)}
    rules |= dict.fromkeys("\t\n\f\r\u1680\u200b\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd", " ")
    composed = (*range(0xA0, 0x250), *range(0x370, 0x400), *range(0x600, 0x700), *range(0x900, 0xE00))
    others = (*range(0x1E00, 0x2400), *range(0x3000, 0x3400), *range(0xAC00, 0xAC40), *range(0xF900, 0x10000))
    for letter in map(chr, (*composed, *others)):
        normal = unicodedata.normalize("NFKC", letter)
        for form in {letter, unicodedata.normalize("NFD", letter), unicodedata.normalize("NFKD", letter)}:
            if form != normal and form != " ":
                rules.setdefault(form, normal)
    for voiced in ("ﾞ", "ﾟ"):
        for letter in map(chr, range(0xFF66, 0xFF9E)):
            both = unicodedata.normalize("NFKC", letter + voiced)
            if len(both) == 1:
                rules[letter + voiced] = both
    rules |= {first + "\u0301": both for first, both in (("ê", "ế"), ("ô", "ố"), ("e\u0302", "ế"))}
    return rules


def character_map(rules: Mapping[str, str]) -> bytes:
    """Compile rules as SentencePiece does: a double array over the bytes of the keys, and texts that end with NUL."""
    nodes: dict[bytes, list[int]] = {b"": []}
    texts, values = bytearray(), {}
    for key, text in rules.items():
        whole = key.encode()
        values[whole], texts = len(texts), texts + text.encode() + b"\0"
        for end in range(1, len(whole) + 1):
            if whole[:end] not in nodes:
                nodes[whole[:end]] = []
                nodes[whole[: end - 1]].append(whole[end - 1])
    units: dict[int, int] = {0: 0}
    places, base, taken = {b"": 0}, 1, set[int]()
    for node, labels in nodes.items():  # parents precede their children
        children = [*([0] if node in values else []), *labels]
        if not children:
            continue
        base = next(
            one for one in count(base) if one not in taken and all(one ^ label not in units for label in children)
        )
        taken.add(base)
        units[places[node]] |= (places[node] ^ base) << 10 | (256 if node in values else 0)
        for label in labels:
            units[base ^ label] = label
            places[node + bytes((label,))] = base ^ label
        if node in values:
            units[base] = values[node] | 1 << 31
        base = max(1, base - 256)
    size = max(units) | 255
    array = b"".join(units.get(place, 0).to_bytes(4, "little") for place in range(size + 1))
    return len(array).to_bytes(4, "little") + array + bytes(texts)
