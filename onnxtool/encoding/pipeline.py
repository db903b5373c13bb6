"""Run windows of texts through a model, with read-ahead, batches across windows, and results in order.

Shape letters: N texts of a window, B texts of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from onnxtool.checkpoint.limits import EncodedText
from onnxtool.encoding.progress import Event, OnEvent, OnRunning, RunningTexts, ignore
from onnxtool.encoding.sources import Document, Reject
from onnxtool.encoding.splits import TextWindow
from onnxtool.errors import InputError
from onnxtool.infer.chats import CUT, LongTexts
from onnxtool.infer.heads.head import BatchRules, VectorForm
from onnxtool.infer.loading import LoadedModel
from onnxtool.infer.pictures import PictureModel, PreparedPicture
from onnxtool.infer.vectors import AnyVectors, in_order

# Windows that are tokenized or run ahead of the one being finished, to keep the workers busy.
_WINDOWS_AHEAD = 3

# Readers and runners of documents. Only they know the type of a read document.
CorpusModel = LoadedModel | PictureModel

# A document with its model inputs.
_Tokenized = tuple[Document, list[Any]]
# Marks the texts of a window as running in a block.
_Marker = Callable[[], AbstractContextManager[None]]

_MARK = "#"  # between the id of a text and the number of a passage
TOO_LONG = "has more tokens than the model takes"


@dataclass(frozen=True)
class EncodedWindow:
    """The vectors of a window, in text order.

    Attributes:
        window: the window, reduced to documents with vectors.
        rows: the items with vectors: these documents, or their passages.
        vectors: vectors of the N rows; None if there are none.
        num_tokens: number of tokens read by the model, including special ones.
        num_padding: number of padding tokens in addition.
        num_truncated: number of texts beyond the model's limit.
        rejects: documents without any token.
    """

    window: TextWindow
    rows: tuple[Document, ...]
    vectors: AnyVectors | None
    num_tokens: int
    num_padding: int
    num_truncated: int
    rejects: tuple[Reject, ...]


@dataclass(frozen=True)
class EncodingSettings:
    """Settings for running texts.

    Attributes:
        rules: batching rules.
        workers: number of concurrent batches.
        prompt: the prompt before each text, as for `LoadedModel.tokenize`.
        task: the texts' task, likewise.
        keep_special: whether framing tokens may be terms.
        form: truncation and storage of vectors.
        long: handling of texts beyond the model's limit.
    """

    rules: BatchRules
    workers: int
    prompt: str | None
    task: str | None
    keep_special: bool
    form: VectorForm
    long: LongTexts = CUT


def batch_rules(model: CorpusModel, batch_tokens: int) -> BatchRules:
    """Return batching rules bounded by tokens instead of texts."""
    rules = model.batch_rules
    is_single = rules.batch_size is not None or rules.max_texts == 1
    return replace(
        rules,
        max_tokens=min(rules.max_tokens, batch_tokens),
        max_texts=rules.max_texts if is_single else batch_tokens,
    )


@dataclass
class _RunningWindow:
    """A window with running batches, the positions of their rows, and their pending results."""

    window: TextWindow
    rows: tuple[Document, ...]
    read: Sequence[EncodedText] | Sequence[PreparedPicture]
    rejects: tuple[Reject, ...]
    places: list[list[int]]
    results: list[Future[AnyVectors]]


def encode_windows(
    model: CorpusModel,
    windows: Iterable[TextWindow],
    plan: EncodingSettings,
    on_event: OnEvent,
    on_running: OnRunning = ignore,
) -> Generator[EncodedWindow, None, None]:
    """Yield the vectors of `windows`, in order.

    A separate thread reads and tokenizes; the tokenizer and the model release the interpreter lock.

    Args:
        model: the model.
        windows: groups of texts that are in memory at once.
        plan: settings for running them.
        on_event: receives the texts of each batch, and its share of the window's bytes by tokens.
        on_running: receives the texts that threads begin to tokenize or run, and those that they are done with.

    Raises:
        OnnxtoolError: reading, tokenizing or running failed.
    """
    remaining = iter(windows)
    with (
        ThreadPoolExecutor(plan.workers, thread_name_prefix="encode") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader,
    ):

        def start_next() -> _RunningWindow | None:
            window = next(remaining, None)
            return None if window is None else _start(model, window, plan, workers, on_running)

        try:
            ahead = deque(reader.submit(start_next) for _ in range(_WINDOWS_AHEAD))
            while (running := ahead.popleft().result()) is not None:
                ahead.append(reader.submit(start_next))
                yield _finish(running, plan, on_event)
        finally:
            workers.shutdown(wait=False, cancel_futures=True)
            reader.shutdown(wait=True, cancel_futures=True)


def _start(
    model: CorpusModel, window: TextWindow, plan: EncodingSettings, workers: ThreadPoolExecutor, on_running: OnRunning
) -> _RunningWindow:
    tokenized: list[_Tokenized] = []
    rejects: tuple[Reject, ...] = ()
    marked: _Marker = nullcontext
    if window.documents:
        first, last = window.documents[0].id, window.documents[-1].id
        marked = partial(_told, on_running, RunningTexts(window.shard.stem, first, last))
        with marked():
            tokenized, rejects = _tokenize(model, window.documents, plan)
    window = replace(window, documents=tuple(document for document, _ in tokenized))
    inputs = [text for _, texts in tokenized for text in texts]
    rows = window.documents
    if plan.long.way == "window" and isinstance(model, LoadedModel):
        num_before = len(model.prompts.text_of(plan.prompt, plan.task))
        rows = tuple(chain.from_iterable(passages(document, texts, num_before) for document, texts in tokenized))
        inputs = [replace(text, offsets=None) for text in inputs]  # most of what a token takes in memory
    # Longest first, so that the last batches of the corpus, when workers run dry, are short.
    places = list(plan.rules.batches([len(text) for text in inputs]))[::-1]
    results = [workers.submit(_encode, model, [inputs[place] for place in batch], plan, marked) for batch in places]
    return _RunningWindow(window, rows, inputs, rejects, places, results)


@contextmanager
def _told(on_running: OnRunning, running: RunningTexts) -> Iterator[None]:
    on_running(running)
    try:
        yield
    finally:
        on_running(running._replace(change=-1))


def _tokenize(
    model: CorpusModel, documents: Sequence[Document], plan: EncodingSettings
) -> tuple[list[_Tokenized], tuple[Reject, ...]]:
    """Tokenize all texts at once; if one has no tokens, tokenize one by one to identify it."""
    tokenized: list[_Tokenized] = []
    rejects: list[Reject] = []
    try:
        tokenized += zip(documents, _texts(model, documents, plan), strict=True)
    except InputError:
        for document in documents:
            try:
                tokenized.append((document, _texts(model, [document], plan)[0]))
            except InputError as error:
                reason = (
                    f"is not a readable image: {error.message}"
                    if isinstance(model, PictureModel)
                    else "has contents without any token"
                )
                rejects.append(Reject(document.file, document.line, reason, document.id))
    if plan.long.way == "fail":
        long = [document for document, texts in tokenized if texts[0].truncated]
        rejects += [Reject(document.file, document.line, TOO_LONG, document.id) for document in long]
        tokenized = [pair for pair in tokenized if not pair[1][0].truncated]
    return tokenized, tuple(sorted(rejects, key=lambda reject: (reject.file, reject.line)))


def _texts(model: CorpusModel, documents: Sequence[Document], plan: EncodingSettings) -> list[list[Any]]:
    """Read documents as model inputs: one per document, or several for a text read in windows."""
    texts = [document.contents for document in documents]
    if isinstance(model, PictureModel):
        return [[model.prepare(path)] for path in texts]
    in_windows = plan.long.way == "window"
    long = plan.long if in_windows else CUT
    return model.windows(texts, prompt=plan.prompt, task=plan.task, long=long, with_offsets=in_windows)


def _encode(model: CorpusModel, texts: Sequence[Any], plan: EncodingSettings, marked: _Marker) -> AnyVectors:
    with marked():
        outputs: Any = (
            model.run(texts)
            if isinstance(model, PictureModel)
            else model.pool(model.run(texts), keep_special=plan.keep_special)
        )
        vectors: AnyVectors = plan.form.apply(outputs)
    return vectors


def _finish(running: _RunningWindow, plan: EncodingSettings, on_event: OnEvent) -> EncodedWindow:
    """Wait for the batches of a window and return their results in text order."""
    lengths = [len(text) for text in running.read]
    num_tokens = sum(lengths)
    parts = []
    for result, batch in zip(running.results, running.places, strict=True):
        parts.append(result.result())
        num_texts = sum((running.rows[place].span or (0, 0))[0] == 0 for place in batch)  # first passages
        share = sum(lengths[place] for place in batch) / num_tokens
        on_event(Event(texts=num_texts, size_bytes=share * running.window.size_bytes))
    num_run = sum(_padded(batch, lengths, plan.rules) for batch in running.places)
    return EncodedWindow(
        window=running.window,
        rows=running.rows,
        vectors=in_order(parts, [*chain(*running.places)]) if parts else None,
        num_tokens=num_tokens,
        num_padding=num_run - num_tokens,
        num_truncated=sum(text.truncated for text in running.read),
        rejects=running.rejects,
    )


def _padded(batch: Sequence[int], lengths: Sequence[int], rules: BatchRules) -> int:
    """Return the number of tokens in a batch, including padding and filler texts of a fixed batch size."""
    longest = max(lengths[place] for place in batch)
    texts, tokens = rules.padded(len(batch), longest)
    return texts * (tokens or longest)


def passages(document: Document, windows: Sequence[EncodedText], num_before: int) -> list[Document]:
    """Return a passage for each window over the text of `document`, named `ID#0`, `ID#1` and so on.

    A text that fits is `ID#0`, so that the last `#` always separates document and passage. The first passage starts at
    the beginning of the text and the last one ends at its end.

    Args:
        document: the text.
        windows: its model inputs, with offsets.
        num_before: number of prompt characters before the text, which offsets include.
    """
    text, parts = document.contents, []
    begin = end = 0
    for number, window in enumerate(windows):
        if window.offsets is not None:
            spans = zip(window.offsets.parts, window.offsets.spans, strict=True)
            places = [span for part, span in spans if part == 0 and span[1] > num_before]
            if places:
                begin, end = max(0, places[0][0] - num_before), places[-1][1] - num_before
        if number:  # some tokenizers have the space before a word in its token
            begin += end - begin - len(text[begin:end].lstrip())
        else:
            begin = 0
        end = len(text) if number == len(windows) - 1 else end
        name = f"{document.id}{_MARK}{number}"
        parts.append(replace(document, id=name, contents=text[begin:end], span=(begin, end)))
    return parts


def document_of(passage: str) -> str:
    """Return the document id of a passage."""
    return passage.rpartition(_MARK)[0]
