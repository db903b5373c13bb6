"""Decide how each ATen operator is lowered, in a single table.

An operator without a row is translated by torch.onnx. If torch.onnx has no translation, PyTorch's decomposition
applies; if there is none either, the operator stays in PyTorch. To decide otherwise, add a row to `DECISIONS`, and a
sample to tests/torch_backend/lower/test_decompositions.py or test_fx_rewrites.py.

All steps read the table with `decision(operator)`: decompositions and the translation (torch_onnx.py), FX graph
rewrites (fx_rewrites/rewriter.py), what stays in PyTorch (placement.py) and corrections of the ONNX model
(finishing.py).
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from onnxtool.torch_backend.lower import decompositions, random
from onnxtool.torch_backend.lower.fx_rewrites import arithmetic, gradients
from onnxtool.torch_backend.nodes import MANY_ELEMENTS, Node, is_seen, seen_elements, seen_shape

aten, prims = torch.ops.aten, torch.ops.prims

Rewrite = Callable[[Node], "Node | None"]
"""Takes a node and returns its replacement, which it has inserted before it; None if there is nothing better.

It changes no other node: nodes that become unread are removed afterward.
"""


class FusedKernel(enum.Enum):
    """The size from which an operator stays in PyTorch, where one kernel makes one pass over memory and ONNX several.

    Splitting a graph costs about 20 to 50 microseconds, so small ones become ONNX. Measured as whole training steps
    with scripts/bench_torch_backend.py: operators that make no step faster are not marked, such as the gradients of
    softmax and SiLU, and layer normalization itself.
    """

    ALWAYS = "for their fused kernel"
    WITH_INDICES = "where the indices of maxima are read: onnxruntime's kernel for maxima alone is fast"
    BETWEEN_OTHERS = "between two operators that stay: a session for it alone is slower than its own kernel"


@dataclass(frozen=True)
class Denied:
    """The reason why an operator stays in PyTorch: a wrong result or race in onnxruntime, for the nodes concerned."""

    reason: str
    applies: Callable[[Node], bool] = lambda _node: True


@dataclass(frozen=True)
class Decision:
    """The decisions for lowering an operator; fields are in the order of the steps that read them.

    Attributes:
        decomposition: our decomposition. If it returns NotImplemented, the next steps apply.
        no_decomposition: why PyTorch's decomposition is not used.
        fx_rewrites: rewrites of its nodes in the FX graph; the first one with a replacement is used.
        denied: why it stays in PyTorch.
        fused_kernel: when it stays in PyTorch because of a faster kernel.
        no_translation: why torch.onnx's translation is not used, but PyTorch's decomposition.
        float64_argument: position of a number that torch.onnx rounds to float32, in a float64 operator.
    """

    decomposition: Callable[..., Any] | None = None
    no_decomposition: str = ""
    fx_rewrites: tuple[Rewrite, ...] = ()
    denied: Denied | None = None
    fused_kernel: FusedKernel | None = None
    no_translation: str = ""
    float64_argument: int | None = None

    def __str__(self) -> str:
        """Return the steps as text for the documentation."""
        steps = [f"decomposed by `{_name(self.decomposition)}`"] if self.decomposition else []
        steps += [f"not decomposed: {self.no_decomposition}"] if self.no_decomposition else []
        steps += [f"rewritten by `{_name(rewrite)}`" for rewrite in self.fx_rewrites]
        steps += [f"stays in PyTorch: {self.denied.reason}"] if self.denied else []
        steps += [f"large ones stay in PyTorch {self.fused_kernel.value}"] if self.fused_kernel else []
        steps += [f"PyTorch's decomposition: torch.onnx's is {self.no_translation}"] if self.no_translation else []
        steps += ["its number is kept in float64"] if self.float64_argument is not None else []
        return "; ".join(steps)


def decision(target: object) -> Decision:
    """Return the decision for a node's target; an empty decision if torch.onnx translates it unchanged."""
    return DECISIONS.get(target, _DEFAULT)


def _name(function: Callable[..., Any]) -> str:
    function = function.func if isinstance(function, partial) else function
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _is_sum_of_scores(node: Node) -> bool:
    """Whether a matmul has a small result of long sums, as the scores of texts by the weights of their terms."""
    operands = [item.meta.get("val") for item in node.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) and is_seen(value) for value in operands):
        return False
    rows, length = seen_shape(node.args[0].meta["val"])
    return length >= _LONG_SUM * max(rows, seen_shape(node.meta["val"])[1])


