"""What goes into a model and what comes out, found by running it on other sizes.

An axis has a name where running the model moves it, and stays a number where it does not: a pooled output [B, H] gets
no sequence axis, and a vision transformer that takes one size of picture keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import ExportError
from onnxtool.export.modalities.sizes import Axis, Modality, Sizes, usual_sizes
from onnxtool.reports import Dimension

Shape = tuple[Dimension, ...]

# What encoder-decoders and dual encoders return beside what was asked for.
_BESIDE = frozenset({"encoder_last_hidden_state", "loss"})


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model, in order.

    Attributes:
        inputs: name to shape.
        outputs: name to shape.
        axes: the dynamic axes of the inputs.
        given: sizes of the axes that the model itself fixes, by name.
        fixed: sizes of the axes that this file fixes, though the model does not.
    """

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    axes: tuple[Axis, ...] = ()
    given: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes that are not dynamic."""
        return {**self.given, **self.fixed}


def detect_signature(model: Any, modality: Modality, fixed: Sizes | None = None) -> Signature:
    """Find the signature of a transformers model by running it, once for each axis that may move.

    Args:
        model: a transformers model.
        modality: what it takes.
        fixed: sizes of axes that are not to be dynamic.

    Raises:
        ExportError: the model does not run on what its processor gives, or takes one batch size only.
    """
    fixed = dict(fixed or {})
    usual = usual_sizes(modality) | fixed
    inputs, outputs = _shapes_of_run(model, modality, usual)
    moved: dict[Axis, tuple[_Shapes, _Shapes]] = {}
    given: dict[str, int] = {}
    for axis in modality.axes:
        if axis.name in fixed:
            continue
        try:
            moved[axis] = _shapes_of_run(model, modality, {**usual, axis.name: axis.other})
        except ExportError:
            if not axis.may_fail:
                raise
            given[axis.name] = axis.usual
    # Qwen2-Audio gives its mask back.
    kept = [name for name in outputs if name not in inputs and (name not in _BESIDE or len(outputs) == 1)]
    return Signature(
        {name: _shape(name, inputs[name], {axis: run[0][name] for axis, run in moved.items()}) for name in inputs},
        {name: _shape(name, outputs[name], {axis: run[1][name] for axis, run in moved.items()}) for name in kept},
        tuple(moved),
        given,
        fixed,
    )


_Shapes = dict[str, tuple[int, ...]]


def _shapes_of_run(model: Any, modality: Modality, sizes: Sizes) -> tuple[_Shapes, _Shapes]:
    """Return the shapes of inputs and outputs of one run."""
    feeds = modality.feeds(sizes)
    outputs = run_torch_tensors(model, feeds)
    return {name: array.shape for name, array in feeds.items()}, {n: tuple(one.shape) for n, one in outputs.items()}


def _shape(name: str, sizes: tuple[int, ...], moved: Mapping[Axis, tuple[int, ...]]) -> Shape:
    return tuple(
        _dimension(name, size, {axis: shape[position] for axis, shape in moved.items()})
        for position, size in enumerate(sizes)
    )


def _dimension(name: str, size: int, moved: Mapping[Axis, int]) -> Dimension:
    movers = [axis for axis, other in moved.items() if other != size]
    if not movers:
        return size
    if len(movers) == 1 and size == movers[0].usual and moved[movers[0]] == movers[0].other:
        return movers[0].name
    # A window, a product, …: dynamic, but none of the inputs' own.
    return "_".join([name, *(axis.name for axis in movers)])


def run_torch_tensors(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a transformers model on numpy arrays and return its tensors by name.

    Raises:
        ExportError: the model does not run on these inputs.
    """
    import torch

    tensors = to_tensors(model, feeds)
    try:
        with torch.inference_mode():
            outputs = model(**tensors)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError, KeyError) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise ExportError(
            f"{type(model).__name__} does not run on {shapes}: {(str(error).splitlines() or [''])[0]}",
            "it may need inputs that its tokenizer or processor does not give",
        ) from error
    return _name_outputs(outputs)


def to_tensors(model: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Turn arrays into tensors on the model's device, floats in its dtype."""
    import torch

    dtype = getattr(model, "dtype", torch.float32)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(model.device) for name, array in feeds.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


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
