"""Compiled functions and models answer as eager PyTorch does, forward and backward, whatever autograd does around them.

`SAME` holds what is compared and nothing else; the tests below it also look at graphs and reports.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend import backend as backend_module
from onnxtool.torch_backend.lower.torch_onnx import translate
from tests.torch_backend.oracle import require_same

NAN, INF = math.nan, math.inf
OF_TORCH = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch itself uses


def rows(*shape: int, grad: bool = False) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(math.prod(shape))) - 0.3).requires_grad_(grad)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def require_close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def gradients(model: nn.Module, call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    call(*inputs).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


class Running(nn.Module):
    """Keeps a mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        self.num_calls += 1
        return x - self.mean


class Counter(nn.Module):
    """Returns nothing, and has work to do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> None:
        self.total.add_(x)


class Shared(nn.Module):
    """A layer that is called twice, and two layers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.first(x)).relu())


class Clipped(torch.autograd.Function):
    """A gradient that is not that of the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > -0.1) * 2


def hooked_tensor(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 5)
    return y.sin()


def hooked_module() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    return model


def transformed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    per_row = torch.vmap(torch.func.grad(lambda row: row.sin().square().sum()))(x)
    _, tangent = torch.func.jvp(lambda v: v.sin() * v, (x,), (torch.ones_like(x),))
    return per_row, torch.func.jacrev(lambda v: v**3)(x[0]), tangent


def attend(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    query, key, value = (x @ weight).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
    return (query @ key.transpose(-1, -2)).softmax(-1).matmul(value).transpose(1, 2).flatten(2)


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)) + 1


def repeated_index(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    index, values = torch.arange(4096) % 3, torch.linspace(-1, 1, 4096 * 8).reshape(4096, 8)
    put = x.clone().index_put_((index,), values, accumulate=True)
    return put, x.index_add(0, index, values), x.scatter_add(0, index[:, None].expand(-1, 8), values)


def masked_rows(size: int) -> torch.Tensor:
    """Rows that are masked as a whole, and others: with one number left, with a NaN, with infinity."""
    x = rows(7, size)
    x[:4] = -INF
    x[1, size // 2], x[2, size // 2], x[3, -1] = 3, NAN, INF
    x[4, 0] = x[5, -1] = -INF
    return x


def half(model: nn.Module, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return functional.relu(model(x))

    return cast


def element(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    size = count.item()
    torch._check(size >= 0)
    torch._check(size <= x.shape[0])
    return torch.zeros(size) + 1, x[:size].sum(), size + 1


def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = x.nonzero()
    return found, x[x > 0.5] * 2, x.flatten()[found[:, 0]]


DATA_DEPENDENT = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
LABELS = torch.tensor([0, 1, 2, 1])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0])
BAGS = torch.tensor([[1, 2], [3, 1]])
ODD = torch.tensor([[1.0, NAN, 3.0, 2.0], [INF, 1.0, 2.0, -INF], [NAN, 5.0, NAN, 1.0], [4.0, 9.0, 9.0, NAN]])

LAYERS = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))

same = partial(partial, require_same)  # called by the test
# Plain operators, layers and losses are in test_inductor_patterns.py.
SAME: dict[str, Callable[[], OrtBackend]] = {
    "arithmetic with dynamic sizes": same(
        lambda x: x.reshape(-1, x.shape[1] // 2).sum(0) / (x.shape[0] * 2) + x.shape[1],
        rows(6, 4, grad=True),
        dynamic=True,
    ),
    # state
    "buffers that change": same(Running(), rows(5, 4)),
    "statistics of a batch": same(  # Without a bias: what is normalized next gives it no gradient but rounding.
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), rows(2, 3, 8, 8)
    ),
    "a buffer of a function that returns nothing": same(Counter(), rows(3)),
    "shared weights": same(Shared(), rows(3, 4, grad=True)),
    # results, inputs and layouts
    "views of one result, with gradients": same(
        lambda x: ((y := x.exp()), y.t(), y[0].detach(), y.view(-1)), rows(3, 4, grad=True)
    ),
    "places in memory": same(lambda x: (x.T + 0).as_strided((2, 2), (1, 3)), rows(3, 4)),
    "complex numbers": same(lambda x: torch.fft.rfft(x * 2).abs() + 1, rows(4, 8)),
    "heads of attention in dynamic sizes": same(attend, rows(3, 5, 8), rows(8, 24, grad=True), dynamic=True),
    "nested results": same(lambda x: (x + x, x * 3, [x - 1, {"y": x / 2}]), rows(3)),
    "inputs that are returned": same(lambda x, y: (x, x + y, y, y * 2), rows(3), rows(3)),
    "no inputs": same(lambda: torch.arange(6).reshape(2, 3) * 2),
    "an empty batch": same(mlp(), rows(0, 6)),
    **{
        f"inputs in the layout {number}": same(
            lambda x: (x * 2).sum(0) + x.mean(),
            layout(rows(4, 6)),  # type: ignore[no-untyped-call]
        )
        for number, layout in enumerate(
            (lambda x: x.T, lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6), lambda x: x.flip(0)[1:])
        )
    },
    "transposed results": same(lambda x: (x.exp().T, x.cos().permute(1, 0)), rows(4, 6, grad=True)),
    "channels last": same(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), rows(2, 3, 8, 8).to(memory_format=torch.channels_last)
    ),
    # precisions: tolerances are a few steps of each
    "autocast to bfloat16": same(half(nn.Linear(6, 3), torch.bfloat16), rows(5, 6, grad=True), atol=2e-2),
    "autocast to float16": same(half(nn.Linear(6, 3), torch.float16), rows(5, 6, grad=True), atol=2e-2),
    **{
        f"a model in {dtype}": same(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype), rows(5, 6).to(dtype), atol=atol
        )
        for dtype, atol in ((torch.float64, 1e-10), (torch.float16, 4e-3), (torch.bfloat16, 4e-2))
    },
    # what torch.onnx or onnxruntime computes wrongly
    "digits of small probabilities": same(
        lambda x: torch.erfc(x).log(), torch.tensor([0.5, 5.0, 8.0], requires_grad=True)
    ),
    "means of what is scattered": same(
        lambda x: torch.zeros(2, 3).scatter_reduce(0, torch.tensor([[0, 0, 1], [1, 1, 0]]), x, "mean"),
        rows(2, 3, grad=True),
    ),
    **{
        f"rows of {size} that are masked as a whole": same(
            lambda x, y: (torch.ops.aten._safe_softmax(x, -1), torch.ops.aten._safe_softmax(y, -1)),
            masked_rows(size),
            masked_rows(size)[[0, 1, 4, 5, 6]].requires_grad_(),
        )
        for size in (1, 5, 33)
    },
    "a transposed matrix times a vector": same(
        lambda a, v: (a.t().mv(v), v @ a), rows(5, 3, grad=True), rows(5, grad=True)
    ),
    "rows added by repeated indices": same(repeated_index, torch.zeros(3, 8), atol=1e-2),  # thousands
    **{
        f"the diagonal {offset} of {dims}": same(
            lambda x, offset=offset, dims=dims: x.diagonal(offset, *dims).exp(), rows(4, 3, 5, grad=True)
        )
        for offset, dims in ((0, (0, 1)), (1, (2, 0)), (-2, (-1, 1)))
    },
    "the largest of bags": same(nn.EmbeddingBag(5, 4, mode="max"), BAGS),
    "limits of clipped activations": same(
        lambda x: (functional.relu6(x), functional.hardtanh(x)),
        torch.tensor([-1.0, 0.0, 1.0, 3.0, 6.0, 7.0], requires_grad=True),
    ),
    "signs of zeros": same(
        lambda x, y: (torch.atan2(y, x), torch.signbit(x)),
        torch.tensor([-0.0, 0.0, 0.5, -0.0], requires_grad=True),
        torch.tensor([1.5, 1.5, -0.0, -0.0], requires_grad=True),
    ),
    # random numbers are those of the same seed, in the order of the program
    "masks of dropout": same(
        lambda x: (functional.dropout(x, 0.3), functional.dropout(x.T.contiguous().T, 0.5)), rows(6, 8, grad=True)
    ),
    "masks in place": same(lambda x: functional.dropout(x * 2, 0.3, inplace=True), rows(30, 20, grad=True)),
    **{
        f"numbers of {name}": same(
            lambda x, name=name, arguments=arguments: getattr(x * 2, name)(*arguments), rows(3, 4)
        )
        for name, arguments in (
            *(("uniform_", ()), ("normal_", ()), ("exponential_", ()), ("cauchy_", ()), ("log_normal_", ())),
            ("geometric_", (0.3,)),
        )
    },
    "draws that wait and draws that do not": same(
        lambda x: (torch.bernoulli(x.sigmoid()), torch.rand(4), torch.randn_like(x)), rows(3, 4)
    ),
    # autograd
    **{
        f"checkpointed layers, reentrant {reentrant}": same(
            lambda x, reentrant=reentrant: checkpoint(LAYERS, x * 2, use_reentrant=reentrant).sum(-1),
            rows(5, 6, grad=True),
        )
        for reentrant in (False, True)
    },
    "a hook of a tensor": same(hooked_tensor, rows(3, grad=True)),
    "a hook of a module": same(hooked_module(), rows(3, 4, grad=True)),
    "a gradient of one's own": same(lambda x: Clipped.apply(x * 2).exp(), rows(3, 4, grad=True)),
    "transforms of functions": same(transformed, rows(3, 4)),
    "a branch on data": same(branch, rows(3).abs()),
    "the other branch": same(branch, -rows(3).abs()),
    "a recurrent cell": same(nn.LSTMCell(4, 5), rows(2, 4, grad=True)),
    # losses
    "no label at all": same(
        lambda x: functional.cross_entropy(x, LABELS[[1, 3]], ignore_index=1), rows(2, 3, grad=True)
    ),
    "weights, smoothing, labels to ignore": same(
        lambda x: functional.cross_entropy(x, torch.tensor([1, -100, 2, 0]), WEIGHTS, label_smoothing=0.1),
        rows(4, 3, grad=True),
    ),
    "sequences": same(
        lambda x: functional.ctc_loss(
            x[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
        ),
        rows(4, 3, grad=True),
    ),
    **{
        f"embeddings with {name}": same(nn.Embedding(5, 4, **{name: value}), torch.tensor([[1, 2], [3, 1], [2, 2]]))
        for name, value in {"max_norm": 0.5, "scale_grad_by_freq": True}.items()
    },
}


@OF_TORCH
@pytest.mark.parametrize("name", SAME)
def test_results_and_gradients_are_those_of_eager_pytorch(name: str) -> None:
    """And what the function changes: buffers, the state of the generator."""
    SAME[name]()


EXTREMES: dict[str, Callable[[torch.Tensor], object]] = {
    "amax of rows": lambda x: x.amax(-1),
    "amin of columns, kept": lambda x: x.amin(0, keepdim=True),
    "amax of several dimensions": lambda x: x.amax((0, 1)),
    "max and min of all": lambda x: (x.max(), x.min()),
    "max and its place": lambda x: tuple(x.max(1)),
    "min and its place, kept": lambda x: tuple(x.min(0, keepdim=True)),
    "argmax of rows": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "argmax of columns, kept": lambda x: x.argmax(0, keepdim=True),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_a_nan_is_the_extreme_of_its_row(name: str) -> None:
    """Wherever in the row it is, beside infinities as well; nothing of it stays in PyTorch."""
    assert not require_same(EXTREMES[name], ODD).explain().graphs[0].eager


def test_whole_numbers_are_reduced_as_they_are() -> None:
    """They are never NaN, and no operator is spent on it."""
    (graph,) = require_same(lambda x: x.amax(-1), torch.tensor([[3, 7, 1]])).explain().graphs
    assert graph.partitions[0].num_nodes == 1


@pytest.mark.parametrize(
    ("function", "inputs"), [(places, (torch.eye(3, 4),)), (element, (torch.eye(5, 4), torch.tensor(3)))]
)
def test_sizes_that_only_the_data_decides(function: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> None:
    """One graph where TorchDynamo captures them; a number leaves it as a number."""
    with torch._dynamo.config.patch(DATA_DEPENDENT):
        require_same(function, *inputs, fullgraph=True)


def test_a_model_is_one_session_each_way() -> None:
    """Nothing of a plain perceptron stays in PyTorch."""
    reports = require_same(mlp(), rows(5, 6)).explain().graphs
    assert [(graph.kind, len(graph.partitions), graph.eager) for graph in reports] == [
        ("forward", 1, ()),
        ("backward", 1, ()),
    ]


def test_a_model_in_eval_mode_under_no_grad_is_one_graph() -> None:
    """No backward graph is made for inference."""
    with torch.no_grad():
        backend = require_same(mlp().eval(), rows(5, 6))
    assert [graph.kind for graph in backend.explain().graphs] == ["inference"]


def test_one_model_serves_all_sizes_of_a_dynamic_graph() -> None:
    """Sizes are inputs of the session, and a size that was never seen needs no compilation."""
    backend, model = OrtBackend(), mlp()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size in (4, 7, 13):
        x = rows(size, 6)
        require_close(compiled(x), model(x))
    assert [graph.report.kind for graph in backend.graphs] == ["forward", "backward"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by TorchDynamo itself
def test_a_graph_break_leaves_two_graphs() -> None:
    """What TorchDynamo cannot trace runs between two compiled graphs."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.exp()

    backend = require_same(broken, rows(3, grad=True))
    assert [graph.kind for graph in backend.explain().graphs].count("forward") == 2


