"""The figures of a model, and of the difference between two; field names are the keys of the JSON output.

These are named tuples, because creating the same dataclasses would take `onnxtool stats` longer than reading a model.
Modules that define them lack `from __future__ import annotations`, because typing compiles every string annotation of a
named tuple.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from onnxtool.model_file.metadata import UNKNOWN
from onnxtool.reports import Json, TensorInfo, short_repr

_NOTHING: Mapping[str, Json] = MappingProxyType({})


class Weight(NamedTuple):
    """An initializer, described without reading its data; `sha256`, if requested, is the hash of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    sha256: str = ""


@short_repr
class Duplicate(NamedTuple):
    """Initializers with the same dtype, shape and data; storing them once would save `size_bytes`."""

    names: tuple[str, ...]
    size_bytes: int


class Layer(NamedTuple):
    """A part of a model, named by its scope (`bert.encoder.layer.0`): its nodes and initializer bytes."""

    num_nodes: int
    size_bytes: int


@short_repr
class FunctionFigures(NamedTuple):
    """A model-local function; its nodes are counted here, not among the graph's."""

    name: str
    num_nodes: int
    opsets: dict[str, int]


@short_repr
class Stats(NamedTuple):
    """The structure of one model. Node and operator counts include the bodies of If, Loop and Scan.

    Attributes:
        size_bytes: the graph file and its external data.
        num_inputs: graph inputs that are not initializers.
        num_parameters: elements of all initializers, and of Constant nodes, where some exporters keep weights.
        ops: number of nodes by operator, most frequent first; with a prefix in other domains:
            `com.microsoft::Attention`.
        initializer_bytes: bytes by dtype.
        duplicate_bytes: bytes saved if equal initializers were stored once.
        num_functions: model-local functions.
        num_subgraphs: graphs inside nodes.
        external_bytes: the part of `size_bytes` that is not in the graph file.
        domains: number of nodes by domain.
        parameters: elements of initializers and Constant nodes by dtype.
        attribute_bytes: bytes of tensors in node attributes, such as in Constant nodes.
        num_attentions: nodes that compute a whole attention.
        min_onnxruntime: the first release that runs this IR version and these opsets and operators on the CPU; empty if
            none is known.
        largest: the largest initializers.
        duplicates: the most wasteful groups in `duplicate_bytes`.
        layers: parts of the model by scope, and last the rest; empty if no name contains a scope.
        functions: the model-local functions.
        steps: steps that onnxtool applied to this file, oldest first.
        license: the checkpoint's license, recorded by the export: an SPDX id in lower case, `other`, or `unknown`.
        license_name: the name of a license that is `other`; otherwise empty.
        license_link: a link to the text of a license that is `other`; empty if there is none.
    """

    path: str
    size_bytes: int
    ir_version: int
    producer: str
    opsets: dict[str, int]
    num_nodes: int
    num_inputs: int
    num_outputs: int
    num_initializers: int
    num_parameters: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    ops: dict[str, int]
    metadata: dict[str, str]
    initializer_bytes: dict[str, int]
    duplicate_bytes: int
    num_functions: int
    num_subgraphs: int
    external_bytes: int = 0
    domains: Mapping[str, int] = MappingProxyType({})
    parameters: Mapping[str, int] = MappingProxyType({})
    attribute_bytes: int = 0
    num_attentions: int = 0
    min_onnxruntime: str = ""
    largest: tuple[Weight, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    layers: Mapping[str, Layer] = MappingProxyType({})
    functions: tuple[FunctionFigures, ...] = ()
    steps: tuple[dict[str, Json], ...] = ()
    license: str = UNKNOWN
    license_name: str = ""
    license_link: str = ""


class Change(NamedTuple):
    """A figure before and after; None where it is absent."""

    before: Json
    after: Json


@short_repr
class MappingDelta(NamedTuple):
    """Entries added to, removed from, and changed in a mapping."""

    added: Mapping[str, Json] = _NOTHING
    removed: Mapping[str, Json] = _NOTHING
    changed: Mapping[str, Change] = MappingProxyType({})

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


class EdgeChange(NamedTuple):
    """A difference between a node and its counterpart in the base.

    Attributes:
        node: its name, or that of the value that it makes; or the name of an output of the graph.
        layer: the part of the model that it belongs to; empty if no name says it.
        what: `input 0, 1`, the name of an attribute, `added`, `removed`, or `value` of an output.
        before: the values that it read, or the attribute's; empty if it was added.
        after: likewise in the model; empty if it was removed.
    """

    node: str
    op: str
    layer: str
    what: str
    before: str
    after: str


@short_repr
class Edges(NamedTuple):
    """The connections of nodes in a model and in its base.

    Attributes:
        changed: number of changes.
        changes: the changes, in the order of the nodes.
        compared: whether all nodes were compared; otherwise, the graphs are too large or too different.
    """

    changed: int = 0
    changes: tuple[EdgeChange, ...] = ()
    compared: bool = True


@short_repr
class StatsDelta(NamedTuple):
    """The difference between two models; numbers are the model's value minus the base's.

    Attributes:
        weights: changes of initializers by name: dtype, shape, and unless `--no_weights` is given the hash of their
            data.
        hashed: whether the data of initializers was compared.
        num_not_hashed: number of initializers that agree in all that was compared, which does not include their data:
            it is not one run of bytes, or was not to be read.
        renamed: new names by old names, for initializers with the same data; none with `--no_weights`.
        layers: parts by scope.
        functions: model-local functions.
        edges: how nodes are connected, with their attributes and constants.
    """

    num_nodes: int
    num_initializers: int
    num_parameters: int
    size_bytes: int
    duplicate_bytes: int
    ops: MappingDelta
    inputs: MappingDelta
    outputs: MappingDelta
    opsets: MappingDelta
    metadata: MappingDelta
    num_attentions: int = 0
    weights: MappingDelta = MappingDelta()
    hashed: bool = False
    num_not_hashed: int = 0
    renamed: Mapping[str, str] = MappingProxyType({})
    layers: MappingDelta = MappingDelta()
    functions: MappingDelta = MappingDelta()
    edges: Edges = Edges()


@short_repr
class Difference(NamedTuple):
    """Two models and their difference."""

    base: Stats
    model: Stats
    delta: StatsDelta
