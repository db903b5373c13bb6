"""Count the linear layers and embeddings in a written file by their precision, and compare their weights.

A conversion's plan is not a reliable figure: a pass may leave a layer unchanged, and no pass looks into branches and
loop bodies. Nor are outputs: the error that is allowed hides a wrong column of a weight.

Shape letters: R columns of a weight or rows of a table, W their width, C blocks in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.errors import PassError
from onnxtool.graph.edit import attribute, is_float, is_weight, only_consumer, producer, tensor_of
from onnxtool.graph.operators import MICROSOFT, named_inputs
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import refusals
from onnxtool.optimize.quantization.cpu_arithmetic import INT8_WEIGHTS
from onnxtool.optimize.quantization.linear_layers import names_of_parts
from onnxtool.optimize.report import FallbackLayer, Quantization

# The name of the weight among the inputs of each operator that has one.
_WEIGHTS = {
    **INT8_WEIGHTS,
    ("", "MatMul"): "B",
    ("", "Gemm"): "B",
    (MICROSOFT, "FusedMatMul"): "B",
    (MICROSOFT, "Attention"): "weights",
    (MICROSOFT, "QAttention"): "weight",
}
_PRECISIONS = {
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "int8",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.FLOAT: "float32",
}
_SUFFIXES = ("_int8", "_int4_blocks", "_int8_blocks")
_IN_INT8 = 4  # the accuracy_level of MatMulNBits at which it rounds activations
_DEFAULT_BITS = 4  # of operators that store blocks
# The names of weights, scales and zero points among the inputs of the operators that we write.
_PARTS = (("B", "data"), ("b_scale", "scales"), ("b_zero_point", "zero_points"))
_ORIGIN = "onnxtool.origin"  # in a tensor's own metadata, which no file has
# The most that rounding changes a column, in steps of its scale (root mean square): the nearest codes are off by 0.29,
# and codes that compensate for each other by up to 0.46. A wrong scale by far more.
_MOST_STEPS = 1.0
REPORT = "no file was written; please report this model"
_Read = Callable[[slice], tuple[NDArray[Any], NDArray[Any]]]
_ROWS_AT_A_TIME = 2048  # a table of words would be held six times otherwise


def count_written(quantization: Quantization, path: Path) -> Quantization:
    """Return `quantization` with the layers and embeddings of the file at `path`.

    Raises:
        PassError: none of them is in the precision of the conversion.
    """
    model, wanted = load_model(path), quantization.precision
    layers = dict(pair for node in model.graph.all_nodes() for pair in _layers(node))
    embeddings = Counter(precision for node in model.graph.all_nodes() for precision in _tables(node))
    if wanted not in {*layers.values(), *embeddings}:
        counts = ", ".join(f"{count} in {name}" for name, count in Counter(layers.values()).items())
        raise PassError(
            f"nothing was converted to {wanted}: the layers are {counts or 'none'}",
            "pass a larger --max_error, or another --precision",
        )
    planned = {layer.name: layer for layer in quantization.kept}
    higher = {name: precision for name, precision in layers.items() if precision != wanted}
    names = [*(name for name in planned if name in higher), *(name for name in higher if name not in planned)]
    for name, layer in planned.items():
        if layer.by_name and higher.get(name) != "float32":
            raise PassError(f"the layer {name} is not in float32, as --keep_float32 asks", REPORT)
    nodes = model.graph.all_nodes()
    blocks = [node for node in nodes if node.op_type == "MatMulNBits"]
    exact = {_name(node.inputs[1]) for node in blocks if attribute(node, "accuracy_level", 0) != _IN_INT8}
    kept = [replace(planned.get(name, FallbackLayer(name, None)), precision=higher[name]) for name in names]
    return replace(
        quantization,
        num_layers=len(layers),
        kept=tuple(kept),
        finer=tuple(layer for layer in quantization.finer if layer.name in exact and layer.name not in higher),
        num_embeddings=embeddings.total(),
        embedding_precision=", ".join(sorted(embeddings)),
    )


def nothing_to_quantize(model: ir.Model, refused: Sequence[str]) -> PassError:
    """Return the error for a model without a linear layer to quantize; `refused` has the reasons."""
    nodes = list(model.graph.all_nodes())
    by_precision = {precision: node for node in nodes for _, precision in _layers(node)}
    if refused:
        reason = refusals(refused)
    elif any(node.graph is not model.graph for node in by_precision.values()):
        reason = "its layers lie in branches or loop bodies, which are left unchanged"
    elif by_precision:
        reason = f"its layers are in {', '.join(by_precision)} already"
    elif any(node.op_type == "DequantizeLinear" for node in nodes):
        reason = "its weights are quantized already, in front of DequantizeLinear"
    elif model.functions:
        reason = "it calls functions of its own, which stay as they are: inline them with onnx.inliner"
    else:
        reason = "it has no MatMul or Gemm with a weight"
        operators = {
            node.op_type for node in nodes for value in node.inputs if any(is_weight(value, n) for n in (2, 3, 4))
        }
        if operators:
            reason += f"; its weights are in {', '.join(sorted(operators))}"
        if any(node.graph is not model.graph for node in nodes):
            reason += "; branches and loop bodies are left unchanged"
    return PassError("no linear layer has a float32 weight to quantize", f"{reason}; leave --precision out")


def _layers(node: ir.Node) -> Iterator[tuple[str, str]]:
    """Yield the name and the precision of each linear layer in a node."""
    kind = (node.domain, node.op_type)
    if kind == (MICROSOFT, "MatMulNBits"):
        yield _name(node.inputs[1]), f"int{attribute(node, 'bits', _DEFAULT_BITS)}"
        return
    place = _WEIGHTS.get(kind)
    weight = named_inputs(*kind, node.inputs).get(place) if place else None
    if weight is None or not is_weight(weight, 2):
        return
    dtype = tensor_of(weight).dtype
    names = names_of_parts(weight) if node.op_type in ("Attention", "QAttention") else [_name(weight)]
    yield from ((name, _PRECISIONS.get(dtype, dtype.name.lower())) for name in names)


def _tables(node: ir.Node) -> Iterator[str]:
    """Yield the precision of the table in a lookup node with a quantized table."""
    if (node.domain, node.op_type) == (MICROSOFT, "GatherBlockQuantized"):
        yield f"int{attribute(node, 'bits', _DEFAULT_BITS)}"
    elif (node.domain, node.op_type) == ("", "Gather") and is_weight(node.inputs[0], 2):
        dtype = node.inputs[0] and tensor_of(node.inputs[0]).dtype
        if dtype in (ir.DataType.INT8, ir.DataType.UINT8):
            yield "int8"


def _name(weight: ir.Value | None) -> str:
    """Return the name that a layer had in float32."""
    name = "" if weight is None else str(weight.name)
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.removesuffix("_transposed")


def made_from(tensor: ir.TensorProtocol, read_values: Callable[[], NDArray[Any]]) -> ir.TensorProtocol:
    """Let a tensor of codes or float16 numbers remember how to read its floats, [R, W], for `require_weights`."""
    tensor.meta[_ORIGIN] = read_values
    return tensor


def require_weights(model: ir.Model, converted: ir.Model, path: Path) -> None:
    """Check that weights in the file at `path` are those of `model` or, if converted, made from them, up to rounding.

    Raises:
        PassError: one is not, or nothing reads it.
    """
    stored = dict(pair for node in load_model(path).graph for pair in _stored(node))
    for name, value in {**converted.graph.initializers, **model.graph.initializers}.items():
        tensor = tensor_of(value)
        read, is_kept = tensor.meta.get(_ORIGIN, tensor.numpy), _ORIGIN not in tensor.meta
        if is_kept and (name not in stored or tensor.dtype != ir.DataType.FLOAT):
            continue
        if name not in stored:
            raise PassError(f"nothing in the file reads the weight {name}", REPORT)
        floats = _as_rows(read())
        parts = [slice(start, start + _ROWS_AT_A_TIME) for start in range(0, len(floats), _ROWS_AT_A_TIME)]
        off = np.max([_steps_off(*stored[name](part), floats[part]) for part in parts], initial=0.0)  # or NaN
        if not off <= _MOST_STEPS:
            raise PassError(
                f"the weight {name} in the file is off by {off:.3g} steps from the one that it was made from, and "
                f"rounding accounts for {_MOST_STEPS:g} at most",
                REPORT,
            )


def _steps_off(values: NDArray[Any], steps: NDArray[Any], floats: NDArray[Any]) -> float:
    """Return the largest root mean square of a row's differences from its floats, [R, W], in steps."""
    width = floats.shape[1]
    values, steps = values[:, :width], np.maximum(np.abs(steps[:, :width]), np.finfo(np.float32).tiny)
    equal = (values == floats) | (np.isnan(values) & np.isnan(floats))
    off = np.subtract(values, floats, out=np.zeros_like(values), where=~equal) / steps
    return float(np.sqrt(np.einsum("rw,rw->r", off, off) / max(1, width)).max(initial=0.0))


