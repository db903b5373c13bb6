"""A difference names each edge, attribute and constant that changed, and nothing where only names or order did."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, numpy_helper

from onnxtool.stats import compare_models
from onnxtool.summary.figures import Edges
from tests.cli.entry_point import run_onnxtool
from tests.graphs import of_text
from tests.workshop import Workshop

COMMUTATIVE = {"Add", "Mul", "Sum", "Max", "Min", "And", "Or", "Equal"}
W = {"w": np.arange(16, dtype=np.float32).reshape(4, 4), "v": np.ones((4, 4), np.float32)}
IF = """g (float[n,4] x, bool flag) => (float[n,4] y) {
    a = MatMul(x, w) b = MatMul(x, v)
    c = If (flag) <then_branch = t () => (float[n,4] d) { d = Sub(a, b) },
                   else_branch = e () => (float[n,4] d) { d = Relu(a) }>
    s = Constant <value = float {0.5}> () m = Mul(c, s) l = LeakyRelu <alpha = 0.1> (m) y = Sub(l, a)
}"""
Mutation = Callable[[Any, random.Random], set[str]]


def edges(folder: Path, model: Any, base: Any, **options: Any) -> Edges:
    for name, one in (("model", model), ("base", base)):
        onnx.save(one, folder / f"{name}.onnx")
    return compare_models(folder / "model.onnx", folder / "base.onnx", **options).delta.edges


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> list[Any]:
    exported = [
        workshop.exported("tiny-splade", exporter=exporter, head="splade") for exporter in ("torchscript", "dynamo")
    ]
    return [*map(onnx.load, exported), of_text(IF, W)]


def rename(model: Any, _: random.Random) -> set[str]:
    """Give all nodes, values and initializers other names, in bodies too."""
    kept = {info.name for info in [*model.graph.input, *model.graph.output]} | {""}
    names: dict[str, str] = {}

    def other(name: str) -> str:
        return name if name in kept else names.setdefault(name, f"v{len(names)}")

    def visit(graph: Any) -> None:
        for number, node in enumerate(graph.node):
            node.name = f"node{number}"
            node.input[:], node.output[:] = map(other, node.input), map(other, node.output)
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    visit(attribute.g)
        for one in [*graph.initializer, *graph.output, *graph.value_info]:
            one.name = other(one.name)

    visit(model.graph)
    return set()


def read_by(node: Any) -> set[str]:
    bodies = [attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH]
    return {*node.input, *(name for body in bodies for one in body.node for name in one.input)}


def reorder(model: Any, draw: random.Random) -> set[str]:
    """Put the nodes into another order that runs."""
    nodes, made = list(model.graph.node), {name for node in model.graph.node for name in node.output}
    done: list[Any] = []
    while nodes:
        ready = [node for node in nodes if not read_by(node) & made]
        node = nodes.pop(nodes.index(draw.choice(ready)))
        made -= {*node.output}
        done.append(node)
    del model.graph.node[:]
    model.graph.node.extend(done)
    return set()


def rewire(model: Any, draw: random.Random) -> set[str]:
    """Let a node read an earlier value."""
    made = {name: place for place, node in enumerate(model.graph.node) for name in node.output}
    choices = [
        (node, number, name)
        for place, node in enumerate(model.graph.node)
        for number, read in enumerate(node.input)
        for name, earlier in made.items()
        if read in made and earlier < place and name not in node.input
    ]
    node, number, name = draw.choice(choices)
    node.input[number] = name
    return {node.name, *node.output}


def swap(model: Any, draw: random.Random) -> set[str]:
    """Exchange two inputs whose order counts."""
    nodes = [node for node in model.graph.node if node.op_type not in COMMUTATIVE and len({*node.input[:2]}) == 2]
    node = draw.choice([node for node in nodes if all(node.input[:2])])
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return {node.name, *node.output}


def change_attribute(model: Any, draw: random.Random) -> set[str]:
    """Change a number."""
    kinds = (AttributeProto.INT, AttributeProto.FLOAT)
    nodes = [node for node in model.graph.node if any(one.type in kinds for one in node.attribute)]
    node = draw.choice([node for node in nodes if node.op_type != "Constant"])
    attribute = draw.choice([one for one in node.attribute if one.type in kinds])
    attribute.i += 1
    attribute.f = 2 * attribute.f + 0.1
    return {node.name, *node.output}


def change_constant(model: Any, draw: random.Random) -> set[str]:
    """Change a scalar, or what a shape or an axis is; all nodes that read it differ."""
    held = {node.output[0]: node.attribute[0].t for node in model.graph.node if node.op_type == "Constant"}
    held |= {one.name: one for one in model.graph.initializer if not one.dims or one.data_type == 7}
    used = {name for node in model.graph.node for name in read_by(node)}
    name = draw.choice(sorted(name for name, one in held.items() if name in used and one.data_type in (1, 7)))
    tensor = numpy_helper.from_array(numpy_helper.to_array(held[name]) + 1, held[name].name)
    held[name].CopyFrom(tensor)
    return {one for node in model.graph.node if name in read_by(node) for one in (node.name, *node.output)}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("mutate", [rename, reorder, rewire, swap, change_attribute, change_constant])
def test_every_changed_edge_is_named_and_no_other(
    graphs: list[Any], place: int, mutate: Mutation, tmp_path: Path
) -> None:
    for seed in range(3):
        model = copy.deepcopy(graphs[place])
        changed = mutate(model, random.Random(seed))  # noqa: S311  any will do
        found = edges(tmp_path, model, graphs[place])
        assert found.compared
        named = {change.node for change in found.changes}
        assert bool(named) == bool(changed), (seed, changed)
        assert named <= changed, (seed, changed, found.changes)


def test_two_changes_are_both_named(graphs: list[Any], tmp_path: Path) -> None:
    """Also where one lies behind the other."""
    model = copy.deepcopy(graphs[0])
    nodes = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    for node in (nodes[0], nodes[-1]):
        node.input[1], node.input[2] = node.input[2], node.input[1]
    found = edges(tmp_path, model, graphs[0])
    assert {change.node for change in found.changes} == {nodes[0].name, nodes[-1].name}
    assert {change.what for change in found.changes} == {"input 1, 2"}
    assert found.changes[-1].before == f"{nodes[-1].input[2]}, {nodes[-1].input[1]}"
    assert found.changes[0].layer == "bert.embeddings"


def test_weights_that_were_trained_on_are_no_edges(graphs: list[Any], tmp_path: Path) -> None:
    """Whether all changed or some; weights that two layers exchanged are."""
    trained = copy.deepcopy(graphs[0])
    weights = [one for one in trained.graph.initializer if len(one.dims) and one.data_type == 1]
    for one in weights[::2]:
        one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one) * 1.5 + 0.01, one.name))
    assert edges(tmp_path, trained, graphs[0]) == Edges()
    exchanged = copy.deepcopy(graphs[0])
    products = [node for node in exchanged.graph.node if node.op_type == "MatMul" and "output.dense" in node.name]
    one, other = products[0], products[2]
    one.input[1], other.input[1] = other.input[1], one.input[1]
    found = edges(tmp_path, exchanged, graphs[0])
    assert {change.node for change in found.changes} == {one.name, other.name}
    assert {(change.before, change.after) for change in found.changes} == {
        *((other.input[1], one.input[1]), (one.input[1], other.input[1]))
    }


def test_an_inserted_node_is_named_with_who_reads_it(tmp_path: Path) -> None:
    base = of_text(IF, W)
    model = of_text(IF.replace("y = Sub(l, a)", "r = Relu(l) y = Sub(r, a)"), W)
    found = edges(tmp_path, model, base)
    assert [(change.node, change.op, change.what) for change in found.changes] == [
        ("r", "Relu", "added"),
        ("y", "Sub", "input 0"),
    ]
    back = edges(tmp_path, base, model)
    assert {(change.op, change.what) for change in back.changes} == {("Relu", "removed"), ("Sub", "input 0")}


def test_an_output_that_is_another_value_is_named(tmp_path: Path) -> None:
    text = "g (float[4] x) => (float[4] y, float[4] z) {{ a = Relu(x) b = Neg(x) y = Identity({0}) z = Abs({1}) }}"
    found = edges(tmp_path, of_text(text.format("a", "b")), of_text(text.format("b", "a")))
    assert {(change.node, change.before, change.after) for change in found.changes} == {
        ("y", "b", "a"),
        ("z", "a", "b"),
    }
    direct = "g (float[4] x) => (float[4] y, float[4] z) {{ {0} = Relu(x) {1} = Neg(x) }}"
    found = edges(tmp_path, of_text(direct.format("y", "z")), of_text(direct.format("z", "y")))
    assert {change.node for change in found.changes} == {"y", "z"}


def test_graphs_that_have_nothing_in_common_are_not_compared(tmp_path: Path) -> None:
    text = "g (float[4] x) => (float[4] y0) {{ {0} }}"
    wide = [" ".join(f"y{n} = LeakyRelu <alpha = {n + part}.5> (x)" for n in range(600)) for part in (0, 1000)]
    found = edges(tmp_path, *(of_text(text.format(part)) for part in wide))
    assert not found.compared


@pytest.mark.parametrize("format_name", ["text", "markdown", "json", "html"])
def test_every_form_names_the_change_and_gates_count_it(tmp_path: Path, format_name: str) -> None:
    edges(tmp_path, of_text(IF.replace("alpha = 0.1", "alpha = 0.2"), W), of_text(IF, W))
    given = ("stats", "model.onnx", "base.onnx", "--format", format_name, "--fail_if", "edges.changed>0")
    done = run_onnxtool(tmp_path, *given)
    assert done.returncode == 1
    assert "edges.changed is 1" in done.stderr
    if format_name == "json":
        (change,) = json.loads(done.stdout)["delta"]["edges"]["changes"]
        assert (change["node"], change["what"], change["before"], change["after"]) == (
            "l",
            "alpha",
            "0.100000001",
            "0.200000003",
        )
    else:
        assert "l (LeakyRelu)" in done.stdout
        assert "0.200000003" in done.stdout
    if format_name == "html":
        assert "changed" in done.stdout[done.stdout.index("LeakyRelu") - 300 :]


def test_the_order_of_inputs_counts_where_the_operator_says_so(tmp_path: Path) -> None:
    text = "g (float[4] x) => (float[4] y) {{ a = Relu(x) b = Neg(x) y = {0} }}"
    assert edges(tmp_path, of_text(text.format("Add(b, a)")), of_text(text.format("Add(a, b)"))) == Edges()
    assert edges(tmp_path, of_text(text.format("Sub(b, a)")), of_text(text.format("Sub(a, b)"))).changed == 1
