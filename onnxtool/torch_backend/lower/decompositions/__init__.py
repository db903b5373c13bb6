"""Decompositions of our own: what the translation of torch.onnx lacks, in operators that it has.

A rule takes the arguments of its operator. What it returns NotImplemented for is left to the translation, or stays in
PyTorch. A rule is as right as the operator for NaN, infinities and empty tensors, and needs no more memory than a few
times its arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._decomp.decompositions import im2col

from onnxtool.torch_backend.lower.decompositions import average_pooling as averages
from onnxtool.torch_backend.lower.decompositions import (
    bessel_functions,
    elementwise,
    gamma_functions,
    products,
    scatters,
)
from onnxtool.torch_backend.lower.decompositions import cumulative as scans
from onnxtool.torch_backend.lower.decompositions import max_pooling as maxima
from onnxtool.torch_backend.lower.decompositions import order_statistics as orders
from onnxtool.torch_backend.lower.decompositions import replication_padding as borders
from onnxtool.torch_backend.lower.decompositions import zero_dimensional as scalars

aten, prims = torch.ops.aten, torch.ops.prims

RULES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    # writes by index
    aten.index_put.default: scatters.index_put,  # its translation races
    aten._unsafe_index_put.default: scatters.index_put,
    aten.diagonal_scatter.default: scatters.diagonal_scatter,  # its decomposition changes a tensor in place
    aten.index_reduce.default: scatters.index_reduce,
    aten.scatter_reduce.two: scatters.scatter_reduce,
    aten.scatter.src: scatters.scatter,
    aten.put.default: scatters.put,
    aten.as_strided_scatter.default: scatters.as_strided_scatter,
    aten.masked_scatter_backward.default: scatters.masked_scatter_backward,
    # pools
    aten.avg_pool2d.default: partial(averages.average_pool, rank=2),
    aten.avg_pool3d.default: partial(averages.average_pool, rank=3),
    aten.avg_pool2d_backward.default: partial(averages.average_pool_backward, rank=2),
    aten.avg_pool3d_backward.default: partial(averages.average_pool_backward, rank=3),
    aten._adaptive_avg_pool3d.default: averages.adaptive_average_pool,
    aten._adaptive_avg_pool2d_backward.default: partial(averages.adaptive_average_pool_backward, rank=2),
    aten._adaptive_avg_pool3d_backward.default: partial(averages.adaptive_average_pool_backward, rank=3),
    aten.adaptive_max_pool2d.default: maxima.adaptive_max_pool,
    aten.adaptive_max_pool3d.default: maxima.adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: partial(maxima.max_pool_backward, rank=2),
    aten.adaptive_max_pool3d_backward.default: partial(maxima.max_pool_backward, rank=3),
    aten.max_pool3d_with_indices_backward.default: maxima.max_pool3d_backward,
    # borders and windows
    aten.im2col.default: im2col,  # its translation does not take an empty tensor
    aten.replication_pad1d.default: borders.replication_pad,
    aten.replication_pad2d.default: borders.replication_pad,
    aten.replication_pad3d.default: borders.replication_pad,
    aten.replication_pad1d_backward.default: borders.replication_pad_backward,
    aten.replication_pad2d_backward.default: borders.replication_pad_backward,
    aten.replication_pad3d_backward.default: borders.replication_pad_backward,
    # order
    aten.kthvalue.default: orders.kth_value,
    aten.median.default: orders.median_of_all,
    aten.median.dim: orders.median,
    aten.nanmedian.default: orders.nan_median_of_all,
    aten.nanmedian.dim: orders.nan_median,
    aten.cummax.default: scans.running_maximum,
    aten.cummin.default: scans.running_minimum,
    aten.max.dim: orders.maximum_of_truths,
    aten.searchsorted.Tensor: orders.search_sorted,
    aten.bucketize.Tensor: orders.bucketize,
    # tensors without dimensions
    aten.amax.default: partial(scalars.over_extremes, reduce=aten.amax.default),
    aten.amin.default: partial(scalars.over_extremes, reduce=aten.amin.default),
    aten.any.dim: scalars.any_or_all,
    aten.all.dim: scalars.any_or_all,
    aten.mean.dim: scalars.mean,
    aten.t.default: scalars.transpose,
    aten.repeat.default: scalars.repeat,
    prims.view_of.default: scalars.same,
    # functions
    aten.lgamma.default: gamma_functions.log_gamma,
    aten.digamma.default: gamma_functions.digamma,
    aten.polygamma.default: gamma_functions.polygamma,
    aten.i0.default: bessel_functions.i0,
    aten.special_i0e.default: bessel_functions.scaled_i0,
    aten.special_i1.default: bessel_functions.i1,
    aten.special_i1e.default: bessel_functions.scaled_i1,
    aten.special_modified_bessel_i0.default: bessel_functions.i0,
    aten.special_modified_bessel_i1.default: bessel_functions.i1,
    aten.special_spherical_bessel_j0.default: elementwise.spherical_bessel_j0,
    aten.clamp_min.default: elementwise.at_least,
    aten.clamp_max.default: elementwise.at_most,
    aten.relu.default: elementwise.relu,
    aten.fmax.default: elementwise.larger_number,
    aten.fmin.default: elementwise.smaller_number,
    aten.hypot.default: elementwise.hypotenuse,
    # products
    prims.prod.default: products.product,
    aten.cumprod.default: scans.running_product,
    aten._trilinear.default: products.trilinear,
}