def test_constants_that_are_returned_belong_to_the_caller() -> None:
    """Changing one in place does not change what the next call returns."""
    compiled = torch.compile(lambda x: (torch.ones(3), x + 1), backend=OrtBackend())
    compiled(torch.zeros(2))[0].add_(5)
    torch.testing.assert_close(compiled(torch.zeros(2))[0], torch.ones(3), atol=0, rtol=0)


def test_gradients_accumulate_over_calls_and_repeated_passes() -> None:
    """Two backward passes add up; `retain_graph` keeps what the forward pass saved."""
    model, (first, second) = nn.Linear(6, 3), (rows(5, 6), rows(5, 6))
    compiled = torch.compile(model, backend=OrtBackend())
    compiled(first).square().mean().backward()
    loss = compiled(second).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (model(first).square().mean() + 2 * model(second).square().mean()).backward()
    require_close(ours, [parameter.grad for parameter in model.parameters()])


def test_half_precision_is_normalized_by_parameters_in_float32() -> None:
    """PyTorch's kernel returns mean and deviation in float32, and its fake tensors say float16."""
    cast = half(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), torch.float16)
    backend = require_same(cast, rows(5, 6, grad=True), atol=1e-2)  # steps of float16 up to 8
    assert not any(session.failure for graph in backend.graphs for session in graph.sessions)
    assert "aten.native_layer_norm.default" not in {
        node.operator for graph in backend.explain().graphs for node in graph.eager
    }


