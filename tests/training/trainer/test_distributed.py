"""A model and its loss stay one graph under DistributedDataParallel; two processes train in test_runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from onnxtool.training import ModuleWithLoss
from onnxtool.training.trainer.losses import CriterionLoss


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def count_runs(module: ModuleWithLoss, counts: list[int], bucket: Any) -> Any:
    """Exchange nothing, and note down how many sessions have run."""
    counts.append(module.backend.execution_count)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap_exchange", [False, True])
def test_buckets_of_gradients_cut_the_graph_only_to_overlap(overlap_exchange: bool) -> None:
    """They are smaller than the model; with a graph for each, one is exchanged while the next is computed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))  # 1 MB each
    inputs, targets = torch.rand(4, 512), torch.rand(4, 512)
    torch.nn.functional.mse_loss(layers(inputs), targets).backward()
    expected = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    module = ModuleWithLoss(layers, compute_loss=CriterionLoss(torch.nn.MSELoss()), overlap_exchange=overlap_exchange)
    distributed = DistributedDataParallel(module, bucket_cap_mb=1)
    num_runs_before: list[int] = []
    distributed.register_comm_hook(None, lambda _state, bucket: count_runs(module, num_runs_before, bucket))
    for _ in range(2):  # the buckets of the first step are one
        layers.zero_grad()
        num_runs_before.clear()
        distributed((inputs, targets)).backward()
    num_graphs = 4 if overlap_exchange else 1
    assert [graph.kind for graph in module.explain().graphs] == ["forward"] * num_graphs + ["backward"] * num_graphs
    # The first buckets are under way before the last backward graph has run.
    assert (num_runs_before[0] < 2 * 2 * num_graphs) == overlap_exchange
    torch.testing.assert_close([parameter.grad for parameter in layers.parameters()], expected, atol=1e-6, rtol=0)
