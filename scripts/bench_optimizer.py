"""Time the optimizer of training artifacts alone, and the passes over memory that no formula saves.

`python scripts/bench_optimizer.py` prints a table as Markdown: milliseconds of a step of AdamW in place over buffers of
`--numbers` float32 numbers, with one thread and blocks of several sizes; of a Scan that reads and writes the same
buffers with one operator for each result; and of PyTorch's AdamW. Everything is run in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from harness.machine import describe_machine
from onnx import TensorProto, helper

from onnxtool.training import onnxblock
from onnxtool.training.graphs.names import FIRST_MOMENTS, GRADIENTS, PARAMETERS, SECOND_MOMENTS, updated_name
from onnxtool.training.onnxblock import optim

RESULTS = (PARAMETERS, FIRST_MOMENTS, SECOND_MOMENTS)


class OnePass(optim.Optimizer):
    """Reads and writes what AdamW does, with one operator for each result."""

    moments = (FIRST_MOMENTS, SECOND_MOMENTS)

    def update(self, body: optim.ScanBody, parameters: str, gradients: str, moments: Sequence[str]) -> None:
        """Add three operators: they compute nothing of use."""
        body.op("Sub", parameters, gradients, to=updated_name(parameters))
        for moment in moments:
            body.op("Mul", moment, self.number(1.0), to=updated_name(moment))


def model_of(optimizer: optim.Optimizer) -> onnx.ModelProto:
    """Return the optimizer's model."""
    with onnxblock.empty_base():
        optimizer(([helper.make_tensor("w", TensorProto.FLOAT, [1], [0.0])], []))
        return optimizer.to_model_proto()


def session_step(model: onnx.ModelProto, numbers: int, size: int) -> Callable[[], None]:
    """Return a step over buffers in blocks of `size`, float32 [K, S], each updated in its place."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # as in the sessions that onnxtool opens itself
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, shape = session.io_binding(), [-(-numbers // size), size]
    for name in (*RESULTS, GRADIENTS):
        value = ort.OrtValue.ortvalue_from_numpy(np.full(shape, 0.01, np.float32))
        binding.bind_ortvalue_input(name, value)
        if name in RESULTS:
            binding.bind_ortvalue_output(updated_name(name), value)
    binding.bind_ortvalue_input("learning_rate", ort.OrtValue.ortvalue_from_numpy(np.array([1e-6], np.float32)))
    binding.bind_ortvalue_input("step", ort.OrtValue.ortvalue_from_numpy(np.array([5])))
    return lambda: session.run_with_iobinding(binding)


def torch_step(numbers: int, *, fused: bool) -> Callable[[], Any]:
    """Return a step of PyTorch's AdamW over twenty parameters."""
    import torch

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.full((numbers // 20,), 0.01)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    return torch.optim.AdamW(parameters, lr=1e-6, eps=1e-6, weight_decay=0.0, fused=fused).step  # type: ignore[no-any-return]


def main() -> None:
    """Run everything in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=5_318_000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    models = {"AdamW": model_of(optim.AdamW()), "one operator for each result": model_of(OnePass())}
    steps: dict[str, Callable[[], Any]] = {
        f"{name}, blocks of {size}": session_step(model, options.numbers, size)
        for name, model in models.items()
        for size in options.sizes
    }
    steps["PyTorch"] = torch_step(options.numbers, fused=False)
    steps["PyTorch, fused"] = torch_step(options.numbers, fused=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    print(f"{describe_machine(1)}; {options.numbers} numbers\n\n| optimizer | step, ms |\n|---|---:|")
    for name, seconds in times.items():
        print(f"| {name} | {1e3 * statistics.median(seconds):.1f} |")


if __name__ == "__main__":
    main()
