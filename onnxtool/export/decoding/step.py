"""Trace a causal language model for generation with a cache, as one graph for prompts and for the tokens after them.

`generate` itself shows what a model is called with: `transformers.exporters` runs it and captures the arguments of its
steps, which reveals the cache of any architecture, whether keys and values or recurrent states. Two prompts with
different batch and length show which axes of the cache vary. Tested with transformers 5.23.

Models that carry state from token to token compute a prompt in chunks or in a Python loop. If a trace leaves the chunks
open, an If chooses by the number of tokens between a graph for prompts and one for a single token: the first would also
work for a single token, at the cost of a chunk, but may use a different formula (Zamba 2 bounds its time steps only
there). Otherwise, the single-token step runs in a Loop, token by token.

Shape letters: B batch, S tokens given to the graph, P earlier tokens, represented by the cache, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.lengths import rescaling
from onnxtool.export.modalities.modality import BATCH, SEQUENCE
from onnxtool.export.signature import order_and_name, rename_axes, strip
from onnxtool.export.tracing import guarded, operators_apart, patched, reason_of
from onnxtool.graph.exact_rules import exact_optimizer
from onnxtool.graph.writer import Writer, scoped
from onnxtool.reports import Dimension
from onnxtool.runtime.quiet import quiet

PAST = "past_sequence"
IDS, MASK, LOGITS = "input_ids", "attention_mask", "logits"
WITHOUT_CACHE = "export it with --task text-generation, which uses no cache"

# (B, S) of the captured prompts; the first one is traced. The tracer would fix a size of 1.
_SAMPLES = ((3, 5), (2, 6))
# Names of the argument that holds the cache: transformers.generation.utils.ALL_CACHE_NAMES.
_CACHES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")

# Configuration names for the chunk size in which a recurrence processes a prompt.
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_LARGEST_CHUNK = 1024


@dataclass(frozen=True)
class Step:
    """The arguments that `generate` calls a model with, after a prompt.

    Attributes:
        arguments: as captured, without positions.
        leading: leading axes of the model's positions before [B, S], (3,) if there are three per token; None if the
            model takes no positions.
        axes: the axes of each tensor in `arguments`, by path.
        constants: cache tensors that no step changes, by path.
    """

    arguments: dict[str, Any]
    leading: tuple[int, ...] | None
    axes: dict[str, tuple[Dimension, ...]]
    constants: dict[str, Any]

    @property
    def cache(self) -> dict[str, tuple[Dimension, ...]]:
        """The state passed from step to step: path to axes."""
        return {path: axes for path, axes in self.axes.items() if path not in {IDS, MASK, *self.constants}}


def capture_step(model: Any, *, parallel: bool) -> Step:
    """Determine the arguments of `model` after a prompt, for one token, or for any number if `parallel`.

    Raises:
        ExportError: the model does not generate from only ids and mask, or has no cache.
    """
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
    from transformers.exporters.utils import get_leaf_tensors

    register_cache_pytrees_for_model(model)
    arguments, other_arguments = (_capture(model, *sample, parallel=parallel) for sample in _SAMPLES)
    positions = arguments.pop("position_ids", None)
    leaves, other_leaves = get_leaf_tensors(arguments), get_leaf_tensors(other_arguments)
    extra_inputs = [path for path in leaves if path not in (IDS, MASK) and path.split(".")[0] not in _CACHES]
    if leaves.keys() != other_leaves.keys() - {"position_ids"}:
        raise ExportError(f"the cache of {type(model).__name__} differs between prompts", WITHOUT_CACHE)
    if extra_inputs or IDS not in leaves:
        raise ExportError(
            f"{type(model).__name__} generates with inputs other than ids, mask and cache: {', '.join(extra_inputs)}",
            WITHOUT_CACHE,
        )
    if positions is not None and not (
        MASK in leaves and positions.equal(count_positions(leaves[MASK], leaves[IDS].shape[1]).expand_as(positions))
    ):
        raise ExportError(f"{type(model).__name__} counts positions differently from generate", WITHOUT_CACHE)
    for path in (IDS, MASK):
        if path in leaves and leaves[path].ndim != 2:
            raise ExportError(f"{type(model).__name__} generates with {path} {list(leaves[path].shape)}", WITHOUT_CACHE)
    if parallel and MASK not in leaves:
        raise ExportError(f"{type(model).__name__} takes no mask when it has a cache", WITHOUT_CACHE)
    axes = {
        path: _axes(path, tuple(leaf.shape), tuple(other_leaves[path].shape), parallel=parallel)
        for path, leaf in leaves.items()
    }
    strange = [axis for path in axes for axis in axes[path] if isinstance(axis, str) and "_axis_" in axis]
    if strange:  # their size for an empty cache is unknown
        raise ExportError(
            f"the cache of {type(model).__name__} has axes that are neither batch nor length: {', '.join(strange)}",
            WITHOUT_CACHE,
        )
    if parallel and (chunk := chunk_size(model)) is not None:
        _lengthen(arguments, 2 * chunk + 3)
    fixed = {path: leaf for path, leaf in leaves.items() if leaf.ndim == 0 and leaf.equal(other_leaves[path])}
    leading = None if positions is None else tuple(positions.shape[:-2])
    step = Step(arguments, leading, axes, fixed)
    if not step.cache:
        raise ExportError(f"{type(model).__name__} generates without a cache", WITHOUT_CACHE)
    return step


def chunk_size(model: Any) -> int | None:
    """Return how many prompt tokens the model processes at a time, if it carries state between chunks."""
    config = model.config.get_text_config()
    sizes = (getattr(config, name, None) for name in _CHUNKS)
    return next((size for size in sizes if isinstance(size, int) and 1 < size <= _LARGEST_CHUNK), None)


def _lengthen(arguments: dict[str, Any], length: int) -> None:
    """Change a captured call from two tokens to `length`: with less than two chunks, the tracer would fix the number.

    Everything else that was captured belongs to the tokens before them.
    """
    ids, mask = arguments[IDS], arguments[MASK]
    more = length - ids.shape[1]
    arguments[IDS] = ids.repeat(1, length)[:, :length]
    arguments[MASK] = mask.new_ones(mask.shape[0], mask.shape[1] + more)
    arguments[MASK][:, : mask.shape[1]] = mask


def count_positions(mask: Any, length: int) -> Any:
    """Count the positions of the last S tokens from the mask int64 [B, P + S], as `generate` does: int64 [B, S]."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)[:, mask.shape[1] - length :]


