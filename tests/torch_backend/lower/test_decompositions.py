"""Decompositions of operators that torch.onnx does not translate, against PyTorch: NaN, infinities, ties, no values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.lower.decisions import DECISIONS, decision
from onnxtool.torch_backend.lower.placement import EMPTY, NO_AXIS
from tests.torch_backend.graphs import models_of
from tests.torch_backend.oracle import require_same

Function = Callable[..., object]
NAN, INF = math.nan, math.inf
aten = torch.ops.aten


def rows(*shape: int, grad: bool = True) -> torch.Tensor:
    """Different values for every place, so that no order is open."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def special(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad)


ODD = ((2.0, NAN, -1.0, 5.0), (NAN, NAN, NAN, NAN), (-INF, 0.5, INF, -2.0), (3.0, 1.0, 4.0, NAN))
EVERYWHERE = (-INF, -7.5, -3.0, -1.25, -1e-3, -0.0, 0.0, 1e-6, 0.5, 1.0, 2.0, 2.5, 9.9, 10.0, 50.0, 1e5, INF, NAN)
# kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
POOL_SIZES: tuple[tuple[Any, ...], ...] = (
    *((2,), (3, 2, 1), (3, 2, 1, True), (3, 2, 1, True, False), (3, 1, 1, False, False), (2, 3)),
    *((3, 2, 0, True, True, 5), (2, 2, 1, False, True, -3)),
)

