"""The attentions of transformers' own models, as PyTorch exports them, against PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.model_file import ModelFile
from onnxtool.optimize.attention.scores import match_roots
from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.passes.duplicates import common_subexpressions
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.input_sizes import input_sizes
from onnxtool.optimize.passes.products import einsum_products
from tests import generators
from tests.optimize.passes.builders import apply, assert_left_alone
from tests.optimize.passes.exports import ARCHITECTURES, ask, ask_torch, export
from tests.workshop import Workshop

# Those that transformers' two forms of attention mask otherwise.
SDPA = ("bert", "gpt2", "llama", "mistral", "modernbert", "vit")
WAYS = [(name, "eager") for name in ARCHITECTURES] + [(name, "sdpa") for name in SDPA]
# One architecture for each kind of mask.
MASKED = ("bert", "deberta-v2", "modernbert", "gpt-neo", "gpt2", "llama", "mistral", "t5")
# Which architectures need their masks as a bias, and which see what comes before alone.
WITH_BIAS = {"mpnet", "deberta-v2", "deberta-v2-own-keys", "mistral", "bloom", "t5"}
CAUSAL = {"gpt2", "llama", "qwen3"}


SEES_LATER = "openai-gpt"


def settled(workshop: Workshop, name: str, form: str) -> ir.Model:
    """Return an export by TorchScript on which the passes have run that run before."""
    model = export(workshop, name, form)
    for step in (fold_constants, input_sizes, common_subexpressions, einsum_products):
        apply(step, model)
    return model


def distance(found: NDArray[np.float32], expected: NDArray[np.float32], real: NDArray[np.bool_]) -> float:
    """Return the largest difference on real tokens, as a part of the largest number."""
    return float(np.abs(found - expected)[real].max() / np.abs(expected[real]).max())


@pytest.mark.parametrize(("name", "form"), WAYS)
def test_every_attention_of_an_architecture_is_fused(workshop: Workshop, name: str, form: str) -> None:
    """With masks by their kinds, and the numbers of PyTorch for padding on either side and holes."""
    architecture = ARCHITECTURES[name]
    model = settled(workshop, name, form)
    assert len(list(match_roots(model.graph))) == architecture.num_layers
    if name == SEES_LATER:  # padding before a text sees later keys, as in no fused operator
        assert_left_alone(attention, model, f"{architecture.num_layers} left alone: two masks")
        return
    outcome = apply(attention, model)
    assert (outcome.num_changes, outcome.note) == (architecture.num_layers, "")
    assert not list(match_roots(model.graph))
    if form == "eager" and name in MASKED:
        assert_masks(model, name)

    feeds = architecture.feeds()
    expected = ask_torch(architecture, form, feeds)
    real = feeds["attention_mask"].astype(bool) if "attention_mask" in feeds else np.ones(expected.shape[:2], bool)
    # Two layers of sums of 32 products in float32, after a softmax of scores that are tens.
    assert distance(ask(model, feeds), expected, real) < 1e-4
    if "attention_mask" in feeds:
        unmasked = {**feeds, "attention_mask": np.ones_like(feeds["attention_mask"])}
        assert distance(ask(model, unmasked), expected, real) > 0.1


def assert_masks(model: ir.Model, name: str) -> None:
    """Check that masks are written by their kinds: as a bias only where they are more than padding and causal."""
    fused = [node for node in model.graph if node.op_type in ("Attention", "MultiHeadAttention")]
    with_bias = [len(node.inputs) > 5 and node.inputs[5] is not None for node in fused]
    causal = ["unidirectional" in node.attributes for node in fused]
    if name in ("modernbert", "gpt-neo"):  # one layer sees everything, and one a window
        assert with_bias == [False, True]
        assert causal == [name == "gpt-neo", False]
    else:
        assert set(with_bias) == {name in WITH_BIAS}
        assert set(causal) == {name in CAUSAL}


def test_those_of_the_other_exporter_are_fused(workshop: Workshop, tmp_path: Path) -> None:
    """Of a decoder with a cache; BERT's are fused in tests/optimize/test_optimize.py."""
    source = generators.exported(workshop, "llama")
    assert ModelFile.open(source).metadata["onnxtool.exporter"] == "dynamo"
    report = optimize_model(OptimizeOptions(source, output=tmp_path / "o.onnx", timing=False))
    assert report.verification is not None
    assert [(one.expected, one.found) for one in report.fusions if one.kind == "attention"] == [(2, 2)]


def test_nothing_is_left_to_fuse_the_second_time(workshop: Workshop) -> None:
    """Behind an operator of onnxruntime shapes are known as well."""
    model = settled(workshop, "deberta-v2", "eager")
    assert apply(attention, model).num_changes == 2
    assert_left_alone(attention, model)
