"""A factor of each row leaves a wide gradient for the narrow values around it, and nothing but the time changes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import pytest

from onnxtool.graph.shapes import infer_types
from onnxtool.training.graphs.rows import take_out_row_factors
from tests.autodiff.gradients import run_onnxruntime

ROWS, COLUMNS, WIDTH = 6, 11, 4


def head(factor: str, reader: str = "", width: int = WIDTH) -> ir.Model:
    """Make the gradients of a layer of `width` inputs and 11 outputs, with the given factor and one more reader."""
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    graph (float[{ROWS},{COLUMNS}] g, float[{ROWS},{width}] x, float[{width},{COLUMNS}] w, float{factor} s)
        => (float[{ROWS},{width}] dx, float[{width},{COLUMNS}] dw, float[{COLUMNS},{width}] dv, float[{COLUMNS}] db)
        <int64[1] zero = {{0}}, int64[2] flat = {{-1, {COLUMNS}}}> {{
        m = Mul(g, s)
        f = Reshape(m, flat)
        dx = Gemm<transB=1>(f, w)
        dw = Gemm<transA=1>(x, m)
        dv = Gemm<transA=1>(m, x)
        db = ReduceSum<keepdims=0>(m, zero)
        {reader}
    }}"""
    model = ir.from_onnx_text(text)
    for node in model.graph:
        node.name = f"gradient/{node.outputs[0].name}"
    infer_types(model)
    return model


def feeds(model: ir.Model) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        str(value.name): draw.standard_normal(value.shape.numpy()).astype(np.float32)
        for value in model.graph.inputs
        if value.shape is not None
    }


def is_scaled(model: ir.Model) -> bool:
    """Return whether anything multiplies the wide gradient elementwise."""
    return any(node.op_type == "Mul" and "g" in [value.name for value in node.inputs if value] for node in model.graph)


@pytest.mark.parametrize("factor", ["", f"[{ROWS},1]"], ids=["number", "rows"])
def test_products_and_sums_are_the_same_without_the_wide_product(factor: str) -> None:
    """Three kinds of Gemm, one behind a Reshape, and the sum over the rows."""
    before, after = head(factor), head(factor)
    assert take_out_row_factors(after.graph)
    common.RemoveUnusedNodesPass()(after)
    assert not is_scaled(after)
    expected, found = (run_onnxruntime(ir.to_proto(model), feeds(model)) for model in (before, after))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)  # float32, in another order


@pytest.mark.parametrize(
    ("reader", "width"), [("other = Relu(m)", WIDTH), ("", COLUMNS + 1)], ids=["another reader", "no narrower value"]
)
def test_the_product_stays_where_it_is_needed_or_not_the_widest(reader: str, width: int) -> None:
    """Another reader needs it anyway, and beside a wider value the factor costs less where it is."""
    model = head("", reader, width=width)
    assert not take_out_row_factors(model.graph)
    assert is_scaled(model)


def test_one_number_a_column_is_no_factor_of_rows() -> None:
    """It does not come out of a product over the columns."""
    assert not take_out_row_factors(head(f"[{COLUMNS}]").graph)
