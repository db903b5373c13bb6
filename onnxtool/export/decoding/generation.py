"""Export a decoder with its cache, and verify what the file generates, token by token, against `generate`.

Letters of shapes: B batch, S tokens of a prompt, N generated tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.errors import ExportError
from onnxtool.export.decoding.step import (
    IDS,
    LOGITS,
    MASK,
    PAST,
    WITHOUT_CACHE,
    count_positions,
    embedding_rows,
    plain_generation,
    present_name,
    takes_positions,
)
from onnxtool.export.decoding.tracing import PROMPTS, trace_with_cache
from onnxtool.export.modalities.finding import left_out_notes, text_of
from onnxtool.export.modalities.modality import BATCH, DescribedInputs, Modality
from onnxtool.export.signature import to_tensors
from onnxtool.export.tracing import EXPORTERS, ExportStrategy
from onnxtool.runtime.comparison import Case, ReferenceOutputs, Tolerance, require_passed, run_reference, verify
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.session import Session, open_session
from onnxtool.verification import Verification

# One from the prompt, eight from the cache.
NEW_TOKENS = 9
# What `generate` chose, by which the candidate breaks its ties; see `choose`.
GENERATED = "generated"
# How many tokens of the prompt each call takes, where it is more than one call.
PIECES = "pieces"

# Logits of a long prompt would fill the memory; those of its end depend on all of it.
_COMPARED_PROMPT = 64
_LONGEST = 1024
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size", "window_size")
_TEXTS = ("what is AI?", "The capital of France is", "Once upon a time, in 1999, there was a naïve café")


@dataclass(frozen=True)
class GenerationPipeline:
    """A decoder with its cache as inputs and outputs: one graph for prompts and for the tokens after them.

    Attributes:
        modality: what goes into the model; of it the file takes the text.
    """

    steps: ClassVar[int] = NEW_TOKENS
    signature: ClassVar[None] = None  # the tracer finds it

    modality: Modality

    def strategies(self, exporter: str, *, verified: bool) -> Iterator[ExportStrategy]:
        """List the strategies; TorchScript traces no caches."""
        dynamo = next(row for row in EXPORTERS if row.name == "dynamo")
        for prompts in PROMPTS if exporter in ("auto", dynamo.name) else ():
            for attention in dynamo.attentions:
                yield ExportStrategy(dynamo, attention, prompts=prompts)

    def trace(self, model: Any, strategy: ExportStrategy, opset: int | None) -> tuple[ir.Model, ...]:
        """Trace the step that `generate` takes."""
        return (trace_with_cache(model, prompts=strategy.prompts, opset=opset),)

    def reference_outputs(self, model: Any, strategy: ExportStrategy, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Let the model generate; with `lengths` up to so many tokens."""
        text = text_of(self.modality)
        tokenizer, longest = (None, None) if text is None else (text.tokenizer, text.longest)
        return GenerationReference(model, tokenizer, longest).reference_outputs(lengths)

    def verify(self, path: Path, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
        """Let the file generate, token by token."""
        return verify_generation(path, reference, tolerance)

    def inputs(self, _strategy: ExportStrategy, _cases: Sequence[Case] | None) -> tuple[DescribedInputs, ...]:
        """Describe ids and mask: any number of tokens goes into the graph, after any number of tokens."""
        text = text_of(self.modality)
        return (({} if text is None else text.kinds, ()),)

    def links(self, path: Path) -> tuple[dict[str, str], ...]:
        """Return what each graph says of the others: there are none."""
        return ({},)

    def notes(self, architecture: str, strategy: ExportStrategy) -> tuple[str, ...]:
        """Say where prompts are slow, and which inputs are not there."""
        slow = (
            f"prompts run {strategy.prompts}: {architecture} carries states, and its prompts cannot be traced at once"
        )
        return (*((slow,) if strategy.prompts != PROMPTS[0] else ()), *left_out_notes(self.modality, architecture))


@dataclass(frozen=True)
class GenerationReference:
    """The PyTorch model that a graph with a cache has to agree with.

    Attributes:
        tokenizer: for a prompt of real text; None for a model that has none.
        longest: the most tokens that prompt and generated text may have together; None for no limit.
    """

    model: Any
    tokenizer: Any
    longest: int | None

    def reference_outputs(self, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Let the model generate from prompts of many lengths, alone and together.

        With `lengths` it is from prompts after which there are so many tokens, in their order.
        """
        if not lengths:
            return run_reference(self.run, list(self._cases()), name="PyTorch")
        generator, words = np.random.default_rng(0), self._words()
        masks = [np.ones((1, length - NEW_TOKENS), np.int64) for length in lengths]
        cases = [
            _case(f"up to {length} tokens", generator.choice(words, mask.shape), mask)
            for length, mask in zip(lengths, masks, strict=True)
        ]
        return run_reference(self.run, cases, name="PyTorch", refusal=ExportError)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Generate N tokens greedily: logits float32 [B, min(S, 64) + N - 1, V] of the prompt and each step."""
        import torch

        generated = generate_with_pytorch(self.model, feeds, WITHOUT_CACHE)
        inputs = to_tensors(self.model, feeds)
        length = feeds[IDS].shape[1]
        if takes_positions(self.model):
            inputs["position_ids"] = count_positions(inputs[MASK], length)
        with torch.inference_mode(), quiet():
            prompt = self.model(**inputs, use_cache=True).logits[:, max(0, length - _COMPARED_PROMPT) : -1]
        return {LOGITS: np.concatenate([prompt.float().cpu().numpy(), generated], axis=1)}

    def _cases(self) -> Iterator[Case]:
        longest = min(self.longest or _LONGEST, _LONGEST) - NEW_TOKENS
        if longest < 1:
            raise ExportError(
                f"{type(self.model).__name__} takes {self.longest} tokens, too few to generate {NEW_TOKENS}",
                "pass --no_verify to export it as it is",
            )
        config = self.model.config.get_text_config()
        windows = (getattr(config, name, None) for name in _WINDOWS)
        window = next((size for size in windows if isinstance(size, int) and 4 < size < longest - 3), None)
        generator = np.random.default_rng(0)
        words = self._words()
        # The longest comes first: BigBird takes a short text as the reason to compute otherwise from then on.
        for description, lengths in _prompts(longest, window):
            mask = _left_padded([min(length, longest) for length in lengths])
            # Under the padding are words as well, so that a mask which is not applied shows.
            yield _case(description, generator.choice(words, mask.shape), mask)
        if self.tokenizer is not None:
            padded = self.tokenizer.pad_token is not None
            encoded = self.tokenizer(
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

    def _words(self) -> NDArray[np.int64]:
        """Return the ids of text: an id of a picture or a sound would need a picture or a sound."""
        special: set[int] = set()
        for config in (self.model.config, self.model.config.get_text_config()):
            for name, value in config.to_dict().items():
                if name.endswith(("_token_id", "_token_index")) and value is not None:
                    special.update(value if isinstance(value, list) else [value])
        return np.array([token for token in range(embedding_rows(self.model)) if token not in special])


def generate_with_pytorch(model: Any, feeds: Mapping[str, NDArray[Any]], hint: str, **ids: int) -> NDArray[np.float32]:
    """Let a model generate N tokens greedily, and return the logits of each step: float32 [B, N, V].

    Args:
        model: of transformers.
        feeds: what `generate` takes.
        hint: the way out for a model that does not generate.
        ids: special tokens instead of the model's own, by their names in a generation config.

    Raises:
        ExportError: the model does not generate from them.
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
            f"{type(model).__name__} does not generate from {shapes}: {(str(error).splitlines() or [''])[0]}", hint
        ) from error
    logits: NDArray[np.float32] = torch.stack(generated.logits, dim=1).float().cpu().numpy()
    return logits


def verify_generation(path: Path, reference: ReferenceOutputs, tolerance: Tolerance) -> Verification:
    """Let the file at `path` generate from the same prompts, from its own choices and its own cache, and compare.

    Prompts with padding are given once as a whole and once in two pieces, the second onto the cache of the first, as
    a chat goes on; the reference outputs of the whole prompt hold for both.

    Raises:
        VerificationError: logits differ by more than `tolerance` at any step, which they do after another token.
    """
    session = open_session(path, provider="cpu")
    cases: list[Case] = []
    wanted: list[Mapping[str, NDArray[Any]]] = []
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        generated = outputs[LOGITS][:, -NEW_TOKENS:].argmax(-1)
        given = [replace(case, feeds={**case.feeds, GENERATED: generated}), *_in_pieces(case, generated)]
        cases += given
        wanted += [outputs] * len(given)

    def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        logits, _ = generate(session, feeds, tolerance=tolerance)
        return {LOGITS: logits[:, -(min(feeds[IDS].shape[1], _COMPARED_PROMPT) + NEW_TOKENS - 1) :]}

    verification = verify(run, replace(reference, cases=tuple(cases), outputs=tuple(wanted)), tolerance)
    require_passed(verification, "--no_verify keeps the file, wrong as it is")
    return verification


def generate(
    session: Session,
    feeds: Mapping[str, NDArray[Any]],
    *,
    new_tokens: int = NEW_TOKENS,
    tolerance: Tolerance | None = None,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Generate greedily with an exported graph, the cache of each step fed to the next.

    Args:
        session: a graph of `trace_with_cache`.
        feeds: ids int64 [B, S], padded on the left, and their mask; optionally how many tokens of the prompt each call
            takes (PIECES, S together), and tokens int64 [B, N] to take instead of others whose logit is the same
            within `tolerance` (GENERATED).
        new_tokens: N.
        tolerance: what counts as a tie.

    Returns:
        Logits float [B, S + N - 1, V] and the tokens chosen, int64 [B, N].
    """
    ids, mask, expected = feeds[IDS], feeds[MASK], feeds.get(GENERATED)
    cache = empty_cache(session, len(ids))
    logits: list[NDArray[Any]] = []
    chosen: list[NDArray[np.int64]] = []
    mask = np.concatenate([mask, np.ones((len(ids), new_tokens), dtype=np.int64)], axis=1)
    ends = np.cumsum(feeds.get(PIECES, [ids.shape[1]]))
    start = 0
    for end in (*ends, *(ends[-1] + np.arange(1, new_tokens))):
        given = ids[:, start:end] if start < ids.shape[1] else chosen[-1][:, None]
        outputs = session.run({IDS: given, MASK: mask[:, :end], **cache})
        logits.append(outputs[LOGITS])
        cache = {name: outputs[present_name(name)] for name in cache}
        if end >= ids.shape[1]:
            wanted = None if expected is None else expected[:, len(chosen)]
            chosen.append(choose(outputs[LOGITS][:, -1], wanted, tolerance))
        start = end
    return np.concatenate(logits, axis=1), np.stack(chosen, axis=1)


def empty_cache(session: Session, batch: int) -> dict[str, NDArray[Any]]:
    """Return the cache to start `batch` prompts with: keys and values of no token, states of zeros.

    Keys and values of cross attention are the encoder's to give.
    """
    sizes = {BATCH: batch, PAST: 0}
    return {
        info.name: np.zeros([size if isinstance(size, int) else sizes[str(size)] for size in info.shape], info.dtype)
        for info in session.model.structure.inputs
        if info.name.startswith("past") and ".encoder." not in info.name
    }


def choose(logits: NDArray[Any], expected: NDArray[np.int64] | None, tolerance: Tolerance | None) -> NDArray[np.int64]:
    """Return the best token of each row of logits [B, V]; the expected one where it is as good within the tolerance.

    Of two tokens that are equal but for rounding, either is right, and all that follows depends on which.
    """
    best: NDArray[np.int64] = logits.argmax(-1)
    if expected is None or tolerance is None:
        return best
    rows = np.arange(len(logits))
    slack = 2 * (tolerance.atol + tolerance.rtol * float(np.abs(logits).max()))
    return np.where(logits[rows, expected] >= logits[rows, best] - slack, expected, best)


def _prompts(longest: int, window: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"a long prompt, {longest} tokens", (longest,)
    yield "one prompt", (8,)
    yield "a prompt of one token", (1,)
    yield "several prompts of one token", (1, 1, 1)
    yield "several prompts", (16, 16, 16)
    yield "ragged, padded left", (23, 14, 1)
    # Each half, and all that is generated, past 64 tokens.
    yield "ragged, four long rows", (5, 144, 61, 110)
    if window is not None:
        yield f"up to the window of {window}", (window - 4,)
        yield f"past the window of {window}", (window + 3, window - 2, 2)


def _in_pieces(case: Case, generated: NDArray[np.int64]) -> Iterator[Case]:
    """Yield a case with padding once more, in two calls: onto the cache of the first, several tokens at once.

    For some rows the first half is nothing but padding.
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
