"""Measure training and inference steps through torch.compile: eager, this backend and inductor, in turns.

`python scripts/bench_torch_backend.py` prints a table of medians as ratios to eager. Models have 4 layers of hidden
size 256 and get 8 sequences of 128 tokens, or 8 pictures of 64 x 64; weights and inputs are random from a fixed seed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
BACKENDS = ("eager", "onnxtool", "inductor")
LAYERS, HIDDEN, HEADS, BATCH, LENGTH, VOCABULARY = 4, 256, 4, 8, 128, 4096


@dataclass(frozen=True)
class Case:
    """Something to measure: a model whose first result is a loss where it trains."""

    name: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    trains: bool


def main() -> None:
    """Print a row a case."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    print(f"threads {arguments.threads}, steps {arguments.steps}, load average {os.getloadavg()[0]:.1f} at the start")
    print(f"{'case':<20} {'eager ms':>9} " + " ".join(f"{name:>9}" for name in arguments.backends[1:]))
    for case in _cases():
        if arguments.cases and case.name not in arguments.cases:
            continue
        times_ms = _measure(case, arguments.backends, arguments.steps)
        medians = [statistics.median(times_ms[name]) for name in arguments.backends]
        ratios = " ".join(f"{median / medians[0]:>9.2f}" for median in medians[1:])
        print(f"{case.name:<20} {medians[0]:>9.1f} {ratios}")
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--backends", nargs="*", default=BACKENDS)
    return parser.parse_args()


def _cases() -> Iterator[Case]:
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    bert = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
    )
    llama = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        use_cache=False,
    )
    yield Case("bert train", BertForMaskedLM(bert), tokens, trains=True)
    yield Case("llama train", LlamaForCausalLM(llama), tokens, trains=True)
    yield Case("llama inference", LlamaForCausalLM(llama), {"input_ids": ids}, trains=False)
    yield Case("conv net train", ConvNet(), {"x": torch.randn(BATCH, 3, 64, 64)}, trains=True)


class ConvNet(nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """Four blocks of convolution, normalization, rectifier and pooling, and a classifier; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        blocks = [
            nn.Sequential(nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2))
            for narrow, wide in itertools.pairwise(widths)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the cross entropy of `x`: float32 [N, 3, H, W], against classes 0, 1, 2, ..."""
        logits = self.classifier(self.blocks(x).mean((2, 3)))
        return (nn.functional.cross_entropy(logits, torch.arange(len(x)) % 10),)


def _measure(case: Case, backends: list[str], steps: int) -> dict[str, list[float]]:
    """Return the durations of each backend, whose steps take turns so that a busy machine is busy for all."""
    runs = {name: _runner(case, name) for name in backends}
    times_ms: dict[str, list[float]] = {name: [] for name in backends}
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(steps):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times_ms[name].append((time.perf_counter() - start) * 1e3)
    return times_ms


def _runner(case: Case, backend: str) -> Callable[[], None]:
    import onnxtool.torch_backend  # noqa: F401 - registers the backend where it is not installed

    model = copy.deepcopy(case.model).train(case.trains)
    call: Any = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        call(**case.inputs)[0].backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            call(**case.inputs)

    return train if case.trains else infer


if __name__ == "__main__":
    main()
