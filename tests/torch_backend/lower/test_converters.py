"""Two translations of the same graphs, held against each other."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.lower.torch_onnx import translate
from tests.torch_backend.oracle import require_same


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3))


@pytest.mark.filterwarnings("ignore")  # the exporter's remarks about itself
@pytest.mark.parametrize(("converter", "dynamic"), [("fx", False), ("fx", True), ("export", True)])
def test_both_converters_give_eagers_results_and_gradients(converter: str, dynamic: bool) -> None:
    """Nothing stays in PyTorch with either, and both are right."""
    backend = require_same(model(), torch.rand(5, 6), options=OrtBackendOptions(converter=converter), dynamic=dynamic)
    assert all(graph.partitions and not _operators(graph.eager) for graph in backend.explain().graphs)


@pytest.mark.filterwarnings("ignore")
def test_both_converters_agree_on_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch of the environment takes the other converter, and gradients differ by rounding only."""
    net, x, gradients = model(), torch.rand(5, 6), []
    for switch in ("0", "1"):
        monkeypatch.setenv("ONNXRT_CHANGE_REWRITER", switch)
        net.zero_grad()
        torch._dynamo.reset()
        torch.compile(net, backend=OrtBackend())(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


def test_a_function_of_the_user_translates() -> None:
    """It gets each graph, and its model is what runs."""
    seen = []

    def record(graph_module: torch.fx.GraphModule) -> onnx.ModelProto:
        import onnx_ir

        seen.append(graph_module)
        return onnx_ir.to_proto(translate(graph_module))

    require_same(model(), torch.rand(5, 6), options=OrtBackendOptions(converter=record))
    assert len(seen) == 2


def _operators(nodes: object) -> list[str]:
    from onnxtool.torch_backend.lower.placement import SIZE

    return [node.operator for node in nodes if node.reason != SIZE]  # type: ignore[attr-defined]
