"""The runs of a model that writes: a prompt, and then a token of each text at a time, onto the cache.

Letters of shapes: B batch, S tokens given, P tokens before them, T tokens of the encoder, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tasks import TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.checkpoint.truncation import EncodedText
from onnxtool.errors import InputError, ModelFileError
from onnxtool.infer.text_model import TextModel
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DECODER_KEY, ENCODER_KEY
from onnxtool.reports import TensorInfo
from onnxtool.runtime.session import Session, open_session

IDS, MASK, ENCODER_MASK, POSITIONS, LOGITS = (
    *("input_ids", "attention_mask", "encoder_attention_mask", "position_ids", "logits"),
)
_BATCH_AXIS = "batch_size"
_CACHE = "past"


class Steps(Protocol):
    """What writing asks of a model, a batch at a time."""

    def start(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        """Begin with B texts, and return the scores of the first token of each: [B, V]."""
        ...

    def step(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Go on with a token of each text, int64 [B], and return the scores of the next: [B, V]."""
        ...


class DecoderSteps:
    """A decoder: its prompts are the texts, padded on the left."""

    def __init__(self, model: TextModel, pad_id: int) -> None:
        self._session, self._pad_id = model.session, pad_id
        self._run = self._session.cached(cache_of(self._session.model))
        self._names = set(self._session.input_names)
        self._mask: NDArray[np.int64] = np.zeros((0, 0), np.int64)

    def start(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        """Run the prompts."""
        longest = max(map(len, texts))
        ids = np.full((len(texts), longest), self._pad_id, np.int64)
        self._mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, longest - len(text) :] = text.ids
            self._mask[row, longest - len(text) :] = 1
        self._run = self._session.cached(self._run.carried)
        self._run.keep(empty_cache(self._session.model, self._run.carried, len(texts)))
        return self._scores(ids)

    def step(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run a token of each."""
        self._mask = np.concatenate([self._mask, np.ones((len(tokens), 1), np.int64)], axis=1)
        return self._scores(tokens[:, None])

    def _scores(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        feeds = {IDS: ids, MASK: self._mask}
        if POSITIONS in self._names:  # of a file of another tool
            feeds[POSITIONS] = np.maximum(self._mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        return last_scores(self._session, self._run, {name: feeds[name] for name in feeds if name in self._names})


class EncoderDecoderSteps:
    """An encoder-decoder: the encoder reads the texts once, and the decoder begins with one token."""

    def __init__(self, model: TextModel, encoder: Session, start_id: int) -> None:
        self._model, self._encoder, self._start_id = model, encoder, start_id
        self._decoder = model.session
        carried = cache_of(self._decoder.model)
        self._own = {name: output for name, output in carried.items() if ".decoder." in name}
        self._run = self._decoder.cached(self._own)
        self._mask: NDArray[np.int64] = np.zeros((0, 0), np.int64)

    def start(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        """Run the encoder, and the decoder on the token that begins every text."""
        ids = next(info for info in self._encoder.model.structure.inputs if info.name == IDS)
        length = ids.shape[1] if isinstance(ids.shape[1], int) else None
        arrays = self._model.tokenizer.pad(texts, length)
        self._mask = arrays[MASK]
        states = self._encoder.step(
            self._encoder.cached({}), {name: arrays[name] for name in self._encoder.input_names}
        )
        self._run = self._decoder.cached(self._own)
        self._run.keep(empty_cache(self._decoder.model, self._own, len(texts)))
        self._run.keep({_past(name): value for name, value in states.items()})
        return self.step(np.full(len(texts), self._start_id, np.int64))

    def step(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run a token of each."""
        return last_scores(self._decoder, self._run, {IDS: tokens[:, None], ENCODER_MASK: self._mask})


def last_scores(session: Session, run: Any, feeds: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Run a step, and return the scores behind the last token: float32 [B, V]."""
    logits = session.step(run, feeds)[LOGITS].numpy()
    return np.ascontiguousarray(logits[:, -1], np.float32)


def cache_of(model: ModelFile) -> dict[str, str]:
    """Return the inputs of a cache, and the outputs that become them.

    Raises:
        InputError: the graph has no cache, or does not give back what it takes.
    """
    outputs = {info.name: info for info in model.structure.outputs}
    found = {info.name: info for info in model.structure.inputs if info.name.startswith(_CACHE)}
    if LOGITS not in outputs or not any(".encoder." not in name for name in found):
        raise InputError(
            f"{model.path} writes no text: it has {'no cache' if LOGITS in outputs else 'no logits'}",
            f"export it with --task {TASK_WITH_CACHE}, or {TEXT_TO_TEXT_WITH_CACHE} for an encoder-decoder",
        )
    carried = {name: _present(name) for name in found if ".encoder." not in name}
    for name, output in carried.items():
        if output not in outputs or not _fits(found[name], outputs[output]):
            raise InputError(
                f"the cache of {model.path} does not go from step to step: it takes {_shown(found[name])} and gives "
                + (_shown(outputs[output]) if output in outputs else f"no {output}"),
                "export the model again",
            )
    return carried


def empty_cache(model: ModelFile, names: Sequence[str] | dict[str, str], batch: int) -> dict[str, NDArray[Any]]:
    """Return the cache before the first token: keys and values of none, states of zeros."""
    return {
        info.name: np.zeros([_size(size, axis, batch) for axis, size in enumerate(info.shape)], info.dtype)
        for info in model.structure.inputs
        if info.name in names
    }


def open_encoder(model: TextModel, path: Path | None, provider: str, threads: int) -> Session:
    """Open the encoder of the decoder that `model` is, at `path` or where the decoder says.

    Raises:
        InputError: it is not there, or it is the encoder of another model.
        ModelFileError: the decoder names a file that is not beside it.
    """
    decoder = model.session.model
    if path is None:
        name = decoder.metadata.get(ENCODER_KEY, "")
        if any(character in name for character in "/\\:\0") or name in (".", ".."):
            raise ModelFileError(
                f"the metadata {ENCODER_KEY} of {decoder.path} is {name!r}, which is not the name of a file beside it",
                "do not trust this file, or pass --encoder_path",
            )
        path = decoder.path.with_name(name or f"{decoder.path.stem}-encoder.onnx")
    if not path.is_file():
        raise InputError(
            f"the encoder of {decoder.path} is not there: {path}",
            "keep both files of an encoder-decoder in one folder, or pass --encoder_path",
        )
    encoder = open_session(path, provider=provider, threads=threads)
    given = {_past(info.name): info for info in encoder.model.structure.outputs}
    for info in decoder.structure.inputs:
        if ".encoder." in info.name and not (info.name in given and _fits(info, given[info.name])):
            found = _shown(given[info.name]) if info.name in given else "nothing of that name"
            raise InputError(
                f"{path} is not the encoder of {decoder.path}: this one takes {_shown(info)}, and that one gives {found}",
                "pass the file that was exported with it",
            )
    unknown = [name for name in encoder.input_names if name not in (IDS, MASK, "token_type_ids")]
    if unknown:
        raise InputError(f"{path} reads {', '.join(unknown)}, which no tokenizer gives", "export it for texts")
    return encoder


def is_encoder_decoder(model: ModelFile) -> bool:
    """Whether a graph is the decoder of an encoder-decoder.

    Raises:
        InputError: it is the encoder.
    """
    if DECODER_KEY in model.metadata and not any(info.name == LOGITS for info in model.structure.outputs):
        raise InputError(
            f"{model.path} is the encoder of {model.metadata[DECODER_KEY]!r}, and writes nothing by itself",
            f"pass --model_path {model.path.with_name(Path(model.metadata[DECODER_KEY]).name)}",
        )
    return any(info.name == ENCODER_MASK for info in model.structure.inputs)


def _present(name: str) -> str:
    return re.sub(r"^past(_key_values)?", "present", name)


def _past(name: str) -> str:
    return re.sub(r"^present", "past_key_values", name)


def _size(size: int | str | None, axis: int, batch: int) -> int:
    if isinstance(size, int):
        return size
    return batch if axis == 0 or size == _BATCH_AXIS else 0


def _fits(taken: TensorInfo, given: TensorInfo) -> bool:
    """Whether one tensor can become another: the same dtype and, where both are fixed, the same sizes."""
    return (
        taken.dtype == given.dtype
        and len(taken.shape) == len(given.shape)
        and all(
            first == second or not (isinstance(first, int) and isinstance(second, int))
            for first, second in zip(taken.shape, given.shape, strict=True)
        )
    )


def _shown(info: TensorInfo) -> str:
    return f"{info.name} {info.dtype} {list(info.shape)}"
