"""Trace a causal language model for generation with a cache, into one graph for prompts and for the tokens after them.

Letters of shapes: B batch, S tokens given to the graph, P tokens before them, which the cache stands for, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.decoding.branches import choose_by_length
from onnxtool.export.decoding.step import (
    IDS,
    LOGITS,
    MASK,
    PAST,
    WITHOUT_CACHE,
    Step,
    cache_name,
    capture_step,
    chunk_size,
    count_positions,
    present_name,
)
from onnxtool.export.decoding.token_loop import loop_over_tokens
from onnxtool.export.graph import name_nodes, rename_axes, strip
from onnxtool.export.modalities.sizes import BATCH, SEQUENCE
from onnxtool.export.tracing import guarded, operators_apart
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.reports import Dimension

TOTAL = f"{PAST} + {SEQUENCE}"

# How a prompt is run: all its tokens at once, or, where a model cannot be traced so, one after the other.
PROMPTS = ("parallel", "token by token")

_FLAGS = ("use_cache", "return_dict")


def trace_with_cache(model: Any, *, prompts: str, opset: int | None) -> ir.Model:
    """Trace `model`, which must be in evaluation mode, with its cache as inputs and outputs.

    Args:
        model: a transformers model that generates.
        prompts: one of PROMPTS.
        opset: None for the exporter's own.

    Returns:
        A graph that takes input_ids int64 [B, S], attention_mask int64 [B, P + S] and a cache, and gives logits float
        [B, S, V] and the cache after these tokens. It starts from an empty cache: P of 0, and zeros for a state that
        has no such axis. `present.0.key` is what the next call takes as `past_key_values.0.key`. Positions are
        counted from the mask, as `generate` counts them. Where the model takes prompts in chunks, the graph for one
        token after others stands beside that for prompts, within an If.

    Raises:
        ExportError: the model does not generate with a cache, or cannot be traced.
    """
    parallel = prompts == PROMPTS[0]
    traced, cache = _traced_step(model, opset, parallel=parallel)
    if not parallel:
        traced = loop_over_tokens(traced, cache, batch=BATCH, past=PAST)
    elif chunk_size(model) is not None:
        one, same = _traced_step(model, opset, parallel=False)
        if same != cache:
            raise ExportError(f"the cache of {type(model).__name__} is another one after a prompt", WITHOUT_CACHE)
        traced = choose_by_length(traced, one)
    _set_shapes(traced.graph, cache)
    strip(traced)
    return traced


def _traced_step(model: Any, opset: int | None, *, parallel: bool) -> tuple[ir.Model, dict[str, tuple[Dimension, ...]]]:
    """Trace a step of `generate`, and return its graph, all of it named, and the axes of each cache input."""
    step = capture_step(model, parallel=parallel)
    traced = guarded(
        lambda: _trace(model, step, opset),
        subject=f"dynamo cannot trace {type(model).__name__} with its cache",
        exporter="dynamo",
        opset=opset,
        hint=WITHOUT_CACHE,
    )
    _name(traced, step)
    name_nodes(traced.graph)
    return traced, {cache_name(path): axes for path, axes in step.cache.items()}


def _trace(model: Any, step: Step, opset: int | None) -> ir.Model:
    from torch.export import Dim
    from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    arguments = copy.deepcopy(step.arguments)
    tensors = {name: value for name, value in arguments.items() if name not in _FLAGS}
    leaves = iter(step.axes.values())

    def moving(spec: Any) -> Any:
        """Keep those axes that move, of the specification that transformers makes, which has all of them."""
        if isinstance(spec, dict) and all(isinstance(axis, int) for axis in spec):
            return {axis: Dim.AUTO for axis, size in enumerate(next(leaves)) if isinstance(size, str)}
        if isinstance(spec, dict):
            return {name: moving(part) for name, part in spec.items()}
        return type(spec)(moving(part) for part in spec) if isinstance(spec, (list, tuple)) else spec

    shapes = {name: moving(get_auto_dynamic_shapes(value)) for name, value in tensors.items()}
    config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset)
    with operators_apart(), exact_optimizer():
        exported = OnnxExporter().export(_counting_positions(model, step), arguments, config=config)
    graph: ir.Model = exported.program
    return graph


def _counting_positions(model: Any, step: Step) -> Any:
    """Return the model with a forward that counts the positions itself: one input less for a caller to get wrong."""
    if step.leading is None:
        return model
    model = copy.copy(model)
    forward, leading = model.forward, step.leading

    def counting(**arguments: Any) -> Any:
        positions = count_positions(arguments[MASK], arguments[IDS].shape[1])
        return forward(**arguments, position_ids=positions.expand(*leading, *positions.shape))

    model.forward = counting
    return model


def _name(model: ir.Model, step: Step) -> None:
    """Name inputs and outputs, put constants into the graph, and drop the outputs that are not used.

    Raises:
        ExportError: an axis is fixed that moves, or the cache does not come out as it went in.
    """
    graph = model.graph
    renames: dict[str, str] = {}
    for value in list(graph.inputs):
        path = str(value.name).removeprefix("input.")
        if path in step.constants:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(step.constants[path].cpu().numpy(), name=value.name)
            graph.initializers[str(value.name)] = value
            continue
        for size, name in zip(value.shape or (), step.axes[path], strict=True):
            if isinstance(size, int) and isinstance(name, str):
                raise ExportError(f"the traced graph fixes {name} of {cache_name(path)}", WITHOUT_CACHE)
            renames[str(size)] = str(name)
        value.name = cache_name(path)
    results = {str(value.name).removeprefix("output."): value for value in graph.outputs}
    missing = [path for path in (LOGITS, *step.cache) if path not in results]
    if missing:
        raise ExportError(f"the traced graph does not give back {', '.join(missing)}", WITHOUT_CACHE)
    for path in step.cache:
        results[path].name = present_name(cache_name(path))
    graph.outputs[:] = [results[path] for path in (LOGITS, *step.cache)]
    rename_axes(model, renames)


def _set_shapes(graph: ir.Graph, cache: Mapping[str, tuple[Dimension, ...]]) -> None:
    """Order inputs and outputs, and name their axes as every exporter's graph has them."""
    inputs = {str(value.name): value for value in graph.inputs}
    graph.inputs[:] = [inputs[name] for name in (IDS, MASK, *cache)]
    known = {IDS: (BATCH, SEQUENCE), MASK: (BATCH, TOTAL), **cache}
    for name, value in inputs.items():
        value.shape = ir.Shape(list(known[name]))
    logits, *presents = graph.outputs
    width = None if logits.shape is None else logits.shape[-1]
    logits.shape = ir.Shape([BATCH, SEQUENCE, width])
    for value, axes in zip(presents, cache.values(), strict=True):
        value.shape = ir.Shape([TOTAL if axis == PAST else axis for axis in axes])
