"""Inputs of files without a stamp: by the graph, by samples and shapes that are given, less what a file refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxtool import BenchmarkOptions, OptimizeOptions, benchmark, optimize_model
from onnxtool.errors import GateError, InputError, OptionError, SessionError
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization.calibration import make_calibration
from onnxtool.optimize.verification import accepted_cases
from onnxtool.runtime.difference import measure
from onnxtool.runtime.given_inputs import GivenInputs
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.session import open_session
from tests.graphs import save_text
from tests.infer.tiny_models import save_graph


def _save(path: Path, inputs: str, body: str, weights: Mapping[str, Any] | None = None) -> ModelFile:
    """Write a graph that makes `y`."""
    return ModelFile.open(save_text(path, f"g ({inputs}) => (float y) {{ {body} }}", weights, 17))


def _weight(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.fixture
def detector(tmp_path: Path) -> ModelFile:
    """Images of bytes whose height and width are multiples of 32."""
    body = """floats = Cast <to=1> (x) blocked = Reshape(floats, blocks)
        y = ReduceMean <axes=[2], keepdims=0> (blocked)"""
    return _save(tmp_path / "detector.onnx", "uint8[n, 3, h, w] x", body, {"blocks": np.array([0, 3, -1, 32 * 32])})


def test_cases_that_the_file_refuses_are_left_out_and_named(detector: ModelFile, tmp_path: Path) -> None:
    """Sizes in multiples of 32 are among those tried, and the report says why others are not compared."""
    report = optimize_model(OptimizeOptions(detector.path, output=tmp_path / "out.onnx")).verification
    assert report is not None
    assert {case.inputs["x"] for case in report.cases} >= {(1, 3, 64, 64), (2, 3, 96, 160)}
    (refused,) = report.refused
    assert refused.startswith("images of 3 x 37 x 53 (")
    assert "Reshape" in refused


def test_a_file_that_runs_on_nothing_is_refused_in_its_own_words(tmp_path: Path) -> None:
    """With what was tried, and both ways out; nothing is said of passes."""
    model = _save(tmp_path / "m.onnx", "float[batch, t] x", "y = Reshape(x, s)", {"s": np.array([7, 1009])})
    with pytest.raises(SessionError, match=r"runs on none of \d+ inputs \(a long text.*Reshape") as caught:
        optimize_model(OptimizeOptions(model.path, output=tmp_path / "out.onnx"))
    assert "--sample_inputs" in caught.value.hint
    assert "--input_shape" in caught.value.hint
    with pytest.raises(SessionError, match="runs on none"):
        accepted_cases(model)
    report = optimize_model(OptimizeOptions(model.path, output=tmp_path / "out.onnx", input_shapes=("x:7,1009",)))
    assert report.verification is not None
    assert {case.inputs["x"] for case in report.verification.cases} == {(7, 1009)}


def test_the_mask_of_a_sample_says_what_counts(tmp_path: Path) -> None:
    """What stands in the padding is not compared."""
    path, inputs = tmp_path / "m.onnx", "int64[b, s] input_ids, int64[b, s] attention_mask"
    save_text(path, f"g ({inputs}) => (int64 y) {{ y = Add(input_ids, attention_mask) }}", opset=17)
    model = ModelFile.open(path)
    np.savez(tmp_path / "s.npz", input_ids=np.array([[0, 3, 0]]), attention_mask=np.array([[1, 1, 0]]))
    (case,) = input_cases(model, given=GivenInputs((tmp_path / "s.npz",)))
    assert case.valid is not None
    assert case.valid.tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        ("x:1,2x", OptionError, "'x:1,2x' is not the shape of an input"),
        (("x:1,64,64,3", "x:1,3,64,64"), OptionError, "the input x has two shapes"),
        ("z:1", InputError, "no input z"),
        ("x:1,4,64,64", InputError, r"x has the shape \[1, 4, 64, 64\] in --input_shape, and the model takes"),
        ("x:1,3", InputError, r"x has the shape \[1, 3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(
    detector: ModelFile, shapes: Any, error: type[InputError], message: str
) -> None:
    """Whether they are no shapes, or none of this file."""
    with pytest.raises(error, match=message):
        input_cases(detector, given=OptimizeOptions(detector.path, input_shapes=shapes).given)


def test_a_given_shape_holds_for_the_names_of_its_axes(tmp_path: Path) -> None:
    """A state beside the samples gets their batch."""
    inputs, body = "float[batch, t] x, float[2, batch, 8] state", "m = ReduceMean <axes=[1]> (x) y = Add(state, m)"
    model = _save(tmp_path / "m.onnx", inputs, body)
    cases = input_cases(model, given=GivenInputs(shapes={"x": (5, 576)}))
    assert {case.feeds["state"].shape for case in cases} == {(2, 5, 8)}


def test_samples_are_what_is_run(detector: ModelFile, tmp_path: Path) -> None:
    """Verification, calibration and timing take each file as a run."""
    picture = np.full((1, 3, 32, 64), 7, np.uint8)
    for name in ("one", "two"):
        np.savez(tmp_path / f"{name}.npz", x=picture)
    paths = (tmp_path / "one.npz", tmp_path / "two.npz")
    report = optimize_model(OptimizeOptions(detector.path, output=tmp_path / "out.onnx", sample_inputs=paths))
    assert report.verification is not None
    assert [case.description for case in report.verification.cases] == ["one", "two"]
    calibration = make_calibration(detector.path, given=GivenInputs(paths))
    np.testing.assert_array_equal(calibration.feeds[1]["x"], picture)
    timed = benchmark(detector.path, BenchmarkOptions(runs=2, warmup=0, provider="cpu", sample_inputs=paths))
    assert [(result.name, result.throughput_tokens_per_s) for result in timed.results] == [("1x1", None)]
    assert timed.inputs == "samples"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "has no array for the input x"),
        ({"x": np.zeros((1, 3, 32, 32), np.uint8), "z": np.zeros(1)}, "has an array z"),
        ({"x": np.zeros((1, 3, 32, 32), np.float32)}, "x in .* is float32, and the model takes uint8"),
        ({"x": np.zeros((1, 4, 32, 32), np.uint8)}, r"x has the shape \[1, 4, 32, 32\]"),
        ({"x": np.array([{}], object)}, "cannot be read as .npz"),
    ],
)
def test_samples_that_do_not_fit_are_refused_by_name(
    detector: ModelFile, tmp_path: Path, arrays: dict[str, NDArray[Any]], message: str
) -> None:
    """Nothing is unpickled, converted or left out."""
    np.savez(tmp_path / "s.npz", allow_pickle=True, **arrays)
    with pytest.raises(InputError, match=message):
        input_cases(detector, given=GivenInputs((tmp_path / "s.npz",)))


def test_a_float_mask_is_no_sound(tmp_path: Path) -> None:
    """By its use: what is raised and multiplied is a mask, what goes into a convolution is samples."""
    raised = "raised = Unsqueeze(m, axis) "
    inputs, body = "float[b, s, 8] x, float[b, s] m", f"{raised} y = Mul(x, raised)"
    masked = _save(tmp_path / "masked.onnx", inputs, body, {"axis": np.array([2])})
    weights = {"axis": np.array([1]), "w": _weight(1, 1, 400)}
    sound = _save(tmp_path / "sound.onnx", "float[b, s] m", f"{raised} y = Conv(raised, w)", weights)
    masks = [case.feeds["m"] for case in input_cases(masked)]
    assert {value for mask in masks for value in np.unique(mask)} == {0.0, 1.0}
    assert max(mask.shape[1] for mask in masks) == 64
    assert max(case.feeds["m"].shape[1] for case in input_cases(sound)) == 64 * 640


def test_texts_are_as_long_as_the_table_of_positions(tmp_path: Path) -> None:
    """Which a counter looks up, and which is as wide as that of the words."""
    body = """a = Gather(words, input_ids) sizes = Shape(input_ids) length = Gather(sizes, one)
        places = Range(zero, length, one) b = Gather(positions, places) y = Add(a, b)"""
    weights = {"zero": np.array(0), "one": np.array(1), "words": _weight(40, 8), "positions": _weight(300, 8)}
    model = _save(tmp_path / "m.onnx", "int64[b, s] input_ids", body, weights)
    assert max(case.feeds["input_ids"].shape[1] for case in accepted_cases(model)) == 300


def test_sequences_and_maps_are_run_and_compared(tmp_path: Path) -> None:
    """Each array under its name; another number of elements is another output."""
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["n"])
    index = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    nodes = [helper.make_node("SequenceErase", ["s", "i"], ["y"])]
    outputs = [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)]
    save_graph(tmp_path / "m.onnx", nodes, [sequence, index], outputs, [])
    session = open_session(tmp_path / "m.onnx", provider="cpu")
    feeds = {"s[0]": np.zeros(2, np.float32), "s[1]": np.ones(3, np.float32), "i": np.array(0)}
    found = session.run(feeds)
    assert sorted(found) == ["y.length", "y[0]"]
    np.testing.assert_array_equal(found["y[0]"], feeds["s[1]"])
    other = session.run(feeds | {"s[2]": np.ones(3, np.float32)})
    assert measure(other["y.length"], found["y.length"], None).max_abs_error == float("inf")


def test_texts_that_come_out_are_the_same_or_not() -> None:
    """They have no difference to measure."""
    one, other = np.array(["a", "b"], object), np.array(["a", "c"], object)
    assert measure(one, one.copy(), None).max_abs_error == 0.0
    assert measure(one, other, None).max_abs_error == float("inf")


def test_a_benchmark_counts_what_it_feeds(tmp_path: Path) -> None:
    """A row of 576 samples is one row and no tokens, and a gate on tokens is refused before anything is timed."""
    model = _save(tmp_path / "m.onnx", "float[1, 576] x", "y = Abs(x)")
    report = benchmark(model.path, BenchmarkOptions(runs=2, warmup=0, provider="cpu"))
    assert [(result.name, result.throughput_tokens_per_s) for result in report.results] == [("1x1", None)]
    with pytest.raises(InputError, match="fixed to --batch_size 1; 8 was asked for"):
        benchmark(model.path, BenchmarkOptions((8,), runs=2, provider="cpu"))
    with pytest.raises(GateError, match="no tokens are fed"):
        benchmark(model.path, BenchmarkOptions(runs=2, provider="cpu", fail_if=("throughput_tokens_per_s<1",)))
