"""Verification catches exports that are broken on purpose, each in another way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file

from onnxtool import ExportOptions, export_model
from onnxtool.errors import CheckpointError, ExportError, VerificationError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import read_head
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.report import ExportReport
from onnxtool.export.signature import Signature, detect_signature
from onnxtool.export.single_call import SingleCallPipeline
from onnxtool.export.source import Source
from onnxtool.export.tracing import EXPORTERS, ExportStrategy
from onnxtool.runtime.comparison import ReferenceOutputs
from onnxtool.runtime.difference import TOLERANCES
from onnxtool.verification import Verification
from tests.export.planting import (
    constant,
    fix_the_batch,
    ignore_the_mask,
    invert_the_mask,
    name_of,
    replace_value,
    round_to_half,
    swap_outputs,
)
from tests.workshop import Workshop


def reference(workshop: Workshop, name: str, head: str = "none") -> tuple[Any, SingleCallPipeline]:
    """Load the model that files are compared with, and how they are."""
    checkpoint = Checkpoint.open(Source.find(str(workshop.checkpoint(name))))
    model = checkpoint.load_model(dtype="float32", device="cpu", attention=None)
    modality = find_modality(model, checkpoint)
    signature = detect_signature(model, modality)
    head_ = read_head(head, checkpoint.source)
    return model, SingleCallPipeline(
        modality, signature, head_, keep_raw=False, specification=None, default_attention=None
    )


def outputs_of(model: Any, pipeline: SingleCallPipeline) -> ReferenceOutputs:
    return pipeline.reference_outputs(model, ExportStrategy(EXPORTERS[0], None))


@pytest.fixture(scope="module")
def encoder_outputs(workshop: Workshop) -> ReferenceOutputs:
    """What PyTorch gives for the encoder that errors are planted in."""
    return outputs_of(*reference(workshop, "tiny-encoder"))


def verify_encoder(path: Path, outputs: ReferenceOutputs) -> Verification:
    anything: Any = None  # of what a file is compared by, only the outputs count
    plain = SingleCallPipeline(anything, Signature({}, {}), None, False, None, None)
    return plain.verify(path, outputs, TOLERANCES["fp32"])


def ignore_the_token_types(model: onnx.ModelProto) -> None:
    zero = constant(model, np.array(0, np.int64))
    replace_value(model, "token_type_ids", helper.make_node("Mul", ["token_type_ids", zero], ["planted_zeros"]))


def drop_the_last_token(model: onnx.ModelProto) -> None:
    names = [constant(model, np.array([i], np.int64)) for i in (0, -1, 1)]
    replace_value(
        model, "input_ids", helper.make_node("Slice", ["input_ids", *names[:2], names[2]], ["planted_shorter"])
    )


def change_a_weight(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [32, 64])
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] += 0.1
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def loosen_a_normalization(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    for attribute in node.attribute:
        if attribute.name == "epsilon":
            attribute.f = 1e-2


def approximate_gelu(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Gelu")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("approximate", "tanh"))


def swap_the_outputs(model: onnx.ModelProto) -> None:
    swap_outputs(model, *(value.name for value in model.graph.output))
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def forget_an_output(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def shorten_the_positions(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [64, 32])
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:40].copy(), tensor.name))


PLANTED = (
    ignore_the_mask,
    invert_the_mask,
    ignore_the_token_types,
    partial(fix_the_batch, size=2),
    drop_the_last_token,
    change_a_weight,
    loosen_a_normalization,
    approximate_gelu,
    swap_the_outputs,
    forget_an_output,
    shorten_the_positions,
    round_to_half,
)


@pytest.mark.parametrize("plant", PLANTED, ids=name_of)
def test_a_planted_error_is_caught(
    workshop: Workshop,
    tmp_path: Path,
    encoder_outputs: ReferenceOutputs,
    plant: Callable[[onnx.ModelProto], None],
) -> None:
    """The file loads and answers, and its answers are not the model's."""
    model = onnx.load(workshop.exported("tiny-encoder"))
    plant(model)
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(VerificationError) as error:
        verify_encoder(tmp_path / "broken.onnx", encoder_outputs)
    assert not error.value.verification.passed


def test_the_untouched_export_passes(workshop: Workshop, encoder_outputs: ReferenceOutputs) -> None:
    """The planted errors are what made the others fail."""
    verification = verify_encoder(workshop.exported("tiny-encoder"), encoder_outputs)
    assert verification.passed


