"""Two names of one domain are settled where a model is loaded, and mean the same everywhere behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.model_file.domains import default_opset, settle_domains
from onnxtool.model_file.weights import load_model
from onnxtool.model_file.wire import read_nodes, read_structure
from tests.workshop import Workshop


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` that calls the domain `ai.onnx` wherever it can."""

    def rename(nodes: object) -> None:
        for node in nodes:  # type: ignore[attr-defined]
            node.domain = node.domain or "ai.onnx"
            for attribute in node.attribute:
                for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    rename(graph.node)

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rename(copy.graph.node)
    for holder in (copy, *copy.functions):
        for one in holder.opset_import:
            one.domain = one.domain or "ai.onnx"
    for function in copy.functions:
        function.domain = function.domain or "ai.onnx"
        rename(function.node)
    return copy


def nested() -> onnx.ModelProto:
    """Make a model with a branch in a branch, and functions of both domains."""
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "inner", [], [value])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    outer = helper.make_graph([branch], "outer", [], [value])
    node = helper.make_node("If", ["c"], ["y"], then_branch=outer, else_branch=outer)
    inputs = [
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function(domain, "F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], opsets[:1])
        for domain in ("", "own")
    ]
    graph = helper.make_graph([node], "graph", inputs, [value])
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)


def test_the_alias_is_replaced_in_nodes_branches_functions_and_imports() -> None:
    """What comes out is the model as it would be without the alias."""
    assert settle_domains(renamed(nested())) == nested()


def test_a_model_without_the_alias_stays_as_it_is() -> None:
    """Nothing is reordered or dropped."""
    assert settle_domains(nested()) == nested()


@pytest.mark.parametrize(("names", "version"), [(("", "ai.onnx"), 11), (("ai.onnx", ""), 17)])
def test_the_last_of_two_imports_counts(names: tuple[str, str], version: int) -> None:
    """As in onnxruntime, which takes sums with axes as an attribute up to opset 12 only."""
    first = {"": 17, "ai.onnx": 11}
    imports = {name: first[name] for name in names}
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], axes=[1])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*one) for one in imports.items()], ir_version=8)
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        accepted = True
    except Exception:  # noqa: BLE001  onnxruntime's exceptions have no root of their own
        accepted = False
    assert default_opset(imports) == version
    assert accepted == (version < 13)
    assert [(one.domain, one.version) for one in settle_domains(model).opset_import] == [("", version)]


def test_the_reader_and_the_loader_know_one_name(tmp_path: Path) -> None:
    """Of opsets, nodes and functions; reports call the domain by its alias."""
    onnx.save(renamed(nested()), tmp_path / "m.onnx")
    structure = read_structure(tmp_path / "m.onnx")
    assert structure.opsets == {"ai.onnx": 17, "own": 1}
    assert structure.ops == {"Neg": 4, "If": 3}
    assert {node.domain for node in read_nodes(tmp_path / "m.onnx")} == {""}
    loaded = load_model(tmp_path / "m.onnx")
    assert dict(loaded.opset_imports) == {"": 17, "own": 1}
    assert [dict(function.opset_imports) for function in loaded.functions.values()] == [{"": 17}, {"": 17}]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_a_file_under_the_alias_is_optimized_like_any_other(workshop: Workshop, tmp_path: Path, precision: str) -> None:
    """Same operators, same size, same numbers."""
    source = workshop.exported("tiny-encoder", exporter="torchscript")
    proto = onnx.load(source)
    tokenizer = source.with_suffix("")
    stats, outputs = [], []
    for name, model in (("a", proto), ("b", renamed(proto))):
        onnx.save(model, tmp_path / f"{name}.onnx")
        (tmp_path / name).symlink_to(tokenizer)
        output = tmp_path / f"{name}-{precision}.onnx"
        report = optimize_model(
            OptimizeOptions(
                tmp_path / f"{name}.onnx",
                output=output,
                precision=precision,
                max_error=0.5 if precision == "int4" else None,
                verify=False,
                timing=False,
            )
        )
        stats.append((report.after.ops, report.after.initializer_bytes, report.after.size_bytes, report.fusions))
        session = ort.InferenceSession(output, providers=["CPUExecutionProvider"])
        ids = np.arange(2, 14).reshape(2, 6)
        feeds = {one.name: ids if one.name == "input_ids" else np.ones_like(ids) for one in session.get_inputs()}
        outputs.append(session.run(None, feeds)[0])
    assert stats[0] == stats[1]
    np.testing.assert_array_equal(*outputs)
