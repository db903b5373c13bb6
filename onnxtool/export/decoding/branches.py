"""Join a graph for prompts and a graph for the tokens after them: the number of its tokens chooses between the two.

Models that carry a state compute a prompt in chunks, padded to whole ones, and a single token by the formula of the
recurrence. The first would do for a single token as well, at the cost of a chunk; and it need not be the same formula:
Zamba 2 bounds its time steps in the first alone.

Letters of shapes: B batch, S tokens given to the graph, P tokens before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.decoding.step import IDS, MASK
from onnxtool.graph.writer import Writer, scoped

_STEP = "step"


def choose_by_length(prompts: ir.Model, step: ir.Model) -> ir.Model:
    """Make one graph of two, which are taken apart: `step` is for one token with tokens before it.

    Args:
        prompts: takes input_ids int64 [B, S], attention_mask int64 [B, P + S] and a cache, and gives logits and the
            cache after the tokens, in the same order.
        step: the same for S of 1; it may leave inputs out.

    Returns:
        A graph with the inputs and outputs of `prompts`. Weights that both have are there once.
    """
    outer = Writer(naming=scoped("tokens"))
    given = {str(value.name): ir.val(str(value.name), value.dtype) for value in prompts.graph.inputs}
    length, total = (
        outer.op("Gather", outer.op("Shape", given[name]), outer.constant(np.array(1), "tokens/axis"), axis=0)
        for name in (IDS, MASK)
    )
    is_one = outer.op("Equal", length, outer.constant(np.array(1), "tokens/one"))
    is_step = outer.op("And", is_one, outer.op("Greater", total, length))
    own = _share_weights(step.graph, prompts.graph)
    weights = [*prompts.graph.initializers.values(), *own]
    outputs = [(str(value.name), value.type, value.shape) for value in prompts.graph.outputs]
    for value in prompts.graph.outputs:
        value.name = f"prompt/{value.name}"
    for part in step.graphs():
        for node in part:
            node.name = f"{_STEP}/{node.name}"
            for output in node.outputs:
                output.name = f"{_STEP}/{output.name}"
    opsets = dict(prompts.opset_imports)
    branches = [
        ir.AttrGraph("then_branch", _branch(step.graph, given, _STEP)),
        ir.AttrGraph("else_branch", _branch(prompts.graph, given, "prompt")),
    ]
    choice = ir.Node("", "If", [is_step], branches, num_outputs=len(outputs), name="tokens")
    outer.nodes.append(choice)
    for value, (name, kind, shape) in zip(choice.outputs, outputs, strict=True):
        value.name, value.type, value.shape = name, kind, shape
    graph = ir.Graph(
        list(given.values()),
        list(choice.outputs),
        nodes=outer.nodes,
        initializers=[*weights, *outer.initializers.values()],
        opset_imports=opsets,
        name=prompts.graph.name,
    )
    return ir.Model(graph, ir_version=prompts.ir_version, producer_name=prompts.producer_name)


def _share_weights(graph: ir.Graph, other: ir.Graph) -> list[ir.Value]:
    """Let `graph` read the initializers of `other` that are the same; take out and return those that are its own.

    They are told by what they hold: a matrix that was transposed is called by a number, another one in each trace.
    """
    known = {_content(value): value for value in other.initializers.values()}
    own: list[ir.Value] = []
    for value in list(graph.initializers.values()):
        twin = known.get(_content(value))
        if twin is None:
            own.append(value)
        else:
            value.replace_all_uses_with(twin, replace_graph_outputs=True)
    graph.initializers.clear()
    for value in own:
        value.name = f"{_STEP}/{value.name}"
    return own


def _content(value: ir.Value) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and a hash of an initializer."""
    tensor = value.const_value
    if tensor is None:
        raise ExportError(f"the traced graph has no value for {value.name}", "report this")
    array = tensor.numpy()
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return str(tensor.dtype), array.shape, hashlib.blake2b(content.data, digest_size=16).digest()


def _branch(graph: ir.Graph, given: Mapping[str, ir.Value], name: str) -> ir.Graph:
    """Make a branch of a graph, whose inputs are those around it."""
    for value in list(graph.inputs):
        value.replace_all_uses_with(given[str(value.name)])
    results, nodes = list(graph.outputs), list(graph)
    graph.outputs.clear()
    graph.initializers.clear()
    graph.remove(nodes)
    return ir.Graph([], results, nodes=nodes, name=name)