def takes_positions(model: Any) -> bool:
    """Return whether `generate` passes positions to the model."""
    return "position_ids" in inspect.signature(model.forward).parameters


def embedding_rows(model: Any) -> int:
    """Return how many ids the model accepts, which may be more than its tokenizer has."""
    return int(model.get_input_embeddings().weight.shape[0])


@contextmanager
def plain_generation(model: Any, **ids: int) -> Iterator[None]:
    """Make the model generate greedily inside the block, without the checkpoint's penalties and stopping criteria.

    Its special tokens are kept, or replaced by `ids`: a stop would end a row before the others.
    """
    from transformers import GenerationConfig

    before = model.generation_config
    names = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
    kept: dict[str, Any] = {**ids} or {name: getattr(before, name, None) for name in names}
    with patched(model, generation_config=GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **kept)):
        yield


def cache_name(path: str) -> str:
    """Name a cache tensor: `past_key_values.0.key` for `past_key_values.layers.0.keys`, `past_conv.0` for a state.

    Keys and values have the same names as in optimum-onnx 0.1 and Transformers.js 4.3. For states, Transformers.js
    knows `past_conv` and `past_recurrent`, for the architectures it lists, and uses `past_ssm` where this uses
    `past_recurrent` for a Mamba layer; `past_state` is our own name (`getCacheNames` in its src/configs.js).
    """
    root, *parts = (part for part in path.split(".") if part != "layers")
    if root not in _CACHES:
        return path
    if root == "state":  # RWKV's
        return ".".join(["past_state", *parts])
    for state in ("conv", "recurrent"):
        if f"{state}_states" in parts:
            parts.remove(f"{state}_states")
            if len(parts) > 1 and parts[-1] == "0":  # nearly all layers have one state of each kind
                parts.pop()
            return ".".join([f"past_{state}", *parts])
    known = {"keys": "key", "values": "value"}
    return ".".join(["past_key_values", *(known.get(part, part) for part in parts)])


def present_name(past: str) -> str:
    """Name the output of a step for a cache input: `present.0.key` for `past_key_values.0.key`."""
    return re.sub("^past(_key_values)?", "present", past)


