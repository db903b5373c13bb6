"""The small blocks compute what numpy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from onnxtool.errors import ArtifactError
from onnxtool.training import onnxblock
from onnxtool.training.onnxblock import blocks
from tests.training.small_models import perceptron, run_block

X = np.array([[0.5, 2.0], [3.0, 0.1]], np.float32)
Y = np.array([[1.5, 0.3], [0.2, 4.0]], np.float32)

CASES: dict[str, tuple[onnxblock.Block, list[NDArray[Any]], Any]] = {
    "Add": (blocks.Add(), [X, Y], X + Y),
    "Sub": (blocks.Sub(), [X, Y], X - Y),
    "Mul": (blocks.Mul(), [X, Y], X * Y),
    "Div": (blocks.Div(), [X, Y], X / Y),
    "Pow": (blocks.Pow(3.0), [X], X**3),
    "ReduceMean": (blocks.ReduceMean(), [X], X.mean(keepdims=True)),
    "ReduceSum": (blocks.ReduceSum(keepdims=False), [X], X.sum()),
    "Sigmoid": (blocks.Sigmoid(), [X], 1 / (1 + np.exp(-X))),
    "Log": (blocks.Log(), [X], np.log(X)),
    "Neg": (blocks.Neg(), [X], -X),
    "Abs": (blocks.Abs(), [-X], X),
    "Constant": (blocks.Constant(2.5), [], np.array([2.5], np.float32)),
    "SequenceConstruct": (blocks.SequenceConstruct(), [X, Y], [X, Y]),
    "ReduceAllL2": (blocks.ReduceAllL2(), [X, Y], [np.sqrt((X**2).sum() + (Y**2).sum())]),
    "Clip": (blocks.Clip(0.4, 2.5), [X], X.clip(0.4, 2.5)),
    "PassThrough": (blocks.PassThrough(), [X], X),
    "LabelEncoder": (
        blocks.LabelEncoder(keys_int64s=[3, 5], values_floats=[0.5, 0.7], default_float=-1.0),
        [np.array([5, 3, 4])],
        np.array([0.7, 0.5, -1], np.float32),
    ),
    "Cast": (blocks.Cast(TensorProto.INT64), [X], X.astype(np.int64)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_block_computes_what_its_name_says(name: str) -> None:
    """On onnxruntime, against numpy."""
    block, arrays, wanted = CASES[name]
    feeds = {f"input_{place}": array for place, array in enumerate(arrays)}
    np.testing.assert_allclose(run_block(block, feeds)[0], wanted, rtol=1e-6)


def test_a_linear_layer_has_parameters_of_its_own() -> None:
    """Drawn from a seed, in the layout of PyTorch."""
    layer = blocks.Linear(2, 4, True, 2.0, 0.5, seed=3)

    class Model(onnxblock.ForwardBlock):
        def build(self, name: str) -> Any:
            return layer(name)

    model = Model()
    with onnxblock.empty_base() as accessor:
        from onnx import helper, numpy_helper

        accessor.model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2]))
        model("x")
        assert [value.name for value in model.infer_shapes_on_base().graph.output]
    proto = model.to_model_proto()
    weight, bias = (numpy_helper.to_array(tensor) for tensor in proto.graph.initializer)
    assert weight.shape == (4, 2)
    found = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, 2 * X @ weight.T + bias / 2, rtol=1e-6)


def test_an_input_is_like_an_output_that_is_there() -> None:
    """Of the same dtype and shape, under a name of the user's."""
    with onnxblock.base(perceptron()) as accessor:
        assert blocks.InputLike("y")("target") == "target"
        assert accessor.value_info("target").type == accessor.value_info("y").type
        with pytest.raises(ArtifactError, match="already has a value called 'target'"):
            blocks.InputLike("y")("target")


def test_an_input_is_like_a_value_within() -> None:
    """Whose shape the model does not say."""
    with onnxblock.base(perceptron()) as accessor:
        blocks.InputLike("h")("like_h")
        dims = accessor.value_info("like_h").type.tensor_type.shape.dim
        assert [dim.dim_param or dim.dim_value for dim in dims] == ["N", 7]


def test_blocks_need_a_model() -> None:
    """The error says how one is opened."""
    with pytest.raises(ArtifactError, match="no model to build on") as caught:
        blocks.Add()("a", "b")
    assert "onnxblock.base" in caught.value.hint


def test_there_is_one_model_at_a_time() -> None:
    """Blocks would not know which is meant."""
    with onnxblock.base(perceptron()), pytest.raises(ArtifactError, match="another model"), onnxblock.empty_base():
        pass
    with onnxblock.empty_base():  # and after the error there is none
        pass


def test_the_model_of_the_user_stays_as_it_was() -> None:
    """Blocks work on a copy."""
    model = perceptron()
    before = model.SerializeToString()
    with onnxblock.base(model):
        blocks.Neg()("y")
    assert model.SerializeToString() == before


def test_libraries_of_operators_are_refused() -> None:
    """The reason is in the error: nobody knows their gradients."""
    with pytest.raises(ArtifactError, match="no gradients"):
        onnxblock.custom_op_library("ops.so")
