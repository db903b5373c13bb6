"""Patches of PyTorch for calls that a TorchScript trace does not follow, while it runs.

Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Functions that make a tensor from a shape; torch's exporter writes them as nodes that draw in every run.
_DRAWS = ("rand", "randn", "randint", "randperm")
_NO_SEED_OF_A_MODEL = 0x6F6E6E78746F6F6C


@contextmanager
def traceable_calls() -> Iterator[None]:
    """Let a model be traced that uses strides, autograd functions of its own, or draws under a seed."""
    with _strides_of_contiguous_tensors(), _autograd_functions_called(), _seeded_draws_as_constants():
        yield


@contextmanager
def _strides_of_contiguous_tensors() -> Iterator[None]:
    """Let `as_strided` see contiguous tensors, which is how ONNX lays them out; Longformer's windows are made by it.

    Of a view, the strides that it asks for are those of the view's own memory; each is scaled to what it would be.
    """
    import torch

    original = torch.Tensor.as_strided

    def as_strided(tensor: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if tensor.is_contiguous() or storage_offset or len(stride) != tensor.dim():
            return original(tensor, size, stride, storage_offset)
        contiguous = tensor.contiguous()
        pairs = zip(stride, tensor.stride(), contiguous.stride(), strict=True)
        return original(contiguous, size, [int(wanted * after // before) for wanted, before, after in pairs])

    torch.Tensor.as_strided = as_strided
    try:
        yield
    finally:
        torch.Tensor.as_strided = original


@contextmanager
def _autograd_functions_called() -> Iterator[None]:
    """Call the `forward` of autograd functions as any function: an inference has no use for their `backward`.

    The trace knows an autograd function as one node, and torch's exporter fails to put its body there where it holds
    modules, as Reformer's does, which holds all layers. One that brings an ONNX `symbolic` is left as it is.
    """
    import torch

    function = torch.autograd.Function
    original = vars(function)["apply"]  # the classmethod itself, as the attribute is bound
    without_context = torch.autograd.function._SingleLevelFunction.setup_context  # noqa: SLF001  how torch itself asks

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "symbolic"):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not without_context:  # then forward takes no context
            return cls.forward(*args, **kwargs)
        context = torch.autograd.function.FunctionCtx()
        context.needs_input_grad = (False,) * len(args)
        return cls.forward(context, *args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


@contextmanager
def _seeded_draws_as_constants() -> Iterator[None]:
    """Let a model that seeds torch's generator have what it draws then as a constant, which it is: Reformer's hashes.

    What it draws without a seed of its own stays a draw, and so does what comes of a generator of its own. The state
    of torch's generator is afterwards what it was.
    """
    import torch

    originals = {name: getattr(torch, name) for name in _DRAWS}

    def constant(original: Any) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if torch.initial_seed() == _NO_SEED_OF_A_MODEL or kwargs.get("generator") is not None:
                return original(*args, **kwargs)
            with _untraced():
                return original(*_numbers(args), **{name: _numbers(value) for name, value in kwargs.items()})

        return draw

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_NO_SEED_OF_A_MODEL)
        for name, original in originals.items():
            setattr(torch, name, constant(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)


@contextmanager
def _untraced() -> Iterator[None]:
    """Record nothing while the block runs; a tensor made in it is a constant of the trace."""
    import torch

    state = torch._C._get_tracing_state()  # noqa: SLF001  torch.jit has no public way to pause a trace
    torch._C._set_tracing_state(None)  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # noqa: SLF001


def _numbers(value: Any) -> Any:
    """Return sizes as numbers, which are tensors in a trace."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_numbers, value)) if isinstance(value, (tuple, list)) else value
