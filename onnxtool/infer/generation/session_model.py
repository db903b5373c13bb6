"""onnxruntime sessions as the model behind transformers' `generate`, which searches, samples and stops.

Shape letters: B texts, R rows (B times the number of beams), S tokens of the decoder so far, V vocabulary.

Of transformers' private methods, this overrides the ones that prepare state held by the session, and the one that makes
logits processors; tested with transformers 5.23.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from onnxtool.errors import SessionError
from onnxtool.infer.generation.graphs import ENCODER_MASK, empty_cache, past_name
from onnxtool.runtime.decoding import LOGITS, POSITIONS, cache_of
from onnxtool.runtime.running import Session
from onnxtool.runtime.signature import IDS, MASK


@dataclass(frozen=True)
class PromptRow:
    """The prompt and generation limits of one text.

    Attributes:
        ids: the tokens of the text.
        num_start: decoder tokens before the first generated one.
        min_length: the minimum number of decoder tokens before the end, by the settings.
        max_length: the maximum.
        most: the maximum number of generated tokens, also bounded by the model's limit.
        seed: random seed for sampling, independent of the rest of the batch.
        stops: whether the text generated so far ends with a stop text.
    """

    ids: tuple[int, ...]
    num_start: int
    min_length: int
    max_length: int
    most: int
    seed: int
    stops: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class PromptBatch:
    """A padded batch of texts: on the left for a decoder without encoder, otherwise as the encoder expects.

    Attributes:
        rows: B texts.
        arrays: int64 [B, tokens] by input name.
    """

    rows: Sequence[PromptRow]
    arrays: dict[str, NDArray[np.int64]]


class SessionCache:
    """Keys and values of a batch: each run reuses the previous run's outputs on the device, without a copy.

    Attributes:
        first_token_s: seconds to the first token's scores, including the encoder.
    """

    def __init__(self, decoder: Session, encoder: Session | None, prompts: PromptBatch, longest: int | None) -> None:
        """Run the encoder; `longest` is the decoder's token limit."""
        self._began, self.first_token_s = time.perf_counter(), 0.0
        self._decoder, self._longest, self.prompts = decoder, longest, prompts
        self._carried = cache_of(decoder.model)
        self._run = decoder.cached(self._carried)
        self._names = set(decoder.input_names)
        self._mask = prompts.arrays[MASK]
        self._states: dict[str, Any] = {}
        self._is_started = False
        self._has_encoder = encoder is not None
        if encoder is not None:
            feeds = {name: prompts.arrays[name] for name in encoder.input_names}
            states = encoder.step(encoder.cached({}), feeds)
            self._states = {past_name(name): value for name, value in states.items()}

    def get_seq_length(self) -> int:
        """Return the number of cached tokens, which `generate` asks for before the first run."""
        return 0

    def step(self, ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Run R rows of tokens, int64 [R, S] at first and then [R, 1]; return the scores after the last, [R, V]."""
        if not self._is_started:
            self._start(len(ids))
        feeds = {IDS: ids, MASK: self._mask, ENCODER_MASK: self._mask}
        if POSITIONS in self._names:  # in files of other tools
            positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)
            feeds[POSITIONS] = np.ascontiguousarray(positions[:, -ids.shape[1] :])
        outputs = self._decoder.step(self._run, {name: feeds[name] for name in feeds if name in self._names})
        self.first_token_s = self.first_token_s or time.perf_counter() - self._began
        if not self._has_encoder:
            # A row at the model's token limit has ended; the next position would be out of range.
            room = self._longest is None or self._mask.sum(axis=1, keepdims=True) < self._longest
            column = np.broadcast_to(np.asarray(room, np.int64), (len(ids), 1))
            self._mask = np.concatenate([self._mask, column], axis=1)
        scores: NDArray[np.floating] = outputs[LOGITS].numpy()[:, -1]
        return scores

    def reorder(self, places: NDArray[np.int64]) -> None:
        """Continue R rows from the rows at `places`, int64 [R], of the same text."""
        if (places != np.arange(len(places))).any():
            self._run.reorder(places)

    def _start(self, num_rows: int) -> None:
        """Start without decoder keys and values, and repeat a text's state for each of its beams."""
        repeats = num_rows // len(self._mask)
        self._run.keep(empty_cache(self._decoder.model, self._carried, num_rows))
        if repeats > 1:
            self._mask = self._mask.repeat(repeats, axis=0)
            self._states = {name: value.numpy().repeat(repeats, axis=0) for name, value in self._states.items()}
        self._run.keep(self._states)
        self._is_started = True


class SessionModel(GenerationMixin):  # type: ignore[misc]  # transformers has no types
    """A decoder, with or without an encoder, in the form `generate` expects."""

    main_input_name = "input_ids"
    base_model_prefix = ""
    input_modalities = ("text",)
    device, dtype = torch.device("cpu"), torch.float32
    _is_stateful = False

    def __init__(self, decoder: Session, encoder: Session | None, longest: int | None) -> None:
        """Wrap sessions; `longest` is the decoder's token limit."""
        cache_of(decoder.model)
        self._decoder, self._encoder, self._longest = decoder, encoder, longest
        self.config = PreTrainedConfig(is_encoder_decoder=encoder is not None)
        self.generation_config = GenerationConfig()

    def write(
        self, prompts: PromptBatch, settings: GenerationConfig, on_token: Callable[[int], None] | None = None
    ) -> tuple[list[list[int]], float]:
        """Generate after each text of a batch; return the padded tokens, and the seconds to the first.

        Args:
            prompts: B texts.
            settings: settings of the checkpoint and the user, with `pad_token_id`.
            on_token: receives each token of a batch of one text.

        Raises:
            InputError: transformers does not accept the settings.
            SessionError: onnxruntime fails, or returns NaN.
        """
        config = copy.copy(settings)
        # Each row has its own bounds, in its processors and its stopping criterion.
        config.max_length = config.min_length = None
        config.max_new_tokens = max(row.most for row in prompts.rows)
        cache = SessionCache(self._decoder, self._encoder, prompts, self._longest)
        start = 1 if self._encoder is not None else prompts.arrays[IDS].shape[1]
        criteria = StoppingCriteriaList([_RowEnds(prompts.rows, start)])
        with torch.random.fork_rng(devices=[]):  # of beam sampling, which has no generator of its own
            torch.manual_seed(prompts.rows[0].seed)
            written = self.generate(
                inputs=torch.from_numpy(prompts.arrays[IDS]),
                attention_mask=torch.from_numpy(prompts.arrays[MASK]),
                generation_config=config,
                past_key_values=cache,
                stopping_criteria=criteria,
                streamer=None if on_token is None else _Streamer(on_token),
                **({} if self._encoder is None else {"encoder_outputs": {}}),  # which the cache holds
            )
        return written[:, start:].tolist(), cache.first_token_s

    def can_generate(self) -> bool:
        """Whether the model can generate."""
        return True

    def is_remote_code(self) -> bool:
        """Whether this class came with a checkpoint."""
        return False

    def forward(self, input_ids: torch.Tensor, past_key_values: SessionCache) -> _Scores:
        """Run the decoder on tokens that are not in the cache yet."""
        scores = past_key_values.step(input_ids.numpy())
        if np.isnan(scores).any():
            raise SessionError(
                f"{self._decoder.model.path} gives scores that are not numbers",
                "onnxtool optimize --precision fp16 keeps what overflows in float32",
            )
        return _Scores(logits=torch.from_numpy(scores)[:, None])

    def __call__(self, *, return_dict: bool = True, **inputs: Any) -> _Scores:
        """Run `forward`."""
        return self.forward(**inputs)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        past_key_values: SessionCache | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_outputs: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the tokens that are not yet cached, and the cache, which holds the mask."""
        ids = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        return {"input_ids": ids.contiguous(), "past_key_values": past_key_values}

    def _prepare_cache_for_generation(self, *arguments: Any) -> None:
        """Keep the given cache."""

    def _update_model_kwargs_for_generation(
        self, outputs: _Scores, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return model_kwargs

    def _reorder_cache(self, cache: SessionCache, places: torch.Tensor) -> SessionCache:
        cache.reorder(places.numpy())
        return cache

    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        yield

    def _valid_auto_compile_criteria(self, *arguments: Any) -> bool:
        return False

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *, model_kwargs: dict[str, Any], device: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """Return the processors of each row, which see its text without batch padding."""
        prompts: PromptBatch = model_kwargs["past_key_values"].prompts
        lists = []
        for row in prompts.rows:
            config = copy.copy(generation_config)
            config.max_length, config.min_length = row.max_length, row.min_length
            lists.append(
                super()._get_logits_processor(
                    generation_config=config,
                    input_ids_seq_length=row.num_start,
                    encoder_input_ids=torch.tensor([row.ids]),
                    device=device,
                )
            )
            if config.do_sample and config.num_beams == 1:
                lists[-1].append(_Draw(row.seed))
        width = prompts.arrays[IDS].shape[1]
        pads = [0 if self._encoder is not None else width - len(row.ids) for row in prompts.rows]
        return LogitsProcessorList([_EachText(lists, pads)] if any(lists) else [])


class _Scores(dict[str, torch.Tensor]):
    """The scores of a run, in the form `generate` expects."""

    @property
    def logits(self) -> torch.Tensor:
        """Float [R, 1, V]."""
        return self["logits"]


class _EachText(LogitsProcessor):  # type: ignore[misc]
    """Processors of each text, applied to its rows independently of the batch."""

    def __init__(self, lists: Sequence[LogitsProcessorList], pads: Sequence[int]) -> None:
        self._lists, self._pads = lists, pads

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process int64 [R, S] and scores [R, V]; rows of one text are adjacent."""
        beams = len(scores) // len(self._lists)
        parts = list(scores.split(beams))
        for place, (processors, pad) in enumerate(zip(self._lists, self._pads, strict=True)):
            ids = input_ids[place * beams : (place + 1) * beams, pad:]
            for processor in processors:  # a LogitsProcessorList inspects signatures on every call
                parts[place] = processor(ids, parts[place])
        return torch.cat(parts)


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Sample a token with the text's own generator, and exclude all others."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [1, V] that are minus infinity for all tokens but one."""
        drawn = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class _RowEnds(StoppingCriteria):  # type: ignore[misc]
    """End each answer at its own limit, or at a stop text."""

    def __init__(self, rows: Sequence[PromptRow], start: int) -> None:
        self._rows, self._start = rows, start
        self._most = torch.tensor([row.most for row in rows])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Check int64 [candidates, S], grouped by text; return bool [candidates]."""
        count = len(input_ids) // len(self._rows)
        ends = self._most.repeat_interleave(count) <= input_ids.shape[1] - self._start
        if self._rows[0].stops is not None:
            ends |= torch.tensor([self._rows[0].stops(ids) for ids in input_ids[:, self._start :].tolist()])
        return ends


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Stream the tokens of the first row, without its prompt."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._is_prompt = on_token, True

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompts, and then one token per row."""
        if not self._is_prompt:
            self._on_token(int(value[0]))
        self._is_prompt = False

    def end(self) -> None:
        """Ignore the end, which shows in the return value."""
