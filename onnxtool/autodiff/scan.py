"""Apply a step function along an axis, forward or backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor

Step: TypeAlias = Callable[[Builder, Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


def scan(
    build: Builder, step: Step, states: Sequence[Tensor], inputs: Sequence[Tensor], *, backward: bool
) -> tuple[Tensor, ...]:
    """Apply a step function along the first axis of `inputs`, which passes states on to the next step.

    Args:
        build: adds the node to the graph.
        step: takes a builder for its body, the states and one slice of each input; returns new states and results.
        states: the states before the first step.
        inputs: of equal length; slices lack the first axis.
        backward: go from the end to the start; the results still have the order of the inputs.

    Returns:
        The states after the last step, then the results of all steps, stacked.
    """
    given = (*states, *inputs)
    parameters = [ir.Value(name=build.names.new("slice"), type=ir.TensorType(tensor.dtype)) for tensor in given]
    body = ir.Graph(parameters, [], nodes=[], name=build.names.new("step"))
    inner = Builder(body, names=build.names)
    slices = [inner.tensor(value) for value in parameters]
    after, results = step(inner, slices[: len(states)], slices[len(states) :])
    # Each output of a body needs its own node, also if two of them are the same value.
    outputs = [inner.copy(tensor) for tensor in (*after, *results)]
    inner.finish()
    body.outputs.extend(tensor.value for tensor in outputs)
    attributes = {
        "body": body,
        "num_scan_inputs": len(inputs),
        "scan_input_directions": [int(backward)] * len(inputs),
        "scan_output_directions": [int(backward)] * len(results),
    }
    node = ir.node("Scan", [tensor.value for tensor in given], attributes, num_outputs=len(outputs))
    return build.add(node, [tensor.dtype for tensor in outputs])
