"""One call of a causal language model with its cache, captured from `generate`: what it takes, and how its axes move.

Letters of shapes: B batch, S tokens given to the call, P tokens before them, which the cache stands for, V vocabulary.

`generate` itself shows what a model is called with: `transformers.exporters` runs it and captures the arguments of its
steps, which tells the cache of any architecture, be it keys and values or the states of a recurrence. Two prompts of
different batch and length tell which axes of the cache move. Tested with transformers 5.23.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from onnxtool.errors import ExportError
from onnxtool.export.modalities.modality import BATCH, SEQUENCE
from onnxtool.export.tracing import reason_of
from onnxtool.reports import Dimension
from onnxtool.runtime.quiet import quiet

PAST = "past_sequence"
IDS, MASK, LOGITS = "input_ids", "attention_mask", "logits"
WITHOUT_CACHE = "export it with --task text-generation, which is without a cache"

# (B, S) of the prompts that are captured; the first one is traced. A size of 1 would be fixed by the tracer.
_SAMPLES = ((3, 5), (2, 6))
# What the argument is called that holds the cache: transformers.generation.utils.ALL_CACHE_NAMES.
_CACHES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")

# What configurations call the size of the chunks in which a recurrence takes a prompt.
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_LARGEST_CHUNK = 1024


@dataclass(frozen=True)
class Step:
    """What `generate` calls a model with, after a prompt.

    Attributes:
        arguments: as captured, without positions.
        leading: the axes of the positions that the model takes before [B, S], (3,) where it has three for each token;
            None where it takes none.
        axes: the path of each tensor in `arguments` to its axes.
        constants: tensors in the cache that no step changes, by path.
    """

    arguments: dict[str, Any]
    leading: tuple[int, ...] | None
    axes: dict[str, tuple[Dimension, ...]]
    constants: dict[str, Any]

    @property
    def cache(self) -> dict[str, tuple[Dimension, ...]]:
        """What goes from step to step: path to axes."""
        return {path: axes for path, axes in self.axes.items() if path not in {IDS, MASK, *self.constants}}


def capture_step(model: Any, *, parallel: bool) -> Step:
    """Find out what `model` is called with after a prompt: for one token, or for any number, where `parallel`.

    Raises:
        ExportError: the model does not generate from ids and mask alone, or has no cache.
    """
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
    from transformers.exporters.utils import get_leaf_tensors

    register_cache_pytrees_for_model(model)
    arguments, other = (_capture(model, *sample, parallel=parallel) for sample in _SAMPLES)
    positions = arguments.pop("position_ids", None)
    leaves, others = get_leaf_tensors(arguments), get_leaf_tensors(other)
    own = [path for path in leaves if path not in (IDS, MASK) and path.split(".")[0] not in _CACHES]
    if leaves.keys() != others.keys() - {"position_ids"}:
        raise ExportError(f"the cache of {type(model).__name__} is another one for other prompts", WITHOUT_CACHE)
    if own or IDS not in leaves:
        raise ExportError(
            f"{type(model).__name__} generates with inputs beside ids, mask and cache: {', '.join(own)}", WITHOUT_CACHE
        )
    if positions is not None and not (
        MASK in leaves and positions.equal(count_positions(leaves[MASK], leaves[IDS].shape[1]).expand_as(positions))
    ):
        raise ExportError(f"{type(model).__name__} counts positions otherwise than generate does", WITHOUT_CACHE)
    for path in (IDS, MASK):
        if path in leaves and leaves[path].ndim != 2:
            raise ExportError(f"{type(model).__name__} generates with {path} {list(leaves[path].shape)}", WITHOUT_CACHE)
    if parallel and MASK not in leaves:
        raise ExportError(f"{type(model).__name__} takes no mask where it has a cache", WITHOUT_CACHE)
    axes = {
        path: _axes(path, tuple(leaf.shape), tuple(others[path].shape), parallel=parallel)
        for path, leaf in leaves.items()
    }
    strange = [axis for path in axes for axis in axes[path] if isinstance(axis, str) and "_axis_" in axis]
    if strange:  # its size for an empty cache is not known
        raise ExportError(
            f"the cache of {type(model).__name__} has axes that are neither batch nor length: {', '.join(strange)}",
            WITHOUT_CACHE,
        )
    if parallel and (chunk := chunk_size(model)) is not None:
        _lengthen(arguments, 2 * chunk + 3)
    fixed = {path: leaf for path, leaf in leaves.items() if leaf.ndim == 0 and leaf.equal(others[path])}
    leading = None if positions is None else tuple(positions.shape[:-2])
    step = Step(arguments, leading, axes, fixed)
    if not step.cache:
        raise ExportError(f"{type(model).__name__} generates without a cache", WITHOUT_CACHE)
    return step


def chunk_size(model: Any) -> int | None:
    """Return how many tokens of a prompt the model takes at a time, where it carries a state from chunk to chunk."""
    config = model.config.get_text_config()
    sizes = (getattr(config, name, None) for name in _CHUNKS)
    return next((size for size in sizes if isinstance(size, int) and 1 < size <= _LARGEST_CHUNK), None)


def _lengthen(arguments: dict[str, Any], length: int) -> None:
    """Let a captured call be for `length` tokens in place of two: of less than two chunks, the tracer fixes the number.

    All else that is captured is of the tokens before them.
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
    """Whether `generate` gives the model positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def embedding_rows(model: Any) -> int:
    """Return how many ids the model takes, which may be more than its tokenizer has."""
    return int(model.get_input_embeddings().weight.shape[0])


@contextmanager
def plain_generation(model: Any, **ids: int) -> Iterator[None]:
    """Let the model generate greedily, with no penalty and no stop of the checkpoint's own, while the block runs.

    Its special tokens stay, or are `ids`: a stop would end a row before the others.
    """
    from transformers import GenerationConfig

    before = model.generation_config
    names = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
    kept: dict[str, Any] = {**ids} or {name: getattr(before, name, None) for name in names}
    model.generation_config = GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **kept)
    try:
        yield
    finally:
        model.generation_config = before


def cache_name(path: str) -> str:
    """Name a tensor of a cache: `past_key_values.0.key` for `past_key_values.layers.0.keys`, `past_conv.0` for a state.

    Keys and values are called what optimum-onnx 0.1 and Transformers.js 4.3 call them. Of states, Transformers.js knows
    `past_conv` and `past_recurrent`, for architectures that it lists, and says `past_ssm` where this says
    `past_recurrent` of a Mamba layer; `past_state` is a name of our own (`getCacheNames` in its src/configs.js).
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
    """Name what a step makes of a cache input: `present.0.key` of `past_key_values.0.key`."""
    return re.sub("^past(_key_values)?", "present", past)


