"""Gradients of convolutions, pooling and Resize.

Letters: N samples, C channels, M output channels, G groups, X* the spatial axes, K* the kernel's axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.nn import bias_gradient
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule
from onnxtool.autodiff.rules.tensor import add_rows


@dataclass(frozen=True)
class KernelWindow:
    """The attributes of a kernel window, with one number per spatial axis.

    Attributes:
        before: padding before the input.
        after: padding after the input.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, n: Backward, kernel: list[int]) -> KernelWindow:
        """Read the window attributes of a node.

        Raises:
            Refusal: the padding depends on sizes that are not fixed.
        """
        ones = [1] * len(kernel)
        strides, dilations = n.attribute("strides", ones), n.attribute("dilations", ones)
        pads = n.attribute("pads", [0] * 2 * len(kernel))
        auto = n.attribute("auto_pad", "NOTSET")
        if auto.startswith("SAME"):
            pads = _same_pads(n, auto, kernel, strides, dilations)
        elif auto == "VALID":
            pads = [0] * 2 * len(kernel)
        return cls(kernel, strides, dilations, pads[: len(kernel)], pads[len(kernel) :])

    @property
    def extent(self) -> list[int]:
        """The sizes of the dilated kernel."""
        return [step * (size - 1) + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]


def _same_pads(n: Backward, auto: str, kernel: list[int], strides: list[int], dilations: list[int]) -> list[int]:
    before, after = [], []
    for size, width, stride, dilation in zip(n.sizes(0, 2), kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + dilation * (width - 1) + 1 - size)
        smaller, larger = total // 2, total - total // 2
        before.append(smaller if auto == "SAME_UPPER" else larger)
        after.append(larger if auto == "SAME_UPPER" else smaller)
    return [*before, *after]


def _conv_transpose(n: Backward, dy: Tensor, kernel: Tensor, window: KernelWindow, x: Tensor, group: int) -> Tensor:
    """Return the transposed convolution of `dy`, with the spatial sizes of `x`."""
    sizes = x.shape[2:] if x.shape is not None else ()
    strides, dilations = window.strides, window.dilations
    if all(isinstance(size, int) for size in sizes) or all(stride == 1 for stride in strides):
        output_padding = [
            (size + before + after - extent) % stride if isinstance(size, int) else 0
            for size, before, after, extent, stride in zip(
                sizes, window.before, window.after, window.extent, strides, strict=True
            )
        ]
        return n.build.op(
            "ConvTranspose", dy, kernel, strides=strides, dilations=dilations, group=group,
            pads=[*window.before, *window.after], output_padding=output_padding,
        )  # fmt: skip
    return _conv_transpose_and_crop(n, dy, kernel, window, group)


def _conv_transpose_and_crop(n: Backward, dy: Tensor, kernel: Tensor, window: KernelWindow, group: int = 1) -> Tensor:
    """Return the transposed convolution, cropped or padded at run time to the size of the input."""
    build, rank = n.build, len(window.kernel) + 2
    full = build.op("ConvTranspose", dy, kernel, strides=window.strides, dilations=window.dilations, group=group)
    before = build.axes([-pad for pad in window.before])
    after = n.x(0).size().slice(2, rank) - full.size().slice(2, rank) - before
    return build.op("Pad", full, build.concat([0, 0], before, [0, 0], after))


def _conv_input(n: Backward) -> Tensor:
    window = KernelWindow.of(n, n.sizes(1, 2))
    return _conv_transpose(n, n.dy, n.x(1), window, n.x(0), n.attribute("group", 1))


def kernel_gradient(n: Backward, x: Tensor, dy: Tensor, window: KernelWindow) -> Tensor:
    """Convolve the input with the gradient: samples act as channels, and strides as dilations.

    Args:
        n: the node, whose second input is the kernel, [M, C/G, K*].
        x: [N, C, X*].
        dy: [N, M, Y*].
        window: the window of the kernel.
    """
    build, group, axes = n.build, n.attribute("group", 1), range(len(window.kernel))
    further = [axis + 2 for axis in axes]
    kernel = dy.transpose([1, 0, *further])
    if group == 1:
        samples = x.transpose([1, 0, *further])
    else:
        size = x.size()
        spatial = size.slice(2, len(further) + 2)
        groups = x.reshape(build.concat(size.slice(0, 1), [group, -1], spatial))
        samples = groups.transpose([2, 1, 0, *(axis + 1 for axis in further)])
        samples = samples.reshape(build.concat([0, -1], spatial))  # [C/G, G N, X*]
    result = build.op(
        "Conv", samples, kernel, strides=window.dilations, dilations=window.strides,
        pads=[*window.before, *window.after], group=group,
    )  # fmt: skip
    # Trailing elements that the kernel did not reach produce a few extra elements.
    if any(stride > 1 for stride in window.strides):
        bounds = [build.axes(numbers) for numbers in ([0 for _ in axes], window.kernel, further)]
        result = build.op("Slice", result, *bounds)
    return result.transpose([1, 0, *further])