_DEFAULT = Decision()
_LONG_SUM = 16
"""Terms of a sum for each row and column of the result."""
_RACE = (
    "ScatterND with reduction=add of onnxruntime's CPU provider loses updates where indices repeat and there are "
    "several threads"
)
_INFERENCE_ONLY = "as if training were False"
_NO_STATISTICS = "without statistics for the backward pass"
_NO_TOTAL_WEIGHT = "wrong in the total weight that the backward pass divides by"
_NO_CHECK = "its decomposition takes probabilities and targets that are not from 0 to 1"
_IDENTITY = "it means nothing in a compiled graph, and its decomposition is itself"
_OTHER_TYPE = "its decomposition gives another type than it says"
_ACCUMULATES = Denied(_RACE, lambda node: bool(_argument(node, 3, "accumulate")))
_POOLING = Denied(
    "ceil_mode and divisor_override of average pooling are translated wrongly",
    lambda node: bool(_argument(node, 4, "ceil_mode")) or _argument(node, 6, "divisor_override") is not None,
)
_ERFC = Denied("translated by 1 - Erf, which leaves no digit of a small result")
_ORDER = Denied("NaN, and which of equal values comes first, are onnxruntime's, not PyTorch's")
_SPECIALS = Denied("translated by comparisons, which have no place for NaN or the sign of a zero")
_OVERFLOWS = Denied("translated by exponentials, which overflow, and have no value for infinities")
_OF_FLOATS = Denied(
    "translated by a quotient that is rounded twice, and is NaN for infinities",
    lambda node: node.meta["val"].dtype.is_floating_point and node.kwargs.get("rounding_mode", "") is not None,
)
_OF_DOUBLES = Denied(
    "onnxruntime's kernel for float64 passes over NaN", lambda node: node.meta["val"].dtype is torch.float64
)
_DIAGONAL = Denied("translated by a sum of all other values times zero")
_INDICES = Denied(
    "onnxruntime's index of a maximum is not the index of a NaN",
    lambda node: any(user.target is operator.getitem and user.args[1] == 1 for user in node.users),
)
_SAMPLED = Denied("onnxruntime reads outside of the image where a coordinate is NaN")
_SCORES = Denied(
    "a small result of long sums, such as scores of sparse vectors: the loss has the rounding of PyTorch's order",
    _is_sum_of_scores,
)
_SPECIAL = Decision(denied=Denied("PyTorch's kernel serves as well as the dozens of ONNX nodes that it would become"))
_RARE = Decision(no_decomposition="PyTorch's kernel computes it in one pass", denied=_SPECIAL.denied)
_DRAWS = Decision(no_decomposition="its decomposition draws other random numbers")
_INDEX_PUT = Decision(decomposition=decompositions.index_put, denied=_ACCUMULATES)

