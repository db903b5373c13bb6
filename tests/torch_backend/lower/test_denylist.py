"""What torch.onnx or onnxruntime is known to compute wrongly is as in eager PyTorch."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.lower.torch_onnx import translate
from tests.torch_backend.oracle import require_same


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_bags_of_embeddings(mode: str) -> None:
    """The backward pass needs the sizes of the bags and the places of the maxima."""
    require_same(nn.EmbeddingBag(5, 4, mode=mode), torch.tensor([[1, 2], [3, 1]]))


def test_no_gradient_passes_the_limits_of_a_clipped_activation() -> None:
    """Neither at the limits themselves, and zeros are frequent."""
    x = torch.tensor([-1.0, 0.0, 1.0, 3.0, 6.0, 7.0], requires_grad=True)
    require_same(lambda x: (functional.relu6(x), functional.hardtanh(x)), x)


def test_negative_zeros_have_a_sign() -> None:
    """The angle is a quarter circle to the same side for either zero."""
    x, y = torch.tensor([-0.0, 0.0, 0.5, -0.0]), torch.tensor([1.5, 1.5, -0.0, -0.0])
    require_same(lambda x, y: (torch.atan2(y, x), torch.signbit(x)), x.requires_grad_(), y.requires_grad_())


def test_a_translation_that_gives_another_type_is_not_used() -> None:
    """The exporter's shift of unsigned integers gives signed ones; their bytes are not taken for what they are not."""
    backend = require_same(lambda x: x << 1, torch.tensor([1, 200], dtype=torch.uint8))
    reasons = [node.reason for node in backend.explain().graphs[0].eager]
    assert reasons == ["its translation gives tensor(int8)"]


def test_a_converter_that_gives_another_type_is_not_believed() -> None:
    """Double precision for single would be read as other numbers."""

    def doubled(graph_module: torch.fx.GraphModule) -> onnx.ModelProto:
        model = translate(graph_module)
        (output,) = model.graph.outputs
        cast = ir.Node("", "Cast", [output], [ir.AttrInt64("to", ir.DataType.DOUBLE)])
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = "wide", ir.DataType.DOUBLE, output.shape
        model.graph.append(cast)
        model.graph.outputs[0] = cast.outputs[0]
        return ir.to_proto(model)

    backend = OrtBackend(OrtBackendOptions(converter=doubled))
    x = torch.rand(3)
    torch.testing.assert_close(torch.compile(torch.cos, backend=backend)(x), x.cos(), atol=1e-6, rtol=1e-6)
    assert "its translation gives tensor(double)" in str(backend.explain())
