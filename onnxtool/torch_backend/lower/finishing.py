"""Prepare a translated model for a session: fold constants, fuse and correct nodes, remove unused inputs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxruntime.capi import _pybind_state as binding
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.errors import CompilationError
from onnxtool.graph.edit import attribute, constant, producer, replace
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.patterns import match_normalized, match_rotation, scaled
from onnxtool.graph.writer import Writer, scoped
from onnxtool.model_file.domains import default_opset
from onnxtool.torch_backend.lower import attempted
from onnxtool.torch_backend.lower.torch_onnx import quiet
from onnxtool.torch_backend.options import Transform
from onnxtool.torch_backend.sessions import INPUTS_KEY, NUM_NODES_KEY


def racy_nodes(model: ir.Model) -> list[str]:
    """Return the names of nodes whose result depends on the order in which threads run."""
    found: list[str] = []
    for node in model.graph:
        body = model.functions.get(node.op_identifier())
        if any(_is_racy(inner) for inner in (node, *(body or ()))):
            found.append(node.name or "")
    return found


def _is_racy(node: ir.Node) -> bool:
    attribute = node.attributes.get(RACY_ONNX.get((node.domain, node.op_type), ""))
    return attribute is not None and attribute.as_string() != "none"


def finish(model: ir.Model, num_inputs: int, num_outputs: int, *, optimize: bool) -> ir.Model:
    """Return `model` with metadata: the positions of the inputs it takes, and its number of nodes.

    Raises:
        CompilationError: its inputs and outputs do not match the graph.
    """
    if (len(model.graph.inputs), len(model.graph.outputs)) != (num_inputs, num_outputs):
        raise CompilationError(
            f"the converter made {len(model.graph.inputs)} inputs and {len(model.graph.outputs)} outputs of "
            f"{num_inputs} and {num_outputs}",
            "a converter keeps the placeholders and the outputs of the graph, in their order",
        )
    if optimize:
        with unset_fake_temporarily():
            attempted(_optimize, model.graph, model)
            fuse(model)
    for node in list(model.graph):
        if not node.domain and (correct := ONNX_CORRECTIONS.get(node.op_type)):
            correct(model.graph, node)
    _separate_outputs(model.graph)
    inputs = list(model.graph.inputs)
    used = [index for index, value in enumerate(inputs) if value.uses()]
    model.graph.inputs.clear()
    model.graph.inputs.extend(inputs[index] for index in used)
    model.metadata_props[INPUTS_KEY] = " ".join(map(str, used))
    model.metadata_props[NUM_NODES_KEY] = str(len(model.graph))
    return model


def _optimize(_graph: ir.Graph, model: ir.Model) -> None:
    """Fold constants and apply onnxscript's rules in place, node by node: a failure leaves a graph that is right."""
    from onnxscript import optimizer

    with quiet(), exact_optimizer():
        optimizer.optimize(model, onnx_shape_inference=False)


def _separate_outputs(graph: ir.Graph) -> None:
    """Give each output a separate value: onnxruntime accepts no input as an output, and no value twice."""
    seen: set[int] = set()
    for index, value in enumerate(graph.outputs):
        if id(value) not in seen and not value.is_graph_input() and not value.is_initializer():
            seen.add(id(value))
            continue
        copy = ir.Value(name=f"{value.name}_output_{index}", shape=value.shape, type=value.type)
        graph.append(ir.Node("", "Identity", [value], outputs=[copy], name=f"{value.name}:output_{index}"))
        graph.outputs[index] = copy
        seen.add(id(copy))


Correction = Callable[[ir.Graph, ir.Node], None]
"""Rewrites a node of the graph in place where onnxruntime would compute it incorrectly."""


def multiply_columns(graph: ir.Graph, node: ir.Node) -> None:
    """Replace `MatMul(a, v)`, with a vector v, with `Squeeze(MatMul(a, Unsqueeze(v)))`.

    If `a` is a Transpose, onnxruntime fuses it into a FusedMatMul, which then multiplies the vector by the matrix
    without transposing it.
    """
    matrix, vector = node.inputs
    if matrix is None or vector is None or vector.shape is None or vector.shape.rank() != 1:
        return
    if matrix.shape is not None and matrix.shape.rank() == 1:
        return
    write = Writer(node, naming=scoped(str(node.name)))
    axis = write.constant(np.array([-1], np.int64), f"{node.name}/last_axis")
    product = write.op("MatMul", matrix, write.op("Unsqueeze", vector, axis))
    product.type = vector.type
    replace(node.outputs[0], write.node("Squeeze", [product, axis], like=node.outputs[0]))
    graph.remove(node, safe=True)


