"""What a run costs is what a reader would count by hand, or what onnxruntime's own shapes say."""

from __future__ import annotations

import random
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.stats import Shape, compare_models, describe_model
from onnxtool.summary.figures import Cost
from tests.graphs import value
from tests.model_file.test_wire_fuzz import mutated

B, S, D, H = 2, 5, 8, 2  # rows, tokens, width, heads
FLOAT = TensorProto.FLOAT


def weights(**shapes: tuple[int, ...]) -> list[Any]:
    return [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]


def cost_of(folder: Path, nodes: list[Any], initializers: list[Any], inputs: list[Any], **parts: Any) -> Cost:
    outputs = parts.pop("outputs", [value(nodes[-1].output[0], None)])
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, **parts), folder / "model.onnx")
    cost = describe_model(folder / "model.onnx", Shape(B, S)).cost
    assert cost is not None
    return cost


def node(op: str, inputs: str, output: str = "y", domain: str = "", **attributes: Any) -> Any:
    names, outputs = (["" if name == "-" else name for name in text.split()] for text in (inputs, output))
    return helper.make_node(op, names, outputs, domain=domain, **attributes)


X = value("x", ["batch", "sequence", D])
MS = "com.microsoft"
PRODUCTS: dict[str, tuple[Any, dict[str, tuple[int, ...]], int, tuple[int, ...]]] = {
    "MatMul": (node("MatMul", "x w"), {"w": (D, 3)}, B * S * D * 3, (B, S, 3)),
    "FusedMatMul": (node("FusedMatMul", "x w", domain=MS, transB=1), {"w": (3, D)}, B * S * D * 3, (B, S, 3)),
    "Einsum": (node("Einsum", "x w", equation="bsd,dk->bsk"), {"w": (D, 3)}, B * S * D * 3, (B, S, 3)),
    "Einsum with dots": (node("Einsum", "x w", equation="...d,dk->...k"), {"w": (D, 3)}, B * S * D * 3, (B, S, 3)),
    "Conv": (node("Conv", "x w", kernel_shape=[3], pads=[1, 1]), {"w": (4, S, 3)}, B * 4 * D * S * 3, (B, 4, D)),
    "Attention": (
        node("Attention", "x w b", domain=MS, num_heads=H),
        {"w": (D, 3 * D), "b": (3 * D,)},
        B * S * D * 3 * D + 2 * B * S * S * D,
        (B, S, D),
    ),
    "MultiHeadAttention": (
        node("MultiHeadAttention", "x x x", domain=MS, num_heads=H),
        {},
        2 * B * S * S * D,
        (B, S, D),
    ),
    "LSTM": (
        node("LSTM", "x w r", hidden_size=3),
        {"w": (1, 12, D), "r": (1, 12, 3)},
        B * S * 12 * (D + 3),
        (B, 1, S, 3),
    ),
    "Softmax": (node("Softmax", "x"), {}, 0, (B, S, D)),
}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_count_as_by_hand(tmp_path: Path, name: str) -> None:
    """Multiplications, and bytes of the output; onnxruntime gives the output the same shape."""
    call, shapes, macs, shape = PRODUCTS[name]
    cost = cost_of(tmp_path, [call], weights(**shapes), [X])
    assert (cost.macs, cost.num_unknown_nodes) == (macs, 0)
    assert cost.activation_bytes == cost.peak_activation_bytes == 4 * prod(shape)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"x": np.ones((B, S, D), np.float32)})
    assert output.shape == shape


def tensors(**arrays: Any) -> list[Any]:
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


