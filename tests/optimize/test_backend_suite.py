"""Graphs that others wrote: the passes on the cases of onnx's own backend tests."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper

from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.presets import PRESETS

# Sizes that are cut, values that are no tensors, and branches: what libraries that passes used to call got wrong.
NAMED = (
    *("test_shape_start_greater_than_end", "test_shape_clip_start", "test_shape_clip_end", "test_shape_end_negative_1"),
    *("test_reshape_allowzero_reordered", "test_if", "test_if_seq", "test_if_opt", "test_loop11", "test_loop13_seq"),
    *("test_identity_sequence", "test_identity_opt", "test_sequence_map_add_2_sequences_expanded", "test_scan9_sum"),
    *("test_split_to_sequence_1", "test_dropout_default", "test_training_dropout_zero_ratio"),
)
RTOL, ATOL, ATOL_HALF = 1e-3, 1e-5, 4e-3  # the suite's own rtol; fused operators sum in another order
Feeds = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and what is fed to it: inputs by their names, one mapping a run."""

    name: str
    model: onnx.ModelProto
    feeds: Sequence[Feeds]

    def flipped(self) -> Feeds:
        """Return the first inputs with their elements in reversed order: numbers that are as legal in most graphs."""
        return {
            name: np.flip(value).copy() if isinstance(value, np.ndarray) else value
            for name, value in self.feeds[0].items()
        }


def backend_cases() -> list[Case]:
    """Return onnx's cases of one node each."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(action="ignore"):  # the expected numbers of some overflow
        tests = load_model_tests(kind="node")
    return [
        Case(test.name, test.model, [_feeds(test.model, given) for given, _ in test.data_sets])
        for test in tests
        if test.model_dir is None
    ]


def _feeds(model: onnx.ModelProto, given: Sequence[Any]) -> Feeds:
    named = zip(model.graph.input, given, strict=False)
    return {value.name: _as_array(one) for value, one in named}


def _as_array(value: Any) -> Any:
    """Return a scalar or a tensor of onnx as an array; sequences and what is absent as they are."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def run(model: bytes, feeds: Sequence[Feeds]) -> list[list[Any]]:
    """Return the outputs of onnxruntime for each of the inputs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [session.run(None, {name: value for name, value in given.items() if name in names}) for given in feeds]


def difference(one: Any, other: Any, *, only_types: bool = False) -> str:
    """Say how outputs, or lists of them, differ; empty where they agree."""
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} elements, not {len(other)}"
        differences = (difference(*pair, only_types=only_types) for pair in zip(one, other, strict=True))
        return next(filter(None, differences), "")
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
    atol = ATOL if other.dtype.itemsize >= np.dtype(np.float32).itemsize else ATOL_HALF
    one, other = (array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (one, other))
    largest = max(1.0, float(np.abs(other[np.isfinite(other)]).max(initial=0.0)))
    return "" if np.allclose(one, other, rtol=RTOL, atol=atol * largest, equal_nan=True) else "other numbers"


def problem(case: Case) -> str:
    """Say what is wrong with the result of the passes; empty where nothing is, or onnxruntime runs no such case."""
    model = case.model.SerializeToString()
    feeds = list(case.feeds)
    try:
        outputs, again = run(model, feeds), run(model, feeds)
    except Exception:  # noqa: BLE001  onnxruntime's errors have no common kind
        return ""
    try:
        more = run(model, [case.flipped()]), run(model, [case.flipped()])
    except Exception:  # noqa: BLE001  such numbers are not legal in this graph
        more = [], []
    if more[0]:
        feeds, outputs, again = [*feeds, case.flipped()], outputs + more[0], again + more[1]
    optimized, _ = run_passes(ir.from_proto(case.model), PRESETS["cpu"], Context())
    found = run(bytes(ir.to_proto(optimized).SerializeToString()), feeds)
    return difference(found, outputs, only_types=bool(difference(outputs, again)))


def sample(seed: int) -> list[Case]:
    """Return the cases named above, and one of each operator."""
    named, by_operator = [], defaultdict(list)
    for case in backend_cases():
        if case.name in NAMED:
            named.append(case)
        elif case.model.graph.node:
            by_operator[case.model.graph.node[0].op_type].append(case)
    assert len(named) == len(NAMED)
    choices = random.Random(seed)  # noqa: S311  a sample, not a secret
    return [*named, *(choices.choice(cases) for cases in by_operator.values())]


def test_the_passes_keep_what_each_operator_gives() -> None:
    """On the inputs of onnx's own tests, beside onnxruntime's run of the file as it is."""
    assert {case.name: said for case in sample(seed=0) if (said := problem(case))} == {}


def test_a_wrong_result_is_seen() -> None:
    """The comparison above can fail: by numbers, shapes and values that are no tensors."""
    right = [[np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)]]
    assert difference([[right[0][0] + 0.1]], right) == "other numbers"
    assert "shape" in difference([[right[0][0][:, :1]]], right)
    assert "elements" in difference([[[1.0]]], [[[1.0, 2.0]]])
    assert difference([[right[0][0] + 1e-7]], right) == ""
