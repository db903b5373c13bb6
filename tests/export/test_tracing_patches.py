"""What a TorchScript trace does not follow is called in a way that it does, and torch is itself again afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

from onnxtool.export.torchscript import trace_torchscript
from onnxtool.export.tracing_patches import traceable_calls
from onnxtool.runtime.quiet import quiet

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


class Doubled(torch.autograd.Function):
    """Twice a value, through a module that is handed over as no tensor, as Reformer hands over its layers."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        """Keep what `backward` would want."""
        ctx.save_for_backward(value)
        ctx.layer = layer
        output: torch.Tensor = 2 * layer(value)
        return output


class Shifted(torch.autograd.Function):
    """A value and three, in the style that takes no context."""

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        """Add three."""
        return value + 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""


class WithFunctions(torch.nn.Module):
    """Both of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 2 * layer(x + 3)."""
        output: torch.Tensor = Doubled.apply(Shifted.apply(x), self.layer)
        return output


class Drawing(torch.nn.Module):
    """A product with a random matrix."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ R, where R [width of x, 4] is drawn in this very run."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return x @ torch.randn(x.shape[-1], 4)


def trace(model: torch.nn.Module) -> ir.Model:
    with quiet():
        return trace_torchscript(model.eval(), {"x": X}, {"x": ("batch_size", 3)}, {"output": ("batch_size", 4)}, None)


def run(graph: ir.Model, x: torch.Tensor) -> Any:
    return ReferenceEvaluator(ir.to_proto(graph)).run(None, {"x": x.numpy()})[0]


def test_an_autograd_function_is_traced_through() -> None:
    """It may hold a whole model, of which torch's own exporter finds nothing."""
    model = WithFunctions()
    graph, longer = trace(model), torch.cat([X, X + 1])
    # float32, one layer of three
    np.testing.assert_allclose(run(graph, longer), model(longer).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_what_is_drawn_under_a_seed_is_a_constant() -> None:
    """The model draws the same in every run, and so must the file."""
    model = Drawing(seed=7)
    graph = trace(model)
    assert not [node for node in graph.graph if node.op_type.startswith("Random")]
    np.testing.assert_allclose(run(graph, X), model(X).numpy(), rtol=1e-5, atol=1e-5)


def test_what_is_drawn_without_a_seed_stays_a_draw() -> None:
    """A constant would answer the same each time, as the model does not."""
    assert [node.op_type for node in trace(Drawing(seed=None)).graph if node.op_type.startswith("Random")]


def test_torch_is_itself_afterwards() -> None:
    """Its functions, and the state of its generator."""
    torch.manual_seed(3)
    wanted = torch.randn(2)
    torch.manual_seed(3)
    before = vars(torch.autograd.Function)["apply"], torch.randn, torch.Tensor.as_strided
    with traceable_calls():
        torch.manual_seed(11)
        torch.randn(5)
    assert (vars(torch.autograd.Function)["apply"], torch.randn, torch.Tensor.as_strided) == before
    assert torch.equal(torch.randn(2), wanted)
    value = torch.ones(2, 3, requires_grad=True)
    assert Shifted.apply(value).grad_fn is not None
