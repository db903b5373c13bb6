"""Run a case: the gradient graph of its operator, finite differences of its forward graph, and PyTorch's autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxtool.autodiff import differentiate
from tests.autodiff.cases.case import Case
from tests.autodiff.reference import OPERATORS

Array = NDArray[Any]
LOSS = "loss"
Run = Callable[[onnx.ModelProto, Mapping[str, Array]], list[Array]]
_STEP = 1e-5
_DIRECTIONS = 4


def name_of(place: int) -> str:
    return f"x{place}"


def forward_model(case: Case, dtype: type[np.floating[Any]], *, dynamic: bool) -> onnx.ModelProto:
    """Make `loss = sum(weight * op(x))`, the weights fixed and random."""
    inputs, constants, names = [], [], []
    for place, array in enumerate(case.inputs):
        names.append("" if array is None else name_of(place))
        if array is None:
            continue
        given = array.astype(dtype) if array.dtype == np.float64 else array
        if place not in case.constants and (place in case.wanted or array.dtype == np.float64):
            named = [f"{name_of(place)}_{axis}" for axis in range(given.ndim)]
            shape = named if dynamic and place not in case.weights else given.shape
            element = helper.np_dtype_to_tensor_dtype(given.dtype)
            inputs.append(helper.make_tensor_value_info(name_of(place), element, shape))
        else:
            constants.append(numpy_helper.from_array(given, name_of(place)))
    outputs = [f"y{place}" for place in range(case.outputs)]
    nodes = [helper.make_node(case.op_type, names, outputs, domain=case.domain, name="node", **case.attributes)]
    if case.dequantized:
        read = ["y0", *names[1:]]
        nodes.append(helper.make_node("DequantizeLinear", read, ["y"], domain=case.domain, **case.attributes))
        outputs = ["y"]
    terms = []
    for place, (output, weight) in enumerate(zip(outputs, weights(case), strict=True)):
        if weight is not None:
            constants.append(numpy_helper.from_array(weight.astype(dtype), f"weight{place}"))
            nodes.append(helper.make_node("Mul", [output, f"weight{place}"], [f"weighted{place}"]))
            nodes.append(helper.make_node("ReduceSum", [f"weighted{place}"], [f"sum{place}"], keepdims=0))
            terms.append(f"sum{place}")
    nodes.append(helper.make_node("Sum", terms, [LOSS]))
    loss = helper.make_tensor_value_info(LOSS, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [])
    graph = helper.make_graph(nodes, "graph", inputs, [loss], constants)
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def weights(case: Case) -> list[Array | None]:
    """Return a weight for each element of each output of float."""
    numbers = np.random.default_rng(7)
    results = torch_outputs(case, [None if array is None else torch.tensor(array) for array in case.inputs])
    return [
        numbers.normal(size=tuple(result.shape)) if result is not None and result.is_floating_point() else None
        for result in results
    ]


def torch_outputs(case: Case, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    result = case.torch(*tensors)
    found = list(result) if isinstance(result, tuple) else [result]
    return [*found, *[None] * (case.outputs - len(found))]


def torch_gradients(case: Case) -> dict[int, Array]:
    """Return what PyTorch's autograd gives in float64."""
    tensors = [None if array is None else torch.tensor(array) for array in case.inputs]
    for place in case.wanted:
        tensor = tensors[place]
        assert tensor is not None
        tensor.requires_grad_()
    results = torch_outputs(case, tensors)
    terms = [
        (result * torch.tensor(weight)).sum()
        for result, weight in zip(results, weights(case), strict=True)
        if result is not None and weight is not None
    ]
    sum(terms[1:], terms[0]).backward()
    return {place: _gradient(tensors[place]) for place in case.wanted}


def _gradient(tensor: torch.Tensor | None) -> Array:
    assert tensor is not None
    found: Array = (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).numpy()
    return found


def gradient_model(model: onnx.ModelProto, places: Sequence[int]) -> tuple[onnx.ModelProto, list[int]]:
    """Return the model with its gradients as outputs, and the places of those that there are."""
    graph_model = ir.from_proto(model)
    found = differentiate(graph_model, LOSS, [name_of(place) for place in places])
    graph = graph_model.graph
    for place in places:
        if name_of(place) in found:
            # Two gradients may be one value, and a graph lists an output once.
            node = ir.node("Identity", [found[name_of(place)]])
            node.outputs[0].name = f"{name_of(place)}_grad"
            node.outputs[0].type, node.outputs[0].shape = found[name_of(place)].type, found[name_of(place)].shape
            graph.append(node)
            graph.outputs.append(node.outputs[0])
    result: onnx.ModelProto = ir.to_proto(graph_model)
    return result, [place for place in places if name_of(place) in found]


def feeds(case: Case, model: onnx.ModelProto, dtype: type[np.floating[Any]]) -> dict[str, Array]:
    wanted = {value.name for value in model.graph.input}
    return {
        name_of(place): array.astype(dtype) if array.dtype == np.float64 else array
        for place, array in enumerate(case.inputs)
        if array is not None and name_of(place) in wanted
    }


def run_onnxruntime(model: onnx.ModelProto, values: Mapping[str, Array], *, threads: int = 2) -> list[Array]:
    """Run on the CPU with as many threads as asked for."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: list[Array] = session.run(None, dict(values))
    return result


def run_reference(model: onnx.ModelProto, values: Mapping[str, Array]) -> list[Array]:
    """Run in numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: list[Array] = ReferenceEvaluator(model, new_ops=list(OPERATORS)).run(None, dict(values))
    return result


def directional_slopes(model: onnx.ModelProto, values: Mapping[str, Array], name: str) -> list[tuple[Array, float]]:
    """Return random directions, and the slope of the loss along each by a central difference in float64."""
    numbers = np.random.default_rng(11)
    slopes = []
    for _ in range(_DIRECTIONS):
        direction = numbers.normal(size=values[name].shape)
        after, before = (
            float(run_reference(model, {**values, name: values[name] + sign * _STEP * direction})[0])
            for sign in (1, -1)
        )
        slopes.append((direction, (after - before) / (2 * _STEP)))
    return slopes
