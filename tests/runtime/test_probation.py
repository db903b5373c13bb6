"""A graph that could end, fill or hold the process that loads it is tried in a child first; others cost nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import Constant, read_constants
from onnxtool.runtime import probation
from onnxtool.runtime.probation import check_harmless, needs_probation
from tests.hostile.gadgets import splice
from tests.hostile.seeds import by_hand
from tests.workshop import Workshop

SUSPICIOUS = (
    *("Div of the least int64", "Mod by zero", "Range of 2^60", "Range of NaN", "doubled constants", "doubled values"),
    *("ConstantOfShape of 2^32", "ConstantOfShape of 2^70", "Expand to 2^32", "Expand to 2^32 on a value"),
    *("Tile 2^32 times on a value", "Pad of 2^32 on a value", "OneHot of 2^31 on a value", "outer MatMul"),
    *("loop of 2^62 trips", "loops in loops", "ifs in ifs", "scan of 300,000", "functions 60 deep"),
    *("RandomNormal of 2^34", "Resize by 2^20", "Einsum of outer sums", "catastrophic regular expression"),
)
HARMLESS = (
    *("chain of 3,000 Neg", "Abs of the least", "Gather behind the end", "Slice of the least", "Squeeze of axis 2^40"),
    *("Transpose of bad perm", "Div by zero on a value"),
)


def model_with(name: str, folder: Path) -> ModelFile:
    """Write a sound model with a hostile piece in it."""
    model = by_hand()["mlp"]
    splice(model, name, "x", "h_")
    onnx.save(model, folder / "model.onnx")
    return ModelFile.open(folder / "model.onnx")


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_a_graph_that_may_grow_loop_or_trap_is_tried_first(name: str, tmp_path: Path) -> None:
    """That is seen in its constants and operators, without running anything."""
    assert needs_probation(model_with(name, tmp_path))


@pytest.mark.parametrize("name", HARMLESS)
def test_a_graph_whose_constants_stay_small_is_not(name: str, tmp_path: Path) -> None:
    """What it computes from inputs is not known before it runs."""
    assert not needs_probation(model_with(name, tmp_path))


@pytest.mark.parametrize(("kind", "most"), [("outputs", 2000), ("consumers", 5000)])
def test_a_graph_that_onnxruntime_is_slow_on_is_tried_first(kind: str, most: int, tmp_path: Path) -> None:
    """Its time grows with the square of both: 20,000 outputs take it a minute."""
    for count in (most, most + 1):
        names = [f"y{number}" for number in range(count)]
        nodes = [helper.make_node("Neg", ["x"], [name]) for name in names]
        if kind == "consumers":
            nodes.append(helper.make_node("Identity", ["y0"], ["y"]))
        outputs = ["y"] if kind == "consumers" else names
        infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", *outputs)]
        onnx.save(helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:])), tmp_path / "model.onnx")
        assert needs_probation(ModelFile.open(tmp_path / "model.onnx")) is (count > most)


def test_exports_and_what_becomes_of_them_are_not_tried(workshop: Workshop) -> None:
    """No exporter's graph of a text model pays for the child."""
    for exporter in ("dynamo", "torchscript"):
        path = workshop.exported("tiny-splade", exporter=exporter, head="splade")
        assert not needs_probation(ModelFile.open(path)), exporter


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes there")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Div of the least int64", r"it ends the process that tries it \(SIGFPE\)"),
        ("ConstantOfShape of 2^32", "it takes more than .* MB"),
        ("loop of 2^62 trips on a value", "it takes more than 1 s"),
    ],
)
def test_what_becomes_of_the_child_is_one_error(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process goes on."""
    monkeypatch.setattr(probation, "MAX_SECONDS", 1)
    with pytest.raises(ModelFileError, match=f"cannot be run: on the smallest inputs {reason}"):
        check_harmless(model_with(name, tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes there")
def test_a_graph_that_refuses_the_smallest_inputs_is_tried_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask of a decoder is as long as past and text together; behind what refuses another is a loop."""
    sizes = {"past": ["B", "past_sequence"], "text": ["B", "sequence"], "mask": ["B", "past_sequence + sequence"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    nodes = [
        helper.make_node("Concat", ["past", "text"], ["both"], axis=1),
        helper.make_node("Transpose", ["mask"], ["turned"]),
        helper.make_node("MatMul", ["both", "turned"], ["product"]),
    ]
    outputs = [helper.make_tensor_value_info("product", TensorProto.FLOAT, None)]
    model = helper.make_model(helper.make_graph(nodes, "graph", inputs, outputs), ir_version=10)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 20))
    splice(model, "loop of 2^62 trips on a value", "product", "h_")
    onnx.save(model, tmp_path / "model.onnx")
    monkeypatch.setattr(probation, "MAX_SECONDS", 1)
    with pytest.raises(ModelFileError, match="it takes more than 1 s"):
        check_harmless(ModelFile.open(tmp_path / "model.onnx"))


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes there")
def test_memory_that_ran_out_is_not_tried_away(tmp_path: Path) -> None:
    """Onnxruntime says so by an error like any other, and the inputs of another trial may be impossible to make."""
    model = by_hand()["mlp"]
    splice(model, "Expand to 2^32 on a value", "x", "h_")
    model.graph.input.append(helper.make_tensor_value_info("unusual", TensorProto.UINT16, ["N"]))
    model.graph.output.append(helper.make_tensor_value_info("kept", TensorProto.UINT16, ["N"]))
    model.graph.node.append(helper.make_node("Identity", ["unusual"], ["kept"]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match="it takes more than .* MB"):
        check_harmless(ModelFile.open(tmp_path / "model.onnx"))


def test_a_graph_of_many_nodes_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer of 25,000 nodes takes onnxruntime seconds to load."""
    taken: list[float] = []
    monkeypatch.setattr(probation, "attempt", lambda *_, seconds, num_bytes: taken.append(seconds))
    for count in (10, 40_000):
        nodes = [helper.make_node("Identity", ["x"], [f"y{number}"]) for number in range(count)]
        sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y0")]
        onnx.save(helper.make_model(helper.make_graph(nodes, "g", sides[:1], sides[1:])), tmp_path / "model.onnx")
        probation.death_on(ModelFile.open(tmp_path / "model.onnx"))
    assert taken == [5, 25]


def test_a_file_that_passed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it changes."""
    tried: list[Path] = []
    monkeypatch.setattr(probation, "_ending", lambda model: tried.append(model.path))
    model = model_with("ifs in ifs", tmp_path)
    check_harmless(model)
    check_harmless(model)
    assert len(tried) == 1
    check_harmless(model_with("scan of 300,000", tmp_path))
    assert len(tried) == 2


def test_constants_are_read_with_their_integers_wherever_they_are_stored(tmp_path: Path) -> None:
    """In raw bytes, as numbers, in nodes; of large ones and floats the number of elements."""
    nodes = [
        helper.make_node("Constant", [], ["node"], value=numpy_helper.from_array(np.array([[5, -6]], np.int32))),
        helper.make_node("Constant", [], ["one"], value_int=-7),
        helper.make_node("Constant", [], ["list"], value_ints=[2, 3]),
        helper.make_node("Constant", [], ["none"]),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    nodes[3].attribute.add(name="value_ints", type=onnx.AttributeProto.INTS)
    initializers = [
        numpy_helper.from_array(np.array([1, -(2**63)]), "raw"),
        helper.make_tensor("numbers", TensorProto.INT64, [3], [-1, 2, 300]),
        helper.make_tensor("numbers32", TensorProto.INT32, [2], [-1, 2]),
        numpy_helper.from_array(np.zeros(100, np.int64), "large"),
        numpy_helper.from_array(np.zeros((2, 3), np.float32), "floats"),
    ]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "graph", [value], [result], initializers)), path)
    assert read_constants(path) == {
        "raw": Constant(2, (1, -(2**63))),
        "numbers": Constant(3, (-1, 2, 300)),
        "numbers32": Constant(2, (-1, 2)),
        "large": Constant(100, None),
        "floats": Constant(6, None),
        "node": Constant(2, (5, -6)),
        "one": Constant(1, (-7,)),
        "list": Constant(2, (2, 3)),
        "none": Constant(0, ()),
    }
