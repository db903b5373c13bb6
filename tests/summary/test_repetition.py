"""Blocks that repeat are found by what they compute: each mutation of one layer leaves it apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.model_file.wire import topology
from onnxtool.summary.repetition import RepeatedBlock, find_blocks
from tests.graphs import make_model, of_text, value

NODES = 6  # of a layer


def layers(count: int) -> Any:
    """A model of layers, each with weights, a past, a mask that all read, a Constant and an If of its own."""
    weights: dict[str, Any] = {}
    body, inputs = ["h0 = Gather(x, ids)"], ["float[9, 4] x, int64[3] ids, float[3, 1] mask"]
    for i in range(count):
        weights |= {f"w{i}": np.full((4, 4), i, np.float32), f"shape{i}": np.array([3, 4])}
        inputs.append(f'float[3, 4] "past.{i}"')
        then = f"then{i} () => (float a{i}) {{ n{i} = Neg(m{i}) a{i} = Abs(n{i}) }}"
        other = f"other () => (float e{i}) {{ e{i} = Exp(m{i}) }}"
        body.append(f"""
            c{i} = Constant <value = float {{0.5}}> () [{"layer" * (i + 1)}] m{i} = MatMul(h{i}, w{i})
            if{i} = If <else_branch = {other}, then_branch = {then}> (flag)
            r{i} = Reshape <allowzero=0> (if{i}, shape{i}) s{i} = Where(mask, r{i}, "past.{i}")
            p{i} = Mul(s{i}, c{i}) h{i + 1} = Add(p{i}, h{i})
        """)
    text = f"g ({', '.join(inputs)}) => (float y) {{ {' '.join(body)} y = Log(h{count}) }}"
    return of_text(text, {**weights, "flag": np.array(True)})


def folded(path: Path, model: Any = None) -> tuple[list[topology.WiredNode], list[RepeatedBlock]]:
    if model is not None:
        onnx.save(model, path)
    found = topology.read_topology(path)
    calls = None if found is None else found.calls
    assert calls is not None
    return calls, find_blocks(calls)


def spelled(calls: Sequence[topology.WiredNode], blocks: Sequence[RepeatedBlock]) -> str:
    def one(block: RepeatedBlock) -> str:
        if block.times == 1:
            return calls[block.start].op
        return f"({spelled(calls, block.items)})x{block.times}{'' if block.is_chain else '|'}"

    return " ".join(map(one, blocks))


LAYER = "MatMul If Reshape Where Mul Add"


def node_of(model: Any, output: str) -> Any:
    return next(node for node in model.graph.node if output in node.output)


def test_layers_are_drawn_once_with_their_count(tmp_path: Path) -> None:
    """Whatever their names, the values of their weights, and the names inside of their If."""
    assert spelled(*folded(tmp_path / "m.onnx", layers(6))) == f"Gather ({LAYER})x6 Log"


def _shape(model: Any) -> None:
    weight = next(each for each in model.graph.initializer if each.name == "w3")
    weight.CopyFrom(numpy_helper.from_array(np.zeros((4, 1), np.float32), "w3"))


def _axes(model: Any) -> None:
    shape = next(each for each in model.graph.initializer if each.name == "shape3")
    shape.CopyFrom(numpy_helper.from_array(np.array([3, -1]), "shape3"))


def _operator(model: Any) -> None:
    node_of(model, "p3").op_type = "Div"


def _domain(model: Any) -> None:
    node_of(model, "p3").domain = "com.microsoft"


def _attribute(model: Any) -> None:
    node_of(model, "r3").attribute[0].i = 1


def _constant(model: Any) -> None:
    node_of(model, "c3").attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0.25)))


def _dtype_of_past(model: Any) -> None:
    next(info for info in model.graph.input if info.name == "past.3").type.tensor_type.elem_type = TensorProto.FLOAT16


def _wiring(model: Any) -> None:
    node_of(model, "h4").input[1] = "m3"


def _wiring_between_blocks(model: Any) -> None:
    node_of(model, "m3").input[0] = node_of(model, "h4").input[1] = "h2"


def _body(model: Any) -> None:
    node_of(model, "if3").attribute[1].g.node[0].op_type = "Sin"


def _wiring_of_the_body(model: Any) -> None:
    node_of(model, "if3").attribute[1].g.node[1].input[0] = "m3"


def _capture_of_the_body(model: Any) -> None:
    node_of(model, "if3").attribute[1].g.node[0].input[0] = "h3"


def _left_out(model: Any) -> None:
    node_of(model, "s3").input[2] = ""


@pytest.mark.parametrize(
    "mutate",
    [
        _shape, _axes, _operator, _domain, _attribute, _constant, _dtype_of_past, _wiring, _body,
        _wiring_of_the_body, _capture_of_the_body, _left_out,
    ],
)  # fmt: skip
def test_a_layer_that_differs_is_drawn_apart(tmp_path: Path, mutate: Callable[[Any], None]) -> None:
    """One mutation of the fourth of six layers leaves three, that one, and two."""
    model = layers(6)
    mutate(model)
    calls, blocks = folded(tmp_path / "m.onnx", model)
    repeated = [(block.start, block.length, block.times) for block in blocks if block.times > 1]
    assert repeated == [(1, NODES, 3), (1 + 4 * NODES, NODES, 2)]
    assert sum(block.times == 1 for block in blocks) == 2 + NODES
    assert len(calls) == 2 + 6 * NODES


def test_a_layer_that_reads_another_than_the_one_before_begins_anew(tmp_path: Path) -> None:
    """It equals them inside, so it may head the blocks after it, but is not wired as those before it are."""
    model = layers(6)
    _wiring_between_blocks(model)
    assert spelled(*folded(tmp_path / "m.onnx", model)) == f"Gather ({LAYER})x3 ({LAYER})x3 Log"


def test_blocks_repeat_inside_of_blocks_and_side_by_side(tmp_path: Path) -> None:
    """Three branches that read one value, in each of two layers that read each other."""
    body = ""
    for i in range(2):
        body += "".join(f"e{i}{j} = Exp(h{i}) n{i}{j} = Neg(e{i}{j}) " for j in range(3))
        body += f"h{i + 1} = Sum(n{i}0, n{i}1, n{i}2) "
    model = of_text(f"g (float[3] h0) => (float h2) {{ {body} }}")
    assert spelled(*folded(tmp_path / "m.onnx", model)) == "((Exp Neg)x3| Sum)x2"


def test_an_empty_graph_and_one_without_repetition_have_no_blocks(tmp_path: Path) -> None:
    """A CNN whose layers differ is drawn as it is."""
    assert folded(tmp_path / "m.onnx", make_model([])) == ([], [])
    ops = ["Conv", "Relu", "MaxPool", "Conv", "Sigmoid", "Flatten", "Gemm"]
    nodes = [helper.make_node(op, [f"v{i}"], [f"v{i + 1}"]) for i, op in enumerate(ops)]
    calls, blocks = folded(tmp_path / "m.onnx", make_model(nodes, inputs=[value("v0", None)]))
    assert spelled(calls, blocks) == " ".join(ops)


def test_every_node_is_in_one_block_and_each_block_is_equal(tmp_path: Path) -> None:
    """Random sequences of few operators, against a comparison of every block with the first, node by node."""
    generator = np.random.default_rng(0)
    num_blocks = 0
    for _ in range(40):
        word = generator.integers(0, 3, generator.integers(1, 7))
        ops = np.concatenate([generator.integers(0, 3, 4), np.tile(word, generator.integers(1, 6)), word[:2]])
        nodes = []
        for i, op in enumerate(ops):
            before = max(0, i - int(generator.integers(0, 2)))
            nodes.append(helper.make_node("ABC"[op], [f"v{i}", f"v{before}"], [f"v{i + 1}"]))
        calls, blocks = folded(tmp_path / "m.onnx", make_model(nodes, inputs=[value("v0", None)]))
        assert [place for block in blocks for place in range(block.start, block.end)] == list(range(len(calls)))
        for block in (each for each in blocks if each.times > 1):
            num_blocks += 1
            shapes = set()
            for start in range(block.start, block.end, block.length):
                part = calls[start : start + block.length]
                inside = [tuple((w[0] - start, w[1]) if w and w[0] >= start else None for w in c.wires) for c in part]
                shapes.add(tuple(zip([call.op for call in part], inside, strict=True)))
            assert len(shapes) == 1
    assert num_blocks > 20


def test_a_graph_beyond_the_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of inner graphs count."""
    onnx.save(layers(1), tmp_path / "m.onnx")
    monkeypatch.setattr(topology, "MAX_DRAWN_NODES", 12)
    assert topology.read_topology(tmp_path / "m.onnx") is not None
    monkeypatch.setattr(topology, "MAX_DRAWN_NODES", 11)
    assert topology.read_topology(tmp_path / "m.onnx") is None
