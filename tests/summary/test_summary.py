"""A summary says what is in a file, and how much of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.reports import TensorInfo
from onnxtool.stats import compare_models
from onnxtool.summary import summarize_model
from onnxtool.summary.figures import Duplicate, Stats, Weight
from onnxtool.summary.releases import Usage, least_onnxruntime
from tests.graphs import identity, make_model, refer_to, save_external, value


def test_every_figure_of_a_small_model(tmp_path: Path) -> None:
    """All figures of a model with a subgraph, duplicates and metadata, counted by hand."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    body = helper.make_graph([identity("a")], "body", [], [value("a_out", [1])])
    nodes = [
        helper.make_node("Gelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
    ]
    initializers = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(weight, "tied"),
        numpy_helper.from_array(np.array([1, 2, 3], np.int64), "shape"),
        numpy_helper.from_array(np.array(True), "c"),
    ]
    model = make_model(nodes, initializers)
    helper.set_model_props(model, {"b": "2", "a": "1"})
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert summarize_model(path) == Stats(
        path=str(path),
        size_bytes=path.stat().st_size,
        ir_version=10,
        producer="maker 1.2",
        opsets={"ai.onnx": 20, "com.microsoft": 1},
        num_nodes=4,
        num_inputs=1,
        num_outputs=1,
        num_initializers=4,
        num_parameters=6 + 6 + 3 + 1,
        inputs=(TensorInfo("x", "float32", ("batch", 3)),),
        outputs=(TensorInfo("y", "float32", ("batch", None)),),
        ops={"Identity": 2, "If": 1, "com.microsoft::Gelu": 1},
        metadata={"a": "1", "b": "2"},
        initializer_bytes={"float32": 48, "int64": 24, "bool": 1},
        duplicate_bytes=24,
        num_functions=0,
        num_subgraphs=2,
        domains={"ai.onnx": 3, "com.microsoft": 1},
        parameters={"float32": 12, "int64": 3, "bool": 1},
        min_onnxruntime="1.18",
        largest=(
            Weight("shape", "int64", (3,), 24),
            Weight("tied", "float32", (2, 3), 24),
            Weight("w", "float32", (2, 3), 24),
            Weight("c", "bool", (), 1),
        ),
        duplicates=(Duplicate(("w", "tied"), 24),),
    )


def test_external_data_belongs_to_the_size(tmp_path: Path) -> None:
    """The size is that of the graph file and its external data."""
    path = tmp_path / "model.onnx"
    save_external(path, 1.0, "weights.bin")
    sizes = [(tmp_path / name).stat().st_size for name in ("model.onnx", "weights.bin")]
    assert summarize_model(path).size_bytes == sum(sizes)


def test_missing_external_data_is_an_error(tmp_path: Path) -> None:
    """A model without its data has no size, and is refused."""
    refer_to(tmp_path / "model.onnx", "weights.bin")
    with pytest.raises(ModelFileError, match="missing"):
        summarize_model(tmp_path / "model.onnx")


def test_the_order_is_the_same_on_every_run(tmp_path: Path) -> None:
    """Operators come by count and name, dtypes by bytes and name, domains and metadata by name."""
    names = ["Sub", "Add", "Mul", "Add"]
    model = make_model(
        [helper.make_node(op, ["x", "x"], [f"o{index}"]) for index, op in enumerate(names)],
        [numpy_helper.from_array(np.zeros(8, dtype), dtype) for dtype in ("int8", "float32", "int32", "bool")],
    )
    onnx.save(model, tmp_path / "model.onnx")
    stats = summarize_model(tmp_path / "model.onnx")
    assert list(stats.ops) == ["Add", "Mul", "Sub"]
    assert list(stats.initializer_bytes) == ["float32", "int32", "bool", "int8"]
    assert list(stats.opsets) == ["ai.onnx", "com.microsoft"]


