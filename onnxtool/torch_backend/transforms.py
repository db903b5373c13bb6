"""Ready-made changes of a model before its session is made: the passes of `onnxtool optimize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnxtool.errors import CompilationError

if TYPE_CHECKING:
    import onnx

    from onnxtool.optimize.pipeline import Pass
    from onnxtool.torch_backend.options import Transform


def resolve_transforms(transforms: Sequence[Transform | str]) -> tuple[Transform, ...]:
    """Return functions for what the user gave: functions, and names of providers' presets or of single passes.

    Raises:
        CompilationError: there is no preset and no pass of that name.
    """
    return tuple(_named(transform) if isinstance(transform, str) else transform for transform in transforms)


def _named(name: str) -> Transform:
    from onnxtool.optimize.presets import PRESETS

    passes = {step.name: step for steps in PRESETS.values() for step in steps}
    if name in PRESETS:
        return passes_as_transform(PRESETS[name], name)
    if name in passes:
        return passes_as_transform((passes[name],), "cpu")
    raise CompilationError(
        f"unknown transform {name!r}", f"use one of {', '.join((*PRESETS, *passes))}, or pass a function"
    )


def passes_as_transform(passes: Sequence[Pass], provider: str) -> Transform:
    """Return a function that runs `passes` on a model in place."""

    def transform(proto: onnx.ModelProto) -> None:
        import onnx_ir as ir

        from onnxtool.optimize.pipeline import Context, run_passes

        model, _ = run_passes(ir.from_proto(proto), passes, Context(provider=provider), lambda _stage: None)
        proto.CopyFrom(ir.to_proto(model))

    return transform
