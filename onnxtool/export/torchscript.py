"""Trace by TorchScript with the weights kept out of the trace, and put them on the graph afterwards.

torch's exporter serializes all weights for every pass of shape inference, copies them when it folds constants, writes
a tied one twice, and cannot hold 2 GiB. Here they enter the trace as inputs, of which it knows nothing but dtype and
shape: the graph that comes back is small, and its weights are the tensors of the model, each once, read when the file
is written. Tested with torch 2.13.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from onnxtool.export.tracing_patches import traceable_calls
from onnxtool.reports import Dimension

# Newer opsets than this are not written by torch's TorchScript exporter with all of its operators.
_OPSET = 17

Shapes = Mapping[str, tuple[Dimension, ...]]


def trace_torchscript(
    model: Any, sample: Mapping[str, Any], inputs: Shapes, outputs: Shapes, opset: int | None
) -> ir.Model:
    """Trace `model` on `sample` (input name to tensor), the named axes of `inputs` and `outputs` dynamic.

    The graph holds its weights under the names they have in the model, matrices transposed where the graph wants them
    so, and refers to the model's memory until it is saved.
    """
    import torch

    weights = _weights_of(model, taken={*inputs, *outputs})
    axes = {
        name: {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in {**inputs, **outputs}.items()
    }
    buffer = io.BytesIO()
    with traceable_calls():
        torch.onnx.export(
            _with_weights_as_inputs(model, tuple(sample), weights, tuple(outputs)),
            (*sample.values(), *(tensor.detach() for tensor in weights.values())),
            buffer,
            input_names=[*sample, *weights],
            output_names=list(outputs),
            dynamic_axes=axes,
            opset_version=opset or _OPSET,
            do_constant_folding=True,
            dynamo=False,
        )
    graph: ir.Model = ir.from_proto(onnx.ModelProto.FromString(buffer.getbuffer()))
    _attach(graph.graph, weights)
    _transpose(graph.graph)
    return graph


def _weights_of(model: Any, taken: set[str]) -> dict[str, Any]:
    """Return the parameters and buffers of a module by name, tied ones once, none under a name that is `taken`."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name not in taken}


def _with_weights_as_inputs(
    model: Any, inputs: tuple[str, ...], weights: Mapping[str, Any], outputs: tuple[str, ...]
) -> Any:
    """Give `model` positional inputs, its own weights the last of them, and a tuple of outputs."""
    import torch

    class Stateless(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
        def named_modules(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, Any]]:
            """Yield the modules that nodes are named after; they are no children, as those would bring weights."""
            yield "", self
            yield from model.named_modules(prefix="model")

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            traced = dict(zip(weights, tensors[len(inputs) :], strict=True))
            with _replaced(model, {id(weights[name]): tensor for name, tensor in traced.items()}):
                result = model(**dict(zip(inputs, tensors, strict=False)))
            return (result,) if isinstance(result, torch.Tensor) else tuple(result[name] for name in outputs)

    return Stateless().eval()


@contextmanager
def _replaced(model: Any, tensors: Mapping[int, Any]) -> Iterator[None]:
    """Put `tensors` in the place of the weights with these ids while the block runs.

    torch.func.functional_call is for this, and refuses to run in a trace.
    """
    places = [
        (own, name, weight)
        for module in model.modules()
        for own in (module._parameters, module._buffers)  # noqa: SLF001  attributes would not take a plain tensor
        for name, weight in own.items()
        if id(weight) in tensors
    ]
    try:
        for own, name, weight in places:
            own[name] = tensors[id(weight)]
        yield
    finally:
        for own, name, weight in places:
            own[name] = weight


def _attach(graph: ir.Graph, weights: Mapping[str, Any]) -> None:
    """Turn the inputs that are weights into initializers; drop those that nothing uses."""
    found = {str(value.name): value for value in graph.inputs}
    graph.inputs[:] = [value for name, value in found.items() if name not in weights]
    for name, tensor in weights.items():
        value = found.get(name)
        if value is not None and value.uses():
            value.const_value = TorchTensor(tensor.detach(), name=name)
            graph.register_initializer(value)


def _transpose(graph: ir.Graph) -> None:
    """Replace `Transpose(weight)` by a transposed weight where nothing wants it as it is.

    The fusions of onnxruntime know a MatMul by the weight at its input. A weight that is used both ways, an embedding
    tied to the output layer, stays one with a Transpose: onnxruntime resolves that when it loads the file.
    """
    for value in list(graph.initializers.values()):
        nodes = [node for node, _ in value.uses()]
        orders = {tuple(node.attributes["perm"].as_ints()) for node in nodes if _transposes(node)}
        if len(orders) != 1 or not all(map(_transposes, nodes)) or value.is_graph_output():
            continue
        tensor: Any = value.const_value
        turned = TorchTensor(tensor.raw.permute(*orders.pop()), name=tensor.name)  # a view: no memory
        value.const_value, value.shape = turned, ir.Shape(turned.shape)
        for node in nodes:
            node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def _transposes(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.domain == "" and "perm" in node.attributes
