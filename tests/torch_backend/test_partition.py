"""Graphs are cut into few partitions, views cost nothing, and what shares memory in eager PyTorch shares it here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtool.torch_backend import OrtBackend, explain, partition
from onnxtool.torch_backend.lower.placement import CHECK, SIZE
from onnxtool.torch_backend.partition import Partition, _points, cut, extract
from tests.torch_backend.graphs import models_of, operators
from tests.torch_backend.oracle import require_same


def partition_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Partition:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return extract(graph, [node for node in graph.graph.nodes if node.op == "call_function"])


def test_inputs_are_given_in_the_order_of_their_memory() -> None:
    """And turned back inside; one with gaps is copied."""
    whole = partition_of(
        lambda x, y, z: (x + y.sum() + z.sum(),), torch.rand(4, 3).t(), torch.rand(2, 3), torch.rand(9)[::3]
    )
    assert whole.orders == ((1, 0), None, None)
    (first, *_) = whole.module.graph.find_nodes(op="placeholder")
    assert first.meta["val"].shape == (4, 3)


@pytest.mark.parametrize(
    "layout", [lambda x: x.permute(2, 0, 1), lambda x: x.transpose(1, 2), lambda x: x[:, :1].expand(2, 3, 4)]
)
def test_what_the_backward_pass_needs_is_the_same_in_any_layout(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Products save turned inputs, and give gradients to what they were turned from."""
    backend = require_same(
        lambda x, y: (layout(x).exp() @ layout(y.sin()).transpose(-1, -2)).tanh().transpose(0, 1),
        *(torch.rand(2, 3, 4, requires_grad=True) for _ in range(2)),
    )
    assert all(not graph.eager for graph in backend.explain().graphs)


def partitions_of(function: object, staying: str) -> list[list[str]]:
    """Return the operators of each partition where all operators called `staying` stay in PyTorch."""
    graph = make_fx(function)(torch.rand(3)).graph
    stay = {node: "test" for node in graph.nodes if staying in str(node.target)}
    parts = cut(graph, stay)
    assert [node for part in parts for node in part.eager] == list(stay)
    return [[str(node.target).split(".")[1] for node in part.partition] for part in parts if part.partition]


@pytest.mark.parametrize(
    ("function", "partitions"),
    [
        # One partition serves, although two operators could run before what stays.
        (lambda x: x.sin() + x.cos() + x.abs(), [["sin", "cos", "add", "add"]]),
        # What it does not need runs where it is read, not in a third.
        (lambda x: x.sin().abs().exp() + x.cos(), [["sin"], ["exp", "cos", "add"]]),
        # Two chains with an operator of PyTorch each are cut at the same place.
        (lambda x: x.sin().abs().exp() + x.cos().abs().log(), [["sin", "cos"], ["exp", "log", "add"]]),
        # As the gradient of an embedding does.
        (lambda x: (x.sin().abs(), x.sin().exp().cos()), [["sin", "sin", "exp", "cos"]]),
        (lambda x: x.abs(), []),
    ],
    ids=["waits for nothing", "in the middle", "side by side", "at the end", "as a whole"],
)
def test_what_stays_in_pytorch_makes_as_few_partitions_as_there_can_be(
    function: Callable[..., Any], partitions: list[list[str]]
) -> None:
    """PyTorch runs a graph that stays as a whole as it would without the backend."""
    assert partitions_of(function, "abs") == partitions


