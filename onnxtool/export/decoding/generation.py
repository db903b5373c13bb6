"""Export a decoder with its cache, and verify what the file generates, token by token, against `generate`.

Shape letters: B batch, S prompt tokens, N generated tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.errors import ExportError, first_line
from onnxtool.export.decoding.step import (
    IDS,
    LOGITS,
    MASK,
    PAST,
    PROMPTS,
    WITHOUT_CACHE,
    count_positions,
    embedding_rows,
    plain_generation,
    present_name,
    takes_positions,
    trace_with_cache,
)
from onnxtool.export.modalities.finding import left_out_notes, text_of
from onnxtool.export.modalities.modality import BATCH, DescribedInputs, Modality
from onnxtool.export.signature import to_tensors
from onnxtool.export.tracing import EXPORTERS, ExportStrategy
from onnxtool.model_file import ModelPath
from onnxtool.runtime.comparison import Case, ReferenceOutputs, require_passed, run_reference, verify
from onnxtool.runtime.difference import Tolerance, informative
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.verification import Verification

# One from the prompt, eight from the cache.
NEW_TOKENS = 9
# The tokens that `generate` chose, used to break ties; see `choose`.
GENERATED = "generated"
# The number of prompt tokens per call, if there is more than one call.
PIECES = "pieces"

# Logits of a long prompt would fill memory; those at its end depend on all of it.
_COMPARED_PROMPT = 64
_LONGEST = 1024
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size", "window_size")
_TEXTS = ("what is AI?", "The capital of France is", "Once upon a time, in 1999, there was a naïve café")


@dataclass(frozen=True)
class GenerationPipeline:
    """A decoder with its cache as inputs and outputs: one graph for prompts and for the tokens after them.

    Attributes:
        modality: the model's inputs; the file takes only the text.
    """

    steps: ClassVar[int] = NEW_TOKENS
    signature: ClassVar[None] = None  # determined by the tracer

    modality: Modality

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies; TorchScript traces no caches."""
        dynamo = next(row for row in EXPORTERS if row.name == "dynamo")
        for prompts in PROMPTS if exporter in ("auto", dynamo.name) else ():
            for attention in dynamo.attentions:
                yield ExportStrategy(dynamo, attention, prompts=prompts)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> tuple[ir.Model, ...]:
        """Trace one step of `generate`."""
        return (trace_with_cache(model, prompts=strategy.prompts, opset=opset),)

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Make the model generate from prompts of many lengths, alone and batched.

        With `lengths`, from prompts that end in these total numbers of tokens, in order.
        """
        run = partial(_run, model)
        if not lengths:
            text = text_of(self.modality)
            tokenizer, longest = (None, None) if text is None else (text.tokenizer, text.longest)
            return run_reference(run, list(_cases(model, tokenizer, longest)), name="PyTorch")
        generator, words = np.random.default_rng(0), _words(model)
        masks = [np.ones((1, length - NEW_TOKENS), np.int64) for length in lengths]
        cases = [
            _case(f"up to {length} tokens", generator.choice(words, mask.shape), mask)
            for length, mask in zip(lengths, masks, strict=True)
        ]
        return run_reference(run, cases, name="PyTorch", refusal=ExportError)

    def verify(self, path: ModelPath, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Make the file at `path` generate from the same prompts, using its own choices and cache, and compare.

        Prompts with padding are passed once as a whole and once in two pieces, the second on the cache of the first, as
        in a chat; the reference outputs for the whole prompt hold for both.

        Raises:
            VerificationError: logits differ by more than `tolerance` at any step, as they do after a different token.
        """
        session = open_session(path, provider="cpu")
        cases: list[Case] = []
        wanted: list[Mapping[str, NDArray[Any]]] = []
        for case, outputs in zip(reference.cases, reference.outputs, strict=True):
            generated = outputs[LOGITS][:, -NEW_TOKENS:].argmax(-1)
            variants = [replace(case, feeds={**case.feeds, GENERATED: generated}), *_in_pieces(case, generated)]
            cases += variants
            wanted += [outputs] * len(variants)

        def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            logits, _ = generate(session, feeds, tolerance=tolerance)
            return {LOGITS: logits[:, -(min(feeds[IDS].shape[1], _COMPARED_PROMPT) + NEW_TOKENS - 1) :]}

        verification = verify(run, replace(reference, cases=tuple(cases), outputs=tuple(wanted)), tolerance)
        require_passed(verification, "--no_verify keeps the file despite the error")
        return verification

    def inputs(self, _strategy: ExportStrategy, _cases: Sequence[Case] | None) -> tuple[DescribedInputs, ...]:
        """Describe ids and mask: the graph takes any number of tokens, after any number of tokens."""
        text = text_of(self.modality)
        return (({} if text is None else text.recipes, ()),)

    def links(self, path: Path) -> tuple[dict[str, str], ...]:
        """Return the graphs' metadata about each other: there is none."""
        return ({},)

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """Report slow prompts and missing inputs."""
        slow = (
            f"prompts run {strategy.prompts}: {architecture} carries states, and its prompts cannot be traced at once"
        )
        return (*((slow,) if strategy.prompts != PROMPTS[0] else ()), *left_out_notes(self.modality, architecture))


