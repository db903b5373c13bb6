"""Compiled functions and models answer as eager PyTorch does, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend
from tests.torch_backend.oracle import require_same


def rows(*shape: int, **options: object) -> torch.Tensor:
    return torch.rand(*shape, **options) - 0.3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


class Running(nn.Module):
    """Keeps a mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        self.num_calls += 1
        return x - self.mean


def test_a_model_is_one_session_each_way() -> None:
    """Nothing of a plain perceptron stays in PyTorch."""
    backend = require_same(mlp(), rows(5, 6))
    reports = backend.explain().graphs
    assert [(graph.kind, len(graph.partitions), graph.eager) for graph in reports] == [
        ("forward", 1, ()),
        ("backward", 1, ()),
    ]


def test_the_gradient_of_an_input_is_eagers() -> None:
    """Not only parameters are leaves."""
    require_same(lambda x: functional.softmax(x.sin() @ x.T, dim=-1), rows(4, 5, requires_grad=True))


def test_a_model_in_eval_mode_under_no_grad_is_one_graph() -> None:
    """No backward graph is made for inference."""
    with torch.no_grad():
        backend = require_same(mlp().eval(), rows(5, 6))
    assert [graph.kind for graph in backend.explain().graphs] == ["inference"]


def test_one_model_serves_all_sizes_of_a_dynamic_graph() -> None:
    """Sizes are inputs of the session, and a size that was never seen needs no compilation."""
    backend = OrtBackend()
    model = mlp()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size in (4, 7, 13):
        x = rows(size, 6)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    assert [graph.report.kind for graph in backend.graphs] == ["forward", "backward"]


