"""Translate a graph of ATen operators with torch.onnx; decompose the operators that it does not translate.

This is the only module that uses `torch.onnx._internal`, which PyTorch may change in any release. Tested with 2.13.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch._guards import tracing
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from onnxtool.errors import first_line
from onnxtool.graph.edit import producer
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.torch_backend.cache import Cache, versions
from onnxtool.torch_backend.lower.decisions import DECISIONS, decision, small_only
from onnxtool.torch_backend.nodes import called, dims_by_stride, is_seen, seen_elements, seen_size
from onnxtool.torch_backend.own_translations import nodes_with_own

aten = torch.ops.aten
_LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript")
_IR_VERSION = 10

Decompositions = dict[Any, Callable[..., Any]]


class ConversionFailedError(Exception):
    """A node of the graph has no translation.

    Attributes:
        node_name: the node's name in the graph; empty if the failure names none.
    """

    def __init__(self, message: str, node_name: str = "") -> None:
        super().__init__(message)
        self.node_name = node_name


@functools.cache
def _registry() -> Any:
    """Return torch.onnx's translation table without the entries that are not used (`no_translation`)."""
    with quiet():
        from torch.onnx._internal.exporter import _registration

        registry = _registration.ONNXRegistry.from_torchlib()
    for overload in _untranslated():
        registry.functions.pop(overload.name(), None)
    return registry


def _convert_to_newest_opset(model: ir.Model) -> None:
    """Convert the model to the newest opset that own translations use; torch.onnx's translations use 18."""
    from onnxscript import version_converter

    opset = default_opset(model.opset_imports)
    for function in model.functions.values():
        for node in ir.traversal.RecursiveGraphIterator(function):
            node.version = function.opset_imports.get(node.domain)
        function.opset_imports[""] = opset  # so that it can be inlined; then its nodes are converted
    passes.InlinePass()(model)
    newest = max((node.version or 0 for node in model.graph if not node.domain), default=0)
    if newest > opset:
        version_converter.convert_version(model, newest)


def _untranslated() -> list[Any]:
    return [target for target, decided in DECISIONS.items() if decided.no_translation]


@dataclass(frozen=True)
class Translations:
    """Names of operators with a translation, for real and for complex tensors."""

    real: frozenset[str]
    complex: frozenset[str]

    def has(self, node: torch.fx.Node) -> bool:
        """Return whether the node's operator has a translation for its types."""
        is_complex = any(_is_complex(argument) for argument in (*node.args, *node.kwargs.values()))
        return called(node.target) in (self.complex if is_complex else self.real)


_known: list[Translations] = []  # one per process: torch.onnx has the same translations for every graph


def translations() -> Translations:
    """Return what torch.onnx translates; a process's first call takes a second."""
    if not _known:
        entries = [entry for overloads in _registry().functions.values() for entry in overloads]
        real, complex_ = (
            frozenset(called(entry.fx_target) for entry in entries if entry.is_complex is kind)
            for kind in (False, True)
        )
        _known.append(Translations(real, complex_))
    return _known[0]


def recall_translations(cache: Cache) -> None:
    """Load the list of torch.onnx translations from an earlier process's record, or write that record.

    A damaged record can at worst make an operator stay in PyTorch, possibly after its translation fails.

    Raises:
        OutputWriteError: the folder cannot be written to.
    """
    if not cache.folder:
        return
    key = hashlib.sha256(f"names {versions()} {sorted(op.name() for op in _untranslated())}".encode()).hexdigest()
    record = cache.read_json(key)
    if isinstance(record, dict) and all(isinstance(record.get(kind), list) for kind in ("real", "complex")):
        _known[:] = _known or [Translations(*(frozenset(map(str, record[kind])) for kind in ("real", "complex")))]
    else:
        cache.write_json(key, {"real": sorted(translations().real), "complex": sorted(translations().complex)})


def _is_complex(argument: object) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_is_complex, argument))
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


