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
    from onnxtool.optimize.pipeline import Pass


PRESETS: dict[str, tuple[str, ...]] = {
    "tidy": ("fold_constants", "common_subexpressions", "onnxoptimizer_cleanup", "deduplicate_initializers"),
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
    places = {entry.key: entry.value for entry in model.metadata_props}[INPUTS_KEY].split()
    inputs = dict(zip([value.name for value in model.graph.input], places, strict=True))
    outputs = [value.name for value in model.graph.output]
    for transform in transforms:
        transform(model)
    if [value.name for value in model.graph.output] != outputs or not {v.name for v in model.graph.input} <= set(
        inputs
    ):
        raise CompilationError(
            "a transform changed the inputs or outputs of a model",
            "transforms of pre_ort_model_transforms keep their names and order, and may remove inputs",
        )
    for index in reversed(range(len(model.metadata_props))):
        if model.metadata_props[index].key in (INPUTS_KEY, NUM_NODES_KEY):
            del model.metadata_props[index]
    model.metadata_props.add(key=INPUTS_KEY, value=" ".join(inputs[value.name] for value in model.graph.input))
    model.metadata_props.add(key=NUM_NODES_KEY, value=str(len(model.graph.node)))


def _named(name: str) -> Transform:
    from onnxtool.optimize import presets

    passes = {step.name: step for steps in presets.PRESETS.values() for step in steps}
    names = PRESETS.get(name, (name,))
    if not set(names) <= set(passes):
        raise CompilationError(
            f"unknown transform {name!r}", f"use one of {', '.join((*PRESETS, *passes))}, or pass a function"
        )
    return passes_as_transform([passes[one] for one in names], "cpu")


def passes_as_transform(passes: Sequence[Pass], provider: str) -> Transform:
    """Return a function that runs `passes` on a model in place."""

    def transform(proto: onnx.ModelProto) -> None:
        from onnxtool.optimize.pipeline import Context, run_passes

        model, _ = run_passes(ir.from_proto(proto), passes, Context(provider=provider), lambda _stage: None)
        proto.CopyFrom(ir.to_proto(model))

    return transform
