"""Time a step through torch.compile: eager PyTorch, this backend, inductor, and the step's products alone.

`python scripts/bench_torch_backend.py` prints a table as Markdown: the median wall time of a step, its ratio to eager
PyTorch with a 95 % interval, and the same of the processor time. Each way runs in a process of its own, because
threads of PyTorch and of onnxruntime spin after a call and would take the next one's cores; the processes take turns, a
block of steps each, of which the first is not counted. The row `products` is a lower bound: the products of
matrices and the convolutions of the step in eager PyTorch, and nothing else. Models have 4 layers of hidden size 256
and get 8 sequences of 128 tokens, or 8 images of 64 x 64; weights and inputs are random from a fixed seed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness.machine import describe_machine
from harness.pages import print_head, print_row
from harness.workers import Worker, serve_steps, take_turns
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from onnxtool.runtime.timing import interval_of_median

os.environ["HF_HUB_OFFLINE"] = "1"
WAYS = ("eager", "onnxtool", "fast-dropout", "inductor", "products")
OPTIONS: dict[str, dict[str, Any]] = {
    "onnxtool": {},
    "fast-dropout": {"dropout": "fast"},
}
"""The ways that are this backend."""
LAYERS, HIDDEN, HEADS, BATCH, LENGTH = 4, 256, 4, 8, 128
VOCABULARY = 30522
Step = Callable[[], Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A model, which gives its loss where it trains, and what it is called with."""

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    trains: bool


class WithLoss(nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """A model that gives its loss alone: as a second result, logits would have a gradient of zeros."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Return the loss of what the model gives for `inputs`."""
        return self.loss(self.model(**inputs))


def language_model(name: str, vocabulary: int, *, trains: bool) -> Case:
    """Return a model of this class of transformers, with its loss where it trains, else with its logits."""
    import transformers

    kind = getattr(transformers, name)
    sizes = {"vocab_size": vocabulary, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN}
    config = kind.config_class(**sizes, num_hidden_layers=LAYERS, num_attention_heads=HEADS, use_cache=False)
    model, ids = kind(config), torch.randint(0, vocabulary, (BATCH, LENGTH))
    if not trains:
        return Case(model, {"input_ids": ids}, trains=False)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return Case(WithLoss(model, lambda outputs: outputs.loss), inputs, trains=True)


def convolutions(_vocabulary: int) -> Case:
    """Return four blocks of convolution, normalization, rectifier and pooling, and a classifier, with its loss."""
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise((3, 32, 64, 128, 256)):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    classes = torch.arange(BATCH) % 10
    loss = partial(nn.functional.cross_entropy, target=classes)
    return Case(WithLoss(model, loss), {"input": torch.randn(BATCH, 3, 64, 64)}, trains=True)


CASES: dict[str, Callable[..., Case]] = {
    "bert-training": partial(language_model, "BertForMaskedLM", trains=True),
    "llama-training": partial(language_model, "LlamaForCausalLM", trains=True),
    "llama-inference": partial(language_model, "LlamaForCausalLM", trains=False),
    "convolution-training": convolutions,
}


def model_step(case: Case, backend: Any = "") -> Step:
    """Return a function that makes a step of the model, eager or through a backend of `torch.compile`, or its name."""
    model = case.model.train(case.trains)
    call: Any = torch.compile(model, backend=backend, dynamic=False) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        call(**case.inputs).backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            call(**case.inputs)

    return train if case.trains else infer


PRODUCTS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
        *(aten.convolution.default, aten.convolution_backward.default),
    }
)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # PyTorch has no types here
    """Notes every product of matrices and every convolution, with copies of the step's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            copies = [torch.randn_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.calls.append((func, tuple(copies)))
        return func(*args, **(kwargs or {}))


def products_step(case: Case) -> tuple[Step, int]:
    """Return a function that does nothing of a step but its products, as eager PyTorch does them.

    Attention counts as the products that it is made of. The second result is the number of floating-point operations:
    two for each multiplication and addition.
    """
    step = model_step(case)
    with sdpa_kernel(SDPBackend.MATH), _Recorder() as recorder:
        step()

    def products() -> None:
        with torch.no_grad():
            for func, args in recorder.calls:
                func(*args)

    with FlopCounterMode(display=False) as counter:
        products()
    return products, int(counter.get_total_flops())


def make_step(case: Case, way: str) -> tuple[Step, int]:
    """Return one step of a case in one of `WAYS`, and the operations of `products`."""
    if way == "products":
        return products_step(case)
    if way in OPTIONS:
        from onnxtool.torch_backend import OrtBackend, OrtBackendOptions

        return model_step(case, OrtBackend(OrtBackendOptions(**OPTIONS[way]))), 0
    return model_step(case, "" if way == "eager" else way), 0


def main() -> None:
    """Print the table of each case, or serve one way to the process that prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="Turns of each process.")
    parser.add_argument("--steps", type=int, default=10, help="Counted steps of a block.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="Words of the language models.")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="The first is the measure.")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    threads, vocabulary = arguments.threads, arguments.vocabulary
    if arguments.serve:
        name, way = arguments.serve
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        serve_steps(*make_step(CASES[name](vocabulary), way))
        return
    print(f"{describe_machine(threads)}; {arguments.blocks} blocks of {arguments.steps} steps, {vocabulary} words\n")
    print_head(["case", "way", "wall ms", "of eager", "processor ms", "of eager", "GFLOP/s of the products"])
    shared = [sys.executable, __file__, "--threads", str(threads), "--vocabulary", str(vocabulary), "--serve"]
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    for name in arguments.cases:
        starts = [partial(Worker.start, way, [*shared, name, way], environment=variables) for way in arguments.ways]
        workers = take_turns(starts, arguments.blocks, arguments.steps)
        for worker in workers:
            wall, processor = (statistics.median(itertools.chain(*_times(worker, column))) for column in (0, 1))
            ratios = [_ratio(worker, workers[0], column) if worker is not workers[0] else "1" for column in (0, 1)]
            speed = f"{worker.greeting / wall / 1e6:.0f}" if worker.greeting else ""
            print_row(name, worker.name, f"{wall:.1f}", ratios[0], f"{processor:.1f}", ratios[1], speed)
    print(f"\nat the end: {describe_machine(threads)}")


def _times(worker: Worker, column: int) -> list[list[float]]:
    """Return the wall (0) or processor (1) milliseconds of the steps of each block."""
    return [[step[column] for step in block] for block in worker.answers]


def _ratio(worker: Worker, measure: Worker, column: int) -> str:
    """Return the median of the ratios of blocks of one turn, and its 95 % interval.

    Steps of a block resemble each other, and the machine was as busy for the one block of a turn as for the other.
    """
    both = zip(_times(worker, column), _times(measure, column), strict=True)
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in both]
    low, high = interval_of_median(ratios)
    return f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
