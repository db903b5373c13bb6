"""Time a step of training of one BERT: onnxtool's artifacts on stock onnxruntime, PyTorch, and onnxruntime-training.

`python scripts/bench_training.py` prints a table as Markdown: median milliseconds of a step (gradients and AdamW), of
the gradients alone and of the optimizer alone, the ratio to each peer, and the peak of memory above what the libraries
take. Each tool runs in a process of its own with one thread; the processes take turns, a few steps each. The time is
that of the processor: with one thread it is the wall time of a machine that does nothing else. Dropout is off
everywhere, and all labels count. The row of products is the roof: the products of matrices of a step and nothing else,
as bench_torch_backend.py has them. onnxruntime-training 1.19.2 is run with `--reference DIR`, a virtual environment
that has it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from harness.machine import describe_machine
from harness.pages import print_head, print_row
from harness.processes import run
from harness.workers import Worker, take_turns
from make_models import trained_model

# Letters: B batch, S sequence, V vocabulary.
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
VOCABULARY, BATCH, SEQUENCE = 8000, 8, 128
EAGER, PRODUCTS = "PyTorch eager", "products alone"

# What a worker does: `setup()` gives gradients() and update(); then it waits for a number of steps, and answers.
_LOOP = """
import os, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np
from harness.workers import serve
folder = sys.argv[1]
vocabulary, batch, sequence, sizes = {vocabulary}, {batch}, {sequence}, {sizes}
draw = np.random.default_rng(0)
ids = draw.integers(0, vocabulary, (batch, sequence))
labels = draw.integers(0, vocabulary, (batch, sequence))
{setup}
def memory(kind):
    # Linux alone; getrusage of a process begins with the peak of the one that started it.
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith(kind)).split()[1])
before = memory("VmRSS")
gradients, update = setup()
def answer(steps):
    made = []
    for _ in range(steps):
        start = time.process_time()
        loss = gradients()
        middle = time.process_time()
        update()
        made.append([middle - start, time.process_time() - middle, float(loss), memory("VmHWM") - before])
    return made
