"""Gradients of If, Scan and Loop: a body is differentiated as a graph of its own, whose gradients run in one too.

An If takes the branch with the gradients of the one that it took. The steps of a Scan or Loop are recorded by running
it once more, with the states before each step as further outputs (the tape), and a Scan reads them from the last to the
first. The gradient of a value that the body reads from outside is the sum over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule
from onnxtool.errors import GradientError
from onnxtool.graph.edit import bodies, reads

Differentiate = Callable[[ir.Graph, str, Sequence[str]], Mapping[str, ir.Value]]
_LOSS = "loss"
_MOST_OUTPUTS = range(1 << 31)


@dataclass(frozen=True)
class _Steps:
    """The steps of a Scan or Loop.

    Attributes:
        body: one step.
        states: the states before the first step; the body's inputs from `first` on, and its outputs from `skipped` on.
        first: the place of the first state among the body's inputs: 2 for a Loop, after its number and condition.
        skipped: the place of the first state among the body's outputs: 1 for a Loop, after its condition.
        slices: the inputs of a Scan that are read slice by slice, with their axes and directions.
        axes: the axes of the outputs that are stacked, and their directions.
    """

    body: ir.Graph
    states: Sequence[Tensor]
    first: int
    skipped: int
    slices: Sequence[tuple[Tensor, int, int]]
    axes: Sequence[tuple[int, int]]


class _Body:
    """A copy of a body in which each value from outside is an input or a constant, to be differentiated by itself."""

    def __init__(self, body: ir.Graph, node: ir.Node, active: Collection[ir.Value]) -> None:
        self.graph = body.clone(allow_outer_scope_values=True)
        if node.graph is not None:
            self.graph.opset_imports.update(node.graph.opset_imports)
        self.arguments = list(self.graph.inputs)
        self._outside: dict[ir.Value, ir.Value] = {}
        own = {*self.arguments, *self.graph.initializers.values()}
        nodes = list(ir.traversal.RecursiveGraphIterator(self.graph))
        own.update(value for node in nodes for value in node.outputs)
        own.update(value for node in nodes for graph in bodies(node) for value in _given(graph))
        for node in nodes:
            for index, value in enumerate(node.inputs):
                if value is not None and value not in own:
                    node.replace_input_with(index, self._inside(value, active))
        for index, value in enumerate(self.graph.outputs):
            if value not in own:
                copy = ir.node("Identity", [self._inside(value, active)])
                copy.outputs[0].type, copy.outputs[0].name = value.type, f"{value.name}/read"
                self.graph.append(copy)
                self.graph.outputs[index] = copy.outputs[0]
        self._build = Builder(self.graph)

    def _inside(self, value: ir.Value, active: Collection[ir.Value]) -> ir.Value:
        if value not in self._outside:
            constant = None if value in active or value.is_graph_input() else ir.convenience.get_const_tensor(value)
            copy = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=constant)
            self._outside[value] = copy
            if constant is None:
                self.graph.inputs.append(copy)
            else:
                self.graph.register_initializer(copy)
        return self._outside[value]

    def weigh(self, seeds: Mapping[int, Tensor]) -> dict[int, ir.Value]:
        """Make a loss whose gradients of outputs, by place, are `seeds`; return the inputs that stand for these."""
        total: Tensor | None = None
        inputs = {}
        for place, seed in seeds.items():
            output = self.graph.outputs[place]
            inputs[place] = ir.Value(name=self._build.names.new("seed"), type=seed.value.type, shape=output.shape)
            product = self._build.tensor(inputs[place]) * self._build.tensor(output)
            part = self._build.op("ReduceSum", product, keepdims=0).cast(ir.DataType.DOUBLE)
            total = part if total is None else total + part
        self._build.finish()
        self.graph.inputs.extend(inputs.values())
        loss = total if total is not None else self._build.constant(0.0, ir.DataType.DOUBLE)
        loss.value.name = _LOSS
        return inputs

    def differentiate(
        self, differentiate: Differentiate, arguments: Sequence[ir.Value], outside: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Return the gradients of arguments and of values from outside; zeros if the loss does not depend on one.

        Raises:
            Refusal: an operator of the body has no gradient.
        """
        sources = [*arguments, *(self._inside(value, outside) for value in outside)]  # a branch may not read it
        names = [str(value.name) for value in sources]
        try:
            found = differentiate(self.graph, _LOSS, names)
        except GradientError as error:
            raise Refusal(f"its body has {error.message}") from error
        build = Builder(self.graph)
        gradients = []
        for value, name in zip(sources, names, strict=True):
            tensor = build.tensor(value)
            gradient = found.get(name)
            made = build.zeros(tensor.size(), tensor.dtype) if gradient is None else build.tensor(gradient)
            gradients.append(build.copy(made).value)
        build.finish()
        return gradients

    def close(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], build: Builder) -> ir.Graph:
        """Return the graph with these inputs and outputs, which reads the rest from outside under names of its own."""
        self.graph.outputs[:] = outputs
        common.RemoveUnusedNodesPass()(ir.Model(self.graph, ir_version=10))
        for value, copy in self._outside.items():
            self.graph.initializers.pop(str(copy.name), None)
            ir.convenience.replace_all_uses_with(copy, value)
        self.graph.inputs[:] = inputs
        for graph in (self.graph, *(one for node in self.graph.all_nodes() for one in bodies(node))):
            for value in _given(graph):
                is_constant = str(value.name) in graph.initializers
                if is_constant:
                    graph.initializers.pop(str(value.name))
                value.name = build.names.new("inner")
                if is_constant:
                    graph.register_initializer(value)
            for node in graph:
                node.name = build.names.new(node.op_type)
                for value in node.outputs:
                    if value.name:
                        value.name = build.names.new("inner")
        return self.graph


