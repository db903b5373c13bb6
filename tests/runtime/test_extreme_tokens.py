"""One case has the tokens on which few bits are lost first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import INPUTS_KEY, stamp
from onnxtool.runtime.input_cases import extreme_case, input_cases
from onnxtool.runtime.recipes import IDS, InputStamp, Recipe
from tests.infer.tiny_models import save_graph

_NORMS = np.array([5, 1, 9, 2, 8, 3, 7, 4, 6], np.float32)
_INPUTS = [helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch_size", "sequence"])]
_OUTPUTS = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch_size", "sequence", 2])]


def _model(path: Path, dtype: type[np.generic] = np.float32) -> ModelFile:
    table = (_NORMS[:, None] * [[0.6, -0.8]]).astype(dtype)
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["y"], to=TensorProto.FLOAT),
    ]
    save_graph(path, nodes, _INPUTS, _OUTPUTS, [numpy_helper.from_array(table, "table")])
    return ModelFile.open(path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_one_row_has_the_largest_embeddings_and_one_the_smallest(dtype: type[np.generic], tmp_path: Path) -> None:
    """In the dtype and the shape of another case; further rows are as they were."""
    model = _model(tmp_path / "m.onnx", dtype)
    cases = input_cases(model)
    case = extreme_case(model, cases)
    assert case is not None
    ids = case.feeds["input_ids"]
    usual = next(one for one in cases if one.feeds["input_ids"].shape == ids.shape)
    assert ids.dtype == np.int32
    assert _NORMS[ids[0, :3]].tolist() == [9, 8, 7]
    assert _NORMS[ids[1, :3]].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(ids[2:], usual.feeds["input_ids"][2:])


def test_tokens_with_a_place_of_their_own_keep_it(tmp_path: Path) -> None:
    """A text that must end with an end token still does."""
    model = _model(tmp_path / "m.onnx")
    kinds = {"input_ids": Recipe(IDS, 8, last=2)}
    cases = input_cases(model)
    stamp(model.path, {INPUTS_KEY: InputStamp.of(model.structure.inputs, kinds, cases).json})
    model = ModelFile.open(model.path)
    case = extreme_case(model, input_cases(model))
    assert case is not None
    ids = case.feeds["input_ids"]
    assert (ids[:, -1] == 2).all()
    assert not (ids[:, :-1] == 2).any()
    assert _NORMS[ids[0, :2]].tolist() == [8, 7]


def test_without_a_table_of_floats_there_is_no_such_case(tmp_path: Path) -> None:
    """Vectors that are stored as codes have no norms of their own."""
    model = _model(tmp_path / "m.onnx", np.int8)
    assert extreme_case(model, input_cases(model)) is None
