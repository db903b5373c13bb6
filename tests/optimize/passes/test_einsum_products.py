"""Einsums that are matrix products, and those that are not.

Sizes of the letters: b 2, i 3, j 4, h 8, n 2, d 5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.passes.products import einsum_products
from tests.optimize.passes.builders import (
    Arrays,
    assert_left_alone,
    assert_same_numbers,
    build,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

SIZES = {"b": 2, "i": 3, "j": 4, "h": 8, "n": 2, "d": 5}
MOVING = "bij"  # axes of inputs that are dynamic


def einsum(equation: str, *, weight: bool = False) -> ir.Model:
    """Return a model of one Einsum, of two inputs or of one and a weight."""
    terms, result = equation.replace(" ", "").split("->")
    names = dict(zip("xy", terms.split(","), strict=False))
    given = {name: axes for name, axes in names.items() if not (weight and name == "y")}
    inputs = ", ".join(f"float[{_axes(axes)}] {name}" for name, axes in given.items())
    text = f'g ({inputs}) => (float[{_axes(result)}] z) {{ z = Einsum <equation="{equation}"> ({", ".join(names)}) }}'
    weights = {"y": normal(*(SIZES[axis] for axis in names["y"]), seed=2)} if weight else {}
    return build(text, weights)


def _axes(letters: str) -> str:
    return ", ".join(letter.upper() if letter in MOVING else str(SIZES[letter]) for letter in letters)


def feeds(equation: str, *, weight: bool = False) -> Arrays:
    """Return numbers for the inputs, whose axes have the sizes of their letters."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    return {
        name: normal(*(SIZES[axis] for axis in axes), seed=seed)
        for seed, (name, axes) in enumerate(zip("xy", terms, strict=False))
        if not (weight and name == "y")
    }


