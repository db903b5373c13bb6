"""All that autograd does around a compiled function: modes, hooks, own gradients, repeated passes, shared weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from onnxtool.torch_backend import OrtBackend
from tests.torch_backend.oracle import require_same

OF_TORCH = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch itself uses


def rows(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape) - 0.3).requires_grad_()


def gradients(model: nn.Module, call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    call(*inputs).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def require_close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_draw_their_masks_again(use_reentrant: bool) -> None:
    """Either kind recomputes the forward pass with the state that the generator had."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))
    require_same(lambda x: checkpoint(layers, x * 2, use_reentrant=use_reentrant).sum(-1), rows(5, 6))


def test_a_graph_is_run_backwards_twice() -> None:
    """`retain_graph` keeps what the forward pass saved."""
    model = nn.Linear(3, 3)
    loss = torch.compile(model, backend=OrtBackend())(rows(2, 3)).tanh().sum()
    loss.backward(retain_graph=True)
    once = model.weight.grad.clone()
    loss.backward()
    require_close(model.weight.grad, once * 2)


def test_gradients_of_gradients_are_refused() -> None:
    """As by every backend on AOTAutograd: an error, and no wrong number."""
    x = rows(3)
    (gradient,) = torch.autograd.grad(
        torch.compile(lambda x: x.sin().sum(), backend=OrtBackend())(x), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_parameters_are_frozen_and_thawed_between_calls() -> None:
    """Each set of parameters with gradients has graphs of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled, x = torch.compile(model, backend=OrtBackend()), torch.rand(3, 4)
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        require_close(gradients(model, compiled, x), gradients(model, model, x))


def test_one_model_serves_training_no_grad_and_inference_mode() -> None:
    """In any order, and with tensors that were made under inference mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled, x = torch.compile(model, backend=OrtBackend()), torch.rand(3, 4)
    with torch.no_grad():
        require_close(compiled(x), model(x))
    with torch.inference_mode():
        require_close(compiled(x), model(x))
        made = torch.rand(3, 4)
        require_close(compiled(made), model(made))
    require_close(gradients(model, compiled, x), gradients(model, model, x))


def test_training_and_evaluation_take_turns() -> None:
    """Running statistics and dropout follow the mode of the call."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.4))
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend=OrtBackend())
    for call in range(4):
        x = torch.rand(2, 2, 6, 6)
        results = []
        for module, function in ((model, compiled), (eager, eager)):
            module.train(call % 2 == 0)
            torch.manual_seed(call)
            results.append([function(x), *module.buffers()])
        require_close(*results)


def test_autocast_is_switched_between_calls() -> None:
    """The precision is that of the call."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    compiled, x = torch.compile(model, backend=OrtBackend()), torch.rand(5, 6)
    for enabled in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            ours, theirs = compiled(x), model(x)
        assert ours.dtype is (torch.bfloat16 if enabled else torch.float32)
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)  # two roundings to 8 bits


def test_hooks_of_tensors_and_modules_are_called() -> None:
    """They are part of what is compiled."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * 5)
        return y.sin()

    require_same(function, rows(3))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    require_same(model, rows(3, 4))


class _Clipped(torch.autograd.Function):
    """A gradient that is not that of the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > -0.1) * 2


@OF_TORCH
def test_gradients_of_ones_own() -> None:
    """Those of `torch.autograd.Function` are taken."""
    require_same(lambda x: _Clipped.apply(x * 2).exp(), rows(3, 4))


def test_operators_of_ones_own_stay_in_pytorch() -> None:
    """Also one that changes its argument; what is around them is compiled."""

    @torch.library.custom_op("onnxtool_tests::shifted", mutates_args=())  # type: ignore[untyped-decorator]
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    @torch.library.custom_op("onnxtool_tests::shift", mutates_args=("x",))  # type: ignore[untyped-decorator]
    def shift(x: torch.Tensor) -> None:
        x.add_(1)

    shifted.register_fake(torch.empty_like)
    shifted.register_autograd(lambda _ctx, gradient: gradient * 2)

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        shift(y)
        return y.exp()

    backend = require_same(lambda x: shifted(x * 2).exp(), rows(3, 4))
    assert [len(graph.partitions) for graph in backend.explain().graphs] == [2, 1]
    require_same(in_place, torch.rand(3, 4))


