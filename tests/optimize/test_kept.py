"""--keep_float32: what patterns name stays in float32, nothing else changes, and the report is read from the result."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import TensorProto, numpy_helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.cli import main
from onnxtool.errors import OptionError, PassError
from onnxtool.graph.edit import replace_and_erase
from onnxtool.graph.writer import Writer
from onnxtool.model_file import ModelFile
from onnxtool.optimize.kept import Trail, note_matches, patterns_of
from onnxtool.optimize.passes.duplicates import common_subexpressions
from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.report import OptimizeReport
from tests.cli.entry_point import run_onnxtool
from tests.graphs import of_text, save_text

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


def test_half_precision_is_cast_once_at_each_border(trained: Path, tmp_path: Path) -> None:
    """A layer reads one Cast to float32, and the Gelu behind its bias one Cast back."""
    name = "encoder.layer.0.intermediate.dense"
    graph = graph_of(optimized(Path(shutil.copy(trained, tmp_path / "m.onnx")), "fp16", name))
    makers = {name: node for node in graph.node for name in node.output}
    (product,) = (node for node in graph.node if f"{name}.weight" in node.input)
    (total,) = (node for node in graph.node if f"{name}.bias" in node.input)
    cast = makers[product.input[0]]
    assert (total.op_type, cast.op_type, cast.attribute[0].i) == ("Add", "Cast", TensorProto.FLOAT)
    assert makers[cast.input[0]].op_type == "LayerNormalization"
    (cast,) = (node for node in graph.node if total.output[0] in node.input)
    assert (cast.op_type, cast.attribute[0].i) == ("Cast", TensorProto.FLOAT16)
    assert [node.op_type for node in graph.node if cast.output[0] in node.input] == ["Gelu"]


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("Softmax", (True, True)),  # in both attentions
        ("encoder.layer.1.attention.self", (False, True)),
        ("encoder.layer.0.attention.self.query", (True, False)),  # its bias, of zeros, is also the other one's
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
    """The keys of an attention stay in float32; its queries and values have the codes of a run without the pattern."""
    base, report = (optimized(exported, "int8", *given) for given in ((), ("encoder.layer.0.attention.self.key",)))
    assert report.quantization is not None
    name = "encoder.layer.0.attention.self.query.weight_qkv"
    assert [layer.name for layer in report.quantization.kept] == [f"{name}_key"]
    codes = [{one.name: one.raw_data for one in graph_of(made).initializer} for made in (base, report)]
    assert all(codes[0][f"{name}_{part}_int8"] == codes[1][f"{name}_{part}_int8"] for part in ("query", "value"))


def test_a_lookup_is_kept(tmp_path: Path) -> None:
    """A node that only looks up rows, by its name."""
    table = np.random.default_rng(0).normal(size=(1024, 32)).astype(np.float32)
    body = "[words] h = Gather(t, ids) y = MatMul(h, w)"
    graph = f"g (int64[b, 6] ids) => (float[b, 6, 32] y) {{ {body} }}"
    path = save_text(tmp_path / "m.onnx", graph, {"t": table, "w": table[:32]}, 18)
    dtypes = {one.name: one.data_type for one in graph_of(optimized(path, "int8", "words")).initializer}
    assert (dtypes["t"], dtypes["w_int8"]) == (TensorProto.FLOAT, TensorProto.INT8)


@pytest.mark.parametrize(("pattern", "kept"), [("l0*", ["Mul_0"]), ("l0_m", ["Mul_0", "Mul_1"])])
def test_what_two_fusions_take_in_counts_where_nothing_else_does(pattern: str, kept: list[str]) -> None:
    """Two nodes replace two layers and the mask that both read, which may have the scope of one."""
    body = "[l0_m] m = Neg(c) [l0] a = Add(x, m) p = Relu(a) [l1] b = Add(p, m) y = Relu(b)"
    model = ir.from_proto(of_text(f"g (float[2] x, float[2] c) => (float[2] y) {{ {body} }}", {}, 18))
    note_matches(model, [pattern])
    before = Trail.of(model)
    for number, node in enumerate([node for node in model.graph if node.op_type == "Relu"]):
        total = node.inputs[0].producer()
        fused = Writer(node).node("Mul", [total.inputs[0], model.graph.inputs[1]])
        made = fused.producer()
        assert made is not None
        made.name = f"Mul_{number}"
        replace_and_erase(node.outputs[0], fused)
    assert before is not None
    before.note(model)
    assert [node.name for node in model.graph if patterns_of(node)] == kept
    assert [node.op_type for node in model.graph] == ["Mul", "Mul"]


@pytest.mark.parametrize("pattern", ["blocks.1", "/blocks.?/fc", "blocks.1.fc.weight", "node_MatMul_3", "MatMul"])
@pytest.mark.parametrize("scopes", ["['', 'blocks.1', 'blocks.1.fc', 'linear_3']", ""])
def test_a_layer_is_known_from_what_torch_notes_or_from_weights(pattern: str, scopes: str) -> None:
    """Nodes of torch's exporter have numbers for names; without its notes, the names of weights tell the layer."""
    model = ir.from_proto(
        of_text(
            "g (float[2, 2] x) => (float[2, 2] y) { [node_MatMul_3] y = MatMul(x, w) }",
            {"w": np.eye(2, dtype=np.float32)},
            18,
        )
    )
    (node,) = model.graph
    model.graph.initializers["w"].name = "blocks.1.fc.weight"
    node.metadata_props.update({"pkg.torch.onnx.name_scopes": scopes} if scopes else {})
    note_matches(model, [pattern])
    assert bool(patterns_of(node)) == (not scopes or not pattern.endswith("weight"))


def test_a_node_that_is_merged_with_an_equal_one_keeps_that_one() -> None:
    """The pattern matches the second of two equal nodes, of which the first is left."""
    body = "[first] a = Exp(x) [second] b = Exp(x) p = Neg(a) q = Abs(b) y = Add(p, q)"
    model = ir.from_proto(of_text(f"g (float[2] x) => (float[2] y) {{ {body} }}", {}, 18))
    note_matches(model, ["second"])
    model, _ = run_passes(model, [common_subexpressions], Context())
    assert [(node.op_type, node.name) for node in model.graph if patterns_of(node)] == [("Exp", "first")]


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


def test_an_operator_that_passes_write_is_known_by_its_name_with_its_domain(exported: Path) -> None:
    """As `stats` lists it in an optimized file."""
    found, expected = (optimized(exported, "int8", f"{domain}Attention").num_kept for domain in ("com.microsoft::", ""))
    assert [*found.values()] == [*expected.values()]


def test_a_match_that_computes_nothing_is_an_error(exported: Path) -> None:
    """A Shape has no floats to keep."""
    with pytest.raises(PassError, match="--keep_float32 Shape keeps nothing"):
        optimized(exported, "fp16", "encoder.layer.0", "Shape")


@pytest.mark.parametrize(("precision", "why"), [("fp16", "--keep_float32 keeps what could be"), ("int8", "float32")])
def test_a_pattern_that_keeps_everything_is_an_error(exported: Path, precision: str, why: str) -> None:
    """Nothing would be converted."""
    with pytest.raises(PassError, match=why):
        optimized(exported, precision, "*")


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