def _capture(model: Any, batch: int, length: int, *, parallel: bool) -> dict[str, Any]:
    """Return what `generate` calls the model with after a prompt: with one token, or if `parallel`, with two."""
    import torch
    from transformers.exporters.utils import decompose_prefill_decode

    rows, columns = torch.arange(batch)[:, None], torch.arange(length)[None, :]
    ids = 11 + (columns + 7 * rows) % (embedding_rows(model) - 11)
    # Pad on the left, as generation does; without padding, `generate` drops the mask, and the graph would have none.
    mask = (columns > rows % 2).long()
    sample = {IDS: ids.to(model.device), MASK: mask.to(model.device)}
    with quiet(), plain_generation(model), _whole_windows():
        try:
            captured = decompose_prefill_decode(model, sample, multi_token_decode=parallel)
        except Exception as error:  # models can raise anything
            raise ExportError(
                f"{type(model).__name__} does not generate from {IDS} and {MASK}: {reason_of(error)}", WITHOUT_CACHE
            ) from error
    arguments: dict[str, Any] = captured["decode"][1]
    return arguments


@contextmanager
def _whole_windows() -> Iterator[None]:
    """Make caches of sliding-window layers keep all tokens inside the block, as the tracer does.

    Otherwise the cache would be cut to the window, and a window smaller than the samples taken for a fixed size. The
    mask still slides. `transformers.exporters` patches these three while tracing. transformers 5.23.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    names = ("update", "get_mask_sizes", "get_seq_length")
    with patched(DynamicSlidingWindowLayer, **{name: vars(DynamicLayer)[name] for name in names}):
        yield


def _axes(path: str, shape: tuple[int, ...], other: tuple[int, ...], *, parallel: bool) -> tuple[Dimension, ...]:
    """Name a tensor's axes by how they vary between the two samples."""
    if path in (IDS, MASK):
        new: Dimension = SEQUENCE if parallel else 1
        return BATCH, new if path == IDS else f"{PAST} + {new}"
    names = dict(zip(zip(*_SAMPLES, strict=True), (BATCH, PAST), strict=True))
    return tuple(
        size if size == moved else names.get((size, moved), f"{cache_name(path)}_axis_{axis}")
        for axis, (size, moved) in enumerate(zip(shape, other, strict=True))
    )


TOTAL = f"{PAST} + {SEQUENCE}"

# How to run a prompt: all its tokens at once, or one after another if a model cannot be traced that way.
PROMPTS = ("parallel", "token by token")

_FLAGS = ("use_cache", "return_dict")


def trace_with_cache(model: Any, *, prompts: str, opset: int | None) -> ir.Model:
    """Trace `model`, which must be in evaluation mode, with its cache as inputs and outputs.

    Args:
        model: a generative transformers model.
        prompts: one of PROMPTS.
        opset: None for the exporter's default.

    Returns:
        A graph that takes input_ids int64 [B, S], attention_mask int64 [B, P + S] and a cache, and returns logits float
        [B, S, V] and the cache after these tokens. It starts from an empty cache: P is 0, and states without such an
        axis are zeros. `present.0.key` is the next call's `past_key_values.0.key`. Positions are counted from the mask,
        as in `generate`. If the model takes prompts in chunks, an If contains both the graph for prompts and the graph
        for a single later token.

    Raises:
        ExportError: the model does not generate with a cache, or cannot be traced.
    """
    kind, most = rescaling(model)
    if kind:
        raise ExportError(
            f"{type(model).__name__} rescales its rotary embedding by the length of each text (rope_type {kind}), and "
            "keys in a cache keep their scale",
            f"{WITHOUT_CACHE}; or, for texts of up to {most} tokens, take the rope scaling out of config.json"
            if most
            else WITHOUT_CACHE,
        )
    parallel = prompts == PROMPTS[0]
    traced, cache = _traced_step(model, opset, parallel=parallel)
    if not parallel:
        traced = loop_over_tokens(traced, cache)
    elif chunk_size(model) is not None:
        single_token, same = _traced_step(model, opset, parallel=False)
        if same != cache:
            raise ExportError(f"the cache of {type(model).__name__} differs after a prompt", WITHOUT_CACHE)
        traced = choose_by_length(traced, single_token)
    _set_shapes(traced.graph, cache)
    strip(traced)
    return traced


