"""Make artifacts of a model of more than 2 GB, and train a step: time and peak memory.

    python scripts/bench_large_training.py [--gigabytes 2.2] [--folder DIR]

The model is an embedding and a linear layer; its weights are external data full of holes, so that making it takes no
time. Beside it the same of a hundredth of the size, so that what a process needs anyway can be told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, CLASSES = 1024, 8


def make_model(path: Path, gigabytes: float) -> None:
    """Write int64 [N, S] -> embedding -> mean over S -> scores [N, 8]."""
    import onnx
    from onnx import TensorProto, helper

    rows = int(gigabytes * 1e9 / 4 / WIDTH)
    weights = [("words.weight", (rows, WIDTH)), ("out.weight", (CLASSES, WIDTH)), ("out.bias", (CLASSES,))]
    place, tensors = 0, []
    with path.with_suffix(".data").open("wb") as file:
        for name, shape in weights:
            tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
            size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", path.with_suffix(".data").name), ("offset", place), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            place += size
        file.truncate(place)
    nodes = [
        helper.make_node("Gather", ["words.weight", "ids"], ["embedded"], name="words"),
        helper.make_node("ReduceMean", ["embedded", "axes"], ["pooled"], keepdims=0, name="pool"),
        helper.make_node("Gemm", ["pooled", "out.weight", "out.bias"], ["scores"], transB=1, name="out"),
    ]
    tensors.append(helper.make_tensor("axes", TensorProto.INT64, [1], [1]))
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "S"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", CLASSES])],
        tensors,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def run(step: str, folder: Path) -> None:
    """Do one step, and print its time and this process's peak memory as JSON."""
    import numpy as np

    from onnxtool.runtime.timing import peak_rss_bytes
    from onnxtool.training import artifacts
    from onnxtool.training.api import CheckpointState, Module, Optimizer

    start = time.perf_counter()
    if step == "artifacts":
        artifacts.generate_artifacts(
            folder / "model.onnx",
            requires_grad=["*"],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.SGD,
            artifact_directory=folder / "training",
        )
    else:
        state = CheckpointState.load_checkpoint(folder / "training" / "checkpoint")
        module = Module(folder / "training" / "training_model.onnx", state)
        optimizer = Optimizer(folder / "training" / "optimizer_model.onnx", module)
        module(np.arange(32).reshape(4, 8), np.arange(4))
        optimizer.step()
    print(json.dumps({"seconds": time.perf_counter() - start, "peak_rss_bytes": peak_rss_bytes()}))


def main() -> None:
    """Make both models, and do both steps in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--step", choices=("artifacts", "training"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        run(arguments.step, arguments.folder)
        return
    sys.path.insert(0, str(ROOT))
    print(f"load {os.getloadavg()[0]:.1f}")
    print("| parameters | step | time | peak memory |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for size in (arguments.gigabytes / 100, arguments.gigabytes):
            place = Path(folder) / f"{size:g}"
            place.mkdir()
            make_model(place / "model.onnx", size)
            for step in ("artifacts", "training"):
                command = [sys.executable, __file__, "--step", step, "--folder", str(place)]
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                print(
                    f"| {size:g} GB | {step} | {found['seconds']:.1f} s | {found['peak_rss_bytes'] / 1e9:.2f} GB |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
