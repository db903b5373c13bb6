"""Which initializers of a model are parameters, and which of them a list of names and patterns means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from onnxtool.errors import ArtifactError

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Choice:
    """Which parameters are trained and which are frozen, by exact name.

    Attributes:
        optional: those to train only where the loss depends on them; else they are frozen.
    """

    trained: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)


def choose(
    model: onnx.ModelProto,
    trained: Sequence[str] | None,
    frozen: Sequence[str] | None,
    parameters: Sequence[str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Choice:
    """Resolve names and patterns to a choice of parameters.

    A pattern (`*.bias`, as fnmatch knows them) means some of `parameters`, without which these are the float
    initializers of more than one element, but for running statistics and scales of quantization. What patterns of both
    lists mean is frozen, and an exact name goes before any pattern.

    Raises:
        ArtifactError: a name is in both lists or in no model, or a pattern means nothing.
    """
    tied = aliases or {}
    trained, frozen = ([tied.get(entry, entry) for entry in _listed(entries)] for entries in (trained, frozen))
    both = sorted(set(trained) & set(frozen))
    if both:
        raise ArtifactError(f"{', '.join(both)} cannot be trained and frozen at once", "name them in one list only")
    names = [tensor.name for tensor in model.graph.initializer]
    measured = {name for node in model.graph.node for name in _measured(node)}
    floats = [
        tensor.name
        for tensor in model.graph.initializer
        if (_has_numbers(tensor) and tensor.name not in measured if parameters is None else tensor.name in parameters)
    ]
    matched = {name: name for name in floats} | {other: name for other, name in tied.items() if name in floats}
    wanted, kept = (
        _Resolved(entries, names, matched, what) for entries, what in ((trained, "train"), (frozen, "freeze"))
    )
    loser = kept.by_pattern - wanted.exact
    return Choice(
        tuple(name for name in names if name in wanted.exact | (wanted.by_pattern - kept.exact - loser)),
        tuple(name for name in names if name in kept.exact | loser),
        frozenset(wanted.by_pattern - wanted.exact),
    )


def check_names(model: onnx.ModelProto, trained: Iterable[str], frozen: Iterable[str]) -> None:
    """Refuse names that no parameter has, and trained parameters that are not float32.

    Raises:
        ArtifactError: with the nearest names.
    """
    from onnx import TensorProto

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in (*trained, *frozen):
        if name not in tensors:
            raise _unknown(name, list(tensors))
    for name in trained:
        if tensors[name].data_type != TensorProto.FLOAT:
            kind = TensorProto.DataType.Name(tensors[name].data_type).lower()
            raise ArtifactError(
                f"the parameter {name} is {kind}, and those that are trained are float32",
                "freeze it, or export the model in float32",
            )


class _Resolved:
    """What a list means: names given as they are, and names that a pattern means, which `matched` has by all names."""

    def __init__(self, entries: Sequence[str], names: Sequence[str], matched: Mapping[str, str], verb: str) -> None:
        known = set(names)
        self.exact = {entry for entry in entries if entry in known}
        self.by_pattern: set[str] = set()
        for entry in entries:
            if entry in known:
                continue
            if not any(sign in entry for sign in "*?["):
                raise _unknown(entry, list(dict.fromkeys((*names, *matched))))
            found = {name for known_as, name in matched.items() if fnmatchcase(known_as, entry)}
            if not found:
                called = list(matched)
                raise ArtifactError(
                    f"the pattern {entry!r} of parameters to {verb} fits none of the {len(called)} of the model",
                    f"they are called {', '.join(called[:5])}{', …' if len(called) > 5 else ''}",
                )
            self.by_pattern |= found
        self.by_pattern -= self.exact


def _measured(node: onnx.NodeProto) -> Sequence[str]:
    """Return the inputs of a node that come from statistics: running ones, and scales."""
    if node.op_type == "BatchNormalization":
        return list(node.input[3:5])
    return list(node.input[1:2]) if node.op_type in ("DequantizeLinear", "QuantizeLinear") else ()


def _listed(entries: Sequence[str] | None) -> Sequence[str]:
    if isinstance(entries, str):  # a string is a sequence of strings, too
        raise TypeError(f"a list of names is expected, not the string {entries!r}")
    return entries or ()


def _has_numbers(tensor: onnx.TensorProto) -> bool:
    """Return whether it holds several floats; a single one is mostly a constant of a formula."""
    from onnx import TensorProto

    several = any(size > 1 for size in tensor.dims)
    return several and tensor.data_type in (
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.DOUBLE,
    )


def _unknown(name: str, names: Sequence[str]) -> ArtifactError:
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(names[:5]) or 'no parameters'}, …"
    return ArtifactError(f"the model has no parameter called {name!r}", hint)
