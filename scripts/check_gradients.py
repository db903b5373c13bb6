"""Differentiate the onnx package's own test cases of operators, and compare with finite differences in float64.

Every case that reads and writes floats counts once: right, refused (a GradientError), wrong, or an error, which is a
bug; flat, where there is no gradient and no slope either; or not judged, where onnx.reference does not compute the case
in float64, or draws random numbers. The script fails if a case is wrong or an error.

    python scripts/check_gradients.py [--list OUTCOME ...]
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.autodiff import differentiate, prepare
from onnxtool.autodiff.rules import NON_DIFFERENTIABLE
from onnxtool.errors import OnnxtoolError
from tests.autodiff.reference import OPERATORS

Array: TypeAlias = NDArray[Any]
Feeds: TypeAlias = dict[str, Array]
LOSS = "sum of the outputs"
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_DTYPE_ATTRIBUTES = ("dtype", "output_dtype", "softmax_precision", "stash_type", "to")
_WRONG_IN_REFERENCE = ("GridSample", "LpNormalization", "MaxPool")  # float32, no absolute value, other indices
_NUDGE = 1e-2  # moves the whole numbers of many cases off the kinks that lie there
# Steps, and the tolerance for each; the second is for operators that onnx.reference computes in float32.
_STEPS = ((1e-5, 1e-5), (1e-2, 1e-3))
_NO_SLOPE = 1e-1


def widen(message: Any) -> None:
    """Replace the float dtypes in a part of a model by float64, in place."""
    if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type in _FLOATS:
        message.elem_type = TensorProto.DOUBLE
    elif isinstance(message, TensorProto) and message.data_type in _FLOATS:
        message.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(message).astype(np.float64), message.name))
    elif isinstance(message, onnx.AttributeProto) and message.name in _DTYPE_ATTRIBUTES and message.i in _FLOATS:
        message.i = TensorProto.DOUBLE
    elif isinstance(message, onnx.NodeProto) and [one.name[:11] for one in message.attribute] == ["value_float"]:
        array = np.array(helper.get_attribute_value(message.attribute[0]), np.float64)
        message.attribute[0].CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if hasattr(value, "__len__") else [value]:
                widen(one)


def add_loss(graph: onnx.GraphProto, outputs: Sequence[Any]) -> bool:
    """Add the sum of the float outputs with random weights as an output; False where all of them are empty."""
    numbers, terms = np.random.default_rng(7), []
    for value, array in zip(graph.output, outputs, strict=True):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            names = [f"{value.name}/{part}" for part in ("weight", "product", "sum")]
            weight = numbers.normal(size=array.shape) * bool(np.isfinite(array).all())
            graph.initializer.append(numpy_helper.from_array(weight, names[0]))
            graph.node.append(helper.make_node("Mul", [value.name, names[0]], [names[1]]))
            graph.node.append(helper.make_node("ReduceSum", [names[1]], [names[2]], keepdims=0))
            terms.append(names[2])
    if terms:
        graph.node.append(helper.make_node("Sum", terms, [LOSS]))
        graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, []))
    return bool(terms)


def judge(case: Any) -> tuple[str, str] | None:
    """Return the outcome of a case with its reason; None if it has no float inputs or outputs."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    opsets, inputs = {one.domain: one.version for one in model.opset_import}, model.graph.input
    given, outputs = (
        [numpy_helper.to_array(one) if isinstance(one, TensorProto) else one for one in side]
        for side in case.data_sets[0]
    )
    schemas = [(node, onnx.defs.get_schema(node.op_type, opsets[""])) for node in model.graph.node if not node.domain]
    single = {
        name
        for node, schema in schemas
        for names, declared in ((node.input, schema.inputs), (node.output, schema.outputs))
        for name, one in zip(names, declared, strict=False)
        if "tensor(double)" not in one.types
    }
    values = {value.name: value.type.tensor_type for value in (*inputs, *model.graph.output)}
    kinds = {name: kind.elem_type for name, kind in values.items()}
    feeds = dict(zip([value.name for value in inputs], given, strict=True))
    sources = [name for name in feeds if kinds[name] in _FLOATS and name not in single]
    feeds = {name: np.asarray(one, np.float64) if name in sources else one for name, one in feeds.items()}
    widen(model)
    for name in single & set(values):
        values[name].elem_type = kinds[name]
    if not add_loss(model.graph, outputs) or not sources:
        return None
    if "" not in opsets:
        model.opset_import.append(helper.make_opsetid("", 21))
    differentiated = ir.from_proto(model)
    try:
        prepare(differentiated)
        found = differentiate(differentiated, LOSS, sources)
        # Two gradients may be one value, and a graph lists an output once.
        copies = [ir.node("Identity", [one]) for one in found.values()]
        for name, copy in zip(found, copies, strict=True):
            copy.outputs[0].name, copy.outputs[0].dtype = f"gradient of {name}", ir.DataType.DOUBLE
        differentiated.graph.extend(copies)
        differentiated.graph.outputs[:] = [copy.outputs[0] for copy in copies]
        return compare(model, ir.to_proto(differentiated), feeds, sources)
    except OnnxtoolError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - it is counted, and the rest goes on
        return "error", f"{type(error).__name__}: {error}"


