"""Read the next-token logits of a decoder, step by step through its cache, or of all positions at once.

Shape letters: B rows, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tasks import TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.reports import TensorInfo
from onnxtool.runtime.running import Session
from onnxtool.runtime.signature import IDS, MASK, TOKEN_TYPES
from onnxtool.runtime.text_feeds import text_feeds

LOGITS, POSITIONS = "logits", "position_ids"
CACHE = "past"  # what the names of its inputs begin with
Ids = NDArray[np.int64]


def cache_of(model: ModelFile) -> dict[str, str]:
    """Return the cache inputs, and the outputs that feed them in the next step.

    Raises:
        InputError: the graph has no cache, or its outputs do not match its inputs.
    """
    outputs = {info.name: info for info in model.structure.outputs}
    inputs = {info.name: info for info in model.structure.inputs if info.name.startswith(CACHE)}
    if LOGITS not in outputs or not any(".encoder." not in name for name in inputs):
        raise InputError(
            f"{model.path} writes no text: it has {'no cache' if LOGITS in outputs else 'no logits'}",
            f"export it with --task {TASK_WITH_CACHE}, or {TEXT_TO_TEXT_WITH_CACHE} for an encoder-decoder",
        )
    carried = {name: _present(name) for name in inputs if ".encoder." not in name}
    for name, output in carried.items():
        if output not in outputs or not fits(inputs[name], outputs[output]):
            raise InputError(
                f"the cache of {model.path} does not go from step to step: it takes {shown(inputs[name])} and gives "
                + (shown(outputs[output]) if output in outputs else f"no {output}"),
                "export the model again",
            )
    return carried


def fits(expected: TensorInfo, actual: TensorInfo) -> bool:
    """Whether one tensor can feed another: the same dtype and, where both are fixed, the same sizes."""
    return (
        expected.dtype == actual.dtype
        and len(expected.shape) == len(actual.shape)
        and all(
            first == second or not (isinstance(first, int) and isinstance(second, int))
            for first, second in zip(expected.shape, actual.shape, strict=True)
        )
    )


def shown(info: TensorInfo) -> str:
    """Format a tensor for errors."""
    return f"{info.name} {info.dtype} {list(info.shape)}"


def _present(name: str) -> str:
    return re.sub(r"^past(_key_values)?", "present", name)


def token_feeds(model: ModelFile, ids: Ids, num_read: int = 0) -> dict[str, NDArray[Any]]:
    """Return the inputs for `ids`, int64 [B, S] without padding, of which the first are in the cache; it is empty here.

    Raises:
        InputError: the graph has an input that tokens do not give.
    """
    new = np.ascontiguousarray(ids[:, num_read:])
    positions = np.broadcast_to(np.arange(num_read, ids.shape[1]), new.shape)
    arrays = {IDS: new, MASK: np.ones_like(ids), TOKEN_TYPES: np.zeros_like(new)}
    return text_feeds(model, {**arrays, POSITIONS: np.ascontiguousarray(positions)})


class StepReader:
    """Reads rows of tokens, each call further: only what is new, if the file has a cache that goes from step to step.

    Raises:
        InputError: as for `token_feeds`, when called.
    """

    def __init__(self, session: Session) -> None:
        try:
            self._carried = cache_of(session.model)
        except InputError:
            self._carried = {}
        self._session, self._run, self._num_read = session, session.cached(self._carried), 0

    @property
    def has_cache(self) -> bool:
        """Whether steps go through a cache."""
        return bool(self._carried)

    def __call__(self, ids: Ids) -> NDArray[np.floating]:
        """Return the logits after the last of `ids`, int64 [B, S], which begin with those of the call before: [B, V].

        Raises:
            SessionError: onnxruntime fails on them.
        """
        feeds = token_feeds(self._session.model, ids, self._num_read if self._carried else 0)
        cache = {name: feeds.pop(name) for name in self._carried}
        if not self._num_read:
            self._run.keep(cache)
        outputs = self._session.step(self._run, feeds)
        self._num_read = ids.shape[1]
        logits: NDArray[np.floating] = outputs[LOGITS].numpy()[:, -1]
        return logits
