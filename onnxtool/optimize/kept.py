"""Keep nodes that a user names in float32: match patterns, follow the matches through passes, and read the result.

Patterns are matched against the input file, whose names a user can see, and noted on its nodes in memory. Nodes that a
pass writes inherit the notes of those that they replace.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path

import onnx_ir as ir

from onnxtool.errors import OptionError, PassError
from onnxtool.graph.edit import is_float, is_weight, tensor_of
from onnxtool.graph.shapes import find_shapes
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.report import KeptNode
from onnxtool.summary import FUSED_OPERATORS

_KEY = "onnxtool.keep_float32"  # in metadata that no file has: the patterns of a node, or those noted in a model
PARTS = "onnxtool.keep_float32_parts"
"""Key in the metadata of an attention's packed weight: the patterns of the layers in it."""
_SCOPES = "pkg.torch.onnx.name_scopes"
_FUSED = frozenset(
    part for names in FUSED_OPERATORS.values() for name in names for part in (name, name.rpartition("::")[2])
)
_OTHERS = {ir.DataType[name].value for name in ("FLOAT16", "BFLOAT16", "INT8", "UINT8", "INT4", "UINT4")}
_Key = tuple[str, str]


def patterns_of(node: ir.Node | None) -> tuple[str, ...]:
    """Return the patterns that keep a node in float32; empty if none does."""
    return () if node is None else node.meta.get(_KEY, ())


def note_patterns(node: ir.Node | None, patterns: Iterable[str]) -> None:
    """Keep a node in float32 for further patterns, if there are any."""
    if node is not None and (merged := tuple(dict.fromkeys([*patterns_of(node), *patterns]))):
        node.meta[_KEY] = merged


def require_matches(model: ir.Model, patterns: Sequence[str]) -> None:
    """Check that each pattern matches a node of an input file, or an operator that passes write.

    Raises:
        OptionError: one matches nothing; it names the closest names.
    """
    known = {name for node in model.graph.all_nodes() for name in _names(node)} | _FUSED
    for pattern in patterns:
        if not any(map(_matcher(pattern), known)):
            named = sorted((name for name in known if _dotted(pattern) in name), key=lambda name: (len(name), name))
            close = named[:3] or difflib.get_close_matches(_dotted(pattern), sorted(known), cutoff=0.5)
            near = f"the closest names are {', '.join(close)}; " if close else ""
            raise OptionError(
                f"--keep_float32 {pattern} matches no node, layer or operator of the model",
                f"{near}onnxtool stats lists the operators, and Netron the names of nodes",
            )


def note_matches(model: ir.Model, patterns: Sequence[str]) -> ir.Model:
    """Note on each float32 node of a model which patterns match it; after the first time, only by its operator."""
    is_input, model.meta[_KEY], dtypes = _KEY not in model.meta, patterns, find_shapes(model).dtypes
    matchers = {pattern: _matcher(pattern) for pattern in patterns}
    for node in filter(lambda node: _is_float32(node, dtypes), model.graph.all_nodes()):
        names = _names(node) if is_input else _operators(node)  # passes join weights, and name nodes
        note_patterns(node, (pattern for pattern, matches in matchers.items() if any(map(matches, names))))
    return model


def read_kept(converted: ir.Model, path: Path, patterns: Sequence[str]) -> tuple[KeptNode, ...]:
    """Return the nodes of the file at `path` that patterns keep and that compute in float32, on float32 weights.

    Raises:
        PassError: a pattern keeps none.
    """
    noted = {_key(node): patterns_of(node) for node in converted.graph.all_nodes() if patterns_of(node)}
    model = load_model(path) if noted else converted
    dtypes = find_shapes(model).dtypes if noted else {}
    kept = [
        KeptNode(_key(node)[1], node.op_type, noted[_key(node)])
        for node in model.graph.all_nodes()
        if _key(node) in noted and _is_float32(node, dtypes)
    ]
    for pattern in patterns:
        if not any(pattern in kept_node.patterns for kept_node in kept):
            raise PassError(
                f"--keep_float32 {pattern} keeps nothing: no node that it matches computes in float32 in the result",
                "no file was written; its matches are folded into constants, have no floats, or were not float32",
            )
    return tuple(kept)


def _matcher(pattern: str) -> Callable[[str], bool]:
    dotted = _dotted(pattern)
    match = re.compile(translate(dotted)).match
    return lambda name: name == dotted or match(name) is not None


def _dotted(name: str) -> str:
    return name.replace("/", ".").strip(".")


