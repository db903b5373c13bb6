"""Rules of pruning leave what OpenSearch and sentence-transformers leave, in memory and in a graph.

Letters of shapes: N texts, V vocabulary, S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.vector_types import parse_pruning
from onnxtool.errors import InputError, OptionError
from onnxtool.graph.builder import model_of
from onnxtool.infer.vectors import SparseVectors, TokenVectors

V = 300
IN_GRAPH = (
    *("top_k:1", "top_k:7", "top_k:64", "top_k:1000", "max_active_dims:7"),
    *("max_ratio:0", "max_ratio:0.4", "abs_value:0", "abs_value:0.5", "abs_value:9"),
)


def weights(num: int = 60, seed: int = 0) -> NDArray[np.float32]:
    """Return float32 [N, V] with ties, whole rows of equal weights, a row of one, and empty rows."""
    random = np.random.default_rng(seed)
    rows = random.gamma(0.8, 0.8, (num, V)) * (random.random((num, V)) < random.random((num, 1)))
    rows[:10] = np.round(rows[:10], 1)
    rows[10], rows[11], rows[12] = 0, 1.5, np.eye(V)[3]
    return rows.astype(np.float32)


def pruned(rows: NDArray[np.float32], rule: str) -> NDArray[np.float32]:
    return SparseVectors.from_dense(rows, [*map(str, range(rows.shape[1]))]).pruned(rule).to_dense()


def by_definition(row: NDArray[np.float32], rule: str, number: float) -> set[int]:
    """Return the terms that OpenSearch's rules keep, one by one in float64, of equal weights the first."""
    terms = sorted(np.flatnonzero(row).tolist(), key=lambda term: -float(row[term]))
    if rule == "top_k":
        return {*terms[: int(number)]}
    if rule == "max_ratio":
        return {term for term in terms if float(row[term]) >= number * max(float(row[one]) for one in terms)}
    if rule == "abs_value":
        return {term for term in terms if float(row[term]) >= number}
    total, kept, running = sum(float(row[term]) for term in terms), set[int](), 0.0
    for term in terms:
        running += float(row[term])
        if running <= number * total:
            kept.add(term)
    return kept


@pytest.mark.parametrize("text", [*IN_GRAPH, "alpha_mass:0", "alpha_mass:0.3", "alpha_mass:0.9"])
def test_a_rule_keeps_what_its_definition_keeps(text: str) -> None:
    """Their weights stay bit by bit."""
    rule, _, number = text.replace("max_active_dims", "top_k").partition(":")
    rows = weights()
    found = pruned(rows, text)
    for row, kept in zip(rows, found, strict=True):
        assert {*np.flatnonzero(kept).tolist()} == by_definition(row, rule, float(number))
    assert np.array_equal(found[found > 0], rows[found > 0])


@pytest.mark.parametrize("k", [1, 7, 64, 1000])
def test_max_active_dims_is_that_of_sentence_transformers(k: int) -> None:
    """Also of negative weights; of equal ones, torch.topk chooses any, so that these are left out here."""
    from sentence_transformers.util import select_max_active_dims

    random = np.random.default_rng(1)
    rows = (random.standard_normal((80, V)) * (random.random((80, V)) < 0.3)).astype(np.float32)
    assert np.array_equal(pruned(rows, f"max_active_dims:{k}"), select_max_active_dims(rows, k).numpy())


def test_the_term_that_crosses_the_share_is_left_out() -> None:
    """So that one dominant term leaves an empty text."""
    row = np.zeros((1, V), np.float32)
    row[0, :2] = 3, 1
    assert not pruned(row, "alpha_mass:0.5").any()


def graph_of(rule: str) -> bytes:
    pruning = Pruning.in_graph(rule)
    return model_of(lambda build, value: pruning.build(build, value), {"sparse": (np.float32, 2)})


def in_runtime(content: bytes, rows: NDArray[np.float32]) -> Any:
    return ort.InferenceSession(content).run(None, {"sparse": rows})[0]


def in_reference(content: bytes, rows: NDArray[np.float32]) -> Any:
    found: Any = onnx.reference.ReferenceEvaluator(onnx.load_from_string(content)).run(None, {"sparse": rows})
    return found[0]


# onnx.reference gathers from up to 64 elements.
@pytest.mark.parametrize(("run", "width"), [(in_runtime, V), (in_reference, 50)])
@pytest.mark.parametrize("rule", IN_GRAPH)
def test_a_graph_prunes_as_memory_does(rule: str, run: Callable[[bytes, Any], Any], width: int) -> None:
    """Bit by bit, ties and empty rows included."""
    rows = weights()[:, :width]
    assert np.array_equal(run(graph_of(rule), rows), pruned(rows, rule))