@OF_TORCH
def test_transforms_of_functions_inside() -> None:
    """`vmap`, `grad`, `jacrev` and `jvp` are traced through."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        per_row = torch.vmap(torch.func.grad(lambda row: row.sin().square().sum()))(x)
        _, tangent = torch.func.jvp(lambda v: v.sin() * v, (x,), (torch.ones_like(x),))
        return per_row, torch.func.jacrev(lambda v: v**3)(x[0]), tangent

    require_same(function, torch.rand(3, 4))


def test_branches_and_loops_on_data_stay_in_pytorch() -> None:
    """`torch.cond` is one operator with two graphs inside."""

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)) + 1

    require_same(branch, torch.rand(3))
    require_same(branch, -torch.rand(3))


def test_weights_that_are_shared_get_both_gradients() -> None:
    """A layer that is called twice, and two layers with one matrix."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.first(x)).relu())

    require_same(Shared(), rows(3, 4))


@OF_TORCH
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_step_of_an_optimizer_is_compiled(optimizer: type[torch.optim.Optimizer]) -> None:
    """Parameters and the optimizer's state are changed in place."""
    model = nn.Linear(4, 2)
    eager = copy.deepcopy(model)
    ours, theirs = optimizer(model.parameters(), lr=0.1), optimizer(eager.parameters(), lr=0.1)
    step = torch.compile(lambda: ours.step(), backend=OrtBackend())
    for _ in range(2):
        x = torch.rand(3, 4)
        for module, update in ((model, step), (eager, theirs.step)):
            gradients(module, module, x)
            update()
    require_close(list(model.parameters()), list(eager.parameters()))


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "labels to ignore": lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2, 1]), ignore_index=1),
    "weights and smoothing": lambda x: functional.cross_entropy(
        x, torch.tensor([0, 1, 2, 1]), torch.tensor([0.5, 1.0, 2.0]), label_smoothing=0.2
    ),
    "probabilities": lambda x: functional.cross_entropy(x, x.detach().flip(0).softmax(-1)),
    "sequences": lambda x: functional.ctc_loss(
        x[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "distances": lambda x: functional.huber_loss(x, x.detach().flip(0)) + functional.kl_div(x, x.detach().softmax(-1)),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")  # by kl_div, of itself
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradients_of_losses(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Those that models are trained with."""
    require_same(loss, rows(4, 3))


def test_a_loss_without_any_label_is_not_a_number() -> None:
    """As eager PyTorch says, and not zero."""
    require_same(lambda x: functional.cross_entropy(x, torch.tensor([1, 1]), ignore_index=1), rows(2, 3))


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "padding": {"padding_idx": 1},
    "a largest norm": {"max_norm": 0.5},
    "frequencies": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("options", EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
def test_options_of_embeddings(options: dict[str, Any]) -> None:
    """Some change the gradient, and one the table."""
    require_same(nn.Embedding(5, 4, **options), torch.tensor([[1, 2], [3, 1], [2, 2]]))


def test_sparse_gradients_of_embeddings_stay_sparse() -> None:
    """They are made by PyTorch."""
    table, ids = nn.Embedding(5, 4, sparse=True), torch.tensor([[1, 2], [3, 1]])
    compiled = torch.compile(lambda ids: table(ids), backend=OrtBackend())
    ours, theirs = (gradients(table, call, ids)[0] for call in (compiled, table))
    assert ours is not None
    assert theirs is not None
    assert ours.is_sparse
    require_close(ours.to_dense(), theirs.to_dense())


def test_a_recurrent_cell() -> None:
    """Step by step; whole recurrent layers are what TorchDynamo leaves to eager PyTorch by itself."""
    require_same(nn.LSTMCell(4, 5), rows(2, 4))
