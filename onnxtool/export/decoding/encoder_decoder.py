"""Trace an encoder-decoder for generation: a graph for the encoder, and one for the decoder's steps.

The encoder's graph ends in the keys and values of cross attention, so that they are computed once for a text; the
decoder's takes them as a part of its cache, and never the encoder's states.

Letters of shapes: B batch, T tokens of the encoder, S tokens given to the decoder, P tokens before them, V vocabulary,
H heads, D width of a head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.decoding.step import IDS, LOGITS, MASK, PAST, present_name
from onnxtool.export.graph import tidy
from onnxtool.export.modalities.sizes import DECODER_SEQUENCE, Feeds
from onnxtool.export.signature import Shape, Signature, to_tensors
from onnxtool.export.strategies import ExportStrategy
from onnxtool.export.tracing import reason_of, trace
from onnxtool.reports import Dimension
from onnxtool.runtime.quiet import quiet

ENCODER_MASK = "encoder_attention_mask"
WITHOUT_CACHE = "export it with --task text2text-generation, which is without a cache"

# As optimum and Transformers.js call the two caches, and transformers' EncoderDecoderCache.
_CACHES = {"decoder": "self_attention_cache", "encoder": "cross_attention_cache"}
_PARTS = {"key": "keys", "value": "values"}
_SAME = 1e-3  # of the largest logit: far above rounding, far below what another token does
_STEPS = 2  # tokens of the traced step; of one, the tracer would fix the number

Cache = dict[str, Any]
"""Tensors float [B, H, S or T, D] by name, e.g. `past_key_values.0.decoder.key`."""


@dataclass(frozen=True)
class EncoderDecoder:
    """An encoder-decoder of transformers, taken apart into the two calls that generation makes.

    Attributes:
        model: in evaluation mode.
        start_id: what every text of the decoder begins with.
        in_parallel: whether the decoder takes several tokens at once where it has a cache; ProphetNet takes one.
    """

    model: Any
    start_id: int
    in_parallel: bool = True

    @classmethod
    def of(cls, model: Any, feeds: Feeds, start_id: int) -> EncoderDecoder:
        """Find out how the decoder goes with its cache, by running it on `feeds`, the inputs of the encoder.

        Raises:
            ExportError: it has no cache of this kind, needs more than it, or does not stand for the tokens before.
        """
        import torch

        parts = cls(model, start_id)
        inputs = to_tensors(model, feeds)
        name = type(model).__name__
        if MASK not in inputs:
            raise ExportError(f"{name} takes no mask with its text", WITHOUT_CACHE)
        with torch.inference_mode(), quiet():
            try:
                cache, words = parts.encode(inputs), _words(model, inputs, start_id)
                first, grown = parts.decode(words[:, :1], inputs[MASK], cache)
                second, _ = parts.decode(words[:, 1:2], inputs[MASK], {**cache, **grown})
                blank, _ = parts.decode(words[:, 1:2], inputs[MASK], {**cache, **grown}, states=1.0)
                wanted = _without_cache(model, inputs, words)
            except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError, KeyError) as error:
                raise ExportError(f"{name} does not decode with a cache: {reason_of(error)}", WITHOUT_CACHE) from error
            if not _is_same(blank, second):
                raise ExportError(f"{name} reads the encoder's states beside its cache", WITHOUT_CACHE)
            if not _is_same(torch.cat([first, second], 1), wanted):
                raise ExportError(f"the cache of {name} does not stand for the tokens before", WITHOUT_CACHE)
            try:
                both, _ = parts.decode(words, inputs[MASK], cache)
                in_parallel = both.shape == wanted.shape and _is_same(both, wanted)
            except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError):
                in_parallel = False
        return cls(model, start_id, in_parallel)

    def encode(self, inputs: Mapping[str, Any]) -> Cache:
        """Return the cache before the first token: keys and values of cross attention, and none of self-attention."""
        states = self.model.get_encoder()(**inputs, return_dict=True)
        first = inputs[MASK].new_full((inputs[MASK].shape[0], 1), self.start_id)
        outputs = self._call(first, inputs[MASK], states, _empty())
        cache = _tensors(outputs.past_key_values)
        return {name: tensor if ".encoder." in name else tensor[:, :, :0] for name, tensor in cache.items()}

    def decode(self, ids: Any, mask: Any, cache: Cache, *, states: float = 0.0) -> tuple[Any, Cache]:
        """Run S tokens int64 [B, S] onto a cache; return their logits [B, S, V] and the cache of self-attention after.

        Of the encoder's states the decoder sees the shape alone: all of them are the number `states`.
        """
        from transformers.modeling_outputs import BaseModelOutput

        blank = mask[:, :, None].to(self.model.dtype).expand(-1, -1, self._width) * 0 + states
        outputs = self._call(ids, mask, BaseModelOutput(last_hidden_state=blank), _filled(cache))
        after = _tensors(outputs.past_key_values)
        return outputs.logits, {name: tensor for name, tensor in after.items() if ".decoder." in name}

    @property
    def _width(self) -> int:
        encoder = getattr(self.model.config, "encoder", None) or self.model.config
        config = encoder.get_text_config() if hasattr(encoder, "get_text_config") else encoder
        return int(getattr(config, "hidden_size", None) or config.d_model)

    def _call(self, ids: Any, mask: Any, states: Any, cache: Any) -> Any:
        return self.model(
            encoder_outputs=_with_routers(states),
            attention_mask=mask,
            decoder_input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )


def trace_encoder_decoder(
    parts: EncoderDecoder,
    feeds: Feeds,
    strategy: ExportStrategy,
    encoder_shapes: Mapping[str, Shape],
    opset: int | None,
) -> tuple[ir.Model, ir.Model]:
    """Trace both graphs.

    Args:
        parts: the model.
        feeds: the inputs of the encoder to trace on, no axis of size 1 that is dynamic.
        strategy: how.
        encoder_shapes: the encoder's inputs with the names of their axes.
        opset: None for the exporter's own.

    Returns:
        The decoder, which takes input_ids int64 [B, S], encoder_attention_mask int64 [B, T], keys and values of
        self-attention [B, H, P, D] and of cross attention [B, H, T, D], and gives logits [B, S, V] and the keys and
        values of self-attention after these tokens. P may be 0. S is 1 where the model takes no more with a cache.
        And the encoder, which takes what the tokenizer gives, and gives `present.0.encoder.key` and so on, which every
        call of the decoder takes as `past_key_values.0.encoder.key`.

    Raises:
        ExportError: one of them cannot be traced, or does not follow the model.
    """
    import torch

    model = parts.model
    inputs = to_tensors(model, feeds)
    batch, sequence = encoder_shapes[MASK]
    with torch.no_grad(), quiet():
        cache = parts.encode(inputs)
        cross = {name: tensor for name, tensor in cache.items() if ".encoder." in name}
        words = _words(model, inputs, parts.start_id)
        past = cache
        for token in words.split(1, dim=1):  # two tokens before: one is a size that a tracer takes for fixed
            logits, past = parts.decode(token, inputs[MASK], {**cross, **past})
    length = DECODER_SEQUENCE if parts.in_parallel else 1

    def shapes(tensors: Cache, axis: Dimension, *, present: bool = False) -> dict[str, Shape]:
        named = {present_name(name) if present else name: tensor.shape for name, tensor in tensors.items()}
        return {name: (batch, heads, axis, width) for name, (_, heads, _, width) in named.items()}

    def encode(named: Cache) -> Cache:
        states = parts.encode(named)
        return {present_name(name): states[name] for name in cross}

    def step(named: Cache) -> Cache:
        before = {name: tensor for name, tensor in named.items() if name not in (IDS, ENCODER_MASK)}
        logits, after = parts.decode(named[IDS], named[ENCODER_MASK], before)
        return {LOGITS: logits, **{present_name(name): tensor for name, tensor in after.items()}}

    taken = {IDS: (batch, length), ENCODER_MASK: (batch, sequence), **shapes(past, PAST), **shapes(cross, sequence)}
    given = {LOGITS: (batch, length, logits.shape[-1]), **shapes(past, f"{PAST} + {length}", present=True)}
    sample = {IDS: words if parts.in_parallel else words[:, :1], ENCODER_MASK: inputs[MASK], **past, **cross}
    encoder = Signature(dict(encoder_shapes), shapes(cross, sequence, present=True))
    return (
        _trace(model, step, sample, Signature(taken, given), strategy, opset),
        _trace(model, encode, inputs, encoder, strategy, opset),
    )


def _trace(
    model: Any,
    run: Callable[[Cache], Cache],
    sample: Cache,
    signature: Signature,
    strategy: ExportStrategy,
    opset: int | None,
) -> ir.Model:
    """Trace `run`, a function of tensors by name, as the forward of the model; see `onnxtool.export.tracing.trace`."""
    plain = {name: _plain(name) for name in (*signature.inputs, *signature.outputs)}
    named = {short: name for name, short in plain.items()}

    def forward(**tensors: Any) -> dict[str, Any]:
        outputs = run({named[short]: tensor for short, tensor in tensors.items() if tensor is not None})
        return {plain[name]: outputs[name] for name in signature.outputs}

    traced_model = copy.copy(model)
    traced_model.forward = forward
    short = Signature(
        {plain[name]: shape for name, shape in signature.inputs.items()},
        {plain[name]: shape for name, shape in signature.outputs.items()},
    )
    tensors = {plain[name]: sample[name].clone() for name in signature.inputs}
    graph = trace(strategy.exporter, traced_model, tensors, short, opset, timeout_s=strategy.timeout_s)
    tidy(graph, short)
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        value.name = named[str(value.name)]
    return graph


def _plain(name: str) -> str:
    """Return a name that a parameter of a function can have."""
    return name.replace(".", "_")


def _words(model: Any, inputs: Mapping[str, Any], start_id: int) -> Any:
    """Return ids for the decoder: int64 [B, 2], the first of which starts a text."""
    import torch

    words = inputs[MASK].new_full((inputs[MASK].shape[0], _STEPS), start_id)
    rows = torch.arange(len(words), device=words.device)
    words[:, 1] = 11 + 7 * rows % max(1, model.get_input_embeddings().weight.shape[0] - 11)
    return words


def _without_cache(model: Any, inputs: Mapping[str, Any], words: Any) -> Any:
    """Return the logits of the decoder's tokens without anything of a cache, none of them taken for padding."""
    masks = {"decoder_attention_mask": words.new_ones(words.shape)}
    masks = {name: mask for name, mask in masks.items() if name in inspect.signature(model.forward).parameters}
    return model(**inputs, **masks, decoder_input_ids=words, use_cache=False, return_dict=True).logits


