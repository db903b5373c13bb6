"""Run texts and pairs of texts through a loaded model, and return its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText, Text
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.text_files import TextInput
from onnxtool.checkpoint.vector_types import Prune
from onnxtool.errors import InputError
from onnxtool.infer.chats import CUT, LongTexts
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.heads.head import Answer, AnswerContext, AnswerHead
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.infer.options import InferOptions, TextTask
from onnxtool.infer.report import InferReport, Ranking, Scored, TextAnswer
from onnxtool.infer.static_queries import QUERY, StaticQueries
from onnxtool.infer.text_model import TextModel
from onnxtool.infer.vectors import DenseVectors, SparseVectors, TokenVectors, TopK, cosine_similarities
from onnxtool.options import Options
from onnxtool.progress import Stage, tell

# A text, one with its id, or a query and a text.
Item = str | tuple[str, str] | TextInput
AnItem = TypeVar("AnItem")

# Texts are tokenized and sorted by length this many at a time, for even batches and bounded memory.
_TEXTS_AT_A_TIME = 1024
# Fewer if answers are streamed, so that the first ones arrive soon.
_STREAMED_AT_A_TIME = 256
# A table of all pairs grows with the square of the texts.
MAX_SIMILARITIES = 1000
_TOP_TERMS = 10


class AnswerOptions(Options):
    """User options for answers.

    Attributes:
        query: paired with every single text.
        prompt: as in TextModel.tokenize.
        task: as in TextModel.tokenize.
        long: handling of long texts; None for the model's default.
        top_k: the maximum number of candidates per text; None for the head's default.
        prune: as in TextModel.encode.
    """

    query: str | None = None
    prompt: str | None = None
    task: TextTask = None
    long: LongTexts | None = None
    top_k: TopK = None
    prune: Prune = None


@dataclass
class Counts:
    """Counts of texts and windows read so far, and of truncated, windowed, empty and padded ones."""

    texts: int = 0
    windows: int = 0
    cut: int = 0
    parted: int = 0
    empty: int = 0
    padded: int = 0


@dataclass
class AnsweredTexts:
    """Answers so far, one entry per text, with the queries of rankings and the counts."""

    counts: Counts = field(default_factory=Counts)
    answers: list[TextAnswer] = field(default_factory=list)
    vectors: list[DenseVectors] = field(default_factory=list)
    queries: dict[str, TokenVectors] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def answer_texts(model: TextModel, texts: Sequence[Item], options: AnswerOptions) -> InferReport:
    """Answer each of N texts, in order.

    Raises:
        InputError: there are no texts, the model takes no pairs or only pairs, or it does not support windows.
    """
    model = model.of_task(model.task_of(options.task))
    texts, options = _checked(model, texts, options)
    answered = AnsweredTexts()
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        part = texts[start : start + _TEXTS_AT_A_TIME]
        tell(Stage("running text", start, len(texts)))
        _answer_part(model, part, options, answered)
    similarities = _similarities(model, answered)
    report = _report(model, options, answered)
    rankings = _rankings(answered.answers) if report.kind == "scores" else ()
    return replace(report, similarities=similarities, rankings=rankings)


def stream_answers(
    model: TextModel, texts: Iterable[Item], options: AnswerOptions, total: int = 0
) -> Iterator[InferReport]:
    """Answer texts as they arrive, in order, holding only part of them at a time.

    Args:
        model: the model.
        texts: texts and pairs; their ids need not be unique.
        options: the user's options.
        total: the approximate number of texts; 0 if unknown.

    Yields:
        A report for each part, without similarities and rankings, which need all texts; its notes cover all texts so
        far.

    Raises:
        InputError: as for `answer_texts`, when the text is reached.
    """
    model = model.of_task(model.task_of(options.task))
    counts = Counts()
    notes: dict[str, None] = {}
    for part in in_parts(texts):
        tell(Stage("running text", counts.texts, max(total, counts.texts + len(part)) if total else 0))
        named, settled = _checked(model, part, options)
        answered = AnsweredTexts(counts, notes=list(notes))
        _answer_part(model, named, settled, answered)
        notes |= dict.fromkeys(answered.notes)
        yield _report(model, settled, answered)


def _checked(
    model: TextModel, texts: Sequence[Item], options: AnswerOptions
) -> tuple[Sequence[TextInput], AnswerOptions]:
    """Return texts with their queries, and the options with the model's defaults filled in."""
    if not texts:
        raise InputError("no texts to run", "pass at least one --text, or --input with a file of them")
    if options.top_k is not None and not model.head.has_candidates:
        raise InputError(
            f"--top_k {options.top_k} was passed: {model.session.model.path} gives {model.head.kind}, no candidates",
            "leave it out; it is for terms, labels, tokens and answers to a question",
        )
    if options.prune is not None:
        model.vector_head()
    named = [_named(item, options.query) for item in texts]
    _require_form(model, named)
    task = _task_of_tokens(model, named, options.task) if model.is_late_interaction else options.task
    long = options.long or LongTexts("window" if model.head.splits_long_texts else "truncate")
    if long.way == "window":
        model.head.require_windows()
    return named, replace(options, task=task, long=long)


