"""Cases of products of matrices, activations along an axis, normalizations, dropout and losses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from tests.autodiff.cases.case import Case, integers, normal, positive

_LABELS = integers(0, 4, 2, 4)
_SOME_LABELS = integers(0, -100, 2, 4)
_PICTURE_LABELS = integers([[0, 1], [2, 255]], [[2, 2], [255, 0]])


def _layer_norm(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.layer_norm(x, scale.shape, scale, bias)


def _rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, scale.shape, scale, 1e-5)


def _batch_norm(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    # PyTorch's own has no gradient with respect to mean and variance.
    mean, variance, scale, bias = (one.reshape(-1, *[1] * (x.ndim - 2)) for one in (mean, variance, scale, bias))
    return (x - mean) / torch.sqrt(variance + 1e-5) * scale + bias


def _batch_norm_training(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    return functional.batch_norm(x, mean.clone(), variance.clone(), scale, bias, training=True)


def _gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return 0.5 * (a.T @ b.T) + 2 * c


def _cross_entropy(reduction: str = "mean", ignore_index: int = -100) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return functional.cross_entropy(x, labels, weight, reduction=reduction, ignore_index=ignore_index)

    return function


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    (first, second), cos, sin = x.chunk(2, -1), cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


_MATRICES = (
    ("two matrices", (2, 3), (3, 4)),
    ("a batch and a matrix", (5, 2, 3), (3, 4)),
    ("two batches", (5, 2, 3), (5, 3, 4)),
    ("a matrix and a batch", (2, 3), (5, 3, 4)),
    ("repeated batches", (1, 5, 2, 3), (4, 1, 3, 2)),
    ("a batch of one", (1, 2, 3), (5, 3, 2)),
    ("a vector and a matrix", (3,), (3, 4)),
    ("a matrix and a vector", (2, 3), (3,)),
    ("a batch and a vector", (5, 2, 3), (3,)),
    ("a vector and a batch", (3,), (5, 3, 2)),
    ("two vectors", (3,), (3,)),
)
_OVER_CHANNELS = ("fixed", (4, 3, 2, 2)), ("of two axes", (5, 3))

NN = (
    *(Case("MatMul", (normal(*a), normal(*b)), torch.matmul, note=note) for note, a, b in _MATRICES),
    Case("Gemm", (normal(2, 3), normal(3, 4)), torch.matmul, note="of two"),
    Case("Gemm", (normal(2, 3), normal(4, 3), normal(4)), lambda a, b, c: a @ b.T + c, {"transB": 1}, note="linear"),
    Case(
        "Gemm",
        (normal(3, 2), normal(4, 3), normal(2, 1)),
        _gemm,
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
        note="scaled",
    ),
    Case(
        "Gemm", (normal(3, 2), normal(3, 4), normal()), lambda a, b, c: a.T @ b + c, {"transA": 1}, note="and a number"
    ),
    Case("Softmax", (normal(2, 3, 4),), lambda x: x.softmax(-1)),
    Case("Softmax", (normal(2, 3, 4),), lambda x: x.softmax(1), {"axis": 1}, note="of an inner axis"),
    Case("LogSoftmax", (normal(2, 3, 4),), lambda x: x.log_softmax(-1)),
    Case("LogSoftmax", (normal(2, 3, 4),), lambda x: x.log_softmax(0), {"axis": 0}, note="of the first axis"),
    Case("LayerNormalization", (normal(2, 3, 4), normal(4), normal(4)), _layer_norm),
    Case(
        "LayerNormalization",
        (normal(2, 3, 4), normal(3, 4), normal(3, 4)),
        _layer_norm,
        {"axis": 1},
        note="of two axes",
    ),
    Case("LayerNormalization", (normal(2, 3, 4), normal(4)), _layer_norm, note="without bias"),
    Case("SimplifiedLayerNormalization", (normal(2, 3, 4), normal(4)), _rms_norm, {"epsilon": 1e-5}, reference=False),
    Case("RMSNormalization", (normal(2, 3, 4), normal(4)), _rms_norm, {"epsilon": 1e-5}, opset=23, reference=False),
    *(
        Case(
            "BatchNormalization",
            (normal(*shape), positive(3), normal(3), normal(3), positive(3)),
            _batch_norm,
            note=note,
        )
        for note, shape in _OVER_CHANNELS
    ),
    *(
        Case(
            "BatchNormalization",
            (normal(*shape), positive(3), normal(3), normal(3), positive(3)),
            _batch_norm_training,
            {"training_mode": 1},
            by=(0, 1, 2),
            outputs=3,
            note=f"training {note}",
        )
        for note, shape in _OVER_CHANNELS
    ),
    Case("LpNormalization", (normal(2, 3, 4),), lambda x: functional.normalize(x, dim=1), {"axis": 1}),
    Case(
        "LpNormalization",
        (normal(2, 3),),
        lambda x: functional.normalize(x, p=1),
        {"p": 1},
        note="of order one",
        reference=False,  # which adds up without the signs
    ),
    Case(
        "InstanceNormalization",
        (normal(2, 3, 4), positive(3), normal(3)),
        lambda x, scale, bias: functional.instance_norm(x, weight=scale, bias=bias),
    ),
    Case(
        "GroupNormalization",
        (normal(2, 4, 3), positive(4), normal(4)),
        lambda x, scale, bias: functional.group_norm(x, 2, scale, bias),
        {"num_groups": 2, "stash_type": 11},
        opset=21,
    ),
    Case("Dropout", (normal(3, 4),), lambda x: x * 1, note="not training"),
    Case(
        "Dropout",
        (normal(3, 4), np.array(0.25, np.float32), np.array(False)),
        lambda x, *_: x * 1,
        note="told not to train",
    ),
    Case("PRelu", (normal(2, 3, 4), normal(3, 1)), lambda x, slope: torch.where(x < 0, slope * x, x)),
    Case("HardSwish", (normal(3, 4),), functional.hardswish),
    Case("HardSigmoid", (normal(3, 4),), lambda x: (x * 0.2 + 0.5).clamp(0, 1)),
    Case("Elu", (normal(3, 4),), functional.elu),
    Case("Selu", (normal(3, 4),), functional.selu, {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}),
    Case("Celu", (normal(3, 4),), lambda x: functional.celu(x, 2.0), {"alpha": 2.0}, reference=False),
    Case("Mish", (normal(3, 4),), functional.mish),
    Case("Softsign", (normal(3, 4),), functional.softsign),
    Case("ThresholdedRelu", (normal(3, 4),), lambda x: functional.threshold(x, 0.5, 0.0), {"alpha": 0.5}),
    Case(
        "MeanVarianceNormalization",
        (normal(2, 3, 2, 2),),
        lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / (x.std((0, 2, 3), correction=0, keepdim=True) + 1e-9),
        reference=False,
    ),
    Case("SoftmaxCrossEntropyLoss", (normal(4, 5), _LABELS), _cross_entropy()),
    Case(
        "SoftmaxCrossEntropyLoss",
        (normal(4, 5), _LABELS.astype(np.int32)),
        lambda x, y: functional.cross_entropy(x, y.long(), reduction="sum"),
        {"reduction": "sum"},
        note="sum of int32",
    ),
    Case(
        "SoftmaxCrossEntropyLoss",
        (normal(4, 5), _LABELS),
        _cross_entropy(reduction="none"),
        {"reduction": "none"},
        note="none",
    ),
    Case(
        "SoftmaxCrossEntropyLoss",
        (normal(4, 5), _SOME_LABELS),
        _cross_entropy(),
        {"ignore_index": -100},
        note="some ignored",
    ),
    Case(
        "SoftmaxCrossEntropyLoss",
        (normal(4, 5), _LABELS, positive(5)),
        _cross_entropy(),
        constants=(2,),
        note="weighted",
    ),
    Case(
        "SoftmaxCrossEntropyLoss",
        (normal(2, 3, 2, 2), _PICTURE_LABELS, positive(3)),
        _cross_entropy(ignore_index=255),
        {"ignore_index": 255},
        constants=(2,),
        note="of images",
    ),
    Case(
        "NegativeLogLikelihoodLoss",
        (normal(4, 5), _SOME_LABELS),
        lambda x, y: functional.nll_loss(x, y),
        {"ignore_index": -100},
    ),
    Case(
        "Einsum",
        (normal(2, 3, 4), normal(2, 5, 4)),
        lambda a, b: torch.einsum("bqd,bkd->bqk", a, b),
        {"equation": "bqd,bkd->bqk"},
    ),
    Case("Einsum", (normal(3, 4), normal(4, 2)), lambda a, b: a @ b, {"equation": "ij,jk"}, note="of two matrices"),
    Case("Einsum", (normal(2, 3, 4),), lambda x: x.sum(1).T, {"equation": "bij -> jb"}, note="of one"),
    Case(
        "Einsum",
        (normal(2, 3), normal(3), normal(3, 4)),
        lambda a, b, c: torch.einsum("ij,j,jk->i", a, b, c),
        {"equation": "ij,j,jk->i"},
        note="of three",
    ),
    Case("Swish", (normal(3, 4),), functional.silu, opset=24),
    Case(
        "Attention",
        (normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4)),
        functional.scaled_dot_product_attention,
        opset=23,
    ),
    Case(
        "Attention",
        (normal(2, 4, 3, 4), normal(2, 2, 3, 4), normal(2, 2, 3, 4)),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        {"is_causal": 1},
        opset=23,
        note="grouped and causal",
    ),
    Case("RotaryEmbedding", (normal(2, 2, 3, 4), normal(2, 3, 2), normal(2, 3, 2)), _rotate, opset=23),
)
