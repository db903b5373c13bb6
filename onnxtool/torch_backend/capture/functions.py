"""Functions that are traced in fewer operators than PyTorch would take them apart into."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from onnxtool.torch_backend.capture.attention import attention
from onnxtool.torch_backend.lower import random

_OURS: dict[Any, Callable[..., torch.Tensor | None]] = {
    scaled_dot_product_attention: attention,
    dropout: random.dropout,
}
"""Each takes the arguments of the function, and returns None where PyTorch is to take it apart."""


@contextlib.contextmanager
def traceable_functions() -> Iterator[None]:
    """Let AOTAutograd trace ours; attention that is not for ours as products, as it has no translation by itself."""
    with sdpa_kernel(SDPBackend.MATH), _Ours():
        yield


class _Ours(TorchFunctionMode):  # type: ignore[misc]  # PyTorch has no types here
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _OURS[function](*args, **kwargs) if function in _OURS else None
        return function(*args, **kwargs) if result is None else result