def test_what_only_pytorch_reads_does_not_wait_for_the_end_of_a_long_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain whose every result has a reader in PyTorch: 12 bytes each, of which 24 may be held."""

    def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for _ in range(6):
            x = x.sin()
            results.append(x.abs())
        return (*results, x)

    assert len(partitions_of(chain, "abs")) == 1
    monkeypatch.setattr(partition, "MOST_HELD", 24)
    assert partitions_of(chain, "abs") == [["sin"] * 3, ["sin"] * 3]


def test_intervals_that_touch_share_a_point() -> None:
    """Both ends belong to an interval, so that one partition serves both."""
    assert _points([(0, 1), (1, 2), (3, 3)]) == [1, 3]


def test_a_report_says_what_stays_and_why() -> None:
    """For people: counts, operators, reasons."""
    explanation = explain(
        lambda ids, table: torch.nn.functional.embedding(ids, table).exp(),
        torch.tensor([1, 1]),
        torch.rand(3, 2, requires_grad=True),
    )
    text = str(explanation)
    assert re.search(r"^forward: (\d+) of \1 operators in 1 session of onnxruntime$", text, re.MULTILINE)
    assert "1 x aten.embedding_dense_backward.default in PyTorch: ScatterND with reduction=add" in text


def test_an_operator_without_translation_stays_between_two_partitions() -> None:
    """A matrix inverse is not in ONNX."""
    backend = require_same(lambda x: torch.linalg.inv(x.exp() + 3 * torch.eye(3)).sin(), torch.rand(3, 3))
    (graph,) = backend.explain().graphs
    assert len(graph.partitions) == 2
    assert {node.reason for node in graph.eager} == {"no translation to ONNX"}


def test_an_operator_that_onnxruntime_cannot_load_stays_in_pytorch() -> None:
    """There is no kernel of Erf for float64, for one; the report says so."""
    backend = require_same(lambda x: torch.erf(x * 2) + 1, torch.rand(3, dtype=torch.float64), atol=1e-12)
    (graph,) = backend.explain().graphs
    assert all("onnxruntime" in node.reason for node in graph.eager)


def test_tensors_without_data_stay_in_pytorch() -> None:
    """A model on the device `meta` has shapes only, and no provider takes it."""
    backend = OrtBackend()
    compiled = torch.compile(lambda x: x @ x.T + 1, backend=backend)
    assert compiled(torch.rand(3, 2, device="meta")).shape == (3, 3)
    (graph,) = backend.explain().graphs
    assert {node.reason for node in graph.eager} == {"no provider for the device meta"}


def test_checks_stay_in_pytorch_and_are_named() -> None:
    """Sizes that data decides bring assertions, which no session could raise."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = require_same(lambda x: x[x > 0.5] * 2, torch.rand(3, 4))
    (graph,) = backend.explain().graphs
    assert {node.reason for node in graph.eager} == {CHECK}


@pytest.mark.parametrize("training", [True, False])
def test_a_dynamic_network_of_convolutions_is_cut_at_its_gradients_only(training: bool) -> None:
    """Statistics of batches are divided by sizes, which Python computes from those of the input."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AvgPool2d(2))
    ).train(training)
    backend = require_same(model, torch.rand(5, 3, 12, 13), dynamic=True, atol=3e-4)  # biases before BatchNorm: noise
    forward, backward = backend.explain().graphs
    assert len(forward.partitions) == 1
    assert len(backward.partitions) == 1
    assert {node.operator for node in forward.eager} <= {"aten.scalar_tensor.default"}
    assert {node.operator for node in backward.eager} <= {
        *("aten.scalar_tensor.default", "aten.convolution_backward.default", "aten.avg_pool2d_backward.default")
    }


def test_numbers_of_sizes_keep_the_precision_of_the_tensor() -> None:
    """A mean by hand in double precision, of sizes in the midst of the graph."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x[1:]])
        return y.sum(0) / (y.shape[0] * 1.1) + y.numel() / 3 - (y.shape[0] + 1) // 2

    backend = require_same(mean, torch.rand(5, 4, dtype=torch.float64), dynamic=True, atol=1e-14)
    assert len(backend.explain().graphs[0].partitions) == 1


def test_a_view_for_what_stays_in_pytorch_is_no_output_of_a_session() -> None:
    """`bernoulli` stays; without the views, the model before it is the exponential alone."""
    models = models_of(lambda x: torch.bernoulli(x.sigmoid().view(3, 8).t()) * 2, torch.randn(4, 6))
    assert [node.op_type for node in models[0].graph.node] == ["Sigmoid"]


def test_a_view_is_no_reason_to_leave_onnxruntime() -> None:
    """And the report does not name it."""
    backend = require_same(lambda x: torch.bernoulli(x.sigmoid().view(3, 8)), torch.randn(4, 6))
    assert {node.operator for graph in backend.graphs for node in graph.report.eager} == {"aten.bernoulli.default"}


