"""Losses over the embeddings of a large batch, in the memory of a mini-batch: GradCache.

Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", arXiv:2101.06983. The model
embeds one mini-batch after another without keeping activations. The loss and its gradient with respect to the
embeddings are computed for the whole batch. Then the model runs again on each mini-batch, with the same random numbers,
and that gradient is propagated to its parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from onnxtool.errors import TrainingError

_NOT_ROWS = (
    "mini_batch_size needs a model with one embedding per row and a loss over embeddings; leave it out otherwise"
)
_PER_TOKEN = ("token_embeddings", "all_layer_embeddings")
"""Outputs of sentence-transformers' models that are dropped next to a `sentence_embedding`: as large as all texts."""
_TOLERANCE = 0.02
"""Relative, of the embeddings of the second pass: above the rounding of bfloat16, below another mask of dropout."""

Tensors = tuple[torch.Tensor, ...]


class GradientCache:
    """Replaces the forward pass of a model by one that embeds a batch in mini-batches and recomputes activations.

    Attributes:
        num_calls: number of calls of the model so far.
        model_forward: the forward pass that is replaced.
    """

    def __init__(self, model: torch.nn.Module, run: Callable[..., Any], mini_batch_size: int | None) -> None:
        """Check the model.

        Args:
            model: its outputs have one row for each row of its arguments.
            run: computes its forward pass.
            mini_batch_size: rows of a mini-batch; None if the loss splits batches itself.

        Raises:
            TrainingError: the model has batch normalization.
        """
        for name, module in model.named_modules():
            if mini_batch_size and isinstance(module, _BatchNorm):
                kind = type(module).__name__
                raise TrainingError(f"the statistics of {name}, a {kind}, depend on the whole batch", _NOT_ROWS)
        self.num_calls = 0
        self.model_forward = model.forward
        self._model = model
        self._run = run
        self._size = mini_batch_size

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Handle calls of the model inside the block, including calls by a loss that holds the model."""
        attributes = vars(self._model)
        self._replaced = self._replaced_parts()
        before = {name: attributes[name] for name in ("forward",) if name in attributes}  # accelerate's has autocast
        attributes["forward"] = self._forward
        try:
            yield
        finally:
            del attributes["forward"]
            attributes.update(before)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a batch, without outputs per token next to a `sentence_embedding`."""
        self.num_calls += 1
        if parts := self._replaced_parts() - self._replaced:
            raise TrainingError(f"the loss replaces the forward pass of {', '.join(sorted(parts))}", _NOT_ROWS)
        if self._size is None:
            return self._run(*args, **kwargs)
        size = self._size
        args = tuple(dict(value) if isinstance(value, Mapping) else value for value in args)  # a BatchEncoding
        inputs, structure = tree_flatten_with_path((args, kwargs), is_leaf=lambda value: isinstance(value, list))
        num_rows = _num_rows(inputs)
        outputs: list[Any] = []

        def encode(start: int) -> Tensors:
            rows = min(size, num_rows - start)
            # A copy, because Pooling with include_prompt=False changes the mask.
            part = [leaf[start : start + rows].clone() if _has_rows(leaf) else leaf for _, leaf in inputs]
            some_args, some_kwargs = tree_unflatten(part, structure)
            outputs[:] = self._rows(self._run(*some_args, **some_kwargs), rows)
            return tuple(leaf for leaf in outputs[0] if isinstance(leaf, torch.Tensor))

        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        tensors = [leaf for _, leaf in inputs if isinstance(leaf, torch.Tensor)]
        embeddings = iter(_Embeddings.apply(encode, range(0, num_rows, size), tensors, *trained))
        leaves = [next(embeddings) if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs[0]]
        result = tree_unflatten(leaves, outputs[1])
        return _Kept(result) if type(result) is dict else result

    def _replaced_parts(self) -> set[str]:
        return {name for name, module in self._model.named_modules() if name and "forward" in vars(module)}

    def _rows(self, outputs: Any, num_rows: int) -> tuple[list[Any], Any]:
        """Return the values in the outputs of a mini-batch and how to put them together."""
        if isinstance(outputs, dict) and "sentence_embedding" in outputs:
            outputs = {name: value for name, value in outputs.items() if name not in _PER_TOKEN}
        named, structure = tree_flatten_with_path(outputs)
        for path, leaf in named:
            if isinstance(leaf, torch.Tensor):
                is_known, description = leaf.dim() > 0 and len(leaf) == num_rows, f"of shape {list(leaf.shape)}"
            else:
                is_known, description = _is_plain(leaf), f"a {type(leaf).__name__}"
            if not is_known:
                kind = type(self._model).__name__
                raise TrainingError(f"{kind} returns {keystr(path)}, {description}, for {num_rows} rows", _NOT_ROWS)
        return [leaf for _, leaf in named], structure


