"""Generate text after prompts with a loaded model, in batches, through transformers' `generate`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.text_files import TextInput, several
from onnxtool.errors import InputError, first_line
from onnxtool.infer.chats import CUT, Chats, LongTexts
from onnxtool.infer.generation.graphs import find_encoder
from onnxtool.infer.loading import load
from onnxtool.infer.options import GenerateOptions, LongText
from onnxtool.infer.report import GenerationReport, WrittenText
from onnxtool.infer.text_model import TextModel
from onnxtool.model_file import ModelPath
from onnxtool.model_file.metadata import MAX_DECODER_LENGTH_KEY
from onnxtool.options import CheckpointName, StrPath, checked
from onnxtool.progress import tell
from onnxtool.reports import Json
from onnxtool.runtime.providers import Provider, Threads
from onnxtool.runtime.session import open_session
from onnxtool.runtime.signature import IDS, MASK

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from onnxtool.infer.generation.session_model import PromptRow

OnText = Callable[[int, str], None]
"""Receives the index of a text, from 0, and the text generated since the last call."""

_AS_THE_CHECKPOINT = GenerateOptions()
_DEFAULT_NEW_TOKENS = 20  # transformers' default
_REPLACEMENT = "\ufffd"  # an incomplete character
GENERATION_CONFIG = "generation_config.json"
# Checkpoint settings that sessions do not support, with their neutral values.
_REFUSED: Mapping[str, tuple[Json, ...]] = {
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "token_healing": (None, False),
}
# Bounds of numbers that determine the work: transformers slices a text once for each token of an n-gram.
_LONGEST = 2**31 - 1
_BOUNDS = {
    **dict.fromkeys(("max_length", "max_new_tokens"), (1, _LONGEST)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0, _LONGEST)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0, 10_000)),
    "num_beams": (1, 10_000),
}
# transformers' built-in decoding modes, with their names in reports.
_SEARCHES = {"greedy_search": "greedy", **{name: name for name in ("sample", "beam_search", "beam_sample")}}
# Options that override the settings of the same name.
_OVER = frozenset(GenerateOptions.__annotations__) - {"decoding", "stop", "chat", "seed"}
_FOR_SAMPLES = ("temperature", "top_p", "top_k", "seed")
# The session manages the cache, and only tokens are returned.
_FIXED = {
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "return_dict_in_generate": False,
}


class Writer:
    """A generative model with its settings.

    Attributes:
        settings: a transformers GenerationConfig.
    """

    @checked
    def __init__(self, model: TextModel, options: GenerateOptions = _AS_THE_CHECKPOINT) -> None:
        """Prepare `model`.

        Raises:
            InputError: it cannot generate, the checkpoint has unsupported settings, or its encoder is missing.
        """
        from onnxtool.infer.generation.session_model import SessionModel

        if options.chat:
            model = replace(model, chats=Chats(ChatTemplate.for_answers(model.folder), model.tokenizer))
        self._model, self._seed = model, options.seed
        graph = model.session.model
        encoder = find_encoder(graph)
        limit = None if model.limit is None else model.limit.tokens
        self._longest = limit if encoder is None else graph.metadata_number(MAX_DECODER_LENGTH_KEY)
        first = None
        if encoder is not None:
            first = open_session(encoder, provider=model.session.provider, threads=model.session.intra_threads)
        self._generator = SessionModel(model.session, first, self._longest)
        self._encoder = encoder
        with _followed(model.folder):
            self.settings, self._stops = _settings(model.folder, options)
            ends = self.settings.eos_token_id
            self._ends = frozenset(np.atleast_1d(np.asarray([] if ends is None else ends, np.int64)).tolist())
            if self.settings.pad_token_id is None or self.settings.pad_token_id < 0:
                self.settings.pad_token_id = min(self._ends, default=0)
            np.array(self.settings.pad_token_id).astype(np.int64, casting="safe")
        self._start: tuple[int, ...] = ()
        if encoder is not None:
            start = self.settings.decoder_start_token_id
            start = self.settings.bos_token_id if start is None else start
            if not isinstance(start, int) or start < 0:
                raise model.folder.malformed(GENERATION_CONFIG, "it has no decoder_start_token_id")
            self._start = (start,)

    @property
    def decoding(self) -> str:
        """The name of the decoding mode, `greedy`, `sample`, `beam_search` or `beam_sample`."""
        return _SEARCHES[self.settings.get_generation_mode().value]

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
        """Generate after each of N texts, in order.

        Args:
            texts: N texts, with or without an id; or one text.
            prompt: as in TextModel.tokenize.
            long: handling of texts longer than the model's limit: `truncate` or `fail`.
            on_text: receives text as it is generated; texts then run one at a time.
            first: the index of the first text, from 0, if these are a part of all texts.

        Raises:
            InputError: there are no texts, one leaves no room for an answer, or streaming is combined with beams.
            SessionError: onnxruntime fails, or returns NaN.
        """
        inputs = [text if isinstance(text, TextInput) else TextInput(text) for text in several(texts)]
        encoded = self._tokenize(inputs, prompt, LongTexts.of(long), first)
        if on_text is not None and self._num_beams > 1:
            raise InputError(
                f"{self._num_beams} beams are searched, and which of them is the answer shows at the end",
                "leave --stream out, or pass --num_beams 1",
            )
        written: dict[int, _WrittenTokens] = {}
        seconds = first_seconds = 0.0
        for batch in self._batches(encoded, one_by_one=on_text is not None):
            tell(f"writing after text {first + min(batch) + 1} of {first + len(encoded)}")
            began = time.perf_counter()
            answers, to_first = self._write_batch({first + number: encoded[number] for number in batch}, on_text)
            seconds += time.perf_counter() - began
            first_seconds = first_seconds or to_first
            written |= dict(zip(batch, answers, strict=True))
        report = self._report(inputs, encoded, [written[number] for number in range(len(encoded))])
        return replace(
            report,
            notes=(*self._model.prompt_notes(prompt), *report.notes),
            generation_ms=seconds * 1e3,
            first_token_ms=first_seconds * 1e3,
            throughput_tokens_per_s=report.num_generated / seconds if seconds else 0.0,
        )

    def _tokenize(
        self, inputs: Sequence[TextInput], prompt: str | None, long: LongTexts, first: int
    ) -> list[EncodedText]:
        if not inputs:
            raise InputError("no texts to run", "pass at least one --text, or --input with a file of them")
        if any(text.query is not None for text in inputs):
            raise InputError(
                f"{self._model.session.model.path} is a text-generation model; pairs of query and text do not apply",
                "write both into one text, as the model was trained on them",
            )
        if long.way == "window":
            raise InputError("a model that writes reads a text at once, in no windows", "pass --long truncate or fail")
        windows = self._model.windows([text.contents for text in inputs], prompt=prompt, long=long, first=first + 1)
        encoded = [group[0] for group in windows]
        for number, text in enumerate(encoded, start=first + 1):
            start = self._start or text.ids
            if not start:
                raise InputError(f"text {number} has no tokens to write after", "pass a text with a word in it")
            longest = self._limit_after(len(start))
            if len(start) >= longest:
                more = "more than " if text.truncated and not self._start else ""
                raise InputError(
                    f"text {number} has {more}{len(start)} tokens, and text and answer may have {longest} together",
                    "pass a shorter text"
                    + (
                        "" if self.settings.max_new_tokens is not None else ", or --max_new_tokens for as many after it"
                    ),
                )
        return encoded

    @property
    def _num_beams(self) -> int:
        return self.settings.num_beams or 1

    def _max_length(self, num_start: int) -> int:
        """Return the decoder's token limit by the settings."""
        more = self.settings.max_new_tokens
        return int(self.settings.max_length if more is None else num_start + more)

    def _limit_after(self, num_start: int) -> int:
        """Return the decoder's token limit by settings and model."""
        most = self._max_length(num_start)
        return most if self._longest is None else min(most, self._longest)

    def _batches(self, encoded: Sequence[EncodedText], *, one_by_one: bool) -> list[list[int]]:
        # Sampled beams share a generator, and answers must not depend on other texts.
        if one_by_one or self.decoding == "beam_sample":
            return [[number] for number in range(len(encoded))]
        rules, beams = self._model.batch_rules, self._num_beams
        rules = replace(rules, max_texts=max(1, rules.max_texts // beams), max_tokens=max(1, rules.max_tokens // beams))
        return list(rules.batches([len(text) for text in encoded]))

    def _write_batch(
        self, texts: Mapping[int, EncodedText], on_text: OnText | None
    ) -> tuple[list[_WrittenTokens], float]:
        """Generate until each text has its answer; return the answers, and the seconds to the first token."""
        from onnxtool.infer.generation.session_model import PromptBatch

        fixed = self._model.batch_rules.batch_size or 0
        if fixed and self._num_beams > 1:
            raise InputError(
                f"{self._model.session.model.path} takes {fixed} texts at once, and beams are as many texts each",
                "export it without a fixed batch, or pass --num_beams 1",
            )
        rows = [self._row(text, number) for number, text in texts.items()]
        filler = [list(texts.values())[-1]] * (fixed - len(texts))
        prompts = PromptBatch(rows + rows[-1:] * len(filler), self._arrays([*texts.values(), *filler]))
        show = None
        if on_text is not None:
            show = _Shown(self._model.tokenizer.text, self._stops, partial(on_text, next(iter(texts))))
        with _followed(self._model.folder):
            ids, seconds = self._generator.write(prompts, self.settings, None if show is None else show.add)
        answers = [self._written(row, own) for row, own in zip(rows, ids, strict=False)]
        if show is not None:
            show.show(answers[0].text)
        return answers, seconds

    def _row(self, text: EncodedText, number: int) -> PromptRow:
        from onnxtool.infer.generation.session_model import PromptRow

        start = len(self._start or text.ids)
        return PromptRow(
            text.ids,
            num_start=start,
            min_length=self.settings.min_length or 0,
            max_length=self._max_length(start),
            most=self._limit_after(start) - start,
            seed=int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]),
            stops=self._has_stop if self._stops else None,
        )

    def _arrays(self, texts: Sequence[EncodedText]) -> dict[str, NDArray[np.int64]]:
        """Pad texts as the encoder expects, or on the left."""
        if self._encoder is not None:
            length = next(info.shape[1] for info in self._encoder.structure.inputs if info.name == IDS)
            return self._model.tokenizer.pad(texts, length if isinstance(length, int) else None)
        longest = max(map(len, texts))
        ids = np.full((len(texts), longest), self.settings.pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, longest - len(text) :] = text.ids
            mask[row, longest - len(text) :] = 1
        return {IDS: ids, MASK: mask}

    def _has_stop(self, ids: Sequence[int]) -> bool:
        return self._before_stop(self._model.tokenizer.text(ids)) is not None

    def _before_stop(self, text: str) -> str | None:
        """Return the text before the first stop text; None without one."""
        place = _place_of_stop(text, self._stops)
        return None if place is None else text[:place]

    def _written(self, row: PromptRow, ids: Sequence[int]) -> _WrittenTokens:
        """Strip batch padding from an answer, and determine why it ended."""
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        ids = ids[: row.most if end is None else end + 1]
        if self._stops and self._has_stop(ids):
            ids = ids[: next(count for count in range(1, len(ids) + 1) if self._has_stop(ids[:count]))]
            return _WrittenTokens(tuple(ids), self._before_stop(self._model.tokenizer.text(ids)) or "", "stop")
        by_length = "length" if row.num_start + row.most == row.max_length else "limit"
        return _WrittenTokens(tuple(ids), self._model.tokenizer.text(ids), by_length if end is None else "end")

    def _report(
        self, inputs: Sequence[TextInput], encoded: Sequence[EncodedText], written: Sequence[_WrittenTokens]
    ) -> GenerationReport:
        session = self._model.session
        notes = list(session.notes)
        if cut := sum(text.truncated for text in encoded):
            limit = self._model.limit
            to = "" if limit is None else f" to {limit.tokens} tokens ({limit.source})"
            notes.append(f"{cut} of {len(encoded)} texts were cut{to}")
        if full := sum(answer.reason == "limit" for answer in written):
            notes.append(f"{full} of {len(written)} answers end where the model takes no more: {self._longest} tokens")
        return GenerationReport(
            model=str(session.model.path),
            provider=session.provider,
            task=self._model.task,
            kind="texts",
            decoding=self.decoding,
            answers=tuple(
                WrittenText(
                    text=text.contents,
                    num_tokens=len(tokens),
                    truncated=tokens.truncated,
                    generated=answer.text,
                    token_ids=answer.ids,
                    finish_reason=answer.reason,
                    id=text.id,
                )
                for text, tokens, answer in zip(inputs, encoded, written, strict=True)
            ),
            num_generated=sum(len(answer.ids) for answer in written),
            notes=tuple(notes),
        )