def test_parts_are_those_that_exporters_name(tmp_path: Path) -> None:
    """TorchScript's names, dynamo's notes and the names of weights say the part; the rest is counted as having none."""
    dynamo = helper.make_node("Mul", ["a", "val_7"], ["b"], name="node_mul")
    dynamo.metadata_props.add(key="other", value="x")
    dynamo.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'bert', 'bert.layer.0.attention', 'mul']")
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["a"], name="/bert/layer.10/attention/Add"),
        dynamo,
        helper.make_node("MatMul", ["b", "bert.layer.2.output.weight"], ["c"], name="MatMul_7"),
        helper.make_node("Relu", ["c"], ["d"], name="Relu_8"),
        helper.make_node("Exp", ["d"], ["y"], name="/bert/embeddings/words/Exp"),
    ]
    weights = {"bias": 1, "val_7": 2, "bert.layer.2.output.weight": 3, "bert.layer.10.norm.weight": 4, "onnx::Add_1": 5}
    initializers = [numpy_helper.from_array(np.ones(size, np.float32), name) for name, size in weights.items()]
    onnx.save(make_model(nodes, initializers), tmp_path / "model.onnx")
    layers = summarize_model(tmp_path / "model.onnx").layers
    assert {name: tuple(layer) for name, layer in layers.items()} == {
        "bert.embeddings": (1, 0),
        "bert.layer.0": (1, 8),
        "bert.layer.2": (1, 12),
        "bert.layer.10": (1, 4 + 16),
        "(no scope)": (1, 20),
    }
    assert list(layers)[1:4] == ["bert.layer.0", "bert.layer.2", "bert.layer.10"]


def test_tensors_in_attributes_are_counted(tmp_path: Path) -> None:
    """By the bytes of their elements."""
    node = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(5, np.float32)))
    onnx.save(make_model([node]), tmp_path / "model.onnx")
    assert summarize_model(tmp_path / "model.onnx").attribute_bytes == 20


def test_what_constant_nodes_hold_counts_as_parameters(tmp_path: Path) -> None:
    """As initializers do: tensors, sparse ones by their values, lists and numbers; attributes of others do not."""
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.ones(3, np.float32), "v"), numpy_helper.from_array(np.arange(3)), [100]
    )
    held: dict[str, object] = {
        "value": numpy_helper.from_array(np.ones((4, 5), np.float16)),
        "sparse_value": sparse,
        "value_floats": [1.0, 2.0],
        "value_float": 0.0,
        "value_ints": [1, 2, 3, 400],
        "value_int": 0,
    }
    nodes = [helper.make_node("Constant", [], [name], **{name: one}) for name, one in held.items()]
    nodes.append(helper.make_node("ConstantOfShape", ["value_ints"], ["z"], value=numpy_helper.from_array(np.ones(1))))
    onnx.save(make_model(nodes, [numpy_helper.from_array(np.ones(7, np.float32), "w")]), tmp_path / "model.onnx")
    stats = summarize_model(tmp_path / "model.onnx")
    assert stats.parameters == {"float16": 20, "float32": 7 + 3 + 2 + 1, "int64": 5}
    assert stats.num_parameters == 38


@pytest.mark.parametrize(
    ("ir_version", "opsets", "release"),
    [
        (8, {"ai.onnx": 17}, "1.12"),
        (9, {"ai.onnx": 17}, "1.15"),
        (8, {"ai.onnx": 15}, "1.9"),
        (8, {"ai.onnx": 19}, "1.16"),
        (9, {"ai.onnx": 20, "com.microsoft": 1}, "1.17"),
        (10, {"ai.onnx": 14}, "1.18"),
        (8, {"ai.onnx": 14, "ai.onnx.ml": 4}, "1.17"),
        (3, {}, "1.0"),
        (11, {"ai.onnx": 18}, "1.23"),
        (99, {"ai.onnx": 17}, ""),
        (8, {"ai.onnx": 999}, ""),
    ],
)
def test_the_least_release_follows_from_the_versions(ir_version: int, opsets: dict[str, int], release: str) -> None:
    """The first release that knows the IR version and every opset of ONNX; none where the table ends."""
    assert least_onnxruntime(ir_version, opsets, {"com.microsoft::Attention": Usage(5)}) == release