def test_sizes_in_the_arithmetic_of_a_dynamic_graph_are_those_of_the_call() -> None:
    """A mean by hand divides by the size of this call."""
    require_same(
        lambda x: x.reshape(-1, x.shape[1] // 2).sum(0) / (x.shape[0] * 2) + x.shape[1],
        rows(6, 4, requires_grad=True),
        dynamic=True,
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by TorchDynamo itself
def test_a_graph_break_leaves_two_graphs() -> None:
    """What TorchDynamo cannot trace runs between two compiled graphs."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.exp()

    backend = require_same(broken, rows(3, requires_grad=True))
    assert [graph.kind for graph in backend.explain().graphs].count("forward") == 2


def test_changed_buffers_are_written_back() -> None:
    """A running mean and a count of calls are what they are after an eager call."""
    require_same(Running(), rows(5, 4))


def test_batch_normalization_updates_its_statistics() -> None:
    """The exporter's own translation would leave them as they are."""
    require_same(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), rows(2, 3, 8, 8))


def test_a_weighted_loss_with_ignored_labels_has_eagers_gradient() -> None:
    """The exporter's own translation makes up the total weight."""
    labels = torch.tensor([1, -100, 2, 0])
    weight = torch.tensor([0.5, 1.0, 2.0])
    require_same(
        lambda x: functional.cross_entropy(x, labels, weight, label_smoothing=0.1), rows(4, 3, requires_grad=True)
    )


def test_small_probabilities_keep_their_digits() -> None:
    """One minus the error function would be zero, and its logarithm infinite."""
    require_same(lambda x: torch.erfc(x).log(), torch.tensor([0.5, 5.0, 8.0], requires_grad=True))


def test_means_of_what_is_scattered() -> None:
    """Each place counts what came to it."""
    index = torch.tensor([[0, 0, 1], [1, 1, 0]])
    require_same(lambda x: torch.zeros(2, 3).scatter_reduce(0, index, x, "mean"), rows(2, 3, requires_grad=True))


@pytest.mark.parametrize("options", [{"divisor_override": 3}, {"ceil_mode": True}, {"count_include_pad": False}, {}])
def test_averages_of_windows(options: dict[str, Any]) -> None:
    """Options that the exporter drops count."""
    pool = functional.avg_pool2d
    require_same(lambda x: pool(x, 3, stride=2, padding=1, **options), rows(1, 2, 6, 6, requires_grad=True))


@pytest.mark.parametrize("size", [1, 5, 33])
def test_rows_that_are_masked_as_a_whole_are_zero(size: int) -> None:
    """Others are not: those with one number left, with a NaN, or with infinity; their gradients are eager PyTorch's."""
    x = rows(7, size)
    x[:4] = -torch.inf
    x[1, size // 2] = 3
    x[2, size // 2] = torch.nan
    x[3, -1] = torch.inf
    x[4, 0] = x[5, -1] = -torch.inf
    require_same(lambda x: torch.ops.aten._safe_softmax(x, -1), x)
    require_same(lambda x: torch.ops.aten._safe_softmax(x, -1), x[[0, 1, 4, 5, 6]].requires_grad_())


def test_integers_and_booleans_come_out_as_they_are() -> None:
    """Results of all kinds leave one graph, and a number leaves it as a tensor."""
    require_same(lambda x: (x.argmax(-1), x > 0, (x > 0).sum(), x.to(torch.int32), x.topk(2)), rows(4, 5))


def test_an_input_that_is_returned_and_one_that_is_returned_twice() -> None:
    """Neither is a result of onnxruntime."""
    require_same(lambda x, y: (x, x + y, y, y * 2), rows(3), rows(3))


def test_constants_that_are_returned_belong_to_the_caller() -> None:
    """Changing one in place does not change what the next call returns."""
    compiled = torch.compile(lambda x: (torch.ones(3), x + 1), backend=OrtBackend())
    compiled(torch.zeros(2))[0].add_(5)
    torch.testing.assert_close(compiled(torch.zeros(2))[0], torch.ones(3), atol=0, rtol=0)


def test_a_graph_without_inputs() -> None:
    """There is nothing to infer a provider from but the results."""
    require_same(lambda: torch.arange(6).reshape(2, 3) * 2)


def test_an_empty_batch() -> None:
    """No row in, no row out."""
    require_same(mlp(), rows(0, 6))


@pytest.mark.parametrize(
    "layout", [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6), lambda x: x.flip(0)[1:]]
)
def test_inputs_of_any_layout(layout: object) -> None:
    """Transposed, strided, expanded and cut tensors are read as what they mean."""
    require_same(lambda x: (x * 2).sum(0) + x.mean(), layout(rows(4, 6)))  # type: ignore[operator]


def test_a_transposed_result_keeps_its_layout() -> None:
    """Whoever asked for strides gets those of eager PyTorch."""
    require_same(lambda x: (x.exp().T, x.cos().permute(1, 0)), rows(4, 6, requires_grad=True))


def test_channels_last_stays_channels_last() -> None:
    """Layouts pass through convolutions."""
    require_same(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), rows(2, 3, 8, 8).to(memory_format=torch.channels_last)
    )


def test_gradients_accumulate_over_calls() -> None:
    """Two backward passes add up."""
    model, backend = mlp(), OrtBackend()
    compiled = torch.compile(model, backend=backend)
    first, second = rows(5, 6), rows(5, 6)
    for x in (first, second):
        compiled(x).square().mean().backward()
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (model(first).square().mean() + model(second).square().mean()).backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_own_precision(dtype: torch.dtype) -> None:
    """Products of matrices are done in half precision, and the results keep it."""
    model = nn.Linear(6, 3)

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return functional.relu(model(x))

    require_same(cast, rows(5, 6, requires_grad=True), atol=2e-2)  # two roundings to 8 bits


def test_half_precision_is_normalized_by_parameters_in_float32() -> None:
    """PyTorch's kernel returns mean and deviation in float32, and its fake tensors say float16."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x)

    backend = require_same(cast, rows(5, 6, requires_grad=True), atol=1e-2)  # steps of float16 up to 8
    assert not any(session.failure for graph in backend.graphs for session in graph.sessions)
    assert "aten.native_layer_norm.default" not in {
        node.operator for graph in backend.explain().graphs for node in graph.eager
    }


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_models_of_other_precisions(dtype: torch.dtype, atol: float) -> None:
    """Tolerances are a few steps of the precision."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    require_same(model.to(dtype), rows(5, 6).to(dtype), atol=atol)


def test_embeddings_lose_no_gradient_where_indices_repeat() -> None:
    """ScatterND of onnxruntime races: every one of 100 runs with two threads is right."""
    table = nn.Embedding(4, 64)
    compiled = torch.compile(lambda ids: table(ids).sum(1).square(), backend=OrtBackend())
    ids = torch.randint(0, 4, (16, 512))
    table(ids).sum(1).square().sum().backward()
    expected = table.weight.grad
    for _ in range(100):
        table.weight.grad = None
        compiled(ids).sum().backward()
        torch.testing.assert_close(table.weight.grad, expected, rtol=1e-4, atol=1e-2)  # sums of thousands


def test_a_transposed_matrix_times_a_vector() -> None:
    """A fusion of onnxruntime forgets to transpose."""
    require_same(lambda a, v: (a.t().mv(v), v @ a), rows(5, 3, requires_grad=True), rows(5, requires_grad=True))


def test_rows_that_are_added_in_place_by_repeated_indices_are_all_added() -> None:
    """`index_put_(accumulate=True)`, `index_add` and `scatter_add` count every index."""
    index = torch.randint(0, 3, (4096,))
    values = rows(4096, 8)

    def add(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        put = x.clone().index_put_((index,), values, accumulate=True)
        return put, x.index_add(0, index, values), x.scatter_add(0, index[:, None].expand(-1, 8), values)

    require_same(add, torch.zeros(3, 8), atol=1e-2)  # sums of thousands


@pytest.mark.parametrize(
    "place",
    [
        lambda i: (i,),
        lambda i: (slice(None), i),
        lambda i: (i, slice(None), -i - 1),
        lambda i: (slice(1), i[:, None], i),
    ],
)
def test_gradients_of_indexing_are_scattered(place: Callable[[torch.Tensor], object]) -> None:
    """Leading, inner, separated and negative indices, in onnxruntime and without a race."""
    index = torch.tensor([0, 2, 2, 1, 2])
    backend = require_same(lambda x: x[place(index)].exp(), rows(4, 3, 3, requires_grad=True))
    assert all(not graph.eager for graph in backend.explain().graphs)


@pytest.mark.parametrize(("offset", "dims"), [(0, (0, 1)), (1, (2, 0)), (-2, (-1, 1))])
def test_gradients_of_diagonals_are_scattered(offset: int, dims: tuple[int, int]) -> None:
    """Of any two dimensions, above and below the middle."""
    require_same(lambda x: x.diagonal(offset, *dims).exp(), rows(4, 3, 5, requires_grad=True))


def test_dropout_draws_the_numbers_of_eager_pytorch() -> None:
    """The same seed gives the same mask, for any layout of the input."""
    require_same(
        lambda x: (functional.dropout(x, 0.3), functional.dropout(x.T.contiguous().T, 0.5)),
        rows(6, 8, requires_grad=True),
    )


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_", "cauchy_", "geometric_", "log_normal_"])
def test_numbers_that_are_drawn_in_place_are_eagers(name: str) -> None:
    """Decompositions of PyTorch would draw others."""
    arguments = (0.3,) if name == "geometric_" else ()
    require_same(lambda x: getattr(x * 2, name)(*arguments), rows(3, 4))


def test_random_numbers_come_in_the_order_of_the_program() -> None:
    """Also where one draw waits for a result of onnxruntime and the next one does not."""
    require_same(lambda x: (torch.bernoulli(x.sigmoid()), torch.rand(4), torch.randn_like(x)), rows(3, 4))


def test_at_info_a_log_has_no_lines_of_other_libraries(caplog: pytest.LogCaptureFixture) -> None:
    """A layer was a thousand of them, of the exporter and of the passes behind it."""
    with caplog.at_level(logging.INFO):
        function = torch.compile(torch.nn.Linear(4, 4), backend="onnxtool")
        function(torch.rand(2, 4)).sum().backward()
    told = {record.name.partition(".")[0] for record in caplog.records if record.levelno >= logging.INFO}
    assert told <= {"onnxtool"}