@pytest.mark.parametrize("rule", ["max_ratio:0.4", "abs_value:0.5"])
def test_nan_passes_a_pruned_graph_and_reaches_the_check_of_outputs(rule: str) -> None:
    rows = weights()
    rows[20, 5] = np.nan
    assert np.isnan(in_runtime(graph_of(rule), rows)).any()


@pytest.mark.parametrize("rule", IN_GRAPH)
def test_a_pruned_output_is_compared_with_the_weights_that_it_was_made_of(rule: str) -> None:
    """A rounding error may move a term across the threshold, and anything more is an error of its size."""
    pruning, rows = Pruning.of(rule), weights()
    noisy = np.where(rows > 0, rows * (1 + 1e-5 * np.sin(np.arange(rows.size)).reshape(rows.shape)), 0).astype(
        np.float32
    )
    assert np.abs(pruning.nearest(pruned(noisy, rule), rows) - rows).max() < 1e-3
    wrong = pruned(rows, rule)
    lost = (20, int(np.argmax(wrong[20])))
    if wrong[lost] > 0:
        wrong[lost] = 0
        assert np.abs(pruning.nearest(wrong, rows) - rows)[lost] > 0.05


@pytest.mark.parametrize(("rule", "place"), [("top_k:3", "more"), ("abs_value:2", "less"), ("max_ratio:0.9", "less")])
def test_weights_that_a_rule_cannot_give_are_infinitely_far(rule: str, place: str) -> None:
    rows = weights()[20:21]
    assert np.isinf(Pruning.of(rule).nearest(rows, rows)).any(), place


@pytest.mark.parametrize("factor", [1, 1.5, 2, 3, 4])
def test_token_vectors_are_merged_as_sentence_transformers_does(factor: float) -> None:
    """For documents of up to 180 tokens, of one, and of none."""
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    random = np.random.default_rng(2)
    rows = []
    for length in (*random.integers(2, 180, 97), 1, 2, 0):
        topics = random.standard_normal((5, 48))[random.integers(0, 5, length)]
        row = topics + 0.8 * random.standard_normal((length, 48))
        rows.append((row / np.maximum(np.linalg.norm(row, axis=1, keepdims=True), 1e-12)).astype(np.float32))
    found = TokenVectors.stack(rows).pruned(f"pool_factor:{factor}")
    expected = HierarchicalTokenPooling(factor).pool([torch.from_numpy(row) for row in rows])
    assert [len(found[place]) for place in range(len(rows))] == [len(one) for one in expected]
    for place, one in enumerate(expected):
        np.testing.assert_allclose(found[place], one.numpy(), atol=3e-7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_q:3", "no rule of pruning, which are top_k, max_active_dims"),
        ("top_k", "top_k takes a whole number from 1, and '' was passed"),
        ("top_k:0", "whole number from 1"),
        ("top_k:1.5", "whole number from 1"),
        ("top_k:-3", "whole number from 1"),
        ("max_ratio:1", "below 1"),
        ("max_ratio:nan", "below 1"),
        ("alpha_mass:1.5", "below 1"),
        ("abs_value:-1", "a number from 0"),
        ("abs_value:1_0", "a number from 0"),
        ("pool_factor:0.5", "a number from 1"),
    ],
)
def test_an_unknown_rule_of_pruning_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_pruning(text)


def test_a_rule_is_recorded_in_one_form() -> None:
    assert [parse_pruning(text) for text in ("top_k:064", "max_ratio:.40", "abs_value:2.0")] == [
        *("top_k:64", "max_ratio:0.4", "abs_value:2")
    ]
    small = parse_pruning("abs_value:0.00002")
    assert parse_pruning(small) == small
    assert Pruning.of(small).number == 2e-5


def test_rules_for_positive_weights_refuse_others() -> None:
    """As OpenSearch does; zeros are no terms of a vector."""
    rows = weights(20)
    rows[15, 4] = -1
    with pytest.raises(InputError, match="top_k is for positive weights, and a term weighs -1"):
        pruned(rows, "top_k:3")


@pytest.mark.parametrize("rule", ["alpha_mass:0.5", "pool_factor:2"])
def test_a_rule_that_no_graph_computes_is_refused_with_the_commands_that_do(rule: str) -> None:
    with pytest.raises(OptionError, match="no graph computes") as caught:
        Pruning.in_graph(rule)
    assert f"--prune {rule} to infer, encode and evaluate" in caught.value.hint
