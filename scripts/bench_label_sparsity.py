"""Time the training step of a masked language model: eager PyTorch, ModuleWithLoss, and it without label sparsity.

`python scripts/bench_label_sparsity.py` prints a table as Markdown with a row for each share of labels that count: the
median wall and processor time of a step, forward, loss, backward and optimizer, and ratios. The model is a BERT of
4 layers with hidden size 256 and a vocabulary of 30522, which gets 8 sequences of 128 tokens; which labels count
differs from step to step. Each way runs in a process of its own, because threads of PyTorch and of onnxruntime spin
after a call and would take the next one's cores; the processes take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from harness.machine import describe_machine
from harness.workers import Worker, median_step_ms, serve_steps, take_turns, thread_variables

os.environ["HF_HUB_OFFLINE"] = "1"
WAYS = ("all rows", "label sparsity", "eager")
SHARES = (1.0, 0.5, 0.15)
LAYERS, HIDDEN, HEADS, BATCH, LENGTH, VOCABULARY = 4, 256, 4, 8, 128, 30522
BATCHES = 5
IGNORED = -100


def main() -> None:
    """Print the table, or serve one way to the process that prints it."""
    arguments = _parse()
    if arguments.serve:
        torch.set_num_threads(arguments.threads)
        serve_steps(_make_step(arguments.serve, arguments.share))
        return
    print(f"{describe_machine(arguments.threads)}; {arguments.blocks} blocks of {arguments.steps} steps\n")
    print("| labels that count | way | wall ms | all rows / this | processor ms | all rows / this |")
    print("|---|---|---|---|---|---|")
    for share in arguments.shares:
        _measure(share, arguments)
    print(f"\nat the end: {describe_machine(arguments.threads)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="Turns of each process.")
    parser.add_argument("--steps", type=int, default=4, help="Counted steps of a block.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(share: float, arguments: argparse.Namespace) -> None:
    """Let the ways take turns, and print their rows."""
    shared = [sys.executable, __file__, "--share", str(share), "--threads", str(arguments.threads), "--serve"]
    variables = thread_variables(arguments.threads)
    starts = [partial(Worker.start, way, [*shared, way], environment=variables) for way in WAYS]
    workers = take_turns(starts, arguments.blocks, arguments.steps)
    medians = {worker.name: np.array(median_step_ms(worker)) for worker in workers}
    for way, (wall, processor) in medians.items():
        ratios = medians[WAYS[0]] / medians[way]
        cells = [f"{share:g}", way, f"{wall:.0f}", f"{ratios[0]:.2f}", f"{processor:.0f}", f"{ratios[1]:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _make_step(way: str, share: float) -> Callable[[], None]:
    """Return a function that makes one step of training on the next of a few batches."""
    from transformers import BertConfig, BertForMaskedLM

    from onnxtool.training.trainer.module_with_loss import ModuleWithLoss

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