class _Kept(dict[str, Any]):
    """Outputs by name, with an error for those that were dropped."""

    def __missing__(self, name: str) -> Any:
        raise TrainingError(f"the loss reads the model's output {name}, which mini-batches do not keep", _NOT_ROWS)


class _Embeddings(torch.autograd.Function):  # type: ignore[misc]  # PyTorch has no types here
    """The outputs of all mini-batches; the parameters are arguments, so that DistributedDataParallel sees one use."""

    @staticmethod
    def forward(
        ctx: Any, encode: Callable[[int], Tensors], starts: range, inputs: list[torch.Tensor], *parameters: torch.Tensor
    ) -> Tensors:
        ctx.encode, ctx.starts, ctx.parameters, ctx.states = encode, starts, parameters, []
        ctx.set_materialize_grads(False)
        device = inputs[0].device.type
        dtype = torch.get_autocast_dtype(device)
        ctx.autocast = torch.autocast(device, dtype=dtype, enabled=torch.is_autocast_enabled(device))
        parts: list[Tensors] = []
        for start in starts:
            ctx.states.append((torch.get_rng_state(), *get_device_states(*inputs)))
            parts.append(encode(start))
        ctx.first = parts[0]
        outputs = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # PyTorch has no types here
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        sums: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        for start, (state, devices, of_devices) in zip(ctx.starts, ctx.states, strict=True):
            with torch.random.fork_rng(devices), torch.enable_grad(), ctx.autocast:
                torch.set_rng_state(state)
                set_device_states(devices, of_devices)
                outputs = ctx.encode(start)
            if start == 0:
                _require_same(ctx.first, outputs)
            seeds = [
                (output, gradient[start : start + len(output)])
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if not seeds:
                continue
            ends, seeded = zip(*seeds, strict=True)
            for index, gradient in enumerate(torch.autograd.grad(ends, ctx.parameters, seeded, allow_unused=True)):
                if gradient is not None:
                    total = sums[index]
                    sums[index] = gradient if total is None else total.add_(gradient)
        return None, None, None, *sums


def _require_same(first: Tensors, second: Tensors) -> None:
    """Check that recomputed embeddings are the ones that the loss was computed from."""
    for before, after in zip(first, second, strict=True):
        if before.is_floating_point():
            difference = ((after.detach() - before).float().norm() / before.float().norm()).item()
            if difference > _TOLERANCE:
                raise TrainingError(
                    f"a mini-batch is embedded differently the second time, by {difference:.2g} of its norm",
                    "set dropout to 0 where it does not draw from PyTorch's generator, or leave mini_batch_size out",
                )


def _num_rows(inputs: list[tuple[Any, Any]]) -> int:
    """Return the number of rows of the tensors in the arguments of a model."""
    sizes: dict[str, int] = {}
    for path, leaf in inputs:
        name = keystr(path[1:])
        if not isinstance(leaf, torch.Tensor) and not _is_plain(leaf):
            raise TrainingError(f"the model's argument {name} is a {type(leaf).__name__}", "pass tensors by name")
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise TrainingError(f"the model's argument {name} requires a gradient", _NOT_ROWS)
        if _has_rows(leaf):
            sizes[name] = len(leaf)
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "there are no tensors"
        raise TrainingError(f"the model's arguments differ in their number of rows: {listed}", _NOT_ROWS)
    return next(iter(sizes.values()))


def _has_rows(value: object) -> bool:
    """Whether an argument is split; a single value, for example the length of the prompt, holds for all rows."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and (value.dim() > 1 or value.numel() > 1)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)
