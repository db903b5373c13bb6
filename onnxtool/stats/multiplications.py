"""How many multiplications with an addition (MACs) an operator makes, by the shapes of what it reads and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from onnxtool.stats.contrib import Call, Value, attended, einsum_sizes, product_shape

_RECURRENT = frozenset({"RNN", "GRU", "LSTM"})
_ATTENTIONS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention", "QAttention"})


def count_macs(op_type: str, call: Call, outputs: list[Value | None]) -> int:
    """Return the MACs of a node; 0 for an operator that multiplies elementwise or not at all.

    Raises:
        LookupError: an input that tells it is not known.
    """
    if op_type in _ATTENTIONS:
        return attended(op_type, call).macs + _projection(op_type, call)
    if op_type in _RECURRENT:
        return _recurrent(call)
    counter = _COUNTERS.get(op_type)
    return counter(call, outputs) if counter is not None else 0


def _projection(op_type: str, call: Call) -> int:
    """Attention of com.microsoft projects its input by weights [inputs, outputs] first."""
    if op_type not in ("Attention", "QAttention") or len(call.need(1).shape) != 2:
        return 0
    return prod(call.need(0).shape) * call.need(1).shape[1]


def _product(call: Call, _outputs: list[Value | None]) -> int:
    first = call.need(0).shape
    inner = first[-2] if call.attributes.get("transA") and len(first) > 1 else first[-1]
    return prod(product_shape(call)) * inner


def _scaled_product(call: Call, outputs: list[Value | None]) -> int:
    """QLinearMatMul, whose second factor is its fourth input."""
    return _product(call._replace(inputs=(call.need(0), call.need(3))), outputs)


def _block_product(call: Call, _outputs: list[Value | None]) -> int:
    return prod(call.need(0).shape) * int(call.attributes["N"])


def _convolution(call: Call, outputs: list[Value | None]) -> int:
    return _size(outputs) * prod(call.need(1).shape[1:])


def _scaled_convolution(call: Call, outputs: list[Value | None]) -> int:
    return _size(outputs) * prod(call.need(3).shape[1:])


def _transposed_convolution(call: Call, _outputs: list[Value | None]) -> int:
    return prod(call.need(0).shape) * prod(call.need(1).shape[1:])


def _einsum(call: Call, _outputs: list[Value | None]) -> int:
    sizes, front, _ = einsum_sizes(call)
    return prod((*front, *sizes.values())) if len(call.inputs) > 1 else 0


def _recurrent(call: Call) -> int:
    """X [tokens, rows, inputs], with R [directions, gates x hidden, hidden] for what is carried on."""
    tokens, rows, width = call.need(0).shape
    directions, gates, hidden = call.need(2).shape
    return tokens * rows * directions * gates * (width + hidden)


def _size(outputs: list[Value | None]) -> int:
    if not outputs or outputs[0] is None:
        raise LookupError("output")
    return prod(outputs[0].shape)


_COUNTERS: Mapping[str, Callable[[Call, list[Value | None]], int]] = {
    **dict.fromkeys(("DynamicQuantizeMatMul", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger"), _product),
    **dict.fromkeys(("FusedGemm", "GemmFastGelu", "MatMulIntegerToFloat"), _product),
    "QLinearMatMul": _scaled_product,
    "MatMulNBits": _block_product,
    **dict.fromkeys(("Conv", "ConvInteger", "DeformConv", "FusedConv"), _convolution),
    "QLinearConv": _scaled_convolution,
    "ConvTranspose": _transposed_convolution,
    "Einsum": _einsum,
}
