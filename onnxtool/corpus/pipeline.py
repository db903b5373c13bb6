"""Run windows of texts through a model: read ahead, batches of several windows at once, results in order.

Letters of shapes: N texts of a window, B texts of a batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from onnxtool.checkpoint.truncation import EncodedText
from onnxtool.corpus.sources import Document, Reject
from onnxtool.corpus.windows import Window
from onnxtool.errors import InputError
from onnxtool.infer.batches import BatchRules
from onnxtool.infer.loading import LoadedModel
from onnxtool.infer.vectors import DenseVectors, SparseVectors

# Windows that are tokenized or run at once: while one is finished, the next keeps the workers busy.
_WINDOWS_AHEAD = 2
_MOMENT_S = 0.1

OnBatch = Callable[[Window, int, float], None]


@dataclass(frozen=True)
class EncodedWindow:
    """The vectors of a window, in the order of its texts.

    Attributes:
        window: with the documents that have vectors alone.
        vectors: of N texts; None where there are none.
        num_tokens: that the model read, special ones included.
        num_padding: tokens of padding that it read besides.
        num_truncated: texts that were longer than the model takes.
        rejects: documents in which the tokenizer finds no token.
    """

    window: Window
    vectors: DenseVectors | SparseVectors | None
    num_tokens: int
    num_padding: int
    num_truncated: int
    rejects: tuple[Reject, ...]


@dataclass(frozen=True)
class Plan:
    """How texts are run.

    Attributes:
        rules: which texts run together.
        workers: batches that run at once.
        prompt: what is written before each text, as `LoadedModel.tokenize` takes it.
        keep_special: whether tokens that frame a text may be terms.
    """

    rules: BatchRules
    workers: int
    prompt: str | None
    keep_special: bool


def batch_rules(model: LoadedModel, batch_tokens: int) -> BatchRules:
    """Return what the graph takes at once, bounded by tokens instead of by a number of texts."""
    rules = model.batch_rules
    is_single = rules.batch_size is not None or rules.max_texts == 1
    return replace(
        rules,
        max_tokens=min(rules.max_tokens, batch_tokens),
        max_texts=rules.max_texts if is_single else batch_tokens,
    )


@dataclass
class _Running:
    """A window of which batches are running, the places of their texts, and what they will give."""

    window: Window
    read: Sequence[EncodedText]
    rejects: tuple[Reject, ...]
    places: list[list[int]]
    results: list[Future[DenseVectors | SparseVectors]]


def encode_windows(
    model: LoadedModel, windows: Iterable[Window], plan: Plan, on_batch: OnBatch
) -> Generator[EncodedWindow, None, None]:
    """Yield the vectors of `windows`, in their order.

    A separate thread reads and tokenizes; the tokenizer and the model release the interpreter lock.

    Args:
        model: what runs them.
        windows: texts that are in memory at once.
        plan: how they are run.
        on_batch: called for each batch with its window, its texts and its share of the window's tokens.

    Raises:
        OnnxtoolError: reading, tokenizing or running failed.
    """
    with ThreadPoolExecutor(plan.workers, thread_name_prefix="encode") as workers:
        ahead = _ReadAhead(windows, lambda window: _start(model, window, plan, workers))
        try:
            for running in ahead:
                yield _finish(running, plan, on_batch)
        finally:
            ahead.stop()
            workers.shutdown(wait=False, cancel_futures=True)
            ahead.join()


class _Stopped(Exception):  # noqa: N818  no error: the consumer has left
    """Ends the thread that reads ahead."""


class _ReadAhead:
    """A thread that starts windows before they are asked for, a few at a time."""

    def __init__(self, windows: Iterable[Window], start: Callable[[Window], _Running]) -> None:
        self._windows = windows
        self._start = start
        self._ready: queue.Queue[_Running | BaseException | None] = queue.Queue(_WINDOWS_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[_Running]:
        """Yield the windows that are started, and raise what ended the thread."""
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        """Stop the thread: no more is needed."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for window in self._windows:
                self._put(self._start(window))
            self._put(None)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised again where the windows are asked for
            with suppress(_Stopped):
                self._put(error)

    def _put(self, item: _Running | BaseException | None) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=_MOMENT_S)
                return
        raise _Stopped


def _start(model: LoadedModel, window: Window, plan: Plan, workers: ThreadPoolExecutor) -> _Running:
    read, rejects = _tokenize(model, window.documents, plan.prompt)
    refused = {(reject.file, reject.line) for reject in rejects}
    kept = tuple(document for document in window.documents if (document.file, document.line) not in refused)
    window = replace(window, documents=kept)
    # The longest first: what is left at the end of the corpus, when workers run out of batches, is short.
    places = list(plan.rules.batches([len(text) for text in read]))[::-1]
    results = [
        workers.submit(_encode, model, [read[place] for place in batch], keep_special=plan.keep_special)
        for batch in places
    ]
    return _Running(window, read, rejects, places, results)


def _tokenize(
    model: LoadedModel, documents: Sequence[Document], prompt: str | None
) -> tuple[list[EncodedText], tuple[Reject, ...]]:
    """Read all texts at once; where one of them has no token, one after the other, and say which."""
    try:
        return model.tokenize([document.contents for document in documents], prompt=prompt), ()
    except InputError:
        read: list[EncodedText] = []
        rejects: list[Reject] = []
        for document in documents:
            try:
                read += model.tokenize([document.contents], prompt=prompt)
            except InputError:
                rejects.append(Reject(document.file, document.line, "has contents without any token", document.id))
        return read, tuple(rejects)


def _encode(model: LoadedModel, texts: Sequence[EncodedText], *, keep_special: bool) -> DenseVectors | SparseVectors:
    return model.pool(model.run(texts), keep_special=keep_special)


def _finish(running: _Running, plan: Plan, on_batch: OnBatch) -> EncodedWindow:
    """Wait for the batches of a window and put their results in the order of its texts."""
    lengths = [len(text) for text in running.read]
    num_tokens = sum(lengths)
    parts = []
    for result, batch in zip(running.results, running.places, strict=True):
        parts.append(result.result())
        on_batch(running.window, len(batch), sum(lengths[place] for place in batch) / num_tokens)
    num_run = sum(_padded(batch, lengths, plan.rules) for batch in running.places)
    return EncodedWindow(
        window=running.window,
        vectors=_in_order(parts, running.places),
        num_tokens=num_tokens,
        num_padding=num_run - num_tokens,
        num_truncated=sum(text.truncated for text in running.read),
        rejects=running.rejects,
    )


def _padded(batch: Sequence[int], lengths: Sequence[int], rules: BatchRules) -> int:
    """Return how many tokens a batch has with its padding, and with the texts that fill up a fixed batch."""
    return (rules.batch_size or len(batch)) * (rules.sequence_length or max(lengths[place] for place in batch))


def _in_order(
    parts: Sequence[DenseVectors | SparseVectors], places: Sequence[Sequence[int]]
) -> DenseVectors | SparseVectors | None:
    if not parts:
        return None
    order = np.argsort(np.concatenate([np.asarray(batch) for batch in places]))
    sparse = [part for part in parts if isinstance(part, SparseVectors)]
    if sparse:
        return SparseVectors.concatenate(sparse).take(order.tolist())
    return np.asarray(np.concatenate([part for part in parts if not isinstance(part, SparseVectors)])[order])
