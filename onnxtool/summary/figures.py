"""The figures of a model, and of the difference of two; field names are the keys of the JSON output.

These are named tuples, as making a dataclass of each takes `onnxtool stats` longer than reading a model. Their modules
have no `from __future__ import annotations`: typing compiles each annotation of a named tuple that is a text.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from onnxtool.model_file.metadata import UNKNOWN
from onnxtool.reports import Json, TensorInfo, short_repr

_NOTHING: Mapping[str, Json] = MappingProxyType({})


class Weight(NamedTuple):
    """An initializer, by what is known without reading it; `sha256` of its bytes where that was asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    sha256: str = ""


@short_repr
class Duplicate(NamedTuple):
    """Initializers of the same dtype, shape and data; `size_bytes` would go if they were stored once."""

    names: tuple[str, ...]
    size_bytes: int


class Layer(NamedTuple):
    """A part of a model by its scope, such as `bert.encoder.layer.0`: nodes, and bytes of initializers."""

    num_nodes: int
    size_bytes: int


@short_repr
class FunctionFigures(NamedTuple):
    """A model-local function; its nodes count here, and not in the graph."""

    name: str
    num_nodes: int
    opsets: dict[str, int]


@short_repr
class Cost(NamedTuple):
    """What one run of a batch takes, by the shapes of all values; elementwise work is no multiplication.

    Attributes:
        macs: multiplications with an addition, of matrix products, convolutions and attentions.
        macs_by_op: the same by operator, largest first.
        activation_bytes: of all values that nodes compute, were each kept.
        peak_activation_bytes: the most that are alive at once, where a value goes after its last reader.
        num_unknown_nodes: nodes whose outputs have no known shape; what they cost is not in here.
        unknown_ops: of these, by operator.
    """

    batch_size: int
    sequence_length: int
    macs: int
    macs_by_op: dict[str, int]
    activation_bytes: int
    peak_activation_bytes: int
    num_unknown_nodes: int
    unknown_ops: dict[str, int]


@short_repr
class Stats(NamedTuple):
    """The structure of one model. Node and operator counts include the bodies of If, Loop and Scan.

    Attributes:
        size_bytes: the graph file and its external data.
        num_inputs: graph inputs that are not initializers.
        num_parameters: elements of all initializers, and of Constant nodes, where some exporters keep weights.
        ops: operator to number of nodes, most frequent first; other domains as `com.microsoft::Attention`.
        initializer_bytes: dtype to bytes.
        duplicate_bytes: bytes that would go if equal initializers were stored once.
        num_functions: model-local functions.
        num_subgraphs: graphs inside nodes.
        external_bytes: the part of `size_bytes` that is not in the graph file.
        domains: domain to number of nodes.
        parameters: dtype to elements of initializers and Constant nodes.
        attribute_bytes: tensors in attributes of nodes, such as those of Constant.
        annotation_bytes: what exporters noted on graph, nodes, values and tensors, such as stack traces.
        num_attentions: nodes that are a whole attention.
        num_quantized_values: values with a quantization annotation.
        num_trainings: TrainingInfo records.
        min_onnxruntime: the first release that runs this IR version, these opsets and operators on the CPU; empty where
            none is known to.
        largest: the largest initializers.
        duplicates: the groups behind `duplicate_bytes` that waste most.
        layers: parts of the model by scope, and last what has none; empty where no name says a scope.
        functions: the model-local functions.
        steps: what onnxtool did to this file, oldest first.
        license: of the checkpoint, as the export stamped it: an id of SPDX in lower case, `other`, or `unknown`.
        license_name: of another license; else empty.
        license_link: to the text of another license; empty where there is none.
        cost: None where no batch size or sequence length was given.
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
    annotation_bytes: int = 0
    num_attentions: int = 0
    num_quantized_values: int = 0
    num_trainings: int = 0
    min_onnxruntime: str = ""
    largest: tuple[Weight, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    layers: Mapping[str, Layer] = MappingProxyType({})
    functions: tuple[FunctionFigures, ...] = ()
    steps: tuple[dict[str, Json], ...] = ()
    license: str = UNKNOWN
    license_name: str = ""
    license_link: str = ""
    cost: Cost | None = None


class Change(NamedTuple):
    """A figure before and after; None where it is absent."""

    before: Json
    after: Json


@short_repr
class MappingDelta(NamedTuple):
    """What was added to, removed from and changed in a mapping."""

    added: Mapping[str, Json] = _NOTHING
    removed: Mapping[str, Json] = _NOTHING
    changed: Mapping[str, Change] = MappingProxyType({})

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    @property
    def num_changes(self) -> int:
        """How many entries differ."""
        return len(self.added) + len(self.removed) + len(self.changed)


@short_repr
class StatsDelta(NamedTuple):
    """The difference of two models; numbers are the model's minus the base's.

    Attributes:
        weights: initializers by name: dtype and shape, and with `--weights` the hash of their data.
        hashed: whether the data of initializers was compared.
        renamed: names of the base to names of the model, of initializers with the same data; with `--weights` alone.
        layers: parts by scope.
        functions: model-local functions.
        macs: None unless the cost of both is known.
        activation_bytes: the same.
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
    renamed: Mapping[str, str] = MappingProxyType({})
    layers: MappingDelta = MappingDelta()
    functions: MappingDelta = MappingDelta()
    macs: int | None = None
    activation_bytes: int | None = None


@short_repr
class Difference(NamedTuple):
    """Two models and what separates them."""

    base: Stats
    model: Stats
    delta: StatsDelta
