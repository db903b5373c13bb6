"""A graph that breaks what libraries take for granted is refused by onnxtool's own reader, before they see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import load_model
from tests.hostile.seeds import by_hand


def make_model() -> onnx.ModelProto:
    """Make a sound model: y = -x, through a function."""
    graph = helper.make_graph(
        [helper.make_node("F0", ["x"], ["y"], domain="local")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function(0, [])], ir_version=10)


def function(number: int, calls: list[int]) -> onnx.FunctionProto:
    """Make the function F<number>, which calls those of the numbers in `calls` one after the other, or Neg."""
    nodes = [
        helper.make_node(f"F{call}", [f"v{index}"], [f"v{index + 1}"], domain="local")
        for index, call in enumerate(calls)
    ] or [helper.make_node("Neg", ["v0"], ["v1"])]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    return helper.make_function("local", f"F{number}", ["v0"], [nodes[-1].output[0]], nodes, opsets)


def functions(model: onnx.ModelProto, calls: list[list[int]]) -> None:
    """Give the model functions of which number n calls those in `calls[n]`."""
    del model.functions[:]
    model.functions.extend(function(number, called) for number, called in enumerate(calls))


def dims(*sizes: int) -> Callable[[onnx.ModelProto], None]:
    """Give the input these fixed dims."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes))

    return edit


def output_of_subgraph(model: onnx.ModelProto) -> None:
    """Let the output be named as an initializer of a graph inside a node."""
    branch = helper.make_graph([], "branch", [], [], [helper.make_tensor("z", TensorProto.FLOAT, [1], [1.0])])
    model.graph.node.append(helper.make_node("If", ["x"], ["c"], then_branch=branch, else_branch=branch))
    model.graph.output[0].name = "z"


HOSTILE: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "an output that no node makes": (lambda m: setattr(m.graph.output[0], "name", "z"), "no node makes the output 'z'"),
    "an output that a subgraph alone defines": (output_of_subgraph, "no node makes the output 'z'"),
    "an initializer named as the output of a node": (
        lambda m: setattr(m.graph.initializer[0], "name", "y"),
        "'y' is defined twice",
    ),
    "two nodes that make one value": (lambda m: m.graph.node.append(m.graph.node[0]), "'y' is defined twice"),
    "two initializers of one name": (
        lambda m: m.graph.initializer.append(m.graph.initializer[0]),
        "'w' is defined twice",
    ),
    "an initializer of dtype 99": (lambda m: setattr(m.graph.initializer[0], "data_type", 99), "unknown dtype type99"),
    "a dimension of -2": (dims(-2, 3), "negative dimension: -2"),
    "a dimension of -5": (dims(-5, 3), "negative dimension: -5"),
    "a dimension of 2^40": (dims(1 << 40), "elements"),
    "a dimension of 2^60": (dims(1 << 60, 3), "elements"),
    "dimensions whose product is too large": (dims(1 << 15, 1 << 15), "elements"),
    "a function that calls itself": (lambda m: functions(m, [[0]]), "call themselves"),
    "two functions that call each other": (lambda m: functions(m, [[1], [0]]), "call themselves"),
    "functions 5,000 deep": (lambda m: functions(m, [*([n + 1] for n in range(5000)), []]), "100 deep"),
    "functions 101 deep, deepest first": (lambda m: functions(m, [[], *([n] for n in range(101))]), "100 deep"),
    "40 functions, each calling the next twice": (
        lambda m: functions(m, [*([n + 1] * 2 for n in range(40)), []]),
        "nodes where they are inlined",
    ),
}


def saved(folder: Path, edit: Callable[[onnx.ModelProto], None]) -> ModelFile:
    """Write the sound model after `edit`, and open it."""
    model = make_model()
    edit(model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return ModelFile.open(path)


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_graph_is_refused_by_name(tmp_path: Path, name: str) -> None:
    edit, reason = HOSTILE[name]
    with pytest.raises(ModelFileError, match="cannot be run") as refused:
        saved(tmp_path, edit).check_sound()
    assert reason in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: None,
        dims(-1, 3),  # as some exporters write a dimension of any size
        lambda m: setattr(m.graph.output[0], "name", "w"),
        lambda m: functions(m, [*([n + 1] for n in range(98)), []]),
    ],
    ids=["as it is", "dimension -1", "a weight as output", "functions 99 deep"],
)
def test_a_sound_graph_is_accepted(tmp_path: Path, edit: Callable[[onnx.ModelProto], None]) -> None:
    saved(tmp_path, edit).check_sound()


@pytest.mark.parametrize("is_inside", [False, True])
def test_an_attribute_of_no_function_is_refused(tmp_path: Path, is_inside: bool) -> None:
    """At the top, and in the graph of a node; onnx_ir would fail on the body that is not there."""
    model = by_hand()["if"]
    (chooser,) = [node for node in model.graph.node if node.op_type == "If"]
    attribute = chooser.attribute[0].g.node[0].attribute.add(name="alpha") if is_inside else chooser.attribute[0]
    if not is_inside:
        attribute.ClearField("g")
    attribute.ref_attr_name = "outer"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match="refers to one of a function"):
        load_model(tmp_path / "model.onnx")
