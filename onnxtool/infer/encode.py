"""Run texts through a model and say what it makes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from onnxtool.errors import InputError
from onnxtool.infer.answers import Answer, Interpreter
from onnxtool.infer.batches import BatchRules
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.pooling import cosine_similarities
from onnxtool.infer.tasks import stated_task
from onnxtool.reports import InferReport, TextAnswer
from onnxtool.texts.cutting import EncodedText
from onnxtool.texts.inputs import TextInput
from onnxtool.texts.limits import Limit

# Texts are read and sorted by length this many at a time, so that batches are even and a corpus of any size fits.
_TEXTS_AT_A_TIME = 1024
# A table of all pairs grows with the square of the texts.
_MAX_SIMILARITIES = 1000


def infer_texts(
    model_path: Path,
    texts: Sequence[str | TextInput],
    *,
    model_name: str | None = None,
    provider: str = "auto",
    threads: int = 0,
    top_k: int = 10,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> InferReport:
    """Run `texts` through the model at `model_path` and answer for each, in their order.

    Args:
        model_path: the ONNX file; its tokenizer is found beside it.
        texts: what to run, with or without an id.
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one a core.
        top_k: the most candidates to give for a text.
        on_progress: is told what is being done.

    Raises:
        InputError: there are no texts or no tokenizer, a text has no token, or the tokenizer does not fit the model.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load or run the model, or it gives no numbers.
    """
    if not texts:
        raise InputError("no texts to run", "pass at least one --text, or --input with a file of them")
    if top_k < 1:
        raise InputError(f"top_k is {top_k}", "ask for at least one candidate")
    named = [text if isinstance(text, TextInput) else TextInput(text) for text in texts]
    model = load(model_path, model_name=model_name, provider=provider, threads=threads, on_progress=on_progress)
    interpreter = Interpreter(model.tokenizer, model.folder, top_k)
    encoded: list[EncodedText] = []
    answers: list[Answer] = []
    for start in range(0, len(named), _TEXTS_AT_A_TIME):
        part = named[start : start + _TEXTS_AT_A_TIME]
        on_progress(f"running texts {start + 1} to {start + len(part)} of {len(named)}")
        read = model.tokenize([text.contents for text in part])
        _require_tokens(part, read, first=start + 1)
        answers += _answers(model, read, interpreter)
        encoded += read
    stated = stated_task(model.session.model)
    notes = [] if stated else [f"the model does not say what it is for; read as {model.task} from its outputs"]
    return InferReport(
        model=str(model_path),
        provider=model.session.provider,
        task=model.task,
        kind=model.rule.kind,
        answers=tuple(_text_answer(*item) for item in zip(named, encoded, answers, strict=True)),
        similarities=_similarities(answers, notes),
        notes=(
            *notes,
            *_truncation_note(encoded, model.limit),
            *_padding_note(encoded, model.batch_rules),
            *dict.fromkeys(answer.note for answer in answers if answer.note),
        ),
    )


def _answers(model: LoadedModel, texts: Sequence[EncodedText], interpreter: Interpreter) -> list[Answer]:
    """Answer for each of `texts`, in their order, running those of similar length together."""
    answers: dict[int, Answer] = {}
    for places in model.batch_rules.batches([len(text) for text in texts]):
        batch = model.run([texts[place] for place in places])
        answers.update(zip(places, model.rule.answer(batch, interpreter), strict=True))
    return [answers[place] for place in range(len(texts))]


def _text_answer(text: TextInput, encoded: EncodedText, answer: Answer) -> TextAnswer:
    return TextAnswer(
        text=text.contents,
        num_tokens=len(encoded),
        truncated=encoded.truncated,
        candidates=answer.candidates,
        outputs=answer.outputs,
        id=text.id,
    )


def _similarities(answers: Sequence[Answer], notes: list[str]) -> tuple[tuple[float, ...], ...]:
    """Return the cosine of every pair of embeddings, or nothing with a note where the table would be huge."""
    vectors = [answer.vector for answer in answers if answer.vector is not None]
    if len(vectors) < 2:
        return ()
    if len(vectors) > _MAX_SIMILARITIES:
        notes.append(f"no similarities: {len(vectors)} texts, and pairs are compared up to {_MAX_SIMILARITIES} texts")
        return ()
    return tuple(tuple(float(value) for value in row) for row in cosine_similarities(np.stack(vectors)))


def _require_tokens(texts: Sequence[TextInput], encoded: Sequence[EncodedText], *, first: int) -> None:
    """Refuse a text without any token, which leaves nothing to pool over, by its number counted from `first`."""
    for number, (text, tokens) in enumerate(zip(texts, encoded, strict=True), start=first):
        if not len(tokens):
            name = f"text {number}" if text.id is None else f"text {number} (id {text.id!r})"
            raise InputError(
                f"{name} has no tokens: {text.contents[:60]!r}", "leave it out; this tokenizer adds nothing to a text"
            )


def _truncation_note(texts: Sequence[EncodedText], limit: Limit | None) -> list[str]:
    count = sum(text.truncated for text in texts)
    if not count or limit is None:
        return []
    return [f"{count} of {len(texts)} texts were cut to {limit.tokens} tokens ({limit.source})"]


def _padding_note(texts: Sequence[EncodedText], rules: BatchRules) -> list[str]:
    """Warn where a graph of fixed sequence length reads padding that it has no mask to ignore."""
    length = rules.sequence_length
    if length is None or rules.has_mask:
        return []
    count = sum(len(text) < length for text in texts)
    padded = f"{count} of {len(texts)} texts are padded to {length} tokens"
    return [f"{padded}, and the padding is not masked: the graph has no mask input"] if count else []
