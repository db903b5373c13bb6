"""Graphs are cut into as few partitions as what stays in PyTorch allows."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtool.torch_backend import OrtBackend, explain
from onnxtool.torch_backend.lower.placement import CHECK
from onnxtool.torch_backend.partition import stages
from onnxtool.torch_backend.partition.stages import _points, cut
from tests.torch_backend.oracle import require_same


def partitions_of(function: object, staying: str) -> list[list[str]]:
    """Return the operators of each partition where all operators called `staying` stay in PyTorch."""
    graph = make_fx(function)(torch.rand(3)).graph
    stay = {node: "test" for node in graph.nodes if staying in str(node.target)}
    parts = cut(graph, stay)
    assert [node for part in parts for node in part.eager] == list(stay)
    return [[str(node.target).split(".")[1] for node in part.partition] for part in parts if part.partition]


def test_what_waits_for_nothing_joins_the_next_partition() -> None:
    """One partition serves, although two operators could run before what stays."""
    assert partitions_of(lambda x: x.sin() + x.cos() + x.abs(), "abs") == [["sin", "cos", "add", "add"]]


def test_what_stays_in_the_middle_makes_two_partitions() -> None:
    """What it does not need runs where it is read, not in a third."""
    assert partitions_of(lambda x: x.sin().abs().exp() + x.cos(), "abs") == [["sin"], ["exp", "cos", "add"]]


def test_what_stays_side_by_side_makes_no_more_partitions() -> None:
    """Two chains with an operator of PyTorch each are cut at the same place."""
    assert len(partitions_of(lambda x: x.sin().abs().exp() + x.cos().abs().log(), "abs")) == 2


def test_what_stays_at_the_end_makes_no_second_partition() -> None:
    """As the gradient of an embedding does."""
    assert len(partitions_of(lambda x: (x.sin().abs(), x.sin().exp().cos()), "abs")) == 1


def test_what_only_pytorch_reads_does_not_wait_for_the_end_of_a_long_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain whose every result has a reader in PyTorch: 12 bytes each, of which 24 may be held."""

    def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for _ in range(6):
            x = x.sin()
            results.append(x.abs())
        return (*results, x)

    assert len(partitions_of(chain, "abs")) == 1
    monkeypatch.setattr(stages, "MOST_HELD", 24)
    assert partitions_of(chain, "abs") == [["sin"] * 3, ["sin"] * 3]


def test_a_graph_that_stays_as_a_whole_has_no_partition() -> None:
    """PyTorch runs it as it would without the backend."""
    assert partitions_of(lambda x: x.abs(), "abs") == []


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


def test_a_report_of_nothing_says_so() -> None:
    """No graph, no empty text."""
    assert str(OrtBackend().explain()) == "no graph was compiled"


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


def test_reading_by_place_in_memory_stays_in_pytorch() -> None:
    """Values of onnxruntime have no strides to count in."""
    require_same(lambda x: (x.T + 0).as_strided((2, 2), (1, 3)), torch.rand(3, 4))


def test_complex_numbers_stay_in_pytorch() -> None:
    """Nothing of them is translated wrongly."""
    require_same(lambda x: torch.fft.rfft(x * 2).abs() + 1, torch.rand(4, 8))


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
    assert len(backward.partitions) == 2
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
