"""Find the parameters in a file, and give back those that an exporter merged because they were equal.

Trained as one tensor they would make another network. `torch.onnx`'s dynamo exporter writes into the metadata which
FX node a node is from, and what an initializer was computed from; its TorchScript exporter writes an Identity for each
name of a merged tensor, and the module into the node's name. Without either, a bias belongs to the matrix before it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnxtool.autodiff.rules.tensor import PADDING_INDEX
from onnxtool.errors import some
from onnxtool.training.graphs.decomposition import separate_statistics
from onnxtool.training.graphs.parameters import FLOATS, Selection, matchable_parameters

FX_NODE = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_PARAMETER = re.compile(r"%[pb]_(\w+)")
_PADDING = re.compile(r"aten\.embedding\.default\]\(args = \(%\w+, %\w+, (\d+)")
_BIAS = re.compile(
    r"aten\.(?:(?:linear|conv\w*)\.\w+\]\(args = \(%\w+, %p_\w+, %p_|addmm\.default\]\(args = \(%p_)(\w+)"
)
_CONSTANT = re.compile(r"(^|/)Constant(_\d+)?_output_0$")  # the TorchScript exporter's name for one
# FX nodes that move elements, and those of them that may repeat some.
_MOVES = re.compile(
    r"(_to_copy|alias|cat|clone|detach|embedding|flatten|index|index_select|permute|reshape|select|slice|split|squeeze"
    r"|stack|t|transpose|unsqueeze|view)(_\d+)?"
)
_SELECTS = re.compile(r"(cat|embedding|index|index_select|stack)(_\d+)?")
_PLACES = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
_LAYERS = ("BatchNormalization", "Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization")
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_Reads = list[tuple[onnx.NodeProto, int]]


@dataclass
class FileParameters:
    """The parameters of a file.

    Attributes:
        model: the model, which is changed in place.
        folder: where its external data is.
        certain: initializers that the file calls parameters.
        others: float initializers that are none: buffers, constants, and what was computed from them.
        notes: initializers, and what differs from PyTorch in how each is trained.
        doubts: by initializer, the parameters it was computed from, which are not trained.
    """

    model: onnx.ModelProto
    folder: str
    certain: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    notes: list[tuple[str, str]] = field(default_factory=list)
    doubts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: onnx.ModelProto, folder: str) -> FileParameters:
        """Give each module of `model` its own initializers, and mark the padding of embeddings; in place."""
        parameters = cls(model, folder)
        parameters._mark_padding()
        parameters._restore_biases()
        parameters._classify()
        parameters._copy_identities()
        for name in list(parameters._tensors):
            parameters._give_back(name)
        separate_statistics(model)
        return parameters

    def matched(self) -> list[str]:
        """Return the names that patterns match."""
        likely = {*matchable_parameters(self.model), *self.certain} - self.others
        return [tensor.name for tensor in self.model.graph.initializer if tensor.name in likely]

    def notes_on(self, selection: Selection) -> list[str]:
        """Return the notes on parameters that are trained."""
        return [note for name, note in dict.fromkeys(self.notes) if name in selection.trained]

    def doubts_on(self, selection: Selection) -> list[str]:
        """Return which parameters are not trained although a pattern may mean them."""
        known = {*selection.frozen, *(set(selection.trained) - selection.optional)}
        return [doubt for name, doubt in self.doubts.items() if name not in known] if selection.optional else []

    @cached_property
    def _tensors(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.model.graph.initializer if tensor.data_type in FLOATS}

    @cached_property
    def _about(self) -> dict[str, onnx.ValueInfoProto]:
        return {value.name: value for value in self.model.graph.value_info}

    def _sources(self, name: str) -> list[str]:
        """Return what the exporter computed an initializer from, without values inside of an operator."""
        folded = _metadata(self._about.get(name), _FOLDED)
        return [source for source in re.findall(r"'([^']*)'", folded) if not source.startswith("val_")]

    def _mark_padding(self) -> None:
        for node in self.model.graph.node:
            padding = _PADDING.search(_metadata(node, FX_NODE))
            if padding and not _metadata(node, PADDING_INDEX):
                node.metadata_props.add(key=PADDING_INDEX, value=padding[1])
            is_lookup = node.op_type == "Gather" and not any(attribute.i for attribute in node.attribute)
            is_pytorch = self.model.producer_name == "pytorch" and not node.metadata_props
            if is_lookup and is_pytorch and len(self._sizes(node.input[0])) == 2:
                table = node.input[0]
                self.notes.append((table, f"the file does not say which row of {table} is padding: all are trained"))

    def _sizes(self, name: str) -> list[int]:
        return list(self._tensors[name].dims) if name in self._tensors else []

    def _restore_biases(self) -> None:
        """Add the zeros that the dynamo exporter left out of a product as a bias."""
        added: dict[str, str] = {}  # by the FX name: a module that is called twice has one
        for node in self.model.graph.node:
            is_short = node.op_type in _PRODUCTS[:3] and len(node.input) == 2 and node.input[1] in self._tensors
            biased = _BIAS.search(_metadata(node, FX_NODE)) if is_short else None
            if biased is None:
                continue
            settings = {attribute.name: attribute.i for attribute in node.attribute}
            sizes, is_first = self._sizes(node.input[1]), node.op_type == "Conv" or settings.get("transB")
            size = sizes[0] if is_first else sizes[1] * settings.get("group", 1)
            if biased[1] not in added:
                zeros = numpy_helper.from_array(np.zeros(size, np.float32))
                added[biased[1]] = self._copy(zeros, _dotted(biased[1], node))
            node.input.append(added[biased[1]])

    def _classify(self) -> None:
        """Tell parameters from other initializers, by what the exporters write about them."""
        for name in self._tensors:
            kind, sources = _metadata(self._about.get(name), _KIND), self._sources(name)
            computed_from = [source for source in sources if not _is_operator(source)]
            is_constant = _metadata(self._about.get(name), _FOLDED) and not computed_from
            if kind == "PARAMETER":
                self.certain.add(name)
            elif kind or is_constant or _CONSTANT.search(name):
                self.others.add(name)
            elif computed_from and not self._is_moved(name, {name, *sources} - {*computed_from}):
                self.others.add(name)
                self.doubts[name] = f"{some(computed_from)} not trained: the exporter computed {name} from it"
        for node in self.model.graph.node:
            fx_node = _metadata(node, FX_NODE)
            if node.op_type in _PRODUCTS and "batch_norm" in fx_node.partition("(args")[0]:
                lost = some([_dotted(flat, node) for flat in _PARAMETER.findall(fx_node)[:2]])
                self.doubts[node.input[1]] = (
                    f"{lost} not trained: the exporter folded the normalization into {node.input[1]}"
                )
            elif node.op_type == "Conv" and all(name.startswith("onnx::Conv_") for name in node.input[1:]):
                self.doubts[node.input[1]] = (
                    f"{node.name} may have a BatchNormalization folded into its weights, which is not trained"
                )

    def _is_moved(self, name: str, steps: set[str]) -> bool:
        """Return whether an initializer is trained as its sources are: a repeated row has several gradients."""
        operators = [step for step in steps if _is_operator(step)]
        if all(node.op_type in ("GRU", "LSTM", "RNN") for node in self.model.graph.node if name in node.input):
            return True
        if not any(map(_SELECTS.fullmatch, operators)):
            return all(map(_MOVES.fullmatch, operators))
        array = self._array(name)
        return all(map(_MOVES.fullmatch, operators)) and np.unique(array).size == array.size

    def _array(self, name: str) -> np.ndarray:
        return ir.serde.deserialize_tensor(self._tensors[name], self.folder).numpy()

    def _copy_identities(self) -> None:
        """Give back what the TorchScript exporter merged; parameters that are tied have one name there."""
        outputs = {value.name for value in self.model.graph.output}
        for node in list(self.model.graph.node) if self.model.producer_name == "pytorch" else ():
            if node.op_type == "Identity" and node.input[0] in self._tensors and node.output[0] not in outputs:
                self._copy(self._tensors[node.input[0]], node.output[0])
                self.model.graph.node.remove(node)

    @cached_property
    def _is_untouched(self) -> bool:
        """Whether the file is as the TorchScript exporter wrote it, so that only tied parameters are one tensor."""
        has_constants = any(node.op_type == "Constant" for node in self.model.graph.node)
        return self.model.producer_name == "pytorch" and has_constants

    def _give_back(self, name: str) -> None:
        """Give each owner of an initializer its own one, or note that they share it."""
        reads = [
            (node, place) for node in self.model.graph.node for place, source in enumerate(node.input) if source == name
        ]
        if name in self.others or len(reads) < 2 or not any(size > 1 for size in self._sizes(name)):
            return
        is_told = all(_metadata(node, FX_NODE) for node, _ in reads)
        owners = self._owners_by_fx(name, reads) if is_told else self._owners_by_scope(name, reads)
        if not is_told and (
            self._is_untouched or np.ptp(self._array(name))
        ):  # numbers that differ are equal on purpose
            if len(owners) > 1:
                self.notes.append((name, f"{name} is read by {len(owners)} modules, and trained as one tensor"))
            return
        kept = name if name in owners else next(iter(owners))
        for owner in owners.keys() - {kept}:
            new = self._copy(self._tensors[name], owner)
            for node, place in owners[owner]:
                node.input[place] = new
        if not is_told and any(len(uses) > 1 for uses in owners.values()):
            self.notes.append((name, f"{name} is read in several places, and trained as one tensor in some"))

    def _owners_by_fx(self, name: str, reads: _Reads) -> dict[str, _Reads]:
        """Return the reads by the parameter that the FX node names."""
        known = {source.replace(".", "_").lower() for source in (name, *self._sources(name))}
        owners: dict[str, _Reads] = defaultdict(list)
        for node, place in reads:
            flat_names = _PARAMETER.findall(_metadata(node, FX_NODE).partition("(args")[2])
            kind = _kind(node, place)
            of_kind = [flat for flat in flat_names if flat.endswith(kind)]
            own = [] if node.op_type in _LAYERS else [flat for flat in flat_names if flat.lower() in known]
            owner = next(chain(own, of_kind, reversed(flat_names)), name)
            owners[owner].append((node, place))
        exact = name.replace(".", "_").lower()
        return {name if flat.lower() == exact else _dotted(flat, uses[0][0]): uses for flat, uses in owners.items()}

    def _owners_by_scope(self, name: str, reads: _Reads) -> dict[str, _Reads]:
        """Return the reads by the matrix multiplied before, or else by the module in the nodes' names."""
        owners: dict[str, _Reads] = defaultdict(list)
        scopes = [node.name.rpartition("/")[0].strip("/").replace("/", ".") for node, _ in reads]
        places = [
            (self._matrix_before(node, name), _uncounted(scope)) for (node, _), scope in zip(reads, scopes, strict=True)
        ]
        keys = [matrix or scope for matrix, scope in places]
        for (node, place), key in zip(reads, keys, strict=True):
            module = scopes[keys.index(key)] or key.removesuffix(".weight") or name
            owners[f"{module}.{_kind(node, place) if node.op_type in _LAYERS else _kind(*reads[0])}"].append(
                (node, place)
            )
        return owners

    def _matrix_before(self, node: onnx.NodeProto, name: str) -> str:
        """Return the matrix that a node, or one whose product it adds to, multiplies by."""
        makers = [maker for maker in self.model.graph.node if node.op_type == "Add" and {*maker.output} & {*node.input}]
        products = [maker for maker in (node, *makers) if maker.op_type in _PRODUCTS]
        read = (
            factor for maker in products for factor in maker.input if factor != name and len(self._sizes(factor)) > 1
        )
        return next(read, "")

    def _copy(self, tensor: onnx.TensorProto, name: str) -> str:
        """Add a copy of an initializer, and return its name."""
        free = next(new for new in chain([name], (f"{name}_{n}" for n in count(1))) if new not in self._tensors)
        copy = self.model.graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = free
        self._tensors[free] = copy
        return free


