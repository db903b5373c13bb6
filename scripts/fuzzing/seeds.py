"""Sound models to damage: tiny exports of several architectures, their optimized files, and graphs made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

EXPORTED = (
    ("fill-mask", "bert"),
    ("text-generation-with-past", "llama"),
    ("image-classification", "mobilenet_v1"),
    ("feature-extraction", "bert"),
)


def make_seeds(folder: Path, *, by_hand_only: bool = False) -> list[Path]:
    """Make all seeds in `folder`, unless they are there, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in by_hand().items():
        onnx.save(model, folder / f"{name}.onnx")
    if by_hand_only:
        return sorted(folder / f"{name}.onnx" for name in by_hand())
    for task, model_type in EXPORTED:
        _export(task, model_type, folder)
    return sorted(folder.glob("*.onnx"))


def _export(task: str, model_type: str, folder: Path) -> None:
    from zoo.checkpoint import make_checkpoint
    from zoo.tasks import find_task

    from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model

    path = folder / f"{model_type}-{task}.onnx"
    if path.exists():
        return
    print(f"making {path.name}", file=sys.stderr)
    checkpoint = folder / "checkpoints" / path.stem
    make_checkpoint(find_task(task), model_type, checkpoint)
    export_model(ExportOptions(model_name=str(checkpoint), task=task, output=path, force=True))
    for precision in ("fp32", "int8") if model_type == "bert" else ("fp32",):
        output = path.with_name(f"{path.stem}-{precision}.onnx")
        optimize_model(OptimizeOptions(model_path=path, output=output, precision=precision, force=True, verify=False))


def by_hand() -> dict[str, onnx.ModelProto]:
    """Return graphs with what tiny exports lack, by name: control flow, functions, sequences, training, QDQ."""
    weight = numpy_helper.from_array(np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3), "w")
    made = {
        "mlp": _model(
            [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], [weight]
        ),
        "function": _with_function(weight),
    }
    branch = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], "neg", [], [_value("n")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["o"])], "id", [], [_value("o")])
    made["if"] = _model(
        [
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "zero"], ["c"]),
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other),
        ],
        [numpy_helper.from_array(np.float32(0), "zero")],
    )
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Mul", ["v", "v"], ["u"])],
        "body",
        [_value("i", TensorProto.INT64, []), _value("c", TensorProto.BOOL, []), _value("v")],
        [_value("d", TensorProto.BOOL, []), _value("u")],
    )
    made["loop"] = _model(
        [helper.make_node("Loop", ["n", "t", "x"], ["y"], body=body)],
        [numpy_helper.from_array(np.array(3), "n"), numpy_helper.from_array(np.array(True), "t")],
    )
    made["sequence"] = _model(
        [
            helper.make_node("SequenceConstruct", ["x", "x"], ["q"]),
            helper.make_node("ConcatFromSequence", ["q"], ["y"], axis=0),
        ],
        [],
    )
    made["qdq"] = _model(
        [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
            helper.make_node("DequantizeLinear", ["wq", "scale"], ["wd"]),
            helper.make_node("MatMul", ["d", "wd"], ["y"]),
        ],
        [
            numpy_helper.from_array(np.float32(0.1), "scale"),
            numpy_helper.from_array(np.uint8(128), "zero"),
            numpy_helper.from_array(np.ones((3, 3), np.int8), "wq"),
        ],
    )
    return made


def _with_function(weight: onnx.TensorProto) -> onnx.ModelProto:
    model = _model([helper.make_node("Layer", ["x", "w"], ["y"], domain="local")], [weight])
    nodes = [helper.make_node("MatMul", ["a", "b"], ["m"]), helper.make_node("Tanh", ["m"], ["r"])]
    model.functions.append(
        helper.make_function("local", "Layer", ["a", "b"], ["r"], nodes, [helper.make_opsetid("", 18)])
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def _value(name: str, dtype: int = TensorProto.FLOAT, shape: list[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto]) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", [_value("x", shape=["batch", 3])], [_value("y")], initializers)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