def _stored(node: ir.Node) -> Iterator[tuple[str, _Read]]:
    """Yield the name of each converted weight of a node, and what reads numbers and steps of some rows, [R, W]."""
    for value in filter(is_weight, node.inputs):
        if value is not None and is_float(value):
            yield str(value.name), partial(_read_floats, tensor_of(value))
    inputs = named_inputs(node.domain, node.op_type, node.inputs)
    parts = [next((inputs[name] for name in names if name in inputs), None) for names in _PARTS]
    if node.op_type == "Gather":
        parts[1:] = [_scale_of_rows(node)]
    if all(map(is_weight, parts)):
        yield str(parts[0] and parts[0].name), partial(_read_codes, node, [tensor_of(part) for part in parts if part])


def _scale_of_rows(node: ir.Node) -> ir.Value | None:
    """Return the scale in `Mul(Cast(Gather(table, ids)), Gather(scale, ids))`."""
    rows = only_consumer(node.outputs[0], "Cast")
    product = None if rows is None else only_consumer(rows.outputs[0], "Mul")
    lookups = [] if product is None else [producer(operand, "Gather") for operand in product.inputs]
    return next((lookup.inputs[0] for lookup in lookups if lookup is not None), None)


def _read_floats(tensor: ir.TensorProtocol, part: slice) -> tuple[NDArray[Any], NDArray[Any]]:
    array = _as_rows(tensor.numpy())[part]
    with np.errstate(over="ignore"):  # of the largest number, in masks of decoders
        return array.astype(np.float32, copy=False), np.spacing(np.abs(array)).astype(np.float32)


def _read_codes(node: ir.Node, tensors: Sequence[ir.TensorProtocol], part: slice) -> tuple[NDArray[Any], NDArray[Any]]:
    codes, scale, *stored_zeros = (tensor.numpy() for tensor in tensors)
    zero = stored_zeros[0] if stored_zeros else np.zeros_like(scale)
    if scale.ndim == 1:  # of the columns of a product
        codes, scale, zero = codes.T, scale[:, None], zero.reshape(-1, 1)
    codes, scale, zero = codes[part], scale[part], zero[part] if len(zero) == len(scale) else zero
    if attribute(node, "bits", 8) == 4:
        codes, zero = (
            np.stack((array & 15, array >> 4), axis=-1).reshape(*array.shape[:-1], -1) for array in (codes, zero)
        )
    codes = codes.reshape(len(scale), -1)
    size, (num_blocks, width) = attribute(node, "block_size", codes.shape[1]), (scale.shape[1], codes.shape[1])
    wide = (np.repeat(array[:, :num_blocks].astype(np.float32), size, axis=1)[:, :width] for array in (scale, zero))
    steps, zeros = wide
    return (codes - zeros) * steps, steps


def _as_rows(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(len(array) if array.ndim else 1, -1)
