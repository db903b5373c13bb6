"""Time the training step of a masked language model: eager PyTorch, ModuleWithLoss, and it without label sparsity.

`python scripts/bench_label_sparsity.py` prints a table as Markdown with a row for each share of labels that count: the
median wall and processor time of a step, forward, loss, backward and optimizer, and ratios. The model is a BERT of
4 layers with hidden size 256 and a vocabulary of 30522, which gets 8 sequences of 128 tokens; which labels count
differs from step to step. Each way runs in a process of its own, because threads of PyTorch and of onnxruntime spin
after a call and would take the next one's cores; the processes take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

os.environ["HF_HUB_OFFLINE"] = "1"
Floats = NDArray[np.float64]
WAYS = ("all rows", "label sparsity", "eager")
SHARES = (1.0, 0.5, 0.15)
LAYERS, HIDDEN, HEADS, BATCH, LENGTH, VOCABULARY = 4, 256, 4, 8, 128, 30522
WARMUP, BATCHES = 3, 5
IGNORED = -100


def main() -> None:
    """Print the table, or serve one way to the process that prints it."""
    arguments = _parse()
    if arguments.serve:
        _serve(arguments.serve, arguments.share, arguments.threads)
        return
    print(f"{arguments.threads} threads, {arguments.blocks} blocks of {arguments.steps} steps")
    print(f"load average {os.getloadavg()[0]:.1f} at the start\n")
    print("| labels that count | way | wall ms | all rows / this | processor ms | all rows / this |")
    print("|---|---|---|---|---|---|")
    for share in arguments.shares:
        _measure(share, arguments)
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="Turns of each process.")
    parser.add_argument("--steps", type=int, default=4, help="Steps of a block.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(share: float, arguments: argparse.Namespace) -> None:
    """Let the ways take turns, and print their rows."""
    workers = {way: _worker(way, share, arguments.threads) for way in WAYS}
    blocks: dict[str, list[Floats]] = {way: [] for way in WAYS}
    try:
        for worker in workers.values():
            _answer(worker)  # one warms up at a time
        for _ in range(arguments.blocks):
            for way, worker in workers.items():
                if worker.stdin is None:
                    raise RuntimeError("the worker has no pipe")
                print(arguments.steps, file=worker.stdin, flush=True)
                blocks[way].append(np.array(json.loads(_answer(worker))))
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.wait()
    medians = {way: np.median(np.concatenate(times), axis=0) for way, times in blocks.items()}
    for way, (wall, processor) in medians.items():
        ratios = medians[WAYS[0]] / medians[way]
        cells = [f"{share:g}", way, f"{wall:.0f}", f"{ratios[0]:.2f}", f"{processor:.0f}", f"{ratios[1]:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _worker(way: str, share: float, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--serve", way, "--share", str(share), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _answer(worker: subprocess.Popen[str]) -> str:
    line = worker.stdout.readline() if worker.stdout else ""
    if not line:
        raise RuntimeError("the process of a way ended")
    return line


def _serve(way: str, share: float, threads: int) -> None:
    """Read numbers of steps, and answer each with the wall and processor milliseconds of every step."""
    torch.set_num_threads(threads)
    step = _make_step(way, share)
    for _ in range(WARMUP):
        step()
    print(json.dumps("warm"), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            wall, processor = time.perf_counter(), time.process_time()
            step()
            times.append([1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)])
        print(json.dumps(times), flush=True)


def _make_step(way: str, share: float) -> Callable[[], None]:
    """Return a function that makes one step of training on the next of a few batches."""
    from transformers import BertConfig, BertForMaskedLM

    from onnxtool.training.with_loss.module_with_loss import ModuleWithLoss

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
    )
    model = BertForMaskedLM(config).train()
    ids = torch.randint(0, VOCABULARY, (BATCHES, BATCH, LENGTH))
    labels = torch.where(torch.rand(ids.shape) < share, ids, IGNORED)
    batches = [
        {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y} for x, y in zip(ids, labels, strict=True)
    ]
    with_loss = ModuleWithLoss(model, label_sparsity=way == "label sparsity", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        batch: dict[str, Any] = batches[num_steps % BATCHES]
        num_steps += 1
        optimizer.zero_grad()
        loss = model(**batch).loss if way == "eager" else with_loss(batch)
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
