"""--keep_float32: what patterns name stays in float32, nothing else changes, and the report is read from the result."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, numpy_helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.cli import main
from onnxtool.errors import OptionError, PassError
from onnxtool.model_file import ModelFile
from onnxtool.optimize.report import OptimizeReport
from tests.cli.entry_point import run_onnxtool

SIX = ("encoder.layer.*.attention.output.dense", "/encoder/layer.?/intermediate/dense", "encoder.layer.*.output.dense")
_QUANTIZED = (TensorProto.INT8, TensorProto.UINT8)


def optimized(path: Path, precision: str, *patterns: str, max_error: float | None = 0.9) -> OptimizeReport:
    """Optimize a file, without verification; layers of random weights need a wide bound."""
    options = OptimizeOptions(path, precision=precision, keep_float32=patterns, verify=False, timing=False, force=True)
    output = path.with_name(f"{precision}-{len(patterns)}.onnx")
    return optimize_model(replace(options, output=output, max_error=None if precision == "fp16" else max_error))


def graph_of(report: OptimizeReport) -> onnx.GraphProto:
    return onnx.load(report.output).graph


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_six_layers_stay_in_float32_and_nothing_else_changes(exported: Path, precision: str) -> None:
    """Six weights are the input's, bit by bit, and the other layers' weights are those of a run without patterns."""
    weights = {one.name: one for one in onnx.load(exported).graph.initializer}
    reports = [optimized(exported, precision, *patterns) for patterns in ((), SIX)]
    base, kept = ({one.name: one for one in graph_of(report).initializer} for report in reports)
    six = {name for name in weights.keys() & kept.keys() if re.search(r"(output|intermediate)\.dense\.weight", name)}
    assert len(six) == 6
    assert all(np.array_equal(*map(numpy_helper.to_array, (kept[name], weights[name]))) for name in six)
    roots = tuple(name.removesuffix("weight") for name in six)
    of_rows = re.compile(r"onnxtool\.(mirror|least|zero|step)_")  # shared by layers whose activations have one grid
    assert not [name for name in base.keys() ^ kept.keys() if not name.startswith(roots) and not of_rows.match(name)]
    changed = [name for name in base.keys() & kept.keys() if base[name] != kept[name]]
    # In int8, the values' scale served the layer behind the attention, which is now in float32.
    assert {name for name in changed if not re.search(r"_value_(scale|int8_bias)$", name)} == set()
    assert not any(kept[name].data_type in _QUANTIZED for name in changed)
    products = {one.name for one in reports[1].kept_float32 if one.operator == "MatMul"}
    assert products == {f"{root[:-1]}/MatMul" for root in roots}


def test_half_precision_is_cast_once_at_each_border(exported: Path) -> None:
    """A named layer reads one Cast to float32, and what reads it one Cast back; no Cast reads a Cast."""
    graph = graph_of(optimized(exported, "fp16", "encoder.layer.0.attention.output.dense"))
    makers = {name: node for node in graph.node for name in node.output}
    casts = [node for node in graph.node if node.op_type == "Cast"]
    assert not [node for node in casts if node.input[0] in makers and makers[node.input[0]].op_type == "Cast"]
    (product,) = (node for node in graph.node if "encoder.layer.0.attention.output.dense.weight" in node.input)
    assert makers[product.input[0]].attribute[0].i == TensorProto.FLOAT
    readers = [node for node in graph.node if product.output[0] in node.input]
    assert [(node.op_type, node.attribute[0].i) for node in readers] == [("Cast", TensorProto.FLOAT16)]


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("Softmax", (True, True)),  # in both attentions
        ("encoder.layer.1.attention.self", (False, True)),
        ("encoder.layer.0.attention.self.key", (True, False)),
        ("Attention", (True, True)),  # no operator of the input
    ],
)
def test_a_fused_operator_stays_with_what_it_took_in(exported: Path, pattern: str, layers: tuple[bool, bool]) -> None:
    """Attention is float32 in fp16 if the pattern matches a node that it replaced, and the report has its node."""
    report = optimized(exported, "fp16", pattern)
    graph = graph_of(report)
    dtypes = {one.name: one.data_type for one in graph.initializer}
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    assert tuple(dtypes[node.input[1]] == TensorProto.FLOAT for node in attentions) == layers
    named = {node.name for node, is_kept in zip(attentions, layers, strict=True) if is_kept}
    assert {one.name for one in report.kept_float32 if one.operator == "Attention"} == named


def test_one_of_three_packed_layers_is_kept_in_int8(exported: Path) -> None:
    """The keys of an attention stay in float32, its queries and values do not."""
    report = optimized(exported, "int8", "encoder.layer.0.attention.self.key")
    assert report.quantization is not None
    assert [layer.name for layer in report.quantization.kept] == ["encoder.layer.0.attention.self.query.weight_qkv_key"]


def test_tables_are_kept(exported: Path) -> None:
    """An embedding that a pattern names is no int8 table."""
    name = "embeddings.word_embeddings"
    dtypes = {one.name: one.data_type for one in graph_of(optimized(exported, "int8", name)).initializer}
    assert dtypes[f"{name}.weight"] == TensorProto.FLOAT


def test_the_report_tells_names_from_measurements(exported: Path) -> None:
    """With a bound, more layers rise to float32, and only the named one says so; the stamp counts its nodes."""
    pattern = "encoder.layer.0.output.dense"
    report = optimized(exported, "int8", pattern, max_error=0.0005)
    assert report.quantization is not None
    kept = report.quantization.kept
    assert [layer.name for layer in kept if layer.by_name] == [f"{pattern}.weight"]
    assert [layer for layer in kept if not layer.by_name]
    assert ModelFile.open(Path(report.output)).steps[-1]["kept_float32"] == {pattern: len(report.kept_float32)}


def test_a_pattern_without_a_match_is_an_error(exported: Path, tmp_path: Path) -> None:
    """It is named with the closest names, before anything is written, also by --dry_run."""
    arguments = ["optimize", str(exported), "--precision", "int8", "--keep_float32", "encoder.layer.7.output"]
    for dry in ([], ["--dry_run"]):
        result = run_onnxtool(tmp_path, *arguments, *dry)
        assert result.returncode == 2
        assert "--keep_float32 encoder.layer.7.output matches no node, layer or operator" in result.stderr
        assert "encoder.layer.1.output" in result.stderr
    assert not exported.with_name("tiny-int8.onnx").exists()


def test_a_match_that_computes_nothing_is_an_error(exported: Path) -> None:
    """A Shape has no floats to keep."""
    with pytest.raises(PassError, match="--keep_float32 Shape keeps nothing"):
        optimized(exported, "fp16", "encoder.layer.0", "Shape")


@pytest.mark.parametrize(("precision", "provider"), [("fp32", "cpu"), ("bf16", "openvino")])
def test_float32_and_bfloat16_have_no_layers_to_keep(precision: str, provider: str) -> None:
    """The first has nothing else, and the second is a mode of a whole session."""
    with pytest.raises(OptionError, match=f"--keep_float32 is for a lower precision: in {precision}"):
        OptimizeOptions("m.onnx", precision=precision, provider=provider, keep_float32=["Gelu"])


def test_the_command_lists_the_nodes(exported: Path) -> None:
    """Text has a table, JSON the same rows."""
    arguments = ["optimize", str(exported), "--precision", "fp16", "--keep-float32", "Gelu", "--no_timing", "--force"]
    text, rows = (CliRunner().invoke(main, [*arguments, *more]).stdout for more in ([], ["--format", "json"]))
    assert "Kept in float32 by name:\nnode" in text
    assert {(row["operator"], *row["patterns"]) for row in json.loads(rows)["kept_float32"]} <= {
        ("BiasGelu", "Gelu"),
        ("Gelu", "Gelu"),
    }
