"""What is known to be wrong or racy, each with its cause, and therefore stays in PyTorch or is decomposed."""

from __future__ import annotations

import torch

aten = torch.ops.aten

WRONG_TRANSLATIONS: dict[torch._ops.OpOverload, str] = {
    aten._native_batch_norm_legit_functional.default: "translated as if training were False",
    aten._native_batch_norm_legit.default: "translated as if training were False",
    aten._native_batch_norm_legit.no_stats: "translated as if training were False",
    aten.native_batch_norm.default: "translated as if training were False",
    aten._native_batch_norm_legit_no_training.default: "returns no statistics for the backward pass",
    aten.nll_loss_forward.default: "the total weight that the backward pass divides by is made up",
    aten.nll_loss2d_forward.default: "the total weight that the backward pass divides by is made up",
    aten.hardtanh_backward.default: "lets the gradient through at the limits themselves",
    aten._scaled_dot_product_flash_attention.default: "returns no statistics for the backward pass",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "returns no statistics for the backward pass",
    aten._scaled_dot_product_efficient_attention.default: "returns no statistics for the backward pass",
}
"""Translations of torch.onnx that are removed, so that PyTorch's decomposition is translated in their place."""

_RACE = (
    "ScatterND with reduction=add of onnxruntime's CPU provider loses updates where indices repeat and there are "
    "several threads"
)

WRONG_OPERATORS: dict[torch._ops.OpOverload, str] = {
    aten.embedding_dense_backward.default: _RACE,
    aten.erfc.default: "translated as 1 - Erf, which leaves no digit of a small result",
    aten.special_erfc.default: "translated as 1 - Erf, which leaves no digit of a small result",
    aten.special_erfcx.default: "translated by 1 - Erf, which leaves no digit of a small result",
    aten._embedding_bag.default: "returns none of what the backward pass needs",
    aten.atan2.default: "translated by a quotient, which turns a half circle where the divisor is -0.0",
    aten.signbit.default: "translated as a comparison, for which -0.0 has no sign",
    aten.embedding_renorm.default: "changes its table in place",
}
"""Operators that stay in PyTorch whatever their arguments are."""

_ACCUMULATING = (aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl.default)

_AVERAGE_POOLS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
_POOL_OPTIONS = ((4, "ceil_mode"), (6, "divisor_override"))


def known_problem(node: torch.fx.Node) -> str:
    """Say what is wrong with this node in onnxruntime, or return an empty string."""
    if reason := WRONG_OPERATORS.get(node.target, ""):
        return reason
    if node.target in _ACCUMULATING and (node.args[3:4] == (True,) or node.kwargs.get("accumulate")):
        return _RACE
    if node.target is aten.scatter_reduce.two and "mean" in (*node.args[4:5], node.kwargs.get("reduce")):
        return "the mean of what is scattered is not translated as it is meant"
    if node.target in _AVERAGE_POOLS:
        ceil_mode, divisor = (node.args[place : place + 1] or (node.kwargs.get(name),) for place, name in _POOL_OPTIONS)
        if ceil_mode[0] or divisor[0] is not None:
            return "ceil_mode and divisor_override of average pooling are not translated as they are meant"
    return ""


RACY_ONNX = {("", "ScatterND"): "reduction"}
"""ONNX operators that race on the CPU where the attribute is neither absent nor `none`."""
