"""The table of operators against onnxruntime: names and dtypes of its schemas, and outputs of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxtool.graph.elements import Scope
from onnxtool.graph.inference import Inference
from onnxtool.graph.operators import MICROSOFT, OPERATORS, OperatorCall, Value, named_inputs
from onnxtool.graph.shapes import fill_types, find_shapes
from tests.optimize.passes.builders import build, normal, run

# Only builds of onnxruntime for training have these.
TRAINING_ONLY = {"FakeQuant", "ScaledSum"}
CONTRIBUTED = sorted(op_type for domain, op_type in OPERATORS if domain == MICROSOFT)
SCHEMAS = {schema.name: schema for schema in get_all_operator_schema() if schema.domain == MICROSOFT}
B, S, T, D, H, N, BLOCK = 2, 5, 3, 8, 2, 6, 16  # batch size, tokens, past tokens, width, heads, columns, block


@pytest.mark.parametrize("op_type", sorted({*CONTRIBUTED} - TRAINING_ONLY))
def test_inputs_are_those_of_the_schema(op_type: str) -> None:
    """Their names by position; the table may end before the schema does."""
    row, schema = OPERATORS[MICROSOFT, op_type], SCHEMAS[op_type]
    names = row.inputs.split()
    assert names == [one.name for one in schema.inputs][: len(names)]
    assert {name for pair in row.lookups for name in pair} <= {*names}


@pytest.mark.parametrize("op_type", sorted({*CONTRIBUTED} - TRAINING_ONLY))
def test_dtypes_are_those_of_the_schema(op_type: str) -> None:
    """An output that has the dtype of an input has its type in the schema too, be it a variable or a fixed one."""
    row, schema = OPERATORS[MICROSOFT, op_type], SCHEMAS[op_type]
    types = {one.name: one.typeStr for one in schema.inputs}
    for names, output in zip(row.outputs.split(), schema.outputs, strict=False):
        if names.split("|")[0] in types:
            assert types[names.split("|")[0]] == output.typeStr


def ones(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.ones(shape, dtype)


class Case(NamedTuple):
    """A node of one operator; `-` stands for an input or output that is left out."""

    inputs: Mapping[str, Any]
    outputs: str = "y"
    attributes: Mapping[str, Any] = MappingProxyType({})
    op_type: str = ""


X = ones(B, S, D)
BYTES = ones(B, S, D, dtype=np.uint8)
SCALE, ZERO = np.float32(0.5), np.uint8(1)
IDS = np.zeros((B, S), np.int32)
TABLE = ones(30, D)
PAIR: Mapping[str, Any] = {
    "a": BYTES,
    "as": SCALE,
    "az": ZERO,
    "b": ones(S, D, dtype=np.uint8),
    "bs": SCALE,
    "bz": ZERO,
    "cs": SCALE,
}
GROUPS = {"num_heads": 4, "kv_num_heads": 2}
CASES: dict[str, Case] = {
    "Attention": Case({"x": X, "w": ones(D, 3 * D), "b": ones(3 * D)}, "y", {"num_heads": H}),
    "Attention of several widths": Case(
        {"x": X, "w": ones(D, 20), "b": ones(20)},
        "y",
        {"num_heads": H, "qkv_hidden_sizes": [8, 8, 4]},
        "Attention",
    ),
    "Attention with a past": Case(
        {"x": X, "w": ones(D, 3 * D), "b": ones(3 * D), "-": ones(0), "past": ones(2, B, H, T, D // H)},
        "y present",
        {"num_heads": H},
        "Attention",
    ),
    "BiasGelu": Case({"x": X, "b": ones(D)}),
    "DequantizeLinear": Case({"x": BYTES, "s": SCALE, "z": ZERO}),
    "DynamicQuantizeMatMul": Case(
        {"x": X, "w": ones(D, N, dtype=np.uint8), "s": ones(1), "z": ones(1, dtype=np.uint8)}
    ),
    "EmbedLayerNormalization": Case(
        {"ids": IDS, "seg": IDS, "words": TABLE, "pos": TABLE, "segs": TABLE, "g": ones(D), "b": ones(D), "m": IDS},
        outputs="y lengths sum",
    ),
    "FastGelu": Case({"x": X, "b": ones(D)}),
    "FusedConv": Case({"x": X, "w": ones(4, S, 3), "b": ones(4)}, attributes={"activation": "Relu"}),
    "FusedGemm": Case(
        {"a": ones(D, S), "b": ones(N, D), "c": ones(N)},
        attributes={"transA": 1, "transB": 1, "activation": "Relu"},
    ),
    "FusedMatMul": Case({"x": X, "w": ones(N, D)}, attributes={"transB": 1}),
    "FusedMatMul of both transposed": Case(
        {"x": ones(B, D, S), "w": ones(B, N, D)}, "y", {"transA": 1, "transB": 1}, "FusedMatMul"
    ),
    "GatherBlockQuantized": Case(
        {"w": ones(N, BLOCK // 2, dtype=np.uint8), "i": np.array([[1, 2]]), "s": ones(N, 1)},
        attributes={"bits": 4, "block_size": BLOCK, "quantize_axis": 1},
    ),
    "Gelu": Case({"x": X}),
    "GroupQueryAttention": Case(
        {
            "q": ones(B, S, 4 * 8),
            "k": ones(B, S, 2 * 8),
            "v": ones(B, S, 2 * 8),
            "pk": ones(B, 2, 0, 8),
            "pv": ones(B, 2, 0, 8),
            "n": np.full(B, S - 1, np.int32),
            "t": np.array(S, np.int32),
        },
        "y keys values",
        GROUPS,
    ),
    "Inverse": Case({"x": np.eye(3, dtype=np.float32)[None]}),
    "MatMulIntegerToFloat": Case({"a": BYTES, "b": ones(D, N, dtype=np.uint8), "as": ones(1), "bs": ones(1)}),
    "MatMulNBits": Case(
        {"x": X, "w": ones(N, 1, BLOCK // 2, dtype=np.uint8), "s": ones(N, 1)},
        attributes={"K": D, "N": N, "bits": 4, "block_size": BLOCK},
    ),
    "MultiHeadAttention": Case({"q": X, "k": ones(B, 4, D), "v": ones(B, 4, 6)}, attributes={"num_heads": H}),
    "MultiHeadAttention with heads apart": Case(
        {"q": X, "k": ones(B, H, 4, D // H), "v": ones(B, H, 4, D // H)},
        "y",
        {"num_heads": H},
        "MultiHeadAttention",
    ),
    "MultiHeadAttention with a past": Case(
        {
            "q": X,
            "k": X,
            "v": X,
            "-": ones(0),
            "-m": ones(0),
            "-b": ones(0),
            "pk": ones(B, H, T, D // H),
            "pv": ones(B, H, T, D // H),
        },
        "y keys values",
        {"num_heads": H},
        "MultiHeadAttention",
    ),
    "QAttention": Case(
        {
            "x": BYTES,
            "w": ones(D, 3 * D, dtype=np.uint8),
            "b": ones(3 * D),
            "xs": SCALE,
            "ws": SCALE,
            "-": ones(0),
            "xz": ZERO,
            "wz": ZERO,
        },
        attributes={"num_heads": H},
    ),
    "QEmbedLayerNormalization": Case(
        {
            "ids": IDS,
            "seg": IDS,
            "words": TABLE.astype(np.uint8),
            "pos": TABLE.astype(np.uint8),
            "segs": TABLE.astype(np.uint8),
            "g": ones(D, dtype=np.uint8),
            "b": ones(D, dtype=np.uint8),
            "m": IDS,
            **{f"{name}s": SCALE for name in "abcde"},
            **{f"{name}z": ZERO for name in "abcde"},
        },
        outputs="y lengths",
    ),
    "QLinearAdd": Case(PAIR),
    "QLinearLeakyRelu": Case({"x": BYTES, "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO}),
    "QLinearMul": Case(PAIR),
    "QLinearSigmoid": Case({"x": BYTES, "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO}),
    "QLinearSoftmax": Case(
        {"x": BYTES, "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO}, attributes={"opset": 13, "axis": -1}
    ),
    "QuantizeLinear": Case({"x": X, "s": SCALE, "z": np.int8(1)}),
    "QuickGelu": Case({"x": X}),
    "RotaryEmbedding": Case(
        {"x": X, "p": np.zeros(1, np.int64), "c": ones(S, 2), "s": ones(S, 2)}, "y", {"num_heads": H}
    ),
    "SkipLayerNormalization": Case({"x": X, "r": X, "g": ones(D), "b": ones(D)}, outputs="y - - sum"),
    "SkipSimplifiedLayerNormalization": Case({"x": X, "r": X, "g": ones(D)}, outputs="y - - sum"),
}
# The CPU has no kernel of these.
NO_KERNEL = {"BiasAdd", "BiasDropout", "BiasSoftmax", "GemmFastGelu", "GroupNorm", "SkipGroupNorm", *TRAINING_ONLY}


def one_node(name: str, case: Case) -> onnx.ModelProto:
    inputs = ["" if key.startswith("-") else key for key in case.inputs]
    outputs = ["" if key == "-" else key for key in case.outputs.split()]
    node = helper.make_node(case.op_type or name, inputs, outputs, domain=MICROSOFT, **case.attributes)
    graph = helper.make_graph(
        [node],
        "graph",
        [],
        [helper.make_empty_tensor_value_info(key) for key in outputs if key],
        [numpy_helper.from_array(np.asarray(case.inputs[key]), key) for key in inputs if key],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_kernel(name: str) -> None:
    """Shape and dtype as onnxruntime returns them on the CPU."""
    case = CASES[name]
    model = one_node(name, case)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = {
        output.name: Value(array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))
        for output, array in zip(session.get_outputs(), session.run(None, {}), strict=True)
    }
    scope = Scope()
    Inference(model).follow(model.graph, scope)
    assert {key: scope.values.get(key) for key in expected} == expected


def test_every_operator_with_a_kernel_has_a_case() -> None:
    """So a new row is compared with onnxruntime."""
    assert {case.op_type or name for name, case in CASES.items()} | NO_KERNEL == {*CONTRIBUTED}


def test_operators_without_a_kernel_have_the_shapes_of_their_documentation() -> None:
    """A mask beside a result, and a sum beside one, are as large as it."""
    x, ids = Value((B, S, D), TensorProto.FLOAT16), Value((B, S), TensorProto.INT32)
    expected = {
        "BiasDropout": [x, Value(x.shape, TensorProto.BOOL)],
        "FakeQuant": [x, Value(x.shape, TensorProto.BOOL)],
        "SkipGroupNorm": [x, x],
        "ScaledSum": [x],
        "GemmFastGelu": [Value((B, S, N), TensorProto.FLOAT16)],
    }
    for op_type, outputs in expected.items():
        row = OPERATORS[MICROSOFT, op_type]
        weight = Value((D, N), TensorProto.FLOAT16)
        inputs = [x, weight if op_type == "GemmFastGelu" else ids]
        assert row.infer(OperatorCall(row.named(inputs), {})) == outputs


@pytest.mark.parametrize("opset", [17, 20])
def test_shapes_are_known_behind_an_operator_for_all_sizes(opset: int) -> None:
    """In each probe, behind an operator of ONNX that follows; keys and values have an axis of heads."""
    text = (
        "g (float[B, S, 8] x, float[B, 2, P, 4] past) => (float[B, 2, T, 4] keys, float z) "
        "<int64[4] heads = {0, 0, 2, 4}> { "
        "r = Reshape(x, heads) k = Transpose <perm=[0, 2, 1, 3]> (r) keys = Concat <axis=2> (past, k) "
        "y = com.microsoft.MultiHeadAttention <num_heads=2> (x, keys, keys) z = Neg(y) }"
    )
    model = build(text, opset=opset)
    shapes = find_shapes(model)
    for probe, sizes in enumerate(shapes.probes[:2]):
        feeds = {"x": normal(sizes["B"], sizes["S"], 8), "past": normal(sizes["B"], 2, sizes["P"], 4)}
        assert shapes.prime_shape(model.graph[-1].outputs[0], probe) == run(model, feeds)[1].shape
    assert shapes.dtype(model.graph[-1].outputs[0]) == np.float32


def test_keys_with_heads_apart_hide_neither_shape_nor_dtype() -> None:
    """Also where they are no output of the graph: decoders repeat their keys for groups of heads."""
    text = (
        "g (float16[B, S, 8] x) => (float16 z) <int64[4] heads = {0, 0, 2, 4}> { "
        "r = Reshape(x, heads) k = Transpose <perm=[0, 2, 1, 3]> (r) "
        "y = com.microsoft.MultiHeadAttention <num_heads=2> (x, k, k) z = Neg(y) }"
    )
    model = build(text)
    shapes = find_shapes(model)
    assert shapes.same(model.graph[-1].outputs[0], model.graph.inputs[0])
    assert shapes.dtype(model.graph[-1].outputs[0]) == np.float16


def test_types_are_noted_behind_operators_of_onnxruntime() -> None:
    """Where the exporter wrote none."""
    model = build("g (float16[B, S, 8] x) => (float16[B, S, 8] z) { y = com.microsoft.Gelu(x) z = Neg(y) }")
    inner = model.graph[0].outputs[0]
    assert inner.dtype is None
    fill_types(model)
    assert inner.dtype == ir.DataType.FLOAT16


def test_an_operator_that_is_not_known_hides_only_what_is_behind_it() -> None:
    """Nothing is guessed."""
    model = build("g (float[B, S, 8] x) => (float z) { a = Neg(x) y = com.microsoft.Unknown(a) z = Neg(y) }")
    shapes = find_shapes(model)
    assert shapes.rank(model.graph[0].outputs[0]) == 3
    assert shapes.rank(model.graph[-1].outputs[0]) is None


def test_inputs_have_names() -> None:
    """Those left out are None, those after the last name are called by their position."""
    assert named_inputs(MICROSOFT, "BiasGelu", ["x"]) == {"A": "x", "B": None}
    assert named_inputs(MICROSOFT, "Gelu", ["x", "y"]) == {"X": "x", "1": "y"}
    assert named_inputs("", "Gelu", ["x"]) == {}


def test_outputs_are_like_inputs_or_of_a_fixed_dtype() -> None:
    """A name that is neither would be no dtype at all."""
    for row in OPERATORS.values():
        names = {name for names in row.outputs.split() for name in names.split("|")}
        assert (
            names - {"float32", "uint8", "int32", "bool", "?", "stash_type"} <= {*row.inputs.split()}
            or row.name == "Einsum"
        )
        assert row.outputs or row.shapes is None
