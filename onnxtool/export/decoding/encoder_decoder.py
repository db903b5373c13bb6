"""Export an encoder-decoder for generation: one graph for the encoder, and one for the decoder's steps.

The encoder's graph ends in the keys and values of cross attention, so that they are computed once per text; the decoder
takes them as part of its cache, and never reads the encoder's states. The two graphs generate token by token, and the
result is compared with `generate`.

Shape letters: B batch, T encoder tokens, S tokens given to the decoder, P tokens before them, K tokens in a decoder
prompt, N generated tokens, V vocabulary, H heads, D head size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.errors import ExportError
from onnxtool.export.decoding.generation import GENERATED, NEW_TOKENS, choose, empty_cache, generate_with_pytorch
from onnxtool.export.decoding.step import IDS, LOGITS, MASK, PAST, present_name
from onnxtool.export.modalities.combined import WithDecoder
from onnxtool.export.modalities.finding import left_out_notes, text_of
from onnxtool.export.modalities.modality import (
    DECODER_SEQUENCE,
    SEQUENCE,
    DescribedInputs,
    Feeds,
    Modality,
    Sizes,
    size_notes,
    text_case,
)
from onnxtool.export.signature import Shape, Signature, detect_signature, tidy, to_tensors
from onnxtool.export.tracing import ExportStrategy, attention_of, reason_of, strategies_for, trace
from onnxtool.model_file import ModelFile, ModelPath
from onnxtool.model_file.metadata import DECODER_KEY, ENCODER_KEY, MAX_DECODER_LENGTH_KEY
from onnxtool.reports import Dimension
from onnxtool.runtime.comparison import Case, ReferenceOutputs, require_passed, run_reference, verify
from onnxtool.runtime.difference import Tolerance
from onnxtool.runtime.input_cases import LONGEST_CASE
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.recipes import IDS as KIND_OF_IDS
from onnxtool.runtime.recipes import MASK as KIND_OF_MASK
from onnxtool.runtime.recipes import Recipe
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.verification import Verification

ENCODER_MASK = "encoder_attention_mask"
WITHOUT_CACHE = "export it with --task text2text-generation, which uses no cache"

# The names of the two caches in optimum and Transformers.js, and in transformers' EncoderDecoderCache.
_CACHES = {"decoder": "self_attention_cache", "encoder": "cross_attention_cache"}
_PARTS = {"key": "keys", "value": "values"}
_TOLERANCE = 1e-3  # relative to the largest logit: far above rounding, far below the effect of another token
PROMPT = "decoder_input_ids"

# K for successive cases. The longest exceeds the distances that T5 distinguishes, which fall into 32 buckets.
_LENGTHS = (1, 5, 1, 70, 2)
_STEPS = 2  # tokens in the traced step; with one, the tracer would fix the number

Cache = dict[str, Any]
"""Tensors float [B, H, S or T, D] by name, e.g. `past_key_values.0.decoder.key`."""


@dataclass(frozen=True)
class EncoderDecoder:
    """A transformers encoder-decoder, split into the two calls that generation makes.

    Attributes:
        model: in evaluation mode.
        start_id: the first token of every decoder text.
        in_parallel: whether the decoder takes several tokens at once with a cache; ProphetNet takes one.
    """

    model: Any
    start_id: int
    in_parallel: bool = True

    @classmethod
    def of(cls, model: Any, feeds: Feeds, start_id: int) -> EncoderDecoder:
        """Determine how the decoder works with its cache, by running it on the encoder inputs `feeds`.

        Raises:
            ExportError: it has no cache of this kind, needs more than the cache, or the cache does not replace earlier
                tokens.
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
                raise ExportError(f"{name} reads the encoder's states in addition to its cache", WITHOUT_CACHE)
            if not _is_same(torch.cat([first, second], 1), wanted):
                raise ExportError(f"the cache of {name} does not represent the preceding tokens", WITHOUT_CACHE)
            try:
                together, _ = parts.decode(words, inputs[MASK], cache)
                in_parallel = together.shape == wanted.shape and _is_same(together, wanted)
            except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError):
                in_parallel = False
        return cls(model, start_id, in_parallel)

    def encode(self, inputs: Mapping[str, Any]) -> Cache:
        """Return the cache before the first token: cross-attention keys and values, with empty self-attention."""
        states = self.model.get_encoder()(**inputs, return_dict=True)
        first = inputs[MASK].new_full((inputs[MASK].shape[0], 1), self.start_id)
        outputs = self._call(first, inputs[MASK], states, _empty())
        cache = _tensors(outputs.past_key_values)
        return {name: tensor if ".encoder." in name else tensor[:, :, :0] for name, tensor in cache.items()}

    def decode(self, ids: Any, mask: Any, cache: Cache, *, states: float = 0.0) -> tuple[Any, Cache]:
        """Run S tokens, int64 [B, S], on a cache; return their logits [B, S, V] and the updated self-attention cache.

        The decoder sees only the shape of the encoder's states: all their elements are the number `states`.
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
        feeds: the encoder inputs to trace on; no dynamic axis may have size 1.
        strategy: how to trace.
        encoder_shapes: the encoder inputs with their axis names.
        opset: None for the exporter's default.

    Returns:
        The decoder and the encoder. The decoder takes input_ids int64 [B, S], encoder_attention_mask int64 [B, T], and
        keys and values of self-attention [B, H, P, D] and cross attention [B, H, T, D]; it returns logits [B, S, V] and
        the self-attention keys and values after these tokens. P may be 0. S is 1 if the model accepts no more with a
        cache. The encoder takes the tokenizer's output, and returns `present.0.encoder.key` and so on, which every
        decoder call takes as `past_key_values.0.encoder.key`.

    Raises:
        ExportError: one of them cannot be traced, or does not match the model.
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

    def encode(named: Cache) -> Cache:
        states = parts.encode(named)
        return {present_name(name): states[name] for name in cross}

    def step(named: Cache) -> Cache:
        before = {name: tensor for name, tensor in named.items() if name not in (IDS, ENCODER_MASK)}
        logits, after = parts.decode(named[IDS], named[ENCODER_MASK], before)
        return {LOGITS: logits, **{present_name(name): tensor for name, tensor in after.items()}}

    before, cross_shapes = _shapes(past, batch, PAST), _shapes(cross, batch, sequence)
    input_shapes = {IDS: (batch, length), ENCODER_MASK: (batch, sequence), **before, **cross_shapes}
    after = _shapes(past, batch, f"{PAST} + {length}")
    output_shapes = {LOGITS: (batch, length, logits.shape[-1]), **{present_name(name): after[name] for name in after}}
    sample = {IDS: words if parts.in_parallel else words[:, :1], ENCODER_MASK: inputs[MASK], **past, **cross}
    encoder = Signature(dict(encoder_shapes), {present_name(name): cross_shapes[name] for name in cross_shapes})
    return (
        _trace(model, step, sample, Signature(input_shapes, output_shapes), strategy, opset),
        _trace(model, encode, inputs, encoder, strategy, opset),
    )


def _shapes(cache: Cache, batch: Dimension, axis: Dimension) -> dict[str, Shape]:
    return {name: (batch, tensor.shape[1], axis, tensor.shape[3]) for name, tensor in cache.items()}


def _trace(
    model: Any,
    run: Callable[[Cache], Cache],
    sample: Cache,
    signature: Signature,
    strategy: ExportStrategy,
    opset: int | None,
) -> ir.Model:
    """Trace `run`, a function of named tensors, as the forward of the model; see `onnxtool.export.tracing.trace`."""
    plain = {name: _plain(name) for name in (*signature.inputs, *signature.outputs)}
    cache = {short: name for name, short in plain.items()}

    def forward(**tensors: Any) -> dict[str, Any]:
        outputs = run({cache[short]: tensor for short, tensor in tensors.items() if tensor is not None})
        return {plain[name]: outputs[name] for name in signature.outputs}

    traced_model = copy.copy(model)
    traced_model.forward = forward
    short = Signature(
        {plain[name]: shape for name, shape in signature.inputs.items()},
        {plain[name]: shape for name, shape in signature.outputs.items()},
    )
    tensors = {plain[name]: sample[name].clone() for name in signature.inputs}
    graph = trace(strategy.exporter, traced_model, tensors, short, opset, timeout_s=strategy.timeout_s)
    tidy(graph, short, model)
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        value.name = cache[str(value.name)]
    return graph


def _plain(name: str) -> str:
    """Return a name that is valid for a function parameter."""
    return name.replace(".", "_")


def _words(model: Any, inputs: Mapping[str, Any], start_id: int) -> Any:
    """Return ids for the decoder: int64 [B, 2]; the first one starts a text."""
    import torch

    words = inputs[MASK].new_full((inputs[MASK].shape[0], _STEPS), start_id)
    rows = torch.arange(len(words), device=words.device)
    words[:, 1] = 11 + 7 * rows % max(1, model.get_input_embeddings().weight.shape[0] - 11)
    return words


def _without_cache(model: Any, inputs: Mapping[str, Any], words: Any) -> Any:
    """Return the decoder's logits without any cache, with no token treated as padding."""
    masks = {"decoder_attention_mask": words.new_ones(words.shape)}
    masks = {name: mask for name, mask in masks.items() if name in inspect.signature(model.forward).parameters}
    return model(**inputs, **masks, decoder_input_ids=words, use_cache=False, return_dict=True).logits


