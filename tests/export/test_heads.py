"""Heads on the graph give what their publications define, at the opsets of both exporters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from onnxtool.checkpoint.sentence_modules import POOLING_FLAGS
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.heads.choice import Head, append_head, read_head, recognize_head, require_output
from onnxtool.export.heads.steps import ACTIVATIONS, Dense, LayerNorm, Normalize, Pool, Splade, Step
from onnxtool.export.signature import Signature
from onnxtool.export.source import Source

# Rows without padding, padded on the right, on the left, and of a single token.
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=np.int64)
OPSETS = (13, 17, 18, 20)
# float32, a handful of operations on numbers around 1.
CLOSE = 2e-6


def head_of(*steps: Step) -> Head:
    """Make a head of `steps` over an output `raw`."""
    return Head("test", "raw", "vector", "sentence-similarity", steps)


def run_head(
    head: Head, values: NDArray[Any], opset: int = 17, *, keep_raw: bool = False
) -> tuple[list[str], list[NDArray[Any]]]:
    """Put the head on a graph that hands `values` [B, S, N] through, and run it in ONNX's reference implementation."""
    dtype = ir.DataType.from_numpy(values.dtype)
    mask = ir.val("attention_mask", dtype=ir.DataType.INT64, shape=["batch_size", "sequence"])
    fed = ir.val("fed", dtype=dtype, shape=["batch_size", "sequence", values.shape[-1]])
    through = ir.node("Identity", [fed])
    through.outputs[0].name = head.source
    through.outputs[0].type, through.outputs[0].shape = fed.type, fed.shape
    graph = ir.Graph([fed, mask], through.outputs, nodes=[through], opset_imports={"": opset}, name="g")
    model = ir.Model(graph, ir_version=8)
    append_head(model, head, keep_raw=keep_raw)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    found = onnx.reference.ReferenceEvaluator(proto).run(None, {"fed": values, "attention_mask": MASK})
    return [output.name for output in proto.graph.output], [np.asarray(array) for array in found]


def vectors(head: Head, values: NDArray[Any], opset: int = 17) -> NDArray[Any]:
    """Return what the graph gives."""
    _, (output,) = run_head(head, values, opset)
    return output


def in_torch(head: Head, values: NDArray[Any]) -> NDArray[Any]:
    """Return what the head gives in PyTorch."""
    return np.asarray(head.reference(torch.from_numpy(values), torch.from_numpy(MASK)))


@pytest.fixture
def values() -> NDArray[np.float32]:
    """[4, 5, 7], with padding larger than anything real."""
    values = np.random.default_rng(0).standard_normal((4, 5, 7)).astype(np.float32)
    values[MASK == 0] += 100
    return values