def _is_operator(name: str) -> bool:
    """Return whether a name is that of an FX node, and not of a parameter or buffer."""
    import torch

    return "." not in name and hasattr(torch.ops.aten, re.sub(r"(_default)?(_\d+)?$", "", name))


def _kind(node: onnx.NodeProto, place: int) -> str:
    if node.op_type in _LAYERS:
        return _PLACES.get(place, str(place))
    return "bias" if node.op_type in ("Add", "Sub") else "weight"


def _uncounted(scope: str) -> str:
    """Return a scope without the numbers of calls; it is then that of all calls of a module."""
    return re.sub(r"_\d+(?=\.|$)", "", scope)


def _dotted(flat: str, node: onnx.NodeProto) -> str:
    """Return `layer.0.weight` for `layer_0_weight`, by the modules that the node is in."""
    modules = re.findall(r"'([^']*)'", _metadata(node, _SCOPES))
    for module in sorted(modules, key=len, reverse=True):
        prefix = module.replace(".", "_") + "_"
        if module and flat.lower().startswith(prefix.lower()):
            return f"{module}.{flat[len(prefix) :]}"
    return flat


def _metadata(about: onnx.NodeProto | onnx.ValueInfoProto | None, key: str) -> str:
    entries = () if about is None else about.metadata_props
    return next((entry.value for entry in entries if entry.key == key), "")
