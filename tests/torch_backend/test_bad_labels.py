"""A compiled loss raises on what eager PyTorch refuses: labels that are no class, indices, probabilities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ids(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


_PIXELS = ids(0, 2, 1, 1).reshape(2, 2)
# A function of scores and labels, labels that are right, and those that are not.
CASES: dict[str, tuple[Function, tuple[int, ...], torch.Tensor, torch.Tensor]] = {
    "classes": (functional.cross_entropy, (4, 3), ids(0, 1, 2, -100), ids(0, 1, 2, -1)),
    "classes above": (functional.cross_entropy, (4, 3), ids(0, 1, 2, -100), ids(0, 1, 2, 3)),
    "weighted": (
        lambda x, y: functional.cross_entropy(x, y, weight=x.detach()[0].abs(), ignore_index=1),
        (4, 3),
        ids(0, 1, 2, 1),
        ids(0, 1, 2, -3),
    ),
    "smoothed": (
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        (4, 3),
        ids(0, 1, 2, -100),
        ids(0, 1, 2, -2),
    ),
    "likelihood": (functional.nll_loss, (4, 3), ids(0, 1, 2, -100), ids(0, 1, 2, -3)),
    "pixels": (functional.cross_entropy, (2, 3, 2), _PIXELS, _PIXELS - 1),
    "gathered": (lambda x, y: x.gather(1, y[:, None]), (4, 3), ids(0, 1, 2, 2), ids(0, 1, 2, -1)),
    "written": (lambda x, y: x.scatter(1, y[:, None], 1.0), (4, 3), ids(0, 1, 2, 2), ids(0, 1, 2, -1)),
    "selected": (lambda x, y: x.index_select(0, y), (4, 3), ids(3, 0), ids(3, -4)),
    "embedded": (
        lambda x, y: functional.embedding(y, x),
        (4, 3),
        ids(3, 0, dtype=torch.int32),
        ids(3, -1, dtype=torch.int32),
    ),
    "written from": (lambda x, y: x.scatter(1, y[:, None], x[:, :1] + 1), (4, 3), ids(0, 1, 2, 2), ids(0, 1, 2, -1)),
    "added in place": (
        lambda x, y: x.clone().index_add_(0, y, x, alpha=2),
        (4, 3),
        ids(0, 1, 3, 3),
        ids(0, 1, 2, -1),
    ),
    "copied": (lambda x, y: x.index_copy(0, y, x + 1), (4, 3), ids(0, 1, 2, 3), ids(0, 1, 2, -1)),
    "filled": (lambda x, y: x.index_fill(0, y, 2.0), (4, 3), ids(0, 1, -4, 3), ids(0, 1, 2, -5)),
    "reduced": (
        lambda x, y: x.scatter_reduce(1, y[:, None], x[:, :1], "sum"),
        (4, 3),
        ids(0, 1, 2, 2),
        ids(0, 1, 2, -1),
    ),
    "bags": (lambda x, y: functional.embedding_bag(y[None], x), (4, 3), ids(0, 1, 3), ids(0, 1, -1)),
    "pooled": (
        lambda x, y: functional.max_unpool2d((x[:, :1] + x)[:, None, None, :1], y[:, None, None, None], 2),
        (4, 3),
        ids(0, 1, 2, 2),
        ids(0, 1, 2, 4),
    ),
    "gradient": (
        lambda x, y: torch.func.grad(lambda x: (x[y, y % 2] * x[:, 0]).sum())(x),
        (4, 3),
        ids(0, 1, -4, 3),
        ids(0, 1, 2, -5),
    ),
    "two dimensions": (
        lambda x, y: x.index_put((y - y, y), x[:, 0], accumulate=True),
        (4, 3),
        ids(0, 1, -3, 2),
        ids(0, 1, 2, 3),
    ),
    "probabilities": (
        lambda x, y: functional.binary_cross_entropy((2 * x).sigmoid(), y.float()),
        (4,),
        ids(0, 1, 1, 0),
        ids(0, 1, 2, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_that_of_pytorch_and_the_next_call_is_right(name: str) -> None:
    """ONNX counts negative indices from the end; here they end a session, and PyTorch explains."""
    function, shape, right, wrong = CASES[name]
    torch.manual_seed(0)
    x = torch.rand(shape)
    backend = OrtBackend()
    compiled = torch.compile(function, backend=backend)
    torch.testing.assert_close(compiled(x, right), function(x, right))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(x, wrong)
    with pytest.raises(eager.type) as found:
        compiled(x, wrong)
    assert str(found.value) == str(eager.value)
    runs = backend.execution_count
    torch.testing.assert_close(compiled(x, right), function(x, right))
    assert backend.execution_count > runs  # a session goes on to run after a call of bad labels


def test_negative_indices_that_pytorch_takes_are_taken() -> None:
    """Of indexing and of `take_along_dim`, which count from the end."""
    x, index = torch.rand(4, 3), ids(0, 1, 2, -1)
    functions: list[Function] = [
        lambda x, y: x[torch.arange(4), y],
        lambda x, y: torch.take_along_dim(x, y[:, None], 1),
    ]
    for function in functions:
        torch.testing.assert_close(torch.compile(function, backend=OrtBackend())(x, index), function(x, index))
