"""Gradients of convolutions, pooling and resizing.

Letters: N samples, C channels, M output channels, G groups, X* the axes of the picture, K* those of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule
from onnxtool.autodiff.rules.scatter import add_rows


@dataclass(frozen=True)
class Window:
    """How a kernel moves over a picture, one number an axis.

    Attributes:
        before: zeros in front of the picture.
        after: zeros behind it.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, n: Backward, kernel: list[int]) -> Window:
        """Read the attributes of a node.

        Raises:
            Refusal: the padding follows from sizes that are not fixed.
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
    def reach(self) -> list[int]:
        """How many elements the kernel reaches over."""
        return [step * (size - 1) + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]


def _same_pads(n: Backward, auto: str, kernel: list[int], strides: list[int], dilations: list[int]) -> list[int]:
    before, after = [], []
    for size, width, stride, dilation in zip(n.sizes(0, 2), kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + dilation * (width - 1) + 1 - size)
        smaller, larger = total // 2, total - total // 2
        before.append(smaller if auto == "SAME_UPPER" else larger)
        after.append(larger if auto == "SAME_UPPER" else smaller)
    return [*before, *after]


def _spread(n: Backward, dy: Tensor, kernel: Tensor, window: Window, picture: Tensor, group: int) -> Tensor:
    """Add the kernel at each place that it stood at, times the gradient there; the result is as large as `picture`."""
    sizes = picture.shape[2:] if picture.shape is not None else ()
    strides, dilations = window.strides, window.dilations
    if all(isinstance(size, int) for size in sizes) or all(stride == 1 for stride in strides):
        rest = [
            (size + before + after - reach) % stride if isinstance(size, int) else 0
            for size, before, after, reach, stride in zip(
                sizes, window.before, window.after, window.reach, strides, strict=True
            )
        ]
        return n.build.op(
            "ConvTranspose", dy, kernel, strides=strides, dilations=dilations, group=group,
            pads=[*window.before, *window.after], output_padding=rest,
        )  # fmt: skip
    return _spread_and_cut(n, dy, kernel, window, group)


def _spread_and_cut(n: Backward, dy: Tensor, kernel: Tensor, window: Window, group: int = 1) -> Tensor:
    """Do so where it is known when the graph runs how much of the end no kernel reached, or reached over."""
    build, rank = n.build, len(window.kernel) + 2
    full = build.op("ConvTranspose", dy, kernel, strides=window.strides, dilations=window.dilations, group=group)
    before = build.axes([-pad for pad in window.before])
    after = n.x(0).size().slice(2, rank) - full.size().slice(2, rank) - before
    return build.op("Pad", full, build.concat([0, 0], before, [0, 0], after))


def _conv_picture(n: Backward) -> Tensor:
    window = Window.of(n, n.sizes(1, 2))
    return _spread(n, n.dy, n.x(1), window, n.x(0), n.attribute("group", 1))


def _conv_kernel(n: Backward) -> Tensor:
    return kernel_gradient(n, n.x(0), n.dy, Window.of(n, n.sizes(1, 2)))


def kernel_gradient(n: Backward, picture: Tensor, dy: Tensor, window: Window) -> Tensor:
    """Convolve the picture with the gradient: samples become what is summed over, and strides become dilations.

    Args:
        n: the node, whose second input is the kernel, [M, C/G, K*].
        picture: [N, C, X*].
        dy: [N, M, Y*].
        window: how the kernel moved.
    """
    build, group, axes = n.build, n.attribute("group", 1), range(len(window.kernel))
    further = [axis + 2 for axis in axes]
    kernel = dy.transpose([1, 0, *further])
    if group == 1:
        samples = picture.transpose([1, 0, *further])
    else:
        size = picture.size()
        rest = size.slice(2, len(further) + 2)
        groups = picture.reshape(build.concat(size.slice(0, 1), [group, -1], rest))
        samples = groups.transpose([2, 1, 0, *(axis + 1 for axis in further)])
        samples = samples.reshape(build.concat([0, -1], rest))  # [C/G, G N, X*]
    result = build.op(
        "Conv", samples, kernel, strides=window.dilations, dilations=window.strides,
        pads=[*window.before, *window.after], group=group,
    )  # fmt: skip
    # What the kernel did not reach at the end gives a few elements more.
    if any(stride > 1 for stride in window.strides):
        bounds = [build.axes(numbers) for numbers in ([0 for _ in axes], window.kernel, further)]
        result = build.op("Slice", result, *bounds)
    return result.transpose([1, 0, *further])


def _conv_bias(n: Backward) -> Tensor:
    return n.dy.sum([0, *range(2, len(n.shape()))], keepdims=False)


def _transposed_window(n: Backward) -> Window:
    window = Window.of(n, n.sizes(1, 2))
    if n.attribute("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in n.node.attributes:
        raise Refusal("its padding follows from the shape of the output")
    return window


def _conv_transpose_picture(n: Backward) -> Tensor:
    window = _transposed_window(n)
    return n.build.op(
        "Conv", n.dy, n.x(1), strides=window.strides, dilations=window.dilations,
        pads=[*window.before, *window.after], group=n.attribute("group", 1),
    )  # fmt: skip


def _conv_transpose_kernel(n: Backward) -> Tensor:
    # The roles are swapped: the output is the picture that a convolution with this kernel would look at.
    return kernel_gradient(n, n.dy, n.x(0), _transposed_window(n))


def _max_pool(n: Backward) -> Tensor:
    if n.attribute("storage_order", 0):
        raise Refusal("its indices count columns first")
    flat = n.build.op("Size", n.x(0)).reshape([1])
    added = add_rows(n.build, n.dy.reshape([-1]), n.y(1).reshape([-1]), shape=flat, rank=1)
    return added.reshape(n.x(0).size())


def _average_pool(n: Backward) -> Tensor:
    """Spread each average over its window; channels are taken for samples, so that one kernel serves all."""
    kernel = n.attribute("kernel_shape", [1])
    window = Window.of(n, kernel)
    build, rank, dtype = n.build, len(kernel) + 2, n.dy.dtype
    size = n.x(0).size()
    picture = build.zeros(build.concat([1, 1], size.slice(2, rank)), dtype)
    shape, over_end = n.x(0).shape, bool(n.attribute("ceil_mode", 0))
    if shape is not None and not over_end:
        import onnx_ir as ir

        picture.value.shape = ir.Shape([1, 1, *shape[2:]])
    ones = build.constant(1.0, dtype).expand([1, 1, *kernel])
    include = bool(n.attribute("count_include_pad", 0))
    if over_end:
        shares = n.dy / _counts_over_end(n, picture + 1.0, ones, window, include=include)
    elif include or not any((*window.before, *window.after)):
        shares = n.dy / float(_product(kernel))
    else:
        counts = build.op(
            "Conv", picture + 1.0, ones, strides=window.strides, dilations=window.dilations,
            pads=[*window.before, *window.after],
        )  # fmt: skip
        shares = n.dy / counts
    single = shares.reshape(build.concat([-1, 1], n.y().size().slice(2, rank)))
    if over_end:
        return _spread_and_cut(n, single, ones, window).reshape(size)
    return _spread(n, single, ones, window, picture, 1).reshape(size)


def _counts_over_end(n: Backward, ones: Tensor, kernel: Tensor, window: Window, *, include: bool) -> Tensor:
    """Return how many numbers each average is of, where windows may reach over the end (ceil_mode).

    What lies beyond the padding counts in no case: PyTorch, AvgPool2d.
    """
    build, axes = n.build, len(window.kernel)
    value = build.constant(1.0 if include else 0.0, ones.dtype)
    padded = build.op("Pad", ones, build.axes([0, 0, *window.before, 0, 0, *window.after]), value)
    strides, reach = build.axes(window.strides), build.axes(window.reach)
    needed = (n.y().size().slice(2, axes + 2) - build.axes([1] * axes)) * strides + reach
    beyond = needed - padded.size().slice(2, axes + 2)
    whole = build.op("Pad", padded, build.concat([0, 0], [0] * axes, [0, 0], beyond))
    return build.op("Conv", whole, kernel, strides=window.strides, dilations=window.dilations)


def _product(numbers: list[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _global_average_pool(n: Backward) -> Tensor:
    size = n.x(0).size()
    count = n.build.op("ReduceProd", size.slice(2, len(n.shape())), keepdims=1).cast(n.dy.dtype)
    return (n.dy / count).expand(size)


def _global_max_pool(n: Backward) -> Tensor:
    hits = n.x(0).equals(n.y()).cast(n.dy.dtype)
    return hits * (n.dy / hits.sum(range(2, len(n.shape()))))


CONV: dict[str, Rule] = {
    "AveragePool": rule(_average_pool),
    "Conv": rule(_conv_picture, _conv_kernel, _conv_bias),
    "ConvTranspose": rule(_conv_transpose_picture, _conv_transpose_kernel, _conv_bias),
    "GlobalAveragePool": rule(_global_average_pool),
    "GlobalMaxPool": rule(_global_max_pool),
    "MaxPool": Rule((_max_pool,), num_outputs=2),
}
