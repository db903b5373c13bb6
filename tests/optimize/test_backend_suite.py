"""Graphs that others wrote: a part of scripts/check_backend_suite.py, which runs all of them, verified as well."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.presets import PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from backend_suite.cases import Case, backend_cases
from backend_suite.fusions import fusion_cases
from backend_suite.judging import difference, reference_of, run

# Sizes that are cut, values that are no tensors, and branches: what libraries that passes used to call got wrong.
NAMED = (
    *("test_shape_start_greater_than_end", "test_shape_clip_start", "test_shape_clip_end", "test_shape_end_negative_1"),
    *("test_reshape_allowzero_reordered", "test_if", "test_if_seq", "test_if_opt", "test_loop11", "test_loop13_seq"),
    *("test_identity_sequence", "test_identity_opt", "test_sequence_map_add_2_sequences_expanded", "test_scan9_sum"),
    *("test_split_to_sequence_1", "test_dropout_default", "test_training_dropout_zero_ratio"),
)
FUSIONS = ("bert, mask of pairs", "gpt2, with past", "llama, groups, with past", "gelu, quick", "normalization, power")


def _optimized(model: onnx.ModelProto) -> bytes:
    """Return what the passes for the CPU make of a model."""
    result, _ = run_passes(ir.from_proto(model), PRESETS["cpu"], Context())
    return bytes(ir.to_proto(result).SerializeToString())


def _problem(case: Case) -> str:
    """Say what is wrong with the result of the passes; empty where nothing is, or onnxruntime runs no such case."""
    reference = reference_of(case, case.model.SerializeToString())
    if reference.problem:
        return ""
    outputs = run(_optimized(case.model), reference.feeds)
    return difference(outputs, reference.outputs, only_types=reference.is_random)


def _sample(seed: int) -> list[Case]:
    """Return the cases named above, and one of each operator."""
    named, by_operator = [], defaultdict(list)
    for case in backend_cases("node"):
        if case.name in NAMED:
            named.append(case)
        elif case.model.graph.node:
            by_operator[case.model.graph.node[0].op_type].append(case)
    assert len(named) == len(NAMED)
    choices = random.Random(seed)  # noqa: S311  a sample, not a secret
    return [*named, *(choices.choice(cases) for cases in by_operator.values())]


def test_the_passes_keep_what_each_operator_gives() -> None:
    """On the inputs of onnx's own tests, beside onnxruntime's run of the file as it is."""
    assert {case.name: problem for case in _sample(seed=0) if (problem := _problem(case))} == {}


@pytest.mark.parametrize("name", FUSIONS)
def test_the_passes_keep_graphs_in_the_shapes_of_fusion_tests(name: str) -> None:
    """And fuse each attention."""
    case = next(case for case in fusion_cases() if case.name == name)
    assert _problem(case) == ""
    operators = [node.op_type for node in onnx.ModelProto.FromString(_optimized(case.model)).graph.node]
    assert sum(operator.endswith("Attention") for operator in operators) == case.attentions


def test_a_wrong_result_is_seen() -> None:
    """The comparison above can fail: by numbers, shapes and values that are no tensors."""
    case = next(case for case in fusion_cases() if case.name == "gelu, quick")
    right = reference_of(case, case.model.SerializeToString()).outputs
    assert "numbers" in difference([[one + 0.1 for one in run] for run in right], right)
    assert "shape" in difference([[one[:, :1] for one in run] for run in right], right)
    assert "elements" in difference([[[1.0]]], [[[1.0, 2.0]]])
