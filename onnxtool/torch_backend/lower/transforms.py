"""Ready-made changes of a model before its session is made: the passes of `onnxtool optimize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.options import Transform
from onnxtool.torch_backend.run.sessions import INPUTS_KEY, NUM_NODES_KEY

if TYPE_CHECKING:
    pass


PRESETS: dict[str, tuple[str, ...]] = {
    "tidy": ("fold_constants", "common_subexpressions", "neutral_operators", "deduplicate_initializers"),
}
"""Lists of passes for any graph; all other passes look for layers of exported models."""


def resolve_transforms(transforms: Sequence[Transform | str]) -> tuple[Transform, ...]:
    """Return the functions that are given or named: names are those of lists in `PRESETS` or of single passes.

    Raises:
        CompilationError: there is no preset and no pass of that name.
    """
    return tuple(_named(transform) if isinstance(transform, str) else transform for transform in transforms)


def apply(transforms: Sequence[Transform], model: onnx.ModelProto) -> None:
    """Change `model` by all `transforms`, and update its inputs and number of nodes in its metadata.

    Raises:
        CompilationError: afterwards it has other outputs, or new inputs.
    """
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    inputs = dict(zip([value.name for value in model.graph.input], metadata[INPUTS_KEY].split(), strict=True))
    outputs = [value.name for value in model.graph.output]
    for transform in transforms:
        transform(model)
    remaining = [value.name for value in model.graph.input]
    if [value.name for value in model.graph.output] != outputs or not set(remaining) <= set(inputs):
        raise CompilationError(
            "a transform changed the inputs or outputs of a model",
            "transforms of pre_ort_model_transforms keep their names and order, and may remove inputs",
        )
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    metadata[INPUTS_KEY] = " ".join(inputs[name] for name in remaining)
    metadata[NUM_NODES_KEY] = str(len(model.graph.node))
    onnx.helper.set_model_props(model, metadata)


def _named(name: str) -> Transform:
    from onnxtool.optimize import presets
    from onnxtool.optimize.pipeline import Context, run_passes

    passes = {step.name: step for steps in presets.PRESETS.values() for step in steps}
    names = PRESETS.get(name, (name,))
    if not set(names) <= set(passes):
        raise CompilationError(
            f"unknown transform {name!r}", f"use one of {', '.join((*PRESETS, *passes))}, or pass a function"
        )

    def transform(proto: onnx.ModelProto) -> None:
        steps = [passes[step] for step in names]
        model, _ = run_passes(ir.from_proto(proto), steps, Context(provider="cpu"))
        proto.CopyFrom(ir.to_proto(model))

    return transform
