"""The user's own translations of ATen operators: a node that has one calls an object that nothing else knows.

No decision, rewrite or fusion for the operator applies to such a node, so what runs is the user's translation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.nodes import Node, called

Translations = Mapping[Any, Callable[..., Any]]
"""For each operator, an `OpOverload`, a function of onnxscript that translates a call of it."""


class OwnTranslation:
    """The target of a node with an own translation: PyTorch runs the operator, and torch.onnx calls `translate`."""

    __module__ = "translations"

    def __init__(self, target: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
        self.target, self.function = target, function
        self.__name__ = self.__qualname__ = called(target)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the operator in PyTorch."""
        return self.target(*arguments, **options)

    def translate(self, *arguments: Any, **options: Any) -> Any:
        """Return the values of the translation, one for each result of the operator.

        Raises:
            TypeError: the function returned something else.
        """
        from onnxscript import OnnxFunction, opset18

        if isinstance(self.function, OnnxFunction) and not self.function.op_signature.outputs:
            # It has no annotations, from which onnxscript reads the number of outputs.
            kind = ir.schemas.TypeConstraintParam.any_value("T_result")
            outputs = [
                ir.schemas.Parameter(output.name, kind, True, False) for output in self.function.function_ir.outputs
            ]
            self.function._pt_onnx_signature = dataclasses.replace(self.function.op_signature, outputs=outputs)
        results = self.function(*arguments, **options)
        values = list(results) if isinstance(results, Sequence) else [results]
        returns = [str(returned.type) for returned in self.target._schema.returns]
        if len(values) != len(returns) or not all(isinstance(value, ir.Value) for value in values):
            kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
            raise TypeError(f"it returned {kinds}, and the operator returns {', '.join(returns)}")
        values = [opset18.Identity(value) for value in values]  # torch.onnx renames what it gets, even arguments
        return values if len(values) > 1 else values[0]


def check_translations(translations: Translations) -> None:
    """Require operators whose calls reach the backend, and functions.

    Raises:
        CompilationError: a key is no such operator, or its value is no function.
    """
    for target, function in translations.items():
        name = called(target) if isinstance(target, torch._ops.OpOverload) else repr(target)
        if problem := _problem(target) or ("" if callable(function) else f"has {function!r}, which is no function"):
            raise CompilationError(
                f"translations: {name} {problem}",
                "the keys are overloads of operators that explain() lists, such as torch.ops.aten.gelu.default",
            )


def _problem(target: object) -> str:
    """Return why an operator can have no translation."""
    if not isinstance(target, torch._ops.OpOverload):
        return "is not an overload of an operator"
    if {str(returned.type) for returned in target._schema.returns} != {"Tensor"}:
        return "does not return a fixed number of tensors"
    if target._can_decompose():
        return "is decomposed by PyTorch before the backend is called"
    if any(item.alias_info is not None for item in (*target._schema.arguments, *target._schema.returns)):
        return "modifies its arguments or returns a view of them"
    return "draws random numbers" if torch.Tag.nondeterministic_seeded in target.tags else ""


def mark(graph: torch.fx.Graph, translations: Translations) -> None:
    """Make the nodes of operators with an own translation call that."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in translations:
            node.target = OwnTranslation(node.target, translations[node.target])


def nodes_with_own(graph: torch.fx.Graph) -> Iterator[Node]:
    """Yield the nodes with an own translation."""
    return (node for node in graph.nodes if isinstance(node.target, OwnTranslation))