def _given(graph: ir.Graph) -> list[ir.Value]:
    return list(dict.fromkeys((*graph.inputs, *graph.initializers.values())))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _outside(n: Backward) -> list[ir.Value]:
    """Return the values that bodies read from outside, and that gradients flow to."""
    read, known = reads(n.node), len(n.node.inputs)
    return [value for place in sorted(n.active) if place >= known and (value := read[place]) is not None]


def _if(n: Backward, differentiate: Differentiate) -> tuple[Tensor, ...]:
    """Return the gradients of the values that the branches read."""
    build, outside = n.build, _outside(n)
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = _Body(n.node.attributes[name].as_graph(), n.node, outside)
        seeds = {index: gradient for index, gradient in enumerate(n.gradients) if gradient is not None}
        inputs = body.weigh(seeds)
        gradients = body.differentiate(differentiate, (), outside)
        for index, value in inputs.items():
            ir.convenience.replace_all_uses_with(value, seeds[index].value)
        branches[name] = body.close((), gradients, build)
    node = ir.node("If", [n.x(0).value], branches, num_outputs=len(outside))
    return build.add(node, [build.tensor(value).dtype for value in outside])


def _scan_steps(n: Backward) -> _Steps:
    num_slices = n.attribute("num_scan_inputs", 0)
    num_states = len(n.node.inputs) - num_slices
    body = n.node.attributes["body"].as_graph()
    num_stacked = len(body.outputs) - num_states
    axes = n.attribute("scan_input_axes", [0] * num_slices)
    directions = n.attribute("scan_input_directions", [0] * num_slices)
    slices = [(n.x(num_states + index), axes[index], directions[index]) for index in range(num_slices)]
    out_axes = n.attribute("scan_output_axes", [0] * num_stacked)
    out_directions = n.attribute("scan_output_directions", [0] * num_stacked)
    stacked = list(zip(out_axes, out_directions, strict=True))
    return _Steps(body, [n.x(index) for index in range(num_states)], 0, 0, slices, stacked)


def _loop_steps(n: Backward) -> _Steps:
    body = n.node.attributes["body"].as_graph()
    states = [n.x(index) for index in range(2, len(n.node.inputs))]
    return _Steps(body, states, 2, 1, (), [(0, 0)] * (len(body.outputs) - 1 - len(states)))


