"""The domain of ONNX's own operators, which has two names: the empty string, and its alias `ai.onnx`.

Files use either. Models loaded by onnxtool only use the empty string, in opset imports, nodes and functions, so that no
other module has to handle the alias. Reports call the domain `ai.onnx`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

ALIAS = "ai.onnx"
STRINGS = "ai.onnx.contrib"  # operators of onnxruntime-extensions


def settled(domain: str) -> str:
    """Return the canonical name of a domain: the empty string for `ai.onnx`."""
    return "" if domain == ALIAS else domain


def default_opset(opset_imports: Mapping[str, int]) -> int:
    """Return the version of ONNX's own operators from versions by domain; 0 if none is declared.

    If both names are declared, the last one counts, as in onnxruntime.
    """
    return {settled(domain): version for domain, version in opset_imports.items()}.get("", 0)


def settle_imports(opset_imports: MutableMapping[str, int]) -> None:
    """Replace the alias in versions by domain, in place."""
    imports = {settled(domain): version for domain, version in opset_imports.items()}
    opset_imports.clear()
    opset_imports.update(imports)


def settle_domains(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace the alias in all opset imports, nodes and functions of `model`, in place, and return it."""
    for holder in (model, *model.functions):
        imports = {opset.domain: opset.version for opset in holder.opset_import}
        settle_imports(imports)
        for entry, (domain, version) in zip(holder.opset_import, imports.items(), strict=False):
            entry.domain, entry.version = domain, version
        del holder.opset_import[len(imports) :]
    for function in model.functions:
        function.domain = settled(function.domain)
        _settle_nodes(function.node)
    _settle_nodes(model.graph.node)
    return model


def _settle_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.domain == ALIAS:
            node.ClearField("domain")
        for graph in graphs_of(node):
            _settle_nodes(graph.node)


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs inside a node: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
