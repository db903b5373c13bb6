"""Inputs of strings are fed like others, though onnxruntime's Python binds no array of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxtool.errors import InputError
from onnxtool.training.api.session import BoundSession, Device


@pytest.fixture
def session(tmp_path: Path) -> BoundSession:
    """A table of words: string [B, 2] to float32 [B, 2]."""
    words = helper.make_node(
        "LabelEncoder",
        ["words"],
        ["numbers"],
        domain="ai.onnx.ml",
        keys_strings=["one", "zwölf"],
        values_floats=[1.0, 12.0],
        default_float=-1.0,
    )
    inputs = [helper.make_tensor_value_info("words", TensorProto.STRING, ["B", 2])]
    outputs = [helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["B", 2])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    graph = helper.make_graph([words], "words", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "words.onnx")
    return BoundSession(tmp_path / "words.onnx", Device.parse("cpu"))


@pytest.mark.parametrize("dtype", [str, object])
def test_arrays_of_strings_are_fed(session: BoundSession, dtype: Any) -> None:
    """Of any number of rows, beyond ASCII, and empty ones."""
    for words, expected in (([["one", "zwölf"], ["", "two"]], [[1, 12], [-1, -1]]), ([["one", "one"]], [[1, 1]])):
        session.feed("words", np.array(words, dtype))
        (numbers,) = session.run(["numbers"])
        np.testing.assert_array_equal(numbers, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (np.zeros((1, 2), np.float32), r"is tensor\(string\), not tensor\(float\)"),
        (np.array([["one", 2]], object), "takes strings, not 2"),
        (np.array(["one", "one"]), "has the shape"),
        ([["one", "two"]], "is a list"),
    ],
)
def test_what_is_no_array_of_strings_is_refused(session: BoundSession, words: Any, message: str) -> None:
    """An element that is none, a dtype, a rank, a list."""
    with pytest.raises(InputError, match=message):
        session.feed("words", words)
