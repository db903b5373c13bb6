"""Large matmuls and convolutions run where a measurement says that they are faster; the numbers stay the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onnxtool.errors import OptionError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend import matmul_placement as placement
from onnxtool.torch_backend.matmul_placement import ResultMemory, gains
from tests.torch_backend.oracle import require_same

SIZE = 288
"""A matrix of so many rows and columns times another one is worth a measurement."""
PYTORCH, ONNXRUNTIME = (9.0, 1.0), (1.0, 9.0)
TOLERANCE = 1e-4
"""Sums of hundreds of products, of which the gradients are sums of hundreds again."""
GRADIENTS = 1e-2
"""Of weights before a batch normalization: small differences of sums over all pixels."""


class Clock:
    """Stands for the measurement, and counts how often it was asked."""

    def __init__(self, times: Sequence[float]) -> None:
        self.times, self.calls = times, 0

    def __call__(self, _calls: object) -> Sequence[float]:
        self.calls += 1
        return self.times


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_measured", {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock by which PyTorch is faster."""
    clock = Clock(PYTORCH)
    monkeypatch.setattr(placement, "_shortest_ms", clock)
    return clock


def square(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def in_pytorch(backend: OrtBackend) -> list[str]:
    """Return the operators that stay in PyTorch because they were measured, forward and backward."""
    nodes = (node for graph in backend.explain().graphs for node in graph.eager)
    return [node.operator.split(".")[1] for node in nodes if node.reason.startswith("measured")]


@pytest.mark.parametrize(("times", "alone", "beside"), [(PYTORCH, 3, 3), (ONNXRUNTIME, 0, 0), ((1.0, 0.8), 3, 0)])
def test_a_matmul_and_its_gradients_run_where_they_are_faster(
    clock: Clock, times: Sequence[float], alone: int, beside: int
) -> None:
    """Beside an operator of onnxruntime, they need to gain more."""
    clock.times = times
    backend = require_same(lambda x, w: x @ w, square(), square(1), atol=TOLERANCE)
    assert in_pytorch(backend) == ["mm"] * alone
    backend = require_same(lambda x, w: (x @ w).exp(), square(), (square(1) * 0.01).detach(), atol=TOLERANCE)
    assert len(in_pytorch(backend)) == beside * 2 // 3


@pytest.mark.parametrize(("times", "count"), [((1.0, 1.1), 2), ((1.0, 1.3), 0)])
def test_a_convolution_between_operators_of_pytorch_stays_with_them(
    clock: Clock, times: Sequence[float], count: int
) -> None:
    """A session for it alone costs more than it gains, unless it gains much."""
    clock.times = times
    first, second = nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)
    backend = require_same(
        lambda x: second(first(x.sort(-1)[0]).sort(-1)[0]).sort(-1)[0], torch.rand(2, 16, 56, 56), atol=GRADIENTS
    )
    assert in_pytorch(backend) == ["convolution"] * count


def test_what_runs_where_is_reported_with_its_times(clock: Clock) -> None:
    backend = require_same(lambda x, w: x @ w, square(), square(1), atol=TOLERANCE)
    assert "mm.default in PyTorch: measured: 1.00 ms there, 9.00 ms in onnxruntime" in str(backend.explain())


def test_convolutions_are_measured_too(clock: Clock) -> None:
    """Those that are transposed as well."""
    net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ConvTranspose2d(32, 16, 3))
    backend = require_same(net, torch.rand(2, 16, 48, 48), atol=TOLERANCE)
    assert in_pytorch(backend) == ["convolution", "convolution"]