def _is_same(first: Any, second: Any) -> bool:
    return float((first - second).abs().max()) <= _SAME * max(1.0, float(second.abs().max()))


def _empty() -> Any:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _filled(cache: Cache) -> Any:
    """Put tensors into a cache as `generate` has it after the first step, where cross attention is computed already.

    Its layers keep all tokens, also those with a window, whose mask slides all the same.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    filled = []
    for kind in _CACHES:
        layers = sum(f".{kind}.key" in name for name in cache)
        names = [[f"past_key_values.{layer}.{kind}.{part}" for part in _PARTS] for layer in range(layers)]
        filled.append(DynamicCache([tuple(cache[name] for name in pair) for pair in names]))
    return EncoderDecoderCache(*filled)


def _tensors(cache: Any) -> Cache:
    """Return the tensors of transformers' cache by the names they have in the file.

    Raises:
        ExportError: it is of another kind.
    """
    if not all(hasattr(cache, attribute) for attribute in _CACHES.values()):
        raise ExportError(f"its cache is a {type(cache).__name__}", WITHOUT_CACHE)
    return {
        f"past_key_values.{layer}.{kind}.{part}": getattr(entry, attribute)
        for kind, name in _CACHES.items()
        for layer, entry in enumerate(getattr(cache, name).layers)
        for part, attribute in _PARTS.items()
    }


def _with_routers(states: Any) -> Any:
    """Let the states of an encoder have no figures of a mixture of experts, which NLLB's model looks up."""
    if not hasattr(states, "router_logits"):
        states.router_logits = None
    return states
