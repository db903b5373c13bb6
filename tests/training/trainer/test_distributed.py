"""A model and its loss stay one graph under DistributedDataParallel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
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


SCRIPT = """
import sys, torch
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from onnxtool.training import ModuleWithLoss
from onnxtool.training.trainer.losses import CriterionLoss

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
for overlaps in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40000), torch.nn.Tanh(), torch.nn.Linear(40000, 8))
    inputs, targets = torch.rand(4, 6, 8), torch.rand(4, 6, 8)
    module = ModuleWithLoss(model, compute_loss=CriterionLoss(torch.nn.MSELoss()), overlap_exchange=overlaps)
    distributed = DistributedDataParallel(module, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        half = slice(3 * rank, 3 * rank + 3)
        distributed((inputs[step, half], targets[step, half])).backward()
        optimizer.step()
    assert module.backend.execution_count == (16 if overlaps else 8), module.backend.execution_count
    save_file(model.state_dict(), f"{sys.argv[1]}/{rank}-{overlaps}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_train_as_one_with_both_batches(tmp_path: Path) -> None:
    """Gradients are the mean over both, exchanged after the backward graph or during it; torchrun starts them."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    subprocess.run([*torchrun, str(script), str(tmp_path)], check=True, capture_output=True, timeout=300)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40000), torch.nn.Tanh(), torch.nn.Linear(40000, 8))
    inputs, targets = torch.rand(4, 6, 8), torch.rand(4, 6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[step]), targets[step]).backward()
        optimizer.step()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        torch.testing.assert_close(load_file(file), dict(model.state_dict()), rtol=0, atol=1e-6)
