"""Nodes and initializers are written where and under the names that the caller chose."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.writer import UniqueNames, Writer, scoped


def graph_of(*operators: str) -> ir.Graph:
    """Return a chain of operators over `x`, whose nodes and values have their names."""
    value = x = ir.val("x", ir.DataType.FLOAT, [2])
    nodes = []
    for operator in operators:
        nodes.append(ir.node(operator, [value], name=f"node_{operator}"))
        value = nodes[-1].outputs[0]
        value.name = operator.lower()
    return ir.Graph([x], [value], nodes=nodes, opset_imports={"": 20}, name="g")


def test_nodes_are_written_in_front_of_a_node() -> None:
    """In their order, with the domain imported, dtype and shape as told."""
    graph = graph_of("Neg", "Abs")
    writer, x = Writer(graph[1]), graph.inputs[0]
    value = writer.node("Gelu", [writer.op("Exp", x)], domain="com.microsoft", like=x)
    assert [node.op_type for node in graph] == ["Neg", "Exp", "Gelu", "Abs"]
    assert graph.opset_imports["com.microsoft"] == 1
    assert (value.dtype, value.shape) == (x.dtype, x.shape)


def test_nodes_are_appended_to_a_graph() -> None:
    """Behind those that are there."""
    graph = graph_of("Neg")
    Writer(graph).op("Exp", graph.outputs[0])
    assert [node.op_type for node in graph] == ["Neg", "Exp"]


def test_a_node_may_have_several_outputs() -> None:
    """Each is a value of its own."""
    graph = graph_of("Neg")
    first, second = Writer(graph).ops("Split", graph.outputs[0], outputs=2, axis=0, num_outputs=2)
    assert first is not second
    assert first.producer() is second.producer() is graph[1]
    assert graph[1].attributes.get_int("num_outputs") == 2


def test_nodes_are_collected_without_a_graph() -> None:
    """Under the names of their scope; two writers share the initializers of a graph that is made later."""
    outer = Writer(naming=scoped("outer"))
    inner = Writer(naming=scoped("inner"), initializers=outer.initializers)
    one = outer.constant(np.array(1), "one")
    assert inner.constant(np.array(1), "one") is one
    value = inner.op("Neg", inner.op("Abs", one))
    assert [node.name for node in inner.nodes] == ["inner/Abs_0", "inner/Neg_1"]
    assert value.name == "inner/Neg_1/output"
    assert (outer.nodes, list(outer.initializers)) == ([], ["one"])


def test_unique_names_avoid_those_of_the_graph() -> None:
    """Of its nodes and of its values."""
    graph = graph_of("Neg", "Abs")
    graph[0].name, graph[1].outputs[0].name = "new/Exp_0", "new/Exp_2"
    (value,) = Writer(graph, naming=UniqueNames(graph, "new")).add(ir.node("Exp", [graph.inputs[0]]))
    node = value.producer()
    assert node is not None
    assert (node.name, value.name) == ("new/Exp_1", "new/Exp_3")


@pytest.mark.parametrize(("array", "names"), [([1.0], ["c"]), ([2.0], ["c", "c_2"])])
def test_a_name_is_taken_again_for_the_same_elements_alone(array: list[float], names: list[str]) -> None:
    """Others get a number behind it."""
    graph = graph_of("Neg")
    writer = Writer(graph)
    writer.constant(np.array([1.0]), "c")
    writer.constant(np.array(array), "c")
    assert list(graph.initializers) == names


def test_shared_constants_are_one_initializer() -> None:
    """Of the same elements, dtype and shape."""
    graph = graph_of("Neg")
    writer = Writer(graph)
    made = [
        writer.shared_constant(ir.tensor(np.array(array, dtype)), lambda: f"c{len(graph.initializers)}")
        for array, dtype in (([1], np.int64), ([1], np.int64), ([1], np.float32), (1, np.int64))
    ]
    assert made[0] is made[1]
    assert [value.name for value in made] == ["c0", "c0", "c1", "c2"]