def _is_same(first: Any, second: Any) -> bool:
    return float((first - second).abs().max()) <= _TOLERANCE * max(1.0, float(second.abs().max()))


def _empty() -> Any:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _filled(cache: Cache) -> Any:
    """Put tensors into a cache in the state after `generate`'s first step, with cross attention already computed.

    Its layers keep all tokens, including layers with a sliding window, whose mask still slides.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    filled = []
    for kind in _CACHES:
        layers = sum(f".{kind}.key" in name for name in cache)
        names = [[f"past_key_values.{layer}.{kind}.{part}" for part in _PARTS] for layer in range(layers)]
        filled.append(DynamicCache([tuple(cache[name] for name in pair) for pair in names]))
    return EncoderDecoderCache(*filled)


def _tensors(cache: Any) -> Cache:
    """Return the tensors of transformers' cache, by their names in the file."""
    if not all(hasattr(cache, attribute) for attribute in _CACHES.values()):
        raise ExportError(f"its cache is a {type(cache).__name__}", WITHOUT_CACHE)
    return {
        f"past_key_values.{layer}.{kind}.{part}": getattr(entry, attribute)
        for kind, name in _CACHES.items()
        for layer, entry in enumerate(getattr(cache, name).layers)
        for part, attribute in _PARTS.items()
    }


