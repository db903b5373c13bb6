"""Shapes and types behind onnxruntime's operators, against the outputs of onnxruntime itself."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.shapes import fill_types, find_shapes
from tests.optimize.passes.builders import Arrays, build, normal, run

WEIGHTS: Arrays = {
    "w": normal(8),
    "b": normal(8),
    "m": normal(4, 8),
    "qkv": normal(8, 24),
    "bias": normal(24),
    "table": normal(30, 8),
    "ids": np.zeros((2, 3), np.int32),
}
BODIES = {
    "Gelu": "y = com.microsoft.Gelu(x)",
    "FastGelu": "y = com.microsoft.FastGelu(x, b)",
    "BiasGelu": "y = com.microsoft.BiasGelu(x, b)",
    "QuickGelu": "y = com.microsoft.QuickGelu <alpha=1.702> (x)",
    "SimplifiedLayerNormalization": "y = SimplifiedLayerNormalization <axis=-1, stash_type=1> (x, w)",
    "SkipLayerNormalization": "y = com.microsoft.SkipLayerNormalization(x, x, w, b)",
    "FusedMatMul": "y = com.microsoft.FusedMatMul <transB=1> (x, m)",
    "Attention": "y = com.microsoft.Attention <num_heads=2> (x, qkv, bias)",
    "MultiHeadAttention": "y = com.microsoft.MultiHeadAttention <num_heads=2> (x, x, x)",
}


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("name", BODIES)
def test_the_shape_behind_an_operator_is_that_of_its_output(name: str, opset: int) -> None:
    """In each probe, and behind a standard operator that follows."""
    model = build(f"g (float[B, S, 8] x) => (float z) {{ {BODIES[name]} z = Neg(y) }}", WEIGHTS, opset)
    shapes = find_shapes(model)
    for probe, sizes in enumerate(shapes.probes[:2]):
        (found,) = run(model, {"x": normal(sizes["B"], sizes["S"], 8)})
        assert shapes.of(model.graph[-1].outputs[0], probe) == found.shape


def test_an_embedding_is_as_wide_as_its_table() -> None:
    """And as long as its ids."""
    body = "y, n = com.microsoft.EmbedLayerNormalization(ids, , table, table, , w, b) z = Neg(y)"
    model = build(f"g (int32[2, 3] ids) => (float z) {{ {body} }}", {k: v for k, v in WEIGHTS.items() if k != "ids"})
    assert find_shapes(model).of(model.graph[-1].outputs[0]) == (2, 3, 8)
    assert run(model, {"ids": WEIGHTS["ids"]})[0].shape == (2, 3, 8)


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


def test_attention_over_a_cache_is_as_large_as_its_queries() -> None:
    """Its keys and values have an axis of heads."""
    text = (
        "g (float[B, S, 8] x, float[B, 2, P, 4] past) => (float[B, 2, T, 4] keys, float z) "
        "<int64[4] heads = {0, 0, 2, 4}> { "
        "r = Reshape(x, heads) k = Transpose <perm=[0, 2, 1, 3]> (r) keys = Concat <axis=2> (past, k) "
        "y = com.microsoft.MultiHeadAttention <num_heads=2> (x, keys, keys) z = Neg(y) }"
    )
    model = build(text)
    sizes = find_shapes(model).probes[0]
    feeds = {"x": normal(sizes["B"], sizes["S"], 8), "past": normal(sizes["B"], 2, sizes["P"], 4)}
    assert find_shapes(model).of(model.graph[-1].outputs[0]) == run(model, feeds)[1].shape
    assert find_shapes(model).dtype(model.graph[-1].outputs[0]) == np.float32
