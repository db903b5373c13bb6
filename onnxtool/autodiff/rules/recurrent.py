"""Gradients of LSTM, GRU and RNN: the gates of all steps are recomputed at once, then a Scan runs backward in time.

Letters: S steps, B samples, I inputs, H hidden units, D directions, which are processed separately. Gates are in ONNX
order: i, o, f, c for LSTM and z, r, h for GRU. Gradients through time follow Hochreiter and Schmidhuber, Long
Short-Term Memory, 1997, and Cho et al., arXiv:1406.1078.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule

_X, _W, _R, _B, _LENGTHS, _H, _C, _PEEPHOLES = range(8)
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# The slope of an activation, by its result.
_SLOPES: dict[str, Callable[[Builder, Tensor], Tensor]] = {
    "tanh": lambda _, result: 1.0 - result * result,
    "sigmoid": lambda _, result: result * (1.0 - result),
    "relu": lambda build, result: build.op("Sign", result),
}


Step: TypeAlias = Callable[[Builder, Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


@dataclass(frozen=True)
class Direction:
    """One direction of a layer.

    Attributes:
        x: [S, B, I].
        before: the hidden state before each step, [S, B, H].
        w: [G H, I], with G gates.
        r: [G H, H].
        biases: the biases for w and r, [G H] each; None without biases.
        first: the states before the first step, [B, H] each.
        dy: the gradient with respect to each step's hidden state from outside the layer, [S, B, H].
        last: the gradients with respect to the states after the last step, [B, H] each.
        activations: the operators of the gates, in lower case.
        backward: whether it runs from the end to the start.
        hidden: H.
        is_valid: whether a step belongs to a sample, bool [S, B, 1]; None if all samples have all steps. Beyond its
            end, a sample keeps its states, and its outputs are zero.
    """

    x: Tensor
    before: Tensor
    w: Tensor
    r: Tensor
    biases: tuple[Tensor, Tensor] | None
    first: tuple[Tensor, ...]
    dy: Tensor
    last: tuple[Tensor, ...]
    activations: Sequence[str]
    backward: bool
    hidden: int
    is_valid: Tensor | None = None

    def masked(self, build: Builder, tensor: Tensor, beyond: float = 0.0) -> Tensor:
        """Replace the steps beyond the end of a sample by `beyond`."""
        return tensor if self.is_valid is None else build.where(self.is_valid, tensor, beyond)


def _activations(n: Backward) -> list[str]:
    """Return the activations of all directions, in lower case."""
    usual = [name.lower() for name in _DEFAULTS[n.node.op_type]]
    both = 2 if n.attribute("direction", "forward") == "bidirectional" else 1
    return [name.lower() for name in n.attribute("activations", usual * both)]


def _refuse_unusual(n: Backward) -> None:
    kind = n.node.op_type
    names, usual = _activations(n), [name.lower() for name in _DEFAULTS[kind]]
    is_known = set(names) <= set(_SLOPES) if kind == "RNN" else names in (usual, usual * 2)
    if not is_known:
        raise Refusal(f"with other activations ({', '.join(names)})")
    for attribute, meaning in (("clip", "clipped sums"), ("input_forget", "coupled gates")):
        if n.attribute(attribute, 0):
            raise Refusal(f"with {meaning} ({attribute})")
    if kind == "LSTM" and n.has(_PEEPHOLES):
        raise Refusal("with peepholes (its input P)")
    if n.attribute("layout", 0):
        raise Refusal("with the batch as its first axis (layout)")


def _pick(n: Backward, tensor: Tensor, place: int, axis: int = 0) -> Tensor:
    """Select one direction of a value."""
    return n.build.op("Gather", tensor, n.build.constant(place, n.build.axes([0]).dtype), axis=axis)


def _directions(n: Backward) -> list[Direction]:
    _refuse_unusual(n)
    kind = n.attribute("direction", "forward")
    flags = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[kind]
    return [_direction(n, place, backward=backward) for place, backward in enumerate(flags)]


def _direction(n: Backward, place: int, *, backward: bool) -> Direction:
    build, x = n.build, n.x(_X)
    hidden = n.attribute("hidden_size", 0) or n.sizes(_R, 2)[0]
    shape = build.concat(x.size().slice(1, 2), [hidden])
    num_states = 2 if n.node.op_type == "LSTM" else 1
    first = tuple(
        _pick(n, n.x(_H + state), place) if n.has(_H + state) else build.zeros(shape, x.dtype)
        for state in range(num_states)
    )
    outputs = _pick(n, n.y(), place, axis=1)
    is_valid, has_next = _ends(n)
    start = build.op("Unsqueeze", first[0], build.axes([0]))
    pieces = [outputs.slice(1, 1 << 31), start] if backward else [start, outputs.slice(0, -1)]
    dy = _pick(n, n.gradients[0], place, axis=1) if n.gradients[0] is not None else build.zeros(outputs.size(), x.dtype)
    arriving = [n.gradients[1 + state] if 1 + state < len(n.gradients) else None for state in range(num_states)]
    last = tuple(build.zeros(shape, x.dtype) if dy is None else _pick(n, dy, place) for dy in arriving)
    biases = build.ops("Split", _pick(n, n.x(_B), place), outputs=2, axis=0, num_outputs=2) if n.has(_B) else None
    before = build.op("Concat", *pieces, axis=0)
    if backward and has_next is not None:  # a shorter sample starts where it ends
        before = build.op("Where", has_next, before, start)
    return Direction(
        x, before, _pick(n, n.x(_W), place), _pick(n, n.x(_R), place),
        None if biases is None else (biases[0], biases[1]), first, dy, last, _activations(n)[place:], backward, hidden,
        is_valid,
    )  # fmt: skip


def _ends(n: Backward) -> tuple[Tensor | None, Tensor | None]:
    """Return which steps belong to each sample, and which have a successor; bool [S, B, 1]."""
    if not n.has(_LENGTHS):
        return None, None
    build, lengths = n.build, n.x(_LENGTHS)
    zero, one = (build.constant(number, build.axes([0]).dtype) for number in (0, 1))
    steps = build.op("Range", zero, n.x(_X).size().slice(0, 1).reshape([]), one).reshape([-1, 1, 1])
    ends = lengths.cast(steps.dtype).reshape([1, -1, 1])
    return steps < ends, steps + one < ends


def _gates(build: Builder, direction: Direction, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the contributions of inputs and states to each gate, [S, B, H] each."""
    sums = [direction.x @ direction.w.transpose([1, 0]), direction.before @ direction.r.transpose([1, 0])]
    if direction.biases is not None:
        sums = [total + bias for total, bias in zip(sums, direction.biases, strict=True)]
    return tuple(list(build.ops("Split", total, outputs=count, axis=-1, num_outputs=count)) for total in sums)  # type: ignore[return-value]


