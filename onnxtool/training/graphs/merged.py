"""Give back initializers that an exporter merged because they were equal, such as the biases of a new network.

Training them as one tensor would train another network. A node says which parameter it read before they were merged:
`torch.onnx`'s dynamo exporter by the FX node in its metadata, its TorchScript exporter by an Identity with the
parameter's name, and both by the module in the node's name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from onnxtool.autodiff.rules.tensor import PADDING_INDEX
from onnxtool.training.graphs.parameters import FLOATS

FX_NODE = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_PARAMETER = re.compile(r"%((?:p|b)_\w+)")
_PADDING = re.compile(r"aten\.embedding\.default\]\(args = \(%\w+, %\w+, (\d+)")
_BIAS = re.compile(r"aten\.linear\.default\]\(args = \(%\w+, %p_\w+, %p_(\w+)\)")
_PLACES = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
_LAYERS = ("BatchNormalization", "Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization")


def give_back(model: onnx.ModelProto) -> list[str]:
    """Give each module its own initializers, and mark the padding of embeddings; in place.

    A matrix that several modules read stays one tensor, unless all its numbers are equal.

    Returns:
        A note for each such matrix.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in FLOATS}
    outputs = {value.name for value in graph.output}
    for node in list(graph.node):
        padding = _PADDING.search(_metadata(node, FX_NODE))
        if padding and not _metadata(node, PADDING_INDEX):
            node.metadata_props.add(key=PADDING_INDEX, value=padding[1])
        _restore_bias(graph, node, tensors)
        source = tensors.get(node.input[0]) if node.op_type == "Identity" and node.output[0] not in outputs else None
        if source is not None and _may_be_merged(source):
            _copy(graph, source, node.output[0], tensors)
            graph.node.remove(node)
    notes = []
    for tensor in list(tensors.values()):
        owners = _owners(graph, tensor.name, tensors)
        if len(owners) < 2:
            continue
        if _may_be_merged(tensor):
            kept = tensor.name if tensor.name in owners else next(iter(owners))
            for owner in owners.keys() - {kept}:
                _copy(graph, tensor, _free(owner, tensors), tensors)
                for node, place in owners[owner]:
                    node.input[place] = graph.initializer[-1].name
        else:
            notes.append(f"{tensor.name} is read by {len(owners)} modules, and trained as one tensor")
    return notes


def _restore_bias(graph: onnx.GraphProto, node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> None:
    """Add the zeros that the exporter left out of a Gemm as a bias."""
    biased = _BIAS.search(_metadata(node, FX_NODE)) if node.op_type == "Gemm" and len(node.input) == 2 else None
    if biased is None or node.input[1] not in tensors:
        return
    is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    size = tensors[node.input[1]].dims[0 if is_transposed else 1]
    name = _free(_dotted(biased[1], node), tensors)
    _copy(graph, numpy_helper.from_array(np.zeros(size, np.float32)), name, tensors)
    node.input.append(name)


def _may_be_merged(tensor: onnx.TensorProto) -> bool:
    """Return whether two parameters are likely to start with these numbers: vectors, and matrices of one number."""
    if len(tensor.dims) < 2:
        return True
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    array = numpy_helper.to_array(tensor)
    return array.size > 0 and bool(np.all(array == array.flat[0]))


def _owners(
    graph: onnx.GraphProto, name: str, tensors: Mapping[str, onnx.TensorProto]
) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Return the reads of an initializer by the parameter that each one is of; none if one of them does not tell."""
    owners: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for place, read in enumerate(node.input):
            if read == name:
                owner = _owner(node, place, tensors)
                if owner is None:
                    return {}
                owners[owner].append((node, place))
    return owners


def _owner(node: onnx.NodeProto, place: int, tensors: Mapping[str, onnx.TensorProto]) -> str | None:
    """Return the name of the parameter that a node reads at a place; None if the node does not tell."""
    if fx_node := _metadata(node, FX_NODE):
        found = _PARAMETER.findall(fx_node.partition("(args")[2])
        places = [one for one, read in enumerate(node.input) if read in tensors]
        back = len(places) - places.index(place)  # a product comes before its bias, and reads the weight alone
        if back > len(found):
            return f"{node.input[place]}_constant"
        return _dotted(found[-back][2:], node)
    scope = node.name.rpartition("/")[0].strip("/").replace("/", ".")
    if not scope:
        return None
    kind = _PLACES.get(place, "") if node.op_type in _LAYERS else {"Add": "bias", "Mul": "weight"}.get(node.op_type, "")
    return f"{scope}.{kind or place}"


def _dotted(flat: str, node: onnx.NodeProto) -> str:
    """Return `layer.0.weight` for `layer_0_weight`, by the modules that the node is in."""
    modules = re.findall(r"'([^']*)'", _metadata(node, _SCOPES))
    for module in sorted(modules, key=len, reverse=True):
        prefix = module.replace(".", "_") + "_"
        if module and flat.startswith(prefix):
            return f"{module}.{flat.removeprefix(prefix)}"
    return flat


def _free(name: str, tensors: Mapping[str, onnx.TensorProto]) -> str:
    return next(one for one in _numbered(name) if one not in tensors)


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in range(1, 2**31):
        yield f"{name}_{number}"


def _copy(graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str, tensors: dict[str, onnx.TensorProto]) -> None:
    copy = graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = name
    tensors[name] = copy


def _metadata(node: onnx.NodeProto, key: str) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == key), "")