def _names(node: ir.Node) -> set[str]:
    """Return the names by which a pattern finds a node: its own, its layers, and its operator.

    Layers are known from the same places as in `stats`: what torch notes, the node's name, or its weights' names.
    """
    layers = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES, ""))[:-1]  # the last is the node
    if not layers and "/" not in str(node.name):
        layers = [
            str(operand.name)
            for operand in node.inputs
            if operand is not None and is_weight(operand) and is_float(operand)
        ]
    names = _operators(node)
    for name in (str(node.name or ""), *layers):
        parts = _dotted(name).split(".")
        names.update(".".join(parts[: end + 1]) for end in range(len(parts)))
    return names - {""}


def _operators(node: ir.Node) -> set[str]:
    return {node.op_type, f"{node.domain}::{node.op_type}"}


def _key(node: ir.Node) -> _Key:
    """Identify a node in copies of its graph; nodes may have no name."""
    return node.op_type, str(node.name or node.outputs[0].name)


def _is_float32(node: ir.Node, dtypes: Mapping[str, int]) -> bool:
    """Whether a node computes in float32; a Shape reads no numbers."""
    values = [
        operand
        for operand in (*node.inputs, *node.outputs)
        if operand is not None and node.op_type not in ("Shape", "Size")
    ]
    element_types = {
        tensor_of(value).dtype.value if is_weight(value) else dtypes.get(str(value.name)) for value in values
    }
    return ir.DataType.FLOAT.value in element_types and not _OTHERS & element_types


@dataclass(frozen=True)
class Trail:
    """The nodes of a graph before a pass: their patterns, what they read, and the maker of each value."""

    notes: Mapping[_Key, tuple[str, ...]]
    reads: Mapping[_Key, Sequence[str]]
    makers: Mapping[str, _Key]

    @classmethod
    def of(cls, model: ir.Model) -> Trail | None:
        """Return the trail of a model; None if no patterns were noted in it."""
        if _KEY not in model.meta:
            return None
        nodes = {_key(node): node for node in model.graph}
        reads = {
            key: ["" if operand is None else str(operand.name) for operand in node.inputs]
            for key, node in nodes.items()
        }
        makers = {str(value.name): key for key, node in nodes.items() for value in node.outputs}
        return cls({key: patterns_of(node) for key, node in nodes.items()}, reads, makers)

    def note(self, model: ir.Model) -> None:
        """Note on new nodes the patterns of those that they replace.

        If several fusions replace a node, such as one that makes a mask, its note counts only where its pattern has no
        other match. Other new nodes take the patterns that all their readers have.
        """
        model.meta[_KEY] = True
        for node in model.graph:
            note_patterns(node, self.notes.get(_key(node), ()))  # a pass may return other objects
        gone = self.reads.keys() - {_key(node) for node in model.graph}
        new = [node for node in model.graph if _key(node) not in self.reads]
        replaced = {node: self._between(node, gone) for node in new}
        for pattern in dict.fromkeys(pattern for key in gone for pattern in self.notes[key]):
            heirs = [[node for node in new if key in replaced[node]] for key in gone if pattern in self.notes[key]]
            sole = {nodes[0] for nodes in heirs if len(nodes) == 1}
            for node in sole.union(*(nodes for nodes in heirs if sole.isdisjoint(nodes))):
                note_patterns(node, [pattern])
        for node in model.graph:
            for value, name in zip(node.inputs, self.reads.get(_key(node), ()), strict=False):
                maker, equal = self.makers.get(name), None if value is None else value.producer()
                if maker in gone and equal is not None and equal.op_type == maker[0]:  # merged with an equal one
                    note_patterns(equal, self.notes[maker])
        for node in reversed(new):
            readers = [reader for value in node.outputs for reader, _ in value.uses()]
            if not replaced[node]:
                shared = Counter(pattern for reader in readers for pattern in patterns_of(reader))
                note_patterns(node, [pattern for pattern, count in shared.items() if count == len(readers)])

    def _between(self, node: ir.Node, gone: AbstractSet[_Key]) -> set[_Key]:
        """Return the nodes that are gone between the inputs of a new node and the values that its results replace."""
        waiting = [str(value.name) for value in node.outputs]
        for reader, place in (use for value in node.outputs for use in value.uses()):
            waiting += self.reads.get(_key(reader), [])[place : place + 1]
        inputs, replaced = (
            {"" if operand is None else str(operand.name) for operand in node.inputs},
            set[_Key](),
        )
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is not None and maker in gone and maker not in replaced:
                replaced.add(maker)
                waiting += [name for name in self.reads[maker] if name not in inputs]
        return replaced