def _as_rows(build: Builder, tensor: Tensor) -> Tensor:
    """Flatten steps and samples to rows: [S B, N]."""
    return tensor.reshape(build.concat([-1], tensor.size().slice(-1, 3)))


def _weight(build: Builder, gates: Tensor, factor: Tensor) -> Tensor:
    return build.op("Gemm", _as_rows(build, gates), _as_rows(build, factor), transA=1)


def _lstm(build: Builder, direction: Direction) -> tuple[Tensor, ...]:
    """Return the gradients for one direction: of x, w, r, both biases, and the first states."""
    from_x, from_h = _gates(build, direction, _GATES["LSTM"])
    i, o, f = (build.op("Sigmoid", a + b) for a, b in zip(from_x[:3], from_h[:3], strict=True))
    g = build.op("Tanh", from_x[3] + from_h[3])
    keep = direction.masked(build, f, 1.0)

    def remember(_: Builder, states: Sequence[Tensor], now: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        cell = now[0] * states[0] + now[1]
        return [cell], [states[0], cell]

    _, before, cells = _scan(
        build, remember, [direction.first[1]], [keep, direction.masked(build, i * g)], backward=direction.backward
    )
    level = build.op("Tanh", cells)
    # Everything that does not depend on gradients through time is computed for all steps at once.
    through_cell, through_output = o * (1.0 - level * level), level * o * (1.0 - o)
    slopes = [g * i * (1.0 - i), before * f * (1.0 - f), i * (1.0 - g * g)]

    def back(inner: Builder, states: Sequence[Tensor], now: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        dh, dc = states
        forget, cell_slope, output_slope, to_i, to_f, to_g, dy, *beyond = now
        dh = dh + dy
        dc = dc + dh * cell_slope
        gates = inner.op("Concat", dc * to_i, dh * output_slope, dc * to_f, dc * to_g, axis=-1)
        earlier = inner.op("MatMul", gates, direction.r)
        return [earlier + dh * beyond[0] if beyond else earlier, dc * forget], [gates]

    inputs = [
        keep,
        *(direction.masked(build, slope) for slope in (through_cell, through_output, *slopes, direction.dy)),
    ]
    if direction.is_valid is not None:
        inputs.append(build.op("Not", direction.is_valid).cast(direction.x.dtype))
    dh, dc, gates = _scan(build, back, direction.last, inputs, backward=not direction.backward)
    total = gates.sum([0, 1], keepdims=False)
    weights = (_weight(build, gates, factor) for factor in (direction.x, direction.before))
    return gates @ direction.w, *weights, total, total, dh, dc


def _gru(build: Builder, direction: Direction, *, reset_after: bool) -> tuple[Tensor, ...]:
    """Return the gradients for one direction: of x, w, r, both biases, and the first state."""
    from_x, from_h = _gates(build, direction, _GATES["GRU"])
    z, r = (build.op("Sigmoid", a + b) for a, b in zip(from_x[:2], from_h[:2], strict=True))
    of_gates, of_candidate = build.ops(
        "Split", direction.r, build.axes([2 * direction.hidden, direction.hidden]), outputs=2, axis=0
    )
    if reset_after:
        candidate = build.op("Tanh", from_x[2] + r * from_h[2])
    else:
        seen = r * direction.before @ of_candidate.transpose([1, 0])
        if direction.biases is not None:
            seen = seen + direction.biases[1].slice(2 * direction.hidden, 3 * direction.hidden)
        candidate = build.op("Tanh", from_x[2] + seen)
    to_z = (direction.before - candidate) * z * (1.0 - z)
    to_candidate = (1.0 - z) * (1.0 - candidate * candidate)
    to_r = (from_h[2] if reset_after else direction.before) * r * (1.0 - r)

    def back(inner: Builder, states: Sequence[Tensor], now: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        keep, reset, z_slope, r_slope, slope, dy = now
        dh = states[0] + dy
        dz, dn = dh * z_slope, dh * slope
        if reset_after:
            dq = dn * reset
            dr, earlier = dn * r_slope, inner.op("MatMul", dq, of_candidate)
        else:
            dq = dn
            seen = inner.op("MatMul", dn, of_candidate)
            dr, earlier = seen * r_slope, seen * reset
        gates = inner.op("Concat", dz, dr, axis=-1)
        return [dh * keep + earlier + inner.op("MatMul", gates, of_gates)], [gates, dn, dq]

    slopes = [direction.masked(build, slope) for slope in (to_z, to_r, to_candidate, direction.dy)]
    inputs = [direction.masked(build, z, 1.0), r, *slopes]
    dh, gates, dn, dq = _scan(build, back, direction.last, inputs, backward=not direction.backward)
    of_x, of_h = (build.op("Concat", gates, last, axis=-1) for last in (dn, dq))
    recurrent = direction.before if reset_after else r * direction.before
    weights = build.op("Concat", _weight(build, gates, direction.before), _weight(build, dq, recurrent), axis=0)
    biases = [total.sum([0, 1], keepdims=False) for total in (of_x, of_h)]
    return of_x @ direction.w, _weight(build, of_x, direction.x), weights, *biases, dh


def _rnn(build: Builder, direction: Direction) -> tuple[Tensor, ...]:
    """Return the gradients for one direction: of x, w, r, both biases, and the first state."""
    (from_x,), (from_h,) = _gates(build, direction, _GATES["RNN"])
    name = direction.activations[0]
    slope = _SLOPES[name](build, build.op(name.capitalize(), from_x + from_h))

    def back(inner: Builder, states: Sequence[Tensor], now: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        slope, dy, *beyond = now
        dh = states[0] + dy
        gate = dh * slope
        earlier = inner.op("MatMul", gate, direction.r)
        return [earlier + dh * beyond[0] if beyond else earlier], [gate]

    inputs = [direction.masked(build, slope), direction.masked(build, direction.dy)]
    if direction.is_valid is not None:
        inputs.append(build.op("Not", direction.is_valid).cast(direction.x.dtype))
    dh, gates = _scan(build, back, direction.last, inputs, backward=not direction.backward)
    total = gates.sum([0, 1], keepdims=False)
    weights = (_weight(build, gates, factor) for factor in (direction.x, direction.before))
    return gates @ direction.w, *weights, total, total, dh


def _scan(
    build: Builder, step: Step, states: Sequence[Tensor], inputs: Sequence[Tensor], *, backward: bool
) -> tuple[Tensor, ...]:
    """Apply a step function along the first axis of `inputs`, passing states from step to step.

    Args:
        build: adds the node to the graph.
        step: takes a builder for the body, the states and one slice of each input; returns new states and results.
        states: the states before the first step.
        inputs: inputs of equal length; slices do not have the first axis.
        backward: run from the end to the start; the results still have the order of the inputs.

    Returns:
        The states after the last step, then the results of all steps, stacked.
    """
    arguments = (*states, *inputs)
    parameters = [ir.Value(name=build.names.new("slice"), type=ir.TensorType(tensor.dtype)) for tensor in arguments]
    body = ir.Graph(parameters, [], nodes=[], name=build.names.new("step"))
    inner = Builder(body, names=build.names)
    slices = [inner.tensor(value) for value in parameters]
    after, results = step(inner, slices[: len(states)], slices[len(states) :])
    # Each body output needs its own node, even if two of them are the same value.
    outputs = [inner.copy(tensor) for tensor in (*after, *results)]
    inner.finish()
    body.outputs.extend(tensor.value for tensor in outputs)
    attributes = {
        "body": body,
        "num_scan_inputs": len(inputs),
        "scan_input_directions": [int(backward)] * len(inputs),
        "scan_output_directions": [int(backward)] * len(results),
    }
    node = ir.node("Scan", [tensor.value for tensor in arguments], attributes, num_outputs=len(outputs))
    return build.add(node, [tensor.dtype for tensor in outputs])


def _gradients(n: Backward) -> tuple[Tensor, ...]:
    """Return the gradients with respect to x, w, r, b and the states, for all directions."""
    build = n.build
    if n.node.op_type == "LSTM":
        parts = [_lstm(build, direction) for direction in _directions(n)]
    elif n.node.op_type == "RNN":
        parts = [_rnn(build, direction) for direction in _directions(n)]
    else:
        reset_after = bool(n.attribute("linear_before_reset", 0))
        parts = [_gru(build, direction, reset_after=reset_after) for direction in _directions(n)]

    def stacked(tensors: Sequence[Tensor]) -> Tensor:
        return build.op("Concat", *(build.op("Unsqueeze", tensor, build.axes([0])) for tensor in tensors), axis=0)

    x = parts[0][0] if len(parts) == 1 else parts[0][0] + parts[1][0]
    biases = stacked([build.op("Concat", part[3], part[4], axis=0) for part in parts])
    columns = list(zip(*parts, strict=True))
    w, r, *states = (stacked(column) for column in columns[1:3] + columns[5:])
    return x, w, r, biases, *states


def _gradient(n: Backward) -> Tensor:
    place = n.index if n.index < _LENGTHS else n.index - 1
    return n.build.once((n.node, "recurrent"), lambda: _gradients(n))[place]


RECURRENT: dict[str, Rule] = {
    "GRU": Rule((*[_gradient] * 4, None, _gradient), outputs=(0, 1)),
    "LSTM": Rule((*[_gradient] * 4, None, _gradient, _gradient), outputs=(0, 1, 2)),
    "RNN": Rule((*[_gradient] * 4, None, _gradient), outputs=(0, 1)),
}
