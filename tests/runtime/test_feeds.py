"""Inputs made up for a model have its shapes and dtypes, cover its vocabulary and never leave it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.quantization.int4 import int4_embeddings, quantize_int4
from onnxtool.reports import Dimension, TensorInfo
from onnxtool.runtime.input_cases import (
    FeedShape,
    FixedSizes,
    input_cases,
    padding_alone,
    past_shapes,
    random_feeds,
    verification_shapes,
)
from onnxtool.runtime.signature import has_past, index_bounds, is_mask, names_are_exchanged
from tests.graphs import save_text
from tests.optimize.passes.builders import apply, build, normal, operators
from tests.optimize.quantization.test_embeddings import TIED


def _info(name: str, dtype: str = "int64", shape: Sequence[Dimension] = ("batch_size", "sequence")) -> TensorInfo:
    return TensorInfo(name, dtype, tuple(shape))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_mask_is_true_on_real_tokens(padding: str) -> None:
    """On the side away from the padding, for each row by its length."""
    shape = FeedShape("ragged", (1, 3, 5), 5, padding)
    for row, length in zip(shape.mask, shape.lengths, strict=True):
        wanted = [True] * length + [False] * (5 - length)
        assert row.tolist() == (wanted if padding == "right" else wanted[::-1])
    assert shape.batch_size == 3
    assert shape.is_ragged


def test_a_full_shape_has_no_padding() -> None:
    """And is described by its size where nothing else is said."""
    shape = FeedShape.full(2, 3)
    assert (shape.description, shape.lengths, shape.is_ragged) == ("2 x 3", (3, 3), False)
    assert shape.mask.all()


@pytest.mark.parametrize("longest", [1, 2, 7, 20, 64, 512, 4096])
def test_verification_stays_within_what_the_model_takes(longest: int) -> None:
    """Up to its limit, with padding on both sides where it is asked for, and never more than 1024 tokens."""
    shapes = verification_shapes(longest)
    assert max(shape.sequence_length for shape in shapes) == min(longest, 1024)
    for shape in shapes:
        assert all(1 <= length <= shape.sequence_length for length in shape.lengths)
    assert {shape.padding for shape in shapes} == {"right", "left"}
    assert {shape.batch_size for shape in shapes} >= {1, 2, 4}
    if longest > 2:
        assert {shape.padding for shape in shapes if shape.is_ragged} == {"right", "left"}


@pytest.mark.parametrize("longest", [None, 1, 5, 512])
def test_a_row_of_padding_alone_stands_among_others(longest: int | None) -> None:
    """They show whether it spreads to them; all stay within what the model takes."""
    shape = padding_alone(longest)
    assert shape.sequence_length <= (longest or 7)
    assert [bool(row.any()) for row in shape.mask] == [True, False, True]


@pytest.mark.parametrize("names", [("input_ids", "attention_mask"), ("input_ids",)])
def test_a_file_without_a_stamp_is_run_on_a_row_of_padding_alone_where_it_has_a_mask(
    names: Sequence[str], tmp_path: Path
) -> None:
    """Without a mask there is no padding."""
    model = _with_tables(tmp_path / "m.onnx", _lookup_by("input_ids"), {"segments": 2}, names)
    assert sum(case.has_empty_rows for case in input_cases(model)) == ("attention_mask" in names)


def test_feeds_have_the_shapes_and_dtypes_of_the_inputs() -> None:
    """Named axes are filled, fixed ones kept; masks follow the lengths in any dtype."""
    shape = FeedShape("ragged", (2, 4), 4)
    inputs = [
        _info("input_ids"),
        _info("attention_mask", "int32"),
        _info("pad_mask", "float32"),
        _info("bias", "float32", ("batch_size", 3, "sequence", "sequence")),
        _info("half", "float16", ("batch_size", "sequence", 7)),
        _info("use_cache", "bool", ("batch_size",)),
        _info("scalar", "float32", ()),
    ]
    feeds = random_feeds(inputs, shape, {"input_ids": 50})
    assert {name: (array.shape, str(array.dtype)) for name, array in feeds.items()} == {
        "input_ids": ((2, 4), "int64"),
        "attention_mask": ((2, 4), "int32"),
        "pad_mask": ((2, 4), "float32"),
        "bias": ((2, 3, 4, 4), "float32"),
        "half": ((2, 4, 7), "float16"),
        "use_cache": ((2,), "bool"),
        "scalar": ((), "float32"),
    }
    assert feeds["attention_mask"].tolist() == feeds["pad_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_ids_cover_the_vocabulary_and_nothing_else() -> None:
    """Every id below the bound turns up in a large enough batch, on padding as well."""
    shape = FeedShape("ragged", (1,) * 50, 40)
    ids = random_feeds([_info("input_ids")], shape, {"input_ids": 30})["input_ids"]
    assert set(ids.ravel().tolist()) == set(range(30))
    assert len(set(ids[:, 1:].ravel().tolist())) == 30


def test_an_input_that_indexes_nothing_known_stays_small() -> None:
    """Zero and one are rows of every table, of two segments for one."""
    feeds = random_feeds([_info("token_type_ids")], FeedShape.full(8, 8), {})
    assert set(feeds["token_type_ids"].ravel().tolist()) == {0, 1}


def test_the_seed_decides_the_values() -> None:
    """The same again, and others with another."""
    inputs, shape = [_info("input_ids"), _info("x", "float32")], FeedShape.full(4, 6)
    first, again, other = (random_feeds(inputs, shape, {"input_ids": 99}, seed=seed) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).any()


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ([_info("input_ids", shape=(1, 128))], [(1, 128)]),
        ([_info("input_ids", shape=("N", 128)), _info("attention_mask", shape=("N", 128))], [(3, 128), (3, 128)]),
        ([_info("input_ids", shape=(1, "s")), _info("attention_mask", shape=("b", "s"))], [(1, 4), (1, 4)]),
        ([_info("x", "float32", ("batch", "t")), _info("h", "float32", (2, "batch", 8))], [(3, 4), (2, 3, 8)]),
        ([_info("x", "float32", ("N", "L")), _info("h", "float32", (2, "N", 8))], [(3, 4), (2, 3, 8)]),
        ([_info("x", "float32", ("seq", "batch", 8)), _info("m", "bool", ("batch", "seq"))], [(4, 3, 8), (3, 4)]),
        ([_info("x", "float32", (1, 576)), _info("state", "float32", (2, 1, 128))], [(1, 576), (2, 1, 128)]),
    ],
)
def test_sizes_are_those_that_the_file_fixes(inputs: list[TensorInfo], wanted: list[tuple[int, ...]]) -> None:
    """The name of an axis has one size in all inputs, wherever it stands, and the batch is known by its name."""
    feeds = random_feeds(inputs, FixedSizes.of(inputs).fit(FeedShape("three", (2, 3, 4), 4)), {})
    assert [array.shape for array in feeds.values()] == wanted


def test_lengths_of_a_fixed_file_are_parts_of_its_own() -> None:
    """Its single row is a padded one, and the description says its size."""
    fitted = FixedSizes.of([_info("attention_mask", shape=(1, 128))]).fit(FeedShape("ragged", (8, 4), 8))
    assert (fitted.lengths, fitted.sequence_length, fitted.description) == ((64,), 128, "1 x 128, padded right")


def test_inputs_that_would_fill_the_memory_are_refused_with_their_size() -> None:
    """Before anything is allocated."""
    with pytest.raises(InputError, match="would take 32,000,000,000,000 bytes") as caught:
        random_feeds([_info("x", "float32", (2_000_000, 2_000_000))], FeedShape.full(1, 1), {})
    assert "--input_shape" in caught.value.hint


def test_what_is_no_id_is_made_up_in_its_dtype() -> None:
    """Pixels take all of a byte."""
    inputs = [
        _info("pixels", "uint8", ("batch", 64, 64, 3)),
        _info("text", "string", ("batch",)),
    ]
    feeds = random_feeds(inputs, FixedSizes.of(inputs).fit(FeedShape.full(2, 4)), {})
    assert {name: (array.shape, str(array.dtype)) for name, array in feeds.items()} == {
        "pixels": ((2, 64, 64, 3), "uint8"),
        "text": ((2,), "object"),
    }
    assert feeds["pixels"].max() > 200


def test_a_fixed_axis_of_the_size_that_is_asked_for_is_fine() -> None:
    """A graph that was exported for one shape can be run on it; a hidden size is no sequence."""
    feeds = random_feeds([_info("input_ids", shape=(2, 4)), _info("x", "float32", (2, 16))], FeedShape.full(2, 4), {})
    assert [array.shape for array in feeds.values()] == [(2, 4), (2, 16)]


@pytest.mark.parametrize(
    "info", [_info("codes", "bfloat16"), _info("attention_mask", "type99"), _info("parts", "sequence(float32)")]
)
def test_a_dtype_that_cannot_be_made_up_is_refused(info: TensorInfo) -> None:
    """By the name of the input."""
    with pytest.raises(InputError, match=f"the input {info.name} of dtype"):
        random_feeds([info], FeedShape.full(1, 1), {})


def test_a_mask_is_known_by_its_name_and_rank() -> None:
    """A mask of rank 4 is a bias, not padding."""
    assert is_mask(_info("attention_mask"))
    assert not is_mask(_info("input_ids"))
    assert not is_mask(_info("causal_mask", shape=("b", 1, "s", "s")))


def _bounds(path: Path, body: str, tables: dict[str, int], inputs: Sequence[str]) -> dict[str, int]:
    """Return the bounds of a graph of these nodes whose tables have so many rows of 4."""
    return index_bounds(_with_tables(path, body, tables, inputs))


def _with_tables(path: Path, body: str, tables: dict[str, int], inputs: Sequence[str]) -> ModelFile:
    given = ", ".join(f"int64[b, s] {name}" for name in inputs)
    weights = {name: np.zeros((rows, 4), np.float32) for name, rows in tables.items()}
    return ModelFile.open(save_text(path, f"g ({given}) => (float y) {{ {body} }}", weights, 17))


def test_bounds_are_the_rows_of_the_table_that_an_input_indexes(tmp_path: Path) -> None:
    """Directly, or after operators that keep an index an index; of two tables the smaller one holds."""
    body = """a = Gather(words, input_ids) cast = Cast <to=6> (token_type_ids) clipped = Min(cast, bound)
        raised = Unsqueeze(clipped, axes) b = Gather(segments, raised) c = Gather(larger, token_type_ids)
        moved = Add(position_ids, position_ids) d = Gather(places, moved) y = Gather(computed, attention_mask)"""
    tables = {"words": 11, "segments": 3, "larger": 8, "places": 6, "axes": 1, "bound": 1}
    names = ("input_ids", "token_type_ids", "position_ids", "attention_mask")
    wanted = {"input_ids": 11, "token_type_ids": 3, "position_ids": 6}
    assert _bounds(tmp_path / "m.onnx", body, tables, names) == wanted


def test_ids_that_cannot_be_followed_are_bounded_by_the_largest_table(tmp_path: Path) -> None:
    """Otherwise a model whose ids are hidden behind an unknown operator would be verified on two rows of thousands."""
    body = 'h = BitShift <direction="LEFT"> (input_ids, input_ids) a = Gather(words, h) y = Gather(places, h)'
    assert _bounds(tmp_path / "m.onnx", body, {"words": 11, "places": 6}, ("input_ids",)) == {"input_ids": 11}


@pytest.mark.parametrize(
    ("types", "segments", "wanted"),
    [("token_type_ids", "segments", {"input_ids": 11, "token_type_ids": 2}), ("", "", {"input_ids": 11})],
)
def test_bounds_are_found_in_fused_embeddings(
    types: str, segments: str, wanted: dict[str, int], tmp_path: Path
) -> None:
    """The optimizer puts three lookups into one node, whose segments may be left out."""
    tables = {"words": 11, "places": 5, "segments": 2, "gamma": 1, "beta": 1}
    read = f"input_ids, {types}, words, places, {segments}, gamma, beta"
    body = f"y, unused = com.microsoft.EmbedLayerNormalization({read})"
    assert _bounds(tmp_path / "m.onnx", body, tables, [name for name in ("input_ids", types) if name]) == wanted


def test_bounds_are_found_where_a_head_shares_a_table_in_blocks(tmp_path: Path) -> None:
    """The table is reshaped for the lookup, and its scales have as many rows."""
    model = build(TIED, {"w": normal(2000, 64)})
    apply(quantize_int4(), model)
    apply(int4_embeddings(), model)
    assert operators(model)[:2] == ["Reshape", "GatherBlockQuantized"]
    path = tmp_path / "m.onnx"
    write_inline(model, path)
    assert index_bounds(ModelFile.open(path)) == {"i": 2000}


def _lookup_by(name: str, table: str = "segments") -> str:
    return f"cast_{name} = Cast <to=6> ({name}) of_{name} = Gather({table}, cast_{name}) "


# Padding has one id, whatever stands there.
_MASKED_IDS = "is = Cast <to=9> (attention_mask) ids = Where(is, input_ids, input_ids) a = Gather(words, ids)"


@pytest.mark.parametrize(
    ("body", "inputs", "exchanged"),
    [
        (_lookup_by("attention_mask"), ("input_ids", "attention_mask", "token_type_ids"), True),
        (_lookup_by("token_type_ids"), ("input_ids", "attention_mask", "token_type_ids"), False),
        (
            _lookup_by("token_type_ids") + _lookup_by("attention_mask", "words"),
            ("input_ids", "attention_mask", "token_type_ids"),
            False,
        ),
        (_lookup_by("attention_mask"), ("input_ids", "attention_mask"), False),
        (_MASKED_IDS, ("input_ids", "attention_mask", "token_type_ids"), False),
    ],
)
def test_names_are_exchanged_where_the_mask_looks_up_the_types_of_tokens(
    body: str, inputs: Sequence[str], exchanged: bool, tmp_path: Path
) -> None:
    """The mask alone, by its own values, and where there are token types that could."""
    model = _with_tables(tmp_path / "m.onnx", body, {"words": 11, "segments": 2}, inputs)
    assert names_are_exchanged(model) == exchanged


def test_exchanged_names_are_fed_what_they_are(tmp_path: Path) -> None:
    """Rows keep what they attend to, which random token types would take from them; all of an output is compared."""
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    model = _with_tables(tmp_path / "m.onnx", _lookup_by("attention_mask"), {"segments": 2}, inputs)
    cases = input_cases(model)
    for case, shape in zip(cases, verification_shapes(64), strict=True):
        np.testing.assert_array_equal(case.feeds["token_type_ids"], shape.mask)
        assert case.valid is None
    assert any((case.feeds["attention_mask"] != case.feeds["token_type_ids"]).any() for case in cases)


CACHED = (
    TensorInfo("input_ids", "int64", ("batch_size", "sequence")),
    TensorInfo("attention_mask", "int64", ("batch_size", "past_sequence + sequence")),
    TensorInfo("past_key_values.0.key", "float32", ("batch_size", 4, "past_sequence", 16)),
)


def test_a_model_with_a_cache_is_handed_a_past_and_a_mask_of_both() -> None:
    """A prompt has no past; a step has one, and the first row's begins with padding."""
    assert has_past(CACHED)
    assert not has_past(CACHED[:1])
    prompt = random_feeds(CACHED, FeedShape.full(2, 5), {"input_ids": 10})
    assert [array.shape for array in prompt.values()] == [(2, 5), (2, 5), (2, 4, 0, 16)]
    for shape in past_shapes(64):
        feeds = random_feeds(CACHED, shape, {"input_ids": 10})
        rows, length = shape.batch_size, shape.sequence_length
        assert [array.shape for array in feeds.values()] == [(rows, length), (rows, 11 + length), (rows, 4, 11, 16)]
        assert feeds["attention_mask"].sum() == rows * (11 + length) - 3
        assert not feeds["attention_mask"][0, :3].any()


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_past_and_sequence_stay_within_what_the_model_takes(longest: int) -> None:
    """Both together are what its positions count."""
    assert all(shape.past_length + shape.sequence_length <= longest for shape in past_shapes(longest))


def test_what_an_encoder_has_read_may_have_one_length_alone() -> None:
    """As of LED, whose attention goes by blocks; the decoder's texts keep their own lengths, padded alike."""
    inputs = [
        TensorInfo("input_ids", "int64", ("batch", "sequence")),
        TensorInfo("encoder_attention_mask", "int64", ("batch", 128)),
    ]
    shape = FeedShape("ragged", (4, 2), 4)
    feeds = random_feeds(inputs, shape, {})
    assert feeds["input_ids"].shape == (2, 4)
    assert feeds["encoder_attention_mask"].shape == (2, 128)
    assert feeds["encoder_attention_mask"].sum(axis=1).tolist() == [128, 64]