def test_embeddings_lose_no_gradient_where_indices_repeat() -> None:
    """ScatterND of onnxruntime races: every one of 100 runs with two threads is right."""
    table = nn.Embedding(4, 64)
    compiled = torch.compile(lambda ids: table(ids).sum(1).square(), backend=OrtBackend())
    ids = torch.randint(0, 4, (16, 512))
    table(ids).sum(1).square().sum().backward()
    expected = table.weight.grad
    for _ in range(100):
        table.weight.grad = None
        compiled(ids).sum().backward()
        torch.testing.assert_close(table.weight.grad, expected, rtol=1e-4, atol=1e-2)  # sums of thousands


@pytest.mark.parametrize(
    "place",
    [
        lambda i: (i,),
        lambda i: (slice(None), i),
        lambda i: (i, slice(None), -i - 1),
        lambda i: (slice(1), i[:, None], i),
    ],
)
def test_gradients_of_indexing_are_scattered(place: Callable[[torch.Tensor], object]) -> None:
    """Leading, inner, separated and negative indices, in onnxruntime and without a race."""
    index = torch.tensor([0, 2, 2, 1, 2])
    backend = require_same(lambda x: x[place(index)].exp(), rows(4, 3, 3, grad=True))
    assert all(not graph.eager for graph in backend.explain().graphs)