def in_parts(texts: Iterable[AnItem]) -> Iterator[tuple[AnItem, ...]]:
    """Yield streamed texts in groups, in order."""
    remaining = iter(texts)
    while part := tuple(islice(remaining, _STREAMED_AT_A_TIME)):
        yield part


def _report(model: TextModel, options: AnswerOptions, answered: AnsweredTexts) -> InferReport:
    return InferReport(
        model=str(model.session.model.path),
        provider=model.session.provider,
        task=model.task,
        kind="scores" if answered.queries else model.head.kind,
        answers=tuple(answered.answers),
        notes=tuple(dict.fromkeys([*_notes(model, options, answered.counts), *answered.notes])),
    )


def answer_queries(queries: StaticQueries, texts: Sequence[TextInput], options: InferOptions) -> InferReport:
    """Answer with the terms of looked-up queries, in order.

    Raises:
        InputError: there are no texts, one cannot be read, or an option needs a model run.
    """
    if not texts:
        raise InputError("no texts to run", "pass at least one --text, or --input with a file of them")
    if options.query is not None or any(text.query is not None for text in texts):
        raise InputError("queries are looked up by themselves, and a pair was passed", "pass texts alone")
    if options.long is not None:
        raise InputError(
            f"--long {options.long} was passed, but queries are looked up, of any length", "leave --long out"
        )
    if options.representation is not None:
        raise InputError(
            f"--representation {options.representation} was passed, but queries are looked up as terms",
            "leave --representation out",
        )
    prompt = None if options.prompt == QUERY else options.prompt  # asks for the lookup, also without such a prompt
    before = queries.prompts.text_of(prompt, QUERY)
    answered = queries.tokenize([text.contents for text in texts], prompt=prompt)
    vectors = queries.weigh(answered).without(queries.tokenizer.framing_ids)
    if options.prune is not None:
        vectors = vectors.pruned(options.prune)
    rows = vectors.terms(options.top_k or _TOP_TERMS)
    most = queries.table.max_tokens
    return InferReport(
        model=str(options.model_path),
        provider="none",
        task="sparse-encoding",
        kind="terms",
        answers=tuple(
            TextAnswer(
                text=text.contents,
                num_tokens=len(ids[:most]),
                truncated=most is not None and len(ids) > most,
                candidates=tuple(Scored(*term) for term in row.items()),
                id=text.id,
            )
            for text, ids, row in zip(texts, answered, rows, strict=True)
        ),
        notes=(
            "queries are looked up in the checkpoint's table; the model did not run",
            *([f"{before!r} stands before each text"] if before else []),
        ),
    )


def _named(item: Item, query: str | None) -> TextInput:
    if isinstance(item, tuple):
        return TextInput(item[1], query=item[0])
    named = item if isinstance(item, TextInput) else TextInput(item)
    return named if named.query is not None or query is None else TextInput(named.contents, named.id, query)


