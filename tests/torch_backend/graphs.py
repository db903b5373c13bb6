"""What becomes of a function's graphs: the models that the backend makes, and what onnxruntime makes of those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from onnxtool.torch_backend import OrtBackendOptions
from tests.torch_backend.oracle import require_same


def models_of(function: Callable[..., Any], *inputs: Any) -> list[onnx.ModelProto]:
    """Return the models of all pieces, forward and backward, of which the results are those of eager PyTorch."""
    models: list[onnx.ModelProto] = []
    require_same(function, *inputs, options=OrtBackendOptions(pre_ort_model_transforms=[models.append]))
    return models


def operators(models: list[onnx.ModelProto]) -> Counter[str]:
    """Return how many nodes of each operator the models have."""
    return Counter(node.op_type for model in models for node in model.graph.node)


def optimized(models: list[onnx.ModelProto], folder: Path) -> list[onnx.ModelProto]:
    """Return the models as onnxruntime runs them."""
    results = []
    for index, model in enumerate(models):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(folder / f"{index}.onnx")
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results.append(onnx.load(options.optimized_model_filepath))
    return results