def test_gradients_of_gradients_are_refused() -> None:
    """As by every backend on AOTAutograd: an error, and no wrong number."""
    x = rows(3, grad=True)
    (gradient,) = torch.autograd.grad(
        torch.compile(lambda x: x.sin().sum(), backend=OrtBackend())(x), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_parameters_are_frozen_and_thawed_between_calls() -> None:
    """Each set of parameters with gradients has graphs of its own; so have no_grad and inference mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    compiled, x = torch.compile(model, backend=OrtBackend()), torch.rand(3, 4)
    with torch.no_grad():
        require_close(compiled(x), model(x))
    with torch.inference_mode():
        made = torch.rand(3, 4)
        require_close([compiled(x), compiled(made)], [model(x), model(made)])
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        require_close(gradients(model, compiled, x), gradients(model, model, x))


def test_training_and_evaluation_take_turns() -> None:
    """Running statistics and dropout follow the mode of the call."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.4))
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend=OrtBackend())
    for call in range(4):
        x, results = torch.rand(2, 2, 6, 6), []
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

    backend = require_same(lambda x: shifted(x * 2).exp(), rows(3, 4, grad=True))
    assert [len(graph.partitions) for graph in backend.explain().graphs] == [2, 1]
    require_same(in_place, torch.rand(3, 4))


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


