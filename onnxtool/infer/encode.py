"""Run texts through a model and say what it makes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.infer.answers import Answer, AnswerRule, Batch, Interpreter
from onnxtool.infer.pooling import cosine_similarities
from onnxtool.infer.tasks import deduce_task, rule_for, stated_task
from onnxtool.model_file import ModelFile
from onnxtool.reports import InferReport, TextAnswer
from onnxtool.runtime.feeds import index_bounds, is_mask
from onnxtool.runtime.session import Session, open_session
from onnxtool.texts.checkpoint_folder import find_checkpoint_folder
from onnxtool.texts.feeds import text_feeds
from onnxtool.texts.inputs import TextInput
from onnxtool.texts.limits import Limit, fixed_shape, text_limit
from onnxtool.texts.tokenizer import EncodedText, TextTokenizer

# Texts are read and sorted by length this many at a time, so that batches are even and a corpus of any size fits.
_TEXTS_AT_A_TIME = 1024
_MAX_BATCH_SIZE = 32
# Bounds the memory of logits: 256 MB of float32, which is 2200 tokens of BERT's vocabulary.
_MAX_OUTPUT_ELEMENTS = 1 << 26
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
    model = ModelFile.open(model_path)
    folder = find_checkpoint_folder(model, model_name)
    tokenizer = TextTokenizer(folder)
    task = stated_task(model) or deduce_task(model, folder, tokenizer.vocabulary_size)
    limit = text_limit(model, folder, task)
    if limit is not None:
        tokenizer.truncate_to(limit)
    on_progress(f"loading {model_path}")
    session = open_session(model_path, provider=provider, threads=threads)
    runner = _Runner(session, tokenizer, rule_for(task, model, folder), Interpreter(tokenizer, folder, top_k))
    encoded: list[EncodedText] = []
    answers: list[Answer] = []
    for start in range(0, len(named), _TEXTS_AT_A_TIME):
        part = named[start : start + _TEXTS_AT_A_TIME]
        on_progress(f"running texts {start + 1} to {start + len(part)} of {len(named)}")
        read = tokenizer.encode([text.contents for text in part])
        _require_tokens(part, read, first=start + 1)
        answers += runner.answer(read)
        encoded += read
    notes = [] if stated_task(model) else [f"the model does not say what it is for; read as {task} from its outputs"]
    return InferReport(
        model=str(model_path),
        provider=session.provider,
        task=task,
        kind=runner.rule.kind,
        answers=tuple(_text_answer(*item) for item in zip(named, encoded, answers, strict=True)),
        similarities=_similarities(answers, notes),
        notes=(
            *notes,
            *_truncation_note(encoded, limit),
            *_padding_note(encoded, model),
            *dict.fromkeys(answer.note for answer in answers if answer.note),
        ),
    )


@dataclass(frozen=True)
class _Runner:
    """A session and what turns texts into its inputs and its outputs into answers."""

    session: Session
    tokenizer: TextTokenizer
    rule: AnswerRule
    interpreter: Interpreter

    def answer(self, texts: Sequence[EncodedText]) -> list[Answer]:
        """Answer for each of `texts`, in their order, running those of similar length together.

        Where the graph has no mask to ignore padding by, only those of equal length.
        """
        model = self.session.model
        batch_size, sequence_length = fixed_shape(model)
        bound = index_bounds(model).get("input_ids")
        answers: dict[int, Answer] = {}
        # A fixed sequence length pads every text to the same length, whatever its neighbours are.
        may_pad = _has_mask(model) or sequence_length is not None
        for places in _batches([len(text) for text in texts], _batch_limits(model), may_pad=may_pad):
            together = [texts[place] for place in places]
            # A graph with a fixed batch gets the last text again until it is full.
            filled = together + [together[-1]] * ((batch_size or 0) - len(together))
            arrays = self.tokenizer.pad(filled, sequence_length)
            if bound is not None and arrays["input_ids"].max() >= bound:
                raise InputError(
                    f"the tokenizer gives token {arrays['input_ids'].max()}, and {model.path} knows {bound} tokens",
                    "the tokenizer belongs to another model; pass --model_name with the right one",
                )
            outputs = self.session.run(text_feeds(model, arrays))
            batch = Batch(
                together,
                arrays["input_ids"][: len(together)],
                arrays["attention_mask"][: len(together)].astype(bool),
                {name: _without_filling(array, len(together), len(filled)) for name, array in outputs.items()},
            )
            answers.update(zip(places, self.rule.answer(batch, self.interpreter), strict=True))
        return [answers[place] for place in range(len(texts))]


def _batch_limits(model: ModelFile) -> tuple[int, int]:
    """Return how many texts, and how many tokens with their padding, may run at once."""
    names = {info.name for info in model.structure.outputs}
    batch_size, _ = fixed_shape(model)
    if batch_size is None:
        batch_size = 1 if "output_idx" in names else _MAX_BATCH_SIZE  # Anserini's outputs have no batch axis
    widths = [info.shape[2] for info in model.structure.outputs if len(info.shape) == 3]
    widest = max((width for width in widths if isinstance(width, int)), default=1)
    return batch_size, max(1, _MAX_OUTPUT_ELEMENTS // max(1, widest))


def _has_mask(model: ModelFile) -> bool:
    return any(is_mask(info) for info in model.structure.inputs)


def _batches(lengths: Sequence[int], limits: tuple[int, int], *, may_pad: bool) -> Iterator[list[int]]:
    """Yield the places of texts that run together, the shortest texts first; of equal length unless they `may_pad`."""
    max_texts, max_tokens = limits
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        # The text about to be added is the longest so far, and the others will be padded to it.
        is_full = len(batch) == max_texts or (len(batch) + 1) * lengths[place] > max_tokens
        if batch and (is_full or (not may_pad and lengths[place] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _without_filling(array: NDArray[Any], num_texts: int, num_rows: int) -> NDArray[Any]:
    return array[:num_texts] if num_texts < num_rows and array.shape[:1] == (num_rows,) else array


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


def _padding_note(texts: Sequence[EncodedText], model: ModelFile) -> list[str]:
    """Warn where a graph of fixed sequence length reads padding that it has no mask to ignore."""
    sequence_length = fixed_shape(model)[1]
    if sequence_length is None or _has_mask(model):
        return []
    count = sum(len(text) < sequence_length for text in texts)
    padded = f"{count} of {len(texts)} texts are padded to {sequence_length} tokens"
    return [f"{padded}, and the padding is not masked: the graph has no mask input"] if count else []