def limit_by_infinity(graph: ir.Graph, node: ir.Node) -> None:
    """Set both limits of a Clip: onnxruntime replaces a missing one with the lowest or largest number."""
    x, *limits = (*node.inputs, None, None)[:3]
    if x is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16) or all(limits):
        return
    for position, infinity in ((1, -np.inf), (2, np.inf)):
        if limits[position - 1] is None:
            limit = Writer(graph).constant(np.array(infinity, x.dtype.numpy()), f"{node.name}/limit_{position}")
            node.resize_inputs(max(len(node.inputs), position + 1))
            node.replace_input_with(position, limit)


def pool_specials(graph: ir.Graph, node: ir.Node) -> None:
    """Make the maximum of a window with NaN be NaN, and of a window of minus infinity be minus infinity.

    onnxruntime skips NaN, and starts at the lowest number. Its kernel is many times as fast as others: two more run
    only if the sum of all values is not finite, which one pass over memory determines.
    """
    x, pooled, dtype = node.inputs[0], node.outputs[0], node.inputs[0].dtype if node.inputs[0] else None
    if x is None or dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or len(node.outputs) > 1:
        return
    uses, name = list(pooled.uses()), f"{node.name}/specials"
    usual, rare, write = (Writer(naming=scoped(f"{name}{part}")) for part in ("/usual", "/rare", ""))

    def windows(value: ir.Value) -> ir.Value:
        """Return the windows that contain a found value, as booleans."""
        most = rare.node("MaxPool", [rare.op("Cast", value, to=dtype.value)], node.attributes)
        return rare.op("Cast", most, to=ir.DataType.BOOL.value)

    nan, lowest = (rare.constant(np.array(number, dtype.numpy()), f"{name}/{number}") for number in (np.nan, -np.inf))
    numbers = rare.op("Where", windows(rare.op("Greater", x, lowest)), pooled, lowest)
    results = usual.op("Identity", pooled), rare.op("Where", windows(rare.op("IsNaN", x)), nan, numbers)
    total = write.op("ReduceSum", x, keepdims=0)
    is_finite = write.op("Not", write.op("IsNaN", write.op("Sub", total, total)))
    branches = {
        branch: ir.Graph(
            [], [result], nodes=part.nodes, initializers=tuple(part.initializers.values()), name=f"{name}/{branch}"
        )
        for branch, part, result in zip(("then_branch", "else_branch"), (usual, rare), results, strict=True)
    }
    (chosen,) = write.add(ir.node("If", [is_finite], branches))
    graph.insert_after(node, write.nodes)
    for value in (chosen, *results):
        value.type, value.shape = pooled.type, pooled.shape
    for user, position in uses:
        user.replace_input_with(position, chosen)
    for index, value in enumerate(graph.outputs):
        if value is pooled:
            graph.outputs[index] = chosen
            chosen.name, pooled.name = pooled.name, chosen.name