PRODUCTS = {
    "as it is": ("bih,bhj->bij", False, ["MatMul"]),
    "scores": ("ibnd,jbnd->bnij", False, ["Transpose", "Transpose", "MatMul"]),
    "values": ("bnij,jbnd->ibnd", False, ["Transpose", "MatMul", "Transpose"]),
    "a batch in another order": ("bnid, nbjd -> nbji", False, ["Transpose", "MatMul"]),
    "rows of the second first": ("bjnd,bind->bnij", False, ["Transpose", "Transpose", "MatMul"]),
    "a layer to heads": ("ibh,hnd->ibnd", True, ["MatMul", "Reshape"]),
    "a layer from heads": ("ibnd,hnd->ibh", True, ["Reshape", "MatMul"]),
    "a layer from heads in another order": ("idbn,nhd->bhi", True, ["Transpose", "Reshape", "MatMul", "Transpose"]),
    "a matrix": ("bih,hd->bid", True, ["MatMul"]),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_is_a_matmul(product: str) -> None:
    """Against the Einsum of onnxruntime."""
    equation, weight, expected = PRODUCTS[product]
    model = einsum(equation, weight=weight)
    assert_same_numbers(einsum_products, model, feeds(equation, weight=weight))
    assert operators(model) == expected


@pytest.mark.parametrize(
    ("equation", "weight"),
    [
        ("bnid,bnid->bnd", False),
        ("bih,bhj->ij", False),
        ("bih,jd->bij", False),
        ("bii,bij->bij", False),
        ("bih,bhnd->bind", False),
        ("...ih,...hj->...ij", False),
        ("bih->bhi", False),
        ("bid,bdh->bih", True),
        ("bih,bj->bihj", False),
    ],
)
def test_what_is_no_matrix_product_stays(equation: str, weight: bool) -> None:
    """A sum of one side, a diagonal, several columns of what is computed, an ellipsis, a weight with a batch."""
    if "..." in equation:
        text = f'g (float[B, I, 8] x, float[B, 8, J] y) => (float z) {{ z = Einsum <equation="{equation}"> (x, y) }}'
        assert_left_alone(einsum_products, build(text))
    else:
        assert_left_alone(einsum_products, einsum(equation, weight=weight))


def test_an_axis_of_one_that_a_letter_stretches_stays() -> None:
    """ONNX's letters have one size each, and onnxruntime takes 1 for any: MatMul would not for the summed ones."""
    text = 'g (float[B, I, 8] x, float[B, 1, J] y) => (float z) { z = Einsum <equation="bih,bhj->bij"> (x, y) }'
    assert_left_alone(einsum_products, build(text))


def test_an_attention_that_is_written_in_einsums_is_fused() -> None:
    """With positions that are a product of their own, and axes in the order of XLNet: S, B, H, D."""
    body = """
        q0 = Einsum <equation="ibh,hnd->ibnd"> (x, wq) k = Einsum <equation="ibh,hnd->ibnd"> (x, wk)
        v = Einsum <equation="ibh,hnd->ibnd"> (x, wv) q1 = Add(q0, bq) q2 = Add(q0, br)
        content = Einsum <equation="ibnd,jbnd->bnij"> (q1, k) places = Einsum <equation="ibnd,jbnd->bnij"> (q2, r)
        sum = Add(content, places) masked = Mul(sum, fifth) p = Softmax <axis=3> (masked)
        c = Einsum <equation="bnij,jbnd->ibnd"> (p, v) y = Einsum <equation="ibnd,hnd->ibh"> (c, wo)
    """
    weights = {f"w{name}": normal(8, 2, 5, seed=seed) for seed, name in enumerate("qkvo")}
    weights |= {"bq": normal(2, 5, seed=5), "br": normal(2, 5, seed=6), "fifth": normal(1, seed=7)}
    model = build(f"g (float[S, B, 8] x, float[S, B, 2, 5] r) => (float[S, B, 8] y) {{ {body} }}", weights)
    given = {"x": normal(7, 3, 8, seed=8), "r": normal(7, 3, 2, 5, seed=9)}
    assert_same_numbers(einsum_products, model, given, atol=1e-4)
    assert_same_numbers(attention, model, given, atol=1e-4)  # sums of eight numbers around 20
    assert "MultiHeadAttention" in operators(model)
    assert not {"Einsum", "Softmax"} & set(operators(model))


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "a mask of tokens"])
def test_an_attention_of_keras_is_fused(masked: bool) -> None:
    """MultiHeadAttention as tf2onnx writes it: B, S, H, D, with the scores as keys by queries."""
    padding = "m = Cast <to=1> (mask) n = Unsqueeze(m, outer) o = Sub(one, n) a = Mul(o, minus) s = Add(s0, a)"
    body = f"""
        q0 = Einsum <equation="abc,cde->abde"> (x, wq) q1 = Add(q0, bq) q = Mul(q1, fifth)
        k0 = Einsum <equation="abc,cde->abde"> (x, wk) k = Add(k0, bk)
        v0 = Einsum <equation="abc,cde->abde"> (x, wv) v = Add(v0, bv)
        s0 = Einsum <equation="aecd,abcd->acbe"> (k, q) {padding if masked else "s = Identity(s0)"}
        p = Softmax <axis=-1> (s) c = Einsum <equation="acbe,aecd->abcd"> (p, v)
        y0 = Einsum <equation="abcd,cde->abe"> (c, wo) y = Add(y0, bo)
    """
    weights = {f"w{name}": normal(8, 2, 5, seed=seed) for seed, name in enumerate("qkv")}
    weights |= {f"b{name}": normal(2, 5, seed=seed) for seed, name in enumerate("qkv", 5)}
    weights |= {"wo": normal(2, 5, 8, seed=3), "bo": normal(8, seed=4), "fifth": np.array(0.2, np.float32)}
    if masked:
        weights |= {"one": np.array(1, np.float32), "minus": np.array(-1e9, np.float32), "outer": np.array([1, 2])}
    inputs = "float[B, S, 8] x" + ", int64[B, S] mask" * masked
    model = build(f"g ({inputs}) => (float[B, S, 8] y) {{ {body} }}", weights)
    given: dict[str, Any] = {"x": normal(3, 7, 8, seed=8)}
    if masked:
        given["mask"] = (np.arange(7) < np.array([7, 4, 0])[:, None]).astype(np.int64)
    assert_same_numbers(einsum_products, model, given, atol=1e-4)
    assert_same_numbers(attention, model, given, atol=1e-4)  # sums of eight numbers around 20
    assert "MultiHeadAttention" in operators(model)
    assert not {"Einsum", "Softmax"} & set(operators(model))


ROW = Row(
    einsum_products,
    {name: partial(einsum, equation, weight=weight) for name, (equation, weight, _) in PRODUCTS.items()},
    atol=None,
)