def _tape(n: Backward, steps: _Steps) -> list[Tensor]:
    """Run the steps again, and return the states before each, then the numbers of a Loop's steps, stacked."""
    build, count = n.build, len(steps.states)
    body = steps.body.clone(allow_outer_scope_values=True)
    kept = list(body.inputs[steps.first : steps.first + count])
    kept += body.inputs[:1] if steps.first else []
    if not kept:
        return []
    for value, state in zip(kept, steps.states, strict=False):
        value.type = value.type or state.value.type
    inner = Builder(body, names=build.names)
    records = [inner.copy(inner.tensor(value)).value for value in kept]
    inner.finish()
    body.outputs[:] = [*body.outputs[: steps.skipped + count], *records]
    attributes: dict[str, Any] = {"body": body}
    for name in ("num_scan_inputs", "scan_input_axes", "scan_input_directions"):
        if name in n.node.attributes:
            attributes[name] = n.node.attributes[name].value
    node = ir.node(n.node.op_type, list(n.node.inputs), attributes, num_outputs=count + len(records))
    dtypes = [state.dtype for state in steps.states]
    dtypes += [*dtypes, *([ir.DataType.INT64] if steps.first else [])]
    return list(build.add(node, dtypes))[count:]


def _repeated(n: Backward, differentiate: Differentiate, steps: _Steps) -> tuple[Tensor, ...]:
    """Return the gradients of the states before the first step, of what is sliced, and of what is read from outside."""
    build, outside = n.build, _outside(n)
    count = len(steps.states)
    body = _Body(steps.body, n.node, outside)
    arguments = body.arguments[steps.first :]
    for value, tensor in zip(arguments, (*steps.states, *(one for one, *_ in steps.slices)), strict=True):
        value.type = value.type or tensor.value.type
    recorded = _tape(n, steps)
    floats = [index for index in range(count) if steps.states[index].dtype.is_floating_point()]
    stacked = [index for index in range(count, len(n.gradients)) if n.gradients[index] is not None]
    arriving = {index: n.dys(index) for index in (*floats, *stacked)}
    seeds = body.weigh({steps.skipped + index: gradient for index, gradient in arriving.items()})
    sliced = [index for index, (tensor, *_) in enumerate(steps.slices) if tensor.dtype.is_floating_point()]
    wanted = [*(arguments[index] for index in floats), *(arguments[count + index] for index in sliced)]
    gradients = body.differentiate(differentiate, wanted, outside)
    of_states, of_slices, of_outside = (
        gradients[: len(floats)],
        gradients[len(floats) : len(wanted)],
        gradients[len(wanted) :],
    )
    # Sums over the steps are states of the Scan that runs back.
    inner = Builder(body.graph)
    sums = [ir.Value(name=inner.names.new("sum"), type=value.type, shape=value.shape) for value in outside]
    totals = [
        inner.copy(inner.tensor(before) + inner.tensor(gradient)).value
        for before, gradient in zip(sums, of_outside, strict=True)
    ]
    inner.finish()
    numbers = body.arguments[: 1 if steps.first else 0]
    read = [*arguments[:count], *numbers, *arguments[count:], *(seeds[steps.skipped + index] for index in stacked)]
    given = [*recorded, *(tensor for tensor, *_ in steps.slices), *(arriving[index] for index in stacked)]
    before = [arriving[index] for index in floats]
    before += [build.zeros(build.tensor(value).size(), build.tensor(value).dtype) for value in outside]
    states, after = [*(seeds[steps.skipped + index] for index in floats), *sums], [*of_states, *totals]
    if steps.first:
        ir.convenience.replace_all_uses_with(body.arguments[1], _true(body.graph))  # a step runs where it holds
        found = _loop_back(build, body, before, states, after, dict(zip(read, given, strict=True)))
    else:
        back = [(0, 1)] * count + [(axis, 1 - direction) for _, axis, direction in steps.slices]
        back += [(axis, 1 - direction) for axis, direction in (steps.axes[index - count] for index in stacked)]
        written = [(steps.slices[index][1], 1 - steps.slices[index][2]) for index in sliced]
        attributes: dict[str, Any] = {
            "body": body.close([*states, *read], [*after, *of_slices], build),
            "num_scan_inputs": len(given),
            "scan_input_axes": [axis for axis, _ in back],
            "scan_input_directions": [direction for _, direction in back],
        }
        if written:
            attributes["scan_output_axes"], attributes["scan_output_directions"] = map(list, zip(*written, strict=True))
        values = [tensor.value for tensor in (*before, *given)]
        node = ir.node("Scan", values, attributes, num_outputs=len(before) + len(sliced))
        dtypes = [tensor.dtype for tensor in before] + [steps.slices[index][0].dtype for index in sliced]
        found = build.add(node, dtypes)
    own = dict(zip(floats, found, strict=False))
    own |= {count + index: tensor for index, tensor in zip(sliced, found[len(before) :], strict=True)}
    inputs = [own.get(index - steps.first) for index in sorted(n.active) if index < len(n.node.inputs)]
    if any(tensor is None for tensor in inputs):
        raise Refusal("not with respect to an input that is no float")
    return (*(tensor for tensor in inputs if tensor is not None), *found[len(floats) : len(before)])