def _require_form(model: TextModel, texts: Sequence[TextInput]) -> None:
    path, head = model.session.model.path, model.head
    if any(text.query is not None for text in texts) and not head.takes_pairs and not model.is_late_interaction:
        raise InputError(
            f"{path} is for {model.task}, and takes no pairs of a query and a text",
            "pass texts alone; pairs are for rerankers, late interaction, classifiers and models that answer questions",
        )
    if any(text.query is None for text in texts) and head.needs_pairs:
        raise InputError(
            f"{path} is for {model.task}, and needs a question beside each text",
            "pass it with --query, or as query in each line of the --input",
        )


def _task_of_tokens(model: TextModel, texts: Sequence[TextInput], task: str | None) -> str | None:
    """Return the task of late-interaction texts: documents unless requested otherwise.

    Raises:
        InputError: some texts have a query and others have none, or queries are to be ranked for a query.
    """
    num_pairs = sum(text.query is not None for text in texts)
    if num_pairs not in (0, len(texts)):
        raise InputError(
            f"{num_pairs} of {len(texts)} texts have a query, and the others have none",
            "rank all of them for a query, or none",
        )
    if num_pairs and task == QUERY:
        raise InputError("texts are ranked for a query as documents, and --task query was passed", "leave it out")
    return model.task_of(task)


def _answer_part(model: TextModel, texts: Sequence[TextInput], options: AnswerOptions, answered: AnsweredTexts) -> None:
    head, counts = model.head, answered.counts
    items: list[Text] = [
        text.contents if text.query is None or model.is_late_interaction else (text.query, text.contents)
        for text in texts
    ]
    windows = model.windows(
        items, prompt=options.prompt, task=options.task, long=options.long or CUT, first=counts.texts + 1
    )
    answers: Iterable[Answer]
    vectors: Sequence[DenseVectors] = ()
    if isinstance(head, AnswerHead):
        answers = _read_answers(model, head, texts, windows, options.top_k)
    else:
        encoded: Any = model.encode_windows(windows)
        if pruning := head.pruning_for(options.prune, options.task):
            encoded = encoded.pruned(pruning)
        if isinstance(encoded, SparseVectors):
            rows = encoded.terms(options.top_k or _TOP_TERMS)
            answers = [Answer(tuple(Scored(*term) for term in row.items() if term[1] > 0)) for row in rows]
        elif isinstance(encoded, TokenVectors):
            answers = _token_answers(model, texts, encoded, answered)
        else:
            vectors = list(encoded)
            answers = [Answer(outputs={"sentence_embedding": vector.shape}) for vector in vectors]
        answered.notes += [head.note] if head.note else []
    answers = list(answers)
    counts.texts += len(texts)
    counts.windows += sum(map(len, windows))
    counts.cut += sum(window.truncated for group in windows for window in group)
    counts.parted += sum(len(group) > 1 for group in windows)
    counts.empty += sum(not text.contents.strip() for text in texts)
    length = model.batch_rules.sequence_length or 0
    counts.padded += sum(len(window) < length for group in windows for window in group)
    answered.vectors += vectors
    answered.notes += [answer.note for answer in answers if answer.note]
    for position, (text, group, answer) in enumerate(zip(texts, windows, answers, strict=True)):
        answered.answers.append(
            TextAnswer(
                text=text.contents,
                num_tokens=sum(map(len, group)),
                truncated=any(window.truncated for window in group),
                candidates=answer.candidates,
                outputs=answer.outputs,
                id=text.id,
                query=text.query,
                num_windows=len(group),
                spans=answer.spans,
                vector=numbers_of(vectors[position]) if vectors else (),
                token_vectors=tuple(map(numbers_of, answer.token_vectors)),
            )
        )


