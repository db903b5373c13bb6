"""A maximum is taken before the activations that keep the order of numbers, and before no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.lower.maximum_first import take_maximum_first

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SOONER: dict[str, Function] = {
    "vectors of SPLADE": lambda x, mask: (x * mask).relu_().log1p().max(dim=1)[0],
    "vectors of SPLADE, twice": lambda x, mask: torch.max((x * mask).relu_().log1p().log1p(), dim=1)[0],
    "the largest of each column": lambda x, mask: torch.log1p(functional.relu(x * mask)).max(1).values,
    "relu alone": lambda x, mask: torch.max(torch.relu(x - mask), dim=1, keepdim=True)[0],
    "the mask afterwards": lambda x, mask: (x.relu().log1p() * mask).relu().max(1)[0],
}
AS_WRITTEN: dict[str, Function] = {
    "log1p alone": lambda x, _mask: (0.5 + x.square()).log1p().max(1)[0],
    "a function that falls": lambda x, _mask: x.relu().neg().max(1)[0],
    "gradients for all that are as large": lambda x, _mask: x.relu().amax(1),
    "the place of the maximum": lambda x, mask: torch.stack([part.to(x) for part in (x * mask).relu().max(1)]),
    "activations that are read elsewhere": lambda x, _mask: (y := x.relu()).max(1)[0] + y.sum(1),
    "in place on memory of another": lambda x, _mask: (y := x + 1, y[:, :3].relu_().max(1)[0] + y.sum(1))[1],
    "a maximum of two": lambda x, mask: torch.max(x.relu(), mask),
    "the maximum of all": lambda x, _mask: torch.max(x.relu()) + x.sum(1),
}


def require_equal(function: Function, x: torch.Tensor, mask: torch.Tensor) -> None:
    """Insist on the values and gradients of eager PyTorch, to the last bit where no sum is in between."""
    results = []
    for run in (function, torch.compile(function, backend=OrtBackend())):
        argument = x.clone().requires_grad_()
        result = run(argument, mask)
        result.sin().sum().backward()
        results.append((result.detach(), argument.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7, equal_nan=True)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=draw)
    x[1] = -x[1].abs()  # no positive score
    return x, (torch.arange(5) < torch.tensor([5, 2, 1])[:, None]).float()[..., None]


def moved(function: Function) -> list[str]:
    """Return the calls of the function as TorchDynamo captures them, after the rewrite; none if it does nothing."""
    calls: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        if take_maximum_first(module.graph):
            module.recompile()
            calls.extend(node.name for node in module.graph.nodes if node.op.startswith("call"))
        forward: Callable[..., object] = module.forward
        return forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*operands())
    return calls


@pytest.mark.parametrize("name", SOONER)
def test_activations_have_as_many_elements_as_there_are_maxima(name: str) -> None:
    """Values and gradients are those of eager PyTorch."""
    calls = moved(SOONER[name])
    last_maximum = max(place for place, call in enumerate(calls) if "max" in call)
    assert any("relu" in call for call in calls[last_maximum:])
    require_equal(SOONER[name], *operands())


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_everything_else_stays_as_it_is_written(name: str) -> None:
    """Where log1p may be undefined, positions are read, or other readers see the memory."""
    assert moved(AS_WRITTEN[name]) == []
    require_equal(AS_WRITTEN[name], *operands())


def test_infinite_and_undefined_scores_stay_what_they_are() -> None:
    """NaN is the largest of all numbers, and relu of minus infinity is zero."""
    x, mask = operands()
    x[0, 1, 0], x[0, 2, 1], x[2, :, 2] = torch.nan, torch.inf, -torch.inf
    require_equal(SOONER["the largest of each column"], x, torch.ones_like(mask))


def test_activations_of_another_precision_stay_in_it() -> None:
    """A region of autocast between them decides what they compute in."""

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            activated = (x @ x.transpose(1, 2) * mask).relu()
        return activated.max(1)[0]

    assert moved(function) == []
