"""The forms of Gelu that exporters write, what only looks like one, and the bias in front."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.gelu import bias_gelu, gelu
from tests.optimize.passes.builders import (
    Row,
    apply,
    as_type,
    assert_same_numbers,
    build_body,
    count,
    normal,
    of_body,
    of_text,
    ragged_feeds,
)
from tests.workshop import Workshop

NUMBERS = {
    name: np.array(number, np.float32)
    for name, number in {
        "half": 0.5,
        "one": 1.0,
        "two": 2.0,
        "three": 3.0,
        "root": 2**0.5,
        "inverse": 0.5**0.5,
        "outer": (2 / np.pi) ** 0.5,
        "inner": 0.044715,
        "slope": 1.702,
    }.items()
}
CUBE = "c = Pow(x, three) k = Mul(c, inner) a = Add(x, k) u = Mul(a, outer)"
PRODUCT = "s = Mul(x, x) c = Mul(s, x) k = Mul(inner, c) a = Add(k, x) u = Mul(outer, a)"
BLOOM = "p = Mul(x, outer) q = Mul(x, inner) r = Mul(q, x) s = Add(r, one) u = Mul(p, s)"
GATE = "t = Tanh(u) g = Add(t, one)"
FORMS = {
    "torchscript": ("Gelu", "u = Div(x, root) e = Erf(u) g = Add(e, one) h = Mul(x, g) y = Mul(h, half)"),
    "half first": ("Gelu", "h = Mul(half, x) u = Mul(inverse, x) e = Erf(u) g = Add(one, e) y = Mul(g, h)"),
    "half on the gate": ("Gelu", "u = Mul(x, inverse) e = Erf(u) g = Add(e, one) h = Mul(g, half) y = Mul(x, h)"),
    "division by two": ("Gelu", "h = Div(x, two) u = Div(x, root) e = Erf(u) g = Add(e, one) y = Mul(h, g)"),
    "tanh of a power": ("FastGelu", f"{CUBE} {GATE} h = Mul(x, half) y = Mul(h, g)"),
    "tanh of products": ("FastGelu", f"{PRODUCT} {GATE} h = Mul(x, g) y = Mul(half, h)"),
    "tanh as in Bloom": ("FastGelu", f"h = Mul(x, half) {BLOOM} {GATE} y = Mul(h, g)"),
    "sigmoid": ("QuickGelu", "u = Mul(x, slope) e = Sigmoid(u) y = Mul(x, e)"),
}
ERF = FORMS["torchscript"][1]
# A branch of If sees the values around it.
BRANCHES = (
    "then_branch = t () => (float[B, S, 8] p) { p = Identity(g) }, "
    "else_branch = f () => (float[B, S, 8] q) { q = Identity(x) }"
)
INNER = "an inner value is read elsewhere"
BIAS = {"b": normal(8)}
BIASED = {
    "BiasGelu": "s = Add(x, b) y = com.microsoft.Gelu(s)",
    "FastGelu": "s = Add(b, x) y = com.microsoft.FastGelu(s)",
}
ROWS = (
    Row(
        gelu,
        fires={
            **{name: of_body(body, NUMBERS) for name, (_, body) in FORMS.items()},
            "of ONNX": of_body('y = Gelu <approximate="none"> (x)', opset=20),
            "of ONNX, by tanh": of_body('y = Gelu <approximate="tanh"> (x)', opset=20),
        },
        after={
            **{name: operator for name, (operator, _) in FORMS.items()},
            "of ONNX": "Gelu",
            "of ONNX, by tanh": "FastGelu",
        },
        stays={
            # Each of the three constants, off by a percent.
            **{
                f"another {name}": (of_body(ERF, {**NUMBERS, name: np.float32(1.01) * NUMBERS[name]}), "")
                for name in ("half", "one", "root")
            },
            "gate and factor of different values": (
                of_body("u = Mul(x, slope) e = Sigmoid(u) y = Mul(u, e)", NUMBERS),
                "",
            ),
            "SiLU": (of_body("e = Sigmoid(x) y = Mul(x, e)"), ""),
            "twice Gelu": (of_body("u = Div(x, root) e = Erf(u) g = Add(e, one) y = Mul(x, g)", NUMBERS), ""),
            "of a square": (of_body(f"d = Mul(x, x) {CUBE} {GATE} h = Mul(d, half) y = Mul(h, g)", NUMBERS), ""),
            "an inner value is read": (
                of_body(f"{ERF.replace('y =', 'z =')} y = Add(z, e)", NUMBERS),
                f"1 left alone: {INNER}",
            ),
            "an inner value is an output": (
                of_text(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 8] g) {{ {ERF} }}", NUMBERS),
                INNER,
            ),
            "a branch reads an inner value": (
                of_text(
                    "m (float[B, S, 8] x, bool c) => (float[B, S, 8] y, float[B, S, 8] z) "
                    f"{{ {ERF} z = If <{BRANCHES}> (c) }}",
                    NUMBERS,
                ),
                INNER,
            ),
            "doubles": (of_body(ERF, as_type(np.float64, NUMBERS), dtype="double"), "neither float32 nor float16"),
        },
    ),
    Row(
        bias_gelu,
        fires={operator: of_body(body, BIAS) for operator, body in BIASED.items()},
        after={operator: operator for operator in BIASED},
        stays={
            **{
                f"a bias of shape {shape}": (of_body(BIASED["BiasGelu"], {"b": normal(*shape)}), "no vector as long")
                for shape in ((1,), (3, 8), (1, 8))
            },
            "a bias that widens": (
                of_text(f"g (float[B, 1] x) => (float[B, 8] y) {{ {BIASED['BiasGelu']} }}", BIAS),
                "no vector as long",
            ),
            "the sum is read": (
                of_body("s = Add(x, b) z = com.microsoft.Gelu(s) y = Mul(z, s)", BIAS),
                "the sum is read elsewhere",
            ),
            "the sum is an output": (
                of_text(
                    f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 8] s) {{ {BIASED['BiasGelu']} }}", BIAS
                ),
                "the sum is read elsewhere",
            ),
            "doubles": (
                of_body(BIASED["BiasGelu"], as_type(np.float64, BIAS), dtype="double"),
                "neither float32 nor float16",
            ),
        },
    ),
)


def test_float16_fires_with_its_rounded_constants() -> None:
    """They are off by less than a part in a thousand."""
    assert apply(gelu, build_body(ERF, as_type(np.float16, NUMBERS), dtype="float16")).num_changes == 1


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_has_one_in_each_layer(workshop: Workshop, exporter: str) -> None:
    """TorchScript spells Gelu out, dynamo writes the standard operator; every linear layer in front has a bias."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    apply(fold_constants, model)
    assert_same_numbers(gelu, model, ragged_feeds())
    assert count(model, "Gelu", "com.microsoft") == 2
    assert count(model, "Erf") == count(model, "Gelu") == 0
    assert_same_numbers(bias_gelu, model, ragged_feeds())
    assert (count(model, "BiasGelu", "com.microsoft"), count(model, "Gelu", "com.microsoft")) == (2, 0)