SAMPLES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    # writes by index
    **{
        f"index_reduce with self: {self}": (
            lambda x, y, self=self: tuple(
                x.index_reduce(-1, torch.tensor([1, 0, 1, 1]), y, reduce, include_self=self)
                for reduce in ("prod", "mean")
            ),
            (rows(3, 5), rows(3, 4)),
        )
        for self in (True, False)
    },
    "index_reduce of one value": (lambda x: x.index_reduce(0, torch.tensor(0), x * 2, "mean"), (rows(),)),
    "index_reduce of no values": (
        lambda x: x.index_reduce(0, torch.tensor([], dtype=torch.int64), x[:0], "prod"),
        (rows(3, 2),),
    ),
    "scatter_reduce mean": (
        lambda x, y: tuple(
            x.scatter_reduce(0, torch.tensor([[0, 1], [0, 0], [2, 0]]), y, "mean", include_self=self)
            for self in (True, False)
        ),
        (rows(3, 2), rows(3, 2)),
    ),
    "scatter into one value": (lambda x, y: x.scatter(0, torch.tensor(0), y), (rows(), rows())),
    "put": (lambda x, y: x.put(torch.tensor([[1, -1]]), y), (rows(3, 2), rows(1, 2))),
    "put adding": (lambda x, y: x.put(torch.tensor([1, -5, 1]), y, True), (rows(3, 2), rows(3))),
    "take": (lambda x: x.take(torch.tensor([2, 2, -1])), (rows(3, 2),)),
    "as_strided_copy": (lambda x: torch.as_strided_copy(x, (2, 2), (1, 2), 1), (rows(3, 3),)),
    "as_strided_scatter": (lambda x, y: torch.as_strided_scatter(x, y, (2, 2), (1, 2)), (rows(3, 3), rows(2, 2))),
    "masked_scatter": (
        lambda x, y: x.masked_scatter(torch.tensor([[True, False, True], [False, True, True]]), y),
        (rows(2, 3), rows(6)),
    ),
    "masked_scatter nowhere": (lambda x, y: x.masked_scatter(x.isnan(), y), (rows(2, 3), rows(6))),
    # pools
    **{
        f"avg_pool{rank}d": (
            lambda x, rank=rank: tuple(
                getattr(functional, f"avg_pool{rank}d")(x, *sizes) for sizes in POOL_SIZES[: 6 if rank == 1 else 8]
            ),
            (rows(2, 3, *(9, 7, 6)[:rank]),),
        )
        for rank in (1, 2, 3)
    },
    "avg_pool2d of unequal sides": (
        lambda x: functional.avg_pool2d(x, (2, 3), (1, 2), (1, 0), ceil_mode=True),
        (rows(3, 6, 6),),
    ),
    "avg_pool2d of infinities": (
        lambda x: functional.avg_pool2d(x, 2, ceil_mode=True),
        (special(1, INF, 2, 3, 4, 5, NAN, -1, 0).reshape(1, 1, 3, 3),),
    ),
    **{
        f"adaptive_{kind}_pool{rank}d": (
            lambda x, kind=kind, rank=rank, sizes=sizes: tuple(
                getattr(functional, f"adaptive_{kind}_pool{rank}d")(x, size) for size in sizes
            ),
            (rows(2, 3, *(7, 5, 6)[:rank]),),
        )
        for kind in ("avg", "max")
        for rank, sizes in {1: ((3,),), 2: ((7, 2), (3, 4), (9, 1)), 3: ((3, 5, 2), (8, 1, 4))}.items()
    },
    "adaptive_max_pool2d of NaN": (
        lambda x: functional.adaptive_max_pool2d(x, (2, 3), return_indices=True),
        (special(*sum(ODD, ())).reshape(1, 4, 4),),
    ),
    "adaptive_avg_pool3d of NaN": (
        lambda x: functional.adaptive_avg_pool3d(x, (1, 2, 2)),
        (special(1, INF, 2, 3, 4, 5, NAN, -1, 0).reshape(1, 1, 3, 3),),
    ),
    "max_pool3d": (lambda x: functional.max_pool3d(x, 2, 1, 1), (rows(2, 3, 4, 3, 5),)),
    # borders and windows
    **{
        f"replication of {rank} dimensions": (
            lambda x, widths=widths: tuple(functional.pad(x, width, "replicate") for width in widths),
            (rows(2, 2, *(3, 4, 5)[:rank]),),
        )
        for rank, widths in {
            1: ((2, 1),),
            2: ((0, 3, 1, 0), (-1, 2, 1, -2), (-2, -1, 0, 0)),
            3: ((1, 2, 3, 0, 0, 1), (1, 1, -1, 0, 2, 2)),
        }.items()
    },
    "replication of a single value": (lambda x: functional.pad(x, (2, 3), "replicate"), (rows(2, 2, 1),)),
    "unfold": (lambda x: functional.unfold(x, 2, padding=1, stride=2), (rows(2, 3, 4, 5),)),
    "unfold of no images": (lambda x: functional.unfold(x, 2), (rows(0, 3, 4, 5),)),
    # order
    **{
        f"{name} of {kind}": (
            lambda x, function=function: (function(x, 0), function(x, -1)),
            (rows(4, 5) if kind == "numbers" else torch.tensor(ODD),),
        )
        for name, function in {
            "cummax": lambda x, dim: x.cummax(dim),
            "cummin": lambda x, dim: x.cummin(dim),
            "cumprod": lambda x, dim: x.cumprod(dim),
        }.items()
        for kind in ("numbers", "NaN")
    },
    "orders of one value": (lambda x: (*x.cummax(0), x.cumprod(0)), (rows(),)),
    "cummax with ties": (lambda x: (x.cummax(0), x.cummin(0)), (torch.tensor([1, 3, 3, 2, 1, 1]),)),
    "cumprod of zeros": (lambda x: x.cumprod(0), (special(2, 0, 3, 0, 4, grad=True),)),
    "cumprod of integers": (lambda x: x.cumprod(0), (torch.tensor([2, 3, 4], dtype=torch.int32),)),
    "cumprod of nothing": (lambda x: x.cumprod(1), (rows(3, 0),)),
    "max of truths": (lambda x: (x > 0).max(1), (rows(4, 5, grad=False),)),
    **{
        f"searchsorted right={right}": (
            lambda x, right=right: (
                torch.searchsorted(torch.tensor([-1.0, 0.5, 0.5, 2.0]), x, right=right, out_int32=True),
                torch.bucketize(x, torch.tensor([-1.0, 0.5, 2.0]), right=right),
                torch.bucketize(x.sum(), torch.tensor([-1.0, 0.5, 2.0]), right=right),
                torch.searchsorted(torch.tensor([[1.0, 2.0]]).repeat(4, 1), x, right=right),
                torch.searchsorted(torch.tensor([2.0, 0.5, 1.0]), x, right=right, sorter=torch.tensor([1, 2, 0])),
            ),
            (torch.tensor(((-1.0, 0.5, 2.0, 1.0), *ODD[:3])),),
        )
        for right in (False, True)
    },
    "searchsorted in nothing": (lambda x: torch.searchsorted(x[:0], x), (rows(3, grad=False),)),
    # tensors without dimensions
    "reductions of one value": (
        lambda x: (x.amax(), x.amin(0), x.amax(-1, keepdim=True), x.mean(0), (x > 0).any(0), x.all(-1)),
        (rows(),),
    ),
    "indices of one value": (
        lambda x: (x.argmax(), x.argmin(0), x.argmax(-1, keepdim=True), (x * NAN).argmin()),
        (rows(),),
    ),
    "extremes of all values": (lambda x: (x.amax(), x.amin(keepdim=True)), (rows(2, 3),)),
    "changes of shape": (lambda x, y: (x.t(), y.t(), x.repeat(2, 3), x.repeat(()), y.repeat(2)), (rows(), rows(3))),
    "squeeze": (lambda x: x.squeeze((0,)), (rows(),)),
    # functions
    "addcmul and addcdiv scaled first": (
        lambda x, y: (x.addcmul(x, y, value=1e-30), x.addcdiv(x, y, value=1e-30)),
        (special(1e30, 1e30, -2), special(1e-30, 1e30, 5)),
    ),
    "norms of infinite order": (
        lambda x: tuple(torch.linalg.vector_norm(x, order, 1) for order in (INF, -INF)),
        (torch.tensor(ODD),),
    ),
    "clamp": (lambda x: (x.clamp_min(0), x.clamp_max(1)), (torch.tensor(ODD),)),
    "silu of anything": (functional.silu, (special(*EVERYWHERE[1:-2], grad=True),)),
    "relu of integers": (torch.relu, (torch.tensor([-2, 0, 3]),)),
    "fmax and fmin": (lambda x, y: (x.fmax(y), x.fmin(y)), (rows(3, 1), rows(2))),
    "fmax and fmin of NaN": (lambda x: (x.fmax(x.flip(1)), x.fmin(x.flip(1))), (torch.tensor(ODD),)),
    "hypot": (torch.hypot, (special(3e30, 0, -1e-30, -INF, 1, grad=True), special(4e30, 0, 1e-30, NAN, NAN))),
    # products
    "prod": (lambda x: (x.prod(), x.prod(-1)), (special(2, 0, 3, 4, grad=True),)),
    "bilinear": (functional.bilinear, (rows(3, 4), rows(3, 5), rows(2, 4, 5), rows(2))),
}


