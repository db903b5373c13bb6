"""Judge what the commands make of one case, beside onnxruntime's run of the file as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from backend_suite.cases import Case
from onnxtool.errors import OnnxtoolError
from onnxtool.graph.elements import Scope
from onnxtool.graph.inference import Inference
from onnxtool.graph.operator_rules import Value
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.stats import Shape, describe_model
from onnxtool.summary.kinds import FUSED_OPERATORS

MODES = ("stats", "no_verify", "verified", "samples")
PEERS = ("onnxruntime's optimizer", "onnxruntime's session")
_HAS_SAMPLES = "sample_inputs" in {field.name for field in fields(OptimizeOptions)}
_RTOL, _ATOL, _ATOL_HALF = 1e-3, 1e-5, 4e-3  # the suite's own rtol; fused operators sum in another order
_FLOAT32_BYTES = 4
_LONGEST_REASON = 120
Outputs = list[list[Any]]


@dataclass(frozen=True)
class Judgement:
    """What became of a case in one mode.

    Attributes:
        verdict: `right`, `wrong`, `refused`, `raw error`, `died`, or `not run` where onnxruntime does not run the case.
        reason: why, where it is not right; of a case that is not run, what the command did.
        attentions: how many attentions of the result are fused.
    """

    case: str
    kind: str
    mode: str
    verdict: str
    reason: str = ""
    attentions: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their names."""
        return asdict(self)


def judge(case: Case, modes: Sequence[str], folder: Path) -> Iterator[tuple[str, Judgement | None]]:
    """Yield each mode as it begins, with None, and as it ends, with its judgement."""
    path = folder / "model.onnx"
    onnx.save(case.model, path)
    yield "reference", None
    reference = reference_of(case, path)
    for mode in modes:
        if mode == "samples" and not (_HAS_SAMPLES and _write_samples(case, folder)):
            continue
        yield mode, None
        yield mode, _judge(case, mode, path, reference)


@dataclass(frozen=True)
class Reference:
    """What onnxruntime gives for the file as it is; `problem` where it gives nothing."""

    feeds: list[dict[str, Any]]
    outputs: Outputs
    is_random: bool = False
    meets_expected: bool = False
    problem: str = ""


def reference_of(case: Case, model: Path | bytes) -> Reference:
    """Run a case as it is, twice, on its own inputs and on those in reversed order."""
    try:
        feeds = list(case.feeds)
        outputs, again = run(model, feeds), run(model, feeds)
    except Exception as error:  # noqa: BLE001  onnxruntime's errors have no common kind
        return Reference([], [], problem=_shortened(str(error)))
    for given in case.flipped():
        try:
            outputs, again = outputs + run(model, [given]), again + run(model, [given])
        except Exception:  # noqa: BLE001, S112  such numbers are not legal in this graph
            continue
        feeds.append(given)
    meets = case.expected is not None and not difference(outputs[: len(case.feeds)], list(case.expected))
    return Reference(feeds, outputs, bool(difference(outputs, again)), meets)


