"""Time a training step whose gradients are exchanged after the backward graph, and one that overlaps both.

One process trains a BERT of 4 layers under DistributedDataParallel; each bucket of gradients takes as long as a network
of so many megabytes a second would, without a processor. So the figures are of the overlap alone, not of gloo or NCCL.

    python scripts/bench_exchange.py [--megabytes_per_second 100] [--steps 20]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from onnxtool.training import ModuleWithLoss

WARM_UP = 5
BUCKETS = 6


class Network:
    """One bucket after the other, each in its time."""

    def __init__(self, megabytes_per_second: float) -> None:
        self._rate = megabytes_per_second
        self._line = threading.Lock()

    def exchange(self, bucket: Any) -> Any:
        """Return the future of a bucket's gradients."""
        future, gradients = torch.futures.Future(), bucket.buffer()

        def transfer() -> None:
            with self._line:
                time.sleep(gradients.numel() * gradients.element_size() / 1e6 / self._rate)
            future.set_result(gradients)

        threading.Thread(target=transfer, daemon=True).start()
        return future


def step_times(steps: int, rate: float, overlap_exchange: bool) -> tuple[list[float], float]:
    """Return the milliseconds of each step, and the last loss."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForSequenceClassification(BertConfig(vocab_size=2000, **sizes))
    batch = {"input_ids": torch.randint(1, 2000, (8, 64)), "labels": torch.randint(0, 2, (8,))}
    megabytes = sum(parameter.numel() * 4 for parameter in model.parameters()) / 2**20
    module = ModuleWithLoss(model, overlap_exchange=overlap_exchange)
    distributed = DistributedDataParallel(module, bucket_cap_mb=megabytes / BUCKETS)
    if rate:
        network = Network(rate)
        distributed.register_comm_hook(None, lambda _state, bucket: network.exchange(bucket))
    times = []
    for _ in range(WARM_UP + steps):
        model.zero_grad()
        start = time.perf_counter()
        loss = distributed(batch)
        loss.backward()
        times.append(1e3 * (time.perf_counter() - start))
    return times[WARM_UP:], float(loss)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes_per_second", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        print("| network, MB/s | exchange | step, ms | last loss |")
        print("|---:|---|---:|---:|", flush=True)
        for rate in (0.0, options.megabytes_per_second):
            for overlaps in (False, True):
                times, loss = step_times(options.steps, rate, overlaps)
                how = "overlapped" if overlaps else "after the graph"
                print(f"| {rate:g} | {how} | {statistics.median(times):.1f} | {loss:.6f} |", flush=True)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
