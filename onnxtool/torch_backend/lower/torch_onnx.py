"""Translates a graph of ATen operators by torch.onnx; knows which operators that translates, and decomposes others.

The only module that touches `torch.onnx._internal`, which PyTorch may change in any release. Tested with 2.13.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.torch_backend.lower.decisions import DECISIONS
from onnxtool.torch_backend.lower.float64_constants import keep_float64_constants
from onnxtool.torch_backend.lower.fused_kernels import small_only
from onnxtool.torch_backend.nodes import called
from onnxtool.torch_backend.run.cache import Cache, versions

_LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript")
_IR_VERSION = 10

Decompositions = dict[Any, Callable[..., Any]]


class ConversionFailedError(Exception):
    """A node of the graph has no translation.

    Attributes:
        node_name: the node's name in the graph; empty where the failure names none.
    """

    def __init__(self, message: str, node_name: str = "") -> None:
        super().__init__(message)
        self.node_name = node_name


@functools.cache
def _registry() -> Any:
    """Return torch.onnx's table of translations without those that are not used (`no_translation`)."""
    with quiet():
        from torch.onnx._internal.exporter import _registration

        registry = _registration.ONNXRegistry.from_torchlib()
    for overload in _untranslated():
        registry.functions.pop(overload.name(), None)
    return registry


def _untranslated() -> list[Any]:
    return [target for target, decided in DECISIONS.items() if decided.no_translation]


@dataclass(frozen=True)
class Translations:
    """Names of operators that have a translation, for real and for complex tensors."""

    real: frozenset[str]
    complex: frozenset[str]

    def has(self, node: torch.fx.Node) -> bool:
        """Whether there is a translation of the node's operator for its types."""
        is_complex = any(_is_complex(argument) for argument in (*node.args, *node.kwargs.values()))
        return called(node.target) in (self.complex if is_complex else self.real)


_known: list[Translations] = []  # one for the process: torch.onnx has the same translations for every graph


def translations() -> Translations:
    """Return what torch.onnx translates; the first call of a process takes a second."""
    if not _known:
        entries = [entry for found in _registry().functions.values() for entry in found]
        real, complex_ = (
            frozenset(called(entry.fx_target) for entry in entries if entry.is_complex is kind)
            for kind in (False, True)
        )
        _known.append(Translations(real, complex_))
    return _known[0]


def recall_translations(cache: Cache) -> None:
    """Read what torch.onnx translates from the record of an earlier process, or write that record.

    A damaged record can make an operator stay in PyTorch, or fail to be translated and stay then; nothing worse.

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
    """Return the table for AOTAutograd: PyTorch's decompositions of what torch.onnx does not translate, and ours."""
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
    return table


def translate(graph_module: torch.fx.GraphModule) -> ir.Model:
    """Translate a graph whose nodes have their fake values as `meta["val"]`.

    The names of the model's nodes begin with that of the FX node they were made for, and a colon.

    Raises:
        ConversionFailedError: a node cannot be translated.
    """
    from torch.onnx._internal.exporter import _core, _errors, _fx_passes, _ir_passes

    model = ir.Model(ir.Graph([], [], nodes=[], name="main_graph"), ir_version=_IR_VERSION, producer_name="onnxtool")
    with quiet():
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
                    registry=_registry(),
                )
            except _errors.ConversionError as error:
                raise ConversionFailedError(_cause(error), _node_name(error, graph_module.graph)) from error
            _ir_passes.add_opset_imports(model)
    for number, node in enumerate(model.graph):
        if "node" in node.meta:
            node.name = f"{node.meta['node'].name}:{number}"
    return model


def _node_name(error: Exception, graph: torch.fx.Graph) -> str:
    """Return the name of the node that failed: the message holds the node as PyTorch prints it."""
    message = str(error)
    return next((node.name for node in graph.nodes if f"node {node.format_node()}." in message), "")


def _cause(error: BaseException) -> str:
    """Return the first line of the error at the start of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


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
