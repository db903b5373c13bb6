"""What goes into a model and what comes out, found by running it.

Letters of shapes: B batch, S sequence. Axes are named `batch_size` and `sequence` where running the model on other
shapes moves them, and stay numbers where it does not: a pooled output [B, H] gets no sequence axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtool.errors import ExportError
from onnxtool.reports import Dimension

BATCH, SEQUENCE = "batch_size", "sequence"

# B and S of three runs: the first, one with another B, one with another S.
_PROBES = ((2, 8), (3, 8), (2, 11))


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model, in order.

    Attributes:
        inputs: names that tokenizer and forward agree on; each is int64 [B, S].
        outputs: name to shape.
    """

    inputs: tuple[str, ...]
    outputs: dict[str, tuple[Dimension, ...]]


def detect_signature(model: Any, tokenizer: Any) -> Signature:
    """Find the signature of a transformers model that takes tokenized text.

    Raises:
        ExportError: tokenizer and model agree on no input, or the model does not run on text alone.
    """
    accepted = inspect.signature(model.forward).parameters
    offered = list(tokenizer(["a"]))
    ignored = {"token_type_ids"} if getattr(getattr(model, "config", None), "type_vocab_size", None) == 0 else set()
    inputs = tuple(name for name in offered if name in accepted and name not in ignored)  # DeBERTa takes and ignores it
    if "input_ids" not in inputs:
        raise ExportError(
            f"{type(model).__name__} takes {', '.join(accepted)}, and its tokenizer gives {', '.join(offered)}",
            "onnxtool exports models of text; this one takes something else",
        )
    shapes = []
    for batch, sequence in _PROBES:
        feeds = {name: _probe_input(name, batch, sequence) for name in inputs}
        shapes.append({name: tuple(array.shape) for name, array in run_torch(model, feeds).items()})
    first, other_batch, other_sequence = shapes
    outputs = {
        name: tuple(
            _axis_name(f"{name}_axis_{axis}", first[name][axis], other_batch[name][axis], other_sequence[name][axis])
            for axis in range(len(first[name]))
        )
        for name in first
    }
    return Signature(inputs, outputs)


def run_torch(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a transformers model on numpy arrays and return its tensors as numpy arrays, float32 at least.

    Raises:
        ExportError: the model does not run on these inputs.
    """
    return {name: to_numpy(tensor) for name, tensor in run_torch_tensors(model, feeds).items()}


def run_torch_tensors(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a transformers model on numpy arrays and return its tensors, by name and in order.

    Raises:
        ExportError: the model does not run on these inputs.
    """
    import torch

    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(model.device) for name, array in feeds.items()}
    try:
        with torch.inference_mode():
            outputs = model(**tensors)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise ExportError(
            f"{type(model).__name__} does not run on {shapes}: {(str(error).splitlines() or [''])[0]}",
            "onnxtool exports models that run on tokenized text alone",
        ) from error
    return _name_outputs(outputs)


def to_numpy(tensor: Any) -> Any:
    """Return a tensor as a numpy array; numpy knows no bfloat16, which becomes float32."""
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _name_outputs(outputs: Any) -> dict[str, Any]:
    """Name the tensors of a model's output: by its keys, else by position."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    items = outputs.items() if isinstance(outputs, Mapping) else ((f"output_{i}", o) for i, o in enumerate(outputs))
    return {name: value for name, value in items if isinstance(value, torch.Tensor)}


def _probe_input(name: str, batch: int, sequence: int) -> Any:
    filler = 1 if "mask" in name else 0
    return np.full((batch, sequence), filler, dtype=np.int64)


def _axis_name(otherwise: str, size: int, with_other_batch: int, with_other_sequence: int) -> Dimension:
    moves_with_batch, moves_with_sequence = size != with_other_batch, size != with_other_sequence
    if not moves_with_batch and not moves_with_sequence:
        return size
    if size == _PROBES[0][0] and with_other_batch == _PROBES[1][0] and not moves_with_sequence:
        return BATCH
    if size == _PROBES[0][1] and with_other_sequence == _PROBES[2][1] and not moves_with_batch:
        return SEQUENCE
    return otherwise  # a window, a product, …: dynamic, but neither of the two
