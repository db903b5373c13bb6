"""The first part of a model that computes something else is named, whatever the exporter, fusion and precision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxtool import OptimizeOptions, VerifyOptions, compare_layers, optimize_model, verify
from onnxtool.errors import InputError, OptionError
from tests.cli.entry_point import run_onnxtool
from tests.graphs import of_text
from tests.workshop import Workshop

SPLADE = "tiny-splade"
Plant = Callable[[Any, int], str]


@pytest.fixture(scope="module")
def source(workshop: Workshop) -> Path:
    return workshop.exported(SPLADE, head="splade")


@pytest.fixture(scope="module")
def files(workshop: Workshop, source: Path) -> dict[str, Path]:
    def optimized(precision: str) -> Path:
        error = {"max_error": 0.3} if precision.startswith("int") else {"verify": precision != "fp16"}
        return workshop.made(
            f"layers-{precision}.onnx",
            lambda path: optimize_model(
                OptimizeOptions(source, output=path, precision=precision, timing=False, **error)
            ),
        )

    made = {precision: optimized(precision) for precision in ("fp32", "fp16", "int8", "int4")}
    return {"dynamo": source, "torchscript": workshop.exported(SPLADE, exporter="torchscript", head="splade"), **made}


def of_layer(node: Any, layer: int) -> bool:
    return any(f"layer.{layer}." in name for name in (node.name, *node.output))


def epsilon(model: Any, layer: int) -> str:
    node = next(node for node in model.graph.node if node.op_type == "LayerNormalization" and of_layer(node, layer))
    next(one for one in node.attribute if one.name == "epsilon").f = 0.05
    return "attention.output.LayerNorm"


def bias(model: Any, layer: int) -> str:
    nodes = [node for node in model.graph.node if node.op_type == "LayerNormalization" and of_layer(node, layer)]
    array = next(numpy_helper.to_array(one) for one in model.graph.initializer if one.name == nodes[-1].input[2])
    model.graph.initializer.append(numpy_helper.from_array((array + np.float32(0.05)).astype(array.dtype), "moved"))
    nodes[-1].input[2] = "moved"
    return "output.LayerNorm"


def mask(model: Any, layer: int) -> str:
    """Let all tokens be seen, padding too."""
    attentions = [node for node in model.graph.node if "Attention" in node.op_type]
    if attentions:
        node, slot = attentions[layer], 3 if attentions[layer].op_type == "Attention" else 4
        place = [one.name for one in model.graph.node].index(node.name)
        model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int32), "one"))
        model.graph.node.insert(place, helper.make_node("Max", [node.input[slot], "one"], ["all_seen"]))
        model.graph.node[place + 1].input[slot] = "all_seen"
    else:
        softmax = [node for node in model.graph.node if node.op_type == "Softmax"][layer]
        added = next(node for node in model.graph.node if softmax.input[0] in node.output)
        makers = {name: node.op_type for node in model.graph.node for name in node.output}
        softmax.input[0] = next(name for name in added.input if makers.get(name) in ("MatMul", "Mul", "Div"))
    return "attention"


@pytest.mark.parametrize("name", ["torchscript", "fp32", "fp16", "int8", "int4"])
def test_no_part_is_named_where_only_exporter_fusion_or_precision_differ(
    source: Path, files: dict[str, Path], name: str
) -> None:
    report = compare_layers(files[name], source)
    assert report.passed, report.reason
    assert report.first is None
    assert len(report.parts) > 8


# In float32, epsilons and biases are planted below.
@pytest.mark.parametrize(
    ("name", "plant", "layer"),
    [
        *(("dynamo", epsilon, 1), ("dynamo", bias, 0), ("dynamo", mask, 1)),
        *(("int8", epsilon, 1), ("int8", bias, 0), ("int8", mask, 1)),
        *(("fp32", mask, 1), ("int4", bias, 0)),
    ],
)
def test_a_planted_error_is_named_with_its_layer(
    source: Path, files: dict[str, Path], tmp_path: Path, name: str, plant: Plant, layer: int
) -> None:
    model = onnx.load(files[name])
    module = plant(model, layer)
    onnx.save(model, tmp_path / "planted.onnx")
    report = compare_layers(tmp_path / "planted.onnx", source)
    assert not report.passed
    assert f"layer.{layer}." in str(report.first), report.reason
    assert module in str(report.first), report.reason


def test_a_checkpoint_is_compared_by_its_modules(workshop: Workshop, files: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = str(workshop.checkpoint(SPLADE))
    assert compare_layers(files["fp32"], checkpoint).passed
    model = onnx.load(files["fp32"])
    epsilon(model, 1)
    onnx.save(model, tmp_path / "planted.onnx")
    report = compare_layers(tmp_path / "planted.onnx", checkpoint)
    assert "layer.1" in str(report.first), report.reason


def test_the_command_shows_all_layers_and_the_first_that_differs(
    source: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    model = onnx.load(files["fp32"])
    bias(model, 0)
    onnx.save(model, tmp_path / "planted.onnx")
    plain = run_onnxtool(tmp_path, "verify", "planted.onnx", source)
    assert plain.returncode == 1
    assert "--layers" in plain.stderr
    shown = run_onnxtool(tmp_path, "verify", "planted.onnx", source, "--layers")
    assert shown.returncode == 1
    assert "bert.encoder.layer.0.output.LayerNorm" in shown.stdout
    assert "bert.encoder.layer.1 " in shown.stdout
    listed = run_onnxtool(tmp_path, "verify", "planted.onnx", source, "--layers", "--format", "json")
    report = json.loads(listed.stdout)
    assert [part["scope"] for part in report["parts"] if part["differs"]] == [report["first"]]
    assert run_onnxtool(tmp_path, "verify", files["fp32"], source, "--layers").returncode == 0


def test_layers_are_compared_on_the_texts_that_are_passed(source: Path, files: dict[str, Path], tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the train to berlin leaves at noon\na cat\n")
    report = compare_layers(files["int8"], source, VerifyOptions(layers=True, texts=texts))
    assert report.passed, report.reason
    assert {*report.cases} == {"texts of texts.txt"}


def test_a_model_that_reads_padding_itself_is_not_blamed_for_it(tmp_path: Path) -> None:
    """A convolution does, or a mean over all tokens."""
    text = """g (int64[b,s] input_ids, int64[b,s] attention_mask) => (float[b,s,8] y) {
        m = Cast <to = 1> (attention_mask) k = Unsqueeze(m, last) x = Gather(table, input_ids) h = Tanh(x)
        mean = ReduceMean(h, axis) near = Add(h, mean) kept = Mul(near, k) y = Relu(kept)
    }"""
    table = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    model = of_text(text, {"table": table, "axis": np.array([1]), "last": np.array([2])})
    onnx.save(model, tmp_path / "model.onnx")
    report = compare_layers(tmp_path / "model.onnx", tmp_path / "model.onnx")
    assert report.passed, report.reason
    assert "near" in {part.value for part in report.parts}


def test_the_same_infinities_are_no_difference_and_others_are(tmp_path: Path) -> None:
    text = """g (int64[b,s] input_ids) => (float[b,s,8] y) {{
        x = Gather(table, input_ids) h = Tanh(x) m = Max(h, {0}) l = Log(m) e = Add(l, h) y = Mul(e, two)
    }}"""
    weights = {"table": np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)}
    weights |= {name: np.array(value, np.float32) for name, value in (("none", 0), ("some", 0.5), ("two", 2))}
    for name in ("none", "some"):
        onnx.save(of_text(text.format(name), weights), tmp_path / f"{name}.onnx")
    assert compare_layers(tmp_path / "none.onnx", tmp_path / "none.onnx").passed
    report = compare_layers(tmp_path / "some.onnx", tmp_path / "none.onnx")
    assert [part.value for part in report.parts if part.differs] == ["m"]


def test_options_without_effect_and_files_without_layers_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="atol has no effect on --layers"):
        VerifyOptions(layers=True, atol=1.0)
    with pytest.raises(OptionError, match="compare_layers"):
        verify(source, source, VerifyOptions(layers=True))
    with pytest.raises(OptionError, match="revision is for a checkpoint"):
        compare_layers(source, source, VerifyOptions(revision="main"))
    flat = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "flat",
        [helper.make_tensor_value_info("x", 1, ["n"])],
        [helper.make_tensor_value_info("y", 1, ["n"])],
    )
    onnx.save(helper.make_model(flat, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "f.onnx")
    with pytest.raises(InputError, match="no layers are found"):
        compare_layers(tmp_path / "f.onnx", tmp_path / "f.onnx")
