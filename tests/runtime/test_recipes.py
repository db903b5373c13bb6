"""The stamp says what inputs a file takes: they are made as it says, and a hostile one ends in one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool import BenchmarkOptions, OptimizeOptions, benchmark, optimize_model
from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import INPUTS_KEY, stamp
from onnxtool.optimize.quantization.candidates import timing_feeds
from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.recipes import GIVEN, IDS, MASK, NORMAL, InputStamp, Recipe
from tests.graphs import save_text

_END, _PAD, _START = 2, 1, 0
_TEXT = [TensorInfo(name, "int64", ("batch_size", "sequence")) for name in ("input_ids", "attention_mask")]
_KINDS = {"input_ids": Recipe(IDS, 9, last=_END), "attention_mask": Recipe(MASK)}


def _ragged(*, left: bool) -> Case:
    mask = np.arange(6)[None] < np.array([6, 4, 1])[:, None]
    mask = mask[:, ::-1] if left else mask
    feeds = {"input_ids": np.full((3, 6), 3), "attention_mask": mask.astype(np.int64)}
    return Case("ragged", feeds, mask)


def _pictures(path: Path, **stamped: Any) -> Path:
    """Write a classifier of images in patches of 16, with a dynamic height and width, and a stamp."""
    generator = np.random.default_rng(0)
    weights = {
        "patches": generator.standard_normal((4, 3, 16, 16)).astype(np.float32) / 8,
        "labels": generator.standard_normal((4, 2)).astype(np.float32),
        "flat": np.array([0, -1], np.int64),
    }
    body = """features = Conv <strides=[16, 16]> (pixel_values, patches) pooled = GlobalMaxPool(features)
        row = Reshape(pooled, flat) logits = MatMul(row, labels)"""
    ends = "(float[batch_size, 3, height, width] pixel_values) => (float[batch_size, 2] logits)"
    save_text(path, f"pictures {ends} {{ {body} }}", weights)
    if stamped:
        stamp(path, {INPUTS_KEY: json.dumps(stamped)})
    return path


def _recipe(**stated: Any) -> dict[str, Any]:
    return {"kind": "ids", "below": 0, "first": None, "last": None, "pad": None, **stated}


def _sizes(**stated: Any) -> dict[str, Any]:
    return {"case": "", "content": {}, "padded_left": False, "masked": False, "given": {}, **stated}


_OF_PICTURES: dict[str, Any] = {
    "inputs": {"pixel_values": _recipe(kind="normal")},
    "cases": [
        _sizes(case="one image", shapes={"pixel_values": [1, 3, 32, 32]}),
        _sizes(case="wide ones", shapes={"pixel_values": [2, 3, 32, 64]}),
    ],
}


def _made(described: InputStamp, inputs: list[TensorInfo]) -> Case:
    return described.make_case(described.cases[0], inputs, 0)


@pytest.mark.parametrize("left", [False, True])
def test_inputs_are_made_as_the_verified_ones_were(left: bool) -> None:
    """Shapes and padding are those of the case; every text ends with the end token, which is nowhere else."""
    case = _ragged(left=left)
    made, again = (_made(InputStamp.of(_TEXT, _KINDS, [case]), _TEXT) for _ in range(2))
    assert made.valid is not None
    assert case.valid is not None
    np.testing.assert_array_equal(made.valid, case.valid)
    np.testing.assert_array_equal(made.feeds["attention_mask"], case.feeds["attention_mask"])
    ids = made.feeds["input_ids"]
    np.testing.assert_array_equal(ids, again.feeds["input_ids"])
    assert {name: array.dtype for name, array in made.feeds.items()} == dict.fromkeys(case.feeds, np.int64)
    ends = [5, 5, 5] if left else [5, 3, 0]
    np.testing.assert_array_equal(np.argwhere(ids == _END), list(enumerate(ends)))
    assert ids.min() >= 0
    assert ids.max() < 9


def test_a_decoder_starts_with_its_first_token_and_is_padded_behind() -> None:
    """The padding stands behind the text alone, also where texts begin with the token that pads."""
    inputs = [TensorInfo("decoder_input_ids", "int64", ("batch_size", "decoder_sequence"))]
    for start in (_START, _PAD):
        kind = Recipe(IDS, 50, first=start, pad=_PAD)
        ids = np.array([[start, 7, 8, 9], [start, 7, _PAD, _PAD]])
        described = InputStamp.of(inputs, {"decoder_input_ids": kind}, [Case("", {"decoder_input_ids": ids}, None)])
        made = _made(described, inputs).feeds["decoder_input_ids"]
        np.testing.assert_array_equal(made == _PAD, ids == _PAD)
        assert (made[:, 0] == start).all()


def test_what_is_stamped_is_read_back(tmp_path: Path) -> None:
    """Through the metadata of a file; cases that differ in their content only are one."""
    case = Case("one image", {"pixel_values": np.zeros((1, 3, 32, 32), np.float32)}, None)
    path = _pictures(tmp_path / "model.onnx")
    inputs = ModelFile.open(path).structure.inputs
    described = InputStamp.of(inputs, {"pixel_values": Recipe(NORMAL)}, [case, case])
    assert len(described.cases) == 1
    stamp(path, {INPUTS_KEY: described.json})
    assert InputStamp.read_from(ModelFile.open(path)) == described


def test_sizes_of_pictures_are_given_as_they_are() -> None:
    """Integers that belong to a shape are not drawn, and repeat where a batch is larger."""
    inputs = [
        TensorInfo("pixel_values", "float32", ("batch_size", 6, 4)),
        TensorInfo("spatial_shapes", "int64", ("batch_size", 2)),
    ]
    feeds = {"pixel_values": np.zeros((2, 6, 4), np.float32), "spatial_shapes": np.array([[2, 3], [3, 2]])}
    kinds = {"pixel_values": Recipe(NORMAL), "spatial_shapes": Recipe(GIVEN)}
    described = InputStamp.of(inputs, kinds, [Case("", feeds, None)])
    np.testing.assert_array_equal(_made(described, inputs).feeds["spatial_shapes"], feeds["spatial_shapes"])
    sized = described.make_case(described.resized(inputs, 3, 1), inputs, 0).feeds
    assert sized["spatial_shapes"].tolist() == [[2, 3], [3, 2], [2, 3]]
    assert sized["pixel_values"].shape == (3, 6, 4)


def test_nothing_is_stamped_that_a_reader_refuses(tmp_path: Path) -> None:
    """Inputs of a target that have other dtypes, and cases that are too large, are left out."""
    path = _pictures(tmp_path / "model.onnx")
    inputs = ModelFile.open(path).structure.inputs
    described = InputStamp.of(inputs, {"pixel_values": Recipe(IDS, 9)}, [])
    assert not described.inputs
    large = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4096, 3, 256, 256), (0, 0, 0, 0))
    cases = [Case(str(size), {"pixel_values": large[:size]}, None) for size in (4096, 1024)]
    described = InputStamp.of(inputs, {"pixel_values": Recipe(NORMAL)}, cases)
    assert [case.case for case in described.cases] == ["1024"]
    info = TensorInfo("sizes", "int64", ("batch_size", 2))
    cases = [Case(str(size), {"sizes": np.full((size, 2), 3)}, None) for size in (1 << 16, 5)]
    assert [case.case for case in InputStamp.of([info], {"sizes": Recipe(GIVEN)}, cases).cases] == ["5"]


def test_texts_of_a_benchmark_have_the_length_that_is_asked_for() -> None:
    """Without padding, and with the token that ends a text."""
    described = InputStamp.of(_TEXT, _KINDS, [_ragged(left=False)])
    assert described.fixed_length(_TEXT) is None
    feeds = described.make_case(described.resized(_TEXT, 2, 11), _TEXT, 0).feeds
    assert feeds["attention_mask"].shape == (2, 11)
    assert feeds["attention_mask"].all()
    assert (feeds["input_ids"][:, -1] == _END).all()
    fixed = [info._replace(shape=("batch_size", 6)) for info in _TEXT]
    assert described.fixed_length(fixed) == 6


def test_optimize_and_benchmark_make_pictures_of_a_size_that_the_model_takes(tmp_path: Path) -> None:
    """A graph of patches says nothing of their size, and made-up images are smaller than one."""
    path = _pictures(tmp_path / "model.onnx", **_OF_PICTURES)
    report = optimize_model(OptimizeOptions(path))
    assert report.verification is not None
    assert [case.inputs["pixel_values"] for case in report.verification.cases] == [(1, 3, 32, 32), (2, 3, 32, 64)]
    timed = benchmark(path, BenchmarkOptions(runs=1, warmup=0, batch_sizes=(1, 3)))
    assert [(result.batch_size, result.sequence_length) for result in timed.results] == [(1, 1), (3, 1)]
    larger = benchmark(path, BenchmarkOptions(runs=1, warmup=0, batch_sizes=(1,), sequence_lengths=(64,)))
    assert [(result.batch_size, result.sequence_length) for result in larger.results] == [(1, 64)]
    unstamped = optimize_model(OptimizeOptions(_pictures(tmp_path / "plain.onnx"))).verification
    assert unstamped is not None
    assert unstamped.refused


def _with(**changes: Any) -> dict[str, Any]:
    return {**_OF_PICTURES, **changes}


def _case(**changes: Any) -> dict[str, Any]:
    return _with(cases=[{**_OF_PICTURES["cases"][0], **changes}])


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        ("{", "Expecting"),
        ("[" * 60_000, "nested"),
        ("9" * 300_000, "300000 characters"),
        ("[]", "no object"),
        (_with(inputs=None), "inputs is no object"),
        (_with(inputs={"ghost": _recipe(kind="normal")}), "'ghost'"),
        (_with(inputs={"pixel_values": _recipe(kind=["normal"])}), "no str that belongs"),
        (_with(inputs={"pixel_values": _recipe(below=5)}), "float32 holds 'ids'"),
        (_with(cases=7), "no list"),
        (_with(cases=_OF_PICTURES["cases"] * 33), "at most 64"),
        (_with(cases=[7]), "no object"),
        (_with(cases=[{**_OF_PICTURES["cases"][0], "shapes": {"pixel_values": [200, 3, 512, 512]}}] * 2), "more than"),
        (_case(case="\x1b[2J"), "readable name"),
        (_case(shapes={}), "other inputs"),
        (_case(shapes={"pixel_values": [1, 3, 32]}), "4 axes"),
        (_case(shapes={"pixel_values": [1, 4, 32, 32]}), "an axis of 3 where"),
        (_case(shapes={"pixel_values": [1, 3, 32, True]}), "no int that belongs"),
        (_case(shapes={"pixel_values": [1, 3, 32, -1]}), "no int that belongs"),
        (_case(shapes={"pixel_values": [1, 3, 0, 1]}), "where the case has 0"),
        (_case(shapes={"pixel_values": [1 << 12, 3, 1 << 12, 1 << 12]}), "more than"),
        (_case(padded_left="both"), "no bool that belongs"),
        (_case(content={"pixel_values": [[3, 32]]}), "does not fit pixel_values"),
        (_case(content={"pixel_values": [[3, 32, 99]]}), "does not fit pixel_values"),
        (_case(content={"ghost": []}), "other inputs"),
        (_case(given=[]), "no object"),
        (_case(padding="left"), "has 'padding'"),
        (_case(shapes={"pixel_values": [1, 3, 1 << 40, 1]}), "more than"),
    ],
)
def test_a_hostile_stamp_ends_in_one_error(hostile: Any, why: str, tmp_path: Path) -> None:
    """Nothing is made from it: neither an array of any size, nor text for a terminal."""
    path = _pictures(tmp_path / "model.onnx")
    stamp(path, {INPUTS_KEY: hostile if isinstance(hostile, str) else json.dumps(hostile)})
    with pytest.raises(ModelFileError, match=why) as error:
        input_cases(ModelFile.open(path))
    assert len(error.value.message) < 500


def _of_ids(path: Path, stamped: dict[str, Any]) -> ModelFile:
    """Write a graph of texts that gives them back, with a stamp."""
    ends = "(int64[batch_size, sequence] input_ids) => (int64[batch_size, sequence] out)"
    save_text(path, f"ids {ends} {{ out = Identity(input_ids) }}")
    stamp(path, {INPUTS_KEY: json.dumps(stamped)})
    return ModelFile.open(path)


def test_texts_that_are_timed_end_as_they_must(tmp_path: Path) -> None:
    """Also where precisions are compared: a classifier of BART's kind runs on no others."""
    kind = _recipe(below=9, last=_END)
    cases = [_sizes(shapes={"input_ids": [1, 2]})]
    for known in (cases, []):
        model = _of_ids(tmp_path / "model.onnx", {"inputs": {"input_ids": kind}, "cases": known})
        for feeds in timing_feeds(model, ()).values():
            assert (feeds["input_ids"][:, -1] == _END).all()
            assert (feeds["input_ids"] == _END).sum() == len(feeds["input_ids"])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (_recipe(), "below"),
        (_recipe(below=1 << 60), "below"),
        (_recipe(below=4, last=4), "last"),
        (_recipe(below=2, last=0, pad=1), "no ids"),
        (_recipe(kind="given"), "no integers"),
        (_recipe(kind="words"), "int64 holds 'words'"),
    ],
)
def test_hostile_ids_end_in_one_error(entry: dict[str, Any], why: str, tmp_path: Path) -> None:
    """An id outside of those that there are, none that is left, or numbers that are not given."""
    hostile = {"inputs": {"input_ids": entry}, "cases": [_sizes(shapes={"input_ids": [1, 2]})]}
    model = _of_ids(tmp_path / "model.onnx", hostile)
    with pytest.raises(ModelFileError, match=why):
        input_cases(model)
