"""Each pass fires where it should and not elsewhere, keeps the numbers, and does nothing the second time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxtool.optimize.passes.deduplicate_initializers import deduplicate_initializers
from onnxtool.optimize.passes.float16 import float16
from onnxtool.optimize.passes.onnxoptimizer_cleanup import onnxoptimizer_cleanup
from onnxtool.optimize.passes.onnxruntime_fusions import onnxruntime_fusions
from onnxtool.optimize.pipeline import Context, Pass
from onnxtool.optimize.presets import PRESETS
from tests.workshop import Workshop

BERT = Context("bert", num_heads=4, hidden_size=32)
ALL = (onnxruntime_fusions, onnxoptimizer_cleanup, deduplicate_initializers, float16)


def run(model: ir.Model, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    content = ir.to_proto(ir.external_data.load_to_model(model)).SerializeToString()
    outputs: list[NDArray[Any]] = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, feeds)
    return outputs


def ragged_feeds() -> dict[str, NDArray[np.int64]]:
    """[3, 9], padded on the right, on the left and in the middle."""
    generator = np.random.default_rng(0)
    mask = np.ones((3, 9), np.int64)
    mask[0, 6:] = mask[1, :4] = mask[2, 3:5] = 0
    return {
        "input_ids": generator.integers(0, 30522, (3, 9)),
        "token_type_ids": generator.integers(0, 2, (3, 9)),
        "attention_mask": mask,
    }


def count(model: ir.Model, op_type: str, domain: str = "") -> int:
    return sum(node.op_type == op_type and node.domain == domain for node in model.graph)


def test_every_pass_of_every_preset_is_tested_here() -> None:
    """A new pass fails this test until it has its row."""
    assert {step.name for preset in PRESETS.values() for step in preset} == {step.name for step in ALL}


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_pass_keeps_the_numbers_on_real_tokens(workshop: Workshop, step: Pass, exporter: str) -> None:
    """Against the model that went in, on masks with holes everywhere."""
    path, feeds = workshop.exported("tiny-encoder", exporter=exporter), ragged_feeds()
    expected = run(ir.load(path), feeds)
    found = run(step.apply(ir.load(path), BERT).model, feeds)
    real = feeds["attention_mask"].astype(bool)
    atol = 2e-2 if step is float16 else 2e-5  # float16 has 11 bits, and these hidden states are about 3 large
    np.testing.assert_allclose(found[0][real], expected[0][real], atol=atol, rtol=0)
    np.testing.assert_allclose(found[1], expected[1], atol=atol, rtol=0)


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
def test_a_pass_does_nothing_the_second_time(workshop: Workshop, step: Pass) -> None:
    """Its own output has nothing left to do."""
    model = ir.load(workshop.exported("tiny-encoder", exporter="torchscript"))
    if step is deduplicate_initializers:  # equal constants are what there is to share
        model = onnxoptimizer_cleanup.apply(model, BERT).model
    once = step.apply(model, BERT)
    assert once.num_changes > 0
    assert step.apply(once.model, BERT).num_changes == 0


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
def test_a_pass_keeps_the_metadata(workshop: Workshop, step: Pass) -> None:
    """Tools drop or replace it."""
    model = ir.load(workshop.exported("tiny-encoder"))
    before = dict(model.metadata_props)
    assert step.apply(model, BERT).model.metadata_props == before


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
def test_a_pass_leaves_a_model_alone_that_has_nothing_for_it(step: Pass) -> None:
    """Integers only: nothing to fuse, to clean up, to share or to round."""
    x = ir.val("x", dtype=ir.DataType.INT64, shape=["n"])
    node = ir.node("Neg", [x])
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20}, name="g")
    assert step.apply(ir.Model(graph, ir_version=9), BERT).num_changes == 0


def test_attention_of_torchscript_exports_is_fused(workshop: Workshop) -> None:
    """One a layer, with the mask as it is and not as a length, which is wrong for padding on the left."""
    model = onnxruntime_fusions.apply(ir.load(workshop.exported("tiny-encoder", exporter="torchscript")), BERT).model
    assert count(model, "Attention", "com.microsoft") == 2
    assert model.graph.opset_imports["com.microsoft"] == 1


def test_skip_layer_normalization_is_for_cuda_only(workshop: Workshop) -> None:
    """On the CPU it is slower than what it replaces."""
    path = workshop.exported("tiny-encoder", exporter="torchscript")
    on_cpu = onnxruntime_fusions.apply(ir.load(path), BERT).model
    on_cuda = onnxruntime_fusions.apply(ir.load(path), Context("bert", 4, 32, provider="cuda")).model
    assert count(on_cpu, "SkipLayerNormalization", "com.microsoft") == 0
    assert count(on_cuda, "SkipLayerNormalization", "com.microsoft") == 4


def test_an_architecture_without_patterns_is_said_so(workshop: Workshop) -> None:
    """The general fusions are used, and the note tells."""
    model = ir.load(workshop.exported("tiny-encoder"))
    outcome = onnxruntime_fusions.apply(model, Context("neverheard"))
    assert "'neverheard'" in outcome.note
    assert outcome.num_changes > 0


def test_patterns_that_trip_over_a_graph_give_way_to_the_general_ones(workshop: Workshop) -> None:
    """GPT-2's look for nodes that no encoder has, and end in an IndexError on some graphs; the note tells."""
    with pytest.MonkeyPatch.context() as patch:
        from onnxruntime.transformers import optimizer

        general = optimizer.optimize_model

        def trip(*arguments: Any, model_type: str, **options: Any) -> Any:
            if model_type == "gpt2":
                raise IndexError("list index out of range")
            return general(*arguments, model_type=model_type, **options)

        patch.setattr(optimizer, "optimize_model", trip)
        outcome = onnxruntime_fusions.apply(ir.load(workshop.exported("tiny-encoder")), Context("gpt2", 4, 32))
    assert "gpt2 fail on this graph (list index out of range)" in outcome.note
    assert count(outcome.model, "BiasGelu", "com.microsoft") == 2