def _run(model: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Generate N tokens greedily: logits float32 [B, min(S, 64) + N - 1, V] for the prompt and each step."""
    import torch

    generated = generate_with_pytorch(model, feeds, WITHOUT_CACHE)
    inputs = to_tensors(model, feeds)
    length = feeds[IDS].shape[1]
    if takes_positions(model):
        inputs["position_ids"] = count_positions(inputs[MASK], length)
    with torch.inference_mode(), quiet():
        prompt = model(**inputs, use_cache=True).logits[:, max(0, length - _COMPARED_PROMPT) : -1]
    return {LOGITS: np.concatenate([prompt.float().cpu().numpy(), generated], axis=1)}


def _cases(model: Any, tokenizer: Any, limit: int | None) -> Iterator[Case]:
    longest = min(limit or _LONGEST, _LONGEST) - NEW_TOKENS
    if longest < 1:
        raise ExportError(
            f"{type(model).__name__} takes {limit} tokens, too few to generate {NEW_TOKENS}",
            "pass --no_verify to export it as it is",
        )
    config = model.config.get_text_config()
    windows = (getattr(config, name, None) for name in _WINDOWS)
    window = next((size for size in windows if isinstance(size, int) and 4 < size < longest - 3), None)
    generator = np.random.default_rng(0)
    words = _words(model)
    # The longest comes first: after a short text, BigBird switches to another computation for good.
    for description, lengths in _prompts(longest, window):
        mask = _left_padded([min(length, longest) for length in lengths])
        # Padding positions also hold words, so that an unapplied mask is detected.
        yield _case(description, generator.choice(words, mask.shape), mask)
    if tokenizer is not None:
        padded = tokenizer.pad_token is not None
        encoded = tokenizer(
            list(_TEXTS if padded else _TEXTS[:1]),
            padding=padded,
            padding_side="left",
            truncation=True,
            max_length=min(longest, 128),
            return_tensors="np",
        )
        ids = np.asarray(encoded[IDS], dtype=np.int64)
        mask = np.asarray(encoded.get(MASK, np.ones_like(ids)), dtype=np.int64)
        yield _case("real text", ids, mask)


def _words(model: Any) -> NDArray[np.int64]:
    """Return the ids of text tokens: ids for images or audio would need an image or audio."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")) and value is not None:
                special.update(value if isinstance(value, list) else [value])
    return np.array([token for token in range(embedding_rows(model)) if token not in special])


def generate_with_pytorch(model: Any, feeds: Mapping[str, NDArray[Any]], hint: str, **ids: int) -> NDArray[np.float32]:
    """Make a model generate N tokens greedily, and return the logits of each step: float32 [B, N, V].

    Args:
        model: a transformers model.
        feeds: the inputs of `generate`.
        hint: the hint for a model that cannot generate.
        ids: special tokens to use instead of the model's own, by their names in a generation config.

    Raises:
        ExportError: the model cannot generate from them.
    """
    import torch

    try:
        with torch.inference_mode(), quiet(), plain_generation(model, **ids):
            generated = model.generate(
                **to_tensors(model, feeds), max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True
            )
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError, KeyError) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise ExportError(
            f"{type(model).__name__} does not generate from {shapes}: {first_line(error)}", hint
        ) from error
    logits: NDArray[np.float32] = torch.stack(generated.logits, dim=1).float().cpu().numpy()
    return logits


