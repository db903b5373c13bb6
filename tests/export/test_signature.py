"""Inputs, outputs and axes are found by running the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.signature import Signature, detect_signature, order_and_name, tidy
from onnxtool.export.source import Source
from onnxtool.export.tracing import EXPORTERS, trace, trace_torchscript
from onnxtool.model_file.weights import write_inline
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.session import open_session
from tests.workshop import WORDS, Workshop


def signature_of(workshop: Workshop, name: str) -> Any:
    checkpoint = Checkpoint.open(Source.find(str(workshop.checkpoint(name))))
    model = checkpoint.load_model(dtype="float32", device="cpu", attention=None)
    return detect_signature(model, find_modality(model, checkpoint))


def test_logits_of_a_masked_language_model_have_batch_sequence_and_vocabulary(workshop: Workshop) -> None:
    """Every axis that moves is named, and the vocabulary is a number."""
    signature = signature_of(workshop, "tiny-splade")
    assert signature.outputs == {"logits": ("batch_size", "sequence", WORDS)}


def test_a_pooled_output_gets_no_sequence_axis(workshop: Workshop) -> None:
    """The pooler's output is [B, H]."""
    signature = signature_of(workshop, "tiny-encoder")
    assert signature.outputs == {
        "last_hidden_state": ("batch_size", "sequence", 32),
        "pooler_output": ("batch_size", 32),
    }


def test_only_inputs_that_the_model_takes_are_kept(workshop: Workshop) -> None:
    """BERT's tokenizer gives token types, which DistilBERT does not take."""
    assert list(signature_of(workshop, "tiny-encoder").inputs) == ["input_ids", "token_type_ids", "attention_mask"]
    assert list(signature_of(workshop, "tiny-classifier").inputs) == ["input_ids", "attention_mask"]


class Windows(torch.nn.Module):
    """Gives a window for every two tokens, and a tensor whose first axis counts rows and tokens together."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return input_ids[:, ::2].float(), input_ids.reshape(-1).float()


def test_an_axis_that_is_neither_batch_nor_sequence_gets_a_name_of_its_own(workshop: Workshop) -> None:
    """Equal names stand only where sizes are equal."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.checkpoint("tiny-encoder"))
    signature = detect_signature(Windows(), TextInputs.of(Windows(), tokenizer, ["input_ids"]))
    assert signature.outputs == {
        "output_0": ("batch_size", "output_0_sequence"),
        "output_1": ("output_1_batch_size_sequence",),
    }


def test_a_model_of_something_else_than_text_is_refused() -> None:
    """The error names what the model takes and what its tokenizer gives."""

    class Images(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values

    def tokenizer(_texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0]]}

    with pytest.raises(ExportError, match="pixel_values.*input_ids"):
        TextInputs.of(Images(), tokenizer, ["pixel_values"])


def test_a_model_that_does_not_run_on_text_alone_says_why(workshop: Workshop) -> None:
    """What the model itself said is in the error."""

    class Needy(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
            raise ValueError("you have to give decoder_input_ids")

    tokenizer = AutoTokenizer.from_pretrained(workshop.checkpoint("tiny-encoder"))
    with pytest.raises(ExportError, match="decoder_input_ids"):
        detect_signature(Needy(), TextInputs.of(Needy(), tokenizer, ["input_ids"]))


SHAPES = {"x": ("batch_size", 1, "height", "width")}


@pytest.mark.parametrize("padding", [0, 1], ids=["", "pool pads as well"])
def test_zeros_around_a_picture_count_in_a_maximum(padding: int, tmp_path: Path) -> None:
    """Of negative values, zero is the largest; a pool that pads by itself leaves it out (BiT has the pattern)."""
    model = nn.Sequential(nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, stride=2, padding=padding)).eval()
    sample = -1 - torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    outputs = {"output": ("batch_size", 1, "output_height", "output_width")}
    with quiet():
        graph = trace_torchscript(_Named(model), {"x": sample}, Signature(SHAPES, outputs), None)
    tidy(graph, Signature(SHAPES, outputs, (), {}, {}), model)
    write_inline(graph, tmp_path / "m.onnx")
    found = open_session(tmp_path / "m.onnx", provider="cpu").run({"x": sample.numpy()})["output"]
    np.testing.assert_array_equal(found, model(sample).numpy())
    assert found.max() == 0
    unread = [node for node in graph.graph if not any(output.uses() for output in node.outputs)]
    assert [node.op_type for node in unread] == ["MaxPool"]


class _Named(nn.Module):
    """Gives the input of a model the name `x`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass `x` on."""
        output: torch.Tensor = self.model(x)
        return output


class _Angles(nn.Module):
    """Makes the angles of each kind of layer in some order, as Gemma 3 does, which goes through a set."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join the angles of both kinds."""
        scales = {"sliding": 2.0, "full": 3.0}
        angles = {kind: (x * scales[kind]).cos() for kind in self.kinds}
        return torch.cat([angles["sliding"], angles["full"].sin()], dim=-1)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_order_in_which_a_model_goes_through_a_set_is_in_no_file(exporter: str) -> None:
    """Every process draws the order of a set anew."""
    found = Signature({"x": ("batch_size", 4)}, {"output": ("batch_size", 8)})
    row = next(one for one in EXPORTERS if one.name == exporter)
    files = []
    for kinds in (("sliding", "full"), ("full", "sliding")):
        model = _Angles(kinds).eval()
        graph = trace(row, model, {"x": torch.ones(2, 4)}, found, None)
        tidy(graph, found, model)
        files.append(ir.to_proto(graph).SerializeToString(deterministic=True))
    assert files[0] == files[1]


def test_what_no_output_needs_is_dropped_and_the_rest_is_named_after_its_module() -> None:
    """torch.export has a word of its own for nodes without a module; weights keep their names."""
    graph = ir.from_onnx_text("""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[N] x) => (float[N] y) <float[1] val_1 = {1.0}, float[1] val_2 = {2.0}, float[1] weight = {3.0}> {
            dropped = Add(x, val_1)
            sum = Add(x, val_2)
            y = Mul(sum, weight)
        }
    """).graph
    for node, scopes in zip(
        graph, (["", "add"], ["", "_empty_nn_module_stack_from_metadata_hook", "add_1"], ["", "mul"]), strict=True
    ):
        node.metadata_props["pkg.torch.onnx.name_scopes"] = str(scopes)
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.ones(1)))
    order_and_name(graph, module)
    assert [(node.name, node.outputs[0].name) for node in graph] == [("Add", "Add/output"), ("Mul", "y")]
    assert list(graph.initializers) == ["weight", "Add/1"]
