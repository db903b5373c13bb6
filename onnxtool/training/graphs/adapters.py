"""Add low-rank adapters to products of a forward model: y = x W + b becomes y = x W + b + alpha / r * B(A(x)).

Letters: a product has I inputs and O outputs; r is the rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ArtifactError, some
from onnxtool.training.checkpoints.lora import Adapter, Lora
from onnxtool.training.graphs.parameters import listed_names
from onnxtool.training.options import LoraOptions

_LISTED = 12


@dataclass(frozen=True)
class _Weight:
    """A weight read only by products: their outputs, and whether it is [I, O] or [O, I]."""

    outputs: tuple[str, ...]
    inputs_first: bool
    sizes: tuple[int, int]


def add_adapters(
    model: onnx.ModelProto, options: LoraOptions, parameters: Collection[str], aliases: Mapping[str, str]
) -> Lora:
    """Add an adapter to each product that the options select, in place.

    Args:
        model: the forward model; A and B become initializers named MODULE.lora_A.weight and so on.
        options: rank, alpha, and the products to select.
        parameters: the names of the parameters to select from.
        aliases: other names of tied parameters, mapped to the name in the model.

    Raises:
        ArtifactError: a target matches nothing, or something other than the weight of a product.
    """
    weights, reasons = _weights(model, parameters)
    targets = _targets(listed_names(options.targets), weights, reasons, aliases)
    lora = Lora(
        options.rank,
        float(options.alpha),
        tuple(Adapter(name.removesuffix(".weight"), name, weights[name].inputs_first) for name in targets),
    )
    taken = {tensor.name for tensor in model.graph.initializer}
    taken |= {name for node in model.graph.node for name in node.output}
    existing = next((name for name in taken if name in lora.parameters or "/lora/" in name), None)
    if existing is not None:
        raise ArtifactError(f"the model has adapters already: {existing}", "pass the model without them")
    generator = np.random.default_rng(options.seed)
    scale = numpy_helper.from_array(np.float32(lora.scale), "adapters/lora/scale")
    model.graph.initializer.append(scale)
    for adapter in lora.adapters:
        model.graph.initializer.extend(_initial(adapter, lora.rank, weights[adapter.weight], generator))
    adapter_of = {output: one for one in lora.adapters for output in weights[one.weight].outputs}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        found = adapter_of.get(node.output[0]) if node.output else None
        model.graph.node.extend([node] if found is None else _beside(node, found, scale.name))
    return lora


def take_out_adapters(graph: ir.Graph, lora: Lora) -> None:
    """Bypass each adapter: its product takes over the name and readers of the sum; unread nodes are left in place.

    Raises:
        ArtifactError: the adapters in the graph were not added by `add_adapters`.
    """
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    for adapter in lora.adapters:
        found = [values[adapter.up]] if adapter.up in values else []
        for operator in ("Transpose", "MatMul", "Add"):
            nodes = [use.node for value in found for use in value.uses()]
            if not nodes or any(node.op_type != operator for node in nodes):
                raise ArtifactError(
                    f"the graph does not add {adapter.up} as onnxtool artifacts does", "take its own eval model"
                )
            found = [node.outputs[0] for node in nodes]
        for result in found:
            product = values[_part(str(result.name), "product")]
            ir.convenience.replace_all_uses_with(result, product, replace_graph_outputs=True)
            result.name, product.name = _part(str(result.name), "removed"), result.name


def _weights(model: onnx.ModelProto, parameters: Collection[str]) -> tuple[dict[str, _Weight], dict[str, str]]:
    """Return the weights that can have an adapter, in model order, and the reasons why the others cannot."""
    uses: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node, is_inside in _all_nodes(model.graph):
        for place, name in enumerate(node.input):
            uses[name].append((node, -1 if is_inside else place))
    weights: dict[str, _Weight] = {}
    reasons: dict[str, str] = {}
    for tensor in model.graph.initializer:
        if tensor.name not in parameters:
            continue
        found = [one for node, place in uses[tensor.name] for one in _products(node, place, uses, len(tensor.dims))]
        others = sorted({other for other, _, _ in found if other})
        if others or not found:
            reasons[tensor.name] = f"{' and '.join(others) or 'nothing'} reads it"
        elif tensor.data_type != TensorProto.FLOAT:
            reasons[tensor.name] = f"it is {TensorProto.DataType.Name(tensor.data_type).lower()}, not float32"
        elif len({first for _, _, first in found}) > 1:
            reasons[tensor.name] = "products read it both as it is and transposed"
        else:
            sizes = (int(tensor.dims[0]), int(tensor.dims[1]))
            weights[tensor.name] = _Weight(tuple(output for _, output, _ in found), found[0][2], sizes)
    return weights, reasons


def _all_nodes(graph: onnx.GraphProto, *, is_inside: bool = False) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """Yield all nodes, and whether each is inside the branch or body of another."""
    for node in graph.node:
        yield node, is_inside
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _all_nodes(inner, is_inside=True)


def _products(
    node: onnx.NodeProto, place: int, uses: Mapping[str, list[tuple[onnx.NodeProto, int]]], rank: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield each reader of a weight: the operator unless it is a matrix product from the right, output, and layout."""
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    is_right = not node.domain and place == 1 and rank == 2
    if is_right and node.op_type == "MatMul":
        yield "", node.output[0], True
    elif is_right and node.op_type == "Gemm" and attributes.get("alpha", 1) == 1 and not attributes.get("transA", 0):
        yield "", node.output[0], not attributes.get("transB", 0)
    elif (
        (not node.domain and node.op_type == "Transpose" and place == 0 and rank == 2)
        and attributes.get("perm", [1, 0]) == [1, 0]
        and uses[node.output[0]]
    ):
        for next_node, next_place in uses[node.output[0]]:
            if next_node.op_type == "Transpose":
                yield "Transpose", "", False
            else:
                for other, output, first in _products(next_node, next_place, uses, rank):
                    yield other, output, not first
    else:
        yield node.op_type, "", False