DECISIONS: dict[object, Decision] = {
    # writes by index
    aten.index_put.default: _INDEX_PUT,
    aten._unsafe_index_put.default: _INDEX_PUT,
    aten._index_put_impl.default: Decision(denied=_ACCUMULATES),
    aten.embedding_dense_backward.default: Decision(
        no_decomposition="PyTorch's own kernel is faster", denied=Denied(_RACE)
    ),
    # PyTorch's decomposition of it changes a tensor in place
    aten.diagonal_scatter.default: Decision(decomposition=decompositions.diagonal_scatter),
    aten.index_add.default: Decision(decomposition=decompositions.index_add),
    aten.index_copy.default: Decision(decomposition=decompositions.index_copy),
    aten.index_fill.int_Scalar: Decision(decomposition=decompositions.index_fill),
    aten.index_fill.int_Tensor: Decision(decomposition=decompositions.index_fill),
    aten.scatter_reduce.two: Decision(
        decomposition=decompositions.scatter_reduce,
        denied=Denied(
            "means of scattered values are translated wrongly, and maxima and minima without their NaN",
            lambda node: _argument(node, 4, "reduce") in ("mean", "amax", "amin"),
        ),
    ),
    **dict.fromkeys(
        (
            *(aten.index_reduce.default, aten.put.default),
            *(aten.as_strided_scatter.default, aten.masked_scatter_backward.default),
        ),
        _RARE,
    ),
    aten.embedding_renorm.default: Decision(denied=Denied("changes its table in place")),
    aten._embedding_bag.default: Decision(denied=Denied("returns nothing that the backward pass needs")),
    aten._embedding_bag_forward_only.default: Decision(denied=Denied("translated without a check of its indices")),
    **dict.fromkeys(
        (aten.max_unpool2d.default, aten.max_unpool3d.default),
        Decision(no_decomposition="an index outside of its image is one of another image"),
    ),
    # pooling
    **dict.fromkeys(
        (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default), Decision(denied=_POOLING)
    ),
    **dict.fromkeys(
        (
            *(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d.default),
            *(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default),
            *(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
            *(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default),
            aten.max_pool3d_with_indices_backward.default,
        ),
        _RARE,
    ),
    aten.max_pool2d_with_indices.default: Decision(denied=_INDICES, fused_kernel=FusedKernel.WITH_INDICES),
    aten.max_pool3d_with_indices.default: Decision(denied=_INDICES),
    aten.max_pool2d_with_indices_backward.default: Decision(fused_kernel=FusedKernel.ALWAYS),
    # padding
    **dict.fromkeys(
        (
            *(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default),
            aten.replication_pad3d_backward.default,
        ),
        _RARE,
    ),
    aten.grid_sampler_2d.default: Decision(denied=_SAMPLED),
    aten.slice_scatter.default: Decision(fx_rewrites=(gradients.padded_slice,)),
    aten.cat.default: Decision(fx_rewrites=(arithmetic.concatenation_without_empty,)),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), Decision(decompositions.unknown_parts)),
    # order, running maxima and products
    **dict.fromkeys((aten.sort.default, aten.topk.default), Decision(denied=_ORDER)),
    **dict.fromkeys(
        (
            *(aten.searchsorted.Tensor, aten.bucketize.Tensor, aten.cummax.default, aten.cummin.default),
            *(aten.cumprod.default, aten._trilinear.default),
        ),
        _RARE,
    ),
    aten.bucketize.Scalar: Decision(no_decomposition="it reads a value, and a traced graph has none"),
    aten.max.dim: Decision(decompositions.maximum_of_booleans),
    prims.prod.default: Decision(decompositions.product),
    # maxima and minima of NaN; getitem takes the values or the indices of max.dim and min.dim
    aten.amax.default: Decision(
        partial(decompositions.over_extremes, reduce=aten.amax.default), fx_rewrites=(arithmetic.extreme,)
    ),
    aten.amin.default: Decision(
        partial(decompositions.over_extremes, reduce=aten.amin.default), fx_rewrites=(arithmetic.extreme,)
    ),
    aten.max.default: Decision(fx_rewrites=(arithmetic.extreme,)),
    aten.min.default: Decision(fx_rewrites=(arithmetic.extreme,)),
    **dict.fromkeys(
        (aten.argmax.default, aten.argmin.default),
        Decision(fx_rewrites=(arithmetic.index_of_extreme,)),
    ),
    operator.getitem: Decision(fx_rewrites=(arithmetic.extreme_and_index,)),
    # tensors without dimensions
    aten.t.default: Decision(decompositions.transpose),
    aten.repeat.default: Decision(decompositions.repeat),
    prims.view_of.default: Decision(decompositions.same),
    # elementwise functions
    **dict.fromkeys((prims.lgamma.default, prims.digamma.default, aten.polygamma.default), _SPECIAL),
    **dict.fromkeys((prims.bessel_i0.default, prims.bessel_i0e.default), _SPECIAL),
    **dict.fromkeys((prims.bessel_i1.default, prims.bessel_i1e.default), _SPECIAL),
    **dict.fromkeys((aten.special_modified_bessel_i0.default, aten.special_modified_bessel_i1.default), _SPECIAL),
    aten.special_spherical_bessel_j0.default: _SPECIAL,
    aten.clamp.default: Decision(decompositions.clamp),
    aten.clamp_min.default: Decision(decompositions.clamp),
    aten.clamp_max.default: Decision(decompositions.clamp),
    aten.clamp_min.Tensor: Decision(aten.maximum.default),
    aten.clamp_max.Tensor: Decision(aten.minimum.default),
    aten.sign.default: Decision(decompositions.sign),
    aten.addcmul.default: Decision(partial(decompositions.scaled_term, join=torch.mul)),
    aten.addcdiv.default: Decision(partial(decompositions.scaled_term, join=torch.div)),
    aten.linalg_vector_norm.default: Decision(decompositions.largest_norm),
    **dict.fromkeys(
        (aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other),
        Decision(no_translation="without the NaN of the second argument"),
    ),
    aten.lerp.Tensor: Decision(no_translation="with one formula for both halves"),
    aten.logit.default: Decision(no_translation="one that replaces NaN by a limit"),
    aten.div.Tensor_mode: Decision(decompositions.divide_integers, denied=_OF_FLOATS),
    aten.div.Scalar_mode: Decision(decompositions.divide_integers, denied=_OF_FLOATS),
    aten.floor_divide.default: Decision(denied=_OF_FLOATS),
    **dict.fromkeys(
        (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor, aten.fmod.Tensor),
        Decision(denied=_OF_FLOATS),
    ),
    **dict.fromkeys((aten.heaviside.default, aten.angle.default, aten.trunc.default), Decision(denied=_SPECIALS)),
    **dict.fromkeys(
        (aten.logaddexp.default, aten.logaddexp2.default, aten.logcumsumexp.default), Decision(denied=_OVERFLOWS)
    ),
    **dict.fromkeys((aten.fmax.default, aten.fmin.default, aten.hypot.default), _RARE),
    aten.relu.default: Decision(decompositions.relu, fused_kernel=FusedKernel.BETWEEN_OTHERS),
    aten.threshold_backward.default: Decision(fused_kernel=FusedKernel.ALWAYS),
    aten.sigmoid.default: Decision(fx_rewrites=(arithmetic.exact_sigmoid,)),
    aten.gelu.default: Decision(fx_rewrites=(arithmetic.fusible_gelu,)),
    aten.gelu_backward.default: Decision(fused_kernel=FusedKernel.ALWAYS),
    aten.silu_backward.default: Decision(decompositions.silu_gradient),
    aten.pow.Tensor_Scalar: Decision(fx_rewrites=(arithmetic.known_power,)),
    **dict.fromkeys(
        (
            *(aten.hardtanh_backward.default, aten.hardswish_backward.default, aten.logit_backward.default),
            aten.smooth_l1_loss_backward.default,
        ),
        Decision(no_decomposition="it takes another side at NaN and at the limits", denied=_SPECIALS),
    ),
    **dict.fromkeys((aten.hardshrink_backward.default, aten.softshrink_backward.default), Decision(denied=_SPECIALS)),
    aten.erfc.default: Decision(denied=_ERFC),
    aten.special_erfc.default: Decision(denied=_ERFC),
    aten.special_erfcx.default: Decision(denied=_ERFC),
    aten.atan2.default: Decision(
        denied=Denied("translated by a quotient, which is wrong by pi where the divisor is -0.0")
    ),
    aten.signbit.default: Decision(denied=Denied("translated as a comparison, for which -0.0 has no sign")),
    aten.copysign.Tensor: Decision(no_decomposition=_OTHER_TYPE),
    aten.copysign.Scalar: Decision(no_decomposition=_OTHER_TYPE),
    **dict.fromkeys(
        (aten.diagonal.default, aten.diagonal_copy.default), Decision(decompositions.diagonal, denied=_DIAGONAL)
    ),
    # matmuls, and the gradients around them
    aten.addmm.default: Decision(partial(decompositions.affine, product=aten.mm.default)),
    aten.addmv.default: Decision(partial(decompositions.affine, product=aten.mv.default)),
    aten.addbmm.default: Decision(partial(decompositions.affine, product=decompositions.summed_product)),
    aten.addr.default: Decision(partial(decompositions.affine, product=torch.outer, small=math.inf)),
    aten.baddbmm.default: Decision(partial(decompositions.affine, product=aten.bmm.default, small=400)),
    aten.mm.default: Decision(fx_rewrites=(gradients.scale_smaller_operand,), denied=_SCORES),
    aten.sum.dim_IntList: Decision(fx_rewrites=(gradients.scale_smaller_operand,)),
    aten.mul.Tensor: Decision(fx_rewrites=(arithmetic.scale_before_expand,)),
    aten.transpose.int: Decision(fx_rewrites=(arithmetic.transposed_product,)),
    aten.detach.default: Decision(fx_rewrites=(arithmetic.redundant_detach,)),
    aten.add.Tensor: Decision(fx_rewrites=(gradients.joined_slices,)),
    aten.sub.Tensor: Decision(fx_rewrites=(gradients.label_gradient,)),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), Decision(denied=_OF_DOUBLES)),
    aten._safe_softmax.default: Decision(decompositions.safe_softmax),
    # normalization, losses and fused attention
    aten._native_batch_norm_legit_functional.default: Decision(
        fused_kernel=FusedKernel.ALWAYS, no_translation=_INFERENCE_ONLY
    ),
    aten._native_batch_norm_legit.default: Decision(no_translation=_INFERENCE_ONLY),
    aten._native_batch_norm_legit.no_stats: Decision(no_translation=_INFERENCE_ONLY),
    aten.native_batch_norm.default: Decision(no_translation=_INFERENCE_ONLY),
    aten._native_batch_norm_legit_no_training.default: Decision(no_translation=_NO_STATISTICS),
    aten.native_batch_norm_backward.default: Decision(fused_kernel=FusedKernel.ALWAYS),
    aten.native_layer_norm.default: Decision(decompositions.layer_norm),
    aten.native_layer_norm_backward.default: Decision(fused_kernel=FusedKernel.ALWAYS),
    aten.binary_cross_entropy.default: Decision(no_decomposition=_NO_CHECK),
    aten.nll_loss_forward.default: Decision(no_translation=_NO_TOTAL_WEIGHT),
    aten.nll_loss2d_forward.default: Decision(no_translation=_NO_TOTAL_WEIGHT),
    aten._scaled_dot_product_flash_attention.default: Decision(no_translation=_NO_STATISTICS),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Decision(no_translation=_NO_STATISTICS),
    aten._scaled_dot_product_efficient_attention.default: Decision(no_translation=_NO_STATISTICS),
    # random numbers: whatever draws stays in PyTorch (placement.py)
    aten.native_dropout.default: Decision(random.native_dropout),
    aten.rand_like.default: Decision(partial(random.noise_like, draw=aten.rand.default, in_place="uniform_")),
    aten.randn_like.default: Decision(partial(random.noise_like, draw=aten.randn.default, in_place="normal_")),
    **dict.fromkeys((aten.uniform.default, aten.normal_functional.default, aten.exponential.default), _DRAWS),
    **dict.fromkeys((aten.geometric.default, aten.cauchy.default, aten.log_normal.default), _DRAWS),
    aten.bernoulli.default: _DRAWS,
    aten.bernoulli.p: Decision(random.bernoulli, no_decomposition=_DRAWS.no_decomposition),
    # constants
    aten.lift_fresh.default: Decision(no_decomposition=_IDENTITY),
    aten.lift.default: Decision(no_decomposition=_IDENTITY),
    aten.scalar_tensor.default: Decision(float64_argument=0),
    aten.full.default: Decision(float64_argument=1),
    aten.full_like.default: Decision(float64_argument=1),
    aten.new_full.default: Decision(float64_argument=2),
    aten.fill.Scalar: Decision(float64_argument=1),
    aten.masked_fill.Scalar: Decision(float64_argument=2),
}


