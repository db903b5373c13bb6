"""PyTorch functions that AOTAutograd traces in a form of ours, of fewer operators than PyTorch's decomposition."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from onnxtool.torch_backend.capture.attention import attention
from onnxtool.torch_backend.lower.decompositions.random import DROPOUT_MASKS, DropoutMask, has_scaled_mask


@contextlib.contextmanager
def traceable_functions(dropout: str = "eager") -> Iterator[None]:
    """Trace our functions in place of PyTorch's, and other attention as matmuls: one operator has no translation.

    `dropout` names what draws masks, one of `DROPOUT_MASKS`.
    """
    with sdpa_kernel(SDPBackend.MATH), _ReplacedFunctions(DROPOUT_MASKS[dropout]):
        yield


def _dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, draw: DropoutMask
) -> torch.Tensor | None:
    """Compute `torch.nn.functional.dropout` as one product; None where there is no mask for it."""
    if not training or not has_scaled_mask(x, p):
        return None
    return x.mul_(draw(x, p)) if inplace else x * draw(x, p)


_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
    torch.nn.functional.dropout: _dropout,
}
"""Each takes the arguments of the function, and what draws masks.

It returns None where PyTorch's decomposition is to be traced.
"""


class _ReplacedFunctions(TorchFunctionMode):  # type: ignore[misc]  # PyTorch has no types here
    def __init__(self, draw: DropoutMask) -> None:
        super().__init__()
        self._replaced = {function: functools.partial(ours, draw=draw) for function, ours in _REPLACED.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._replaced[function](*args, **kwargs) if function in self._replaced else None
        return function(*args, **kwargs) if result is None else result