def test_a_head_that_pools_padding_is_caught(workshop: Workshop, tmp_path: Path) -> None:
    """The head is compared with its own formula in PyTorch."""
    model = onnx.load(workshop.exported("tiny-splade", head="splade"))
    (cast,) = [
        node for node in model.graph.node if node.op_type == "Unsqueeze" and node.input[1].startswith("onnxtool")
    ]
    source = next(node for node in model.graph.node if cast.input[0] in node.output)
    one = constant(model, np.array(1, np.int64))
    model.graph.node.insert(0, helper.make_node("Max", ["attention_mask", one], ["planted_ones"]))
    source.input[0] = "planted_ones"
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(VerificationError, match="ragged|real text"):
        verify_encoder(tmp_path / "broken.onnx", outputs_of(*reference(workshop, "tiny-splade", "splade")))


def test_a_graph_that_runs_on_one_size_only_says_so(
    workshop: Workshop, tmp_path: Path, encoder_outputs: ReferenceOutputs
) -> None:
    """The worst case is the one that does not run, with onnxruntime's reason."""
    model = onnx.load(workshop.exported("tiny-encoder"))
    fix_the_batch(model, size=2)
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(VerificationError, match="onnxruntime cannot run") as error:
        verify_encoder(tmp_path / "broken.onnx", encoder_outputs)
    assert any(case.failure for case in error.value.verification.cases)


def test_a_model_that_answers_differently_each_time_cannot_be_verified(workshop: Workshop) -> None:
    """No file could be right; a Reformer without a seed for its hashes is so."""
    model, drawing = reference(workshop, "tiny-encoder")

    def add_noise(_model: Any, _inputs: Any, output: Any) -> Any:
        output["last_hidden_state"] = output["last_hidden_state"] + torch.rand(1)
        return output

    model.register_forward_hook(add_noise)
    with pytest.raises(
        ExportError, match="draws random numbers and answers differently each time: last_hidden_state by"
    ):
        outputs_of(model, drawing)


def test_a_model_that_draws_under_its_own_seed_can_be_verified(workshop: Workshop) -> None:
    """What it draws is the same in every run."""
    model, drawing = reference(workshop, "tiny-encoder")

    def add_noise(_model: Any, _inputs: Any, output: Any) -> Any:
        torch.manual_seed(5)
        output["last_hidden_state"] = output["last_hidden_state"] + torch.rand(1)
        return output

    model.register_forward_hook(add_noise)
    with torch.random.fork_rng(devices=()):
        assert outputs_of(model, drawing).cases


Weights = dict[str, Any]


def zero(weights: Weights) -> None:
    for name in weights:
        weights[name] = np.zeros_like(weights[name])


def without_words(weights: Weights) -> None:
    """Leave positions alone, so that tokens of one text differ."""
    weights["embeddings.word_embeddings.weight"][:] = 0
    weights["embeddings.token_type_embeddings.weight"][:] = 0


def not_a_number(weights: Weights) -> None:
    weights["encoder.layer.0.output.dense.bias"][3] = np.nan


def blind(weights: Weights) -> None:
    """Let no token see another one."""
    for name in weights:
        if ".attention.self.value." in name:
            weights[name] = np.zeros_like(weights[name])


def changed(workshop: Workshop, folder: Path, change: Callable[[Weights], None]) -> Path:
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), folder / "checkpoint"))
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


def export(checkpoint: Path, folder: Path, **options: Any) -> ExportReport:
    return export_model(
        ExportOptions(str(checkpoint), output=folder / "m.onnx", exporter="torchscript", head="none", **options)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (zero, "for all inputs, 0 throughout"),
        (without_words, "gives the same last_hidden_state"),
        (not_a_number, "for all inputs, nan throughout"),
        (blind, "ignores its attention mask"),
    ],
)
def test_a_model_that_ignores_its_inputs_is_refused(
    workshop: Workshop, tmp_path: Path, change: Callable[[Weights], None], message: str
) -> None:
    """All that it gives agrees with PyTorch, whatever is wrong with it; no file is left."""
    with pytest.raises(CheckpointError, match=message) as raised:
        export(changed(workshop, tmp_path, change), tmp_path)
    assert "--no_verify" in str(raised.value.hint)
    assert not (tmp_path / "m.onnx").exists()
