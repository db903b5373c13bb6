"""Translates a graph of ATen operators into an ONNX model.

The only module that touches `torch.onnx._internal`, which PyTorch may change in any release. Tested with 2.13.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.torch_backend.lower.denylist import WRONG_TRANSLATIONS
from onnxtool.torch_backend.lower.float64_constants import keep_doubles

TESTED_TORCH = ("2.13",)
_LOGGERS = (
    *(f"torch.onnx._internal.exporter.{name}" for name in ("_registration", "_core", "_ir_passes")),
    *("onnx_ir.passes.common.initializer_deduplication", "onnxscript.optimizer"),
)
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
    """Return torch.onnx's table of translations without those that hold for inference only."""
    with quiet():
        from torch.onnx._internal.exporter import _registration

        registry = _registration.ONNXRegistry.from_torchlib()
    for overload in WRONG_TRANSLATIONS:
        registry.functions.pop(overload.name(), None)
    return registry


def registered_names() -> tuple[list[str], list[str]]:
    """Return the names of all operators that have a translation: for real, and for complex tensors."""
    entries = [entry for found in _registry().functions.values() for entry in found]
    real, complex_ = ([name_of(e.fx_target) for e in entries if e.is_complex is kind] for kind in (False, True))
    return real, complex_


def name_of(target: Any) -> str:
    """Return a name for what a node calls, the same in every process."""
    if isinstance(target, torch._ops.OpOverload):
        name: str = target.name()
        return name
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def decompositions_but(names: Collection[str]) -> Decompositions:
    """Return PyTorch's decompositions of all operators but those of these names."""
    from torch.onnx._internal.exporter import _decomp

    table: Decompositions = _decomp.create_onnx_friendly_decomposition_table(set())
    return {target: function for target, function in table.items() if name_of(target) not in names}


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
        keep_doubles(graph_module)
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
    """Return which node the error is about: its message holds the node as PyTorch prints it."""
    message = str(error)
    return next((node.name for node in graph.nodes if f"node {node.format_node()}." in message), "")


def _cause(error: BaseException) -> str:
    """Return the first line of what is at the bottom of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's remarks about itself out of the user's log."""
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