serve(answer)
"""

_TORCH = """
import torch, transformers
torch.set_num_threads(1)
def setup():
    model = transformers.BertForMaskedLM.from_pretrained(folder + "/model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0)
    x, y = torch.from_numpy(ids), torch.from_numpy(labels)
    mask = torch.ones_like(x)
    def gradients():
        optimizer.zero_grad()
        logits = model(input_ids=x, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        return loss.item()
    return gradients, optimizer.step
"""

_ARTIFACTS = """
import onnxruntime
from {package}.api import CheckpointState, Module, Optimizer
def setup():
    is_reference = "{name}" == "reference"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = is_reference  # off in the sessions that onnxtool opens itself
    art = folder + "/{name}/"
    state = CheckpointState.load_checkpoint(art + "checkpoint")
    module = Module(art + "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(art + "optimizer_model.onnx", module)
    optimizer.set_learning_rate(1e-4)
    known = {{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}}
    answer = labels.reshape(-1) if is_reference else labels
    feeds = [known.get(name, answer) for name in module.input_names()]
    def gradients():
        module.lazy_reset_grad()
        return module(*feeds)
    return gradients, optimizer.step
"""

_PRODUCTS = """
import torch
from bench_torch_backend import language_model, products_step
torch.set_num_threads(1)
def setup():
    step, flops = products_step(language_model("BertForMaskedLM", vocabulary, trains=True))
    return lambda: step() or flops / 1e9, lambda: None
"""

_REFERENCE_ARTIFACTS = """
import sys, onnx
from pathlib import Path
from onnxruntime.training import artifacts
folder = sys.argv[1]
Path(folder + "/reference").mkdir()
model = onnx.load(folder + "/flat.onnx")
names = [tensor.name for tensor in model.graph.initializer if "." in tensor.name]
artifacts.generate_artifacts(model, requires_grad=names, loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW, artifact_directory=folder + "/reference")
"""


def start(name: str, python: Path, setup: str, folder: Path) -> Worker:
    """Start a tool in a process of its own."""
    code = _LOOP.format(setup=setup, vocabulary=VOCABULARY, batch=BATCH, sequence=SEQUENCE, sizes=SIZES)
    return Worker.start(name, [str(python), "-c", code, str(folder)])


def steps_of(worker: Worker) -> list[list[float]]:
    """Return processor seconds of the gradients and of the optimizer, the loss and the peak memory, of each step."""
    return [step for block in worker.answers for step in block]


def median_ms(worker: Worker, part: int | None = None) -> float:
    """Return the median of a part of a step, or of the whole."""
    return 1e3 * statistics.median(sum(step[:2]) if part is None else step[part] for step in steps_of(worker))


def make_model(folder: Path) -> Any:
    """Write a BERT with random weights and without dropout, and return it."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SIZES,
    )
    model = transformers.BertForMaskedLM(config)
    model.save_pretrained(folder / "model")
    words = (trained_model() / "vocab.txt").read_text("utf-8").splitlines()[:VOCABULARY]
    (folder / "model" / "vocab.txt").write_text("\n".join(words), "utf-8")
    return model


def export_for_reference(model: Any, folder: Path) -> None:
    """Export the forward model as onnxruntime-training wants it: LayerNormalization of opset 17 crashes it."""
    import torch

    class Logits(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).logits.flatten(0, 1)

    ids = torch.zeros((BATCH, SEQUENCE), dtype=torch.int64)
    model.config._attn_implementation = "eager"  # noqa: SLF001
    torch.onnx.export(
        Logits().train(), (ids, torch.ones_like(ids)), str(folder / "flat.onnx"), dynamo=False, opset_version=15,
        do_constant_folding=False, training=torch.onnx.TrainingMode.TRAINING,
        input_names=["input_ids", "attention_mask"], output_names=["logits"],
    )  # fmt: skip


def main() -> int:
    """Run the workers in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, help="a virtual environment with onnxruntime-training 1.19.2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="counted ones of each tool in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder)
        command = ("artifacts", "--model_name", str(folder / "model"), "--output", str(folder / "onnxtool"))
        run(sys.executable, "-m", "onnxtool", *command, "--quiet")
        python = Path(sys.executable)
        ours = _ARTIFACTS.format(package="onnxtool.training", name="onnxtool")
        workers = [("onnxtool", python, ours), (EAGER, python, _TORCH)]
        if options.reference is not None:
            export_for_reference(model, folder)
            reference = options.reference / "bin" / "python"
            run(str(reference), "-c", _REFERENCE_ARTIFACTS, str(folder))
            theirs = _ARTIFACTS.format(package="onnxruntime.training", name="reference")
            workers.append(("onnxruntime-training 1.19.2", reference, theirs))
        workers.append((PRODUCTS, python, _PRODUCTS))
        starts = [partial(start, name, path, setup, folder) for name, path, setup in workers]
        report(take_turns(starts, options.rounds, options.steps))
    return 0


def report(workers: list[Worker]) -> None:
    """Print the table; the last worker makes the products alone, and its loss is their number of operations."""
    first, *_, products = workers
    print(f"{describe_machine(1)}\n")
    columns = "tool | step, ms | gradients, ms | optimizer, ms | onnxtool is x of it | peak memory, MB | last loss"
    print_head(columns.split(" | "))
    for worker in workers:
        cells = [f"{median_ms(worker):.1f}", f"{median_ms(worker, 0):.1f}", f"{median_ms(worker, 1):.1f}"]
        cells.append(f"{median_ms(first) / median_ms(worker):.2f}")
        # Peak of memory, above what the libraries take.
        cells += [f"{steps_of(worker)[-1][3] / 1e6:.0f}", f"{steps_of(worker)[-1][2]:.4f}"]
        shown = cells if worker is not products else [*cells[:2], "", cells[3], "", ""]
        print_row(worker.name, *shown)
    gflop, eager = steps_of(products)[-1][2], next(worker for worker in workers if worker.name == EAGER)
    print(f"\nThe matmuls are {gflop:.1f} GFLOP, {1e3 * gflop / median_ms(products):.0f} GFLOP/s, and", end=" ")
    print(f"{median_ms(products) / median_ms(eager):.2f} of {EAGER}'s step: no float32 step takes less here.")


if __name__ == "__main__":
    sys.exit(main())