def _with_routers(states: Any) -> Any:
    """Give encoder states empty mixture-of-experts statistics, which NLLB's model looks up."""
    if not hasattr(states, "router_logits"):
        states.router_logits = None
    return states


@dataclass(frozen=True)
class EncoderDecoderPipeline:
    """An encoder-decoder with its cache: one graph for the text, and one for the decoder's steps.

    Attributes:
        modality: the encoder's inputs.
        signature: of the whole model; all axes that it leaves open are dynamic.
        start_id: the first token of every decoder text.
        in_parallel: whether the decoder takes several tokens at once.
        longest: the maximum number of decoder tokens; None for no limit.
        vocabulary_size: the number of ids the decoder knows.
        default_attention: transformers' choice for this model.
        is_verified: whether the files will be compared with PyTorch.
    """

    steps: ClassVar[int] = 0

    modality: Modality
    signature: Signature
    start_id: int
    in_parallel: bool
    longest: int | None
    vocabulary_size: int
    default_attention: str | None
    is_verified: bool

    @classmethod
    def of(cls, model: Any, modality: Modality, *, is_verified: bool) -> EncoderDecoderPipeline:
        """Determine everything about a loaded model that does not depend on the strategy.

        Raises:
            ExportError: it is not an encoder-decoder for text, or does not work with a cache.
        """
        if text_of(modality) is None or not isinstance(modality, WithDecoder):
            raise ExportError(f"{type(model).__name__} is not an encoder-decoder for text", WITHOUT_CACHE)
        signature = detect_signature(model, modality)
        start_id = _start_of(model, modality.start_id)
        parts = EncoderDecoder.of(model, modality.encoder.sample(signature.model_sizes), start_id)
        return cls(
            modality.encoder,
            signature,
            start_id,
            parts.in_parallel,
            modality.longest,
            modality.vocabulary_size,
            attention_of(model),
            is_verified,
        )

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies: TorchScript first if the files are verified, as it takes a twentieth of the time."""
        axes = [replace(axis, is_covered=True) for axis in self.signature.axes if axis.name != DECODER_SEQUENCE]
        return strategies_for(exporter, axes, self.default_attention, verified=verified)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> tuple[ir.Model, ...]:
        """Trace the encoder and a step of the decoder."""
        signature = self.signature
        if strategy.fixed:
            signature = detect_signature(model, self.modality, strategy.fixed)
        sample = self.modality.sample(signature.sizes)
        shapes = {name: signature.inputs[name] for name in sample}
        parts = EncoderDecoder(model, self.start_id, self.in_parallel)
        return trace_encoder_decoder(parts, sample, strategy, shapes, opset)

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Make the model generate from texts of many lengths, alone and batched.

        With `lengths`, from texts with these numbers of tokens.
        """
        fixed = {**self.signature.model_sizes, **strategy.fixed}

        def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            """Generate N tokens greedily after a prompt: logits float32 [B, N, V]."""
            tokens = {"decoder_start_token_id": self.start_id, "pad_token_id": 0}
            return {LOGITS: generate_with_pytorch(model, feeds, WITHOUT_CACHE, **tokens)}

        # Everything in a row depends on all of its text, and none of it is padding.
        if not lengths:
            cases = list(self._cases(fixed, type(model).__name__))
            return run_reference(run, cases, name="PyTorch", sequences=frozenset())
        texts = [text_case(self.modality, fixed, length) for length in lengths]
        cases = [replace(text, feeds={**text.feeds, PROMPT: np.array([[self.start_id]])}) for text in texts]
        return run_reference(run, cases, name="PyTorch", refusal=ExportError, sequences=frozenset())

    def verify(self, path: ModelPath, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Make the files generate from the same texts, using their own choices and cache, and compare.

        Decoder prompts are passed as a whole and, if long, also in two pieces.

        Raises:
            VerificationError: logits differ by more than `tolerance` at any step, as they do after a different token.
        """
        model = ModelFile.open(path)
        first, step = (open_session(model_path, provider="cpu") for model_path in (encoder_path(model.path), model))
        cases = [
            replace(case, feeds={**case.feeds, GENERATED: outputs[LOGITS].argmax(-1)})
            for case, outputs in zip(reference.cases, reference.outputs, strict=True)
        ]

        def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {LOGITS: generate_from_text(first, step, feeds, tolerance)}

        verification = verify(run, replace(reference, cases=tuple(cases)), tolerance)
        require_passed(verification, "--no_verify keeps the files despite the errors")
        return verification

    def _cases(self, fixed: Sizes, name: str) -> Iterator[Case]:
        limit = self._verified_answer
        longest = min(limit or max(_LENGTHS) + NEW_TOKENS, max(_LENGTHS) + NEW_TOKENS) - NEW_TOKENS
        if longest < 1:
            raise ExportError(
                f"the decoder of {name} takes {limit} tokens, too few to generate {NEW_TOKENS}",
                "pass --no_verify to export it as it is",
            )
        lengths = tuple(min(length, longest) for length in _LENGTHS) if self.in_parallel else (1,)
        numbers: dict[str, int] = {}
        for number, case in enumerate(self.modality.cases(fixed)):
            number = numbers[case.description] = numbers.get(case.like, number)  # the same prompt apart from padding
            length = lengths[number % len(lengths)]
            batch = len(next(iter(case.feeds.values())))
            prompt = np.random.default_rng(number).integers(0, self.vocabulary_size, (batch, length))
            prompt[:, 0] = self.start_id
            yield replace(case, feeds={**case.feeds, PROMPT: prompt})
        if self.in_parallel and limit is not None and limit - NEW_TOKENS > max(lengths):
            prompt = np.random.default_rng(0).integers(0, self.vocabulary_size, (1, limit - NEW_TOKENS))
            prompt[:, 0] = self.start_id
            text = text_case(self.modality, fixed, fixed.get(SEQUENCE, 8))
            yield replace(text, description=f"a long answer, {limit} tokens", feeds={**text.feeds, PROMPT: prompt})

    @property
    def _verified_answer(self) -> int | None:
        """The maximum number of decoder tokens that verification reaches; None for no limit."""
        return min(self.longest or LONGEST_CASE, LONGEST_CASE) if self.in_parallel else self.longest

    def inputs(self, strategy: ExportStrategy, cases: Sequence[Case] | None) -> tuple[DescribedInputs, ...]:
        """Describe the decoder and encoder inputs, using the texts PyTorch generated from, or all if unverified."""
        decoder = {IDS: Recipe(KIND_OF_IDS, self.vocabulary_size), ENCODER_MASK: Recipe(KIND_OF_MASK)}
        sizes = {**self.signature.model_sizes, **strategy.fixed}
        return (decoder, ()), (self.modality.recipes, self.modality.cases(sizes) if cases is None else cases)

    def links(self, path: Path) -> tuple[dict[str, str], ...]:
        """Return the metadata that links the decoder at `path` and its encoder, with the decoder's limit."""
        longest = self._longest_answer
        limit = {} if longest is None else {MAX_DECODER_LENGTH_KEY: str(longest)}
        return {ENCODER_KEY: encoder_path(path).name, **limit}, {DECODER_KEY: path.name}

    @property
    def _longest_answer(self) -> int | None:
        """The maximum number of decoder tokens that the files support; None for no limit."""
        return self._verified_answer if self.is_verified else self.longest

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """List fixed axes and missing inputs."""
        sizes = {**({} if self.in_parallel else {DECODER_SEQUENCE: 1}), **self.signature.model_sizes}
        notes = list(size_notes(architecture, sizes, strategy.fixed, "these files"))
        if self._longest_answer != self.longest:
            stated = "" if self.longest is None else f", of the {self.longest} that the checkpoint states"
            notes.append(f"for answers of up to {self._longest_answer} tokens{stated}: longer ones are not verified")
        return (*notes, *left_out_notes(self.modality, architecture))


def encoder_path(path: Path) -> Path:
    """Return the path of the encoder for the graph at `path`: `NAME-encoder.onnx` next to `NAME.onnx`."""
    return path.with_name(f"{path.stem}-encoder{path.suffix}")


def _start_of(model: Any, otherwise: int) -> int:
    """Return the first token of decoder texts, looked up as in `generate`."""
    configs = (model.generation_config, model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    token_ids = (getattr(config, name, None) for name in names for config in configs)
    return next((token for token in token_ids if isinstance(token, int)), otherwise)


def generate_from_text(
    encoder: Session, decoder: Session, feeds: Mapping[str, NDArray[Any]], tolerance: Tolerance
) -> NDArray[Any]:
    """Generate greedily with two exported graphs, feeding each step's cache to the next.

    Args:
        encoder: a graph from `trace_encoder_decoder`.
        decoder: the other graph.
        feeds: the encoder inputs, a decoder prompt int64 [B, K], and tokens int64 [B, N] to take instead of others
            whose logit is the same within `tolerance`.
        tolerance: what counts as a tie.

    Returns:
        Logits float [B, N, V].
    """
    prompt, expected = feeds[PROMPT], feeds[GENERATED]
    states = encoder.run({name: feeds[name] for name in encoder.input_names})
    cross = {name: states[present_name(name)] for name in decoder.input_names if present_name(name) in states}
    cache = empty_cache(decoder, len(prompt))
    mask = {ENCODER_MASK: feeds[MASK]}
    logits: list[NDArray[Any]] = []
    for piece in _pieces(prompt, decoder):
        outputs = decoder.run({IDS: piece, **mask, **cross, **cache})
        cache = {name: outputs[present_name(name)] for name in cache}
    for number in range(expected.shape[1]):
        logits.append(outputs[LOGITS][:, -1])
        if number + 1 < expected.shape[1]:
            token = choose(logits[-1], expected[:, number], tolerance)[:, None]
            outputs = decoder.run({IDS: token, **mask, **cross, **cache})
            cache = {name: outputs[present_name(name)] for name in cache}
    return np.stack(logits, axis=1)


def _pieces(prompt: NDArray[np.int64], decoder: Session) -> list[NDArray[np.int64]]:
    """Split a prompt into pieces, one per call: all of a short prompt, a long one in two, or token by token."""
    ids = next(info for info in decoder.model.structure.inputs if info.name == IDS)
    length = prompt.shape[1]
    size = 1 if ids.shape[1] == 1 else length if length < 4 else -(-length // 2)
    return [prompt[:, start : start + size] for start in range(0, length, size)]
