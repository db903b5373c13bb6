"""Whole runs of a trainer, in one process and in two: the loss of every step, and the parameters after the last.

As a program, with the variables of torch.distributed, this is the two processes: `runs.py STEPS FOLDER`.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments

from onnxtool.training import OrtTrainer
from tests.training.trainer.trainers import VOCABULARY, Sorter, Tagger, classified

LENGTH, BATCH, EXAMPLES, HIDDEN_SHARE = 24, 4, 32, 0.15
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Run:
    """The loss of every step, and the parameters after the last."""

    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]

    def loss_difference(self, other: Run, first_step: int = 0) -> float:
        """Return the largest relative difference of the losses of a step, from `first_step` on."""
        pairs = list(zip(self.losses, other.losses, strict=True))[first_step:]
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)

    def parameter_difference(self, other: Run) -> float:
        """Return the largest absolute difference of a parameter."""
        return max(float((value - other.parameters[name]).abs().max()) for name, value in self.parameters.items())


def examples() -> list[dict[str, torch.Tensor]]:
    """Return texts with 15 % of their tokens to find."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (EXAMPLES, LENGTH), generator=draw)
    labels = torch.where(torch.rand(tokens.shape, generator=draw) < HIDDEN_SHARE, tokens, -100)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(tokens, labels, strict=True)
    ]


def train(
    trainer_class: type[Trainer],
    folder: Path,
    steps: int,
    *,
    make: Callable[[], torch.nn.Module] = Tagger,
    texts: Sequence[dict[str, torch.Tensor]] | None = None,
    resumed_from: Path | None = None,
) -> Run:
    """Train a new model; half of the way there is a checkpoint, in `folder`.

    Gradients are accumulated over two batches and clipped; labels of tokens are smoothed. All batches have
    one size, so each run compiles once.
    """
    torch._dynamo.reset()  # as PyTorch's documentation has it
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2,
        label_smoothing_factor=0.1 if make is Tagger else 0.0, learning_rate=1e-3, logging_steps=1,
        save_steps=steps // 2, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = trainer_class(model=make(), args=arguments, train_dataset=texts or examples())
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resumed_from) if resumed_from else None)
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return Run(losses, {name: value.detach().clone() for name, value in trainer.model.named_parameters()})


def two_processes(steps: int) -> float:
    """Return the largest relative difference of a loss where Trainer and OrtTrainer train in two processes."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, str(steps), name]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the two processes failed:\n{done.stderr}")
        return float(json.loads((Path(name) / "difference.json").read_text(encoding="utf-8")))


def be_two(steps: int, folder: Path) -> int:
    """Train in two processes, which share what this one imported; return how many of them failed."""
    from onnxtool.torch_backend.lower.torch_onnx import translations

    translations()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=be_one_of_two, args=(steps, folder, rank)) for rank in "01"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


def be_one_of_two(steps: int, folder: Path, rank: str) -> None:
    """Train both; the first process writes down the difference, all insist on equal parameters."""
    import torch.distributed as dist

    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    plain, ours = (
        train(one, folder / one.__name__, steps, make=Sorter, texts=classified(EXAMPLES))
        for one in (Trainer, OrtTrainer)
    )
    for name, value in ours.parameters.items():
        values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(values, value)
        if not all(torch.equal(value, other) for other in values):
            raise RuntimeError(f"{name} is not the same in all processes")
    if dist.get_rank() == 0:
        (folder / "difference.json").write_text(json.dumps(ours.loss_difference(plain)), encoding="utf-8")
    # The trainers are gone, but for cycles of references in which DistributedDataParallel keeps the process group. What
    # holds it keeps its threads running: at the end of the interpreter, they would end the process by an abort.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(be_two(int(sys.argv[1]), Path(sys.argv[2])))
