"""How many bytes of tensors onnxruntime has at once, from the order in which it really runs the nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray


def peak_bytes(model: Path, feeds: dict[str, NDArray[Any]], folder: Path) -> int:
    """Run a model once, and return the largest sum of what nodes have given and others still read.

    The graph is the one that onnxruntime has optimized; each tensor counts, also where one is written over another.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = {node.name: node for node in onnx.load(folder / "optimized.onnx").graph.node}
    ended = [event for event in events if event["name"].endswith("_kernel_time")]
    runs = [(event["name"].removesuffix("_kernel_time"), int(event["args"]["output_size"])) for event in ended]
    return _peak([(nodes[name], size) for name, size in runs if name in nodes])


def _peak(runs: list[tuple[onnx.NodeProto, int]]) -> int:
    whole: dict[str, str] = {}  # of what has the same memory in another shape
    last: dict[str, int] = {}
    for step, (node, _) in enumerate(runs):
        for name in _read(node):
            last[whole.get(name, name)] = step
        if node.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
            whole[node.output[0]] = whole.get(node.input[0], node.input[0])
    alive: dict[str, int] = {}
    peak = 0
    for step, (node, size) in enumerate(runs):
        if node.output[0] not in whole:
            alive[node.output[0]] = size
        peak = max(peak, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last.get(name, -1) > step}
    return peak


def _read(node: onnx.NodeProto) -> list[str]:
    inner = [one for attribute in node.attribute for one in attribute.g.node]
    return [*node.input, *(name for one in inner for name in _read(one))]


def training_feeds(state: dict[str, NDArray[np.float32]], user: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return all inputs of a training model: those of the user, the parameters, and empty buffers."""
    feeds: dict[str, NDArray[Any]] = {**user, **state, "lazy_reset_grad": np.array([True])}
    return feeds | {f"{name}_grad.accumulation.buffer": np.zeros_like(array) for name, array in state.items()}
