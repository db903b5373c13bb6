"""Compute an int8 model's results as on each class of CPU, on any CPU.

- *exact*: products of uint8 and int8 as ONNX defines them: x86 with VNNI or AMX, Arm.
- *saturating*: sums of two neighbouring products are clipped to 16 bits: x86 with AVX2 or AVX-512, without VNNI.
- *per_row*: DynamicQuantizeMatMul rounds each row of activations by its own scale and zero point: Arm with SME, where
  onnxruntime calls KleidiAI (`kai_run_lhs_quant_pack_qai8dxp_f32`).

Only that operator differs between the first and the last. The first two are equal if no pair of neighbours in a weight
can exceed 16 bits, which `require_small_pairs` proves for a written file. Shape letters: K width of the
activations, N width of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.errors import PassError
from onnxtool.graph.edit import replace_and_erase, required
from onnxtool.graph.operators import MICROSOFT, named_inputs
from onnxtool.graph.writer import Writer, without_omitted
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.quantization.arithmetic import LARGEST_PAIR, NUM_STEPS, SMALLEST, Codes

EXACT, SATURATING, PER_ROW = "exact", "saturating", "per_row"

_DYNAMIC = "DynamicQuantizeMatMul"
# The name of the weight among the inputs of each operator that multiplies uint8 and int8.
INT8_WEIGHTS = {
    (MICROSOFT, _DYNAMIC): "B",
    (MICROSOFT, "MatMulIntegerToFloat"): "B",
    ("", "MatMulInteger"): "B",
    ("", "QLinearMatMul"): "b",
}
_AXES_AS_INPUT = 18  # the opset since which ReduceMax takes them so


def by_arithmetic(model: ir.Model) -> dict[str, ir.Model]:
    """Return models that compute on this CPU what `model` computes on others, `exact` and, where it differs, `per_row`.

    Products must not saturate on this CPU: either all pairs are small, or sessions are configured for exact products.
    """
    if not any(_dynamic_products(model)):
        return {EXACT: model}
    exact, per_row = model.clone(), model.clone()
    for node in list(_dynamic_products(exact)):
        _write_exact(node)
    for node in list(_dynamic_products(per_row)):
        _write_per_row(node, default_opset(model.opset_imports))
    return {EXACT: exact, PER_ROW: per_row}


def figures_of(errors: Mapping[str, float], *, small_pairs: bool) -> dict[str, float | None]:
    """Return the error under each arithmetic from the errors of the models in `by_arithmetic`.

    The error of saturating products is None unless pairs are small: otherwise the file is for other CPUs, and was not
    tried on these.
    """
    exact = errors[EXACT]
    return {EXACT: exact, SATURATING: exact if small_pairs else None, PER_ROW: errors.get(PER_ROW, exact)}


def require_small_pairs(path: Path) -> None:
    """Check that no product of a written file can saturate, whatever the activations are.

    Raises:
        PassError: two neighbours of one sign in a column of an int8 weight add up to more than `LARGEST_PAIR`.
    """
    checked: set[ir.Value] = set()
    for node in load_model(path).graph.all_nodes():
        place = INT8_WEIGHTS.get((node.domain, node.op_type))
        weight = None if place is None else named_inputs(node.domain, node.op_type, node.inputs).get(place)
        if weight is None or weight.const_value is None or weight.dtype != ir.DataType.INT8 or weight in checked:
            continue
        checked.add(weight)
        largest = largest_pair(weight.const_value.numpy())
        if largest > LARGEST_PAIR:
            raise PassError(
                f"two neighbours in the weight {weight.name} add up to {largest}, and above {LARGEST_PAIR} the "
                f"products of {node.op_type} saturate on CPUs without VNNI",
                "pass --cpu vnni or --cpu arm for a file that is for these alone",
            )


def largest_pair(codes: Codes) -> int:
    """Return the most that two neighbours of one sign along K add up to, of int8 [..., K, N], without the sign."""
    even = codes.shape[-2] // 2 * 2
    largest = 0
    for part in (np.maximum(codes, 0), np.minimum(codes, 0)):
        single = int(np.abs(part.astype(np.int16)).max(initial=0))
        pairs = part[..., 0:even:2, :].astype(np.int16) + part[..., 1:even:2, :]
        largest = max(largest, single, int(np.abs(pairs).max(initial=0)))
    return largest


def _dynamic_products(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph.all_nodes() if (node.domain, node.op_type) == (MICROSOFT, _DYNAMIC))


def _write_exact(node: ir.Node) -> None:
    """Replace `DynamicQuantizeMatMul(x, W)` by `MatMulIntegerToFloat(DynamicQuantizeLinear(x), W)`."""
    writer, inputs = Writer(node), named_inputs(MICROSOFT, _DYNAMIC, node.inputs)
    codes, scale, zero = writer.ops("DynamicQuantizeLinear", required(node, 0), outputs=3)
    operands = [codes, inputs["B"], scale, inputs["b_scale"], zero, inputs.get("b_zero_point"), inputs.get("bias")]
    result = writer.node("MatMulIntegerToFloat", without_omitted(operands), domain=MICROSOFT, like=node.outputs[0])
    replace_and_erase(node.outputs[0], result)


def _write_per_row(node: ir.Node, opset: int) -> None:
    """Replace `DynamicQuantizeMatMul(x, W)` by `MatMul` of the values that x and W have after rounding, in float32."""
    writer, inputs = Writer(node), named_inputs(MICROSOFT, _DYNAMIC, node.inputs)
    value, weight = required(node, 0), required(node, 1)

    def number(value: float, name: str) -> ir.Value:
        return writer.constant(np.array(value, np.float32), f"onnxtool.{name}")

    zero, steps = number(0, "zero"), number(NUM_STEPS, "steps")
    low = writer.op("Min", extreme("ReduceMin", value, opset, writer), zero)
    high = writer.op("Max", extreme("ReduceMax", value, opset, writer), zero)
    span = writer.op("Div", writer.op("Sub", high, low), steps)
    scale = writer.op("Max", span, number(float(SMALLEST), "smallest_scale"))
    place = writer.op("Round", writer.op("Neg", writer.op("Div", low, scale)))
    steps_up = writer.op("Add", writer.op("Round", writer.op("Div", value, scale)), place)
    codes = writer.op("Min", writer.op("Max", steps_up, zero), steps)
    rows = writer.op("Mul", writer.op("Sub", codes, place), scale)
    floats = writer.op("Cast", weight, to=int(ir.DataType.FLOAT))
    if (weight_zero := inputs.get("b_zero_point")) is not None:
        floats = writer.op("Sub", floats, writer.op("Cast", weight_zero, to=int(ir.DataType.FLOAT)))
    floats = writer.op("Mul", floats, required(node, 2))
    result = writer.node("MatMul", [rows, floats], like=node.outputs[0])
    if (bias := inputs.get("bias")) is not None:
        result = writer.node("Add", [result, bias], like=node.outputs[0])
    replace_and_erase(node.outputs[0], result)


def extreme(operator: str, value: ir.Value, opset: int, writer: Writer) -> ir.Value:
    """Write ReduceMax or ReduceMin of each row: [..., 1]."""
    if opset < _AXES_AS_INPUT:
        return writer.op(operator, value, axes=[-1], keepdims=1)
    axes = writer.constant(np.array([-1], np.int64), "onnxtool.last_axis")
    return writer.op(operator, value, axes, keepdims=1)
