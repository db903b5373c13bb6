"""onnxruntime's own fusions, for what ours leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.onnxruntime_fusions import onnxruntime_fusions
from onnxtool.optimize.pipeline import Context
from tests.optimize.passes.builders import Row, apply, assert_left_alone, count, ragged_feeds, run
from tests.workshop import Workshop

BERT = Context("bert", num_heads=4, hidden_size=32)


def encoder(workshop: Workshop, exporter: str = "torchscript") -> ir.Model:
    """Return an export on which none of our own passes has run."""
    return ir.load(workshop.exported("tiny-encoder", exporter=exporter))


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_numbers_stay_on_real_tokens(workshop: Workshop, exporter: str) -> None:
    """Against the model that went in, on masks with holes everywhere; hidden states are about 3 large."""
    feeds = ragged_feeds()
    expected = run(encoder(workshop, exporter), feeds)
    outcome = onnxruntime_fusions.apply(encoder(workshop, exporter), BERT)
    assert outcome.num_changes > 0
    assert outcome.model.graph.opset_imports["com.microsoft"] == 1
    if exporter == "torchscript":  # the mask is there as it is, and not as a length, which is wrong for left padding
        assert count(outcome.model, "Attention", "com.microsoft") == 2
    found = run(outcome.model, feeds)
    real = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(found[0][real], expected[0][real], atol=2e-5, rtol=0)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-5, rtol=0)


def test_nothing_is_run_where_our_own_pass_has_fused_everything(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds, and holds all weights in memory."""
    from onnxruntime.transformers import optimizer

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("onnxruntime's fusions are run")

    monkeypatch.setattr(optimizer, "optimize_model", refuse)
    model = encoder(workshop)
    apply(fold_constants, model)
    assert apply(attention, model).num_changes == 2
    assert_left_alone(onnxruntime_fusions, model)


def test_probabilities_that_are_outputs_are_kept(workshop: Workshop) -> None:
    """The patterns of onnxruntime remove the Softmax that makes them."""
    model = encoder(workshop)
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    softmax.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.outputs.append(softmax.outputs[0])
    assert_left_alone(onnxruntime_fusions, model, "not run: not one product alone reads the probabilities")


def test_skip_layer_normalization_is_for_cuda_only(workshop: Workshop) -> None:
    """On the CPU it is slower than what it replaces."""
    on_cpu = onnxruntime_fusions.apply(encoder(workshop), BERT).model
    on_cuda = onnxruntime_fusions.apply(encoder(workshop), Context("bert", 4, 32, provider="cuda")).model
    assert count(on_cpu, "SkipLayerNormalization", "com.microsoft") == 0
    assert count(on_cuda, "SkipLayerNormalization", "com.microsoft") == 4


def test_an_architecture_without_patterns_is_said_so(workshop: Workshop) -> None:
    """The general fusions are used, and the note tells."""
    outcome = onnxruntime_fusions.apply(encoder(workshop), Context("neverheard"))
    assert "'neverheard'" in outcome.note
    assert outcome.num_changes > 0


def test_patterns_that_trip_over_a_graph_give_way_to_the_general_ones(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's look for nodes that no encoder has, and end in an IndexError on some graphs; the note tells."""
    from onnxruntime.transformers import optimizer

    general = optimizer.optimize_model

    def trip(*arguments: Any, model_type: str, **options: Any) -> Any:
        if model_type == "gpt2":
            raise IndexError("list index out of range")
        return general(*arguments, model_type=model_type, **options)

    monkeypatch.setattr(optimizer, "optimize_model", trip)
    outcome = onnxruntime_fusions.apply(encoder(workshop), Context("gpt2", 4, 32))
    assert "gpt2 fail on this graph (list index out of range)" in outcome.note
    assert count(outcome.model, "BiasGelu", "com.microsoft") == 2


@pytest.mark.parametrize(("num_heads", "hidden_size"), [(5, 32), (0, 32)])
def test_heads_that_do_not_divide_the_hidden_size_are_not_told(
    workshop: Workshop, num_heads: int, hidden_size: int
) -> None:
    """Hiera's heads grow with its stages, and the optimizer asserts that they divide."""
    outcome = onnxruntime_fusions.apply(encoder(workshop), Context("bert", num_heads, hidden_size))
    assert (outcome.num_changes > 0, outcome.note) == (True, "")


def test_general_patterns_that_fail_leave_the_graph(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assertion says nothing, so the note says where it stands."""
    from onnxruntime.transformers import optimizer

    def stop(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(optimizer, "optimize_model", stop)
    note = "onnxruntime's patterns for bert fail on this graph (AssertionError in test_onnxruntime_fusions.py, stop)"
    assert_left_alone(onnxruntime_fusions, encoder(workshop), note)


# Its graphs are the exports above.
ROW = Row(onnxruntime_fusions, {}, atol=None)
