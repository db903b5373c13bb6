"""The runs of a model that writes: a prompt, and then a token of each text at a time, onto the cache.

Letters of shapes: B batch, S tokens given, P tokens before them, T tokens of the encoder, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.tasks import TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import InputError
from onnxtool.infer.generation.encoders import ENCODER_MASK, IDS, LOGITS, MASK, fits, past_name, shown
from onnxtool.infer.text_model import TextModel
from onnxtool.model_file import ModelFile
from onnxtool.runtime.session import Session

POSITIONS = "position_ids"
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
            positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)
            feeds[POSITIONS] = np.ascontiguousarray(positions[:, -ids.shape[1] :])
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
        self._run.keep({past_name(name): value for name, value in states.items()})
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
        if output not in outputs or not fits(found[name], outputs[output]):
            raise InputError(
                f"the cache of {model.path} does not go from step to step: it takes {shown(found[name])} and gives "
                + (shown(outputs[output]) if output in outputs else f"no {output}"),
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


def _present(name: str) -> str:
    return re.sub(r"^past(_key_values)?", "present", name)


def _size(size: int | str | None, axis: int, batch: int) -> int:
    if isinstance(size, int):
        return size
    return batch if axis == 0 or size == _BATCH_AXIS else 0