def count_axes_from_the_front(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the negative axes of a reduction with the equivalent non-negative ones.

    On an empty tensor, onnxruntime does not reduce negative axes: the result has the input's shape.
    """
    source, attribute = node.inputs[0], node.attributes.get("axis")
    if source is None or source.shape is None:
        return
    rank = source.shape.rank()
    if attribute is not None:
        if (axis := attribute.as_int()) < 0:
            node.attributes["axis"] = ir.AttrInt64("axis", axis + rank)
        return
    constant = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1:] and node.inputs[1] else None
    if constant is None or (axes := constant.numpy()).size == 0 or axes.min() >= 0:
        return
    positive = Writer(graph).constant(np.where(axes < 0, axes + rank, axes), f"{node.name}/axes")
    node.replace_input_with(1, positive)


ONNX_CORRECTIONS: dict[str, Correction] = {
    "MatMul": multiply_columns,
    "Clip": limit_by_infinity,
    "MaxPool": pool_specials,
    **{
        f"Reduce{name}": count_axes_from_the_front
        for name in ("Sum", "Mean", "Prod", "Max", "Min", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
    "ArgMax": count_axes_from_the_front,
    "ArgMin": count_axes_from_the_front,
}
"""ONNX operators that onnxruntime (tested: 1.31.1) computes incorrectly, from whichever ATen operators they come."""

RACY_ONNX = {("", "ScatterND"): "reduction"}
"""ONNX operators that race on the CPU if the attribute is neither absent nor `none`.

A partition whose translation has one is refused, and the ATen operator it comes from stays in PyTorch.
"""


def fuse(model: ir.Model) -> None:
    """Fuse RMS normalizations and rotary embeddings in place, which onnxruntime does not find in such graphs.

    Unlike the `onnxtool optimize` passes, this knows all shapes from PyTorch, and keeps what the gradient reads.
    """
    graph = model.graph
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for node in list(graph):
        if node.op_type == "Mul":
            attempted(_fuse_normalization, node, graph)
        elif node.op_type == "Add":
            attempted(_fuse_rotation, node, graph, tables)
    passes.RemoveUnusedNodesPass()(model)
    if any(node.domain == MICROSOFT for node in graph):
        model.opset_imports[MICROSOFT] = 1


def _fuse_normalization(node: ir.Node, graph: ir.Graph) -> None:
    """Replace `w * (x * (1 / sqrt(mean(x ** 2) + epsilon)))` with one node, which also outputs each row's factor.

    x: float32 [..., D]; w: [D], an input or a constant. The gradient reads the factor.
    """
    match = match_normalized(node)
    product = scaled(node.outputs[0])
    if match is None or match.factor is None or product is None or match.value.dtype is not ir.DataType.FLOAT:
        return
    x, reciprocal = match.value, match.factor.producer()
    scale, result = product
    if reciprocal is None or scale.producer() is not None or x.shape is None or scale.shape != x.shape[-1:]:
        return
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", match.epsilon), ir.AttrInt64("stash_type", 1)]
    name = f"{reciprocal.name}:normalization"
    fused = ir.Node("", "SimplifiedLayerNormalization", [x, scale], attributes, num_outputs=2, name=name)
    ir.convenience.replace_nodes_and_values(graph, reciprocal, [], [fused], [result, match.factor], fused.outputs)


def _fuse_rotation(node: ir.Node, graph: ir.Graph, tables: dict[ir.Value, tuple[ir.Value, ...]]) -> None:
    """Replace `x * cos + concat(-x[..., D/2:], x[..., :D/2]) * sin` with one node.

    x: float32 [B, N, S, D]; cos, sin: [1, 1, S, D], of angles whose two halves are equal.
    """
    rotation = match_rotation(node)
    concat = None if rotation is None else producer(rotation.turned)
    if rotation is None or concat is None or rotation.value.shape is None or rotation.value.shape.rank() != 4:
        return
    size = rotation.value.shape[3]
    halves = [value.shape[3] for value in concat.inputs if value is not None and value.shape is not None]
    angles = _angles(rotation.cosine, "Cos")
    if not isinstance(size, int) or [2 * half for half in halves] != [size, size]:
        return
    if angles is None or angles is not _angles(rotation.sine, "Sin"):
        return
    if angles not in tables:
        write = Writer(node, naming=scoped(f"{node.name}:table"))
        first = write.constant(np.zeros(1, np.int64), f"{angles.name}/first")
        flat = write.op("Squeeze", angles, first)  # [S, D/2], for all positions
        tables[angles] = first, write.op("Cos", flat), write.op("Sin", flat)
    fused = ir.Node(MICROSOFT, "RotaryEmbedding", [rotation.value, *tables[angles]], name=f"{node.name}:rotation")
    ir.convenience.replace_nodes_and_values(graph, node, [], [fused], node.outputs, fused.outputs)


def _angles(value: ir.Value | None, function: str) -> ir.Value | None:
    """Return the angles, [1, S, D/2], that occur twice in the argument of the cosine or sine `value`: [1, 1, S, D]."""
    unsqueeze = producer(value, "Unsqueeze")
    computed = producer(unsqueeze.inputs[0], function) if unsqueeze else None
    twice = producer(computed.inputs[0], "Concat") if computed else None
    if not unsqueeze or not twice or len(twice.inputs) != 2 or twice.inputs[0] is not twice.inputs[1]:
        return None
    half, axes = twice.inputs[0], constant(unsqueeze.inputs[1])
    if half is None or half.shape is None or not half.shape.is_static() or half.dtype is not ir.DataType.FLOAT:
        return None
    is_last = attribute(twice, "axis") in (-1, 2) and axes is not None and axes.ravel().tolist() == [1]
    return half if is_last and half.shape.rank() == 3 and half.shape[0] == 1 else None


@functools.cache
def _kernels() -> dict[tuple[str, str], list[Any]]:
    """Return the CPU provider's kernels by domain and operator."""
    table: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for kernel in binding.get_registered_ep_kernel_defs("CPUExecutionProvider"):
        table[kernel.domain, kernel.op_name].append(kernel)
    return dict(table)


def nodes_without_kernel(model: ir.Model) -> list[str]:
    """Return the names of nodes whose operator has kernels, but none for the node's types.

    An operator without any kernel may be a function that onnxruntime expands, and float16 is computed as float32;
    neither is reported.
    """
    opset = default_opset(model.opset_imports)
    return [
        node.name or ""
        for node in model.graph
        if (kernels := _kernels().get((node.domain, node.op_type))) and not any(_fits(node, k, opset) for k in kernels)
    ]


def _fits(node: ir.Node, kernel: Any, opset: int) -> bool:
    first, last = kernel.version_range
    if not node.domain and not first <= opset <= last:
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return True
    pairs = [*zip(schema.inputs, node.inputs, strict=False), *zip(schema.outputs, node.outputs, strict=False)]
    return all(
        value is None or value.dtype is None or _allowed(value.dtype, kernel.type_constraints.get(formal.type_str))
        for formal, value in pairs
    )


def _allowed(dtype: ir.DataType, types: list[str] | None) -> bool:
    if types is None:
        return True
    names = {f"tensor({dtype.name.lower()})"}
    if dtype is ir.DataType.FLOAT16:
        names.add("tensor(float)")
    return any(name in types for name in names)


PRESETS: dict[str, tuple[str, ...]] = {
    "tidy": ("fold_constants", "common_subexpressions", "neutral_operators", "deduplicate_initializers"),
}
"""Pass lists for any graph; all other passes look for layers of exported models."""


def resolve_transforms(transforms: Sequence[Transform | str]) -> tuple[Transform, ...]:
    """Return the given or named functions; a name is one of the lists in `PRESETS` or a single pass.

    Raises:
        CompilationError: there is no preset or pass with that name.
    """
    return tuple(_named(transform) if isinstance(transform, str) else transform for transform in transforms)


def apply(transforms: Sequence[Transform], model: onnx.ModelProto) -> None:
    """Apply all `transforms` to `model`, and update the inputs and number of nodes in its metadata.

    Raises:
        CompilationError: the result has other outputs, or new inputs.
    """
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    inputs = dict(zip([value.name for value in model.graph.input], metadata[INPUTS_KEY].split(), strict=True))
    outputs = [value.name for value in model.graph.output]
    for transform in transforms:
        transform(model)
    remaining = [value.name for value in model.graph.input]
    if [value.name for value in model.graph.output] != outputs or not set(remaining) <= set(inputs):
        raise CompilationError(
            "a transform changed the inputs or outputs of a model",
            "transforms of pre_ort_model_transforms keep their names and order, and may remove inputs",
        )
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    metadata[INPUTS_KEY] = " ".join(inputs[name] for name in remaining)
    metadata[NUM_NODES_KEY] = str(len(model.graph.node))
    onnx.helper.set_model_props(model, metadata)


def _named(name: str) -> Transform:
    from onnxtool.optimize import presets
    from onnxtool.optimize.pipeline import Context, run_passes

    passes = {step.name: step for steps in presets.PRESETS.values() for step in steps}
    names = PRESETS.get(name, (name,))
    if not set(names) <= set(passes):
        raise CompilationError(
            f"unknown transform {name!r}", f"use one of {', '.join((*PRESETS, *passes))}, or pass a function"
        )

    def transform(proto: onnx.ModelProto) -> None:
        steps = [passes[step] for step in names]
        model, _ = run_passes(ir.from_proto(proto), steps, Context(provider="cpu"))
        proto.CopyFrom(ir.to_proto(model))

    return transform