def compare(model: onnx.ModelProto, backward: onnx.ModelProto, feeds: Feeds, sources: list[str]) -> tuple[str, str]:
    """Compare the outputs of the model of gradients with slopes along random directions."""
    numbers, nodes = np.random.default_rng(3), model.graph.node
    by_onnxruntime = any(node.op_type in _WRONG_IN_REFERENCE for node in nodes)

    def run(model: onnx.ModelProto) -> Callable[[Feeds], Any]:
        if by_onnxruntime:
            return partial(ort.InferenceSession(model.SerializeToString()).run, None)
        return partial(ReferenceEvaluator(model, new_ops=list(OPERATORS)).run, None)

    names = [value.name for value in backward.graph.output]
    found = [name for name in sources if f"gradient of {name}" in names]
    moved = feeds | {name: feeds[name] + _NUDGE * numbers.normal(size=feeds[name].shape) for name in found}
    try:
        forward = run(model)
        feeds = moved if np.isfinite(forward(moved)[-1]) else feeds
        if not np.isfinite(forward(feeds)[-1]) or forward(feeds)[-1] != forward(feeds)[-1]:
            return "not judged", "random, or not finite"
    except Exception as error:  # noqa: BLE001 - any that the reference implementation raises
        return "not judged", f"{type(error).__name__}: {error}"
    gradients = dict(zip(names, run(backward)(feeds) if names else (), strict=True))
    constants = {name for node in nodes for index, name in enumerate(node.input)
                 if index in NON_DIFFERENTIABLE.get((node.domain, node.op_type), ())}  # fmt: skip
    for name in [name for name in sources if name in found or name not in constants]:
        x = feeds[name]
        gradient, direction = gradients.get(f"gradient of {name}", np.zeros_like(x)), numbers.normal(size=x.shape)
        if gradient.shape != x.shape:
            return "wrong", f"{name} has the shape {gradient.shape}"
        ours = float((gradient * direction).sum())
        for step, tolerance in _STEPS:
            ends = [forward({**feeds, name: x + part * step * direction})[-1] for part in (-1, -0.5, 0.5, 1)]
            narrow, wide = (ends[2] - ends[1]) / step, (ends[3] - ends[0]) / (2 * step)
            slope = (4 * narrow - wide) / 3
            is_kink = abs(wide - narrow) > _NO_SLOPE * max(1.0, abs(slope))
            if is_kink or abs(ours - slope) <= tolerance * max(1.0, abs(slope)):
                break
        else:
            return "wrong", f"{name}: {ours:.8g}, and the slope is {slope:.8g}"
    return ("right", "") if names else ("flat", "")


def main() -> None:
    """Print the counts, and the cases of the outcomes that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="*", default=["error", "wrong"], help="outcomes of which every case is printed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()  # the converter logs which of its two methods it uses
    counts: Counter[str] = Counter()
    for case in collect_testcases(None):
        outcome, reason = judge(case) or ("", "")
        counts[outcome] += bool(outcome)
        if outcome and outcome in options.list:
            print(f"{outcome}: {case.name}: {' '.join(reason.split())[:300]}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common() if outcome))
    sys.exit(int(bool(counts["error"] or counts["wrong"])))


if __name__ == "__main__":
    main()