def _traced_step(model: Any, opset: int | None, *, parallel: bool) -> tuple[ir.Model, dict[str, tuple[Dimension, ...]]]:
    """Trace a step of `generate`, and return its graph, with everything named, and the axes of each cache input."""
    step = capture_step(model, parallel=parallel)
    traced = guarded(
        lambda: _trace(model, step, opset),
        subject=f"dynamo cannot trace {type(model).__name__} with its cache",
        exporter="dynamo",
        opset=opset,
        hint=WITHOUT_CACHE,
    )
    _name(traced, step)
    order_and_name(traced.graph, model)
    return traced, {cache_name(path): axes for path, axes in step.cache.items()}


def _trace(model: Any, step: Step, opset: int | None) -> ir.Model:
    from torch.export import Dim
    from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    arguments = copy.deepcopy(step.arguments)
    tensors = {name: value for name, value in arguments.items() if name not in _FLAGS}
    leaves = iter(step.axes.values())

    def moving(spec: Any) -> Any:
        """Keep the dynamic axes of the specification that transformers makes, which has all axes."""
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
    """Return the model with a forward that counts positions itself: one input fewer for callers to get wrong."""
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
    """Name inputs and outputs, move constants into the graph, and drop unused outputs.

    Raises:
        ExportError: a dynamic axis is fixed, or the cache is not returned as it was passed.
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
    """Order inputs and outputs, and name their axes the same for every exporter."""
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


_STEP = "step"


def choose_by_length(prompts: ir.Model, step: ir.Model) -> ir.Model:
    """Combine two graphs, consuming them: `step` is used for one token that follows others.

    Args:
        prompts: takes input_ids int64 [B, S], attention_mask int64 [B, P + S] and a cache, and returns logits and the
            cache after the tokens, in the same order.
        step: the same with S = 1; it may omit inputs.

    Returns:
        A graph with the inputs and outputs of `prompts`. Shared weights are stored once.
    """
    outer = Writer(naming=scoped("tokens"))
    inputs = {str(value.name): ir.val(str(value.name), value.dtype) for value in prompts.graph.inputs}
    length, total = (_num_columns(outer, inputs[name]) for name in (IDS, MASK))
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
    branches = [
        ir.AttrGraph("then_branch", _branch(step.graph, inputs, _STEP)),
        ir.AttrGraph("else_branch", _branch(prompts.graph, inputs, "prompt")),
    ]
    choice = ir.Node("", "If", [is_step], branches, num_outputs=len(outputs), name="tokens")
    outer.nodes.append(choice)
    for value, (name, kind, shape) in zip(choice.outputs, outputs, strict=True):
        value.name, value.type, value.shape = name, kind, shape
    return _around(prompts, list(inputs.values()), choice.outputs, outer, weights)


def _num_columns(outer: Writer, tensor: ir.Value) -> ir.Value:
    """Return the size of the second axis, int64 []."""
    return outer.op("Gather", outer.op("Shape", tensor), outer.constant(np.array(1), "tokens/axis"), axis=0)


def _around(
    part: ir.Model, inputs: list[ir.Value], outputs: Sequence[ir.Value], outer: Writer, weights: list[ir.Value]
) -> ir.Model:
    """Make the model of what `outer` has written around a part, which gives its weights, opsets and name."""
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=outer.nodes,
        initializers=[*weights, *outer.initializers.values()],
        opset_imports=dict(part.opset_imports),
        name=part.graph.name,
    )
    return ir.Model(graph, ir_version=part.ir_version, producer_name=part.producer_name)


def _share_weights(graph: ir.Graph, other: ir.Graph) -> list[ir.Value]:
    """Make `graph` read equal initializers from `other`; remove and return its remaining initializers.

    They are matched by content: a transposed matrix is named by a number, which differs between traces.
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


def _branch(graph: ir.Graph, inputs: Mapping[str, ir.Value], name: str) -> ir.Graph:
    """Make a branch from a graph, using the surrounding inputs."""
    for value in list(graph.inputs):
        value.replace_all_uses_with(inputs[str(value.name)])
    results, nodes = list(graph.outputs), list(graph)
    graph.outputs.clear()
    graph.initializers.clear()
    graph.remove(nodes)
    return ir.Graph([], results, nodes=nodes, name=name)


