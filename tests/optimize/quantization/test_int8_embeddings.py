"""Embedding tables in int8."""

from __future__ import annotations

import numpy as np

from onnxtool.optimize.quantization.arithmetic import Floats, quantize_weight
from onnxtool.optimize.quantization.int8 import int8_embeddings
from tests.optimize.passes.builders import (
    Arrays,
    Row,
    apply,
    build,
    normal,
    of_text,
    operators,
    run,
)

TABLE = normal(2000, 16) * np.linspace(0.01, 3, 2000, dtype=np.float32)[:, None]
GATHER = "g (int64[B, S] i) => (float[B, S, 16] y) { y = Gather(t, i) }"
FUSED = (
    "g (int32[B, S] i, int32[B, S] j, int32[N, S] k) => (float[B, S, 16] y) { "
    "y, m = com.microsoft.EmbedLayerNormalization<epsilon=1e-12>(i, j, t, p, s, gamma, beta, , k) }"
)
WEIGHTS: Arrays = {
    "t": TABLE,
    "p": normal(9, 16, seed=1),
    "s": normal(2, 16, seed=2),
    "gamma": normal(16, seed=3),
    "beta": normal(16, seed=4),
}
IDS = np.array([[3, 1999, 0], [77, 3, 512]])
FUSED_FEEDS: Arrays = {
    "i": IDS.astype(np.int32),
    "j": np.array([[0, 1, 1], [0, 0, 1]], np.int32),
    "k": np.array([[4, 0, 8]], np.int32),
}


def rounded(table: Floats) -> Floats:
    """Return the values of a table in int8, with a scale per row."""
    codes, scale = quantize_weight(table.T)
    return np.ascontiguousarray((codes * scale).T)


def test_rows_are_looked_up_in_int8() -> None:
    """And their scales with them; the numbers are those of a simulation, but for the rounding of one layer."""
    model = build(GATHER, {"t": TABLE})
    assert apply(int8_embeddings, model).num_changes == 1
    assert operators(model) == ["Gather", "Gather", "Cast", "Mul"]
    assert sorted(model.graph.initializers) == ["t_rows_int8", "t_rows_scale"]
    np.testing.assert_allclose(run(model, {"i": IDS})[0], rounded(TABLE)[IDS], rtol=1e-6, atol=0)


def test_a_fused_embedding_is_opened() -> None:
    """The numbers are those of the fused one on the rounded table."""
    model = build(FUSED, WEIGHTS)
    expected = run(build(FUSED, {**WEIGHTS, "t": rounded(TABLE)}), FUSED_FEEDS)[0]
    assert apply(int8_embeddings, model).num_changes == 1
    assert "EmbedLayerNormalization" not in operators(model)
    # Values around 1, normalized in another order.
    np.testing.assert_allclose(run(model, FUSED_FEEDS)[0], expected, atol=1e-5, rtol=0)


OF_COLUMNS = (
    of_text("g (int64[S] i) => (float[2000, S] y) { y = Gather<axis=1>(t, i) }", {"t": TABLE}),
    "the lookup is not one of rows",
)
ROW = Row(
    int8_embeddings,
    fires={"Gather": of_text(GATHER, {"t": TABLE}), "fused": of_text(FUSED, WEIGHTS)},
    atol=None,
    stays={
        # Such as a head that it is tied to and that is kept in float32: a second copy would only add to the size.
        "a table that others read": (
            of_text(
                "g (int64[B, S] i, float[B, 16] x) => (float[B, S, 16] y, float[B, V] z) "
                "{ y = Gather(t, i) z = Gemm<transB=1>(x, t) }",
                {"t": TABLE},
            ),
            "",
        ),
        "a small table": (of_text(GATHER, {"t": TABLE[:100]}), ""),
        "a narrow table": (of_text(GATHER.replace("16", "4"), {"t": TABLE[:, :4].copy()}), ""),
        "half precision": (of_text(GATHER.replace("float", "float16"), {"t": TABLE.astype(np.float16)}), ""),
        "columns": OF_COLUMNS,
        # There is nothing to look positions up with that are counted.
        "counted positions": (of_text(FUSED.replace(", , k)", ")"), WEIGHTS), "no input of position ids"),
    },
)
