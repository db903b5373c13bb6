"""Eager PyTorch's results for NaN, infinities, zeros, ties, subnormal and extreme numbers, and for any mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.lower.decisions import DECISIONS

NAN, INF, LOWEST = math.nan, math.inf, torch.finfo(torch.float32).min
SPECIALS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1, -1, 2.5, -3.5, 1e-40, 3e38, -3e38, 0.5, 7, -8, 1e-3])
SIZE = len(SPECIALS)
RTOL = ATOL = 1e-5
"""float32 functions of other libraries."""

Function = Callable[[torch.Tensor, torch.Tensor], Any]

# Of x, whose rows are equal numbers, and y, whose columns are: each special number meets each other one.
FUNCTIONS: dict[str, Function] = {
    # two numbers
    **{name: getattr(torch, name) for name in ("maximum", "minimum", "fmax", "fmin", "hypot", "atan2", "copysign")},
    **{name: getattr(torch, name) for name in ("fmod", "remainder", "floor_divide", "pow", "xlogy", "heaviside")},
    **{name: getattr(torch, name) for name in ("logaddexp", "logaddexp2", "clamp_min", "clamp_max", "eq", "lt")},
    "divide rounding": lambda x, y: [torch.div(x, y, rounding_mode=mode) for mode in ("trunc", "floor")],
    "divide by numbers": lambda x, _: (x % 3, x % -2.5, x % INF, 5 % x, x // 3, x // -INF),
    "divide integers": lambda _x, _y: [
        torch.tensor([2**53 + 1, -7, 7, -8]).div(torch.tensor([1, 2, -2, 2]), rounding_mode=mode)
        for mode in ("floor", "trunc")
    ],
    "powers": lambda x, _: [x**power for power in (0, 0.5, -0.5, 1, 1.5, 2, -2, 3, NAN, INF)] + [2**x, 0.0**x],
    "lerp": lambda x, y: (x.lerp(y, 0.3), x.lerp(y, y)),
    "clamp between": lambda x, y: (
        x.clamp(1),
        x.clamp(max=1),
        x.clamp(2, 1),
        x.clamp(NAN),
        x.clamp(0, NAN),
        x.clamp(y, y.T),
    ),
    "addcdiv": lambda x, y: x.addcdiv(y, x.T, value=1e-30),
    "where": lambda x, y: (torch.where(x > y, x, y), x.masked_fill(y > 0, -INF), torch.where(x == y, 0.0, y)),
    # one number
    "signs": lambda x, _: (x.sign(), x.sgn(), x.signbit(), x.angle(), x.trunc().signbit(), x.frac()),
    "round": lambda x, _: (x.round(), (x * 0.5).round(), x.round(decimals=1), x.floor(), x.ceil()),
    "logit": lambda x, _: (x.logit(), x.logit(0.1)),
    "hardswish": lambda x, _: functional.hardswish(x[:10]),
    "to integers and truths": lambda x, _: (x[:3].bool(), x.nan_to_num(1, 2, 3), x[3:9].int()),
    "activations": lambda x, _: [
        getattr(functional, name)(x)
        for name in ("relu", "relu6", "hardtanh", "hardsigmoid", "silu", "softplus", "elu", "softshrink")
    ],
    # rows
    "sort": lambda x, _: (x.sort(0), x.argsort(0, descending=True), torch.sort(x, dim=0, stable=True)),
    "topk": lambda x, _: (x.topk(5, 0), x.topk(9, 0, largest=False)),
    "order statistics": lambda x, _: (x.median(0), x.nanmedian(0), x.kthvalue(3, 0), x.median()),
    "extremes": lambda x, y: (x.max(0), x.min(1), x.amax(), y.amin(1), x.argmax(0), y.argmin(), y.max(0)),
    "running extremes": lambda x, _: (x.cummax(0), x.cummin(0)),
    "softmax": lambda x, y: [f(z, 1) for f in (torch.softmax, torch.log_softmax) for z in (x, y, y.double())],
    "logarithms of sums": lambda x, y: (x.logsumexp(1), y.logsumexp(0), x.logcumsumexp(0)),
    "norms": lambda x, _: [x.norm(order, dim=0) for order in (INF, -INF, 0, 1)] + [functional.normalize(x)],
    "diagonals": lambda x, y: (x.diagonal(1), x[:3].diagonal(-2), torch.diagonal_copy(y[:5], 2), x.trace()),
    "scattered extremes": lambda x, y: [
        x.scatter_reduce(0, torch.zeros(2, SIZE, dtype=torch.int64), y[:2], kind, include_self=own)
        for kind in ("amax", "amin")
        for own in (True, False)
    ],
    # images
    "max_pool1d": lambda x, y: (functional.max_pool1d(x[None], 3), functional.max_pool1d(y[None], 1)),
    "max_pool2d": lambda x, y: [functional.max_pool2d(z[None, None], 3, 2, 1) for z in (x, y, x.double())],
    "indices of max_pool": lambda x, _: functional.max_pool2d(x[None, None], 3, 2, 1, return_indices=True),
    "adaptive_max_pool2d": lambda x, _: functional.adaptive_max_pool2d(x[None, None], 4),
    "grid_sample": lambda x, y: functional.grid_sample(
        x[None, None, 5:9], torch.stack([x, y], -1)[None], align_corners=False
    ),
}

GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(functional, name) for name in ("relu6", "hardtanh", "hardswish", "softshrink")},
    "abs": torch.abs,
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "logit": lambda x: x.logit(0.1),
    "max_pool2d": lambda x: functional.max_pool2d(x.reshape(1, 4, 4), 2),
    "sort": lambda x: x.sort()[0],
    "norm": lambda x: x.norm(INF),
}


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=OrtBackend(OrtBackendOptions(flush_denormals=False)))(*inputs)


def require_equal(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL, equal_nan=True)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[list[Any], list[Any]]]:
    """Return the results of each function, ours and eager ones, of one graph that onnxruntime runs as decided."""

    def all_of(x: torch.Tensor, y: torch.Tensor) -> dict[str, list[Any]]:
        return {name: pytree.tree_leaves(function(x, y)) for name, function in FUNCTIONS.items()}

    x, y = (grid.clone() for grid in torch.meshgrid(SPECIALS, SPECIALS, indexing="ij"))
    backend = OrtBackend(OrtBackendOptions(flush_denormals=False))
    torch._dynamo.reset()
    ours, theirs = torch.compile(all_of, backend=backend)(x, y), all_of(x, y)
    (graph,) = backend.explain().graphs
    decided = {decision.denied.reason for decision in DECISIONS.values() if decision.denied}
    assert graph.partitions
    assert {node.reason for node in graph.eager} <= decided | {"no translation to ONNX"}
    return {name: (ours[name], theirs[name]) for name in FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_special_numbers_has_eager_s_results(
    name: str, results: dict[str, tuple[list[Any], list[Any]]]
) -> None:
    """Each number meets each other one, in float32."""
    require_equal(*results[name])


def test_gradients_at_special_numbers_are_eager_s() -> None:
    """NaN, infinities, and the limits at which a function has two slopes."""
    numbers = torch.cat([SPECIALS[:8], torch.tensor([0.1, 0.9, 6.0, 3.0, -3.0, -0.5, 0.5, -1.0])])

    def gradients(run: Callable[..., Any]) -> dict[str, torch.Tensor]:
        leaves = [numbers.clone().requires_grad_() for _ in GRADIENTS]
        results = run(
            lambda *leaves: [function(x) for function, x in zip(GRADIENTS.values(), leaves, strict=True)], leaves
        )
        return dict(zip(GRADIENTS, torch.autograd.grad([result.sum() for result in results], leaves), strict=True))

    ours = gradients(lambda function, leaves: compiled(function, *leaves))
    require_equal(ours, gradients(lambda function, leaves: function(*leaves)))


@pytest.mark.parametrize("size", [3, 20])
def test_a_factor_of_zero_leaves_out_what_pytorch_leaves_out(size: int) -> None:
    """With the NaN in it; PyTorch's kernel for small batches multiplies by zero instead."""

    def products(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        ones = torch.ones_like(a)
        return [
            result
            for factors in ({"beta": 0}, {"alpha": 0}, {"beta": 0, "alpha": 0}, {"beta": 2, "alpha": 3})
            for result in (
                torch.addmm(x[0], a[0], ones[0], **factors),
                torch.addmv(x[0, 0], a[0], ones[0, 0], **factors),
                torch.addr(x[0], a[0, 0], ones[0, 0], **factors),
                torch.addbmm(x[0], a, ones, **factors),
                torch.baddbmm(x, a, ones, **factors),
            )
        ]

    ones, nans = torch.ones(2, size, size), torch.full((2, size, size), NAN)
    for inputs in ((ones, nans), (nans, ones)):
        require_equal(compiled(products, *inputs), products(*inputs))


MASK = torch.tensor(
    [
        *([LOWEST] * 5, [-INF, LOWEST, -INF, -INF, -INF], [-2e38, -3e38, -3e38, -2e38, -INF], [-INF] * 5),
        *([INF, 0, 0, 0, 0], [NAN, -INF, -INF, -INF, -INF], [0, LOWEST, -INF, -1, 3], [LOWEST * 0.6] * 5),
    ]
)
LENGTH, KEYS = MASK.shape
CAUSAL = torch.full((LENGTH, KEYS), LOWEST).triu(1)
PADDING = torch.tensor([[LOWEST, LOWEST, 0, 0, 0], [0, 0, 0, 0, 0]])[:, None, None]
MASKS = {
    "rows": MASK,
    "of each head": torch.stack([MASK, MASK.flip(0), CAUSAL]),
    "causal and padding": CAUSAL + PADDING,
    "of each text": torch.stack([MASK, MASK.flip(1)])[:, None],
    "of keys": MASK[1:2],
    "of queries": MASK[:, :1],
    "truths": MASK > -1e38,
    "truths of each text": torch.stack([MASK > 0, MASK == 0])[:, None],
}


def test_attention_has_eager_s_values_for_any_mask() -> None:
    """Gradients are those of PyTorch's own matmuls: its fused kernel has wrong ones where all scores are the lowest."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 3, size, 8, requires_grad=True) for _ in MASKS for size in (LENGTH, KEYS, KEYS)]

    def attend(*leaves: torch.Tensor) -> dict[str, torch.Tensor]:
        heads = zip(MASKS.items(), leaves[::3], leaves[1::3], leaves[2::3], strict=True)
        return {name: functional.scaled_dot_product_attention(q, k, v, mask) for (name, mask), q, k, v in heads}

    ours = compiled(attend, *leaves)
    with torch.no_grad():
        require_equal(ours, attend(*leaves))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = attend(*leaves)
    sums = [[found[name][theirs[name].isfinite()].sum() for name in MASKS] for found in (ours, theirs)]
    require_equal(*(torch.autograd.grad(found, leaves) for found in sums))