def generate(
    session: Session,
    feeds: Mapping[str, NDArray[Any]],
    *,
    new_tokens: int = NEW_TOKENS,
    tolerance: Tolerance | None = None,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Generate greedily with an exported graph, feeding each step's cache to the next.

    Args:
        session: a graph from `trace_with_cache`.
        feeds: left-padded ids int64 [B, S] and their mask; optionally the number of prompt tokens per call (PIECES,
            summing to S), and tokens int64 [B, N] to take instead of others whose logit is the same within `tolerance`
            (GENERATED).
        new_tokens: N.
        tolerance: what counts as a tie.

    Returns:
        Logits float [B, S + N - 1, V] and the chosen tokens, int64 [B, N].
    """
    ids, mask, expected = feeds[IDS], feeds[MASK], feeds.get(GENERATED)
    cache = empty_cache(session, len(ids))
    logits: list[NDArray[Any]] = []
    chosen: list[NDArray[np.int64]] = []
    mask = np.concatenate([mask, np.ones((len(ids), new_tokens), dtype=np.int64)], axis=1)
    ends = np.cumsum(feeds.get(PIECES, [ids.shape[1]]))
    start = 0
    for end in (*ends, *(ends[-1] + np.arange(1, new_tokens))):
        tokens = ids[:, start:end] if start < ids.shape[1] else chosen[-1][:, None]
        outputs = session.run({IDS: tokens, MASK: mask[:, :end], **cache})
        logits.append(outputs[LOGITS])
        cache = {name: outputs[present_name(name)] for name in cache}
        if end >= ids.shape[1]:
            wanted = None if expected is None else expected[:, len(chosen)]
            chosen.append(choose(outputs[LOGITS][:, -1], wanted, tolerance))
        start = end
    return np.concatenate(logits, axis=1), np.stack(chosen, axis=1)


def empty_cache(session: Session, batch: int) -> dict[str, NDArray[Any]]:
    """Return the initial cache for `batch` prompts: empty keys and values, states of zeros.

    Keys and values of cross attention come from the encoder.
    """
    sizes = {BATCH: batch, PAST: 0}
    return {
        info.name: np.zeros([size if isinstance(size, int) else sizes[str(size)] for size in info.shape], info.dtype)
        for info in session.model.structure.inputs
        if info.name.startswith("past") and ".encoder." not in info.name
    }


def choose(logits: NDArray[Any], expected: NDArray[np.int64] | None, tolerance: Tolerance | None) -> NDArray[np.int64]:
    """Return the best token in each row of logits [B, V], or the expected one if it is equally good within tolerance.

    If two tokens are equal apart from rounding, either is right, and everything that follows depends on the choice.
    """
    best: NDArray[np.int64] = logits.argmax(-1)
    if expected is None or tolerance is None:
        return best
    rows = np.arange(len(logits))
    # Suppressed tokens, with -inf or a large negative number, must not make all others equally good.
    usual = np.abs(logits[informative(logits, logits)]).max(initial=0.0)
    slack = 2 * (tolerance.atol + tolerance.rtol * float(usual))
    return np.where(logits[rows, expected] >= logits[rows, best] - slack, expected, best)


def _prompts(longest: int, window: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"a long prompt, {longest} tokens", (longest,)
    yield "one prompt", (8,)
    yield "a prompt of one token", (1,)
    yield "several prompts of one token", (1, 1, 1)
    yield "several prompts", (16, 16, 16)
    yield "ragged, padded left", (23, 14, 1)
    # Each half, and everything generated, extends past 64 tokens.
    yield "ragged, four long rows", (5, 144, 61, 110)
    if window is not None:
        yield f"up to the window of {window}", (window - 4,)
        yield f"past the window of {window}", (window + 3, window - 2, 2)


def _in_pieces(case: Case, generated: NDArray[np.int64]) -> Iterator[Case]:
    """Yield a case with padding again, in two calls: the second adds several tokens to the first one's cache.

    For some rows, the first half consists only of padding.
    """
    length = case.feeds[MASK].shape[1]
    if length < 3 or case.feeds[MASK].all():
        return
    pieces = np.array([length // 2, length - length // 2])
    feeds = {**case.feeds, GENERATED: generated, PIECES: pieces}
    yield replace(case, description=f"{case.description}, in two pieces", feeds=feeds)


def _left_padded(lengths: list[int]) -> NDArray[np.int64]:
    longest = max(lengths)
    return (np.arange(longest)[None, :] >= longest - np.array(lengths)[:, None]).astype(np.int64)


def _case(description: str, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Case:
    steps = np.ones((len(mask), NEW_TOKENS - 1), dtype=np.int64)
    valid = np.concatenate([mask[:, -_COMPARED_PROMPT:], steps], axis=1).astype(bool)
    return Case(description, {IDS: ids, MASK: mask}, valid)
