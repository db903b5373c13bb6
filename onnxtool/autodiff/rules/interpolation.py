"""Gradient of Resize: every interpolation is linear and works on each axis separately, so it is one matrix per axis.

The operator computes the matrix of an axis from the identity matrix.
"""

from __future__ import annotations

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule

_SCALES, _SIZES = 2, 3
_OF_INTERPOLATION = (
    *("antialias", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "extrapolation_value"),
    *("mode", "nearest_mode"),
)


def _resize(n: Backward) -> Tensor:
    if n.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise Refusal("it crops")
    if "axes" in n.node.attributes or n.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Refusal("its sizes are given for some axes only, or follow from each other")
    rank = len(n.shape())
    gradient = n.dy
    for axis in range(rank):
        if _stays(n, axis):
            continue
        if axis < 2:
            raise Refusal(f"samples or channels (axis {axis}) may be resized")
        order = [*(place for place in range(rank) if place != axis), axis]
        moved = gradient.transpose(order) @ _matrix(n, axis, rank)
        gradient = moved.transpose([order.index(place) for place in range(rank)])
    return gradient


def _stays(n: Backward, axis: int) -> bool:
    """Return whether an axis is known to keep its size."""
    scales = n.constant(_SCALES)
    if scales is not None and scales.size:
        return bool(scales[axis] == 1)
    before, after = n.shape()[axis], n.y().shape
    return before is not None and after is not None and before == after[axis]


def _matrix(n: Backward, axis: int, rank: int) -> Tensor:
    """Return the matrix of one axis for the backward pass, [size after, size before]."""
    build = n.build
    size = n.x(0).size().slice(axis, axis + 1)
    zero, one = (build.constant(number, size.dtype) for number in (0, 1))
    places = build.op("Range", zero, size.reshape([]), one)
    unit = places.reshape([-1, 1]).equals(places.reshape([1, -1])).cast(n.dy.dtype)
    # Each row is a sample, so that the input of Resize has the rank that the node expects.
    shape = [size if place in (0, axis) else build.axes([1]) for place in range(rank)]
    attributes = {name: n.node.attributes[name].value for name in _OF_INTERPOLATION if name in n.node.attributes}
    image = unit.reshape(build.concat(*shape))
    if n.has(_SIZES):
        shape[axis] = n.x(_SIZES).slice(axis, axis + 1)
        resized = build.op("Resize", image, None, None, build.concat(*shape), **attributes)
    else:
        scales = n.x(_SCALES)
        parts = [scales.slice(place, place + 1) if place == axis else build.constant([1.0], scales.dtype)
                 for place in range(rank)]  # fmt: skip
        resized = build.op("Resize", image, None, build.op("Concat", *parts, axis=0), **attributes)
    return resized.reshape(build.concat(size, [-1])).transpose([1, 0])


INTERPOLATION: dict[str, Rule] = {"Resize": rule(_resize)}
