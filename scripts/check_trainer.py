"""Train the same models by transformers' Trainer and by OrtTrainer, and compare the losses step by step.

`python scripts/check_trainer.py` prints a table and fails where a loss differs by more than 1e-5 of itself:

- largest relative difference: of a loss in fifty steps; and of parameters, absolute, after them;
- resumed: of the losses after a stop in the middle, a new OrtTrainer and its checkpoint, from those of not stopping;
- two processes: of OrtTrainer from Trainer, both under DistributedDataParallel; both ranks need equal parameters.

Models are small, weights and tokens random from a fixed seed, gradients accumulated over two batches of different
sizes at the end of each epoch, and clipped. Dropout is on where the model has any.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from onnxtool.training import OrtTrainer

TOLERANCE = 1e-5
LENGTH, CLASSES, BATCH, EXAMPLES, HIDDEN_SHARE = 24, 3, 4, 46, 0.15
SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}


@dataclass(frozen=True)
class Case:
    """A model, how it is made, and how smooth its labels are."""

    name: str
    make: Callable[[], torch.nn.Module]
    label_smoothing: float


@dataclass(frozen=True)
class Run:
    """The loss of every step, and the parameters after the last."""

    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]


def classifier() -> torch.nn.Module:
    """Make a BERT with dropout, a class a text."""
    return BertForSequenceClassification(BertConfig(num_labels=CLASSES, **SIZES))


def masked() -> torch.nn.Module:
    """Make a BERT with dropout and a score for each token of the vocabulary."""
    return BertForMaskedLM(BertConfig(**SIZES))


def decoder() -> torch.nn.Module:
    """Make a Llama."""
    return LlamaForCausalLM(LlamaConfig(**SIZES))


CASES = (Case("bert", classifier, 0.1), Case("bert, masked tokens", masked, 0.1), Case("llama", decoder, 0.0))


def examples(case: Case) -> list[dict[str, torch.Tensor]]:
    """Return texts with their class, with 15 % of their tokens to find, or with all tokens to predict."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, SIZES["vocab_size"], (EXAMPLES, LENGTH), generator=draw)
    hidden = torch.rand(tokens.shape, generator=draw) < HIDDEN_SHARE
    labels = {classifier: tokens[:, 0] % CLASSES, masked: torch.where(hidden, tokens, -100), decoder: tokens}
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(tokens, labels[case.make], strict=True)
    ]


def train(
    trainer_class: type[Trainer], case: Case, folder: Path, steps: int, *, resumed_from: Path | None = None
) -> Run:
    """Train a new model; half of the way there is a checkpoint, in `folder`."""
    torch._dynamo.reset()  # noqa: SLF001 - as PyTorch's documentation has it
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        label_smoothing_factor=case.label_smoothing,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=steps // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(model=case.make(), args=arguments, train_dataset=examples(case))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resumed_from) if resumed_from else None)
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return Run(losses, {name: value.detach().clone() for name, value in trainer.model.named_parameters()})


def loss_difference(run: Run, other: Run, first_step: int = 0) -> float:
    """Return the largest relative difference of the losses of a step, from `first_step` on."""
    pairs = list(zip(run.losses, other.losses, strict=True))[first_step:]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def parameter_difference(run: Run, other: Run) -> float:
    """Return the largest absolute difference of a parameter."""
    return max(float((value - other.parameters[name]).abs().max()) for name, value in run.parameters.items())


def row(case: Case, steps: int) -> dict[str, Any]:
    """Train in all ways, and return a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = train(Trainer, case, folder / "plain", steps)
        ours = train(OrtTrainer, case, folder / "ours", steps)
        checkpoint = folder / "ours" / f"checkpoint-{steps // 2}"
        resumed = train(OrtTrainer, case, folder / "resumed", steps, resumed_from=checkpoint)
    return {
        "model": case.name,
        "loss of Trainer": plain.losses[-1],
        "loss of OrtTrainer": ours.losses[-1],
        "largest relative difference": loss_difference(ours, plain),
        "parameters": parameter_difference(ours, plain),
        "resumed": loss_difference(resumed, ours, steps // 2),
        "two processes": two_processes(case, steps),
    }


def two_processes(case: Case, steps: int) -> float:
    """Return the largest relative difference of a loss where both Trainers train in two processes."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        options = ["--cases", case.name, "--steps", str(steps), "--layers", str(SIZES["num_hidden_layers"])]
        options += ["--process_of", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *options], env=environment, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            raise RuntimeError(f"the two processes failed:\n{done.stderr}")
        return float(json.loads((Path(name) / "difference.json").read_text(encoding="utf-8")))


def run_as_process(case: Case, steps: int, folder: Path) -> None:
    """Be one of the two processes: the first writes down the difference, all insist on equal parameters."""
    import torch.distributed as dist

    plain = train(Trainer, case, folder / "plain", steps)
    ours = train(OrtTrainer, case, folder / "ours", steps)
    for name, value in ours.parameters.items():
        values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(values, value)
        if not all(torch.equal(value, other) for other in values):
            raise RuntimeError(f"{name} is not the same in all processes")
    if dist.get_rank() == 0:
        (folder / "difference.json").write_text(json.dumps(loss_difference(ours, plain)), encoding="utf-8")
    # The trainers are gone, but for cycles of references in which DistributedDataParallel keeps the process group. What
    # holds it keeps its threads running: at the end of the interpreter, they would end the process by an abort.
    gc.collect()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--process_of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    SIZES["num_hidden_layers"] = options.layers
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    if options.process_of:
        run_as_process(cases[0], options.steps, options.process_of)
        return 0
    rows = [row(case, options.steps) for case in cases]
    print("| " + " | ".join(rows[0]) + " |")
    print("|---|" + "---:|" * (len(rows[0]) - 1))
    for cells in rows:
        print("| " + " | ".join(value if isinstance(value, str) else f"{value:.7g}" for value in cells.values()) + " |")
    judged = ("largest relative difference", "resumed", "two processes")
    return int(any(cells[name] > TOLERANCE for cells in rows for name in judged))


if __name__ == "__main__":
    sys.exit(main())
