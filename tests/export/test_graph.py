"""A traced graph has the model's answers in onnxruntime as well, which changes those of one pattern."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onnxtool.export.graph import tidy
from onnxtool.export.signature import Signature
from onnxtool.export.torchscript import trace_torchscript
from onnxtool.model_file.weights import write_inline
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.session import open_session

SHAPES = {"x": ("batch_size", 1, "height", "width")}


@pytest.mark.parametrize("padding", [0, 1], ids=["", "pool pads as well"])
def test_zeros_around_a_picture_count_in_a_maximum(padding: int, tmp_path: Path) -> None:
    """Of negative values, zero is the largest; a pool that pads by itself leaves it out (BiT has the pattern)."""
    model = nn.Sequential(nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, stride=2, padding=padding)).eval()
    sample = -1 - torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    outputs = {"output": ("batch_size", 1, "output_height", "output_width")}
    with quiet():
        graph = trace_torchscript(_Named(model), {"x": sample}, SHAPES, outputs, None)
    tidy(graph, Signature(SHAPES, outputs, (), {}, {}))
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