def loop_over_tokens(step: ir.Model, cache: Mapping[str, tuple[Dimension, ...]]) -> ir.Model:
    """Wrap `step` in a loop over the tokens it is given.

    A row's state is unchanged where the mask marks a token as padding. Keys and values, which grow by a token each
    time, also grow by padding, which the step itself masks.

    Args:
        step: takes input_ids int64 [B, 1], attention_mask int64 [B, P + 1] (or omits it) and the cache, and returns
            logits [B, 1, V] and the cache after the token, in the same order. It is consumed.
        cache: the cache inputs and their axes.

    Returns:
        A graph that takes input_ids int64 [B, S], attention_mask int64 [B, P + S] and the cache, and returns logits
        [B, S, V] and the cache after all tokens. Only the width of the logits is set; other axes are not named yet.
    """
    outer = Writer(naming=scoped("tokens"))
    ids, mask = (ir.val(name, ir.DataType.INT64) for name in (IDS, MASK))
    taken = {str(value.name): value for value in step.graph.inputs}
    cache_inputs = {name: ir.val(name, taken[name].dtype) for name in cache}
    length, total = (_num_columns(outer, tensor) for tensor in (ids, mask))
    before = outer.op("Sub", total, length)
    logits, *presents = step.graph.outputs
    body = _body(step, cache, ids, mask, before, outer.initializers)
    loop = ir.Node(
        "",
        "Loop",
        [length, outer.constant(np.array(True), "tokens/go"), *cache_inputs.values()],
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
    return _around(step, [ids, mask, *cache_inputs.values()], [result, *loop.outputs[:-1]], outer, weights)


def _body(
    step: ir.Model,
    cache: Mapping[str, tuple[Dimension, ...]],
    ids: ir.Value,
    mask: ir.Value,
    before: ir.Value,
    initializers: MutableMapping[str, ir.Value],
) -> ir.Graph:
    """Make the loop body from the nodes of `step`: its token and mask are slices of all tokens and the full mask."""
    inner = Writer(naming=scoped("token"), initializers=initializers)
    number, going = ir.val("token/number", ir.DataType.INT64, []), ir.val("token/going", ir.DataType.BOOL, [])
    taken = {str(value.name): value for value in step.graph.inputs}
    carried = {name: ir.val(f"token/{name}", taken[name].dtype) for name in cache}
    axis, zero, single = (
        inner.constant(np.array([value]), f"tokens/{name}") for name, value in (("axes", 1), ("zero", 0), ("one", 1))
    )
    first = inner.op("Unsqueeze", number, zero)
    position = inner.op("Add", before, first)
    end = inner.op("Add", position, single)
    token = inner.op("Slice", ids, first, inner.op("Add", first, single), axis)
    real = inner.op("Cast", inner.op("Slice", mask, position, end, axis), to=ir.DataType.BOOL.value)  # [B, 1]
    for name, value in {IDS: token, MASK: inner.op("Slice", mask, zero, end, axis), **carried}.items():
        if name in taken:
            taken[name].replace_all_uses_with(value, replace_graph_outputs=True)
    logits, *presents = step.graph.outputs
    own = list(step.graph)
    step.graph.outputs.clear()
    step.graph.remove(own)
    for node in own:
        for output in node.outputs:
            _rename_past(output)
    inner.nodes += own
    results = []
    for (name, axes), present in zip(cache.items(), presents, strict=True):
        if PAST not in axes:
            rank = inner.constant(np.array([-1 if size == BATCH else 1 for size in axes]), f"tokens/{name}/rows")
            present = inner.op("Where", inner.op("Reshape", real, rank), present, carried[name])
        results.append(inner.op("Identity", present))
    results.append(inner.op("Squeeze", logits, axis))
    for value, source in zip(results, [*presents, logits], strict=True):
        value.type = source.type
    return ir.Graph(
        [number, going, *carried.values()], [inner.op("Identity", going), *results], nodes=inner.nodes, name="token"
    )


def _rename_past(value: ir.Value) -> None:
    """Give P a separate name within the loop, where it grows by one each time."""
    if value.shape is not None:
        value.shape = ir.Shape(
            size if isinstance(size, int) or size.value is None else size.value.replace(PAST, "tokens_before")
            for size in value.shape
        )
