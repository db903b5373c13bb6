"""RMS normalizations and rotary embeddings become one node each, and what only looks like one does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.torch_backend.graphs import models_of, operators

BATCHES, HEADS, LENGTH, FEATURES = 2, 3, 5, 8


def rms(x: Tensor, weight: Tensor, *, power: float = 2, dim: int = -1) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(power).mean(dim, keepdim=True) + 1e-6))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return x, [B, N, S, D], turned by angles, [1, S, D], as transformers writes it."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-second, first), -1) * sin


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_an_rms_normalization_is_one_node() -> None:
    found = operators(models_of(rms, numbers(2, 5, 16), torch.rand(16)))
    assert found["SimplifiedLayerNormalization"] == 1
    assert found["Pow"] + found["ReduceMean"] + found["Sqrt"] + found["Reciprocal"] == 1  # the gradient's square


def test_the_weight_may_come_last_and_the_gradient_takes_the_factor_of_the_node() -> None:
    found = operators(models_of(lambda x, w: rms(x, w * 1) + rms(x, w), numbers(4, 16), numbers(16)))
    assert found["SimplifiedLayerNormalization"] == 1  # one weight is no input of the graph
    found = operators(
        models_of(lambda x, w: x * torch.rsqrt((x**2).mean(-1, True) + 1e-6) * w, numbers(4, 16), numbers(16))
    )
    assert found["SimplifiedLayerNormalization"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: rms(x.abs() + 1, w, power=3),
        lambda x, w: rms(x, w, dim=0),
        lambda x, w: rms(x, w[:1]),
        lambda x, w: rms(x.double(), w.double()),
        lambda x, w: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)),
    ],
    ids=["another power", "another axis", "one weight for all", "double precision", "another factor"],
)
def test_a_normalization_of_another_form_is_not_fused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert "SimplifiedLayerNormalization" not in operators(models_of(function, numbers(16, 16), torch.rand(16)))


def test_a_rotary_embedding_is_one_node_and_two_share_their_tables() -> None:
    def both(x: Tensor, y: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.cat((half, half), -1)
        return rotated(x, angles), rotated(y, angles)

    x, y = numbers(BATCHES, HEADS, LENGTH, FEATURES), numbers(BATCHES, 1, LENGTH, FEATURES)
    forward, *_ = models_of(both, x, y, torch.rand(1, LENGTH, FEATURES // 2) * 6)
    found = operators([forward])
    assert found["RotaryEmbedding"] == 2
    assert found["Cos"] == found["Sin"] == 1
    assert found["Neg"] == 0


@pytest.mark.parametrize(
    "angles_of",
    [
        lambda half: torch.cat((half, half + 1), -1),
        lambda half: torch.cat((half, half), -1).expand(BATCHES, -1, -1) * torch.ones(BATCHES, 1, 1),
    ],
    ids=["halves that differ", "angles of each batch"],
)
def test_a_rotation_by_other_angles_is_not_fused(angles_of: Callable[[Tensor], Tensor]) -> None:
    models = models_of(
        lambda x, half: rotated(x, angles_of(half)),
        numbers(BATCHES, HEADS, LENGTH, FEATURES),
        torch.rand(1, LENGTH, FEATURES // 2),
    )
    assert "RotaryEmbedding" not in operators(models)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_rotation_of_unequal_parts_is_not_fused(share: float) -> None:
    def turned(x: Tensor, half: Tensor) -> Tensor:
        angles, place = torch.cat((half, half), -1), int(share * FEATURES)
        crossed = torch.cat((-x[..., place:], x[..., :place]), -1)
        return x * angles.cos().unsqueeze(1) + crossed * angles.sin().unsqueeze(1)

    x = numbers(BATCHES, HEADS, LENGTH, FEATURES)
    assert "RotaryEmbedding" not in operators(models_of(turned, x, torch.rand(1, LENGTH, FEATURES // 2)))
