"""PyTorch functions that AOTAutograd traces in a form of ours, of fewer operators than PyTorch's decomposition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from onnxtool.torch_backend.capture.attention import attention
from onnxtool.torch_backend.lower.decompositions.random import has_eager_dropout, scaled_dropout_mask


@contextlib.contextmanager
def traceable_functions() -> Iterator[None]:
    """Trace our functions in place of PyTorch's, and other attention as matmuls: one operator has no translation."""
    with sdpa_kernel(SDPBackend.MATH), _ReplacedFunctions():
        yield


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor | None:
    """Compute `torch.nn.functional.dropout` as one product; None where the mask would not be eager PyTorch's."""
    return x * scaled_dropout_mask(x, p) if training and not inplace and has_eager_dropout(x, p) else None


_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
    torch.nn.functional.dropout: _dropout,
}
"""Each takes the arguments of the function, and returns None where PyTorch's decomposition is to be traced."""


class _ReplacedFunctions(TorchFunctionMode):  # type: ignore[misc]  # PyTorch has no types here
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _REPLACED[function](*args, **kwargs) if function in _REPLACED else None
        return function(*args, **kwargs) if result is None else result
