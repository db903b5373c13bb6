"""A difference says what was added, removed and changed from a base to a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.reports import Json
from onnxtool.stats import compare_models, summarize_model
from onnxtool.summary.figures import Change, Difference, MappingDelta
from tests.graphs import make_model, value


def save(path: Path, ops: list[str], inputs: list[Any], opset: int, metadata: dict[str, str], num_weights: int) -> Path:
    weights = [numpy_helper.from_array(np.zeros(4, np.float32), f"w{index}") for index in range(num_weights)]
    nodes = [helper.make_node(op, ["x"], [f"o{index}"]) for index, op in enumerate(ops)]
    model = make_model(nodes, weights, inputs=inputs)
    model.opset_import[0].version = opset
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


@pytest.fixture
def difference(tmp_path: Path) -> Difference:
    ids = value("ids", ["batch"], TensorProto.INT64)
    before = [value("x", ["batch", 3]), ids]
    base = save(tmp_path / "base.onnx", ["Relu", "Relu", "Exp", "Abs"], before, 17, {"a": "1", "b": "2"}, 3)
    after = [value("x", [1, 3]), value("mask", [2])]
    model = save(tmp_path / "model.onnx", ["Relu", "Exp", "Tanh"], after, 20, {"b": "3", "c": ""}, 1)
    return compare_models(model, base)


def test_numbers_are_the_models_minus_the_bases(difference: Difference) -> None:
    """Growth is positive, and shrinking negative."""
    delta = difference.delta
    assert (delta.num_nodes, delta.num_initializers, delta.num_parameters) == (-1, -2, -8)
    assert delta.duplicate_bytes == -32
    assert delta.size_bytes == difference.model.size_bytes - difference.base.size_bytes < 0


def test_both_summaries_are_in_it(difference: Difference) -> None:
    """The first argument is the model, the second the base, each as summarized alone."""
    assert difference.model == summarize_model(Path(difference.model.path))
    assert difference.base == summarize_model(Path(difference.base.path))
    assert difference.model.path.endswith("model.onnx")


def test_mappings_say_what_was_added_removed_and_changed(difference: Difference) -> None:
    """Operators, inputs, outputs, opsets and metadata are compared by name."""
    delta = difference.delta
    assert delta.ops == MappingDelta({"Tanh": 1}, {"Abs": 1}, {"Relu": Change(2, 1)})
    assert delta.inputs == MappingDelta(
        {"mask": {"dtype": "float32", "shape": [2]}},
        {"ids": {"dtype": "int64", "shape": ["batch"]}},
        {
            "x": Change(
                {"dtype": "float32", "shape": ["batch", 3]},
                {"dtype": "float32", "shape": [1, 3]},
            )
        },
    )
    assert not delta.outputs
    assert delta.opsets == MappingDelta(changed={"ai.onnx": Change(17, 20)})
    assert delta.metadata == MappingDelta({"c": ""}, {"a": "1"}, {"b": Change("2", "3")})


def weights_of(folder: Path, name: str, **arrays: Any) -> Path:
    tensors = [numpy_helper.from_array(np.asarray(array, np.float32), key) for key, array in arrays.items()]
    onnx.save(make_model([helper.make_node("Relu", ["x"], ["y"], name="/bert/layer.0/Relu")], tensors), folder / name)
    return folder / name


def test_without_weights_initializers_are_compared_by_name_dtype_and_shape(tmp_path: Path) -> None:
    """Their data is not read, and the ones that may differ are counted."""
    base = weights_of(tmp_path, "base.onnx", same=[1], other=[1, 2], gone=[3])
    model = weights_of(tmp_path, "model.onnx", same=[9], other=[1, 2, 3], new=[3])
    delta = compare_models(model, base, weights=False).delta
    told: dict[int, Json] = {count: {"dtype": "float32", "shape": [count]} for count in (1, 2, 3)}
    assert delta.weights == MappingDelta({"new": told[1]}, {"gone": told[1]}, {"other": Change(told[2], told[3])})
    assert (delta.hashed, delta.num_not_hashed) == (False, 1)
    assert not delta.renamed


def test_initializers_are_compared_by_their_data(tmp_path: Path) -> None:
    """The same data under another name is renamed, other data under the same name is changed; hashes are SHA-256."""
    base = weights_of(tmp_path, "base.onnx", same=[1], other=[2], old=[3, 4], gone=[5])
    model = weights_of(tmp_path, "model.onnx", same=[1], other=[9], new=[3, 4], fresh=[6])
    delta = compare_models(model, base).delta
    assert delta.renamed == {"old": "new"}
    assert (list(delta.weights.added), list(delta.weights.removed)) == (["fresh"], ["gone"])
    (change,) = delta.weights.changed.values()
    digest = hashlib.sha256(np.array([9], np.float32).tobytes()).hexdigest()
    assert isinstance(change.after, dict)
    assert change.after["sha256"] == digest
    assert delta.hashed


def test_parts_that_lost_or_gained_are_named(tmp_path: Path) -> None:
    """Nodes and bytes by scope; a part that stayed as it was is not told."""
    names = {
        "base.onnx": ["/bert/layer.0/A", "/bert/layer.0/B", "/bert/layer.1/A"],
        "model.onnx": ["/bert/layer.0/A", "/bert/layer.1/A"],
    }
    for file, nodes in names.items():
        relus = [helper.make_node("Relu", ["x"], [f"o{index}"], name=name) for index, name in enumerate(nodes)]
        onnx.save(make_model(relus), tmp_path / file)
    delta = compare_models(tmp_path / "model.onnx", tmp_path / "base.onnx").delta
    told: list[Json] = [{"num_nodes": count, "size_bytes": 0} for count in (2, 1)]
    assert delta.layers == MappingDelta(changed={"bert.layer.0": Change(told[0], told[1])})
