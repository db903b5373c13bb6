"""Views cost nothing: where a piece ends, PyTorch makes them, and no session copies what it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.torch_backend.graphs import models_of, operators
from tests.torch_backend.oracle import require_same


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