@pytest.fixture(autouse=True)
def two_threads() -> object:
    """Races are between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:index_reduce")  # it is in beta
@pytest.mark.parametrize("name", SAMPLES)
def test_a_decomposition_gives_what_pytorch_gives(name: str) -> None:
    """Results and gradients are equal; what is empty, indices of maxima and rare operators stay in PyTorch."""
    function, inputs = SAMPLES[name]
    torch._dynamo.reset()
    backend = require_same(function, *inputs)
    reasons = {node.reason for graph in backend.explain().graphs for node in graph.eager}
    targets = (aten.max_pool3d_with_indices.default, aten.avg_pool2d.default, aten.cummax.default)
    denied = {denied.reason for target in targets if (denied := decision(target).denied) is not None}
    assert reasons <= {EMPTY, NO_AXIS, *denied}


def test_numbers_in_float64_operators_keep_their_precision() -> None:
    """The exporter rounds them to float32, and casts them afterwards."""
    x = torch.tensor([0.3, 1.7], dtype=torch.float64)
    require_same(
        lambda x: (x * math.pi, x + 0.1, x.add(x, alpha=0.1), x.sub(x, alpha=0.7), torch.full_like(x, 1e300), 0.1 / x),
        x,
        atol=1e-15,
    )


def test_numbers_near_zero_and_one_have_their_effect() -> None:
    """The optimizer of onnxscript takes them for zero and one, and an infinite logarithm comes of that."""
    require_same(lambda x: ((x + 1e-9).log(), x * 1.000001, 1 / (x - 1e-10)), torch.tensor([0.0, 1.0]), atol=1e-7)


def test_every_decision_is_of_an_operator_and_says_something() -> None:
    """AOTAutograd traces overloads; `getitem` takes one of their results. A row without effect would mislead."""
    assert all(isinstance(target, torch._ops.OpOverload) or target is getitem for target in DECISIONS)
    assert all(map(str, DECISIONS.values()))


def test_a_decision_is_a_text_for_the_documentation() -> None:
    """The steps in their order; nothing for an operator that torch.onnx translates."""
    assert str(decision(aten.relu.default)).startswith("decomposed by `decompositions.relu`; large ones stay in")
    assert str(decision(aten.erfc.default)) == (
        "stays in PyTorch: translated by 1 - Erf, which leaves no digit of a small result"
    )
    assert str(decision(aten.sin.default)) == ""


def test_numbers_without_dimensions_have_one_where_pytorch_takes_it() -> None:
    """ONNX has no axis for them: their reductions, scatters and gathers, and the gradients of those, fail there."""

    def along(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        index = torch.tensor(0)
        return [
            *(getattr(x, name)(-1) for name in ("sum", "mean", "var", "amax", "prod", "argmax", "any", "cumsum")),
            *(x.std(0, keepdim=True), *torch.var_mean(x, 0), x.gather(0, index), *x.cummax(0), x.softmax(0)),
            *(x.scatter(0, index, 2.0), x.scatter(0, index, x * 2), x.scatter_add(0, index, x), x.flip(0)),
            *(y.gather(0, index), y.index_select(0, index), y.scatter_reduce(0, index, x, "prod")),
        ]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*degrees of freedom", UserWarning)
        backend = require_same(along, torch.tensor(0.7, requires_grad=True), torch.tensor([0.3], requires_grad=True))
    assert not [session.failure for graph in backend.graphs for session in graph.sessions if session.failure]


def test_parts_of_a_dynamic_size_are_slices() -> None:
    """The sequence that torch.onnx makes of them is more than onnxscript's optimizer can read."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first * 2, x.split([1, x.shape[1] - 1], 1)[1]], -1)

    backend = require_same(halves, torch.rand(3, 4, requires_grad=True), dynamic=True)
    assert not any(graph.report.eager for graph in backend.graphs)


