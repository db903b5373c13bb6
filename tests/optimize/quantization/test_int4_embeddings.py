"""Embedding tables in blocks of 4 bits."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtool.optimize.quantization.blocks import find_grid
from onnxtool.optimize.quantization.int4 import int4_embeddings, quantize_int4
from tests.optimize.passes.builders import (
    Row,
    apply,
    build,
    normal,
    of_text,
    operators,
    run,
)
from tests.optimize.quantization.test_blocks import dequantize
from tests.optimize.quantization.test_int8_embeddings import FUSED, FUSED_FEEDS, GATHER, IDS, OF_COLUMNS, TABLE, WEIGHTS

INT4 = int4_embeddings()
TIED = (
    "g (int64[B, S] i) => (float[B, S, H] e, float[B, S, V] y) "
    "{ e = Gather(w, i) y = com.microsoft.FusedMatMul<transB=1>(e, w) }"
)


@pytest.mark.parametrize("width", [16, 64, 72])
def test_rows_are_looked_up_in_blocks(width: int) -> None:
    """The numbers are those of NumPy, to the last bit; 72 is no multiple of a block, which the file does not pad."""
    table = normal(2000, width)
    model = build(GATHER.replace("16", str(width)), {"t": table})
    assert apply(INT4, model).num_changes == 1
    assert operators(model) == ["GatherBlockQuantized"]
    assert sorted(model.graph.initializers) == ["t_rows_int4_blocks", "t_rows_int4_scale", "t_rows_int4_zero"]
    assert list(model.graph.initializers["t_rows_int4_blocks"].shape or ()) == [2000, width // 2]
    expected = dequantize(table.T, find_grid(table.T, 4)).T[IDS]
    np.testing.assert_array_equal(run(model, {"i": IDS})[0], expected)


def test_a_fused_embedding_is_opened() -> None:
    """The numbers are those of the fused one on the rounded table."""
    model = build(FUSED, WEIGHTS)
    exact = dequantize(TABLE.T, find_grid(TABLE.T, 4)).T.copy()
    expected = run(build(FUSED, {**WEIGHTS, "t": exact}), FUSED_FEEDS)[0]
    assert apply(INT4, model).num_changes == 1
    assert "EmbedLayerNormalization" not in operators(model)
    # Values around 1, normalized in another order.
    np.testing.assert_allclose(run(model, FUSED_FEEDS)[0], expected, atol=1e-5, rtol=0)


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
    exact = dequantize(table.T, find_grid(table.T, bits)).T
    np.testing.assert_array_equal(rows, exact[IDS])
    np.testing.assert_allclose(logits, rows @ exact.T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layer", ["MatMul(e, w)", "com.microsoft.FusedMatMul<transB=1>(e, w)"])
def test_rows_of_a_square_table_are_its_own(layer: str) -> None:
    """A head that reads it as it lies has its columns in blocks, in as many bytes."""
    table = normal(1024, 1024)
    graph = f"g (int64[S] i) => (float[S, 1024] e, float[S, 1024] y) {{ e = Gather(w, i) y = {layer} }}"
    model = build(graph, {"w": table})
    apply(quantize_int4(provider="cuda"), model)
    assert apply(INT4, model).num_changes == 1
    ids = np.array([3, 1023])
    exact = dequantize(table.T, find_grid(table.T, 4)).T
    np.testing.assert_array_equal(run(model, {"i": ids})[0], exact[ids])


def test_blocks_that_are_padded_are_not_shared() -> None:
    """The head's rows have bytes between them that the lookup has not."""
    model = build(TIED, {"w": normal(2000, 72)})
    apply(quantize_int4(), model)
    assert apply(INT4, model).num_changes == 1
    assert {"w_int4_blocks", "w_rows_int4_blocks"} <= set(model.graph.initializers)


ROW = Row(
    INT4,
    fires={"Gather": of_text(GATHER, {"t": TABLE}), "fused": of_text(FUSED, WEIGHTS)},
    atol=None,
    stays={
        # Such as a head that is kept in float32: a second copy would only add to the size.
        "a table that others read": (of_text(TIED, {"w": normal(2000, 64)}), ""),
        "a small table": (of_text(GATHER, {"t": TABLE[:100]}), ""),
        # Two codes share a byte, and a row begins with one of its own.
        "an odd width": (of_text(GATHER.replace("16", "15"), {"t": TABLE[:, :15].copy()}), "odd width"),
        "columns": OF_COLUMNS,
    },
)