def _true(graph: ir.Graph) -> ir.Value:
    node = ir.node("Constant", [], {"value": ir.tensor(np.array(True))})
    graph.insert_before(graph[0], node)
    return node.outputs[0]


def _loop_back(
    build: Builder,
    body: _Body,
    before: Sequence[Tensor],
    states: Sequence[ir.Value],
    after: Sequence[ir.Value],
    read: Mapping[ir.Value, Tensor],
) -> tuple[Tensor, ...]:
    """Run the steps of a Loop from the last to the first; unlike a Scan, it may have none.

    Args:
        build: adds the node to the graph.
        body: one step back.
        before: what the states are before the first step back.
        states: the inputs of the body that stand for them.
        after: the outputs of the body that become them.
        read: what each other input of the body is, stacked over all steps.
    """
    inner = Builder(body.graph)
    number, condition = (
        ir.Value(name=inner.names.new(name), type=ir.TensorType(dtype), shape=ir.Shape([]))
        for name, dtype in (("number", ir.DataType.INT64), ("condition", ir.DataType.BOOL))
    )
    # The numbers of the steps are the last record, so there are as many as steps.
    count = build.op("Gather", read[body.arguments[0]].size(), build.constant(0, ir.DataType.INT64), axis=0)
    place = inner.tensor(count.value) - 1 - inner.tensor(number)
    for value, stacked in read.items():
        ir.convenience.replace_all_uses_with(value, inner.op("Gather", stacked, place, axis=0).value)
    goes_on = inner.copy(inner.tensor(condition)).value
    inner.finish()
    body.graph.sort()
    going = build.constant(True, ir.DataType.BOOL)
    graph = body.close([number, condition, *states], [goes_on, *after], build)
    node = ir.node(
        "Loop", [tensor.value for tensor in (count, going, *before)], {"body": graph}, num_outputs=len(after)
    )
    return build.add(node, [tensor.dtype for tensor in before])


def control_rules(differentiate: Differentiate) -> dict[tuple[str, str], Rule]:
    """Return the rules of operators with bodies, which `differentiate` differentiates."""

    def rule(make: Callable[[Backward], tuple[Tensor, ...]]) -> Rule:
        def gradient(n: Backward) -> Tensor:
            first = replace(n, index=0)
            found = n.build.once((n.node, "bodies"), lambda: make(first))
            return found[sorted(n.active).index(n.index)]

        return Rule((gradient,), variadic=True, outputs=_MOST_OUTPUTS)

    return {
        ("", "If"): rule(lambda n: _if(n, differentiate)),
        ("", "Loop"): rule(lambda n: _repeated(n, differentiate, _loop_steps(n))),
        ("", "Scan"): rule(lambda n: _repeated(n, differentiate, _scan_steps(n))),
    }