@functools.cache
def decompositions() -> Decompositions:
    """Return the table for AOTAutograd: our decompositions, and PyTorch's where torch.onnx has no translation."""
    from torch.onnx._internal.exporter import _decomp

    known = translations()
    table: Decompositions = {
        target: function
        for target, function in _decomp.create_onnx_friendly_decomposition_table(set()).items()
        if called(target) not in known.real | known.complex
    }
    for target, decided in DECISIONS.items():
        if decided.no_decomposition:
            table.pop(target, None)
        if decided.decomposition is not None:
            table[target] = decided.decomposition
        if decided.fused_kernel is not None and target in table:
            table[target] = small_only(table[target])
    return {target: _as_the_operator(target, decompose) for target, decompose in table.items()}


_CONTIGUOUS = (
    *(aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    *(aten._native_batch_norm_legit_functional.default, aten.log_sigmoid_forward.default),
)
"""Operators whose first result is contiguous, or channels_last as their input, which their fake kernels do not say."""


def _as_the_operator(target: Any, decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition whose results lie in memory as the operator's own: what is drawn like them follows it.

    Our own decompositions see to it themselves. Operators on an empty tensor are left whole: they stay in PyTorch
    (placement.py), whose kernels know more about them.
    """

    @functools.wraps(decompose)
    def decompose_as_the_operator(*arguments: Any, **options: Any) -> Any:
        tensors = [value for value in pytree.tree_leaves((arguments, options)) if isinstance(value, torch.Tensor)]
        if any(not seen_elements(tensor) for tensor in tensors[:2]):  # a gradient comes before the input
            return NotImplemented
        results = decompose(*arguments, **options)
        if results is NotImplemented or decision(target).decomposition or all(map(_is_in_order, tensors)):
            return results
        with disable_proxy_modes_tracing():
            expected = pytree.tree_leaves(target(*arguments, **options))
            if target in _CONTIGUOUS:
                expected[0] = arguments[0].contiguous(memory_format=suggest_memory_format(arguments[0]))
        leaves, structure = pytree.tree_flatten(results)
        return structure.unflatten(map(_laid_out_like, leaves, expected))

    return decompose_as_the_operator


def _is_in_order(tensor: torch.Tensor) -> bool:
    order = dims_by_stride(tensor)
    return order == tuple(sorted(order)) and all(map(seen_size, tensor.stride()))


def _laid_out_like(result: Any, expected: Any) -> Any:
    if not isinstance(result, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return result
    if result.layout is not torch.strided or not is_seen(result):
        return result
    order = dims_by_stride(expected)
    if result.dim() < 2 or order == dims_by_stride(result):
        return result
    copied = result.permute(order).clone(memory_format=torch.contiguous_format)
    return copied.permute(sorted(range(len(order)), key=order.__getitem__))


def translate(graph_module: torch.fx.GraphModule) -> ir.Model:
    """Translate a graph whose nodes have fake values in `meta["val"]`.

    Names of model nodes begin with the name of the FX node they were created for, and a colon.

    Raises:
        ConversionFailedError: a node cannot be translated.
    """
    from torch.onnx._internal.exporter import _core, _errors, _fx_passes, _ir_passes

    model = ir.Model(ir.Graph([], [], nodes=[], name="main_graph"), ir_version=_IR_VERSION, producer_name="onnxtool")
    registry = copy.copy(_registry())
    registry.functions = dict(registry.functions)
    with quiet():
        for node in nodes_with_own(graph_module.graph):
            registry.register_op(node.target, partial(node.target.translate))
        try:
            _fx_passes.insert_type_promotion_nodes(graph_module)
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise ConversionFailedError(f"types cannot be promoted: {error}") from error
        keep_float64_constants(graph_module)
        with unset_fake_temporarily():
            try:
                _core._translate_fx_graph(
                    graph_module.graph,
                    model,
                    graph_like=model.graph,
                    owned_graphs={},
                    lower="at_conversion",
                    registry=registry,
                )
            except _errors.ConversionError as error:
                raise ConversionFailedError(_cause(error), _node_name(error, graph_module.graph)) from error
            _ir_passes.add_opset_imports(model)
            if any(nodes_with_own(graph_module.graph)):
                _convert_to_newest_opset(model)
    for node in [node for node in model.graph if _counts_from_the_end(node)]:
        _without_negative(model.graph, node)
    for number, node in enumerate(model.graph):
        if "node" in node.meta:
            node.name = f"{node.meta['node'].name}:{number}"
    return model


_SAME_NUMBERS = frozenset(("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
_NEVER_NEGATIVE = frozenset(("ArgMax", "ArgMin", "Clip", "NonZero", "Range", "TopK"))


def _counts_from_the_end(node: ir.Node) -> bool:
    """Return whether ONNX would accept a negative index of a node for which PyTorch raises.

    PyTorch's operators count negative indices from the end if they take an index per dimension, as `x[i, j]` does.
    """
    origin = node.meta.get("node")
    if origin is None or not _has_indices(node.op_type) or _indexes_dimensions(origin.target):
        return False
    if producer(node.inputs[0], "Shape") is not None:
        return False  # the translation's own: the size of a dimension
    maker = producer(node.inputs[1])
    while maker is not None and maker.op_type in _SAME_NUMBERS:
        maker = producer(maker.inputs[0])
    if maker is not None and maker.op_type == "Constant":
        return maker.meta.get("node") is not origin  # the translation's own, such as the position of a slice
    return maker is None or maker.op_type not in _NEVER_NEGATIVE


@functools.cache
def _has_indices(op_type: str) -> bool:
    """Return whether an ONNX operator's second input is indices into the first."""
    inputs = onnx.defs.get_schema(op_type).inputs if onnx.defs.has(op_type) else []
    return [value.name for value in inputs[1:2]] == ["indices"]


def _indexes_dimensions(target: object) -> bool:
    """Return whether an ATen operator takes one tensor of indices, or none, for each dimension."""
    schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
    return schema is not None and any(str(argument.type) == "List[Optional[Tensor]]" for argument in schema.arguments)


def _without_negative(graph: ir.Graph, node: ir.Node) -> None:
    """Move negative indices out of bounds: the session then fails, and PyTorch raises its own error."""
    index = node.inputs[1]
    if index is None:
        return
    write = Writer(node, naming=lambda created, _number: created.meta.update(node=node.meta["node"]))
    dtype = index.dtype or ir.DataType.INT64  # unknown for Casts that torch.onnx inserts
    zero, outside = (write.constant(np.array(n, dtype.numpy()), f"index_{n}") for n in (0, 2**31 - 1))
    node.replace_input_with(1, write.node("Where", [write.op("Less", index, zero), outside, index], like=index))


def _node_name(error: Exception, graph: torch.fx.Graph) -> str:
    """Return the name of the node that failed: the message contains the node as PyTorch prints it."""
    message = str(error)
    return next((node.name for node in graph.nodes if f"node {node.format_node()}." in message), "")


def _cause(error: BaseException) -> str:
    """Return the first line of the error at the start of an error chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's messages about itself out of the user's log."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def keep_float64_constants(graph_module: torch.fx.GraphModule) -> None:
    """Turn numbers that float32 would round into graph constants: `float64_argument` and `alpha` of sums."""
    for node in list(graph_module.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            continue
        position = decision(node.target).float64_argument
        if position is not None and len(node.args) > position and _is_rounded(node.args[position]):
            with graph_module.graph.inserting_before(node):
                node.update_arg(position, _constant(graph_module, node.args[position], node.name))
        elif node.target in _SUMS and _is_rounded(alpha := node.kwargs.get("alpha", 1)):
            with graph_module.graph.inserting_before(node):
                constant = _constant(graph_module, alpha, node.name)
                scaled = graph_module.graph.call_function(aten.mul.Tensor, (node.args[1], constant))
            scaled.meta["val"] = node.args[1].meta["val"]
            node.args, node.kwargs = (node.args[0], scaled), {}


def _is_rounded(number: object) -> bool:
    """Return whether float32 cannot represent the number exactly; NaN is representable."""
    return isinstance(number, float) and number == number and ctypes.c_float(number).value != number


def _constant(graph_module: torch.fx.GraphModule, number: float, name: str) -> torch.fx.Node:
    with unset_fake_temporarily():
        tensor = torch.tensor(number, dtype=torch.float64)
    graph_module.register_buffer(f"{name}_number", tensor, persistent=False)
    node = graph_module.graph.get_attr(f"{name}_number")
    node.meta["val"] = tensor
    return node


def export(graph_module: torch.fx.GraphModule) -> ir.Model:
    """Translate a graph with `torch.export` and `torch.onnx.export`.

    They accept only tensors. A `SymInt` input must be the size of an input tensor, and is read from that tensor.

    Raises:
        ConversionFailedError: no tensor has a size, or one of the exporters fails.
    """
    module = torch.fx.GraphModule(graph_module, _with_sizes_of_tensors(graph_module.graph))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    own = {node.target.target: partial(node.target.translate) for node in nodes_with_own(graph_module.graph)}
    with quiet(), unset_fake_temporarily(), tracing(None):
        try:
            program = torch.export.export(module, _examples(tensors), dynamic_shapes=_dynamic_shapes(tensors))
            exported = torch.onnx.export(
                program, dynamo=True, optimize=False, verbose=False, custom_translation_table=own
            )
        except Exception as error:  # two exporters and a tracer can raise anything
            reason = first_line(error)
            raise ConversionFailedError(f"{type(error).__name__}: {reason}") from error
    model: ir.Model = exported.model
    _add_unused_inputs(model.graph, values)
    return model


def _with_sizes_of_tensors(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of the graph that reads each `SymInt` input from a tensor."""
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        if isinstance(node.meta["val"], torch.Tensor):
            copies[node] = result.node_copy(node)
    for node in placeholders:
        if node in copies or not node.users:
            continue
        dimension = _dimension_of_size(str(node.meta["val"]), [other for other in placeholders if other in copies])
        if dimension is None:
            raise ConversionFailedError(f"the size {node.meta['val']} is not the size of a tensor among the inputs")
        copies[node] = result.call_function(torch.ops.aten.sym_size.int, (copies[dimension[0]], dimension[1]))
    result.output(result.graph_copy(graph, copies))
    return result


def _dimension_of_size(size: str, tensors: Sequence[torch.fx.Node]) -> tuple[torch.fx.Node, int] | None:
    """Return a tensor and its dimension that has the given size."""
    for node in tensors:
        for dim, other in enumerate(node.meta["val"].shape):
            if str(other) == size:
                return node, dim
    return None


def _examples(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return zero tensors with the sizes at the first call: only shapes, types and layouts matter."""
    examples = []
    for fake in tensors:
        shape, strides = ([seen_size(size) for size in sizes] for sizes in (fake.shape, fake.stride()))
        examples.append(torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device).zero_())
    return tuple(examples)


def _dynamic_shapes(tensors: Sequence[torch.Tensor]) -> object:
    """Mark the symbolic dimensions, which must not become constants."""
    dims = [
        {dim: torch.export.Dim.DYNAMIC for dim, size in enumerate(fake.shape) if not isinstance(size, int)}
        for fake in tensors
    ]
    return tuple(dims) if any(dims) else None


def _add_unused_inputs(graph: ir.Graph, values: Sequence[object]) -> None:
    """Restore the non-tensor inputs, because callers of the model pass all inputs."""
    tensors = iter(list(graph.inputs))
    inputs = [
        next(tensors)
        if isinstance(value, torch.Tensor)
        else ir.Input(f"size_{index}", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        for index, value in enumerate(values)
    ]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