def pooled_by_hand(tokens: NDArray[Any], mode: str) -> NDArray[np.float64]:
    """Pool the real tokens of one text, [S, H], by the definition of `mode`."""
    tokens, count = tokens.astype(np.float64), len(tokens)
    weights = np.arange(1, count + 1)[:, None]
    by_definition = {
        "cls": tokens[0],
        "lasttoken": tokens[-1],
        "max": tokens.max(axis=0),
        "mean": tokens.mean(axis=0),
        "mean_sqrt_len_tokens": tokens.sum(axis=0) / math.sqrt(count),
        "weightedmean": (tokens * weights).sum(axis=0) / weights.sum(),
    }
    return np.asarray(by_definition[mode])


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("mode", POOLING_FLAGS)
def test_each_pooling_reads_real_tokens_only(values: NDArray[np.float32], mode: str, opset: int) -> None:
    """On either side of padding, in the graph and in PyTorch, as its definition by hand."""
    expected = np.stack([pooled_by_hand(row[mask == 1], mode) for row, mask in zip(values, MASK, strict=True)])
    head = head_of(Pool((mode,)))
    np.testing.assert_allclose(vectors(head, values, opset), expected, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(in_torch(head, values), expected, atol=CLOSE, rtol=CLOSE)


def test_several_poolings_are_concatenated(values: NDArray[np.float32]) -> None:
    """In the order in which they are named."""
    both = vectors(head_of(Pool(("max", "cls"))), values)
    np.testing.assert_array_equal(both[:, :7], vectors(head_of(Pool(("max",))), values))
    np.testing.assert_array_equal(both[:, 7:], vectors(head_of(Pool(("cls",))), values))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("activation", Splade.ACTIVATIONS)
@pytest.mark.parametrize("strategy", Splade.STRATEGIES)
def test_splade_activates_every_real_token_and_pools(
    values: NDArray[np.float32], strategy: str, activation: str, opset: int
) -> None:
    """Computed a row, a term and a token at a time."""

    def activate(value: float) -> float:
        weight = math.log1p(max(0.0, value))
        return math.log1p(weight) if activation == "log1p_relu" else weight

    pool = max if strategy == "max" else sum
    expected = [
        [pool([activate(float(row[s, v])) for s in range(5) if mask[s]]) for v in range(7)]
        for row, mask in zip(values, MASK, strict=True)
    ]
    head = head_of(Splade(strategy, activation))
    np.testing.assert_allclose(vectors(head, values, opset), expected, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(in_torch(head, values), expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_chain_of_modules_is_computed_in_order(values: NDArray[np.float32], activation: str, opset: int) -> None:
    """Mean, two projections, layer norm, length 1: the graph as PyTorch."""
    source = np.random.default_rng(1)
    first = source.standard_normal((6, 7)).astype(np.float32)
    second = source.standard_normal((3, 6)).astype(np.float32)
    steps = (
        Pool(("mean",)),
        Dense("2_Dense", first, source.standard_normal(6).astype(np.float32), activation),
        Dense("3_Dense", second, None, activation, residual=second * 2),
        LayerNorm("4_LayerNorm", np.array([1, 2, 3], np.float32), np.array([0.5, 0, 1], np.float32)),
        Normalize(),
    )
    output = vectors(head_of(*steps), values, opset)
    assert output.shape == (4, 3)
    np.testing.assert_allclose(np.linalg.norm(output, axis=1), 1.0, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(output, in_torch(head_of(*steps), values), atol=1e-5, rtol=1e-5)
    swapped = vectors(head_of(steps[0], Normalize(), *steps[1:4]), values, opset)
    assert np.abs(swapped - output).max() > 0.1  # order is meaning


def test_half_precision_is_pooled_in_single(values: NDArray[np.float32]) -> None:
    """Sums over tokens overflow float16; the result is of the model's dtype all the same."""
    large = np.full((4, 5, 7), 30000, dtype=np.float16)
    output = vectors(head_of(Pool(("mean",))), large)
    assert output.dtype == np.float16
    np.testing.assert_array_equal(output, np.full((4, 7), 30000, dtype=np.float16))


def test_a_vector_of_zeros_stays_finite() -> None:
    """Normalizing must not divide by zero."""
    zeros = np.zeros((4, 5, 7), dtype=np.float32)
    assert np.isfinite(vectors(head_of(Pool(), Normalize()), zeros)).all()


def test_the_raw_output_may_stay_beside_the_head(values: NDArray[np.float32]) -> None:
    """After it, so that consumers of the first output find the head's."""
    names, (_, raw) = run_head(head_of(Pool()), values, keep_raw=True)
    assert names == ["vector", "raw"]
    np.testing.assert_array_equal(raw, values)


def test_modules_that_do_not_fit_are_refused() -> None:
    """A projection from another width."""
    dense = Dense("2_Dense", np.zeros((3, 9), np.float32), None, "Tanh")
    with pytest.raises(CheckpointError, match="2_Dense takes vectors of 9 numbers, and is given 7"):
        head_of(Pool(), dense).width(7)


SIGNATURE = Signature(
    {"input_ids": ("batch_size", "sequence"), "attention_mask": ("batch_size", "sequence")},
    {"last_hidden_state": ("batch_size", "sequence", 8)},
)


def test_a_head_that_the_model_cannot_have_names_the_output_it_needs() -> None:
    """A base model has no logits."""
    with pytest.raises(ExportError, match="needs the output logits; this model gives last_hidden_state"):
        require_output("splade", "logits", SIGNATURE)


def test_a_head_needs_an_attention_mask() -> None:
    """Without one, padding would be pooled."""
    head = Head("embedding", "last_hidden_state", "v", "", (Pool(),))
    head.check(SIGNATURE)
    with pytest.raises(ExportError, match="attention mask"):
        head.check(Signature({"input_ids": ("batch_size", "sequence")}, SIGNATURE.outputs))


def test_a_head_over_tokens_is_refused_for_a_model_that_pooled_already() -> None:
    """A classifier's logits are [B, labels]."""
    head = Head("splade", "logits", "sparse", "", (Splade(),))
    with pytest.raises(ExportError, match="three axes"):
        head.check(Signature(SIGNATURE.inputs, {"logits": ("batch_size", 3)}))


def checkpoint(folder: Path, *modules: tuple[str, dict[str, Any]], tags: str = "") -> Source:
    """Write the module files of a checkpoint, and no model."""
    (folder / "config.json").write_text('{"model_type": "bert"}')
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, (kind, settings) in enumerate(modules, start=1):
        path = folder / f"{place}_{kind}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(settings))
        listed.append({"idx": place, "path": path.name, "type": f"sentence_transformers.models.{kind}"})
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    if tags:
        (folder / "README.md").write_text(f"---\ntags: [{tags}]\n---\n")
    return Source.find(str(folder))


@pytest.mark.parametrize(
    ("modules", "tags", "architecture", "head"),
    [
        ([("SpladePooling", {})], "", "BertForMaskedLM", "splade"),
        ([("Pooling", {"pooling_mode_cls_token": True})], "", "BertModel", "embedding"),
        ([], "splade, other", "BertForMaskedLM", "splade"),
        ([], "sparse-encoder", "BertForMaskedLM", "splade"),
        ([], "splade", "BertModel", "none"),
        ([], "", "BertForMaskedLM", "none"),
        ([("Pooling", {}), ("SparseAutoEncoder", {})], "", "BertModel", "none"),
    ],
)
def test_the_head_is_recognized(
    tmp_path: Path, modules: list[tuple[str, dict[str, Any]]], tags: str, architecture: str, head: str
) -> None:
    """By modules.json, else by the card's tags of a model with the vocabulary's logits."""
    name, why = recognize_head(checkpoint(tmp_path, *modules, tags=tags), architecture)
    assert name == head
    assert why


def test_a_sparse_encoder_without_modules_is_recognized(tmp_path: Path) -> None:
    """By the class that sentence-transformers says it is."""
    source = checkpoint(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    assert recognize_head(source, "BertForMaskedLM")[0] == "splade"


def test_unknown_modules_are_named(tmp_path: Path) -> None:
    """Leaving one out would give other vectors."""
    source = checkpoint(tmp_path, ("Pooling", {}), ("WordWeights", {}), ("LSTM", {}))
    with pytest.raises(CheckpointError, match="modules LSTM, WordWeights, which no head computes"):
        read_head("embedding", source)


def test_the_settings_of_splade_pooling_are_read(tmp_path: Path) -> None:
    """Of sentence-transformers' own names; others are refused."""
    source = checkpoint(tmp_path, ("SpladePooling", {"pooling_strategy": "sum", "activation_function": "log1p_relu"}))
    head = read_head("splade", source)
    assert head is not None
    assert head.steps == (Splade("sum", "log1p_relu"),)
    (tmp_path / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": "median"}')
    with pytest.raises(CheckpointError, match="weighs terms by median of relu"):
        read_head("splade", source)


def dense_checkpoint(folder: Path, **settings: Any) -> Source:
    return checkpoint(
        folder,
        ("Pooling", {"pooling_mode": "weightedmean"}),
        ("Dense", {"in_features": 4, "out_features": 2, "bias": True, **settings}),
        ("Normalize", {}),
    )


def test_a_projection_is_read_with_its_weights(tmp_path: Path) -> None:
    """From the module's own folder; the default activation is Tanh."""
    weight = np.arange(8, dtype=np.float32).reshape(2, 4)
    source = dense_checkpoint(tmp_path)
    save_file({"linear.weight": weight, "linear.bias": np.ones(2, np.float32)}, tmp_path / "2_Dense/model.safetensors")
    head = read_head("embedding", source)
    assert head is not None
    pool, dense, normalize = head.steps
    assert (pool, normalize) == (Pool(("weightedmean",)), Normalize())
    assert isinstance(dense, Dense)
    np.testing.assert_array_equal(dense.weight, weight)
    assert (dense.activation, head.width(4)) == ("Tanh", 2)


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    """They could run code."""
    source = dense_checkpoint(tmp_path)
    (tmp_path / "2_Dense/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="in a pickle"):
        read_head("embedding", source)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"activation_function": "torch.nn.modules.activation.Hardtanh"}, "activated by torch.nn.*Hardtanh"),
        ({"activation_function": "mine.Tanh"}, "activated by mine.Tanh"),
        ({"module_input_name": "token_embeddings"}, "works on sentence_embedding, token_embeddings"),
        ({"in_features": 5}, r"of shape \[2, 4\], and its config.json says \[2, 5\]"),
    ],
)
def test_a_projection_that_cannot_be_computed_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    """By its activation, its input or its weights."""
    source = dense_checkpoint(tmp_path, **settings)
    tensors = {"linear.weight": np.zeros((2, 4), np.float32), "linear.bias": np.ones(2, np.float32)}
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        read_head("embedding", source)


def test_a_pooling_without_the_prompt_is_refused(tmp_path: Path) -> None:
    """A graph does not know where a prompt ends."""
    with pytest.raises(CheckpointError, match="leaves the prompt out"):
        read_head("embedding", checkpoint(tmp_path, ("Pooling", {"include_prompt": False})))