@dataclass(frozen=True)
class _WrittenTokens:
    """The generated text, and why it ended."""

    ids: tuple[int, ...]
    text: str
    reason: str


class _Shown:
    """Stream the settled part of an answer: no incomplete characters, and no possible start of a stop text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], on_text: Callable[[str], None]):
        self._decode, self._stops, self._on_text = decode, stops, on_text
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> None:
        """Receive the next token."""
        self._ids.append(token)
        text = self._decode(self._ids).rstrip(_REPLACEMENT)
        if _place_of_stop(text, self._stops) is None:
            held = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
            self.show(text[: len(text) - max(held, default=0)])

    def show(self, text: str) -> None:
        """Emit the part of `text`, the whole answer so far, that was not emitted yet."""
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._on_text(text[len(self._shown) :])
            self._shown = text


def _place_of_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def _settings(folder: CheckpointFolder, options: GenerateOptions) -> tuple[GenerationConfig, tuple[str, ...]]:
    """Return the generation settings of the checkpoint, overridden by the user, and the stop texts.

    Raises:
        InputError: the checkpoint's settings are not supported.
        TypeError, ValueError: transformers cannot read them; `_followed` converts these.
    """
    from transformers import GenerationConfig

    stored = folder.read_object(GENERATION_CONFIG)
    settings = (
        GenerationConfig.from_dict(stored)
        if stored
        else GenerationConfig.from_model_config(dict(folder.read_object("config.json")))
    )
    stops = settings.stop_strings or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    for key, usual in _REFUSED.items():
        if getattr(settings, key) not in usual:
            raise InputError(
                f"{GENERATION_CONFIG} in {folder.label} asks for {key} {getattr(settings, key)!r:.60}, which is not "
                "computed here",
                f"generate with transformers, or take {key} out of that file",
            )
    overrides = {name: getattr(options, name) for name in _OVER if getattr(options, name) is not None}
    if options.decoding is not None:
        overrides = {"num_beams": 1, **overrides, "do_sample": options.decoding == "sample"}
    for name, value in {**_FIXED, **overrides, "stop_strings": None}.items():
        setattr(settings, name, value)
    for key, (least, most) in _BOUNDS.items():
        value = getattr(settings, key)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise InputError(
                f"{GENERATION_CONFIG} in {folder.label} says {key} {value!r:.60}, which is not a number from {least} "
                f"to {most:,}",
                f"correct that file, or pass --{key}" if key in _OVER else "correct that file",
            )
    if (mode := settings.get_generation_mode().value) not in _SEARCHES:
        raise InputError(
            f"{GENERATION_CONFIG} in {folder.label} asks for {mode}, which is not computed here",
            "pass --decoding greedy for the best token each time, or --decoding sample",
        )
    unused = [f"--{name}" for name in _FOR_SAMPLES if getattr(options, name) not in (None, 0)]
    if unused and not settings.do_sample:
        raise InputError(
            f"{' and '.join(unused)} was passed, and {_SEARCHES[mode]} decoding draws no samples",
            "pass --decoding sample, or leave it out",
        )
    if settings.max_length is None and settings.max_new_tokens is None:
        settings.max_new_tokens = _DEFAULT_NEW_TOKENS
    stops = (*stops, *options.stop)
    if "" in stops:
        raise InputError(
            "one of the texts that end an answer is empty, and would end each after its first token",
            f"leave it out of --stop, or of stop_strings in {GENERATION_CONFIG}",
        )
    return settings, stops


@contextmanager
def _followed(folder: CheckpointFolder) -> Iterator[None]:
    """Convert transformers' errors on invalid settings, and its warnings about ignored ones.

    Its log messages and deprecation warnings are left out.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            warnings.filterwarnings("error", category=UserWarning, module="transformers")
            yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, UserWarning) as error:
        raise InputError(
            f"transformers cannot write as {GENERATION_CONFIG} in {folder.label}, or an option instead of it, says: "
            f"{first_line(error)}",
            "pass other settings as options, or correct that file",
        ) from error
    finally:
        logging.set_verbosity(verbosity)


