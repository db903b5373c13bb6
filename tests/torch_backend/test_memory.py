"""Results share memory where eager PyTorch's do, and nowhere else: a write to one is seen in the same others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend

Function = Callable[[torch.Tensor], torch.Tensor]

# Of x: [3, 4].
IDENTITIES: dict[str, Function] = {
    "x ** 1": lambda x: x**1,
    "x + 0": lambda x: x + 0,
    "0 + x": lambda x: 0 + x,
    "x - 0": lambda x: x - 0,
    "x * 1": lambda x: x * 1,
    "x / 1": lambda x: x / 1,
    "neg": lambda x: x.neg().neg(),
    "positive": lambda x: +x,
    "same type": lambda x: x.to(x.dtype),
    "copy": lambda x: x.to(x.dtype, copy=True),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "dropout in evaluation": lambda x: functional.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x: functional.dropout(x, 0.0),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, train=False)[0],
    "Identity": torch.nn.Identity(),
    "detach": lambda x: x.detach(),
    "slice": lambda x: x[:],
    "narrow": lambda x: x.narrow(0, 0, 3),
    "reshape": lambda x: x.reshape(3, 4),
    "expand": lambda x: x.expand(3, -1),
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[1],
    "permute": lambda x: x.permute(0, 1),
    "twice transposed": lambda x: x.mT.mT,
    "flatten": lambda x: x.flatten(),
    "chunk": lambda x: x.chunk(1)[0],
    "half": lambda x: x.chunk(2, -1)[1],
    "repeat": lambda x: x.repeat(1, 1),
    "concatenate": lambda x: torch.cat([x]),
    "concatenate nothing": lambda x: torch.cat([x, x[:0]]),
    "pad": lambda x: functional.pad(x, (0, 0)),
    "roll": lambda x: x.roll(0, 0),
    "clamp": lambda x: x.clamp(min=-1e9),
    "where": lambda x: torch.where(x == x, x, 0.0),
    "masked": lambda x: x.masked_fill(x != x, 0.0),
    "lower triangle": lambda x: x.tril(9),
    "maximum": lambda x: torch.maximum(x, x),
    "repeat each": lambda x: x.repeat_interleave(1),
    "write of nothing": lambda x: x.index_fill(0, torch.zeros(0, dtype=torch.int64), 1.0),
    "constant": lambda x: torch.tensor([1.0, 2.0]),
}  # fmt: skip


class Layer(torch.nn.Module):
    """Applies all of `IDENTITIES` to its input, its parameter and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the product and all results."""
        product = x * self.weight
        return [product, *(function(y) for y in (x, self.weight, product) for function in IDENTITIES.values())]


@pytest.mark.parametrize("gradients", [True, False])
def test_results_share_memory_as_eager_ones(gradients: bool) -> None:
    """Of an input, a parameter and an intermediate result; a second call gives the same after writes to the first."""
    layer, x = Layer(), torch.rand(3, 4)
    compiled = torch.compile(layer, backend=OrtBackend())
    with torch.set_grad_enabled(gradients):
        ours, theirs = compiled(x), layer(x)
    names = [
        "x",
        "weight",
        "product",
        *(f"{name} of {y}" for y in ("x", "weight", "product") for name in IDENTITIES),
    ]
    ours, theirs = (
        [tensor.untyped_storage().data_ptr() for tensor in (x, layer.weight, *results)] for results in (ours, theirs)
    )
    first = [[names[pointers.index(pointer)] for pointer in pointers] for pointers in (ours, theirs)]
    assert dict(zip(names, first[0], strict=True)) == dict(zip(names, first[1], strict=True))


def test_writes_to_results_change_no_later_call() -> None:
    """Constants of a graph are not handed out, and neither is memory of a session."""

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tensor([1.0, 2.0]), torch.zeros(2), torch.arange(3.0), x**1, x * 2, torch.full_like(x, 3)]

    compiled, x = torch.compile(results, backend=OrtBackend()), torch.rand(3)
    for _ in range(2):
        made = compiled(x)
        torch.testing.assert_close(made, results(x))
        for result in made:
            result.add_(7)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.rand(3, 4),
    "transposed": lambda: torch.rand(4, 3).mT,
    "expanded rows": lambda: torch.rand(4).expand(3, 4),
    "expanded columns": lambda: torch.rand(3, 1).expand(3, 4),
    "part": lambda: torch.rand(4, 6)[1:, 1:5],
}
VIEWS: tuple[Function, ...] = (
    lambda x: x.view(x.shape),
    lambda x: x[..., :2],
    lambda x: x[..., ::2],
    lambda x: x[:, 0],
    lambda x: x.mT,
    lambda x: x.unsqueeze(-1).expand(*x.shape, 3),
    lambda x: x.unsqueeze(1).expand(x.shape[0], 3, x.shape[1]),
    lambda x: x.diagonal(),
    lambda x: x.unfold(0, 2, 1),
    lambda x: x.chunk(2, -1)[1],
    lambda x: x.split(1)[2],
)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_an_input_is_one(dynamic: bool) -> None:
    """In any layout: AOTAutograd reads an input's memory with the strides that a graph with dynamic sizes returns."""
    x = {name: make().requires_grad_(name == "part") for name, make in LAYOUTS.items()}

    def views(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [torch.stack([y.sum() for y in x.values()]).sum(), *(view(y) for y in x.values() for view in VIEWS)]

    ours, theirs = torch.compile(views, backend=OrtBackend(), dynamic=dynamic)(x), views(x)
    torch.testing.assert_close(ours, theirs)
    for our, their in zip(ours[1:], theirs[1:], strict=True):
        assert our.untyped_storage().data_ptr() == their.untyped_storage().data_ptr()
        assert (our.stride(), our.storage_offset()) == (their.stride(), their.storage_offset())
