"""What AOTAutograd traces: PyTorch functions in a form of ours, and how a joint graph is cut in two.

As one operator attention has no translation. PyTorch's own decomposition scales queries and keys separately, transposes
the gradient of the keys twice, and searches all probabilities for rows that are masked completely.
Letters of shapes: N batches and heads, L queries, S keys, E and V features.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from onnxtool.torch_backend.lower.decompositions.random import DROPOUT_MASKS, DropoutMask, has_scaled_mask
from onnxtool.torch_backend.nodes import Node, is_dropout_mask, is_random, is_uninitialized


@contextlib.contextmanager
def traceable_functions(dropout: str = "eager") -> Iterator[None]:
    """Trace our functions in place of PyTorch's, and other attention as matmuls: one operator has no translation.

    `dropout` names what draws masks, one of `DROPOUT_MASKS`.
    """
    with sdpa_kernel(SDPBackend.MATH), _ReplacedFunctions(DROPOUT_MASKS[dropout]):
        yield


def _dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, draw: DropoutMask
) -> torch.Tensor | None:
    """Compute `torch.nn.functional.dropout` as one product; None where there is no mask for it."""
    if not training or not has_scaled_mask(x, p):
        return None
    return x.mul_(draw(x, p)) if inplace else x * draw(x, p)


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

    `draw` makes the mask of dropout. None where the leading dimensions differ or are missing, and in half precision,
    also by autocast: there, queries and keys have to be scaled separately.
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
    if key.shape[:-2] != leading or value.shape[:-2] != leading or key.device != query.device:
        return None
    queries, keys, values = (tensor.flatten(0, -3) for tensor in (query, key, value))
    scores = torch.bmm(queries, keys.transpose(1, 2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = scores.unflatten(0, leading)
    unmasked = None
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores + _bias(visible, query.dtype)[0]  # no row is masked completely
    elif attn_mask is not None:
        bias, unmasked = _bias(attn_mask, query.dtype)
        scores = scores + bias
    probabilities = torch.softmax(scores, -1)
    if dropout_p:
        probabilities = probabilities * draw(probabilities, dropout_p)
    result = torch.bmm(probabilities.flatten(0, -3), values).unflatten(0, leading)
    return result if unmasked is None else result * unmasked


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias of the scores, and a factor of each row: 0 where the whole row is masked, else 1.

    A row of nothing but minus infinity has no bias, so that it has no NaN, and the factor makes its result zero. All
    other numbers stay as they are: whatever is put in the place of an infinity counts beside the lowest numbers.
    """
    if mask.dtype is torch.bool:
        unmasked = mask.any(-1, keepdim=True)
        bias = torch.where(mask | ~unmasked, 0.0, -torch.inf).to(dtype)
    else:
        unmasked = mask.amax(-1, keepdim=True) != -torch.inf  # a row with a NaN is not masked
        bias = torch.where(unmasked, mask, 0.0)
    return bias, unmasked.to(dtype)


_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
    torch.nn.functional.dropout: _dropout,
}
"""Each takes the arguments of the function, and what draws masks.

It returns None where PyTorch's decomposition is to be traced.
"""


class _ReplacedFunctions(TorchFunctionMode):  # type: ignore[misc]  # PyTorch has no types here
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
"""Of what is called with sizes, and takes one result of several."""
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
    """Cut a joint graph at its minimum; masks of dropout are saved, and not made again for the gradient.

    PyTorch's own pass that merges duplicates imports most of inductor, which costs 0.7 s (PyTorch 2.13).
    """
    from functorch.compile import config, min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        if is_dropout_mask(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    if config.cse:
        merge_duplicates(joint.graph)
    with config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **arguments)


def merge_duplicates(graph: torch.fx.Graph) -> None:
    """Let a call that repeats an earlier one be that one, as `torch._functorch.compile_utils.fx_graph_cse` does.

    Calls stay where a result of the graph shares their memory, since results are different tensors; where a change of a
    tensor is between them; and where they draw numbers, leave memory as it is or have sizes that depend on data.
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
    """Whether a second call with the same arguments gives the same result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") in _PURE_MODULES
    return not (is_random(node) or is_uninitialized(node) or _OF_DATA.intersection(node.target.tags))


def _storage(node: Node) -> int | None:
    """Return what identifies the memory of a node's fake tensor; None where it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        storage: int = value.untyped_storage()._cdata
    except NotImplementedError:  # sparse, for example
        return None
    return storage


def _frozen(argument: object) -> Hashable:
    """Return an argument as a key: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(value)) for name, value in argument.items())
    if isinstance(argument, torch.fx.Node):
        node: Hashable = argument
        return node
    return type(argument), repr(argument)