def _capture(model: Any, batch: int, length: int, *, parallel: bool) -> dict[str, Any]:
    """Return what `generate` calls the model with after a prompt: with one token, or, for `parallel`, with two."""
    import torch
    from transformers.exporters.utils import decompose_prefill_decode

    rows, columns = torch.arange(batch)[:, None], torch.arange(length)[None, :]
    ids = 11 + (columns + 7 * rows) % (embedding_rows(model) - 11)
    # Padding on the left, where generation has it; without any, `generate` drops the mask, and the graph has none.
    mask = (columns > rows % 2).long()
    sample = {IDS: ids.to(model.device), MASK: mask.to(model.device)}
    with quiet(), plain_generation(model), _whole_windows():
        try:
            captured = decompose_prefill_decode(model, sample, multi_token_decode=parallel)
        except Exception as error:  # models raise whatever their own code raises
            raise ExportError(
                f"{type(model).__name__} does not generate from {IDS} and {MASK}: {reason_of(error)}", WITHOUT_CACHE
            ) from error
    arguments: dict[str, Any] = captured["decode"][1]
    return arguments


@contextmanager
def _whole_windows() -> Iterator[None]:
    """Let the cache of a layer with a sliding window keep all tokens while the block runs, as the tracer lets it.

    It would be cut to the window otherwise, and a window smaller than the samples taken for a size that never moves.
    The mask slides all the same. `transformers.exporters` patches these three while it traces. transformers 5.23.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    names = ("update", "get_mask_sizes", "get_seq_length")
    before = {name: vars(DynamicSlidingWindowLayer)[name] for name in names}
    try:
        for name in names:
            setattr(DynamicSlidingWindowLayer, name, vars(DynamicLayer)[name])
        yield
    finally:
        for name, method in before.items():
            setattr(DynamicSlidingWindowLayer, name, method)


def _axes(path: str, shape: tuple[int, ...], other: tuple[int, ...], *, parallel: bool) -> tuple[Dimension, ...]:
    """Name the axes of a tensor by how they move from one sample to the other."""
    if path in (IDS, MASK):
        new: Dimension = SEQUENCE if parallel else 1
        return BATCH, new if path == IDS else f"{PAST} + {new}"
    names = dict(zip(zip(*_SAMPLES, strict=True), (BATCH, PAST), strict=True))
    return tuple(
        size if size == moved else names.get((size, moved), f"{cache_name(path)}_axis_{axis}")
        for axis, (size, moved) in enumerate(zip(shape, other, strict=True))
    )
