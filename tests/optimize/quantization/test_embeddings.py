"""Embedding tables in int8, and in blocks of 4 bits."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtool.optimize.pipeline import Pass
from onnxtool.optimize.quantization.arithmetic import PLAIN, Floats
from onnxtool.optimize.quantization.int4 import find_grid, int4_embeddings, quantize_int4
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
from tests.optimize.quantization.test_blocks import dequantize

INT4 = int4_embeddings()
TABLE = normal(2000, 16) * np.linspace(0.01, 3, 2000, dtype=np.float32)[:, None]
GATHER = "g (int64[B, S] i) => (float[B, S, 16] y) { y = Gather(t, i) }"
FUSED = (
    "g (int32[B, S] i, int32[B, S] j, int32[N, S] k) => (float[B, S, 16] y) { "
    "y, m = com.microsoft.EmbedLayerNormalization<epsilon=1e-12>(i, j, t, p, s, gamma, beta, , k) }"
)
TIED = (
    "g (int64[B, S] i) => (float[B, S, H] e, float[B, S, V] y) "
    "{ e = Gather(w, i) y = com.microsoft.FusedMatMul<transB=1>(e, w) }"
)
WEIGHTS: Arrays = {
    "t": TABLE,
    "p": normal(9, 16, seed=1),
    "s": normal(2, 16, seed=2),
    "gamma": normal(16, seed=3),
    "beta": normal(16, seed=4),
}
IDS = np.array([[3, 1999, 0], [77, 3, 512]])


def in_int8(table: Floats) -> Floats:
    """Return the values of a table in int8, with a scale per row."""
    codes, scale = PLAIN.quantize(table.T, exact=True)
    return np.ascontiguousarray((codes * scale).T)


def in_blocks(table: Floats, bits: int = 4) -> Floats:
    """Return the values of a table in blocks along its rows."""
    return np.ascontiguousarray(dequantize(table.T, find_grid(table.T, bits)).T)


def test_rows_are_looked_up_in_int8() -> None:
    """And their scales with them; the numbers are those of a simulation, but for the rounding of one layer."""
    model = build(GATHER, {"t": TABLE})
    assert apply(int8_embeddings, model).num_changes == 1
    assert operators(model) == ["Gather", "Gather", "Cast", "Mul"]
    assert sorted(model.graph.initializers) == ["t_rows_int8", "t_rows_scale"]
    np.testing.assert_allclose(run(model, {"i": IDS})[0], in_int8(TABLE)[IDS], rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [16, 64, 72])
def test_rows_are_looked_up_in_blocks(width: int) -> None:
    """The numbers are those of NumPy, to the last bit; 72 is no multiple of a block, which the file does not pad."""
    table = normal(2000, width)
    model = build(GATHER.replace("16", str(width)), {"t": table})
    assert apply(INT4, model).num_changes == 1
    assert operators(model) == ["GatherBlockQuantized"]
    assert sorted(model.graph.initializers) == ["t_rows_int4_blocks", "t_rows_int4_scale", "t_rows_int4_zero"]
    assert list(model.graph.initializers["t_rows_int4_blocks"].shape or ()) == [2000, width // 2]
    np.testing.assert_array_equal(run(model, {"i": IDS})[0], in_blocks(table)[IDS])


@pytest.mark.parametrize(("step", "table"), [(int8_embeddings, in_int8(TABLE)), (INT4, in_blocks(TABLE))])
def test_a_fused_embedding_is_opened(step: Pass, table: Floats) -> None:
    """The numbers are those of the fused one on the rounded table."""
    feeds = {"i": IDS, "j": np.array([[0, 1, 1], [0, 0, 1]]), "k": np.array([[4, 0, 8]])}
    feeds = {name: array.astype(np.int32) for name, array in feeds.items()}
    model = build(FUSED, WEIGHTS)
    expected = run(build(FUSED, {**WEIGHTS, "t": table}), feeds)[0]
    assert apply(step, model).num_changes == 1
    assert "EmbedLayerNormalization" not in operators(model)
    # Values around 1, normalized in another order.
    np.testing.assert_allclose(run(model, feeds)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kept", "bits"), [({}, 4), ({"w": "int8"}, 8)])
def test_a_table_that_a_head_has_in_blocks_is_read_there(kept: dict[str, str], bits: int) -> None:
    """It is in the file once, and both see the same numbers."""
    table = normal(2000, 64)
    model = build(TIED, {"w": table})
    apply(quantize_int4(kept, provider="cuda"), model)
    assert apply(INT4, model).num_changes == 1
    assert operators(model) == ["Reshape", "GatherBlockQuantized", "MatMulNBits"]
    blocks = {name for name in model.graph.initializers if name.endswith("blocks")}
    assert blocks == {f"w_int{bits}_blocks"}
    rows, logits = run(model, {"i": IDS})
    np.testing.assert_array_equal(rows, in_blocks(table, bits)[IDS])
    np.testing.assert_allclose(logits, rows @ in_blocks(table, bits).T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layer", ["MatMul(e, w)", "com.microsoft.FusedMatMul<transB=1>(e, w)"])
def test_rows_of_a_square_table_are_its_own(layer: str) -> None:
    """A head that reads it as it lies has its columns in blocks, in as many bytes."""
    table, ids = normal(1024, 1024), np.array([3, 1023])
    graph = f"g (int64[S] i) => (float[S, 1024] e, float[S, 1024] y) {{ e = Gather(w, i) y = {layer} }}"
    model = build(graph, {"w": table})
    apply(quantize_int4(provider="cuda"), model)
    assert apply(INT4, model).num_changes == 1
    np.testing.assert_array_equal(run(model, {"i": ids})[0], in_blocks(table)[ids])


def test_blocks_that_are_padded_are_not_shared() -> None:
    """The head's rows have bytes between them that the lookup has not."""
    model = build(TIED, {"w": normal(2000, 72)})
    apply(quantize_int4(), model)
    assert apply(INT4, model).num_changes == 1
    assert {"w_int4_blocks", "w_rows_int4_blocks"} <= set(model.graph.initializers)


FIRES = {"Gather": of_text(GATHER, {"t": TABLE}), "fused": of_text(FUSED, WEIGHTS)}
STAYS = {
    # Such as a head that it is tied to and that is kept in float32: a second copy would only add to the size.
    "a table that others read": (of_text(TIED, {"w": normal(2000, 64)}), ""),
    "a small table": (of_text(GATHER, {"t": TABLE[:100]}), ""),
    "columns": (
        of_text("g (int64[S] i) => (float[2000, S] y) { y = Gather<axis=1>(t, i) }", {"t": TABLE}),
        "the lookup is not one of rows",
    ),
}
ROWS = (
    Row(
        int8_embeddings,
        fires=FIRES,
        atol=None,
        stays={
            **STAYS,
            "a narrow table": (of_text(GATHER.replace("16", "4"), {"t": TABLE[:, :4].copy()}), ""),
            "half precision": (of_text(GATHER.replace("float", "float16"), {"t": TABLE.astype(np.float16)}), ""),
            # There is nothing to look positions up with that are counted.
            "counted positions": (of_text(FUSED.replace(", , k)", ")"), WEIGHTS), "no input of position ids"),
        },
    ),
    Row(
        INT4,
        fires=FIRES,
        atol=None,
        # Two codes share a byte, and a row begins with one of its own.
        stays=STAYS | {"an odd width": (of_text(GATHER.replace("16", "15"), {"t": TABLE[:, :15].copy()}), "odd width")},
    ),
)
