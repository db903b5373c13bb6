"""Tensors that are turned around in memory go into a session as they lie there, and mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtool.torch_backend.partition.partitions import Partition, extract
from tests.torch_backend.oracle import require_same


def partition_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Partition:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return extract(graph, [node for node in graph.graph.nodes if node.op == "call_function"])


def test_inputs_are_given_in_the_order_of_their_memory() -> None:
    """And turned back inside; one with gaps is copied."""
    partition = partition_of(
        lambda x, y, z: (x + y.sum() + z.sum(),), torch.rand(4, 3).t(), torch.rand(2, 3), torch.rand(9)[::3]
    )
    assert partition.orders == ((1, 0), None, None)
    (first, *_) = partition.module.graph.find_nodes(op="placeholder")
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


def test_heads_of_attention_in_a_dynamic_graph() -> None:
    """Views of sizes that are known at the call alone stay in the session."""

    def attend(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        query, key, value = (x @ weight).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return (query @ key.transpose(-1, -2)).softmax(-1).matmul(value).transpose(1, 2).flatten(2)

    require_same(attend, torch.rand(3, 5, 8), torch.rand(8, 24, requires_grad=True), dynamic=True)
