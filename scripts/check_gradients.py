"""Compare gradients of the onnx package's own cases with slopes: python scripts/check_gradients.py [OUTCOME ...].

Cases of the outcomes given are printed, by default the wrong ones and errors, at which it fails. Others are refused,
flat (neither gradient nor slope) or not judged: random, without a slope, or beyond onnx.reference in float64.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.autodiff import differentiate, prepare
from onnxtool.autodiff.rules import NON_DIFFERENTIABLE
from onnxtool.errors import OnnxtoolError
from tests.autodiff.gradients import run_onnxruntime, run_reference

LOSS = "sum of the outputs"
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_DTYPE_ATTRIBUTES = ("dtype", "output_dtype", "softmax_precision", "stash_type", "to")
# It takes no absolute value, has other indices.
_WRONG_IN_REFERENCE = ("LpNormalization", "MaxPool")
_NUDGE = 1e-2  # moves the whole numbers of many cases off the kinks that lie there
_STEPS, _KINK = ((1e-5, 1e-5), (1e-2, 1e-3)), 1e-2  # with tolerances; the second for what computes in float32


def widen(message: Any) -> None:
    """Replace the float dtypes in a part of a model by float64, in place."""
    if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type in _FLOATS:
        message.elem_type = TensorProto.DOUBLE
    elif isinstance(message, TensorProto) and message.data_type in _FLOATS:
        message.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(message).astype(np.float64), message.name))
    elif isinstance(message, onnx.AttributeProto) and message.name in _DTYPE_ATTRIBUTES and message.i in _FLOATS:
        message.i = TensorProto.DOUBLE
    elif isinstance(message, onnx.AttributeProto) and message.name.startswith("value_float"):
        array = np.array(helper.get_attribute_value(message), np.float64)
        message.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
    for field, value in message.ListFields():
        for part in (value if hasattr(value, "__len__") else [value]) if field.message_type is not None else ():
            widen(part)


def add_loss(graph: onnx.GraphProto, outputs: list[Any]) -> bool:
    """Add the sum of the float outputs with random weights as an output; False where there are none."""
    numbers, terms = np.random.default_rng(7), []
    for value, array in zip(graph.output, outputs, strict=True):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            weight, weighted, total = (f"{value.name}/{part}" for part in ("weight", "product", "sum"))
            elements = numbers.normal(size=array.shape) * bool(np.isfinite(array).all())
            graph.initializer.append(numpy_helper.from_array(elements, weight))
            graph.node.append(helper.make_node("Mul", [value.name, weight], [weighted]))
            graph.node.append(helper.make_node("ReduceSum", [weighted], [total], keepdims=0))
            terms.append(total)
    graph.node.append(helper.make_node("Sum", terms, [LOSS]))
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, []))
    return bool(terms)


def judge(case: Any) -> tuple[str, str] | None:
    """Return the outcome of a case with its reason; None if it has no float inputs or outputs."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    opsets, single = {imported.domain: imported.version for imported in model.opset_import}, set[str]()
    for node in [node for node in model.graph.node if not node.domain]:
        schema = onnx.defs.get_schema(node.op_type, opsets[""])
        pairs = [*zip(node.input, schema.inputs, strict=False), *zip(node.output, schema.outputs, strict=False)]
        single.update(name for name, declared in pairs if "tensor(double)" not in declared.types)
    inputs, outputs = (
        [numpy_helper.to_array(x) if isinstance(x, TensorProto) else x for x in side] for side in case.data_sets[0]
    )
    types = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
    kinds = {name: kind.elem_type for name, kind in types.items()}
    feeds = dict(zip([value.name for value in model.graph.input], inputs, strict=True))
    sources = [name for name in feeds if kinds[name] in _FLOATS and name not in single]
    feeds = {name: np.asarray(array, np.float64) if name in sources else array for name, array in feeds.items()}
    widen(model)
    for name in single & set(types):
        types[name].elem_type = kinds[name]
    if not add_loss(model.graph, outputs) or not sources or "" not in opsets:
        return None
    differentiated = ir.from_proto(model)
    try:
        prepare(differentiated)
        gradients = differentiate(differentiated, LOSS, sources)
        copies = [ir.node("Identity", [gradient]) for gradient in gradients.values()]  # a graph lists an output once
        for name, copy in zip(gradients, copies, strict=True):
            copy.outputs[0].name, copy.outputs[0].dtype = name + "/gradient", ir.DataType.DOUBLE
        differentiated.graph.extend(copies)
        differentiated.graph.outputs[:] = [copy.outputs[0] for copy in copies]
        return compare(model, ir.to_proto(differentiated), feeds, {name: name in gradients for name in sources})
    except OnnxtoolError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - it is counted, and the rest goes on
        return "error", f"{type(error).__name__}: {error}"


def compare(model: onnx.ModelProto, backward: onnx.ModelProto, feeds: Any, has: dict[str, bool]) -> tuple[str, str]:
    """Compare the outputs of `backward` with slopes; `has` says which inputs have a gradient."""
    numbers, nodes, outcome = np.random.default_rng(3), model.graph.node, "right" if any(has.values()) else "flat"
    run = run_onnxruntime if any(node.op_type in _WRONG_IN_REFERENCE for node in nodes) else run_reference
    forward = partial(run, model)
    moved = {name: x + _NUDGE * numbers.normal(size=x.shape) if has.get(name) else x for name, x in feeds.items()}
    try:
        feeds = moved if np.isfinite(forward(moved)[-1]) else feeds
        if not np.isfinite(forward(feeds)[-1]) or forward(feeds)[-1] != forward(feeds)[-1]:
            return "not judged", "random, or not finite"
    except Exception as error:  # noqa: BLE001 - any that the reference implementation raises
        return "not judged", f"{type(error).__name__}: {error}"
    arrays = iter(run(backward, feeds) if outcome == "right" else ())
    gradients = {name: next(arrays) if has[name] else np.zeros_like(feeds[name]) for name in has}
    stops = {name for node in nodes for index, name in enumerate(node.input)
             if index in NON_DIFFERENTIABLE.get((node.domain, node.op_type), ())}  # fmt: skip
    for name in [name for name in has if has[name] or name not in stops]:
        x, direction, is_smooth = feeds[name], numbers.normal(size=feeds[name].shape), False
        if gradients[name].shape != x.shape:
            return "wrong", f"{name} has the shape {gradients[name].shape}"
        ours = float((gradients[name] * direction).sum())
        for step, tolerance in _STEPS:
            ends = [float(forward({**feeds, name: x + part * step * direction})[-1]) for part in (-1, -0.5, 0.5, 1)]
            narrow, wide = (ends[2] - ends[1]) / step, (ends[3] - ends[0]) / (2 * step)
            slope, unit = (4 * narrow - wide) / 3, max(1.0, abs(narrow))
            is_smooth |= abs(wide - narrow) <= _KINK * unit
            if abs(ours - slope) <= tolerance * unit + min(abs(wide - narrow), _KINK * unit):
                break
        else:
            return ("wrong" if is_smooth else "not judged"), f"{name}: {ours:.8g}, and the slope is {slope:.8g}"
    return outcome, ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()  # the converter logs which of its two methods it uses
    counts: Counter[str] = Counter()
    for case in collect_testcases(None):
        if (outcome := judge(case)) is not None:
            counts[outcome[0]] += 1
            if outcome[0] in (sys.argv[1:] or ("error", "wrong")):
                print(f"{outcome[0]}: {case.name}: {' '.join(outcome[1].split())[:300]}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    sys.exit(int(bool(counts["error"] or counts["wrong"])))
