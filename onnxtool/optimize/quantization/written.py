"""Count the linear layers and embeddings in a written file by the precision of their weights.

A conversion's plan is not a reliable figure: a pass may leave a layer unchanged, and no pass looks into branches and
loop bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from onnxtool.errors import PassError
from onnxtool.graph.edit import attribute, is_weight, tensor_of
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
_DEFAULT_BITS = 4  # of operators that store blocks


def count_written(quantization: Quantization, path: Path) -> Quantization:
    """Return `quantization` with the layers and embeddings of the file at `path`.

    Raises:
        PassError: none of them is in the precision of the conversion.
    """
    model, wanted = load_model(path), quantization.precision
    layers = dict(pair for node in model.graph.all_nodes() for pair in _layers(node))
    embeddings = Counter(precision for node in model.graph.all_nodes() for precision in _tables(node))
    if wanted not in {*layers.values(), *embeddings}:
        found = ", ".join(f"{count} in {name}" for name, count in Counter(layers.values()).items())
        raise PassError(
            f"nothing was converted to {wanted}: the layers are {found or 'none'}",
            "pass a larger --max_error, or another --precision",
        )
    planned = {layer.name: layer for layer in quantization.kept}
    higher = {name: precision for name, precision in layers.items() if precision != wanted}
    names = [*(name for name in planned if name in higher), *(name for name in higher if name not in planned)]
    kept = [FallbackLayer(name, planned[name].error if name in planned else None, higher[name]) for name in names]
    return replace(
        quantization,
        num_layers=len(layers),
        kept=tuple(kept),
        num_embeddings=embeddings.total(),
        embedding_precision=", ".join(sorted(embeddings)),
    )


def nothing_to_quantize(model: ir.Model, refused: Sequence[str]) -> PassError:
    """Return the error for a model without a linear layer to quantize; `refused` has the reasons."""
    nodes = list(model.graph.all_nodes())
    found = {precision: node for node in nodes for _, precision in _layers(node)}
    if refused:
        what = refusals(refused)
    elif any(node.graph is not model.graph for node in found.values()):
        what = "its layers lie in branches or loop bodies, which are left unchanged"
    elif found:
        what = f"its layers are in {', '.join(found)} already"
    elif any(node.op_type == "DequantizeLinear" for node in nodes):
        what = "its weights are quantized already, in front of DequantizeLinear"
    elif model.functions:
        what = "it calls functions of its own, which stay as they are: inline them with onnx.inliner"
    else:
        what = "it has no MatMul or Gemm with a weight"
        others = {
            node.op_type for node in nodes for value in node.inputs if any(is_weight(value, n) for n in (2, 3, 4))
        }
        if others:
            what += f"; its weights are in {', '.join(sorted(others))}"
        if any(node.graph is not model.graph for node in nodes):
            what += "; branches and loop bodies are left unchanged"
    return PassError("no linear layer has a float32 weight to quantize", f"{what}; leave --precision out")


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
