"""A model and its loss stay one graph under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.usefixtures("alone")
def test_buckets_of_gradients_do_not_cut_the_graph() -> None:
    """They are smaller than the model, and TorchDynamo would make a graph for each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    inputs, targets = torch.rand(4, 64), torch.rand(4, 64)
    torch.nn.functional.mse_loss(layers(inputs), targets).backward()
    expected = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    module = ModuleWithLoss(layers, compute_loss=CriterionLoss(torch.nn.MSELoss()))
    DistributedDataParallel(module, bucket_cap_mb=0.01)((inputs, targets)).backward()
    assert [graph.kind for graph in module.explain().graphs] == ["forward", "backward"]
    torch.testing.assert_close([parameter.grad for parameter in layers.parameters()], expected, atol=1e-6, rtol=0)
