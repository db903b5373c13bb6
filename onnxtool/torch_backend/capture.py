"""Control what AOTAutograd traces: our versions of PyTorch functions, and how to split a joint graph in two.

Attention has no translation as a single operator. PyTorch's own decomposition scales queries and keys separately,
transposes the gradient of the keys twice, and searches all probabilities for fully masked rows.
Shape letters: N batches and heads, L queries, S keys, E and V features.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from onnxtool.torch_backend.lower.channels_last import keep_channels_last
from onnxtool.torch_backend.lower.random import DROPOUT_MASKS, DropoutMask, has_scaled_mask
from onnxtool.torch_backend.nodes import Node, is_call, is_dropout_mask, is_empty, is_random, is_uninitialized, is_view


@contextlib.contextmanager
def traceable_functions(dropout: str = "eager") -> Iterator[None]:
    """Trace our functions instead of PyTorch's, and other attention as matmuls: a single operator has no translation.

    `dropout` names how masks are drawn, one of `DROPOUT_MASKS`.
    """
    with sdpa_kernel(SDPBackend.MATH), _ReplacedFunctions(DROPOUT_MASKS[dropout]):
        yield


def _dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, draw: DropoutMask
) -> torch.Tensor | None:
    """Compute `torch.nn.functional.dropout` as one product; None if there is no mask for it.

    Eager PyTorch returns `x` itself where nothing is dropped; its decomposition copies it.
    """
    if not training or p == 0:
        return x
    if not has_scaled_mask(x, p):
        return None
    return x.mul_(draw(x, p)) if inplace else x * draw(x, p)


def _bernoulli(x: torch.Tensor, p: float | None = None, *, draw: DropoutMask, **options: Any) -> torch.Tensor | None:
    """Draw as `torch.bernoulli(x, p)`, whose result is contiguous; without p, x has the probabilities."""
    del draw
    return (
        None if p is None or x.is_contiguous() else torch.bernoulli(torch.empty(x.shape, dtype=x.dtype), p, **options)
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    draw: DropoutMask,
) -> torch.Tensor | None:
    """Compute `scaled_dot_product_attention` for queries [..., L, E], keys [..., S, E] and values [..., S, V].

    `draw` creates the dropout mask. Returns None if leading dimensions differ or are missing, and in half precision,
    including autocast, where queries and keys must be scaled separately.
    """
    if torch.is_autocast_enabled(query.device.type) or (dropout_p and not has_scaled_mask(query, dropout_p)):
        return None
    if query.dtype not in (torch.float32, torch.float64) or query.dim() < 3 or (is_causal and attn_mask is not None):
        return None
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return None
    if enable_gqa and query.dim() == 4:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    leading = query.shape[:-2]
    if key.shape[:-2] != leading or value.shape[:-2] != leading or key.device != query.device or is_empty(query):
        return None
    queries, keys, values = (tensor.flatten(0, -3) for tensor in (query, key, value))
    scores = torch.bmm(queries, keys.transpose(1, 2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = scores.unflatten(0, leading)
    unmasked = None
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores + _bias(visible, query.dtype)[0]  # no row is fully masked
    elif attn_mask is not None:
        bias, unmasked = _bias(attn_mask, query.dtype)
        scores = scores + bias
    probabilities = torch.softmax(scores, -1)
    if dropout_p:
        probabilities = probabilities * draw(probabilities, dropout_p)
    result = torch.bmm(probabilities.flatten(0, -3), values).unflatten(0, leading)
    return result if unmasked is None else result * unmasked


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias of the scores, and a factor per row: 0 if the whole row is masked, else 1.

    A row with only minus infinity gets no bias, so it has no NaN, and the factor makes its result zero. All other
    numbers stay as they are, because any substitute for infinity would count next to the lowest numbers.
    """
    if mask.dtype is torch.bool:
        unmasked = mask.any(-1, keepdim=True)
        bias = torch.where(mask | ~unmasked, 0.0, -torch.inf).to(dtype)
    else:
        unmasked = mask.amax(-1, keepdim=True) != -torch.inf  # a row with NaN is not masked
        bias = torch.where(unmasked, mask, 0.0)
    return bias, unmasked.to(dtype)


_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
    torch.nn.functional.dropout: _dropout,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
}
"""Each takes the function's arguments, and a function that draws masks.

It returns None if PyTorch's decomposition should be traced.
"""


class _ReplacedFunctions(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is untyped here
    def __init__(self, draw: DropoutMask) -> None:
        super().__init__()
        self._replaced = {function: functools.partial(ours, draw=draw) for function, ours in _REPLACED.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._replaced[function](*args, **kwargs) if function in self._replaced else None
        return function(*args, **kwargs) if result is None else result


_PURE_MODULES = ("_operator", "math", "torch")
"""Functions that are called with sizes, and functions that take one of several results."""
_COMPARISONS = tuple(getattr(torch.ops.aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
    """Split a joint graph at its minimum cut.

    Dropout masks are saved instead of redrawn for the gradient. An extreme to which the gradient compares the numbers
    that it was taken of is taken again of these: computed in another session, they may differ in the last digit, so
    that none of them would be equal to it.

    PyTorch's own pass for merging duplicates imports most of inductor, which takes 0.7 s (PyTorch 2.13).
    """
    from functorch.compile import config, min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        if is_dropout_mask(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    if config.cse:
        merge_duplicates(joint.graph)
    keep_channels_last(joint.graph)
    for node in joint.graph.nodes:
        for operand in _compared_extreme(node) if is_call(node, *_COMPARISONS) else ():
            operand.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    with config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **arguments)


def _compared_extreme(comparison: Node) -> list[Node]:
    """Return the operand that is an operator's result for the other operand, such as its maximum, and its views."""
    for operand, other in itertools.permutations(map(_with_origin, comparison.args)):
        if operand and other and other[-1] in operand[-1].all_input_nodes:
            return operand
    return []


def _with_origin(node: Any) -> list[Node]:
    """Return a node and, if it is a view or one of several results, what it is of, down to the first that is none."""
    if not isinstance(node, torch.fx.Node):
        return []
    is_part = is_view(node) or node.target is operator.getitem
    return [node, *(_with_origin(node.args[0]) if is_part else [])]


def merge_duplicates(graph: torch.fx.Graph) -> None:
    """Merge each repeated call into the earlier one, like `torch._functorch.compile_utils.fx_graph_cse`.

    Calls are kept if a graph output shares their memory, because outputs must be different tensors; if a tensor is
    modified between them; and if they draw numbers, leave memory uninitialized or have data-dependent sizes.
    """
    (output,) = graph.find_nodes(op="output")
    returned = {storage for node in output.all_input_nodes if (storage := _storage(node)) is not None}
    seen: dict[Hashable, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            seen.clear()
        elif _is_pure(node) and _storage(node) not in returned:
            first = seen.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_pure(node: Node) -> bool:
    """Return whether a second call with the same arguments gives the same result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") in _PURE_MODULES
    return not (is_random(node) or is_uninitialized(node) or _OF_DATA.intersection(node.target.tags))


def _storage(node: Node) -> int | None:
    """Return an identifier of the memory of a node's fake tensor; None if it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        storage: int = value.untyped_storage()._cdata
    except NotImplementedError:  # sparse, for example
        return None
    return storage


def _frozen(argument: object) -> Hashable:
    """Return an argument as a key: 1, 1.0 and True are distinct, and so are 0.0 and -0.0."""
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(value)) for name, value in argument.items())
    if isinstance(argument, torch.fx.Node):
        node: Hashable = argument
        return node
    return type(argument), repr(argument)
