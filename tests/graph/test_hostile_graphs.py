"""Shapes are inferred in seconds and megabytes, whatever a model was made to do to whoever asks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.graph.shapes import infer_values
from tests.graphs import value

X = value("x", ["batch", 8])
LIMIT_BYTES = 1 << 31  # of address space: Python with numpy and onnx takes a part of it
LIMIT_S = 60  # a bomb takes hours


def numbers(name: str, content: Any, dtype: Any = np.int64) -> Any:
    return numpy_helper.from_array(np.asarray(content, dtype), name)


def save(path: Path, nodes: list[Any], initializers: list[Any] | None = None, **parts: Any) -> None:
    opset, functions = parts.get("opset", 20), parts.get("functions", [])
    inputs, outputs = parts.get("inputs", [X]), [value("y", None)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions), path)


def body(*nodes: Any, inputs: Any = (), output: str = "z") -> Any:
    return helper.make_graph(list(nodes), "body", list(inputs), [value(output, None)])


def twice() -> Any:
    """A function that calls itself twice: 2 ** 32 nodes at the depth at which one gives up."""
    calls = [
        helper.make_node("f", ["a"], ["c"], domain="local"),
        helper.make_node("f", ["c"], ["b"], domain="local"),
    ]
    return helper.make_function("local", "f", ["a"], ["b"], calls, [helper.make_opsetid("local", 1)])


def save_recursion(path: Path) -> None:
    save(path, [helper.make_node("f", ["x"], ["y"], domain="local")], functions=[twice()])


def save_texts(path: Path) -> None:
    """A text that is added to itself forty times over."""
    nodes = [helper.make_node("Add", [f"s{index}"] * 2, [f"s{index + 1}"]) for index in range(40)]
    save(path, nodes, [helper.make_tensor("s0", TensorProto.STRING, [1], [b"a"])])


def save_empty(path: Path) -> None:
    """A reduction of nothing along the axis that is empty: the other one remains."""
    tensor = TensorProto(name="a", data_type=TensorProto.INT64, dims=[0, 1 << 30])
    save(path, [helper.make_node("ReduceSum", ["a", "axes"], ["y"], keepdims=0)], [tensor, numbers("axes", [0])])


def save_broadcast(path: Path) -> None:
    """Three values of a few numbers each that make gigabytes together."""
    shapes = {"first": (4096, 1, 1), "second": (1, 4096, 1), "third": (1, 1, 64)}
    made = [helper.make_node("ConstantOfShape", [f"sizes_{name}"], [name]) for name in shapes]
    nodes = [helper.make_node("Cast", ["first"], ["condition"], to=TensorProto.BOOL)]
    where = helper.make_node("Where", ["condition", "second", "third"], ["y"])
    save(path, [*made, *nodes, where], [numbers(f"sizes_{name}", shape) for name, shape in shapes.items()])


def save_gather(path: Path) -> None:
    """A row of four thousand numbers that is gathered four thousand times, by each of many nodes."""
    made = [helper.make_node("ConstantOfShape", [f"sizes_{name}"], [name]) for name in ("row", "places")]
    cast = helper.make_node("Cast", ["places"], ["indices"], to=TensorProto.INT64)
    gathers = [helper.make_node("Gather", ["row", "indices"], [f"y{index}"]) for index in range(2000)]
    save(path, [*made, cast, *gathers], [numbers("sizes_row", [1, 4096]), numbers("sizes_places", [4096])])


BOMBS = (save_recursion, save_texts, save_empty, save_broadcast, save_gather)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are Linux's")
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_a_bomb_costs_little(tmp_path: Path, bomb: Callable[[Path], None]) -> None:
    """In a process of little memory and time."""
    bomb(tmp_path / "bomb.onnx")
    limits = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))"
    run = "import onnx; from onnxtool.graph.shapes import infer_values; infer_values(onnx.load('bomb.onnx'))"
    done = subprocess.run(
        [sys.executable, "-c", f"{limits}; {run}"],
        cwd=tmp_path,
        env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


SCAN = body(helper.make_node("Identity", ["q"], ["z"]), inputs=[value("q", None)])
WRONG = {
    "a Scan that does not say how many it reads": (helper.make_node("Scan", ["x"], ["y"], body=SCAN), ()),
    "a Scan of nothing": (helper.make_node("Scan", [], ["y"], body=SCAN, num_scan_inputs=1), ()),
    "a Loop of nothing": (helper.make_node("Loop", [], ["y"], body=SCAN), ()),
    "a Loop of an empty count": (helper.make_node("Loop", ["n"], ["y"], body=SCAN), (numbers("n", []),)),
    "a Loop of no number": (helper.make_node("Loop", ["n"], ["y"], body=SCAN), (numbers("n", [np.nan], np.float32),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_an_unknown_node(tmp_path: Path, name: str) -> None:
    """And no traceback."""
    node, tensors = WRONG[name]
    save(tmp_path / "model.onnx", [node], list(tensors))
    found = infer_values(onnx.load(tmp_path / "model.onnx")).values
    assert found["x"].shape == ("batch", 8)
    assert found.get("y") is None or found["y"].shape is None


def test_a_division_by_zero_prints_no_warning(tmp_path: Path) -> None:
    """Warnings are errors here; numpy's would stand on the user's stderr."""
    nodes = [helper.make_node("Div", ["a", "b"], ["c"]), helper.make_node("Relu", ["x"], ["y"])]
    save(tmp_path / "model.onnx", nodes, [numbers("a", [1, 2]), numbers("b", [0, 0])])
    assert infer_values(onnx.load(tmp_path / "model.onnx")).values["y"].shape == ("batch", 8)
