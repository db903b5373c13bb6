"""Cases of convolutions and pooling."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch.nn.functional import (
    avg_pool1d,
    avg_pool2d,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose2d,
    grid_sample,
    interpolate,
    max_pool1d,
    max_pool2d,
    pad,
)

from tests.autodiff.cases.case import Case, inside, integers, normal

_PADS = [1, 2, 1, 2]

CONV = (
    Case("Conv", (normal(2, 3, 5, 6), normal(4, 3, 3, 2), normal(4)), conv2d, weights=(1,)),
    Case(
        "Conv",
        (normal(2, 3, 5, 6), normal(4, 3, 3, 3)),
        lambda x, w: conv2d(x, w, padding=(1, 2)),
        {"pads": _PADS},
        note="padded",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 6, 7), normal(4, 3, 3, 3)),
        lambda x, w: conv2d(x, w, stride=2, padding=1),
        {"strides": [2, 2], "pads": [1] * 4},
        note="strided",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 8, 9), normal(4, 3, 2, 3)),
        lambda x, w: conv2d(x, w, stride=(3, 2), dilation=(2, 1)),
        {"strides": [3, 2], "dilations": [2, 1]},
        note="dilated",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 4, 5, 5), normal(6, 2, 3, 3), normal(6)),
        lambda x, w, b: conv2d(x, w, b, stride=2, padding=1, groups=2),
        {"strides": [2, 2], "pads": [1] * 4, "group": 2},
        note="in groups",
        reference=False,
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 5, 5), normal(3, 1, 3, 3)),
        lambda x, w: conv2d(x, w, padding=1, groups=3),
        {"pads": [1] * 4, "group": 3},
        note="by channel",
        reference=False,
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 5, 6), normal(4, 3, 2, 2)),
        lambda x, w: conv2d(pad(x, (0, 1, 0, 1)), w),
        {"auto_pad": "SAME_UPPER"},
        fixed=True,
        note="of the same size",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 5, 6), normal(4, 3, 2, 2)),
        lambda x, w: conv2d(pad(x, (1, 0, 1, 0)), w),
        {"auto_pad": "SAME_LOWER"},
        fixed=True,
        note="of the same size from below",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 5, 6), normal(4, 3, 2, 2)),
        conv2d,
        {"auto_pad": "VALID"},
        note="without padding",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 5, 6), normal(4, 3, 2, 2)),
        lambda x, w: conv2d(pad(x, (0, 1, 2, 0)), w, stride=2),
        {"pads": [2, 0, 0, 1], "strides": [2, 2]},
        note="padded on one side",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(2, 3, 7), normal(4, 3, 3), normal(4)),
        lambda x, w, b: conv1d(x, w, b, stride=2),
        {"strides": [2]},
        note="of a line",
        weights=(1,),
    ),
    Case(
        "Conv",
        (normal(1, 2, 4, 4, 4), normal(3, 2, 2, 2, 2)),
        lambda x, w: conv3d(x, w, stride=2, padding=1),
        {"strides": [2] * 3, "pads": [1] * 6},
        note="of a volume",
        weights=(1,),
    ),
    Case("ConvTranspose", (normal(2, 3, 4, 5), normal(3, 2, 3, 2), normal(2)), conv_transpose2d, weights=(1,)),
    Case(
        "ConvTranspose",
        (normal(2, 4, 4, 5), normal(4, 1, 3, 3), normal(2)),
        lambda x, w, b: conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
        {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1], "group": 2},
        note="in groups",
        reference=False,
        weights=(1,),
    ),
    Case(
        "ConvTranspose",
        (normal(1, 2, 3, 3), normal(2, 3, 2, 2)),
        lambda x, w: conv_transpose2d(x, w, stride=3, dilation=2),
        {"strides": [3, 3], "dilations": [2, 2]},
        note="dilated",
        weights=(1,),
    ),
    Case("MaxPool", (normal(2, 3, 6, 6),), lambda x: max_pool2d(x, 2), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case(
        "MaxPool",
        (normal(2, 3, 5, 6),),
        lambda x: max_pool2d(x, 3, 2, 1),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4},
        note="overlapping",
    ),
    Case(
        "MaxPool",
        (normal(2, 3, 6, 7),),
        lambda x: max_pool2d(x, 2, 2, dilation=2, ceil_mode=True),
        {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 2], "ceil_mode": 1},
        note="over the end",
    ),
    Case(
        "MaxPool",
        (normal(2, 3, 7),),
        lambda x: max_pool1d(x, 3, 1),
        {"kernel_shape": [3]},
        note="of a line",
        reference=False,
    ),
    Case("AveragePool", (normal(2, 3, 6, 6),), lambda x: avg_pool2d(x, 2), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case(
        "AveragePool",
        (normal(2, 3, 5, 6),),
        lambda x: avg_pool2d(x, 3, 2, 1),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4, "count_include_pad": 1},
        note="with padding",
    ),
    Case(
        "AveragePool",
        (normal(2, 3, 5, 6),),
        lambda x: avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4},
        note="without padding",
    ),
    *(
        Case(
            "AveragePool",
            (normal(2, 3, 5, 6),),
            lambda x, include=include: avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=include),
            {
                "kernel_shape": [3, 3],
                "strides": [2, 2],
                "pads": [1] * 4,
                "ceil_mode": 1,
                "count_include_pad": int(include),
            },
            note=f"over the end {'with' if include else 'without'} padding",
            reference=False,
        )
        for include in (False, True)
    ),
    Case(
        "AveragePool",
        (normal(2, 3, 8),),
        lambda x: avg_pool1d(x, 3, 2, ceil_mode=True),
        {"kernel_shape": [3], "strides": [2], "ceil_mode": 1},
        note="of a line over the end",
        reference=False,
    ),
    Case("GlobalAveragePool", (normal(2, 3, 4, 5),), lambda x: x.mean((2, 3), keepdim=True)),
    Case("GlobalMaxPool", (normal(2, 3, 4, 5),), lambda x: x.amax((2, 3), keepdim=True)),
    Case(
        "Resize",
        (normal(1, 2, 3, 4), None, np.array([1, 1, 2, 3], np.float32)),
        lambda x, *_: interpolate(x, scale_factor=(2, 3)),
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        note="nearest",
    ),
    Case(
        "Resize",
        (normal(1, 2, 3, 4), None, np.array([1, 1, 2, 1.5], np.float32)),
        lambda x, *_: interpolate(x, scale_factor=(2, 1.5), mode="bilinear"),
        {"mode": "linear"},
        note="linear",
    ),
    Case(
        "Resize",
        (normal(1, 2, 3, 4), None, None, integers(1, 2, 7, 3)),
        lambda x, *_: interpolate(x, size=(7, 3), mode="bilinear", align_corners=True),
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        note="to sizes",
    ),
    Case(
        "Resize",
        (normal(1, 2, 4, 4), None, np.array([1, 1, 2, 2], np.float32)),
        lambda x, *_: interpolate(x, scale_factor=2, mode="bicubic"),
        {"mode": "cubic", "cubic_coeff_a": -0.75},
        note="cubic",
    ),
    Case(
        "Resize",
        (normal(2, 3, 4), None, np.array([2, 1.5], np.float32)),
        lambda x, *_: interpolate(x[None], scale_factor=(1.5, 2), mode="bilinear")[0],
        {"mode": "linear", "axes": [2, 1]},
        note="of some axes",
    ),
    *(
        Case(
            "GridSample",
            (normal(2, 3, *sizes), 1.5 * inside(2, *sizes[::-1], len(sizes))),
            partial(grid_sample, mode=mode, padding_mode=padding, align_corners=aligned),
            {
                "mode": mode.replace("bi", ""),
                "padding_mode": padding,
                "align_corners": int(aligned),
            },
            note=f"{mode} {padding} {len(sizes)}",
            reference=False,  # it computes in float32
        )
        for mode, padding, aligned, sizes in (
            ("bilinear", "zeros", False, (4, 5)),
            ("bilinear", "border", True, (4, 5)),
            ("bilinear", "reflection", False, (3, 4, 5)),
            ("bilinear", "reflection", True, (4, 5)),
            ("nearest", "zeros", False, (4, 5)),
        )
    ),
)
