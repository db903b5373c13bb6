"""Graphs whose nodes are in any order are sorted before anything is built on them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.model_file.weights import load_model, sort_nodes


def chain() -> onnx.ModelProto:
    """Make y = tanh(x w) + b in a branch that reads two outer values, behind three nodes."""
    branch = helper.make_graph(
        [helper.make_node("Tanh", ["m"], ["t"]), helper.make_node("Add", ["t", "s"], ["r"])],
        "branch",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, ["b", 3])],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("ReduceSum", ["x"], ["s"]),
        helper.make_node("Greater", ["s", "s"], ["c"]),
        helper.make_node("Not", ["c"], ["n"]),
        helper.make_node("Squeeze", ["n"], ["q"]),
        helper.make_node("If", ["q"], ["y"], then_branch=branch, else_branch=branch),
    ]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 3])
    weight = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "graph", [value], [result], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def shuffled(model: onnx.ModelProto, seed: int, *, with_branches: bool = True) -> onnx.ModelProto:
    """Put the nodes of the graph and of its branches into another order."""
    choices = random.Random(seed)  # noqa: S311  an order, not a secret
    branches = [attribute.g for attribute in model.graph.node[-1].attribute] if with_branches else []
    for graph in (*branches, model.graph):
        nodes = list(graph.node)
        choices.shuffle(nodes)
        del graph.node[:]
        graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("seed", range(8))
def test_nodes_come_behind_what_they_read(seed: int) -> None:
    """In branches as well, and what a branch reads outside counts for its node."""
    model = shuffled(chain(), seed)
    sort_nodes(model)
    onnx.checker.check_model(model)  # which refuses any other order
    assert not sort_nodes(model)


def test_a_sorted_graph_stays_as_it_is() -> None:
    """To the byte."""
    model = chain()
    assert not sort_nodes(model)
    assert model == chain()


def test_nodes_in_a_cycle_stay_behind_the_others() -> None:
    """Somebody else refuses them; this must end."""
    model = chain()
    model.graph.node.insert(0, helper.make_node("Add", ["loop", "x"], ["loop"]))
    assert sort_nodes(model)
    assert [node.op_type for node in model.graph.node][-1] == "Add"


def test_a_graph_in_any_order_is_optimized_as_if_it_were_sorted(tmp_path: Path) -> None:
    """Values that are read before they are made stay one value."""
    path = tmp_path / "model.onnx"
    onnx.save(shuffled(chain(), 3, with_branches=False), path)  # onnxruntime takes no branch in any order
    assert len(load_model(path).graph.inputs) == 1
    report = optimize_model(OptimizeOptions(model_path=path, output=tmp_path / "optimized.onnx"))
    assert not [result.name for result in report.passes if result.left_out]
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    (found,) = ort.InferenceSession(tmp_path / "optimized.onnx").run(None, feeds)
    np.testing.assert_allclose(found, np.tanh(feeds["x"]) + 15, rtol=1e-6)