def _targets(
    targets: Sequence[str], weights: Mapping[str, _Weight], reasons: Mapping[str, str], aliases: Mapping[str, str]
) -> list[str]:
    """Return the weights that the targets match, in model order."""
    hint = f"adapters can be added to {_listed(weights)}"
    if not targets:
        raise ArtifactError("no product is named that an adapter goes to (--lora_targets)", hint)
    names = {name: name for name in (*weights, *reasons)}
    names |= {other: name for other, name in aliases.items() if name in names}
    chosen: set[str] = set()
    for target in targets:
        matched = {called: name for called, name in names.items() if _matches(called, target)}
        if not matched:
            raise ArtifactError(f"the target {target!r} of adapters matches none of the {len(names)} parameters", hint)
        for called, name in matched.items():
            if name in reasons:
                raise ArtifactError(
                    f"the target {target!r} of adapters matches {called}, which is not a weight used only by products: "
                    f"{reasons[name]}",
                    hint,
                )
        chosen.update(matched.values())
    return [name for name in weights if name in chosen]


def _matches(name: str, target: str) -> bool:
    """Return whether a pattern matches a weight's name, or a name the end of its module's name."""
    return fnmatchcase(name, target) or f".{name.removesuffix('.weight')}".endswith(f".{target}")


def _listed(names: Collection[str]) -> str:
    """Return patterns that cover these names, one for all layers of a network."""
    patterns = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    return some(patterns, _LISTED) or "nothing in this model"


def _initial(
    adapter: Adapter, rank: int, weight: _Weight, generator: np.random.Generator
) -> tuple[onnx.TensorProto, onnx.TensorProto]:
    """Return A [r, I], drawn as in PEFT (Kaiming uniform, a = sqrt(5)), and B [O, r], all zeros."""
    inputs, outputs = weight.sizes if weight.inputs_first else weight.sizes[::-1]
    down = generator.uniform(-1, 1, (rank, inputs)) / np.sqrt(inputs)
    return (
        numpy_helper.from_array(down.astype(np.float32), adapter.down),
        numpy_helper.from_array(np.zeros((outputs, rank), np.float32), adapter.up),
    )


def _beside(node: onnx.NodeProto, adapter: Adapter, scale: str) -> list[onnx.NodeProto]:
    """Return the product and its adapter; their sum takes the name of the product's output."""
    result, add = node.output[0], helper.make_node
    product, a, down, scaled, b, up = (_part(result, part) for part in ("product", "A", "down", "scaled", "B", "up"))
    node.output[0] = product
    return [
        node,
        add("Transpose", [adapter.down], [a], name=a, perm=[1, 0]),
        add("MatMul", [node.input[0], a], [down], name=down),
        add("Mul", [down, scale], [scaled], name=scaled),
        add("Transpose", [adapter.up], [b], name=b, perm=[1, 0]),
        add("MatMul", [scaled, b], [up], name=up),
        add("Add", [product, up], [result], name=_part(result, "add")),
    ]


def _part(result: str, part: str) -> str:
    """Name an intermediate value in the sum of a product and its adapter."""
    return f"{result}/lora/{part}"
