"""Train one small classifier on several versions of onnxruntime, and compare the losses.

`python scripts/check_training_runtimes.py DIR …` makes artifacts, trains fifty steps with them in this environment and
in each virtual environment DIR, which needs onnxruntime and numpy alone, and prints a table. It fails where a loss
differs from this environment's by more than 1e-4.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

# No line of onnxtool: this is all that the artifacts ask of a runtime.
_TRAIN = """
import json, sys
import numpy as np, onnxruntime as ort
folder = sys.argv[1]
sessions = [ort.InferenceSession(f"{folder}/{name}_model.onnx", providers=["CPUExecutionProvider"])
            for name in ("training", "optimizer")]
with np.load(f"{folder}/parameters.npz") as file:
    parameters = dict(file)
sizes = [array.size for array in parameters.values()]
flat = lambda arrays: np.concatenate([array.reshape(-1) for array in arrays])[None]
moments = [np.zeros((1, sum(sizes)), np.float32) for _ in range(2)]
draw = np.random.default_rng(0)
x, labels = draw.standard_normal((64, 20)).astype(np.float32), draw.integers(0, 4, 64)
losses = []
for step in range(1, 51):
    feeds = {"x": x, "labels": labels, "lazy_reset_grad": np.array([True]), **parameters}
    feeds |= {f"{name}_grad.accumulation.buffer": np.zeros_like(array) for name, array in parameters.items()}
    loss, *gradients = sessions[0].run(None, feeds)
    losses.append(float(loss))
    values, *moments = sessions[1].run(None, {
        "learning_rate": np.array([0.02], np.float32), "step": np.array([step]), "params": flat(parameters.values()),
        "gradients": flat(gradients), "first_order_moments": moments[0], "second_order_moments": moments[1]})
    pieces = np.split(values[0], np.cumsum(sizes)[:-1])
    parameters = {name: piece.reshape(array.shape) for (name, array), piece in zip(parameters.items(), pieces)}
print(json.dumps([ort.__version__, losses]))
"""


def make_artifacts(folder: Path) -> None:
    """Make artifacts of a network of two layers, a normalization between them."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    from onnxtool.training import artifacts

    draw = np.random.default_rng(1)
    shapes = {"w1": (20, 32), "b1": (32,), "scale": (32,), "shift": (32,), "w2": (32, 4), "b2": (4,)}
    parameters = {name: (draw.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="fc1"),
        helper.make_node("LayerNormalization", ["h", "scale", "shift"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], name="fc2"),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 20])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(array, name) for name, array in parameters.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    loss, optimizer = artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW
    artifacts.generate_artifacts(model, ["*"], loss=loss, optimizer=optimizer, artifact_directory=folder)
    np.savez(folder / "parameters.npz", **parameters)  # type: ignore[arg-type]  # its first parameter is no array


def main() -> int:
    """Train everywhere and print the table."""
    pythons = [Path(sys.executable), *(Path(folder) / "bin" / "python" for folder in sys.argv[1:])]
    print("| onnxruntime | loss before | loss after 50 steps | largest relative difference |")
    print("|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        make_artifacts(Path(folder))
        runs = []
        for python in pythons:
            command = [str(python), "-c", _TRAIN, folder]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    worst = 0.0
    for version, losses in runs:
        difference = max(abs(mine - first) / first for mine, first in zip(losses, runs[0][1], strict=True))
        worst = max(worst, difference)
        print(f"| {version} | {losses[0]:.6f} | {losses[-1]:.6f} | {difference:.1e} |")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
