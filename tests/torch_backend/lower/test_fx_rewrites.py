"""Graphs are rewritten into ones that read and write less memory, and give the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo import maybe_mark_dynamic
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.lower import finishing
from onnxtool.torch_backend.lower.decisions import DECISIONS, Decision
from onnxtool.torch_backend.lower.fx_rewrites.rewriter import rewritten
from onnxtool.torch_backend.lower.torch_onnx import decompositions
from onnxtool.torch_backend.nodes import call
from tests.torch_backend.oracle import require_same

aten = torch.ops.aten


def operators(function: Callable[..., object], *inputs: torch.Tensor) -> tuple[list[str], list[str]]:
    """Return the operators of `function` before and after rewriting, and insist on equal results."""
    graph = make_fx(function, decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    after = rewritten(graph, {})
    for ours, theirs in zip(after(*inputs), graph(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # float32, one operator or two
    return names(graph), names(after)


def names(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function"]


def test_the_first_power_is_the_number_itself() -> None:
    """It comes from the gradient of a square."""
    assert operators(lambda x: (x**1.0 + 2,), torch.rand(3)) == (["pow", "add"], ["add"])


def test_other_powers_stay_and_integers_become_what_they_become() -> None:
    """An integer to the power 1.0 is a float."""
    before, after = operators(lambda x, i: (x**3, i**1.0), torch.rand(3), torch.arange(3))
    assert before == after == ["pow", "pow"]


def halves(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    zeros = torch.zeros(2, 3, 8)
    return (aten.slice_scatter(zeros, x, 2, 4) + aten.slice_scatter(zeros, y, 2, 0, 4),)


def test_gradients_of_two_halves_are_a_concatenation() -> None:
    """Whatever their order in the sum."""
    _, after = operators(halves, torch.rand(2, 3, 4), torch.rand(2, 3, 4))
    assert after == ["cat"]


@pytest.mark.parametrize(("start", "end"), [(0, 5), (0, 3), (1, 4)])
def test_slices_that_do_not_meet_are_added(start: int, end: int) -> None:
    """They overlap, leave a gap, or leave the beginning out."""
    _, after = operators(
        lambda x, y: (
            aten.slice_scatter(torch.zeros(2, 8), x, 1, 4) + aten.slice_scatter(torch.zeros(2, 8), y, 1, start, end),
        ),
        torch.rand(2, 4),
        torch.rand(2, end - start),
    )
    assert after == ["constant_pad_nd", "constant_pad_nd", "add"]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_gradient_of_a_slice_is_padding(dim: int) -> None:
    """Of any dimension."""
    shape = [3, 4, 5]
    shape[dim] = 2
    _, after = operators(lambda x: (aten.slice_scatter(torch.zeros(3, 4, 5), x, dim, 1, 3),), torch.rand(shape))
    assert after == ["constant_pad_nd"]


def test_slices_that_are_written_into_other_numbers_or_with_steps_stay() -> None:
    """Only zeros need not be kept, and padding has no step."""
    _, after = operators(
        lambda x, y: (aten.slice_scatter(y, x, 0, 1, 3), aten.slice_scatter(y * 0, x, 0, 0, 4, 2)),
        torch.rand(2, 3),
        torch.rand(4, 3),
    )
    assert after.count("slice_scatter") == 2


def test_the_gradient_of_a_loss_makes_no_table_of_zeros() -> None:
    """Ignored labels, weights of rows and a sum have the gradients that they have in PyTorch."""
    labels = torch.tensor([1, -100, 2, 0])

    def gradient(x: torch.Tensor) -> tuple[torch.Tensor]:
        log_softmax = aten._log_softmax(x, 1, False)
        ones, total = torch.tensor(0.7), torch.tensor(3.0)
        g = aten.nll_loss_backward(ones, log_softmax, labels, None, 1, -100, total)
        return (aten._log_softmax_backward_data(g, log_softmax, 1, torch.float32),)

    before, after = operators(gradient, torch.rand(4, 3))
    assert "zeros_like" in before
    assert not {"zeros_like", "sum", "sub"} & set(after)
    require_same(lambda x: functional.cross_entropy(x, labels), torch.rand(4, 3, requires_grad=True))


def test_rows_count_what_is_written_for_them() -> None:
    """Not only minus one."""
    labels = torch.tensor([[1], [0], [2]])

    def gradient(x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor]:
        g = aten.scatter(aten.zeros_like(x), 1, labels, 2.0) * row
        return (g - x.exp() * g.sum(1, True),)

    _, after = operators(gradient, torch.rand(3, 4), torch.rand(3, 1))
    assert "sub" not in after


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_labels_have_eagers_gradient(reduction: str) -> None:
    """Each row counts what it counts."""
    labels = torch.randint(0, 5, (6,))
    require_same(
        lambda x: functional.cross_entropy(3 * x, labels, reduction=reduction), torch.rand(6, 5, requires_grad=True)
    )


def test_labels_of_dynamic_sizes_beside_scores_of_static_ones() -> None:
    """Their gradient is written in sizes that the graph has: no symbol of a size is an argument."""

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(3 * scores, labels.view(-1))

    labels = torch.randint(0, 5, (2, 3))
    for dim in range(2):
        maybe_mark_dynamic(labels, dim)
    require_same(loss, torch.rand(6, 5, requires_grad=True), labels)


def test_a_row_is_divided_before_it_is_repeated() -> None:
    """As the gradient of a mean does, times what was averaged."""
    before, after = operators(lambda x, y: (x.expand(4, 6) / 6 * y,), torch.rand(4, 1), torch.rand(4, 6))
    assert before == ["expand", "div", "mul"]
    assert after == ["div", "mul"]
    assert operators(lambda x, y: (y * x.expand(4, 6),), torch.rand(4, 1), torch.rand(4, 6))[1] == ["mul"]


def test_a_product_that_is_itself_repeated_stays() -> None:
    """Neither factor has the shape of the product."""
    before, after = operators(lambda x, y: (x.expand(4, 6) * y,), torch.rand(1, 6), torch.rand(4, 1))
    assert before == after


def test_gelu_is_written_as_onnxruntime_fuses_it() -> None:
    """And its approximation, and other precisions, are left to their translation."""
    x = torch.randn(4, 6)
    assert operators(lambda x: (functional.gelu(x),), x)[1] == ["div", "erf", "add", "mul", "mul"]
    assert operators(lambda x: (functional.gelu(x, approximate="tanh"),), x)[1] == ["gelu"]
    assert operators(lambda x: (functional.gelu(x),), x.double())[1] == ["gelu"]


def test_what_draws_numbers_is_drawn_though_nobody_reads_it() -> None:
    """The generator moves on as in PyTorch."""
    graph = make_fx(lambda x: (aten.bernoulli.p(x, 0.5), x**1.0)[1] + 1, tracing_mode="fake")(torch.rand(3))
    after = rewritten(graph, {})
    assert names(graph) == ["bernoulli", "pow", "add"]
    assert names(after) == ["bernoulli", "add"]


@pytest.mark.parametrize("factor", [torch.rand(5, 1), torch.rand(())], ids=["of each row", "one number"])
def test_a_factor_of_rows_goes_where_it_is_smaller(factor: torch.Tensor) -> None:
    """The gradient of the scores is read by two products and the sum that is the gradient of the bias."""

    def gradients(s: torch.Tensor, r: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = aten.view(aten.view(s * r, [5, 1, 9]), [5, 9])
        return aten.mm(scaled, w), aten.mm(aten.permute(scaled, [1, 0]), x), aten.sum(scaled, [0], True)

    inputs = (torch.rand(5, 9), factor, torch.rand(9, 3), torch.rand(5, 4))
    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    after = rewritten(graph, {})
    (scores, *_) = after.graph.find_nodes(op="placeholder")
    assert not [user for user in scores.users if user.target is aten.mul.Tensor]
    for ours, theirs in zip(after(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, r, w: (lambda scaled: (aten.mm(scaled, w), scaled.exp()))(s * r),
        lambda s, r, w: (aten.mm(w.t(), (s * r).t()),),
        lambda s, r, w: (aten.mm(aten.permute((s * r).view(9, 5), [1, 0]), w), w),
        lambda s, r, w: (aten.mm(s * r, torch.cat([w] * 4, 1)),),
    ],
    ids=["somebody else reads it", "the right factor", "other rows", "a result with more columns"],
)
def test_factors_that_do_not_belong_to_a_row_are_not_moved(function: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    before, after = operators(function, torch.rand(5, 9), torch.rand(5, 1), torch.rand(9, 3))
    assert before.count("mul") == after.count("mul")


REDUCED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean of a mask": lambda x, w: ((x @ w) * torch.ones(8, 6)).mean(),
    "sum of dropout": lambda x, w: functional.dropout(x @ w, 0.1).sum(),
    "sum of a number": lambda x, w: ((x @ w) * w.mean()).sum(),
    "mean of a vector": lambda x, w: ((x @ w) * w[0]).mean(),
    "mean of a batch": lambda x, w: ((x.view(2, 4, 6) @ w) * torch.ones(4, 1)).mean(),
}


@pytest.mark.parametrize("name", REDUCED)
def test_gradients_of_a_masked_product_are_those_of_pytorch(name: str) -> None:
    """The gradient of the loss has no dimensions, and is expanded times the mask."""
    torch.manual_seed(0)
    require_same(REDUCED[name], torch.rand(8, 6).requires_grad_(), torch.rand(6, 6).requires_grad_())


def test_a_rewrite_that_fails_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have inserted nodes by then."""

    def faulty(node: torch.fx.Node) -> torch.fx.Node | None:
        call(node, aten.neg.default, node.args[0])
        raise IndexError("tuple index out of range")

    monkeypatch.setitem(DECISIONS, aten.exp.default, Decision(fx_rewrites=(faulty,)))
    x = torch.rand(3)
    with pytest.warns(RuntimeWarning, match=r"faulty failed at exp.*IndexError.*please report"):
        assert operators(lambda x: (x.exp(),), x) == (["exp"], ["exp"])


def test_a_fusion_that_fails_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ONNX graph as well."""

    def faulty(*_: object) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(finishing, "_fuse_normalization", faulty)
    x = torch.rand(3)
    with pytest.warns(RuntimeWarning, match=r"faulty failed"):
        assert torch.equal(torch.compile(lambda x: x * 3.0, backend=OrtBackend())(x), x * 3.0)
