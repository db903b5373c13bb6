"""Cases of LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tests.autodiff.cases.case import Array, Case, normal

_STEPS, _SAMPLES, _INPUTS, _HIDDEN = 4, 3, 2, 5
# PyTorch's order of the gates, in places of ONNX's.
_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}


def _inputs(num_gates: int, num_directions: int, num_states: int) -> tuple[Array | None, ...]:
    x = normal(_STEPS, _SAMPLES, _INPUTS)
    w = normal(num_directions, num_gates * _HIDDEN, _INPUTS)
    r = normal(num_directions, num_gates * _HIDDEN, _HIDDEN) * 0.5
    b = normal(num_directions, 2 * num_gates * _HIDDEN)
    states = [normal(num_directions, _SAMPLES, _HIDDEN) for _ in range(num_states)]
    return x, w, r, b, None, *states


def _with_lengths(inputs: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    """Let samples end early: one after its first step, one before its last."""
    return (*inputs[:4], np.array([_STEPS, 1, _STEPS - 1], np.int32), *inputs[5:])


def _reordered(parameter: torch.Tensor, kind: str) -> torch.Tensor:
    gates = parameter.chunk(len(_ORDER[kind]))
    return torch.cat([gates[place] for place in _ORDER[kind]])


def _run(
    kind: str, inputs: Sequence[torch.Tensor | None], direction: str, activations: Sequence[str] = ("Tanh", "Tanh")
) -> tuple[torch.Tensor, ...]:
    """Run a layer of PyTorch, or of single steps where PyTorch has none in that direction."""
    padded = [*inputs, *[None] * (7 - len(inputs))]
    (x, w, r, b), lengths, given = padded[:4], padded[4], padded[5:]
    assert x is not None
    assert w is not None
    assert r is not None
    shape = (w.shape[0], x.shape[1], r.shape[2])
    states = [x.new_zeros(shape) if one is None else one for one in given][: 2 if kind == "LSTM" else 1]
    ys, lasts = [], []
    for place, backward in enumerate(
        {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    ):
        biases = [None, None] if b is None else [_reordered(part, kind) for part in b[place].chunk(2)]
        weights = [_reordered(w[place], kind), _reordered(r[place], kind)]
        state = [one[place] for one in states]
        outputs = []
        for time in reversed(range(len(x))) if backward else range(len(x)):
            if kind == "LSTM":
                after = list(torch.lstm_cell(x[time], state, *weights, *biases))
            elif kind == "RNN":
                sums = x[time] @ w[place].T + state[0] @ r[place].T + (0 if b is None else sum(b[place].chunk(2)))
                after = [getattr(torch, activations[place].lower())(sums)]
            else:
                after = [torch.gru_cell(x[time], state[0], *weights, *biases)]
            # Beyond its end a sample keeps its states, and gives zeros.
            here = torch.ones(x.shape[1], 1, dtype=torch.bool) if lengths is None else (time < lengths)[:, None]
            state = [torch.where(here, new, old) for new, old in zip(after, state, strict=True)]
            outputs.append(state[0] * here)
        ys.append(torch.stack(outputs[::-1] if backward else outputs))
        lasts.append(state)
    return torch.stack(ys, 1), *(torch.stack(list(one)) for one in zip(*lasts, strict=True))


def _gru_before(*inputs: torch.Tensor) -> torch.Tensor:
    """Reset the state before it is multiplied, which PyTorch does not."""
    x, w, r, b = inputs[:4]
    h = inputs[5][0]
    wb, rb = b[0].chunk(2)
    outputs = []
    for step in x:
        wz, wr, wh = (step @ w[0].T + wb).chunk(3, -1)
        rz, rr, rh = r[0].chunk(3)
        bz, br, bh = rb.chunk(3)
        z, reset = torch.sigmoid(wz + h @ rz.T + bz), torch.sigmoid(wr + h @ rr.T + br)
        candidate = torch.tanh(wh + (reset * h) @ rh.T + bh)
        h = (1 - z) * candidate + z * h
        outputs.append(h)
    return torch.stack(outputs)[:, None]


def _lstm_case(direction: str, note: str, inputs: tuple[Array | None, ...], outputs: int) -> Case:
    return Case(
        "LSTM",
        inputs,
        lambda *tensors: _run("LSTM", tensors, direction)[:outputs],
        {"hidden_size": _HIDDEN, "direction": direction},
        note=note,
        outputs=outputs,
        weights=(1, 2, 3),
        reference=outputs == 1 and inputs[4:5] in ((), (None,)),
    )


def _gru_case(direction: str, note: str, inputs: tuple[Array | None, ...]) -> Case:
    return Case(
        "GRU",
        inputs,
        lambda *tensors: _run("GRU", tensors, direction),
        {"hidden_size": _HIDDEN, "direction": direction, "linear_before_reset": 1},
        note=note,
        outputs=2,
        weights=(1, 2, 3),
        reference=direction == "forward",
    )


def _rnn_case(direction: str, note: str, inputs: tuple[Array | None, ...], *activations: str) -> Case:
    given = {"activations": list(activations)} if activations else {}
    return Case(
        "RNN",
        inputs,
        lambda *tensors: _run("RNN", tensors, direction, activations or ("Tanh", "Tanh")),
        {"hidden_size": _HIDDEN, "direction": direction, **given},
        note=note,
        outputs=2,
        weights=(1, 2, 3),
        reference=not activations,  # it knows tanh alone
    )


RECURRENT = (
    _lstm_case("forward", "", _inputs(4, 1, 2), 1),
    _lstm_case("forward", "without bias and states", _inputs(4, 1, 0)[:3], 3),
    _lstm_case("reverse", "reverse", _inputs(4, 1, 2), 3),
    _lstm_case("bidirectional", "bidirectional", _inputs(4, 2, 2), 3),
    _lstm_case("forward", "of several lengths", _with_lengths(_inputs(4, 1, 2)), 3),
    _lstm_case("bidirectional", "bidirectional of several lengths", _with_lengths(_inputs(4, 2, 2)), 3),
    _gru_case("bidirectional", "bidirectional of several lengths", _with_lengths(_inputs(3, 2, 1))),
    _gru_case("forward", "", _inputs(3, 1, 1)),
    _gru_case("reverse", "reverse", _inputs(3, 1, 1)),
    _gru_case("bidirectional", "bidirectional", _inputs(3, 2, 1)),
    Case(
        "GRU",
        _inputs(3, 1, 1),
        _gru_before,
        {"hidden_size": _HIDDEN},
        note="reset before",
        weights=(1, 2, 3),
    ),
    _rnn_case("forward", "", _inputs(1, 1, 1)),
    _rnn_case("reverse", "without bias and state", _inputs(1, 1, 0)[:3]),
    _rnn_case("forward", "with Relu", _inputs(1, 1, 1), "Relu"),
    _rnn_case("bidirectional", "of several lengths", _with_lengths(_inputs(1, 2, 1)), "Sigmoid", "Tanh"),
)