@pytest.mark.parametrize("bias", [True, False])
def test_layers_in_half_and_double_precision_agree(clock: Clock, bias: bool) -> None:
    """Only float32 and float64 are measured."""
    for dtype, count in ((torch.float64, 1), (torch.float16, 0)):
        layer = nn.Linear(SIZE, SIZE, bias=bias).to(dtype).requires_grad_(False)
        backend = require_same(layer, torch.rand(SIZE, SIZE).to(dtype), atol=2e-3)
        assert len(in_pytorch(backend)) == count
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("function", "options", "arguments"),
    [
        (lambda x: x[:50] @ x, {}, {}),
        (lambda x: x @ x, {"matmuls": "onnxruntime"}, {}),
        (lambda x: x @ x, {"pre_ort_model_transforms": [lambda _model: None]}, {}),
    ],
    ids=["small", "switched off", "changed by a function of the user"],
)
def test_a_product_that_is_not_timed_stays_in_onnxruntime(
    clock: Clock, function: Any, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    backend = require_same(function, square(), options=OrtBackendOptions(**options), atol=TOLERANCE, **arguments)
    assert (in_pytorch(backend), clock.calls) == ([], 0)


def test_dynamic_matmuls_are_measured_at_the_sizes_of_the_first_call(clock: Clock) -> None:
    """And stay where they are for later sizes; at another first size they are another measurement."""
    backend = require_same(lambda x, w: x @ w, square(), square(1), dynamic=True, atol=TOLERANCE)
    assert in_pytorch(backend) == ["mm"] * 3
    compiled = torch.compile(lambda x, w: x @ w, backend=backend, dynamic=True)
    for rows in (SIZE, 7):
        x, w = torch.rand(rows, SIZE), square(1).detach()
        torch.testing.assert_close(compiled(x, w), x @ w, atol=TOLERANCE, rtol=TOLERANCE)
    measured = clock.calls
    torch._dynamo.reset()
    require_same(lambda x, w: x @ w, torch.rand(2 * SIZE, SIZE), square(1), dynamic=True, atol=TOLERANCE)
    assert clock.calls > measured


def test_equal_matmuls_are_measured_once(clock: Clock) -> None:
    """In one graph, and in the next one."""
    for _ in range(2):
        torch._dynamo.reset()
        x, v, w = (square(seed).detach() for seed in range(3))
        assert len(in_pytorch(require_same(lambda x, v, w: (x @ v, x @ w), x, v, w, atol=TOLERANCE))) == 2
    assert clock.calls == 1


def test_a_later_process_decides_by_the_record_of_the_first(clock: Clock, tmp_path: Path) -> None:
    """Also where its own measurement would be another; a damaged record is measured again."""
    options = OrtBackendOptions(cache_folder=tmp_path)

    def compile_again() -> int:
        torch._dynamo.reset()
        placement._measured.clear()
        x, w = square().detach(), square(1).detach()
        return len(in_pytorch(require_same(lambda x, w: x @ w, x, w, atol=TOLERANCE, options=options)))

    assert compile_again() == 1
    clock.times = ONNXRUNTIME
    assert (compile_again(), clock.calls) == (1, 1)
    for path in tmp_path.glob("*.json"):
        if "pytorch_ms" in path.read_text(encoding="utf-8"):
            path.write_text('{"pytorch_ms": "1"}', encoding="utf-8")
    assert (compile_again(), clock.calls) == (0, 2)


def test_a_measurement_takes_both_libraries_and_leaves_the_generator_alone() -> None:
    """Without a clock that stands for it."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    torch.compile(lambda x, w: x @ w, backend=OrtBackend())(square().detach(), square(1).detach())
    assert torch.equal(torch.rand(1), expected)
    (times,) = placement._measured.values()
    assert min(times) > 0


def test_a_gain_is_more_than_measurements_differ() -> None:
    """By 5 %, whatever the border costs."""
    assert gains(10.0, 9.0, 0.3)
    assert not gains(10.0, 9.6, 0.3)
    assert not gains(1.0, 0.8, 0.3)
    assert gains(1.0, 1.1, -0.2)


def test_an_unknown_placement_of_products_is_refused() -> None:
    with pytest.raises(OptionError, match="'fastest' is not one of"):
        OrtBackendOptions(matmuls="fastest")


def test_memory_is_free_again_when_the_last_view_is_gone() -> None:
    """Until then, another result has other memory."""
    memory = ResultMemory()
    first = memory.allocate((3, 4), torch.float32)
    address, view = first.data_ptr(), first.t()[1:]
    del first
    assert memory.allocate((3, 4), torch.float32).data_ptr() != address
    held = memory.allocate((3, 4), torch.float32)
    del view
    assert {memory.allocate((6,), torch.float64).data_ptr() for _ in range(2)} == {address}
    assert held.data_ptr() != address


def test_a_result_outlives_the_memory_that_it_is_from() -> None:
    """As a gradient outlives the compiled graph."""
    memory = ResultMemory()
    result = memory.allocate((1000,), torch.float32).fill_(7)
    del memory
    assert [torch.empty(1000).fill_(1) for _ in range(3)]
    assert result.eq(7).all()


def test_threads_never_share_a_result() -> None:
    """Each fills its own, and reads it again."""
    memory, wrong = ResultMemory(), []

    def work(number: int) -> None:
        for _ in range(300):
            result = memory.allocate((100,), torch.float32).fill_(number)
            if not result.eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("texts", "terms", "stays"), [(8, 1000, True), (4, 64, True), (8, 64, False)])
def test_scores_of_sparse_vectors_are_those_of_pytorch_to_the_last_bit(texts: int, terms: int, stays: bool) -> None:
    """A score of 80 is rounded by 1e-5, and the gradients of a loss of such scores are off by as much."""
    draw = torch.Generator().manual_seed(0)
    queries, documents = (torch.rand(texts, terms, generator=draw) for _ in range(2))
    backend = OrtBackend()
    scores = torch.compile(lambda x, y: (x * 2) @ y.T, backend=backend)(queries, documents)
    kept = [node.operator for graph in backend.explain().graphs for node in graph.eager]
    assert kept.count("aten.mm.default") == stays
    assert not stays or torch.equal(scores, (queries * 2) @ documents.T)
