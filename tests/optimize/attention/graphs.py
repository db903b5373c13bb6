"""Small graphs with an attention in them, in ONNX's own text form, one part of which a test writes anew.

Letters of shapes: B batch, S sequence, H = 2 heads, D = 4 the size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tests.optimize.passes.builders import build, normal

LOWEST = float(np.finfo(np.float32).min)
INPUTS = "float[B, S, 8] x, int64[B, S] attention_mask"
OUTPUTS = "float[B, S, 8] y"
PROJECTIONS = """
    q0 = MatMul(x, wq) q1 = Add(q0, bq) q2 = Reshape(q1, heads) q = Transpose <perm=[0, 2, 1, 3]> (q2)
    k0 = MatMul(x, wk) k1 = Add(k0, bk) k2 = Reshape(k1, heads) k = Transpose <perm=[0, 2, 3, 1]> (k2)
    v0 = MatMul(x, wv) v1 = Add(v0, bv) v2 = Reshape(v1, heads) v = Transpose <perm=[0, 2, 1, 3]> (v2)
"""
SCORES = "scores = MatMul(q, k) scaled = Mul(scores, half)"
WEIGHTING = "p = Softmax <axis=-1> (masked) c = MatMul(p, v)"
RESULT = "t = Transpose <perm=[0, 2, 1, 3]> (c) y = Reshape(t, joined)"
LENGTH = "shape = Shape(x) long = Gather(shape, one_index) range = Range(zero_index, long, one_index)"
PLACES = f"{LENGTH} row = Unsqueeze(range, last) column = Unsqueeze(range, first)"
ADDED_PADDING = "m = Cast <to=1> (attention_mask) n = Unsqueeze(m, outer) o = Sub(one, n) a = Mul(o, lowest)"
PADDING = "real = Cast <to=9> (attention_mask) allowed = Unsqueeze(real, outer)"
# How exporters mask the scores, each with nothing but operators that do so.
MASKINGS = {
    "nothing": "masked = Identity(scaled)",
    "padding": f"{PADDING} masked = Where(allowed, scaled, lowest)",
    "padding, added": f"{ADDED_PADDING} masked = Add(scaled, a)",
    "causal": f"{PLACES} before = LessOrEqual(column, row) masked = Where(before, scaled, lowest)",
    "both": (
        f"{PLACES} before = LessOrEqual(column, row) {PADDING} both = And(allowed, before) "
        "masked = Where(both, scaled, lowest)"
    ),
    "both, one by one": (
        f"{PLACES} before = LessOrEqual(column, row) early = Where(before, scaled, lowest) {PADDING} "
        "masked = Where(allowed, early, lowest)"
    ),
    "both, multiplied": (
        f"{LENGTH} end = Unsqueeze(long, first) rows = Slice(table, first, end, first) "
        "kept = Slice(rows, first, end, last) product = Mul(scaled, kept) dropped = Sub(one, kept) "
        f"low = Mul(dropped, minus) early = Add(product, low) {ADDED_PADDING} masked = Add(early, a)"
    ),
    "window": (
        f"{PLACES} apart = Sub(row, column) far = Abs(apart) near = LessOrEqual(far, window) {PADDING} "
        "both = And(allowed, near) masked = Where(both, scaled, lowest)"
    ),
    "slopes": (
        f"{PLACES} apart = Sub(column, row) far = Cast <to=1> (apart) slope = Mul(far, slopes) "
        "masked = Add(scaled, slope)"
    ),
    "padding, inverted": f"{PADDING} masked = Where(allowed, lowest, scaled)",
}
CONSTANTS: dict[str, NDArray[Any]] = {
    **{f"w{name}": normal(8, 8, seed=number) for number, name in enumerate("qkv")},
    **{f"b{name}": normal(8, seed=number + 3) for number, name in enumerate("qkv")},
    "heads": np.array([0, 0, 2, 4]),
    "joined": np.array([0, 0, 8]),
    "half": np.array(0.5, np.float32),
    "one": np.array(1.0, np.float32),
    "lowest": np.array(LOWEST, np.float32),
    "table": np.tril(np.ones((64, 64), np.float32)),
    "minus": np.array(-1e4, np.float32),
    "window": np.array(3),
    "slopes": np.array([0.5, 0.25], np.float32).reshape(2, 1, 1),
    "zero_index": np.array(0),
    "one_index": np.array(1),
    "first": np.array([0]),
    "last": np.array([1]),
    "outer": np.array([1, 2]),
}


def attention_graph(
    masking: str = MASKINGS["nothing"],
    *,
    before: str = "",
    scores: str = SCORES,
    weighting: str = WEIGHTING,
    inputs: str = INPUTS,
    outputs: str = OUTPUTS,
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> ir.Model:
    """Return a model of one attention whose parts are as given."""
    body = f"{before} {PROJECTIONS} {scores} {masking} {weighting} {RESULT}"
    used = {name: array for name, array in (CONSTANTS | dict(constants or {})).items() if _reads(body, name)}
    return build(f"g ({inputs}) => ({outputs}) {{ {body} }}", used)


def _reads(body: str, name: str) -> bool:
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return name in words


def ragged_feeds(length: int = 9) -> dict[str, NDArray[Any]]:
    """Return hidden states and a mask of rows that are padded right, padded left, with a hole, and whole."""
    mask = np.ones((4, length), np.int64)
    mask[0, length - 3 :] = mask[1, :4] = mask[2, 3:5] = 0
    return {"x": normal(4, length, 8, seed=9), "attention_mask": mask}
