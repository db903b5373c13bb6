"""Changes of a model before its session is made: the user's functions, and the passes of `onnxtool optimize`."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from onnxtool.optimize import presets
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, explain
from tests.torch_backend.oracle import require_same

PASSES = sorted({step.name for steps in presets.PRESETS.values() for step in steps})


class Block(nn.Module):
    """A bit of everything that the passes look for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.rms(x + self.down(nn.functional.gelu(self.up(x))))


@pytest.mark.parametrize("training", [True, False])
def test_all_passes_keep_results_and_gradients(training: bool) -> None:
    """One after the other, on the graphs of training and of inference, whose weights are inputs."""
    options = OrtBackendOptions(pre_ort_model_transforms=PASSES)
    with torch.set_grad_enabled(training):
        backend = require_same(Block().train(training), torch.rand(2, 5, 8), options=options)
    assert all(not session.failure for graph in backend.graphs for session in graph.sessions)


def test_a_report_counts_the_nodes_after_the_transforms() -> None:
    """Two Identity nodes more are two nodes more, and metadata may be cleared."""

    def lengthen(model: onnx.ModelProto) -> None:
        output = model.graph.output[0].name
        model.graph.node[-1].output[0] = "a"
        model.graph.node.extend(
            [onnx.helper.make_node("Identity", ["a"], ["b"]), onnx.helper.make_node("Identity", ["b"], [output])]
        )
        model.ClearField("metadata_props")

    x = torch.rand(3)
    counts = [
        explain(torch.cos, x, options=OrtBackendOptions(pre_ort_model_transforms=transforms)).graphs[0].partitions[0]
        for transforms in ([], [lengthen])
    ]
    assert counts[1].num_onnx_nodes == counts[0].num_onnx_nodes + 2


def test_a_transform_may_remove_an_input() -> None:
    """The session takes the others, each in its place."""

    def without_the_second(model: onnx.ModelProto) -> None:
        model.graph.node[0].input[1] = model.graph.node[0].input[0]
        del model.graph.input[1]

    backend = OrtBackend(OrtBackendOptions(pre_ort_model_transforms=[without_the_second]))
    x, y, z = torch.rand(3), torch.rand(3), torch.rand(3)
    compiled = torch.compile(lambda x, y, z: (x + y) * z, backend=backend)
    torch.testing.assert_close(compiled(x, y, z), (x + x) * z, atol=1e-6, rtol=1e-6)