def test_sparse_gradients_of_embeddings_stay_sparse() -> None:
    """They are made by PyTorch."""
    table = nn.Embedding(5, 4, sparse=True)
    compiled = torch.compile(lambda ids: table(ids), backend=OrtBackend())
    ours, theirs = (gradients(table, call, BAGS)[0] for call in (compiled, table))
    assert ours is not None
    assert theirs is not None
    assert ours.is_sparse
    require_close(ours.to_dense(), theirs.to_dense())


def test_a_translation_that_gives_another_type_is_not_used() -> None:
    """The exporter's shift of unsigned integers gives signed ones; their bytes are not taken for what they are not."""
    backend = require_same(lambda x: x << 1, torch.tensor([1, 200], dtype=torch.uint8))
    assert [node.reason for node in backend.explain().graphs[0].eager] == ["its translation gives tensor(int8)"]


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

    backend, x = OrtBackend(OrtBackendOptions(converter=doubled)), torch.rand(3)
    require_close(torch.compile(torch.cos, backend=backend)(x), x.cos())
    assert "its translation gives tensor(double)" in str(backend.explain())


def test_at_info_a_log_has_no_lines_of_other_libraries(caplog: pytest.LogCaptureFixture) -> None:
    """A layer was a thousand of them, of the exporter and of the passes behind it."""
    with caplog.at_level(logging.INFO):
        function = torch.compile(torch.nn.Linear(4, 4), backend="onnxtool")
        function(torch.rand(2, 4)).sum().backward()
    told = {record.name.partition(".")[0] for record in caplog.records if record.levelno >= logging.INFO}
    assert told <= {"onnxtool"}


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.rand(70, 50).t(),
    "channels_last": lambda: torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.rand(40, 1).expand(40, 50),
    "permuted": lambda: torch.rand(4, 5, 6).movedim(0, -1),
    "with gaps": lambda: torch.rand(40, 50, 2)[..., 0],
    "transposed and small": lambda: torch.rand(3, 2).t(),
    "transposed and large": lambda: torch.rand(512, 256).t(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_numbers_are_drawn_as_in_pytorch_in_every_layout(name: str) -> None:
    """The numbers, the layout and the generator's state afterward: strides decide by which algorithm PyTorch draws."""

    def noisy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = (torch.randn_like(x), torch.rand_like(x), torch.empty_like(x).bernoulli_(0.3), torch.bernoulli(x, 0.3))
        return *drawn, torch.nn.functional.dropout(x.exp(), 0.2)

    found = []
    for function in (noisy, torch.compile(noisy, backend=OrtBackend())):
        torch.manual_seed(0)
        x = LAYOUTS[name]()
        function(x)  # compiles
        torch.manual_seed(1)
        found.append((*function(x), torch.get_rng_state()))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_a_first_power_is_a_new_tensor() -> None:
    """Of an input, and of another result."""
    x = torch.arange(4.0)
    first, middle, second = torch.compile(lambda x: (x**1, y := x + 1, y**1), backend=OrtBackend())(x)
    for result in (first, second):
        result.zero_()
    assert torch.equal(x, torch.arange(4.0))
    assert torch.equal(middle, x + 1)


def test_a_long_compilation_is_said_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the size of the graph and how often its code was compiled; nothing but figures is said of a quick one."""
    caplog.set_level(logging.INFO, "onnxtool.torch_backend")
    compiled = torch.compile(lambda x: x * 2, backend=OrtBackend())
    for size, longest in ((3, 1000), (4, 0), (5, 0)):
        monkeypatch.setattr(backend_module, "_LONG_S", longest)
        compiled(torch.rand(size))
    said = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert said[0].endswith("s: inference: 1 of 1 operators in 1 session of onnxruntime")
    assert "number 2 for this code; TORCH_LOGS=recompiles says what has changed" in said[1]
