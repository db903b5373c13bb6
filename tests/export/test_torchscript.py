"""Tests of the TorchScript trace: weights once, under their names, and untouched in the model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtool.export.torchscript import trace_torchscript
from onnxtool.model_file.weights import write_inline
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.session import open_session

INPUTS = {"input_ids": ("batch_size", "sequence")}
OUTPUTS = {"output": ("batch_size", "sequence", 11)}


class Tied(torch.nn.Module):
    """An embedding int64 [B, S] -> float32 [B, S, 6], a layer, and an output layer of the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 6)
        self.layer = torch.nn.Linear(6, 6)
        self.unused = torch.nn.Linear(6, 6)
        self.out = torch.nn.Linear(6, 11)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(torch.relu(self.layer(self.table(input_ids))) * self.scale)
        return output


@pytest.fixture
def model() -> Tied:
    tied = Tied()
    tied.eval()
    return tied


def trace(model: torch.nn.Module, opset: int | None = None) -> ir.Model:
    sample = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    with quiet():  # torch warns of its own exporter, as every caller of this knows
        return trace_torchscript(model, sample, INPUTS, OUTPUTS, opset)


def weight(graph: ir.Model, name: str) -> np.ndarray[Any, Any]:
    tensor = graph.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def test_the_file_answers_as_the_model_on_other_shapes(model: Tied, tmp_path: Path) -> None:
    """The weights that were put on the graph are in their places, whatever the batch and the length."""
    write_inline(trace(model), tmp_path / "m.onnx")
    session = open_session(tmp_path / "m.onnx", provider="cpu", frugal=True)
    for shape in ((1, 1), (2, 3), (5, 9)):
        ids = np.random.default_rng(0).integers(0, 11, shape)
        with torch.inference_mode():
            wanted = model(torch.from_numpy(ids)).numpy()
        # float32, three layers: rounding is below 1e-6 of values of about 10
        np.testing.assert_allclose(session.run({"input_ids": ids})["output"], wanted, rtol=1e-5, atol=1e-5)


def test_a_tied_weight_is_there_once(model: Tied) -> None:
    """An output layer that shares the embedding's weight brings no second one, nor does its transposition."""
    sizes = [value.const_value.size for value in trace(model).graph.initializers.values() if value.const_value]
    assert sizes.count(66) == 1


def test_a_matrix_is_transposed_in_place_of_a_node(model: Tied) -> None:
    """MatMul finds a weight at its input, which the fusions of onnxruntime look for."""
    graph = trace(model)
    (layer,) = (node for node, _ in graph.graph.initializers["layer.weight"].uses())
    assert layer.op_type == "MatMul"
    np.testing.assert_array_equal(weight(graph, "layer.weight"), model.layer.weight.detach().numpy().T)


def test_weights_are_called_as_in_the_model_and_unused_ones_left_out(model: Tied) -> None:
    """Names are those of the state dict."""
    names = set(trace(model).graph.initializers)
    assert {"table.weight", "layer.weight", "layer.bias", "out.bias", "scale"} <= names
    assert not {name for name in names if name.startswith("unused")}


def test_only_the_given_inputs_are_left(model: Tied) -> None:
    """Weights stand in for inputs during the trace alone."""
    assert [value.name for value in trace(model).graph.inputs] == ["input_ids"]


def test_the_model_has_its_own_weights_afterwards(model: Tied) -> None:
    """Tracing changes nothing about the model, not even where it fails."""
    before = [(name, id(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]]
    trace(model)
    with pytest.raises(Exception, match="opset"):
        trace(model, opset=999)
    assert [(name, id(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]] == before


def test_weights_take_no_memory_of_their_own(model: Tied) -> None:
    """The graph refers to the memory of the model, transposed weights as well."""
    tensor: Any = trace(model).graph.initializers["layer.weight"].const_value
    assert tensor.raw.data_ptr() == model.layer.weight.data_ptr()
