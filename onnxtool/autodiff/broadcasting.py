"""Undo broadcasting: sum a gradient over the axes along which a value was repeated."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtool.autodiff.builder import Builder, Dimension, Tensor


def sum_to(build: Builder, gradient: Tensor, *, of: Tensor, to: Tensor) -> Tensor:
    """Sum `gradient`, which has the shape of `of`, down to the shape of `to`, which broadcasts to it.

    If the shapes show which axes were repeated, this is one ReduceSum over them, or nothing; otherwise the axes are
    computed at run time.
    """
    if of.value is to.value:
        return gradient
    axes = repeated_axes(of.shape, to.shape)
    if axes is None or of.shape is None or to.shape is None:
        return sum_at_run_time(build, gradient, of=of.size(), to=to.size())
    added = len(of.shape) - len(to.shape)
    if set(axes) == set(range(added)):
        return gradient.sum(axes, keepdims=False)
    summed = gradient.sum(axes)
    return summed if added == 0 else build.op("Squeeze", summed, build.axes(range(added)))


def repeated_axes(of: Sequence[Dimension] | None, to: Sequence[Dimension] | None) -> list[int] | None:
    """Return the axes of `of` along which `to` was repeated; None if the shapes do not show it."""
    if of is None or to is None:
        return None
    added = len(of) - len(to)
    axes = list(range(added))
    for axis, (whole, part) in enumerate(zip(of[added:], to, strict=True), added):
        if part == 1 and whole != 1:
            axes.append(axis)
        elif not (isinstance(part, int) or (part is not None and part == whole)):
            return None  # a dynamic size that may be 1 at run time
    return axes


def sum_at_run_time(build: Builder, gradient: Tensor, *, of: Tensor, to: Tensor) -> Tensor:
    """Sum a gradient of shape `of` down to shape `to`; both are int64 [rank] and computed by the graph."""
    added = build.op("Sub", build.op("Size", of), build.op("Size", to)).reshape([1])
    aligned = build.concat(build.axes([1]).expand(added), to)
    repeated = build.op("Not", aligned.equals(of))
    axes = build.op("Squeeze", build.op("NonZero", repeated), build.axes([0]))
    return build.op("ReduceSum", gradient, axes, keepdims=1, noop_with_empty_axes=1).reshape(to)
