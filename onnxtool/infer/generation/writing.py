"""Let a loaded model write: prompts in batches, a token of each text at a time, until each has come to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.text_files import TextInput, several
from onnxtool.errors import InputError, SessionError
from onnxtool.infer.chats import Chats
from onnxtool.infer.generation.encoders import LOGITS, find_encoder
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.generation.processors import Processor, TextBounds, choose, processors_for
from onnxtool.infer.generation.report import GenerationReport, WrittenText
from onnxtool.infer.generation.settings import GenerationSettings
from onnxtool.infer.generation.steps import DecoderSteps, EncoderDecoderSteps, Steps, cache_of
from onnxtool.infer.long_texts import CUT, LongTexts
from onnxtool.infer.options import LongText
from onnxtool.infer.text_model import TextModel
from onnxtool.model_file.metadata import MAX_DECODER_LENGTH_KEY
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.runtime.session import open_session

OnText = Callable[[int, str], None]
"""Is told the number of a text, counted from 0, and what was written after it since the last call."""

_REPLACEMENT = "\ufffd"  # a character of which not all bytes are written yet


@dataclass
class _Row:
    """A text and what is written after it.

    Attributes:
        number: of the text, counted from 0.
        start: the tokens of the decoder before the first that is written.
        most: how many tokens may be written.
        last_reason: why it ends where these are written.
        on_text: is told what is written.
        ids: what is written.
        reason: why it ended; empty while it goes on.
        shown: what was handed on of the text.
    """

    number: int
    start: tuple[int, ...]
    most: int
    last_reason: str
    rules: Sequence[Processor]
    generator: np.random.Generator | None
    on_text: OnText | None
    ids: list[int] = field(default_factory=list)
    reason: str = ""
    text: str = ""
    shown: str = ""


class Writer:
    """A model that writes, with what it needs for it.

    Attributes:
        settings: how it writes.
    """

    @checked
    def __init__(self, model: TextModel, options: GenerateOptions = GenerateOptions()) -> None:  # noqa: B008  frozen
        """Prepare `model`.

        Raises:
            InputError: it does not write, the checkpoint asks for what is not computed, or its encoder is not there.
        """
        if options.chat:
            model = replace(model, chats=Chats(ChatTemplate.for_answers(model.folder), model.tokenizer))
        self._model, self._options = model, options
        graph = model.session.model
        encoder = find_encoder(graph, options.encoder_path)
        self._has_encoder = encoder is not None
        cache_of(graph)
        width = next(info.shape[-1] for info in graph.structure.outputs if info.name == LOGITS)
        self.settings = GenerationSettings.of(model.folder, options, width if isinstance(width, int) else None)
        ends = self.settings.eos_token_id
        pad = self.settings.pad_token_id
        self._pad_id = pad if pad is not None and pad >= 0 else ends[0] if ends else 0
        self._steps: Steps
        self._start: tuple[int, ...]
        if encoder is not None:
            start = self.settings.decoder_start_token_id
            start = self.settings.bos_token_id if start is None else start
            if start is None or start < 0:
                raise model.folder.malformed("generation_config.json", "it has no decoder_start_token_id")
            first = open_session(encoder.path, provider=model.session.provider, threads=model.session.intra_threads)
            self._steps, self._start = EncoderDecoderSteps(model, first, start), (start,)
            self._longest = graph.metadata_number(MAX_DECODER_LENGTH_KEY)
        else:
            if options.encoder_path is not None:
                raise InputError(
                    f"--encoder_path was passed, and {graph.path} has no encoder", "leave --encoder_path out"
                )
            self._steps, self._start = DecoderSteps(model, self._pad_id), ()
            self._longest = None if model.limit is None else model.limit.tokens

    @checked
    def write(
        self,
        texts: str | TextInput | Iterable[str | TextInput],
        *,
        prompt: str | None = None,
        long: LongTexts | LongText = CUT,
        on_text: OnText | None = None,
        first: int = 0,
    ) -> GenerationReport:
        """Write after each of N texts, in their order.

        Args:
            texts: N texts, with or without an id; or one text.
            prompt: as in TextModel.tokenize.
            long: what becomes of a text that is longer than the model takes: `truncate` or `fail`.
            on_text: is told what is written while it is; texts then run one after the other.
            first: the number of the first text, counted from 0, where these are a part of all texts.

        Raises:
            InputError: there are no texts, or one leaves no room for an answer.
            SessionError: onnxruntime fails, or gives what is not a number.
        """
        inputs = [text if isinstance(text, TextInput) else TextInput(text) for text in several(texts)]
        if not inputs:
            raise InputError("no texts to run", "pass at least one --text, or --input with a file of them")
        if any(text.query is not None for text in inputs):
            raise InputError(
                f"{self._model.session.model.path} writes after texts, and takes no pairs of a query and a text",
                "write both into one text, as the model was trained on them",
            )
        long = LongTexts.of(long)
        if long.way == "window":
            raise InputError("a model that writes reads a text at once, in no windows", "pass --long truncate or fail")
        windows = self._model.windows([text.contents for text in inputs], prompt=prompt, long=long, first=first + 1)
        read = [group[0] for group in windows]
        for number, text in enumerate(read, start=first):
            self._require_room(number, text)
        rows: dict[int, _Row] = {}
        seconds = first_seconds = 0.0
        for batch in self._batches(read, one_by_one=on_text is not None):
            tell(f"writing after text {first + min(batch) + 1} of {first + len(read)}")
            together = [self._row(first + number, read[number], on_text) for number in batch]
            took, to_first = self._write_batch(together, [read[number] for number in batch])
            rows |= {row.number: row for row in together}
            seconds += took
            first_seconds = first_seconds or to_first
        report = self._report(
            inputs, read, [rows[first + number] for number in range(len(read))], seconds, first_seconds
        )
        before = self._model.prompts.find(prompt)
        return replace(report, notes=(f"{before!r} stands before each text", *report.notes)) if before else report

    def _batches(self, read: Sequence[EncodedText], *, one_by_one: bool) -> list[list[int]]:
        if one_by_one:
            return [[number] for number in range(len(read))]
        return list(self._model.batch_rules.batches([len(text) for text in read]))

    def _require_room(self, number: int, text: EncodedText) -> None:
        start = self._start or text.ids
        if not start:
            raise InputError(f"text {number + 1} has no tokens to write after", "pass a text with a word in it")
        bounds = (self._longest, self._max_length(len(start)))
        longest = min((size for size in bounds if size is not None), default=None)
        if longest is not None and len(start) >= longest:
            raise InputError(
                f"text {number + 1} has {len(start)} tokens, and text and answer may have {longest} together",
                "pass a shorter text"
                + ("" if self.settings.max_new_tokens is not None else ", or --max_new_tokens for as many after it"),
            )

    def _max_length(self, num_start: int) -> int | None:
        settings = self.settings
        return settings.max_length if settings.max_new_tokens is None else num_start + settings.max_new_tokens

    def _row(self, number: int, text: EncodedText, on_text: OnText | None) -> _Row:
        start = self._start or text.ids
        max_length = self._max_length(len(start))
        assert max_length is not None  # noqa: S101  settings have one of the two
        limit = max_length if self._longest is None else min(max_length, self._longest)
        bounds = TextBounds(len(start), max_length, text.ids if self._has_encoder else None)
        generator = np.random.default_rng([self._options.seed, number]) if self.settings.do_sample else None
        reason = "length" if limit == max_length else "limit"
        rules = processors_for(self.settings, bounds)
        return _Row(number, start, limit - len(start), reason, rules, generator, on_text)

    def _write_batch(self, rows: Sequence[_Row], texts: Sequence[EncodedText]) -> tuple[float, float]:
        """Write until each of `rows` has ended; return the seconds that took, and those to the first token."""
        began = time.perf_counter()
        scores = self._steps.start(self._filled(texts))
        first = time.perf_counter() - began
        while True:
            tokens = np.full(len(scores), self._pad_id, np.int64)
            for position, row in enumerate(rows):
                if not row.reason:
                    tokens[position] = self._add(row, scores[position])
            if all(row.reason for row in rows):
                return time.perf_counter() - began, first
            scores = self._steps.step(tokens)

    def _filled(self, texts: Sequence[EncodedText]) -> list[EncodedText]:
        """Repeat the last text for a graph of a fixed batch."""
        return [*texts, *[texts[-1]] * ((self._model.batch_rules.batch_size or 0) - len(texts))]

    def _add(self, row: _Row, scores: NDArray[np.float32]) -> int:
        """Choose the next token of a row, and see whether it ends it."""
        settings = self.settings
        if row.rules:
            so_far = np.array((*row.start, *row.ids), np.int64)
            for rule in row.rules:
                scores = rule(so_far, scores)
        if np.isnan(scores).any():
            raise SessionError(
                f"{self._model.session.model.path} gives scores that are not numbers, after {len(row.ids)} tokens",
                "onnxtool optimize --precision fp16 keeps what overflows in float32",
            )
        token = choose(scores, settings, row.generator)
        row.ids.append(token)
        if token in settings.eos_token_id:
            row.reason = "end"
        elif len(row.ids) >= row.most:
            row.reason = row.last_reason
        if settings.stop_strings or row.reason or row.on_text is not None:
            row.text = self._model.tokenizer.text(row.ids)
        found = [place for stop in settings.stop_strings if (place := row.text.find(stop)) >= 0]
        if found:
            row.reason, row.text = "stop", row.text[: min(found)]
        if row.on_text is not None:
            _show(row, row.on_text, settings.stop_strings)
        return token

    def _report(
        self,
        inputs: Sequence[TextInput],
        read: Sequence[EncodedText],
        rows: Sequence[_Row],
        seconds: float,
        first_seconds: float,
    ) -> GenerationReport:
        session, settings = self._model.session, self.settings
        num_generated = sum(len(row.ids) for row in rows)
        notes = []
        if cut := sum(text.truncated for text in read):
            limit = self._model.limit
            to = "" if limit is None else f" to {limit.tokens} tokens ({limit.source})"
            notes.append(f"{cut} of {len(read)} texts were cut{to}")
        if full := sum(row.reason == "limit" for row in rows):
            notes.append(f"{full} of {len(rows)} answers end where the model takes no more: {self._longest} tokens")
        return GenerationReport(
            model=str(session.model.path),
            provider=session.provider,
            task=self._model.task,
            kind="texts",
            decoding="sample" if settings.do_sample else "greedy",
            answers=tuple(
                WrittenText(
                    text=text.contents,
                    num_tokens=len(tokens),
                    truncated=tokens.truncated,
                    generated=row.text,
                    token_ids=tuple(row.ids),
                    finish_reason=row.reason,
                    id=text.id,
                )
                for text, tokens, row in zip(inputs, read, rows, strict=True)
            ),
            num_generated=num_generated,
            generation_ms=seconds * 1e3,
            first_token_ms=first_seconds * 1e3,
            throughput_tokens_per_s=num_generated / seconds if seconds else 0.0,
            notes=tuple(notes),
        )


def _show(row: _Row, on_text: OnText, stops: Sequence[str]) -> None:
    """Hand on what is certain: not half of a character, nor what may become the start of a stop."""
    text = row.text
    if not row.reason:
        text = text.rstrip(_REPLACEMENT)
        held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
        text = text[: len(text) - held]
    if text.startswith(row.shown) and len(text) > len(row.shown):
        on_text(row.number, text[len(row.shown) :])
        row.shown = text