def test_identities_and_constants_are_cleaned_up(workshop: Workshop) -> None:
    """TorchScript leaves many."""
    model = ir.load(workshop.exported("tiny-encoder", exporter="torchscript"))
    assert count(model, "Constant") > 20
    cleaned = onnxoptimizer_cleanup.apply(model, BERT).model
    assert count(cleaned, "Constant") == 0
    assert len(cleaned.graph) < len(model.graph)


def test_model_local_functions_are_not_lost() -> None:
    """A model with functions is left alone by onnxoptimizer, which would drop them, and the note tells."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=["n"])
    inner = ir.node("Relu", [a := ir.val("a")])
    function = ir.Function(
        "local", "F", graph=ir.Graph([a], inner.outputs, nodes=[inner], opset_imports={"": 20}), attributes=[]
    )
    call = ir.node("F", [x], domain="local")
    call.outputs[0].name = "y"
    graph = ir.Graph([x], call.outputs, nodes=[call], opset_imports={"": 20, "local": 1}, name="g")
    model = ir.Model(graph, ir_version=9, functions=[function])
    outcome = onnxoptimizer_cleanup.apply(model, BERT)
    assert outcome.model is model
    assert "functions" in outcome.note


def test_equal_weights_are_stored_once() -> None:
    """Equal in dtype, shape and bytes; equal bytes of another shape stay apart."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[4, 4])
    arrays = [
        np.ones((4, 4), np.float32),
        np.ones((4, 4), np.float32),
        np.ones((2, 8), np.float32),
        np.eye(4, dtype=np.float32),
    ]
    weights = [ir.val(f"w{i}", const_value=ir.tensor(array, name=f"w{i}")) for i, array in enumerate(arrays)]
    first, second, third = (ir.node("Add", [x, weight]) for weight in (weights[0], weights[1], weights[3]))
    other = ir.node("Reshape", [weights[2], shape := ir.val("s", const_value=ir.tensor(np.array([4, 4]), name="s"))])
    nodes = [first, second, third, other]
    for index, node in enumerate(nodes):
        node.outputs[0].name = f"y{index}"
        node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    graph = ir.Graph(
        [x],
        [node.outputs[0] for node in nodes],
        nodes=nodes,
        initializers=[*weights, shape],
        opset_imports={"": 20},
        name="g",
    )
    outcome = deduplicate_initializers.apply(ir.Model(graph, ir_version=9), BERT)
    assert sorted(outcome.model.graph.initializers) == ["s", "w0", "w2", "w3"]
    assert outcome.num_changes == 2  # one initializer gone, one node rewired


def test_float16_keeps_the_types_of_inputs_and_outputs(workshop: Workshop, tmp_path: Path) -> None:
    """And halves the weights."""
    path = workshop.exported("tiny-encoder", exporter="torchscript")
    model = float16.apply(ir.load(path), BERT).model
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT}
    ir.save(ir.external_data.load_to_model(model), tmp_path / "half.onnx")
    assert (tmp_path / "half.onnx").stat().st_size < 0.52 * path.stat().st_size
