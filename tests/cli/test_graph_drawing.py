"""The drawing of a graph on the page of `stats --format html`, read as its markup says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from onnxtool.cli import graph_drawing
from tests.cli.entry_point import run_onnxtool
from tests.graphs import make_model, value

EXPORTED = ["MatMul", "Add", "Softmax", "MatMul", "Add", "Erf", "Mul"]
OPTIMIZED = ["com.microsoft::Attention", "Add", "com.microsoft::QuickGelu", "Mul"]


def save(path: Path, ops: Sequence[str], count: int = 6, inputs: Sequence[Any] | None = None) -> None:
    """Write a model of equal layers; each node reads the one before, and Add what the layer reads as well."""
    names = ["Gather", *list(ops) * count, "Log"]
    nodes = []
    for i, op in enumerate(names):
        sources = [f"v{i}"]
        if op == "Add":
            sources.append(f"v{(i - 1) // len(ops) * len(ops) + 1}")
        nodes.append(helper.make_node(op.rpartition(":")[2], sources, [f"v{i + 1}"], domain=op.rpartition("::")[0]))
    onnx.save(make_model(nodes, inputs=list(inputs or [value("v0", ["batch", 3])])), path)


def drawn(folder: Path, *arguments: str) -> str:
    """Return the section as text: a line for each box, `[` and `]` around what a block or a column holds."""
    result = run_onnxtool(folder, "stats", *arguments, "--format", "html")
    assert (result.returncode, result.stderr) == (0, "")
    section = re.search(r'<section aria-labelledby="graph".*?</section>', result.stdout, re.DOTALL)
    assert section is not None
    text = re.sub(r"\s+", " ", section[0])
    text = re.sub(r"<(details|div)\b[^>]*>", "\n[ ", text)
    text = re.sub(r"</(details|div)>", "\n]\n", text)
    text = re.sub(r"<(li|/li|h3|/h3|/summary|p|/p|h2|/h2)\b[^>]*>", "\n", text)
    text = re.sub("<[^>]*>", "", text)
    return "\n".join(" ".join(line.split()) for line in re.sub(r"\[\s+", "[ ", text).splitlines() if line.strip())


def test_a_model_is_drawn_from_its_inputs_to_its_outputs(tmp_path: Path) -> None:
    """The layer once with its count, fused operators marked, and each box with what it reads."""
    save(tmp_path / "m.onnx", OPTIMIZED)
    boxes = drawn(tmp_path, "m.onnx").split("Inputs\n")[1].splitlines()
    assert boxes == [
        "v0 float32 [batch, 3]",
        "Operators",
        "1 Gather ← v0",
        "[ 2 x 6: 4 nodes, each reads the one before",
        "1 com.microsoft::Attention fused ← in",
        "2 Add ← 1, in",
        "3 com.microsoft::QuickGelu fused",
        "4 Mul",
        "]",
        "3 Log",
        "Outputs",
        "y float32 [batch, ?]",
    ]


def test_a_block_before_stands_beside_the_block_after(tmp_path: Path) -> None:
    """With what was removed and added marked in each, and what both have without a mark."""
    save(tmp_path / "m.onnx", OPTIMIZED)
    save(tmp_path / "base.onnx", EXPORTED)
    boxes = drawn(tmp_path, "m.onnx", "base.onnx").split("Operators\n")[1].split("\nOutputs")[0].splitlines()
    assert boxes == [
        "Gather",
        *("[ Before", "[ x 6: 7 nodes, each reads the one before"),
        *("- removed MatMul", "Add", "- removed Softmax", "- removed MatMul", "- removed Add", "- removed Erf"),
        *("Mul", "]", "]"),
        *("[ After", "[ x 6: 4 nodes, each reads the one before"),
        *("+ added com.microsoft::Attention fused", "Add", "+ added com.microsoft::QuickGelu fused"),
        *("Mul", "]", "]"),
        "Log",
    ]


def test_two_equal_models_have_no_mark(tmp_path: Path) -> None:
    """Their layer is drawn once, not beside itself."""
    save(tmp_path / "m.onnx", EXPORTED)
    text = drawn(tmp_path, "m.onnx", "m.onnx").split("Inputs\n")[1]
    assert not re.search(r"added|removed|changed|Before|After", text)
    assert text.count("x 6") == 1


def test_another_count_of_layers_attribute_or_input_is_marked(tmp_path: Path) -> None:
    """A graph that lost a layer; an attribute that is new; an input of another shape, one gone, and one added."""
    save(tmp_path / "m.onnx", OPTIMIZED, 5, [value("v0", ["batch", 4]), value("new", [1])])
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.node[0].attribute.append(helper.make_attribute("axis", 1))
    onnx.save(model, tmp_path / "m.onnx")
    save(tmp_path / "base.onnx", OPTIMIZED, 6, [value("v0", ["batch", 3]), value("old", [1])])
    text = drawn(tmp_path, "m.onnx", "base.onnx")
    assert "~ changed v0 float32 [batch, 4], was float32 [batch, 3]" in text
    assert "- removed old float32 [1]\n+ added new float32 [1]" in text
    assert "~ changed Gather" in text
    assert text.index("Before\n[ x 6") < text.index("After\n[ x 5")


def test_a_repeated_operator_is_one_box(tmp_path: Path) -> None:
    """Whether in a row or side by side."""
    rows = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(3)]
    sides = [helper.make_node("Exp", ["v0"], [f"e{i}"]) for i in range(4)]
    onnx.save(make_model([*rows, *sides], inputs=[value("v0", [3])]), tmp_path / "m.onnx")
    text = drawn(tmp_path, "m.onnx")
    assert "\n1 Relu x 3 in a row ← v0\n2 Exp x 4 side by side ← v0\n" in text


def test_an_empty_graph_is_drawn(tmp_path: Path) -> None:
    """Also against one that is not."""
    onnx.save(make_model([]), tmp_path / "empty.onnx")
    save(tmp_path / "m.onnx", OPTIMIZED)
    assert "Operators\nnone\nOutputs" in drawn(tmp_path, "empty.onnx")
    assert "- removed Gather" in drawn(tmp_path, "empty.onnx", "m.onnx")


def test_what_is_not_drawn_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes beyond the bound by operator, and a graph beyond its own bound by its name."""
    nodes = [helper.make_node(f"Op{i % 7 * i}", ["v0"], [f"o{i}"]) for i in range(520)]
    onnx.save(make_model(nodes, inputs=[value("v0", [3])]), tmp_path / "m.onnx")
    text = drawn(tmp_path, "m.onnx")
    assert "\n500 Op" in text
    assert "\n501 Op" not in text
    assert "\nand 2" in text
    save(tmp_path / "base.onnx", OPTIMIZED)
    assert "more nodes here, which are not compared" in drawn(tmp_path, "m.onnx", "base.onnx")
    monkeypatch.setattr(graph_drawing, "MAX_DRAWN_NODES", 500)
    assert "not drawn, as it has more than 500 nodes: m.onnx;" in drawn(tmp_path, "m.onnx", "base.onnx")