def _token_answers(
    model: TextModel, texts: Sequence[TextInput], encoded: TokenVectors, answered: AnsweredTexts
) -> Iterator[Answer]:
    """Answer with each text's similarity to its query, or with its vectors if it has none."""
    is_mean = isinstance(model.head, TokensOfTexts) and model.head.is_mean
    for place, text in enumerate(texts):
        if text.query is None:
            vectors = encoded.row(place)
            yield Answer(outputs={TOKENS: vectors.shape}, token_vectors=vectors)
            continue
        if text.query not in answered.queries:
            asking = model.of_task(QUERY)
            query = asking.encode_windows(asking.windows([text.query], task=QUERY))
            assert isinstance(query, TokenVectors)  # noqa: S101  as `encoded`, of the same head
            answered.queries[text.query] = query
        scores = answered.queries[text.query].max_similarities(encoded.take([place]), is_mean=is_mean)
        yield Answer((Scored("meanmaxsim" if is_mean else "maxsim", float(scores[0, 0])),))


def _read_answers(
    model: TextModel,
    head: AnswerHead[Any],
    texts: Sequence[TextInput],
    windows: Sequence[Sequence[EncodedText]],
    top_k: int | None,
) -> list[Answer]:
    """Answer each text, batching windows of similar length."""
    flat = [window for group in windows for window in group]
    readings: dict[int, Any] = {}
    for positions in model.batch_rules.batches([len(window) for window in flat]):
        batch = model.run([flat[position] for position in positions])
        readings.update(zip(positions, head.read_outputs(batch), strict=True))
    answers, start = [], 0
    for text, group in zip(texts, windows, strict=True):
        own = [readings[position] for position in range(start, start + len(group))]
        start += len(group)
        reading = own[0] if len(own) == 1 else head.join(own, group)
        answers.append(head.answer(reading, AnswerContext(text.contents, group, top_k)))
    return answers


def numbers_of(vector: NDArray[Any]) -> tuple[float, ...]:
    """Return codes as integers, and floats as the shortest decimals that round-trip to the same float32."""
    return tuple(vector.tolist() if vector.dtype.kind in "iu" else (float(str(value)) for value in vector))


def _similarities(model: TextModel, answered: AnsweredTexts) -> tuple[tuple[float, ...], ...]:
    """Return the cosine of every pair of embeddings, or nothing with a note if the table would be huge."""
    count = len(answered.vectors)
    if count < 2 or not isinstance(model.head, Embeddings):
        return ()
    if count > MAX_SIMILARITIES:
        answered.notes.append(f"no similarities: {count} texts, and pairs are compared up to {MAX_SIMILARITIES} texts")
        return ()
    if (stated := model.folder.sentence_modules.encoder.get("similarity_fn_name")) not in (None, "cosine"):
        answered.notes.append(
            f"these are cosines, and the checkpoint compares vectors by {str(stated)[:40]}, as evaluate does"
        )
    return tuple(tuple(map(float, row)) for row in cosine_similarities(np.stack(answered.vectors)))


def _rankings(answers: Sequence[TextAnswer]) -> tuple[Ranking, ...]:
    positions: dict[str | None, list[int]] = {}
    for position, answer in enumerate(answers):
        positions.setdefault(answer.query, []).append(position)
    return tuple(
        Ranking(query, tuple(sorted(own, key=lambda position: -answers[position].candidates[0].score)))
        for query, own in positions.items()
    )


def _notes(model: TextModel, options: AnswerOptions, counts: Counts) -> list[str]:
    """Return notes for the user on how the texts were read."""
    notes = list(model.reading_notes)
    if options.task is None and (note := model.route_note):
        notes.append(note)
    notes += model.adapter_notes + model.prompt_notes(options.prompt, options.task)
    limit = model.limit_of(options.task)
    total = counts.texts
    if limit is not None and counts.cut:
        notes.append(f"{counts.cut} of {total} texts were cut to {limit.tokens} tokens ({limit.source})")
    if limit is not None and counts.parted:
        most = f"windows of at most {limit.tokens} tokens ({limit.source})"
        notes.append(f"{counts.parted} of {total} texts were read in {most}")
    if counts.empty:
        notes.append(f"{counts.empty} of {total} texts are empty; their results come from the special tokens alone")
    if counts.padded and not model.batch_rules.has_mask:
        notes.append(
            f"{counts.padded} of {counts.windows} texts are padded to {model.batch_rules.sequence_length} tokens, and "
            "the padding is not masked: the graph has no mask input"
        )
    return notes