@pytest.mark.parametrize(
    ("operator", "opset", "inputs", "attributes", "release"),
    [
        ("com.microsoft::GroupQueryAttention", 17, 9, {}, "1.18"),
        ("com.microsoft::GroupQueryAttention", 17, 11, {}, "1.22"),
        ("com.microsoft::GroupQueryAttention", 17, 12, {}, "1.23"),
        ("com.microsoft::GroupQueryAttention", 24, 12, {}, "1.24"),
        ("com.microsoft::GroupQueryAttention", 17, 9, {"softcap": 0}, "1.20"),
        ("com.microsoft::MultiHeadAttention", 17, 3, {"num_heads": 4}, "1.16"),
        ("com.microsoft::MultiHeadAttention", 17, 6, {}, "1.21.1"),
        ("com.microsoft::MultiHeadAttention", 17, 8, {}, "1.16"),
        ("com.microsoft::MatMulNBits", 17, 4, {"bits": 4, "block_size": 32}, "1.16.2"),
        ("com.microsoft::MatMulNBits", 17, 4, {"bits": 8}, "1.22"),
        ("com.microsoft::BiasGelu", 14, 2, {}, "1.15"),
        ("QuantizeLinear", 21, 3, {"block_size": 384, "axis": -1}, "1.19"),
        ("QuantizeLinear", 21, 3, {"axis": -1}, "1.18"),
        ("LpNormalization", 21, 1, {}, "1.18"),
        ("LpNormalization", 22, 1, {}, "1.25"),
        ("RoiAlign", 22, 3, {}, ""),
    ],
)
def test_what_an_operator_got_later_needs_a_later_release(
    operator: str, opset: int, inputs: int, attributes: dict[str, int], release: str, tmp_path: Path
) -> None:
    """Operators, their inputs, attributes and sizes, in the main graph; inputs left out before the last count."""
    domain, _, name = operator.rpartition("::")
    node = helper.make_node(name, ["x", *[""] * (inputs - 2), "x"][:inputs], ["y"], domain=domain, **attributes)
    graph = helper.make_graph([node], "graph", [value("x", [1])], [value("y", [1])])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    assert summarize_model(tmp_path / "model.onnx").min_onnxruntime == release


def test_operators_of_functions_count(tmp_path: Path) -> None:
    """A model whose MatMulNBits stands in a function alone needs a release that has it."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    inner = helper.make_node("MatMulNBits", ["a", "b", "c"], ["y"], domain="com.microsoft")
    function = helper.make_function("own", "Product", ["a", "b", "c"], ["y"], [inner], opsets)
    node = helper.make_node("Product", ["x", "x", "x"], ["y"], domain="own")
    graph = helper.make_graph([node], "graph", [value("x", [1])], [value("y", [1])])
    opsets = [*opsets, helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    assert summarize_model(tmp_path / "model.onnx").min_onnxruntime == "1.16.2"


def test_the_installed_onnxruntime_loads_what_the_table_says(tmp_path: Path) -> None:
    """The newest versions of the table load; so the table promises nothing that no release keeps."""
    graph = helper.make_graph([identity("n")], "graph", [value("x", [1])], [value("n_out", [1])])
    for ir_version, opset in ((13, 26), (10, 21), (8, 17)):
        opsets = [helper.make_opsetid("", opset)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), tmp_path / "model.onnx")
        assert summarize_model(tmp_path / "model.onnx").min_onnxruntime
        ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])


def test_attentions_are_counted_by_operator(tmp_path: Path) -> None:
    """Those of ONNX and of onnxruntime, and nothing whose name merely ends so."""
    ms = "com.microsoft"
    ops = (("Attention", ""), ("NoAttention", ""), ("Attention", ms), ("GroupQueryAttention", ms))
    nodes = [helper.make_node(op, ["x"], [f"o{index}"], domain=domain) for index, (op, domain) in enumerate(ops)]
    onnx.save(make_model(nodes), tmp_path / "model.onnx")
    onnx.save(make_model(nodes[:2]), tmp_path / "base.onnx")
    assert summarize_model(tmp_path / "model.onnx").num_attentions == 3
    assert compare_models(tmp_path / "model.onnx", tmp_path / "base.onnx").delta.num_attentions == 2