def test_a_dimension_that_a_translation_counts_from_the_end_is_no_index() -> None:
    """The gradient of differences along the last dimension of a dynamic size reads that size."""
    x = torch.rand(4, 3, requires_grad=True)
    backend = require_same(lambda x: x.diff(dim=-1) * x[:, 1:], x, dynamic=True)
    assert not [session.failure for graph in backend.graphs for session in graph.sessions if session.failure]


@pytest.mark.parametrize(
    "function",
    {
        "logarithm": lambda x: x.sigmoid().log(),
        "binary cross entropy": lambda x: torch.nn.functional.binary_cross_entropy(
            x.sigmoid().reshape(-1), torch.ones(6), reduction="none"
        ),
        "quotient": lambda x: 1 / (x.sigmoid()[1:] + 1e-9),
        "returned": lambda x: x.sigmoid(),
    }.values(),
)
def test_a_small_probability_keeps_its_digits(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Sigmoid of onnxruntime is zero for -20; the loss of a saturated output would be 100 instead of 20."""
    x = torch.tensor([-30.0, -20.0, -12.0, -3.0, 3.0, 20.0])
    ours = torch.compile(function, backend=OrtBackend())(x)
    torch.testing.assert_close(ours, function(x), rtol=1e-5, atol=0)


def test_a_gate_keeps_the_fast_sigmoid() -> None:
    """Its small results are multiplied, and kept for the gradient."""
    models = models_of(lambda x, y: (x.sigmoid() * y).sum(), torch.rand(4, 6, requires_grad=True), torch.rand(4, 6))
    assert "Sigmoid" in {node.op_type for node in models[0].graph.node}


EXTREMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax(-1),
    "smallest of all": lambda x: x.min(),
    "largest norm": lambda x: x.norm(torch.inf, dim=-1),
    "largest three": lambda x: x * (x >= x.topk(3).values[..., -1:]),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_gradient_finds_an_extreme_among_numbers_that_it_computes_again(name: str) -> None:
    """They may differ in the last digit from those of the forward session, and one of no equal numbers is NaN."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normalized = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return EXTREMES[name](normalized)

    x = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    require_same(function, x, torch.tensor([-1.0, 0.5, 0.7, 1.1]))


def test_operators_on_nothing_are_those_of_pytorch() -> None:
    """Their decompositions would select the first of no classes, or divide by a size of zero."""

    def function(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, None, 0.1)
        return torch.nn.functional.cross_entropy(x.flatten(1), labels), attended, x.sum(0).transpose(0, 1).amax(-1)

    require_same(function, torch.rand(3, 5, 0, requires_grad=True), torch.full((3,), -100))


def test_random_numbers_like_a_normalized_batch_follow_its_layout() -> None:
    """PyTorch's kernel returns contiguous numbers for transposed ones; its decomposition keeps the transposition."""

    def function(x: torch.Tensor) -> torch.Tensor:
        normalized = torch.nn.functional.batch_norm(x, None, None, training=True)
        return normalized * torch.empty_like(normalized).bernoulli_(0.7)

    require_same(function, torch.rand(3, 4, 5).mT.requires_grad_())


def test_an_index_into_nothing_is_out_of_range() -> None:
    """Although the result is known to be empty."""
    function = torch.compile(lambda x, i: x.index_put((i,), x[:1].detach()), backend=OrtBackend())
    with pytest.raises(IndexError, match="out of bounds"):
        function(torch.rand(0, 3, requires_grad=True), torch.tensor([0, 0]))


@pytest.mark.parametrize("name", ["inv", "cholesky", "lu_factor"])
def test_a_singular_matrix_is_an_error(name: str) -> None:
    """The check has an empty result, which nobody reads."""
    function = torch.compile(lambda x: getattr(torch.linalg, name)(x * 1.0), backend=OrtBackend())
    with pytest.raises(torch.linalg.LinAlgError if name != "lu_factor" else RuntimeError, match=name):
        function(torch.ones(5, 5))
