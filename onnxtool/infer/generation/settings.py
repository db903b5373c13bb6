"""What generation_config.json says of how a model writes, each value checked, and what is not followed refused by name.

The keys and their defaults are those of transformers 5.23 (GenerationConfig); a checkpoint without the file has them in
config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.sentence_modules import is_number
from onnxtool.errors import InputError
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.reports import Json

GENERATION_CONFIG = "generation_config.json"
_DEFAULT_NEW_TOKENS = 20
_MAX_LENGTH = 10**6
_MAX_NGRAM = 10**4

Ids = tuple[int, ...]


@dataclass(frozen=True)
class GenerationSettings:
    """How a model writes.

    Attributes:
        eos_token_id: the tokens that end a text.
        decoder_start_token_id: what every text of a decoder with an encoder begins with; None where nothing says it.
        max_length: the most tokens of prompt and answer together; None for no such bound.
        max_new_tokens: the most tokens of an answer; None where `max_length` bounds it.
        top_k: 0 for all tokens.
        sequence_bias: what is added to the score of the last token of a sequence where the others stand before it.

    All others are as transformers describes them.
    """

    eos_token_id: Ids = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int = 0
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[Ids, ...] = ()
    sequence_bias: tuple[tuple[Ids, float], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: Ids = ()
    suppress_tokens: Ids = ()
    begin_suppress_tokens: Ids = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: CheckpointFolder, options: GenerateOptions, vocabulary_size: int | None) -> GenerationSettings:
        """Read the settings of the checkpoint in `folder`, and put those of `options` above them.

        Args:
            folder: the checkpoint's small files.
            options: what a user asks for.
            vocabulary_size: how many tokens the model gives scores for; None where that does not show.

        Raises:
            InputError: a value is not what it should be, or the checkpoint asks for what is not computed here.
        """
        name, given = _given(folder)
        _refuse_others(folder, name, given, options)
        read: dict[str, Any] = {}
        for key, reader in _READERS.items():
            value = given.get(key)
            if value is not None:
                try:
                    read[key] = reader(value)
                except _UnexpectedError as error:
                    raise folder.malformed(name, f"{key} is {_short(value)}, and not {error}") from None
        settings = cls(**read)
        _require_known_ids(settings, folder, name, vocabulary_size)
        if settings.max_length is None and settings.max_new_tokens is None:
            settings = replace(settings, max_new_tokens=_DEFAULT_NEW_TOKENS)
        return settings.with_options(options)

    def with_options(self, options: GenerateOptions) -> GenerationSettings:
        """Return these settings with those of a user in their place."""
        names = {field.name for field in fields(self)} & {field.name for field in fields(options)}
        asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        if options.decoding is not None:
            asked["do_sample"] = options.decoding == "sample"
        return replace(self, **asked, stop_strings=(*self.stop_strings, *options.stop))


_IDS = (
    *("eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
)


class _UnexpectedError(Exception):
    """A value is not what its key takes; the message says what that is."""


def _number(low: float, high: float, *, is_open: bool = False) -> Callable[[Json], float]:
    def read(value: Json) -> float:
        if not is_number(value) or not low <= value <= high or (is_open and value == low):
            bound = f"above {low:g}" if is_open else f"from {low:g}"
            raise _UnexpectedError(f"a number {bound}" + ("" if high == math.inf else f" to {high:g}"))
        return float(value)

    return read


def _integer(low: int, high: int) -> Callable[[Json], int]:
    def read(value: Json) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _UnexpectedError(f"a whole number from {low} to {high}")
        return value

    return read


def _flag(value: Json) -> bool:
    if not isinstance(value, bool):
        raise _UnexpectedError("true or false")
    return value


def _token(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _UnexpectedError("the id of a token")
    return value


def _tokens(value: Json) -> Ids:
    if isinstance(value, list):
        return tuple(_token(item) for item in value)
    return (_token(value),)


def _sequences(value: Json) -> tuple[Ids, ...]:
    if not isinstance(value, list) or not all(isinstance(item, list) and item for item in value):
        raise _UnexpectedError("a list of lists of ids")
    return tuple(_tokens(item) for item in value)


def _biases(value: Json) -> tuple[tuple[Ids, float], ...]:
    pairs = value if isinstance(value, list) else []
    if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise _UnexpectedError("a list of pairs of ids and a number")
    number = _number(-math.inf, math.inf)
    return tuple((_sequences([pair[0]])[0], number(pair[1])) for pair in pairs if isinstance(pair, list))


def _decay(value: Json) -> tuple[int, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise _UnexpectedError("a start and a factor")
    return _integer(0, _MAX_LENGTH)(value[0]), _number(0, math.inf, is_open=True)(value[1])


def _strings(value: Json) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _UnexpectedError("a text or a list of texts")
    return tuple(str(text) for text in texts)


_COUNT, _NGRAM = _integer(0, _MAX_LENGTH), _integer(0, _MAX_NGRAM)
_PART = _number(0, 1)
_READERS: dict[str, Callable[[Json], Any]] = {
    "eos_token_id": _tokens,
    "pad_token_id": _integer(-1, 2**31),
    "bos_token_id": _integer(-1, 2**31),
    "decoder_start_token_id": _token,
    "max_length": _integer(1, _MAX_LENGTH),
    "max_new_tokens": _integer(1, _MAX_LENGTH),
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "do_sample": _flag,
    "temperature": _number(0, math.inf),
    "top_k": _integer(0, 2**31),
    "top_p": _PART,
    "min_p": _PART,
    "typical_p": _number(0, 1, is_open=True),
    "epsilon_cutoff": _PART,
    "eta_cutoff": _PART,
    "repetition_penalty": _number(0, math.inf, is_open=True),
    "encoder_repetition_penalty": _number(0, math.inf, is_open=True),
    "no_repeat_ngram_size": _NGRAM,
    "encoder_no_repeat_ngram_size": _NGRAM,
    "bad_words_ids": _sequences,
    "sequence_bias": _biases,
    "forced_bos_token_id": _token,
    "forced_eos_token_id": _tokens,
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "exponential_decay_length_penalty": _decay,
    "remove_invalid_values": _flag,
    "renormalize_logits": _flag,
    "stop_strings": _strings,
}

# What asks for something that is not computed here, with the value that does not.
_ANOTHER_SEARCH = {"num_beams": 1, "num_beam_groups": 1, "constraints": None, "force_words_ids": None}
_REFUSED: Mapping[str, Json] = {
    "num_return_sequences": 1,
    "guidance_scale": 1,
    "watermarking_config": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "speculation_type": None,
    "use_mtp": False,
    "dola_layers": None,
    "top_h": None,
    "token_healing": False,
    "max_time": None,
    "forced_decoder_ids": None,
}


def _given(folder: CheckpointFolder) -> tuple[str, Mapping[str, Json]]:
    """Return the file that has the settings, and what it says."""
    given = folder.read(GENERATION_CONFIG)
    if given:
        return GENERATION_CONFIG, given
    config = folder.read("config.json")
    inner = next((part for key in ("text_config", "decoder") if isinstance(part := config.get(key), dict)), {})
    return "config.json", {**inner, **{key: value for key, value in config.items() if value is not None}}


def _require_known_ids(settings: GenerationSettings, folder: CheckpointFolder, name: str, size: int | None) -> None:
    """Refuse tokens that the model does not have: an end that never comes, or a start that is looked up nowhere."""
    for key in _IDS:
        outside = [token for token in _flat(getattr(settings, key)) if size is not None and token >= size]
        if outside:
            raise folder.malformed(name, f"{key} has token {outside[0]}, and the model gives scores for {size} tokens")


def _flat(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return [token for part in value for token in _flat(part)]
    return [] if value is None else [value]


def _refuse_others(folder: CheckpointFolder, name: str, given: Mapping[str, Json], options: GenerateOptions) -> None:
    """Refuse a search and settings that are not followed. A user who names a decoding has no other search."""
    found = {key: given.get(key) for key in (*_ANOTHER_SEARCH, *_REFUSED)}
    if options.decoding is not None:
        found = {key: value for key, value in found.items() if key not in _ANOTHER_SEARCH}
    elif given.get("penalty_alpha") and not given.get("do_sample"):
        found["penalty_alpha"] = given["penalty_alpha"]  # contrastive search
    usual = {**_ANOTHER_SEARCH, **_REFUSED}
    asked = {key: value for key, value in found.items() if value is not None and value != usual.get(key)}
    if not asked:
        return
    key, value = next(iter(asked.items()))
    searches = key in _ANOTHER_SEARCH or key == "penalty_alpha"
    raise InputError(
        f"{name} in {folder.label} asks for {key} {_short(value)}, which is not computed here",
        "pass --decoding greedy for the best token each time, or --decoding sample"
        if searches
        else f"generate with transformers, or take {key} out of that file",
    )


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