def test_a_transposed_weight_is_no_output_for_a_later_piece() -> None:
    """Each piece that multiplies by it reads the weight itself."""

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(torch.bernoulli(torch.mm(x, w.t()).sigmoid()), w.t())

    models = models_of(twice, torch.randn(6, 6), torch.randn(6, 6))
    assert [len(model.graph.output) for model in models] == [1, 1]


def test_a_mask_becomes_numbers_in_the_piece_that_reads_it() -> None:
    """Its truths are a quarter as large, and wait in their place."""

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.bernoulli((x * 2).sigmoid()) * mask.to(torch.float32)

    models = models_of(masked, torch.randn(4, 6), torch.rand(4, 6) > 0.5)
    assert [operators([model])["Cast"] for model in models] == [0, 1]


def test_readers_of_one_view_have_one_each_and_share_it_in_a_session() -> None:
    """A transposition that two of one piece read is made once."""
    models = models_of(lambda x: (x.t().softmax(0), x.t().cumsum(1)), torch.randn(4, 6))
    assert operators(models)["Transpose"] == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "views",
    [
        lambda y: (y, y.view(-1), y.t(), y[1]),
        lambda y: (y[:, 1:], y.flatten()),
        lambda y: (*y.split(2, 1), y),
        lambda y: (y, y.unsqueeze(0).expand(3, 3, 4)),
        lambda y: (y, y),
    ],
)
def test_outputs_that_are_views_of_one_tensor(views: Callable[..., tuple[torch.Tensor, ...]], dynamic: bool) -> None:
    """Changing one in place changes the others, and none of the next call."""
    backend = OrtBackend()
    compiled = torch.compile(lambda x: views(x * 2), backend=backend, dynamic=dynamic)
    x = torch.rand(3, 4)
    for _ in range(2):
        ours, theirs = compiled(x), views(x * 2)
        for results in (ours, theirs):
            results[0].add_(1)
        assert [result.stride() for result in ours] == [result.stride() for result in theirs]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert {node.reason for graph in backend.graphs for node in graph.report.eager} <= {SIZE}
    assert all(graph.report.partitions for graph in backend.graphs)


def test_a_view_that_another_operator_takes_stays_in_the_session() -> None:
    """Only the output is made by PyTorch: the graph is not cut there."""
    backend = require_same(lambda x: ((y := x.exp().t()), y.sin()), torch.rand(3, 4))
    assert [len(graph.partitions) for graph in backend.explain().graphs] == [1]


CHANGES: dict[str, Callable[..., object]] = {
    "an input": lambda x, y: x.mul_(2) + y,
    "views of an input": lambda x, y: (x[1:].add_(1), x.t()[0].mul_(3), x + y)[2],
    "an input by another": lambda x, y: (x.copy_(y.flip(0)), y.copy_(x * 2))[0],
    "a new tensor": lambda x, y: (x + y).clamp_(min=0.5).t_().exp_(),
    "rows that are chosen": lambda x, y: x.index_fill_(0, torch.tensor([1]), 7.0) + y,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_changed_in_place(change: Callable[..., object]) -> None:
    """Whoever holds the tensor sees the change."""
    ours, theirs = ([torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)] for _ in range(2))
    results = torch.compile(change, backend=OrtBackend())(*ours), change(*theirs)
    torch.testing.assert_close([results[0], *ours], [results[1], *theirs], atol=1e-6, rtol=1e-6)


def test_inputs_that_share_memory() -> None:
    """A change of the one is seen in the other, and in what both are cut out of."""

    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2 + y

    compiled = torch.compile(change, backend=OrtBackend())
    for first, second in ((slice(4), slice(2, 6)), (slice(6), slice(6)), (slice(1, 3), slice(3, 5))):
        ours, theirs = torch.arange(6.0), torch.arange(6.0)
        results = [function(base[first], base[second]) for function, base in ((compiled, ours), (change, theirs))]
        torch.testing.assert_close(*results, atol=0, rtol=0)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_outputs_that_are_inputs_are_the_inputs() -> None:
    """Not copies of them: changing the output changes the input."""
    x = torch.zeros(3, 4)
    same, view, made = torch.compile(lambda x: (x, x.view(-1), x + 1), backend=OrtBackend())(x)
    view.add_(1)
    assert same is x
    assert x.eq(1).all()
    assert made.eq(1).all()
