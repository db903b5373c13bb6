"""int8 with fixed ranges behind normalizations, and a scale per row elsewhere: the default."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtool.optimize.quantization.arithmetic import Floats
from onnxtool.optimize.quantization.int8 import to_int8
from tests.optimize.passes.builders import Arrays, build, count, normal, run, run_as_stored

WIDTH = 64
BODY = "n = LayerNormalization(x, s, t) p = MatMul(n, w) b = Add(p, c) q = Gelu(b) y = MatMul(q, v)"


def layers() -> ir.Model:
    """Return a layer behind a normalization, and one behind a function."""
    weights: Arrays = {
        "s": 1 + normal(WIDTH, seed=1) / 10,
        "t": normal(WIDTH, seed=2) / 10,
        "w": normal(WIDTH, WIDTH, seed=3) / 8,
        "c": normal(WIDTH, seed=4),
        "v": normal(WIDTH, WIDTH, seed=5) / 8,
    }
    return build(f"g (float[B, S, {WIDTH}] x) => (float[B, S, {WIDTH}] y) {{ {BODY} }}", weights, 20)


def rows(seed: int = 0) -> Floats:
    """Return rows of very different sizes, which a normalization makes alike."""
    sizes = np.array([1, 3, 10, 0.1, 30, 2], np.float32)
    return normal(2, 6, WIDTH, seed=seed) * sizes[:, None]


def test_what_a_normalization_gives_has_a_fixed_range() -> None:
    """No operators for rows are in front of that product, and its bias is inside."""
    result = to_int8(layers(), [{"x": rows()}]).outcome.model
    assert (count(result, "QuantizeLinear"), count(result, "ReduceMax")) == (2, 1)
    assert count(to_int8(layers(), [{"x": rows()}], activations="per_row").outcome.model, "ReduceMax") == 2


def test_rows_that_differ_behind_a_normalization_keep_a_scale_each() -> None:
    """A few have all of their length in one channel, each in another, and most are spread evenly."""
    x = np.concatenate([np.eye(WIDTH, dtype=np.float32)[None], np.sign(normal(9, WIDTH, WIDTH, seed=6))])
    result = to_int8(layers(), [{"x": x}], activations="mixed").outcome.model
    assert count(result, "ReduceMax") == 2


def test_the_error_is_nearly_that_of_rows_on_inputs_that_nothing_was_calibrated_on() -> None:
    """And the answer for a row is the same to the last bit, whatever else is in the batch."""
    model, feeds, others = layers(), [{"x": rows()}], rows(seed=9)
    wanted = run(model, {"x": others})[0]
    errors = {}
    for activations in ("mixed", "per_row"):
        found = to_int8(model, feeds, activations=activations).outcome.model
        y = run_as_stored(found, {"x": others})[0]
        errors[activations] = float(np.square(y - wanted).mean())
        alone = run_as_stored(found, {"x": others[:1]})[0]
        assert np.array_equal(alone, y[:1])
    assert 0 < errors["mixed"] < 2.5 * errors["per_row"] < 1e-3
