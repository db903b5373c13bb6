"""Decide which nodes of a graph onnxruntime can run, and why the others stay in PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch

from onnxtool.torch_backend.lower.channels_last import STAYS
from onnxtool.torch_backend.lower.decisions import decision, kernel_is_faster
from onnxtool.torch_backend.lower.fx_rewrites.arithmetic import is_empty_constant
from onnxtool.torch_backend.lower.torch_onnx import translations
from onnxtool.torch_backend.nodes import is_empty, is_memory_for_random, is_random, is_scaled_draw, is_view, tensor_of
from onnxtool.torch_backend.own_translations import OwnTranslation
from onnxtool.torch_backend.partition import views_of_pytorch

SIZE = "a size that Python computes"
MEMORY = "as_strided reads memory by offsets, and onnxruntime keeps values only"
RANDOM = "random numbers come from PyTorch's generator"
SCALED = "scales random numbers that PyTorch has just drawn"
CHECK = "a check, which has no result"
VIEW = "a view for what stays in PyTorch, which costs nothing there"
EMPTY = "an empty tensor: there is nothing to compute, and kernels disagree about the result"
NO_AXIS = "a number without dimensions along one of them: ONNX has no such axis"
FUSED = "one kernel of PyTorch takes one pass over memory where ONNX takes several"

_DEVICES = ("cpu", "cuda")
_SHAPES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default)
TENSOR_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    }
)


def reasons_to_stay(graph: torch.fx.Graph, rejected: Mapping[str, str]) -> dict[torch.fx.Node, str]:
    """Return the calls in `graph` that stay in PyTorch, each with its reason.

    `rejected` maps the names of nodes that an earlier attempt could not compile to the reasons.
    """
    if any(_reads_memory(node) for node in graph.nodes):
        return {node: MEMORY for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    stay: dict[torch.fx.Node, str] = {}
    sizes: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if not isinstance(node.meta.get("val"), torch.Tensor):
                sizes.add(node)
        elif node.op == "call_function":
            if _is_size_of_sizes(node, sizes):
                sizes.add(node)
                stay[node] = SIZE
            elif reason := rejected.get(node.name) or _reason(node, stay):
                stay[node] = reason
        elif node.op not in ("get_attr", "output"):
            stay[node] = f"{node.op} is not an operator"
    return stay | dict.fromkeys(views_of_pytorch(graph, stay), VIEW)


def _reads_memory(node: torch.fx.Node) -> bool:
    """Return whether the node reads a tensor by memory offsets, unless it is contiguous from its start."""
    if node.target is not torch.ops.aten.as_strided.default:
        return False
    source = node.all_input_nodes[0].meta.get("val")
    return not isinstance(source, torch.Tensor) or not source.is_contiguous() or source.storage_offset() != 0


def _is_size_of_sizes(node: torch.fx.Node, sizes: set[torch.fx.Node]) -> bool:
    """Return whether the node computes a number from input shapes without reading tensor data."""
    if isinstance(node.meta.get("val"), torch.Tensor | tuple | list) or "val" not in node.meta:
        return False
    if node.target in _SHAPES:
        return all(source in sizes or source.op == "placeholder" for source in node.all_input_nodes)
    return all(source in sizes for source in node.all_input_nodes)


def _reason(node: torch.fx.Node, stay: Mapping[torch.fx.Node, str]) -> str:
    if node.target is operator.getitem:
        return stay.get(node.all_input_nodes[0], "") or ("" if node.all_input_nodes[0].op == "call_function" else SIZE)
    if is_random(node) or is_memory_for_random(node):
        return RANDOM
    if is_scaled_draw(node):
        return SCALED
    denied = decision(node.target).denied
    if denied is not None and denied.applies(node):
        return denied.reason
    if kernel_is_faster(node, stay):
        return FUSED
    if STAYS in node.meta:
        return str(node.meta[STAYS])
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return "changes an argument in place"
    if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns:
        return CHECK
    if any("val" not in item.meta for item in (node, *node.all_input_nodes) if item.op != "get_attr"):
        return "its type is unknown before it runs"
    is_check = isinstance(node.target, torch._ops.HigherOrderOperator)  # whose order is kept by empty tensors
    if not is_empty_constant(node) and not is_check and any(map(is_empty, _values(node))):
        return EMPTY
    if not isinstance(node.target, OwnTranslation) and not translations().has(node):
        return "no translation to ONNX"
    if _has_no_axis(node):
        return NO_AXIS
    return _type_problem(node)


def _has_no_axis(node: torch.fx.Node) -> bool:
    """Return whether the node takes a dimension, and a tensor that has none, as PyTorch allows."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return False
    if all(tensor is None or tensor.dim() for tensor in map(tensor_of, node.args)):
        return False
    return any(argument.name in ("dim", "dims") for argument in node.target._schema.arguments)


def _type_problem(node: torch.fx.Node) -> str:
    for value in _values(node):
        if isinstance(value, torch.SymFloat):
            return "a float that Python computes has double precision"
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type not in _DEVICES:
            return f"no provider for the device {value.device.type}"
        if value.dtype not in TENSOR_DTYPES:
            return f"no {str(value.dtype).removeprefix('torch.')} in onnxruntime"
        if value.layout is not torch.strided:
            return f"no layout {value.layout} in onnxruntime"
        if value.dtype is torch.bfloat16 and value.device.type == "cpu":
            return "onnxruntime has no bfloat16 kernels for the CPU"
    return ""


def _values(node: torch.fx.Node) -> Iterator[object]:
    for item in (node, *node.all_input_nodes):
        value = item.meta.get("val")
        yield from value if isinstance(value, tuple | list) else (value,)