N, BLOCK = 6, 16
CONTRIBUTED: dict[str, tuple[Any, list[Any], int]] = {
    "BiasGelu": (node("BiasGelu", "x b", domain=MS), tensors(b=np.ones(D, np.float32)), 0),
    "SkipLayerNormalization": (
        node("SkipLayerNormalization", "x x g", "y - - sum", MS),
        tensors(g=np.ones(D, np.float32)),
        0,
    ),
    "DynamicQuantizeMatMul": (
        node("DynamicQuantizeMatMul", "x w s z", domain=MS),
        tensors(w=np.ones((D, N), np.uint8), s=np.ones(1, np.float32), z=np.zeros(1, np.uint8)),
        B * S * D * N,
    ),
    "MatMulNBits": (
        node("MatMulNBits", "x w s", domain=MS, K=D, N=N, bits=4, block_size=BLOCK),
        tensors(w=np.ones((N, 1, BLOCK // 2), np.uint8), s=np.ones(N, np.float32)),
        B * S * D * N,
    ),
    "GatherBlockQuantized": (
        node("GatherBlockQuantized", "w i s", domain=MS, bits=4, block_size=BLOCK, quantize_axis=1),
        tensors(w=np.ones((N, BLOCK // 2), np.uint8), i=np.array([[1, 2]], np.int64), s=np.ones((N, 1), np.float32)),
        0,
    ),
    "RotaryEmbedding": (
        node("RotaryEmbedding", "x p c s", domain=MS, num_heads=H, rotary_embedding_dim=0),
        tensors(
            p=np.zeros(1, np.int64), c=np.ones((S, D // H // 2), np.float32), s=np.ones((S, D // H // 2), np.float32)
        ),
        0,
    ),
    "GroupQueryAttention": (
        node("GroupQueryAttention", "x k v - - n t", "y pk pv", MS, num_heads=1, kv_num_heads=1),
        tensors(
            k=np.ones((B, S, D), np.float32),
            v=np.ones((B, S, D), np.float32),
            n=np.full(B, S - 1, np.int32),
            t=np.array(S, np.int32),
        ),
        2 * B * S * S * D,
    ),
    "Attention of ONNX": (
        node("Attention", "x x x", q_num_heads=H, kv_num_heads=H),
        [],
        2 * B * S * S * D,
    ),
}


@pytest.mark.parametrize("name", list(CONTRIBUTED))
def test_operators_that_onnx_does_not_know_have_the_shapes_of_onnxruntime(tmp_path: Path, name: str) -> None:
    """All outputs of onnxruntime together have the bytes that are told, and products count as by hand."""
    call, initializers, macs = CONTRIBUTED[name]
    outputs = [value(output, None) for output in call.output if output]
    graph = helper.make_graph([call], "graph", [X], outputs, initializers)
    opsets = [helper.make_opsetid("", 23 if "ONNX" in name else 20), helper.make_opsetid(MS, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
    cost = describe_model(tmp_path / "model.onnx", Shape(B, S)).cost
    assert cost is not None
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    arrays = session.run(None, {"x": np.ones((B, S, D), np.float32)})
    assert cost.num_unknown_nodes == 0
    assert cost.activation_bytes == sum(array.nbytes for array in arrays)
    assert cost.macs == macs


def test_a_gemm_counts_its_transposed_side(tmp_path: Path) -> None:
    """A [K, M] transposed times B [K, N]."""
    call = node("Gemm", "a w", transA=1)
    cost = cost_of(tmp_path, [call], weights(w=(D, 3)), [value("a", [D, "batch"])])
    assert cost.macs == B * D * 3


def test_shapes_go_through_what_exporters_compute_them_with(tmp_path: Path) -> None:
    """Shape, Gather, Concat and Reshape: the product behind them is known."""
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows"),
        node("Unsqueeze", "rows axes", "rows1"),
        node("Concat", "rows1 minus heads", "target", axis=0),
        node("Reshape", "x target", "split"),
        node("Transpose", "split", "t", perm=[0, 2, 1, 3]),
        node("Transpose", "split", "u", perm=[0, 2, 3, 1]),
        node("MatMul", "t u"),
    ]
    numbers = {"zero": np.array(0), "axes": np.array([0]), "minus": np.array([-1]), "heads": np.array([H, D // H])}
    initializers = [numpy_helper.from_array(array.astype(np.int64), name) for name, array in numbers.items()]
    cost = cost_of(tmp_path, nodes, initializers, [X])
    assert (cost.macs, cost.num_unknown_nodes) == (B * H * S * S * (D // H), 0)


def test_values_go_after_their_last_reader(tmp_path: Path) -> None:
    """Of a chain two values are alive at once; one that is read again stays, and a graph output too."""
    size = 4 * B * S * D
    chain = [node("Relu", "x", "a"), node("Exp", "a", "b"), node("Neg", "b", "c"), node("Abs", "c")]
    cost = cost_of(tmp_path, chain, [], [X])
    assert (cost.activation_bytes, cost.peak_activation_bytes) == (4 * size, 2 * size)
    again = [*chain[:3], node("Add", "c a")]
    assert cost_of(tmp_path, again, [], [X]).peak_activation_bytes == 3 * size
    outputs = [value("a", None), value("y", None)]
    assert cost_of(tmp_path, chain, [], [X], outputs=outputs).peak_activation_bytes == 3 * size


def test_bodies_count_as_often_as_they_run(tmp_path: Path) -> None:
    """A loop of three rounds is three bodies; of a condition the dearer branch; a loop of unknown length is one."""
    body_inputs = [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("s", None)]
    product = node("MatMul", "s w", "next")
    loop_body = helper.make_graph(
        [node("Identity", "c", "c_out"), product], "body", body_inputs, [value("c_out", None), value("next", None)]
    )
    loop = node("Loop", "three - x", "looped", body=loop_body)
    cheap = helper.make_graph([node("Relu", "looped", "r")], "cheap", [], [value("r", None)])
    dear = helper.make_graph([node("MatMul", "looped v", "m")], "dear", [], [value("m", None)])
    branch = node("If", "flag", "y", then_branch=cheap, else_branch=dear)
    three = numpy_helper.from_array(np.array(3, np.int64), "three")
    inputs = [X, value("flag", [], TensorProto.BOOL)]
    cost = cost_of(tmp_path, [loop, branch], [three, *weights(w=(D, D), v=(D, 7))], inputs)
    assert (cost.macs, cost.num_unknown_nodes) == (3 * B * S * D * D + B * S * D * 7, 0)
    unknown = cost_of(tmp_path, [loop], weights(w=(D, D)), [X, value("three", [], TensorProto.INT64)])
    assert unknown.macs == B * S * D * D


def test_functions_of_the_model_are_followed(tmp_path: Path) -> None:
    """With what the call gives them: attributes too."""
    inner = [node("Gemm", "a b", "o")]
    inner[0].attribute.append(helper.make_attribute("alpha", 1.0))
    reference = inner[0].attribute.add(name="transB", type=onnx.AttributeProto.INT)
    reference.ref_attr_name = "flipped"
    opsets = [helper.make_opsetid("", 20)]
    function = helper.make_function("local", "Product", ["a", "b"], ["o"], inner, opsets, ["flipped"])
    call = node("Product", "x w", domain="local", flipped=1)
    inputs = [value("x", ["batch", D])]
    cost = cost_of(tmp_path, [call], weights(w=(3, D)), inputs, functions=[function])
    assert (cost.macs, cost.macs_by_op, cost.num_unknown_nodes) == (B * D * 3, {"Gemm": B * D * 3}, 0)


def test_what_is_not_known_is_told(tmp_path: Path) -> None:
    """Operators of others, and what reads them, are counted as unknown; the rest still counts."""
    nodes = [node("Mystery", "x", "m", domain="local"), node("MatMul", "m w", "n"), node("MatMul", "x w")]
    cost = cost_of(tmp_path, nodes, weights(w=(D, 3)), [X])
    assert cost.macs == B * S * D * 3
    assert (cost.num_unknown_nodes, cost.unknown_ops) == (2, {"MatMul": 1, "local::Mystery": 1})


def test_small_external_numbers_are_read(tmp_path: Path) -> None:
    """A target shape that lies outside the file is known all the same."""
    target = numpy_helper.from_array(np.array([-1, D], np.int64), "target")
    graph = helper.make_graph(
        [node("Reshape", "x target", "r"), node("MatMul", "r w")],
        "g",
        [X],
        [value("y", None)],
        [target, *weights(w=(D, 3))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
    cost = describe_model(tmp_path / "m.onnx", Shape(B, S)).cost
    assert cost is not None
    assert (cost.macs, cost.num_unknown_nodes) == (B * S * D * 3, 0)


def test_a_difference_tells_both_costs(tmp_path: Path) -> None:
    """MACs and memory of the model minus those of the base; without a shape there are none."""
    for name, width in (("base", 3), ("model", 5)):
        graph = helper.make_graph([node("MatMul", "x w")], "g", [X], [value("y", None)], weights(w=(D, width)))
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / f"{name}.onnx")
    paths = tmp_path / "model.onnx", tmp_path / "base.onnx"
    delta = compare_models(*paths, shape=Shape(B, S)).delta
    assert (delta.macs, delta.activation_bytes) == (B * S * D * 2, 4 * B * S * 2)
    assert compare_models(*paths).delta.macs is None


def test_damaged_models_cost_something_or_are_refused(tmp_path: Path) -> None:
    """Neither a wrong equation nor a wrong attribute makes another error than ModelFileError, or never ends."""
    seeds = []
    for call, shapes, _, _ in PRODUCTS.values():
        cost_of(tmp_path, [call], weights(**shapes), [X])
        seeds.append((tmp_path / "model.onnx").read_bytes())
    random_ = random.Random(7)  # noqa: S311  a seed, not a secret
    num_read = 0
    for case in range(400):
        (tmp_path / "model.onnx").write_bytes(mutated(seeds[case % len(seeds)], random_))
        with suppress(ModelFileError):
            cost = describe_model(tmp_path / "model.onnx", Shape(B, S)).cost
            assert cost is not None
            assert cost.macs >= 0
            num_read += 1
    assert num_read > 25


def test_an_equation_that_onnx_never_ends_on_is_unknown(tmp_path: Path) -> None:
    """The inference of onnx for Einsum does not come back from some of them."""
    for equation in ("bsd,dk->bs\xff", "bsd,,dk->bsk", "b.sd,dk->bsk", "bsd->", "bsd,dk->bsq"):
        cost = cost_of(tmp_path, [node("Einsum", "x w", equation=equation)], weights(w=(D, 3)), [X])
        assert cost.num_unknown_nodes == 1
