"""What AOTAutograd traces: attention in few operators, and a joint graph without the calls that repeat others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.capture import merge_duplicates
from tests.torch_backend.graphs import models_of, operators, optimized
from tests.torch_backend.oracle import require_same

BATCHES, HEADS, LENGTH, KEYS, FEATURES = 2, 3, 5, 7, 4


def tensors(*leading: int, keys: int = KEYS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((LENGTH, FEATURES), (keys, FEATURES), (keys, FEATURES + 1))
    return [torch.randn(*leading, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def some_mask() -> torch.Tensor:
    """Return what may be seen, [batches, 1, L, S]; in the first batch a row sees nothing."""
    mask = torch.rand(BATCHES, 1, LENGTH, KEYS) > 0.4
    mask[:, :, :, 0] = True
    mask[0, 0, 2] = False
    return mask


@pytest.mark.parametrize(
    ("leading", "dynamic"),
    [((BATCHES, HEADS), False), ((HEADS,), False), ((2, 1, HEADS), True)],
    ids=["heads", "no batch", "two batches, dynamic"],
)
def test_forward_and_gradients_are_those_of_pytorch(leading: tuple[int, ...], dynamic: bool) -> None:
    backend = require_same(scaled_dot_product_attention, *tensors(*leading), dynamic=dynamic)
    assert not any(graph.report.eager for graph in backend.graphs)


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"is_causal": True}, {"is_causal": True, "scale": 2.0}],
    ids=["scaled", "causal", "causal and scaled"],
)
@pytest.mark.parametrize("keys", [KEYS, LENGTH, 3])
def test_scales_and_causal_masks(options: dict[str, Any], keys: int) -> None:
    """Where there are fewer keys than queries, the last queries see them all."""
    require_same(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), *tensors(2, 3, keys=keys))


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient() -> None:
    mask = some_mask()
    backend = require_same(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), *tensors(BATCHES, HEADS))
    query, key, value = tensors(BATCHES, HEADS)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), backend=backend)
    result = compiled(query, key, value)
    assert not result[0, :, 2].any()
    result.sum().backward()
    assert query.grad is not None
    assert not query.grad[0, :, 2].any()
    assert query.grad[1, :, 2].any()


@pytest.mark.parametrize("shape", [(BATCHES, 1, LENGTH, KEYS), (1, HEADS, 1, KEYS), (LENGTH, KEYS)], ids=str)
def test_a_mask_of_numbers_is_added_and_has_a_gradient(shape: tuple[int, ...]) -> None:
    """Minus infinity hides; a finite number is a bias, which may be learned."""
    bias = torch.randn(shape)
    bias[..., 3] = -torch.inf
    require_same(scaled_dot_product_attention, *tensors(BATCHES, HEADS), bias.requires_grad_())


def test_a_float_mask_that_hides_a_whole_row_matches_eager() -> None:
    bias = torch.where(some_mask(), 0.0, -torch.inf)
    require_same(lambda q, k, v: scaled_dot_product_attention(q, k, v, bias), *tensors(BATCHES, HEADS))


def test_numbers_that_are_none_go_through() -> None:
    """A NaN in one query is in its row of the result, and in no other."""
    query, key, value = tensors(BATCHES, HEADS)
    with torch.no_grad():
        query[0, 1, 2, 3] = torch.nan
    mask = some_mask() | torch.ones(KEYS, dtype=torch.bool)
    compiled = torch.compile(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), backend=OrtBackend())
    is_nan = compiled(query, key, value).isnan()
    assert is_nan[0, 1, 2].all()
    assert is_nan.sum() == FEATURES + 1


def test_groups_of_heads_share_keys_and_values() -> None:
    query, _, _ = tensors(BATCHES, 6)
    _, key, value = tensors(BATCHES, 3)
    require_same(lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True), query, key, value)


def test_dropout_draws_what_eager_pytorch_draws() -> None:
    """And the share that is kept makes up for what is not, in the result and in the gradients."""
    require_same(lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.3), *tensors(BATCHES, HEADS))
    require_same(lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=1.0), *tensors(BATCHES, HEADS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_float64_and_float16_attention_match_eager(dtype: torch.dtype) -> None:
    atol = 1e-12 if dtype is torch.float64 else 3e-3  # float16 has 11 bits, and every product is rounded
    require_same(scaled_dot_product_attention, *tensors(BATCHES, HEADS, dtype=dtype), atol=atol)


def test_autocast_halves_the_precision_of_attention_as_well() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(query, key, value, mask)

    mask = some_mask()
    inputs = tensors(BATCHES, HEADS)
    result = torch.compile(attend, backend=OrtBackend())(*inputs)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, attend(*inputs), rtol=0, atol=0.02)  # bfloat16 has 8 bits


def test_the_scale_is_a_factor_of_the_products_and_no_gradient_is_transposed(tmp_path: Path) -> None:
    """Forward and backward hold six products, and nothing passes over the scores but the mask and the softmax."""
    mask = some_mask()
    models = models_of(
        lambda q, k, v: scaled_dot_product_attention(q.cos(), k.cos(), v.cos(), mask), *tensors(BATCHES, HEADS)
    )
    found = operators(optimized(models, tmp_path))
    assert found["MatMul"] + found["FusedMatMul"] == 6
    assert found["Transpose"] == found["IsNaN"] == 0
    # Two make rows that see nothing zero, three are the gradient of the softmax, and three those of the cosines.
    assert found["Mul"] + found["Sub"] == 8


aten = torch.ops.aten


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
def test_a_call_that_may_return_another_value_is_not_merged(target: object, arguments: tuple[object, ...]) -> None:
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
