"""A tokenizer.json with fewer tokens, compared with the whole one by the tokenizers library."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from onnxtool.checkpoint.text_files import read_texts
from onnxtool.checkpoint.vocabulary import Vocabulary, ids_in_settings, renumber_settings, renumbering
from onnxtool.errors import InputError
from onnxtool.optimize.quantization.calibration import OWN_TEXTS
from onnxtool.runtime.tokens import HARD_TEXTS
from tests.export.text_tokenizers import train

KINDS = ("uncased WordPiece", "RoBERTa", "ModernBERT", "XLM-R", "T5", "byte fallback")


@cache
def texts() -> tuple[list[str], list[str]]:
    """Return texts whose tokens are kept, and others."""
    found = [text.contents for text in read_texts(OWN_TEXTS)]
    return [*found[::2], *HARD_TEXTS], found[1::2]


@cache
def whole(kind: str) -> str:
    if kind != "byte fallback":
        return str(train(kind, [*texts()[0], *texts()[1]]).to_str())
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=special, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(texts()[0], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:1]  # bytes are tokens of the model alone
    return json.dumps(content)


@cache
def cut(kind: str) -> tuple[Tokenizer, Tokenizer, np.ndarray[Any, Any]]:
    """Return the whole tokenizer, the one with the tokens of the first texts, and the ids that it keeps."""
    tokenizer, vocabulary = Tokenizer.from_str(whole(kind)), Vocabulary.of(whole(kind))
    kept = vocabulary.kept({one for read in tokenizer.encode_batch(texts()[0]) for one in read.ids})
    return tokenizer, Tokenizer.from_str(vocabulary.trimmed(kept)), kept


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_texts_with_kept_tokens_map_one_to_one(kind: str) -> None:
    """In their order, also of pairs, and around texts that no tokenizer likes."""
    before, after, kept = cut(kind)
    rows = [*texts()[0], *zip(texts()[0], texts()[0][1:], strict=False)]
    new = renumbering(kept)
    assert len(kept) < before.get_vocab_size()
    assert after.get_vocab_size() == len(kept)
    for one, two in zip(before.encode_batch(rows), after.encode_batch(rows), strict=True):
        assert [new(number) for number in one.ids] == two.ids
        assert one.tokens == two.tokens
        assert one.type_ids == two.type_ids
        assert one.offsets == two.offsets


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_text_becomes_unknown(kind: str) -> None:
    """Characters and bytes are always kept."""
    before, after, _ = cut(kind)
    counts = [
        sum(read.tokens.count(unknown) for read in tokenizer.encode_batch(texts()[1]))
        for tokenizer in (before, after)
        for unknown in ("[UNK]", "<unk>")
    ]
    assert counts[:2] == counts[2:]


def test_the_parts_of_a_kept_token_are_kept() -> None:
    """Without them its merges would not load."""
    vocabulary = Vocabulary.of(whole("RoBERTa"))
    longest = max(filter(str.isalpha, vocabulary.ids), key=len)
    after = Tokenizer.from_str(vocabulary.trimmed(vocabulary.kept({vocabulary.ids[longest]})))
    assert longest in after.encode(longest.replace("Ġ", " ")).tokens
    assert after.get_vocab_size() < 300 + len(longest)


def test_an_unknown_character_keeps_its_score() -> None:
    """It is derived from the least score, which a piece may have that no text uses."""
    pieces = [("<unk>", 0.0), ("x", -30.0), ("a", -1.0), ("xa", -1.0), ("a?", -25.0), ("zz", -50.0), ("xaa", -1.0)]
    before = Tokenizer(models.Unigram(pieces, 0))
    texts = ["xa?", "xa"]
    vocabulary = Vocabulary.of(before.to_str())
    kept = vocabulary.kept({one for text in texts for one in before.encode(text).ids})
    after = Tokenizer.from_str(vocabulary.trimmed(kept))
    assert before.encode("xa?").tokens == after.encode("xa?").tokens == ["x", "a?"]
    assert after.get_vocab_size() == len(pieces) - 1


def test_padding_and_processors_are_renumbered() -> None:
    """Wherever a tokenizer.json has ids."""
    content = json.loads(whole("uncased WordPiece"))
    content["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    shift = {token: 7 + 3 * number for token, number in content["model"]["vocab"].items()}  # ids have gaps, too
    content["model"]["vocab"] = shift
    for token in content["added_tokens"]:
        token["id"] = shift[token["content"]]
    for token, one in content["post_processor"]["special_tokens"].items():
        one["ids"] = [shift[token]]
    content["padding"]["pad_id"] = shift["[PAD]"]
    vocabulary = Vocabulary.of(json.dumps(content))
    after = json.loads(vocabulary.trimmed(vocabulary.kept(())))
    ids = after["model"]["vocab"]
    assert sorted(ids.values()) == [*range(len(ids))]
    assert after["padding"]["pad_id"] == ids["[PAD]"]
    assert {token: one["ids"] for token, one in after["post_processor"]["special_tokens"].items()} == {
        token: [ids[token]] for token in ("[CLS]", "[SEP]")
    }
    assert {token["content"]: token["id"] for token in after["added_tokens"]}.items() <= ids.items()


def test_settings_are_renumbered_by_their_keys() -> None:
    """Numbers under other keys, and ids without a token, are left alone, or null."""
    new = renumbering(np.array([0, 5, 7]))
    before = {
        "vocab_size": 9, "pad_token_id": 0, "eos_token_id": [5, 7], "bos_token_id": 8, "decoder_start_token_id": -1,
        "hidden_size": 5, "type_vocab_size": 5, "pad_token_type_id": 5, "text_config": {"image_token_index": 7},
        "added_tokens_decoder": {"5": {"content": "a"}}, "label2id": {"x": 5}, "tie": True,
    }  # fmt: skip
    assert ids_in_settings(before) == {0, 5, 7, 8}
    assert renumber_settings(before, new, 3) == before | {
        "vocab_size": 3, "eos_token_id": [1, 2], "bos_token_id": None, "text_config": {"image_token_index": 2},
        "added_tokens_decoder": {"1": {"content": "a"}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda content: content["model"].update(type="Unigram"), "cannot be cut"),
        (lambda content: content["model"]["vocab"].update(twice=9), "the id 9"),
    ],
)
def test_a_tokenizer_that_cannot_be_cut_is_refused(change: Any, match: str) -> None:
    """By what is in the way."""
    content = json.loads(whole("uncased WordPiece"))
    change(content)
    with pytest.raises(InputError, match=match):
        Vocabulary.of(json.dumps(content))
