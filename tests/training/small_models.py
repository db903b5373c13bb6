"""Forward models for the tests of training, made with onnx.helper, and how artifacts of them are made and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxtool.training import artifacts, onnxblock
from onnxtool.training.api import CheckpointState, Module, Optimizer
from tests.graphs import of_text

FEATURES, HIDDEN, CLASSES = 5, 7, 3


def perceptron(*, outputs: int = 1, dropout: float | None = None) -> onnx.ModelProto:
    """Make float32 [N, 5] -> hidden layer of 7 -> one or two outputs of 3, called y or y1 and y2."""
    draw = np.random.default_rng(0)
    weights = {"fc1.weight": (HIDDEN, FEATURES), "fc1.bias": (HIDDEN,)}
    for name in _layers(outputs):
        weights |= {f"{name}.weight": (CLASSES, HIDDEN), f"{name}.bias": (CLASSES,)}
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"], transB=1, name="fc1"),
        helper.make_node("Relu", ["h"], ["a"], name="relu"),
    ]
    initializers = [numpy_helper.from_array(draw.standard_normal(s).astype(np.float32), n) for n, s in weights.items()]
    hidden = "a"
    if dropout is not None:
        initializers += [numpy_helper.from_array(np.array(dropout, np.float32), "ratio")]
        initializers += [numpy_helper.from_array(np.array(True), "training")]
        nodes.append(helper.make_node("Dropout", ["a", "ratio", "training"], ["d"], name="dropout"))
        hidden = "d"
    results = []
    for place, name in enumerate(_layers(outputs)):
        output = "y" if outputs == 1 else f"y{place + 1}"
        nodes.append(
            helper.make_node("Gemm", [hidden, f"{name}.weight", f"{name}.bias"], [output], transB=1, name=name)
        )
        results.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", CLASSES]))
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", FEATURES])],
        results,
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def convolutions() -> onnx.ModelProto:
    """Make float32 [N, 3, 8, 8] -> convolution to 6 channels, batch normalization, mean over pixels -> [N, 3]."""
    draw = np.random.default_rng(0)
    shapes = {"conv": (6, 3, 3, 3), "scale": (6,), "shift": (6,), "head": (6, CLASSES)}
    weights = {name: (draw.standard_normal(shape) / 2).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"mean": np.zeros(6, np.float32), "var": np.ones(6, np.float32)}
    body = """[conv] c = Conv <pads=[1, 1, 1, 1]> (x, conv) [norm] n = BatchNormalization(c, scale, shift, mean, var)
        [relu] r = Relu(n) [pool] p = GlobalAveragePool(r) [flatten] f = Flatten(p) [head] y = MatMul(f, head)"""
    return of_text(f"convolutions (float[N, 3, 8, 8] x) => (float[N, {CLASSES}] y) {{ {body} }}", weights)


def parameters_of(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """Return the float initializers of several elements."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {name: array for name, array in arrays.items() if array.dtype == np.float32 and array.size > 1}


def make(folder: Path, model: onnx.ModelProto | Path, **arguments: Any) -> artifacts.ArtifactReport:
    """Make artifacts with cross entropy and AdamW where nothing else is said."""
    settings: dict[str, Any] = {
        "requires_grad": ["*"],
        "loss": artifacts.LossType.CrossEntropyLoss,
        "optimizer": artifacts.OptimType.AdamW,
        "artifact_directory": folder,
    }
    return artifacts.generate_artifacts(model, **{**settings, **arguments})


def load(folder: Path, checkpoint: str = "checkpoint") -> tuple[CheckpointState, Module, Optimizer]:
    """Load artifacts."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # several tests run at once
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", session_options=options)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def batch(samples: int = 8, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw inputs and labels."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal((samples, FEATURES)).astype(np.float32), draw.integers(0, CLASSES, samples)


def run_block(
    block: onnxblock.Block, feeds: dict[str, NDArray[Any]], names: Sequence[str] | None = None, **arguments: str
) -> list[NDArray[Any]]:
    """Build a block on inputs of these dtypes and shapes, and return what onnxruntime gives for them."""
    import onnxruntime as ort

    class Model(onnxblock.ForwardBlock):
        def build(self, *inputs: str) -> Any:
            return block(*inputs, **arguments)

    names = list(feeds) if names is None else names
    built = Model()
    with onnxblock.empty_base() as accessor:
        for name in names:
            kind = helper.np_dtype_to_tensor_dtype(feeds[name].dtype)
            accessor.model.graph.input.append(helper.make_tensor_value_info(name, kind, feeds[name].shape))
        built(*names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(built.to_model_proto().SerializeToString(), options)
    results: list[NDArray[Any]] = session.run(None, feeds)
    return results


def _layers(outputs: int) -> list[str]:
    return ["fc2"] if outputs == 1 else [f"fc{place + 2}" for place in range(outputs)]