_DTYPES = (torch.float32, torch.float64)


def kernel_is_faster(node: Node, stay: Mapping[Node, str]) -> bool:
    """Return whether a node stays in PyTorch for its kernel; `stay` holds earlier nodes that stay for any reason."""
    when = decision(node.target).fused_kernel
    if when is None or not _is_large([item.meta.get("val") for item in node.all_input_nodes]):
        return False
    if when is FusedKernel.WITH_INDICES:
        return any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
    if when is FusedKernel.BETWEEN_OTHERS:
        return any(source in stay for source in node.all_input_nodes) and any(
            kernel_is_faster(user, stay) for user in node.users
        )
    return True


def small_only(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition for small operators; large ones are left unchanged."""

    def decompose_small(*arguments: Any, **options: Any) -> Any:
        if _is_large([*arguments, *options.values()]):
            return NotImplemented  # the protocol of decompositions
        return decompose(*arguments, **options)

    return decompose_small


def _is_large(values: list[object]) -> bool:
    """Return whether any value is a real CPU tensor with many elements, judged by the first call for dynamic sizes.

    Querying a dynamic size itself would create one graph for small sizes and another for large ones.
    """
    return any(
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype in _DTYPES
        and is_seen(value)
        and seen_elements(value) >= MANY_ELEMENTS
        for value in values
    )
