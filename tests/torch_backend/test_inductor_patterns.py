"""Patterns that the tests of PyTorch's inductor compile, written again: each equals eager PyTorch, gradients included.

Ten functions are compiled as one graph, so that they meet each other's fusions and placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from tests.torch_backend.oracle import require_same

Pattern = tuple[Callable[..., Any], *tuple[torch.Tensor, ...]]
_GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    """Return float32 numbers that need a gradient."""
    return torch.randn(shape, generator=_GENERATOR).requires_grad_()


def p(*shape: int) -> torch.Tensor:
    """Return positive numbers."""
    return (torch.rand(shape, generator=_GENERATOR) + 0.1).requires_grad_()


def i(most: int, *shape: int) -> torch.Tensor:
    """Return int64 numbers from 0, below `most`."""
    return torch.randint(most, shape, generator=_GENERATOR)


def b(*shape: int) -> torch.Tensor:
    """Return truths."""
    return torch.rand(shape, generator=_GENERATOR) > 0.5


PATTERNS: dict[str, Pattern] = {
    # numbers, types and constants
    "add a number": (lambda x: (x + 1, 1 - x, x * 2.5, x / 3), f(4, 5)),
    "add an integer tensor": (lambda x, n: (x + n, n * x, n + 1, n // 2, n % 3), f(4, 5), i(9, 4, 5)),
    "integer division": (lambda n, m: (n // (m + 1), torch.div(n, m + 1), n.remainder(m + 1)), i(99, 8), i(9, 8)),
    "true and false": (lambda a, c: (a & c, a | c, a ^ c, ~a, a.int() + c), b(8), b(8)),
    "bits": (lambda n, m: (n & m, n | m, n ^ m, ~n, n << 2, n >> 1), i(99, 8), i(99, 8)),
    "compare": (lambda x, y: (x > y, x <= 0, (x == x).all(), x.ne(y).sum()), f(4, 5), f(4, 5)),
    "to and from integers": (lambda x: (x.to(torch.int32), x.long().float(), x.double().sum(), x > 0), f(6, 7)),
    "half a step": (lambda x: (x.to(torch.float16).float(), x.to(torch.bfloat16).float()), f(6, 7)),
    "type promotion": (lambda x, n: (x * n.int(), n.float() + n.double(), torch.where(x > 0, x, 1)), f(5), i(9, 5)),
    "constants": (lambda x: (torch.tensor([1.0, 2, 3]) * x, torch.full((2, 3), 7) + x, torch.eye(3) @ x.T), f(2, 3)),
    "ranges": (lambda x: (torch.arange(6) + x, torch.arange(2, 14, 2) * x, torch.linspace(0, 1, 6) + x), f(6)),
    "empty and full like": (lambda x: (torch.zeros_like(x) + x, torch.ones_like(x), x.new_full((2,), 3),
        x.new_ones(2)), f(3, 3)),
    "scalar outputs": (lambda x: (x.sum(), x.mean() * 2, x.max(), x.norm()), f(3, 4)),
    "scalar inputs": (lambda x, y: (x + y, x * y.sum(), y.expand(4)), f(4), f(1)),
    # one number at a time
    "exponentials": (lambda x: (x.exp(), x.expm1(), x.exp2(), x.sigmoid(), x.tanh(), x.sinh()), f(9)),
    "logarithms": (lambda x: (x.log(), x.log2(), x.log10(), x.log1p(), x.cosh()), p(9)),
    "roots": (lambda x: (x.sqrt(), x.rsqrt(), x.reciprocal(), x**0.5, x**-1.5), p(9)),
    "trigonometry": (lambda x: (x.sin(), x.cos(), x.tan(), x.atan(), torch.atan2(x, x + 3)), f(9)),
    "inverse trigonometry": (lambda x: ((x.tanh() * 0.9).asin(), (x.tanh() * 0.9).acos(), x.asinh(),
        x.tanh().mul(0.9).atanh()), f(9)),
    "rounding": (lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.frac(), x.sign()), f(20)),
    "absolute values": (lambda x: (x.abs(), -x, x.clamp(-0.5, 0.5), x.clamp_min(0), x.relu()), f(20)),
    "activations": (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.softplus(x)), f(20)),
    "more activations": (lambda x: (F.elu(x), F.selu(x), F.celu(x), F.hardswish(x), F.hardsigmoid(x), F.leaky_relu(x,
        0.2)), f(20)),
    "gates": (lambda x: (F.glu(x), F.logsigmoid(x), F.softsign(x), F.tanhshrink(x), F.hardtanh(x)), f(4, 6)),
    "parametric relu": (lambda x, w: F.prelu(x, w), f(2, 3, 4), p(3)),
    "error functions": (lambda x: (x.erf(), x.erf() * x, x.sinc()), f(9)),
    "powers": (lambda x, y: (x**2, x**3, x.abs() ** y, 2**y, torch.pow(x.abs() + 0.1, 2.5)), f(9), f(9)),
    "minimum and maximum": (lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), x.clamp(min=y)),
        f(9), f(9)),
    "three operands": (lambda x, y, z: (x.addcmul(y, z, value=2), x.addcdiv(y, z.abs() + 1), torch.lerp(x, y, 0.3),
        torch.lerp(x, y, z)), f(9), f(9), f(9)),
    "where": (lambda c, x, y: (torch.where(c, x, y), x.masked_fill(c, 0), torch.where(c, x, 0.0), torch.where(x > y, x,
        y)), b(4, 5), f(4, 5), f(4, 5)),
    # broadcasting and layout
    "broadcast": (lambda x, y: (x + y, x * y, x[:, None] + x[None, :]), f(4, 5), f(5)),
    "expand": (lambda x: (x.expand(3, 4, 5), x.expand(-1, 5).sum(0), x.expand_as(torch.zeros(4, 5)) * 2), f(4, 5)),
    "permute": (lambda x: (x.permute(2, 0, 1), x.transpose(0, 2) + 1, x.permute(1, 2, 0).contiguous(), x.movedim(0,
        -1)), f(2, 3, 4)),
    "reshape": (lambda x: (x.reshape(6, 4), x.view(-1), x.view(2, 12) * 2, x.flatten(1), x.unflatten(2, (2, 2))), f(2,
        3, 4)),
    "squeeze": (lambda x: (x.squeeze(), x.squeeze(1), x.unsqueeze(-1), x[None]), f(2, 1, 4)),
    "transposed product": (lambda x, y: (x @ y.T, (x.T @ x).T, x.t().contiguous() * 2), f(4, 5), f(3, 5)),
    "stack and concatenate": (lambda x, y: (torch.cat([x, y]), torch.cat([x, y * 2], -1), torch.stack([x, y], 1),
        torch.hstack([x, y])), f(4, 5), f(4, 5)),
    "concatenate types": (lambda x, n: (torch.cat([x, n.float()]), torch.cat([x[:0], x]), torch.cat([n, n + 1])), f(4,
        5), i(9, 2, 5)),
    "split": (lambda x: (*x.split(2), *x.chunk(3, 1), *x.split([1, 3, 2], 1), *x.unbind(0)), f(4, 6)),
    "slices": (lambda x: (x[1:3], x[:, ::2], x[..., -1], x[1:, :-2] * 2, x[0], x.narrow(1, 1, 3)), f(4, 6)),
    "slices beyond the end": (lambda x: (x[:99], x[2:1], x[-3:], x[:, -99:2]), f(4, 6)),
    "select and diagonal": (lambda x: (x.select(1, 2), x.diagonal(), x.diagonal(1), x[1, 2], x.trace()), f(5, 5)),
    "flip and roll": (lambda x: (x.flip(0), x.flip([0, 1]), x.roll(2, 1), x.roll([1, -1], [0, 1]), x.rot90()), f(4, 6)),
    "repeat": (lambda x: (x.repeat(2, 3), x.tile(2), x.repeat_interleave(2, 1), x.repeat_interleave(3)), f(2, 3)),
    "pads": (lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, 0, 2, 0), value=3.0), F.pad(x, (-1, 1))), f(4, 6)),
    "other pads": (lambda x: (F.pad(x, (2, 1), mode="reflect"), F.pad(x, (2, 1), mode="replicate"), F.pad(x, (1, 1),
        mode="circular")), f(2, 3, 6)),
    "as strided": (lambda x: (x.as_strided((2, 3), (3, 1)) + 1, x.unfold(0, 3, 2), x.view(-1)[::2]), f(9)),
    "triangles": (lambda x: (x.tril(), x.triu(1), x.tril(-1) + x.triu(), torch.tril(torch.ones(4, 4)) * x[:4, :4]),
        f(5, 5)),
    "meshes": (lambda x, y: (torch.meshgrid(x, y, indexing="ij"), torch.cartesian_prod(x, y), torch.outer(x, y)), f(3),
        f(4)),
    "windows": (lambda x: (x.unfold(1, 3, 1).sum(-1), x.unfold(1, 2, 2).mean(-1)), f(2, 8)),
    # reductions
    "sums": (lambda x: (x.sum(0), x.sum((0, 2)), x.sum(-1, keepdim=True), x.mean(1), x.sum(dtype=torch.float64)), f(3,
        4, 5)),
    "extremes": (lambda x: (x.amax(1), x.amin((0, 2)), x.max(1), x.min(2), x.argmax(1), x.argmin(-1, keepdim=True)),
        f(3, 4, 5)),
    "variance": (lambda x: (x.var(1), x.std(2), x.var((0, 1), correction=0), *torch.var_mean(x, -1, keepdim=True)),
        f(3, 4, 5)),
    "products": (lambda x: (x.prod(), x.prod(1), x.cumprod(1)), p(3, 4)),
    "running sums": (lambda x: (x.cumsum(0), x.cumsum(-1), x.cumsum(1).flip(1), x.logcumsumexp(1)), f(3, 4)),
    "running extremes": (lambda x: (x.cummax(1), x.cummin(0)), f(3, 4)),
    "any and all": (lambda x: ((x > 0).any(), (x > 0).all(1), (x > 0).any(0), (x > 0).sum(1), x.count_nonzero()), f(3,
        4)),
    "logarithm of sums": (lambda x: (x.logsumexp(1), x.logsumexp((0, 1)), x.softmax(1), x.log_softmax(0)), f(3, 4)),
    "softmax in another type": (lambda x: (x.softmax(-1, dtype=torch.float64), F.softmin(x, 1), (x * 50).softmax(0)),
        f(3, 4)),
    "norms": (lambda x: (x.norm(), x.norm(dim=1), x.norm(1, 0), torch.linalg.vector_norm(x, 3), F.normalize(x)), f(3,
        4)),
    "distances": (lambda x, y: (F.cosine_similarity(x, y), F.pairwise_distance(x, y), (x[:, None] - y).pow(2).sum(-1)),
        f(3, 4), f(3, 4)),
    "sort": (lambda x: (x.sort(), x.sort(0, descending=True), x.argsort(1), x.msort()), f(4, 7)),
    "largest": (lambda x: (x.topk(3), x.topk(2, 0, largest=False), x.kthvalue(2)), f(4, 7)),
    "middle": (lambda x: (x.median(1), x.median(), x.mode(1)), f(4, 7)),
    "histograms": (lambda n: (torch.bincount(n, minlength=9), (n[:, None] == torch.arange(9)).sum(0)), i(9, 30)),
    "search": (lambda x, y: (torch.searchsorted(x.sort().values, y), torch.bucketize(y, x.sort().values, right=True)),
        f(9), f(4)),
    "unfinished mean": (lambda x, m: ((x * m).sum(1) / m.sum(1).clamp(min=1), x.masked_fill(m == 0, -1e9).amax(1)),
        f(4, 5), i(2, 4, 5)),
    # indices
    "index by a tensor": (lambda x, n: (x[n], x[:, n], x[n, n], x[n][:, None]), f(6, 6), i(6, 4)),
    "index by negatives": (lambda x, n: (x[n - 6], x[-1], x.index_select(0, n)), f(6, 6), i(6, 4)),
    "index by truths": (lambda x, c: (x * c, torch.where(c, x, 0).sum(1), x.masked_fill(~c, 1.0)), f(4, 5), b(4, 5)),
    "gather": (lambda x, n: (x.gather(1, n), torch.take_along_dim(x, n, 1), x.take(n)), f(4, 6), i(6, 4, 3)),
    "scatter": (lambda x, n, y: (x.scatter(1, n.argsort(1), y), x.scatter_add(1, n, y), x.scatter(1, n, 2.0)), f(4, 6),
        i(6, 4, 3), f(4, 3)),
    "scatter reduce": (lambda x, n, y: (x.scatter_reduce(1, n, y, "sum"), x.scatter_reduce(1, n, y, "amax"),
        x.scatter_reduce(1, n, y, "mean")), f(4, 6), i(6, 4, 3), f(4, 3)),
    "index put": (lambda x, n, y: (x.index_put((n,), y, accumulate=True), x.index_add(0, n, y), x.index_fill(1, n,
        0.5)), f(6, 6), i(6, 4), f(4, 6)),
    "index copy": (lambda x, y: (x.index_copy(0, torch.tensor([2, 0]), y), x.slice_scatter(y, 0, 1, 3),
        x.select_scatter(y[0], 0, 1)), f(6, 6), f(2, 6)),
    "embedding": (lambda w, n: (F.embedding(n, w), F.embedding(n, w, padding_idx=0), w[n].sum(1)), f(9, 4), i(9, 2, 5)),
    "bags": (lambda w, n: (F.embedding_bag(n, w, mode="sum"), F.embedding_bag(n, w, mode="mean")), f(9, 4), i(9, 2, 5)),
    "one hot": (lambda n: (F.one_hot(n, 5), F.one_hot(n, 5).float().mean(0), n.eq(2).nonzero_static(size=4)), i(5, 6)),
    "assign a slice": (lambda x, y: _assigned(x, y), f(4, 6), f(2, 6)),
    "assign by truths": (lambda x, c: x.clone().masked_fill_(c, 3.0).mul_(2), f(4, 6), b(4, 6)),
    "positions of tokens": (lambda m: (m.cumsum(1) - 1, (m.cumsum(1) * m).clamp(min=1), m.sum(1) - 1), i(2, 3, 7)),
    # products
    "products of matrices": (lambda x, y, z: (x @ y, torch.mm(x, y) + z, torch.addmm(z, x, y), torch.addmm(z, x, y,
        beta=0.5, alpha=2)), f(3, 4), f(4, 5), f(5)),
    "batched products": (lambda x, y: (torch.bmm(x, y), x @ y, torch.baddbmm(x @ y, x, y, alpha=0.3), x @ y[0]), f(2,
        3, 4), f(2, 4, 5)),
    "vectors": (lambda x, y: (x @ y, torch.mv(x, y), torch.dot(y, y), torch.addmv(x[:, 0], x, y), torch.ger(y, y)),
        f(3, 4), f(4)),
    "einsum": (lambda x, y: (torch.einsum("bij,bjk->bik", x, y), torch.einsum("bij->bji", x), torch.einsum("bij,bjk->",
        x, y)), f(2, 3, 4), f(2, 4, 5)),
    "tensor products": (lambda x, y: (torch.tensordot(x, y, 1), torch.kron(x[0], y[0, :, :2]), torch.inner(x, x)), f(2,
        3, 4), f(4, 2, 5)),
    "linear": (lambda x, w, c: (F.linear(x, w, c), F.linear(x, w), F.linear(x[0], w, c).relu(), F.bilinear(x[0], x[1],
        torch.ones(2, 4, 4))), f(2, 3, 4), f(5, 4), f(5)),
    "chain of products": (lambda x, y: (torch.linalg.multi_dot([x, y, x]), torch.matrix_power(x @ y, 3), x @ y @ x),
        f(3, 4), f(4, 3)),
    # convolutions, pools and images
    "convolution": (lambda x, w, c: (F.conv2d(x, w, c), F.conv2d(x, w, c, stride=2, padding=1), F.conv2d(x, w,
        dilation=2)), f(2, 3, 8, 8), f(4, 3, 3, 3), f(4)),
    "groups": (lambda x, w: (F.conv2d(x, w, groups=2), F.conv2d(x, w, groups=2, padding="same")), f(2, 4, 6, 6), f(4,
        2, 3, 3)),
    "depthwise": (lambda x, w: F.conv1d(x, w, groups=4, padding=2), f(2, 4, 9), f(4, 1, 3)),
    "one and three axes": (lambda x, w, y, v: (F.conv1d(x, w, stride=2), F.conv3d(y, v, padding=1)), f(2, 3, 9), f(4,
        3, 3), f(1, 2, 4, 4, 4), f(3, 2, 3, 3, 3)),
    "transposed convolution": (lambda x, w: (F.conv_transpose2d(x, w), F.conv_transpose2d(x, w, stride=2, padding=1,
        output_padding=1)), f(2, 3, 5, 5), f(3, 4, 3, 3)),
    "channels last": (lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w).relu(), f(2, 3, 6, 6),
        f(4, 3, 3, 3)),
    "largest of windows": (lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool1d(x[0], 2),
        F.max_pool2d(x, 2, ceil_mode=True)), f(2, 3, 7, 7)),
    "mean of windows": (lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 3, 2, 1,
        count_include_pad=False)), f(2, 3, 7, 7)),
    "mean of windows, otherwise": (lambda x: (F.avg_pool2d(x, 3, 2, 1, divisor_override=3), F.avg_pool2d(x, 3, 2, 1,
        ceil_mode=True)), f(1, 2, 6, 6)),
    "adaptive pools": (lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (2, 3)),
        F.adaptive_max_pool2d(x, 2)), f(2, 3, 6, 6)),
    "upsampling": (lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, size=(9, 9), mode="bilinear"),
        F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)), f(2, 3, 5, 5)),
    "pixels": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)), f(2, 4, 4, 4)),
    "patches": (lambda x: (F.unfold(x, 2), F.fold(F.unfold(x, 2), (4, 4), 2)), f(2, 3, 4, 4)),
    # normalization
    "layer norm": (lambda x, w, c: (F.layer_norm(x, (6,), w, c), F.layer_norm(x, (5, 6)), F.layer_norm(x, (6,), w)),
        f(4, 5, 6), f(6), f(6)),
    "rms norm": (lambda x, w: (F.rms_norm(x, (6,), w), x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w), f(4,
        5, 6), f(6)),
    "group norm": (lambda x, w, c: (F.group_norm(x, 2, w, c), F.group_norm(x, 4), F.instance_norm(x)), f(2, 4, 5, 5),
        f(4), f(4)),
    "batch norm": (lambda x, w, c: (F.batch_norm(x, torch.zeros(4), torch.ones(4), w, c, training=True),
        F.batch_norm(x, torch.zeros(4), torch.ones(4), w, c)), f(3, 4, 5, 5), f(4), f(4)),
    "local response": (lambda x: F.local_response_norm(x, 2), f(2, 4, 5, 5)),
    # attention
    "attention": (lambda q, k, v: (F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v,
        is_causal=True)), f(2, 2, 5, 4), f(2, 2, 5, 4), f(2, 2, 5, 4)),
    "attention with a mask": (lambda q, k, m: (F.scaled_dot_product_attention(q, k, k, m > 0.0),
        F.scaled_dot_product_attention(q, k, k, m.detach(), scale=0.7)), f(2, 2, 5, 4), f(2, 2, 5, 4), p(2, 1, 5, 5)),
    "attention by hand": (lambda q, k, m: ((q @ k.mT / 2).masked_fill(~m,
        torch.finfo(torch.float32).min).softmax(-1) @ k), f(2, 2, 5, 4), f(2, 2, 5, 4), b(2, 1, 1, 5)),
    "grouped queries": (lambda q, k: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1),
        k.repeat_interleave(2, 1)), f(2, 4, 5, 4), f(2, 2, 5, 4)),
    "rotary": (lambda q, a: q * a.cos() + torch.cat([-q[..., 2:], q[..., :2]], -1) * a.sin(), f(2, 3, 5, 4), f(5, 4)),
    "relative positions": (lambda x, w: x + w[(torch.arange(5)[:, None] - torch.arange(5)).clamp(-2, 2) + 2].permute(2,
        0, 1), f(3, 5, 5), f(5, 3)),
    # losses
    "cross entropy": (lambda x, n: (F.cross_entropy(x, n), F.cross_entropy(x, n, ignore_index=2), F.cross_entropy(x, n,
        label_smoothing=0.1, reduction="sum")), f(6, 5), i(5, 6)),
    "cross entropy of probabilities": (lambda x, y: (F.cross_entropy(x, y.softmax(1)), F.kl_div(x.log_softmax(1),
        y.softmax(1), reduction="batchmean")), f(6, 5), f(6, 5)),
    "likelihood": (lambda x, n: (F.nll_loss(x.log_softmax(1), n), F.nll_loss(x.log_softmax(1), n, reduction="none")),
        f(6, 5), i(5, 6)),
    "binary": (lambda x, y: (F.binary_cross_entropy_with_logits(x, y.sigmoid()), F.binary_cross_entropy(x.sigmoid(),
        y.sigmoid()), F.soft_margin_loss(x, y.detach().sign())), f(6, 5), f(6, 5)),
    "regression": (lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y,
        delta=0.5), F.poisson_nll_loss(x, y.abs())), f(6, 5), f(6, 5)),
    "margins": (lambda x, y, z: (F.triplet_margin_loss(x, y, z), F.margin_ranking_loss(x[:, 0], y[:, 0], z[:,
        0].sign()), F.cosine_embedding_loss(x, y, z[:, 0].sign()), F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3, 4,
        0])), F.hinge_embedding_loss(x, y.sign())), f(6, 5), f(6, 5), f(6, 5)),
    "in-batch negatives": (lambda x, y: F.cross_entropy(F.normalize(x) @ F.normalize(y).T * 20, torch.arange(6)), f(6,
        5), f(6, 5)),
    "sparse head": (lambda x, m: (x.relu().log1p() * m[..., None]).amax(1), f(2, 5, 9), i(2, 2, 5)),
    "mean pooling": (lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp(min=1e-9), f(2, 5, 9), i(2,
        2, 5)),
    # linear algebra, and what mutates
    "linear algebra": (lambda x: (torch.linalg.inv(x @ x.T + 9 * torch.eye(4)), torch.linalg.det(x),
        torch.linalg.cholesky(x @ x.T + 9 * torch.eye(4))), f(4, 4)),
    "in place": (lambda x: (x.clone().add_(1).mul_(2).relu_(), x.clone().zero_(), x.detach().clone().fill_(3),
        x.clone().clamp_(0, 1)), f(4, 5)),
    "views that are written": (lambda x: _written_views(x), f(4, 6)),
    "copies": (lambda x, y: (x.clone().copy_(y), x.detach() * 2, x.clone().t().add(1), x.contiguous()), f(4, 4), f(4,
        4)),
    "loops": (lambda x: _looped(x), f(3, 4)),
    "several results of one": (lambda x: (x, x + 1, x + 1, x.t(), x.t().t()), f(3, 4)),
    "results that do not need inputs": (lambda x: (torch.ones(3), torch.arange(4) * 2, x.sum() * 0 + 1), f(3, 4)),
    "shapes in numbers": (lambda x: (x / x.shape[1], x.numel() * x.mean(), x.new_zeros(x.size(0)) + x.shape[-1]), f(3,
        4)),
    "empty tensors": (lambda x: (x[:0] + 1, x[:0].sum(), torch.cat([x[:0], x]), x[:, :0].softmax(1)), f(3, 4)),
    "complex of parts": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), f(3, 4, 2)),
    "polynomials": (lambda x: ((((x + 1) * x + 0.5) * x - 2) * x, x.square() - x.pow(4), x.hypot(x + 1)), f(9)),
    "gaussian mixture": (lambda x, m: torch.logsumexp(-(x[:, None] - m).square().sum(-1) / 2, 1).mean(), f(8, 3), f(4,
        3)),
    "dropout that does nothing": (lambda x: (F.dropout(x, 0.5, training=False), F.dropout(x, 0.0), F.alpha_dropout(x,
        0.3)), f(3, 4)),
}  # fmt: skip


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:3] = y
    x[:, 0] = 1.0
    x[0, 1:3] += 2
    return x


def _written_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone()
    row = x[1]
    row.mul_(3)
    x.view(-1)[2:4].add_(1)
    return x, row


def _looped(x: torch.Tensor) -> torch.Tensor:
    for number in range(4):
        x = torch.tanh(x * 0.5 + number) if number % 2 else x + x.mean()
    return x


@pytest.mark.parametrize("start", range(0, len(PATTERNS), 10))
def test_ten_patterns_give_eagers_numbers(start: int) -> None:
    """Results and gradients, of ten patterns in one graph."""
    patterns = list(PATTERNS.values())[start : start + 10]

    def together(*inputs: torch.Tensor) -> list[Any]:
        left = iter(inputs)
        return [function(*(next(left) for _ in own)) for function, *own in patterns]

    require_same(together, *(tensor for _, *own in patterns for tensor in own))
