"""Linear layers on matrices."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.passes.products import matmul_add
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    exported,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

WEIGHTS = {"w": normal(8, 4), "b": normal(4)}
BODY = "h = MatMul(x, w) y = Add(h, b)"
MATRIX = "g (float[B, 8] x) => (float[B, 4] y)"


@pytest.mark.parametrize("body", [BODY, "h = MatMul(x, w) y = Add(b, h)"])
def test_it_becomes_one_node(body: str) -> None:
    """With the bias on either side."""
    model = build(f"{MATRIX} {{ {body} }}", WEIGHTS)
    assert_same_numbers(matmul_add, model)
    assert operators(model) == ["Gemm"]


@pytest.mark.parametrize("shape", ["B, S, 8", "8"])
def test_only_matrices_are_taken(shape: str) -> None:
    """Gemm takes nothing else."""
    assert_left_alone(matmul_add, build(f"g (float[{shape}] x) => (float y) {{ {BODY} }}", WEIGHTS))


def test_an_input_of_unknown_rank_is_left_alone() -> None:
    """It might be no matrix."""
    model = build(f"g (float[B, 8] z) => (float y) {{ x = com.microsoft.Unknown(z) {BODY} }}", WEIGHTS)
    assert_left_alone(matmul_add, model, "the rank of the input is not known")


@pytest.mark.parametrize(("b", "note"), [((1,), "not as long"), ((3, 4), ""), ((), "")])
def test_only_a_vector_of_the_last_axis_is_a_bias(b: tuple[int, ...], note: str) -> None:
    """Other shapes broadcast."""
    assert_left_alone(matmul_add, build(f"{MATRIX} {{ {BODY} }}", {**WEIGHTS, "b": normal(*b)}), note)


def test_a_product_that_others_read_is_kept() -> None:
    """It has to be computed for them."""
    model = build(f"{MATRIX} {{ h = MatMul(x, w) z = Add(h, b) y = Mul(z, h) }}", WEIGHTS)
    assert_left_alone(matmul_add, model, "the output of the MatMul is read elsewhere")


def test_a_product_that_is_an_output_is_kept() -> None:
    """It has to be there."""
    model = build(f"g (float[B, 8] x) => (float[B, 4] y, float[B, 4] h) {{ {BODY} }}", WEIGHTS)
    assert_left_alone(matmul_add, model, "the output of the MatMul is read elsewhere")


def test_a_weight_that_a_caller_gives_is_left_alone() -> None:
    """Only weights of the model are linear layers."""
    model = build(f"g (float[B, 8] x, float[8, 4] w) => (float[B, 4] y) {{ {BODY} }}", {"b": WEIGHTS["b"]})
    assert_left_alone(matmul_add, model)


def test_integers_are_left_alone() -> None:
    """Gemm takes them, and has no fast kernel for them."""
    weights = {name: array.astype(np.int32) for name, array in WEIGHTS.items()}
    model = build(f"g (int32[B, 8] x) => (int32[B, 4] y) {{ {BODY} }}", weights)
    assert_left_alone(matmul_add, model, "neither float32 nor float16")


def test_a_linear_layer_of_an_export_on_three_axes_is_left_alone() -> None:
    """PyTorch exports MatMul and Add where Gemm cannot be."""
    import torch

    model = exported(torch.nn.Linear(8, 4), 2, 3, 8, dynamo=False)
    assert operators(model) == ["MatMul", "Add"]
    assert apply(matmul_add, model).num_changes == 0


def test_a_linear_layer_of_an_export_on_two_axes_fires() -> None:
    """A product with a weight and the addition of a vector, as in a hand-written module."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 4))
            self.bias = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias

    model = exported(Layer(), 2, 8, dynamo=False)
    assert_same_numbers(matmul_add, model)
    assert operators(model) == ["Gemm"]


ROW = Row(matmul_add, {"bias": partial(build, f"{MATRIX} {{ {BODY} }}", WEIGHTS)})
