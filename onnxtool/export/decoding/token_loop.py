"""Turn a graph that takes one token into one that takes any number, by running it in a loop.

Models that carry a state from token to token compute a prompt in chunks or in a loop of Python, neither of which a
trace leaves open. Their step for one token it does; and a prompt is that step, token by token, from an empty cache.

Letters of shapes: B batch, S tokens given to the graph, P tokens before them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np
import onnx_ir as ir

from onnxtool.export.decoding.step import IDS, LOGITS, MASK
from onnxtool.graph.writer import Writer, scoped
from onnxtool.reports import Dimension


def loop_over_tokens(step: ir.Model, cache: Mapping[str, tuple[Dimension, ...]], *, batch: str, past: str) -> ir.Model:
    """Wrap `step` into a loop over the tokens that it is given.

    A row's state stays as it is where the mask says that the token is padding. Keys and values, which grow by a token
    each time, grow by padding as well, which the step itself masks.

    Args:
        step: takes input_ids int64 [B, 1], attention_mask int64 [B, P + 1] (or leaves it out) and the cache, and
            gives logits [B, 1, V] and the cache after the token, in the same order. It is taken apart.
        cache: the cache inputs, and their axes.
        batch: what the axis B is called there.
        past: what the axis P is called there, and in the shapes within `step`.

    Returns:
        A graph that takes input_ids int64 [B, S], attention_mask int64 [B, P + S] and the cache, and gives logits
        [B, S, V] and the cache after all tokens. Only its logits say their width; other axes are not named yet.
    """
    outer = Writer(naming=scoped("tokens"))
    ids, mask = (ir.val(name, ir.DataType.INT64) for name in (IDS, MASK))
    taken = {str(value.name): value for value in step.graph.inputs}
    given = {name: ir.val(name, taken[name].dtype) for name in cache}
    length, total = (
        outer.op("Gather", outer.op("Shape", tensor), outer.constant(np.array(1), "tokens/axis"), axis=0)
        for tensor in (ids, mask)
    )
    before = outer.op("Sub", total, length)
    logits, *presents = step.graph.outputs
    body = _body(step, cache, ids, mask, before, outer.initializers, batch=batch, past=past)
    loop = ir.Node(
        "",
        "Loop",
        [length, outer.constant(np.array(True), "tokens/go"), *given.values()],
        [ir.AttrGraph("body", body)],
        num_outputs=len(cache) + 1,
        name="tokens",
    )
    outer.nodes.append(loop)
    for value, present in zip(loop.outputs, presents, strict=False):
        value.name, value.type = present.name, present.type
    stacked = loop.outputs[-1]  # [S, B, V]
    stacked.name, stacked.type = "tokens/logits", logits.type
    result = outer.op("Transpose", stacked, perm=[1, 0, 2])
    result.name, result.type = LOGITS, logits.type
    result.shape = None if logits.shape is None else ir.Shape([None, None, logits.shape[-1]])
    for value in (logits, *presents):
        value.name = f"step/{value.name}"
    weights = list(step.graph.initializers.values())
    step.graph.initializers.clear()
    graph = ir.Graph(
        [ids, mask, *given.values()],
        [result, *loop.outputs[:-1]],
        nodes=outer.nodes,
        initializers=[*weights, *outer.initializers.values()],
        opset_imports=dict(step.opset_imports),
        name=step.graph.name,
    )
    return ir.Model(graph, ir_version=step.ir_version, producer_name=step.producer_name)


def _body(
    step: ir.Model,
    cache: Mapping[str, tuple[Dimension, ...]],
    ids: ir.Value,
    mask: ir.Value,
    before: ir.Value,
    initializers: MutableMapping[str, ir.Value],
    *,
    batch: str,
    past: str,
) -> ir.Graph:
    """Make the body of the loop from the nodes of `step`: its token and mask are slices of all tokens and the mask."""
    inner = Writer(naming=scoped("token"), initializers=initializers)
    number, going = ir.val("token/number", ir.DataType.INT64, []), ir.val("token/going", ir.DataType.BOOL, [])
    taken = {str(value.name): value for value in step.graph.inputs}
    carried = {name: ir.val(f"token/{name}", taken[name].dtype) for name in cache}
    axis, zero, one = (
        inner.constant(np.array([value]), f"tokens/{name}") for name, value in (("axes", 1), ("zero", 0), ("one", 1))
    )
    first = inner.op("Unsqueeze", number, zero)
    here = inner.op("Add", before, first)
    after = inner.op("Add", here, one)
    token = inner.op("Slice", ids, first, inner.op("Add", first, one), axis)
    real = inner.op("Cast", inner.op("Slice", mask, here, after, axis), to=ir.DataType.BOOL.value)  # [B, 1]
    for name, value in {IDS: token, MASK: inner.op("Slice", mask, zero, after, axis), **carried}.items():
        if name in taken:
            taken[name].replace_all_uses_with(value, replace_graph_outputs=True)
    logits, *presents = step.graph.outputs
    own = list(step.graph)
    step.graph.outputs.clear()
    step.graph.remove(own)
    for node in own:
        for output in node.outputs:
            _rename_past(output, past)
    inner.nodes += own
    results = []
    for (name, axes), present in zip(cache.items(), presents, strict=True):
        if past not in axes:
            rank = inner.constant(np.array([-1 if size == batch else 1 for size in axes]), f"tokens/{name}/rows")
            present = inner.op("Where", inner.op("Reshape", real, rank), present, carried[name])
        results.append(inner.op("Identity", present))
    results.append(inner.op("Squeeze", logits, axis))
    for value, source in zip(results, [*presents, logits], strict=True):
        value.type = source.type
    return ir.Graph(
        [number, going, *carried.values()], [inner.op("Identity", going), *results], nodes=inner.nodes, name="token"
    )


def _rename_past(value: ir.Value, past: str) -> None:
    """Name P apart within the loop, where it grows by one each time."""
    if value.shape is not None:
        value.shape = ir.Shape(
            size if isinstance(size, int) or size.value is None else size.value.replace(past, "tokens_before")
            for size in value.shape
        )
