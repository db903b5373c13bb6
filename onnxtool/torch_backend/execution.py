"""Runs a piece of a graph: a session, and what PyTorch expects of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as binding

from onnxtool.torch_backend.values import CPU, dense, ort_device, unwrap, wrap

Fake = object
"""What a graph knows of a value: a fake tensor, or a (symbolic) number."""


@dataclass(frozen=True)
class Expected:
    """What PyTorch expects of one result.

    Attributes:
        dtype: the type of its elements; None where a number is expected.
        order: its dimensions from the largest stride to the smallest; None where that is their own order.
        shape: its shape where that is known before the call.
        device: where it is expected to be.
    """

    dtype: torch.dtype | None
    order: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    device: torch.device

    @classmethod
    def of(cls, value: Fake) -> Expected:
        """Read the expectation off a fake value."""
        if not isinstance(value, torch.Tensor):
            return cls(None, None, None, torch.device("cpu"))
        shape = tuple(value.shape) if all(isinstance(size, int) for size in value.shape) else None
        return cls(value.dtype, _order(value), shape, value.device)

    def restored(self, tensor: torch.Tensor) -> Any:
        """Give a result of onnxruntime the type and the layout that are expected."""
        if self.dtype is None:
            return tensor.item()
        if tensor.dtype is not self.dtype:
            tensor = tensor.view(self.dtype)  # booleans that came as bytes
        if self.order is None:
            return tensor
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return tensor.permute(self.order).contiguous().permute(inverse)


class SessionCall:
    """A piece that can be called with the values it takes and returns a list of those it gives."""

    def __init__(self, name: str, session: Any, used: Sequence[int], inputs: Sequence[Fake], outputs: Sequence[Fake]):
        """Prepare what does not change from call to call.

        Args:
            name: how tracebacks and generated code call it.
            session: an `onnxruntime.InferenceSession`.
            used: which of the piece's inputs the session takes, in its order.
            inputs: the fake values of all inputs of the piece.
            outputs: the fake values of all its outputs.
        """
        self.__name__ = name
        self.__qualname__ = name
        self.num_calls = 0
        self.expected = tuple(Expected.of(value) for value in outputs)
        self._run = session._sess.run_with_ortvaluevector
        self._session = session
        self._used = tuple(used)
        self._input_names = [value.name for value in session.get_inputs()]
        self._output_names = [value.name for value in session.get_outputs()]
        self._input_devices = [
            ort_device(value.device) if isinstance(value := inputs[index], torch.Tensor) else CPU for index in used
        ]
        self._output_devices = [ort_device(expected.device) for expected in self.expected]
        self._plain = all(item.dtype not in (None, torch.bool) and item.order is None for item in self.expected)
        self._numbers: dict[tuple[type, int | bool], torch.Tensor] = {}
        self._options = binding.RunOptions()

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run the session on the piece's inputs, in their order."""
        self.num_calls += 1
        tensors = [
            dense(argument) if isinstance(argument, torch.Tensor) else self._number(argument)
            for argument in map(arguments.__getitem__, self._used)
        ]
        results = binding.OrtValueVector()
        self._run(
            self._options,
            self._input_names,
            wrap(tensors, self._input_devices),
            self._output_names,
            results,
            self._output_devices,
        )
        outputs = unwrap(results)
        if self._plain:
            return outputs
        return [expected.restored(output) for expected, output in zip(self.expected, outputs, strict=True)]

    def _number(self, number: int | bool) -> torch.Tensor:
        """Return a size as a tensor; those of the calls before are kept."""
        key = (type(number), number)  # True equals 1
        if key not in self._numbers:
            if len(self._numbers) >= _MOST_NUMBERS:
                self._numbers.clear()
            self._numbers[key] = torch.tensor(number)
        return self._numbers[key]


_MOST_NUMBERS = 1024


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor from the largest stride to the smallest, or None where it is contiguous."""
    if value.is_contiguous():
        return None
    strides = [_hint(stride) for stride in value.stride()]
    sizes = [_hint(size) for size in value.shape]
    order = tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim])))
    return None if order == tuple(range(value.dim())) else order


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


Runner = Callable[..., list[Any]]
