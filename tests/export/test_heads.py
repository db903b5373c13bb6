"""Heads on the graph give what their publications define, at the opsets of both exporters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool.errors import ExportError
from onnxtool.export.companions import Pooling
from onnxtool.export.heads import HEADS, append_head, choose_head
from onnxtool.export.signature import Signature

MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=np.int64)
OPSETS = (13, 17, 18, 20)


def run_head(name: str, values: NDArray[np.float32], pooling: Pooling, opset: int) -> NDArray[Any]:
    """Put the head on a graph that hands `values` [B, S, N] through, and run it in ONNX's reference implementation."""
    head = next(head for head in HEADS if head.name == name)
    mask = ir.val("attention_mask", dtype=ir.DataType.INT64, shape=["batch_size", "sequence"])
    fed = ir.val("fed", dtype=ir.DataType.FLOAT, shape=["batch_size", "sequence", values.shape[-1]])
    through = ir.node("Identity", [fed])
    through.outputs[0].name = head.source
    through.outputs[0].type, through.outputs[0].shape = fed.type, fed.shape
    graph = ir.Graph([fed, mask], through.outputs, nodes=[through], opset_imports={"": opset}, name="g")
    model = ir.Model(graph, ir_version=8)
    append_head(model, head, pooling)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    (output,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"fed": values, "attention_mask": MASK})
    return np.asarray(output)


@pytest.fixture
def values() -> NDArray[np.float32]:
    """[3, 5, 7], with padding larger than anything real."""
    values = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    values[MASK == 0] += 100
    return values


@pytest.mark.parametrize("opset", OPSETS)
def test_splade_weighs_each_term_by_its_largest_real_token(values: NDArray[np.float32], opset: int) -> None:
    """Computed a row, a term and a token at a time."""
    expected = [
        [max(np.log1p(max(0.0, float(row[s, v]))) for s in range(5) if mask[s]) for v in range(7)]
        for row, mask in zip(values, MASK, strict=True)
    ]
    np.testing.assert_allclose(run_head("splade", values, Pooling(), opset), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("normalize", [False, True])
def test_mean_embedding_averages_real_tokens(values: NDArray[np.float32], opset: int, normalize: bool) -> None:
    """Padding has no say in the mean."""
    expected = np.stack([row[mask == 1].mean(axis=0) for row, mask in zip(values, MASK, strict=True)])
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    pooled = run_head("embedding", values, Pooling("mean", normalize), opset)
    np.testing.assert_allclose(pooled, expected, atol=1e-6, rtol=1e-6)


def test_cls_embedding_is_the_first_token(values: NDArray[np.float32]) -> None:
    """Without normalization it is copied."""
    np.testing.assert_array_equal(run_head("embedding", values, Pooling("cls"), 17), values[:, 0])


def test_a_vector_of_zeros_stays_finite() -> None:
    """Normalizing must not divide by zero."""
    zeros = np.zeros((3, 5, 7), dtype=np.float32)
    assert np.isfinite(run_head("embedding", zeros, Pooling("mean", normalize=True), 17)).all()


TOKENS = dict.fromkeys(("input_ids", "attention_mask"), ("batch_size", "sequence"))
SIGNATURE = Signature(TOKENS, {"last_hidden_state": ("batch_size", "sequence", 8)})


def test_auto_puts_nothing_on_the_model() -> None:
    """Most consumers pool for themselves."""
    assert choose_head("auto", SIGNATURE) == ("none", None)


@pytest.mark.parametrize("name", ["logits", "splade"])
def test_a_head_that_the_model_cannot_have_names_the_output_it_needs(name: str) -> None:
    """A base model has no logits."""
    with pytest.raises(ExportError, match="needs the output logits; this model gives last_hidden_state"):
        choose_head(name, SIGNATURE)


def test_a_head_needs_an_attention_mask() -> None:
    """Without one, padding would be pooled."""
    signature = Signature({"input_ids": ("batch_size", "sequence")}, SIGNATURE.outputs)
    with pytest.raises(ExportError, match="attention mask"):
        choose_head("embedding", signature)


def test_a_head_over_tokens_is_refused_for_a_model_that_pooled_already() -> None:
    """A classifier's logits are [B, labels]."""
    signature = Signature(TOKENS, {"logits": ("batch_size", 3)})
    with pytest.raises(ExportError, match="three axes"):
        choose_head("splade", signature)
