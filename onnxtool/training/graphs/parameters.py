"""Select a model's parameters to train and freeze, by name or pattern."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from onnxtool.errors import ArtifactError

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


@dataclass(frozen=True)
class Selection:
    """The parameters to train and to freeze, by exact name.

    Attributes:
        optional: trained only if the loss depends on them, otherwise frozen.
    """

    trained: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)


def select_parameters(
    model: onnx.ModelProto,
    trained: Sequence[str] | None,
    frozen: Sequence[str] | None,
    parameters: Sequence[str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Selection:
    """Resolve names and patterns (`*.bias`, as in fnmatch) to parameters.

    Patterns match names in `parameters`. If that is None, they match float initializers of more than one element, plus
    one-element initializers that belong to a layer; running statistics and quantization scales never match. A
    parameter matched by patterns in both lists is frozen, and an exact name takes precedence over any pattern. The
    exact name of an input to train stands for its gradient.

    Raises:
        ArtifactError: a name is in both lists or not in the model, or a pattern matches nothing.
    """
    tied = aliases or {}
    trained, frozen = ([tied.get(entry, entry) for entry in listed_names(entries)] for entries in (trained, frozen))
    inputs = list(_inputs(model))
    names = [tensor.name for tensor in model.graph.initializer]
    floats = matchable_parameters(model, parameters)
    matched = {name: name for name in floats} | {other: name for other, name in tied.items() if name in floats}
    to_train, optional = _resolved(trained, [*inputs, *names], matched, "train")
    to_freeze, also_frozen = _resolved(frozen, names, matched, "freeze")
    check_disjoint(to_train, to_freeze)
    kept = to_freeze | (also_frozen - to_train)
    return Selection(
        tuple(name for name in (*inputs, *names) if name in to_train | (optional - kept)),
        tuple(name for name in names if name in kept),
        frozenset(optional),
    )


def matchable_parameters(model: onnx.ModelProto, parameters: Sequence[str] | None = None) -> list[str]:
    """Return the names that patterns match, in model order."""
    initializers = model.graph.initializer
    if parameters is not None:
        return [tensor.name for tensor in initializers if tensor.name in parameters]
    statistics = {name for node in model.graph.node for name in _statistics(node)}
    weights = _weights(model)
    return [
        tensor.name
        for tensor in initializers
        if tensor.data_type in FLOATS and tensor.name not in statistics
        if any(size > 1 for size in tensor.dims) or (tensor.dims and tensor.name in weights)
    ]


def single_numbers(model: onnx.ModelProto, selection: Selection, names: Collection[str] = ()) -> list[str]:
    """Return numbers in formulas that are neither trained, frozen nor `names`, unless an exporter made up the name."""
    known = {*selection.trained, *selection.frozen, *matchable_parameters(model), *names}
    operands = {
        name for node in model.graph.node if node.op_type in ("Add", "Div", "Mul", "Sub") for name in node.input
    }
    return [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type in FLOATS and prod(tensor.dims) == 1 and tensor.name in operands - known
        if not _MADE_UP.search(tensor.name)
    ]


_MADE_UP = re.compile(r"^(_?val_|onnx::|/|\d+$|scalar_tensor|lifted_)|const|eps", re.IGNORECASE)
# The first input of each operator that is a weight regardless of size.
_LAYERS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "PRelu", "RNN", "BatchNormalization"), 1),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "LayerNormalization"), 1),
    **dict.fromkeys(("Gather", "MatMul"), 0),
}


def _weights(model: onnx.ModelProto) -> set[str]:
    """Return the names that layers read as weights, or as biases added to a product."""
    products = {node.output[0] for node in model.graph.node if node.op_type in ("Conv", "ConvTranspose", "MatMul")}
    names: set[str] = set()
    for node in model.graph.node:
        if node.op_type in _LAYERS:
            names.update(node.input[_LAYERS[node.op_type] :])
        elif node.op_type == "Add" and not products.isdisjoint(node.input):
            names.update(node.input)
    return names


def join_tied(model: onnx.ModelProto, folder: str, parameters: Sequence[str] | None) -> dict[str, str]:
    """Make a head read the embedding that it equals bit for bit, transposed or not, so that both are trained as one.

    Returns:
        The name of the embedding for each such head that is not in `parameters`.
    """
    graph = model.graph
    matrices = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) == 2 and min(tensor.dims) > 1}
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather" and node.input[0] in matrices}
    heads = {node.input[1] for node in graph.node if node.op_type in ("Gemm", "MatMul") and node.input[1] in matrices}
    tied: dict[str, str] = {}
    for head, table in itertools.product(sorted(heads - tables - {*(parameters or ())}), sorted(tables)):
        first, second = matrices[head], matrices[table]
        if head in tied or first.data_type != second.data_type or sorted(first.dims) != sorted(second.dims):
            continue
        ours, theirs = (ir.serde.deserialize_tensor(tensor, folder).numpy() for tensor in (first, second))
        is_same = np.array_equal(ours, theirs)
        if (is_same or np.array_equal(ours, theirs.T)) and ours.min() != ours.max():  # not two constants such as zeros
            tied[head] = table
            graph.initializer.remove(first)
            for value in [value for value in graph.input if value.name == head]:
                graph.input.remove(value)
            graph.node.insert(0, onnx.helper.make_node("Identity" if is_same else "Transpose", [table], [head]))
    return tied


def check_disjoint(trained: Iterable[str], frozen: Iterable[str]) -> None:
    """Refuse parameters that are both trained and frozen.

    Raises:
        ArtifactError: some are in both lists; they are named.
    """
    both = sorted(set(trained) & set(frozen))
    if both:
        raise ArtifactError(f"{', '.join(both)} cannot be trained and frozen at once", "name them in one list only")


def check_names(model: onnx.ModelProto, trained: Iterable[str], frozen: Iterable[str]) -> None:
    """Refuse unknown names, and trained parameters or inputs that are not float32.

    Raises:
        ArtifactError: a name is refused; the closest names are suggested.
    """
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    with_inputs = _inputs(model) | kinds
    for name, known in (*((name, with_inputs) for name in trained), *((name, kinds) for name in frozen)):
        if name not in known:
            raise _unknown(name, list(kinds))
    for name in trained:
        if with_inputs[name] != TensorProto.FLOAT:
            kind = TensorProto.DataType.Name(with_inputs[name]).lower()
            if name not in kinds:
                raise ArtifactError(
                    f"the input {name} is {kind}, and inputs with a gradient are float32", "leave it out"
                )
            raise ArtifactError(
                f"the parameter {name} is {kind}, and trained parameters must be float32",
                "freeze it, or export the model in float32",
            )


def _inputs(model: onnx.ModelProto) -> dict[str, int]:
    """Return the dtypes of inputs that are not initializers."""
    parameters = {tensor.name for tensor in model.graph.initializer}
    inputs = (value for value in model.graph.input if value.name not in parameters)
    return {value.name: value.type.tensor_type.elem_type for value in inputs}


def _resolved(
    entries: Sequence[str], names: Sequence[str], matched: Mapping[str, str], verb: str
) -> tuple[set[str], set[str]]:
    """Return the parameters a list names, and those only its patterns match; `matched` maps names to them."""
    exact = {entry for entry in entries if entry in names}
    by_pattern: set[str] = set()
    for pattern in [entry for entry in entries if entry not in exact]:
        if not any(sign in pattern for sign in "*?["):
            raise _unknown(pattern, list(dict.fromkeys((*names, *matched))))
        matches = {name for alias, name in matched.items() if fnmatchcase(alias, pattern)}
        if not matches:
            known = ", ".join(list(matched)[:5])
            raise ArtifactError(
                f"the pattern {pattern!r} of parameters to {verb} matches none of the {len(matched)} of the model",
                f"they are called {known}{', …' if len(matched) > 5 else ''}",
            )
        by_pattern |= matches
    return exact, by_pattern - exact


def _statistics(node: onnx.NodeProto) -> Sequence[str]:
    """Return a node's inputs that are statistics: running means and variances, and quantization scales."""
    if node.op_type == "BatchNormalization":
        return list(node.input[3:5])
    return list(node.input[1:2]) if node.op_type in ("DequantizeLinear", "QuantizeLinear") else ()


def listed_names(entries: Sequence[str] | None) -> Sequence[str]:
    """Return the entries of a list; refuse a string.

    Raises:
        TypeError: it is a string.
    """
    if isinstance(entries, str):  # a string is also a sequence of strings
        raise TypeError(f"a list of names is expected, not the string {entries!r}")
    return entries or ()


def _unknown(name: str, names: Sequence[str]) -> ArtifactError:
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(names[:5]) or 'no parameters'}, …"
    return ArtifactError(f"the model has no parameter called {name!r}", hint)
