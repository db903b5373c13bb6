"""Masks of dropout from several threads: their distribution, and what a seed means."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from onnxtool.errors import CompilationError, OptionError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.lower.random import fast_dropout_mask
from tests.torch_backend.oracle import require_same

FAST = OrtBackendOptions(dropout="fast")
MANY = 2**20 + 5
LIMIT = 5.0
"""Standard deviations; a fair generator with another seed is beyond in one of a million."""


def deviations(share: float, expected: float, count: int) -> float:
    return abs(share - expected) / math.sqrt(expected * (1 - expected) / count)


def draw(size: tuple[int, ...], p: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return fast_dropout_mask(size, p, dtype=dtype, device=torch.device("cpu"))


def drop(x: torch.Tensor) -> torch.Tensor:
    return dropout(x, 0.1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.01, 1e-5], ids=str)
def test_the_share_of_zeros_is_p_and_the_mean_is_one(p: float) -> None:
    mask = draw((MANY,), p)
    kept = mask[mask != 0].unique()
    assert deviations((mask == 0).double().mean().item(), p, MANY) < LIMIT
    assert kept.numel() == 1
    assert kept.item() == pytest.approx(1 / (1 - p), rel=1e-4)


def test_neighbours_rows_and_steps_are_independent() -> None:
    """Two places are both zero as often as chance has it, in a mask at any distance and in masks of two steps."""
    first, second = (draw((MANY,), 0.3).numpy() == 0 for _ in range(2))
    pairs = [(first[lag:], first[:-lag]) for lag in (1, 2, 3, 4, 16, 64, 2**14, 2**15, 2**16)] + [(first, second)]
    for one, other in pairs:
        assert deviations(float(np.mean(one & other)), 0.09, len(one)) < LIMIT


def test_numbers_of_zeros_in_blocks_are_binomial() -> None:
    """Their variance too, which blocks that repeat each other would not have."""
    counts = (draw((4096, 256), 0.25) == 0).sum(1).double()
    expected = 256 * 0.25 * 0.75
    assert abs(counts.var().item() - expected) < LIMIT * expected * math.sqrt(2 / 4095)


def test_any_number_of_threads_draws_the_same_mask() -> None:
    masks = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        masks.append(draw((7, MANY // 7), 0.1))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_half_precision_drops_the_same_elements_as_float32(dtype: torch.dtype) -> None:
    masks = []
    for wanted in (torch.float32, dtype):
        torch.manual_seed(3)
        masks.append(draw((3, 50), 0.4, wanted))
    assert masks[1].dtype is dtype
    torch.testing.assert_close(masks[1].float(), masks[0], atol=0, rtol=1e-2)


def test_the_mask_of_an_empty_tensor_is_empty() -> None:
    assert draw((0, 4), 0.1).shape == (0, 4)


def test_a_seed_and_a_state_give_the_same_steps_again() -> None:
    compiled, x = torch.compile(drop, backend=OrtBackend(FAST)), torch.ones(400, 300)
    torch.manual_seed(5)
    first = compiled(x)
    state = torch.get_rng_state()
    second = compiled(x)
    torch.set_rng_state(state)
    assert torch.equal(compiled(x), second)
    torch.manual_seed(5)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "activation checkpointing"])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
def test_the_gradient_has_the_mask_of_the_result(inplace: bool, recomputes: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return dropout(x * 2, 0.3, inplace=inplace).sin()

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)

    backend, x = OrtBackend(FAST), torch.full((500, 200), 0.25, requires_grad=True)
    result = torch.compile(run, backend=backend)(x)
    result.sum().backward()
    factor = 1 / (1 - 0.3)
    kept = result.detach() != 0
    torch.testing.assert_close(
        x.grad, torch.where(kept, 2 * factor * math.cos(0.5 * factor), 0.0), atol=1e-4, rtol=1e-4
    )
    assert deviations(1 - kept.double().mean().item(), 0.3, x.numel()) < LIMIT
    drawn = [node.operator for graph in backend.graphs for node in graph.report.eager]
    mask = ["onnxtool.fast_dropout_mask.default"]
    assert [name for name in drawn if "aten" not in name] == (
        ["run_and_save_rng_state", "run_with_rng_state"] if recomputes else mask
    )


def test_attention_draws_fast_as_well_and_sums_to_one_in_the_mean() -> None:
    backend, queries = OrtBackend(FAST), torch.zeros(2, 3, 64, 8)
    attend = torch.compile(
        lambda q, v: scaled_dot_product_attention(q, q, v, dropout_p=0.2), backend=backend, dynamic=True
    )
    result = attend(queries, torch.ones(2, 3, 64, 8))
    assert abs(result.mean().item() - 1) < LIMIT * math.sqrt(0.25 / (6 * 64 * 64))
    assert "onnxtool.fast_dropout_mask" in str(backend.explain())


def test_a_transposed_tensor_keeps_its_layout() -> None:
    compiled, x = torch.compile(drop, backend=OrtBackend(FAST)), torch.ones(300, 400).t()
    assert compiled(x).stride() == x.stride()


def test_the_comparison_with_pytorch_draws_the_same_masks() -> None:
    options = OrtBackendOptions(dropout="fast", assert_close_to_baseline=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    torch.compile(model, backend=OrtBackend(options))(torch.rand(4, 8)).sum().backward()


def test_the_default_draws_what_pytorch_draws_in_place_too() -> None:
    require_same(lambda x: dropout(x * 2, 0.3, inplace=True), torch.rand(30, 20, requires_grad=True))


def test_an_unknown_or_ineffective_dropout_option_is_refused() -> None:
    with pytest.raises(OptionError, match="'quick' is not one of") as caught:
        OrtBackendOptions.from_mapping({"dropout": "quick"})
    assert "fast" in caught.value.message
    with pytest.raises(CompilationError, match="no effect without use_aot_autograd"):
        OrtBackendOptions(dropout="fast", use_aot_autograd=False)
