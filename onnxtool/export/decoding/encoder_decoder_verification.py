"""Verify the two graphs of an encoder-decoder: what they write, token by token, against what `generate` does.

Letters of shapes: B batch, T tokens of the encoder, K tokens of a prompt of the decoder, N generated tokens,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import ExportError
from onnxtool.export.decoding.encoder_decoder import ENCODER_MASK, WITHOUT_CACHE, EncoderDecoder
from onnxtool.export.decoding.step import IDS, LOGITS, MASK, PAST, present_name
from onnxtool.export.decoding.verification import GENERATED, NEW_TOKENS, choose
from onnxtool.export.modalities.sizes import BATCH, SEQUENCE, Modality, Sizes, text_case
from onnxtool.export.signature import to_tensors
from onnxtool.runtime.comparison import Case, ReferenceOutputs, Tolerance, require_passed, run_reference, verify
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.session import Session, open_session
from onnxtool.verification import Verification

PROMPT = "decoder_input_ids"

# K of one case after the other. The longest is past the distances that T5 tells apart, of which it has 32 kinds.
_LENGTHS = (1, 5, 1, 70, 2)


@dataclass(frozen=True)
class EncoderDecoderReference:
    """The PyTorch model that the two graphs have to agree with.

    Attributes:
        modality: what the encoder takes.
        longest: the most tokens that the decoder takes; None for no limit.
        vocabulary_size: how many ids the decoder knows.
    """

    parts: EncoderDecoder
    modality: Modality
    longest: int | None
    vocabulary_size: int

    def reference_outputs(self, fixed: Sizes, lengths: Sequence[int] = ()) -> ReferenceOutputs:
        """Let the model generate from texts of many lengths, alone and together; with `lengths` from such texts."""
        if lengths:
            start = np.array([[self.parts.start_id]])
            texts = [text_case(self.modality, fixed, length) for length in lengths]
            cases = [replace(text, feeds={**text.feeds, PROMPT: start}) for text in texts]
            return run_reference(self.run, cases, name="PyTorch", refusal=ExportError, sequences=frozenset())
        # All that a row says depends on all of its text, and none of it is padding.
        return run_reference(self.run, list(self._cases(fixed)), name="PyTorch", sequences=frozenset())

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Generate N tokens greedily after a prompt: logits float32 [B, N, V]."""
        import torch
        from transformers import GenerationConfig

        model = self.parts.model
        config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            use_cache=True,
            decoder_start_token_id=self.parts.start_id,
            pad_token_id=0,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        before, model.generation_config = model.generation_config, config
        try:
            with torch.inference_mode(), quiet():
                generated = model.generate(**to_tensors(model, feeds))
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError, KeyError) as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            raise ExportError(
                f"{type(model).__name__} does not generate from {shapes}: {(str(error).splitlines() or [''])[0]}",
                WITHOUT_CACHE,
            ) from error
        finally:
            model.generation_config = before
        return {LOGITS: torch.stack(generated.logits, dim=1).float().cpu().numpy()}

    def _cases(self, fixed: Sizes) -> Iterator[Case]:
        longest = min(self.longest or max(_LENGTHS) + NEW_TOKENS, max(_LENGTHS) + NEW_TOKENS) - NEW_TOKENS
        if longest < 1:
            raise ExportError(
                f"the decoder of {type(self.parts.model).__name__} takes {self.longest} tokens, too few to generate "
                f"{NEW_TOKENS}",
                "pass --no_verify to export it as it is",
            )
        lengths = tuple(min(length, longest) for length in _LENGTHS) if self.parts.in_parallel else (1,)
        numbers: dict[str, int] = {}
        for number, case in enumerate(self.modality.cases(fixed)):
            number = numbers[case.description] = numbers.get(case.like, number)  # padding apart, the same prompt
            length = lengths[number % len(lengths)]
            batch = len(next(iter(case.feeds.values())))
            prompt = np.random.default_rng(number).integers(0, self.vocabulary_size, (batch, length))
            prompt[:, 0] = self.parts.start_id
            yield replace(case, feeds={**case.feeds, PROMPT: prompt})
        if self.parts.in_parallel and self.longest is not None and self.longest - NEW_TOKENS > max(lengths):
            prompt = np.random.default_rng(0).integers(0, self.vocabulary_size, (1, self.longest - NEW_TOKENS))
            prompt[:, 0] = self.parts.start_id
            text = text_case(self.modality, fixed, fixed.get(SEQUENCE, 8))
            yield replace(
                text, description=f"a long answer, {self.longest} tokens", feeds={**text.feeds, PROMPT: prompt}
            )


def verify_encoder_decoder(
    encoder: Path, decoder: Path, reference: ReferenceOutputs, tolerance: Tolerance
) -> Verification:
    """Let the files generate from the same texts, from their own choices and their own cache, and compare.

    Prompts of the decoder are given as a whole and, where they are long, in two pieces.

    Raises:
        VerificationError: logits differ by more than `tolerance` at any step, which they do after another token.
    """
    first, step = (open_session(path, provider="cpu") for path in (encoder, decoder))
    cases: list[Case] = []
    wanted: list[Mapping[str, NDArray[Any]]] = []
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        cases.append(replace(case, feeds={**case.feeds, GENERATED: outputs[LOGITS].argmax(-1)}))
        wanted.append(outputs)

    def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {LOGITS: generate_from_text(first, step, feeds, tolerance)}

    verification = verify(run, replace(reference, cases=tuple(cases), outputs=tuple(wanted)), tolerance)
    require_passed(verification, "--no_verify keeps the files, wrong as they are")
    return verification


def generate_from_text(
    encoder: Session, decoder: Session, feeds: Mapping[str, NDArray[Any]], tolerance: Tolerance
) -> NDArray[Any]:
    """Generate greedily with two exported graphs, the cache of each step fed to the next.

    Args:
        encoder: a graph of `trace_encoder_decoder`.
        decoder: the other one.
        feeds: the encoder's inputs, a prompt for the decoder int64 [B, K], and the tokens to take in place of others
            whose logit is the same within `tolerance`, int64 [B, N].
        tolerance: what counts as a tie.

    Returns:
        Logits float [B, N, V].
    """
    prompt, expected = feeds[PROMPT], feeds[GENERATED]
    states = encoder.run({name: feeds[name] for name in encoder.input_names})
    cross = {name: states[present_name(name)] for name in decoder.input_names if present_name(name) in states}
    cache = empty_self_attention(decoder, len(prompt))
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


def empty_self_attention(decoder: Session, batch: int) -> dict[str, NDArray[Any]]:
    """Return the keys and values of no token, for `batch` rows."""
    sizes = {BATCH: batch, PAST: 0}
    return {
        info.name: np.zeros([size if isinstance(size, int) else sizes[str(size)] for size in info.shape], info.dtype)
        for info in decoder.model.structure.inputs
        if ".decoder." in info.name
    }


def _pieces(prompt: NDArray[np.int64], decoder: Session) -> list[NDArray[np.int64]]:
    """Cut a prompt into what each call takes: all of a short one, a long one in two, or a token at a time."""
    ids = next(info for info in decoder.model.structure.inputs if info.name == IDS)
    length = prompt.shape[1]
    size = 1 if ids.shape[1] == 1 else length if length < 4 else -(-length // 2)
    return [prompt[:, start : start + size] for start in range(0, length, size)]
