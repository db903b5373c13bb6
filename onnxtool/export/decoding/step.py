"""One call of a causal language model with its cache, captured from `generate`: its arguments and dynamic axes.

Shape letters: B batch, S tokens given to the call, P earlier tokens, represented by the cache, V vocabulary.

`generate` itself shows what a model is called with: `transformers.exporters` runs it and captures the arguments of its
steps, which reveals the cache of any architecture, whether keys and values or recurrent states. Two prompts with
different batch and length show which axes of the cache vary. Tested with transformers 5.23.
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
    arguments, other = (_capture(model, *sample, parallel=parallel) for sample in _SAMPLES)
    positions = arguments.pop("position_ids", None)
    leaves, others = get_leaf_tensors(arguments), get_leaf_tensors(other)
    own = [path for path in leaves if path not in (IDS, MASK) and path.split(".")[0] not in _CACHES]
    if leaves.keys() != others.keys() - {"position_ids"}:
        raise ExportError(f"the cache of {type(model).__name__} differs between prompts", WITHOUT_CACHE)
    if own or IDS not in leaves:
        raise ExportError(
            f"{type(model).__name__} generates with inputs other than ids, mask and cache: {', '.join(own)}",
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
        path: _axes(path, tuple(leaf.shape), tuple(others[path].shape), parallel=parallel)
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
    fixed = {path: leaf for path, leaf in leaves.items() if leaf.ndim == 0 and leaf.equal(others[path])}
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
    model.generation_config = GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **kept)
    try:
        yield
    finally:
        model.generation_config = before


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
    before = {name: vars(DynamicSlidingWindowLayer)[name] for name in names}
    try:
        for name in names:
            setattr(DynamicSlidingWindowLayer, name, vars(DynamicLayer)[name])
        yield
    finally:
        for name, method in before.items():
            setattr(DynamicSlidingWindowLayer, name, method)


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
