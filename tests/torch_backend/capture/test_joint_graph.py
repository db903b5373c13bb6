"""A joint graph loses the calls that PyTorch's own pass merges, without the time that this takes to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtool.torch_backend.capture.joint_graph import merge_duplicates

aten = torch.ops.aten
_COMPILE = """
import sys
import torch
from onnxtool.torch_backend import OrtBackend
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
torch.compile(model, backend=OrtBackend())(torch.rand(2, 3)).sum().backward()
sys.exit("torch._inductor.lowering" in sys.modules)
"""


def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Repeat products, views, a result of several, numbers that look alike, random numbers and results."""
    twice = aten.mul.Tensor(aten.sin.default(x), 2) + aten.mul.Tensor(aten.sin.default(x), 2)
    numbers = aten.add.Tensor(x, 0.0) + aten.add.Tensor(x, 1) + aten.add.Tensor(x, 1.0)
    views = aten.view.default(x, [-1]).sum() + aten.view.default(x, [-1]).sum()
    largest = aten.max.dim(x, 0)[0] + aten.max.dim(x, 0)[0]
    noise = aten.rand.default([3]) + aten.rand.default([3])
    return twice, numbers, views, largest, noise, aten.cos.default(x), aten.cos.default(x)


def test_the_calls_that_stay_are_those_of_pytorchs_pass() -> None:
    """Calls of many kinds, and a block that is computed twice, with its gradients."""
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (block(x) * block(x)).mean()
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(loss, [*block.parameters()])
        return found

    for function, shape in ((step, (3, 4)), (gradients, (2, 5, 8))):
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.rand(shape)).graph
        expected, before = fx_graph_cse(graph), len(graph.nodes)
        merge_duplicates(graph)
        assert [node.target for node in graph.nodes if node.op == "call_function"] == [
            node.target for node in expected.nodes if node.op == "call_function"
        ]
        assert len(graph.nodes) < before
        graph.lint()


@pytest.mark.parametrize(
    ("target", "arguments"),
    [(aten.empty.memory_format, ([3],)), (aten.bernoulli.p, (0.5,)), (aten.nonzero.default, ())],
    ids=["memory as it is", "random numbers", "sizes that depend on data"],
)
def test_a_call_that_may_give_something_else_stays(target: object, arguments: tuple[object, ...]) -> None:
    graph = torch.fx.Graph()
    given = () if target is aten.empty.memory_format else (graph.placeholder("x"),)
    calls = [graph.call_function(target, (*given, *arguments)) for _ in range(2)]
    graph.output(tuple(graph.call_function(aten.neg.default, (call,)) for call in calls))
    merge_duplicates(graph)
    assert [node for node in graph.nodes if node.target is target] == calls


def test_a_call_after_a_change_of_its_argument_stays() -> None:
    """One before it does not: the two first sines are one."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    sines = [graph.call_function(aten.sin.default, (x,)) for _ in range(2)]
    graph.call_function(aten.copy_.default, (x, sines[1]))
    sines.append(graph.call_function(aten.sin.default, (x,)))
    graph.output(tuple(graph.call_function(aten.neg.default, (sine,)) for sine in sines))
    merge_duplicates(graph)
    assert [node for node in graph.nodes if node.target is aten.sin.default] == [sines[0], sines[2]]


def test_zero_and_minus_zero_are_different_numbers() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(aten.div.Tensor, (zero, x)) for zero in (0.0, -0.0)))
    merge_duplicates(graph)
    assert len(graph.find_nodes(op="call_function", target=aten.div.Tensor)) == 2


def test_a_step_is_compiled_without_the_code_generator_of_inductor() -> None:
    """To import it costs 0.7 s."""
    assert subprocess.run([sys.executable, "-c", _COMPILE], check=False).returncode == 0