def run(model: Path | bytes, feeds: Sequence[dict[str, Any]]) -> Outputs:
    """Return the outputs of onnxruntime for each of the inputs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [session.run(None, {name: value for name, value in given.items() if name in names}) for given in feeds]


def _judge(case: Case, mode: str, path: Path, reference: Reference) -> Judgement:
    def found(verdict: str, reason: str = "", attentions: int = 0) -> Judgement:
        if reference.problem and verdict in ("right", "wrong", "refused"):
            done = {"right": "written", "wrong": "written"}.get(verdict, verdict)
            verdict, reason = "not run", f"{done}; onnxruntime: {reference.problem}"
        return Judgement(case.name, case.kind, mode, verdict, reason, attentions)

    output = path.with_name("result.onnx")
    try:
        if mode == "stats":
            reason = _stats_difference(case, path, reference)
            return Judgement(case.name, case.kind, mode, "wrong" if reason else "right", reason)
        _WRITERS.get(mode, _optimize)(case, mode, path, output)
    except OnnxtoolError as error:
        return found("refused", f"{type(error).__name__}: {_shortened(error.message)}")
    except Exception as error:  # noqa: BLE001  the point of this script: whatever is raised is counted
        return found("raw error", f"{type(error).__name__}: {_shortened(str(error))}")
    if reference.problem:
        return found("right")
    try:
        outputs = run(output, reference.feeds)
    except Exception as error:  # noqa: BLE001  as above
        return found("wrong", f"the result does not run: {_shortened(str(error))}")
    reason = difference(outputs, reference.outputs, only_types=reference.is_random)
    if not reason and reference.meets_expected and not reference.is_random:
        reason = difference(outputs[: len(case.feeds)], list(case.expected or []))
    return found("wrong" if reason else "right", reason, count_attentions(output))


def count_attentions(path: Path) -> int:
    """Return how many nodes of the main graph are a whole attention."""
    fused = FUSED_OPERATORS["attention"] | {"::Attention"}  # of ONNX itself as well
    return sum(f"{node.domain}::{node.op_type}" in fused for node in onnx.load(path).graph.node)


def _optimize(_case: Case, mode: str, path: Path, output: Path) -> None:
    samples: dict[str, Any] = {"sample_inputs": (path.with_name("samples.npz"),)} if mode == "samples" else {}
    optimize_model(OptimizeOptions(path, output=output, force=True, verify=mode != "no_verify", **samples))


def _write_samples(case: Case, folder: Path) -> bool:
    """Write the first inputs of the case; False where NPZ does not hold such values."""
    given = case.feeds[0] if case.feeds else {}
    if not all(isinstance(value, np.ndarray) and value.dtype.kind in "biufcU" for value in given.values()):
        return False
    np.savez(folder / "samples.npz", **given)
    return bool(given)


def _optimize_by_onnxruntime(case: Case, _mode: str, path: Path, output: Path) -> None:
    from onnxruntime.transformers import optimizer

    optimizer.optimize_model(
        str(path), model_type=case.model_type, num_heads=4, hidden_size=32, opt_level=0
    ).save_model_to_file(str(output))


def _optimize_by_session(_case: Case, _mode: str, path: Path, output: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(output)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


_WRITERS: dict[str, Callable[[Case, str, Path, Path], None]] = dict(
    zip(PEERS, (_optimize_by_onnxruntime, _optimize_by_session), strict=True)
)


def _stats_difference(case: Case, path: Path, reference: Reference) -> str:
    """Compare the figures with the file, and the shapes behind them with those of onnxruntime's outputs."""
    stats = describe_model(path)
    describe_model(path, Shape(2, 8))
    graph = case.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in weights]
    if (told := [info.name for info in stats.inputs]) != names:
        return f"inputs {told}, and the file has {names}"
    if (told := [info.name for info in stats.outputs]) != [value.name for value in graph.output]:
        return f"outputs {told}"
    if stats.num_nodes < len(graph.node) or stats.num_initializers < len(graph.initializer):
        return f"{stats.num_nodes} nodes and {stats.num_initializers} initializers"
    # Shapes are known of cases as well that onnxruntime does not run.
    known = (case.feeds, case.expected or []) if reference.problem else (reference.feeds, reference.outputs)
    for given, outputs in zip(*known, strict=False):
        scope = Scope()
        for name, array in given.items():
            if isinstance(array, np.ndarray):
                dtype = helper.np_dtype_to_tensor_dtype(array.dtype) if array.dtype.kind not in "OUS" else 8
                scope.values[name] = Value(array.shape, dtype)
        Inference(case.model).follow(graph, scope)
        for output, array in zip(graph.output, outputs, strict=False):
            found = scope.values.get(output.name)
            if found is None or not found.is_complete or not isinstance(array, np.ndarray):
                continue
            if found.shape != array.shape:
                return f"{output.name} is {array.shape}, inferred {found.shape}"
    return ""


def difference(found: Outputs, expected: Outputs, *, only_types: bool = False) -> str:
    """Say how outputs differ; empty where they agree."""
    pairs = zip((one for run in found for one in run), (one for run in expected for one in run), strict=True)
    return next(filter(None, (_one_difference(one, other, only_types=only_types) for one, other in pairs)), "")


def _one_difference(one: Any, other: Any, *, only_types: bool) -> str:
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} elements, not {len(other)}"
        return next(
            filter(None, (_one_difference(*pair, only_types=only_types) for pair in zip(one, other, strict=True))), ""
        )
    if isinstance(one, dict) or one is None or other is None:
        return "" if one == other else f"{one!r}, not {other!r}"
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return f"the shape {one.shape}, not {other.shape}"
    if one.dtype.kind != other.dtype.kind and {one.dtype.kind, other.dtype.kind} - set("OUS"):
        return f"{one.dtype}, not {other.dtype}"
    if only_types:
        return ""
    if other.dtype.kind in "OUSb":
        return "" if (one == other).all() else "other values"
    atol = _ATOL if other.dtype.itemsize >= _FLOAT32_BYTES else _ATOL_HALF
    one, other = (array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (one, other))
    largest = max(1.0, float(np.abs(other[np.isfinite(other)]).max(initial=0.0)))
    if np.allclose(one, other, rtol=_RTOL, atol=atol * largest, equal_nan=True):
        return ""
    with np.errstate(invalid="ignore"):
        return f"numbers differ by {np.nanmax(np.abs(one - other)):.3g}"


def _shortened(text: str) -> str:
    """Return the first line without what differs from case to case: paths, names in quotes, shapes and numbers."""
    line = (text.strip().splitlines() or ["no message"])[0]
    line = re.sub(r"\S*/\S+\.onnx\S*", "FILE", line)
    line = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    line = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]", "…", line)
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", line)[:_LONGEST_REASON]