@checked
def load_writer(
    model_path: ModelPath,
    *,
    options: GenerateOptions = _AS_THE_CHECKPOINT,
    model_name: CheckpointName = None,
    provider: Provider = "auto",
    threads: Threads = 0,
) -> Writer:
    """Load a decoder with a cache, or the decoder of an encoder-decoder, whose encoder is found next to it.

    Raises:
        OnnxtoolError: as for `onnxtool.infer.load`; or the model cannot generate, or has unsupported settings.
    """
    return Writer(load(model_path, model_name=model_name, provider=provider, threads=threads), options)


@checked
def generate(
    model_path: StrPath,
    texts: str | TextInput | Iterable[str | TextInput],
    *,
    options: GenerateOptions = _AS_THE_CHECKPOINT,
    model_name: CheckpointName = None,
    provider: Provider = "auto",
    threads: Threads = 0,
    on_text: OnText | None = None,
) -> GenerationReport:
    """Load the model at `model_path` and generate after `texts`; see `load_writer` and `Writer.write`.

    Raises:
        OnnxtoolError: the model cannot be loaded or cannot generate, or a text cannot be read.
    """
    writer = load_writer(model_path, options=options, model_name=model_name, provider=provider, threads=threads)
    return writer.write(texts, on_text=on_text)