def _transposed_window(n: Backward) -> KernelWindow:
    window = KernelWindow.of(n, n.sizes(1, 2))
    if n.attribute("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in n.node.attributes:
        raise Refusal("its padding depends on the shape of the output")
    return window


def _conv_transpose_input(n: Backward) -> Tensor:
    window = _transposed_window(n)
    return n.build.op(
        "Conv", n.dy, n.x(1), strides=window.strides, dilations=window.dilations,
        pads=[*window.before, *window.after], group=n.attribute("group", 1),
    )  # fmt: skip


def _conv_transpose_kernel(n: Backward) -> Tensor:
    # Roles are swapped: the output is the input of a convolution with this kernel.
    return kernel_gradient(n, n.dy, n.x(0), _transposed_window(n))


def _max_pool(n: Backward) -> Tensor:
    if n.attribute("storage_order", 0):
        raise Refusal("its indices are in column-major order")
    flat = n.build.op("Size", n.x(0)).reshape([1])
    added = add_rows(n.build, n.dy.reshape([-1]), n.y(1).reshape([-1]), shape=flat, rank=1)
    return added.reshape(n.x(0).size())


def _average_pool(n: Backward) -> Tensor:
    """Distribute each gradient over its window; channels become samples, so one kernel serves all of them."""
    kernel = n.attribute("kernel_shape", [1])
    window = KernelWindow.of(n, kernel)
    build, rank, dtype = n.build, len(kernel) + 2, n.dy.dtype
    size = n.x(0).size()
    zeros = build.zeros(build.concat([1, 1], size.slice(2, rank)), dtype)
    shape, over_end = n.x(0).shape, bool(n.attribute("ceil_mode", 0))
    if shape is not None and not over_end:
        zeros.value.shape = ir.Shape([1, 1, *shape[2:]])
    ones = build.constant(1.0, dtype).expand([1, 1, *kernel])
    include = bool(n.attribute("count_include_pad", 0))
    if over_end:
        shares = n.dy / _counts_over_end(n, zeros + 1.0, ones, window, include=include)
    elif include or not any((*window.before, *window.after)):
        shares = n.dy / float(prod(kernel))
    else:
        counts = build.op(
            "Conv", zeros + 1.0, ones, strides=window.strides, dilations=window.dilations,
            pads=[*window.before, *window.after],
        )  # fmt: skip
        shares = n.dy / counts
    single = shares.reshape(build.concat([-1, 1], n.y().size().slice(2, rank)))
    if over_end:
        return _conv_transpose_and_crop(n, single, ones, window).reshape(size)
    return _conv_transpose(n, single, ones, window, zeros, 1).reshape(size)


def _counts_over_end(n: Backward, ones: Tensor, kernel: Tensor, window: KernelWindow, *, include: bool) -> Tensor:
    """Return the number of elements in each average if windows may extend past the end (ceil_mode).

    Elements beyond the padding never count; see PyTorch's AvgPool2d.
    """
    build, axes = n.build, len(window.kernel)
    value = build.constant(1.0 if include else 0.0, ones.dtype)
    padded = build.op("Pad", ones, build.axes([0, 0, *window.before, 0, 0, *window.after]), value)
    strides, extent = build.axes(window.strides), build.axes(window.extent)
    needed = (n.y().size().slice(2, axes + 2) - build.axes([1] * axes)) * strides + extent
    beyond = needed - padded.size().slice(2, axes + 2)
    whole = build.op("Pad", padded, build.concat([0, 0], [0] * axes, [0, 0], beyond))
    return build.op("Conv", whole, kernel, strides=window.strides, dilations=window.dilations)


def _global_average_pool(n: Backward) -> Tensor:
    size = n.x(0).size()
    count = n.build.op("ReduceProd", size.slice(2, len(n.shape())), keepdims=1).cast(n.dy.dtype)
    return (n.dy / count).expand(size)


def _global_max_pool(n: Backward) -> Tensor:
    hits = n.x(0).equals(n.y()).cast(n.dy.dtype)
    return hits * (n.dy / hits.sum(range(2, len(n.shape()))))


# Gradient of Resize: every interpolation is linear and acts on each axis separately, so it is one matrix per axis.
#
# The operator itself computes an axis's matrix from the identity matrix.


_ROI, _SCALES, _SIZES = 1, 2, 3
# Without extrapolation_value, which is a constant added to the interpolated values.
_OF_INTERPOLATION = (
    *("antialias", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "mode", "nearest_mode"),
)


def _resize(n: Backward) -> Tensor:
    if n.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Refusal("its sizes follow from each other (keep_aspect_ratio_policy)")
    rank = len(n.shape())
    axes = [axis % rank for axis in n.attribute("axes", list(range(rank)))]
    crops = n.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    gradient = n.dy
    for place, axis in enumerate(axes):
        if not crops and _stays(n, axis, place):
            continue
        order = [*(other for other in range(rank) if other != axis), axis]
        bounds = n.build.op("Gather", n.x(_ROI), n.build.axes([place, place + len(axes)])) if crops else None
        moved = gradient.transpose(order) @ _matrix(n, axis, place, bounds)
        gradient = moved.transpose([order.index(other) for other in range(rank)])
    return gradient


def _stays(n: Backward, axis: int, place: int) -> bool:
    """Return whether an axis is known to keep its size."""
    scales = n.constant(_SCALES)
    if scales is not None and scales.size:
        return bool(scales[place] == 1)
    before, after = n.shape()[axis], n.y().shape
    return before is not None and after is not None and before == after[axis]


def _matrix(n: Backward, axis: int, place: int, bounds: Tensor | None) -> Tensor:
    """Return the backward matrix of one axis, [size after, size before].

    Args:
        n: the node.
        axis: the axis.
        place: the position of the axis among the axes that have scales or sizes.
        bounds: where the image is cropped along the axis, [2].
    """
    build = n.build
    size = n.x(0).size().slice(axis, axis + 1)
    zero, one = (build.constant(number, size.dtype) for number in (0, 1))
    numbers = build.op("Range", zero, size.reshape([]), one)
    unit = numbers.reshape([-1, 1]).equals(numbers.reshape([1, -1])).cast(n.dy.dtype)
    # Each row is a sample, and the axis is the width: onnxruntime does not interpolate samples and channels.
    image = unit.reshape(build.concat(size, [1, 1], size))
    roi = None
    if bounds is not None:
        whole = [build.constant([number] * 3, bounds.dtype) for number in (0.0, 1.0)]
        roi = build.op("Concat", whole[0], bounds.slice(0, 1), whole[1], bounds.slice(1, 2), axis=0)
    attributes = {name: n.node.attributes[name].value for name in _OF_INTERPOLATION if name in n.node.attributes}
    if n.has(_SIZES):
        sizes = build.concat(size, [1, 1], n.x(_SIZES).slice(place, place + 1))
        resized = build.op("Resize", image, roi, None, sizes, **attributes)
    else:
        scales = n.x(_SCALES)
        kept = build.constant([1.0] * 3, scales.dtype)
        factors = build.op("Concat", kept, scales.slice(place, place + 1), axis=0)
        resized = build.op("Resize", image, roi, factors, **attributes)
    return resized.reshape(build.concat(size, [-1])).transpose([1, 0])


CONV: dict[str, Rule] = {
    "AveragePool": rule(_average_pool),
    "Conv": rule(
        _conv_input, lambda n: kernel_gradient(n, n.x(0), n.dy, KernelWindow.of(n, n.sizes(1, 2))), bias_gradient
    ),
    "ConvTranspose": rule(_conv_transpose_input, _conv_transpose_kernel, bias_gradient),
    "GlobalAveragePool": rule(_global_average_pool),
    "GlobalMaxPool": rule(_global_max_pool),
    "MaxPool": Rule((_max_pool,), num_outputs=2),
    "Resize": rule(_resize),
}
