"""Answers are those of transformers itself: of its pipelines where it has one, else of the model and a loop.

The models are exported from checkpoints with random weights and BERT's own tokenizer. Scores agree to float32's
rounding over two layers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from onnxtool.infer import LoadedModel, LongTexts, load
from tests import generators
from tests.infer.tiny_models import TEXTS as WORDS
from tests.workshop import Workshop

TEXTS = (
    "Angela Merkel unaffably visited New York City yesterday, with Mr. Smith-Jones of the U.N. in San Francisco.",
    "Berlin",
    "tokenization of supercalifragilistic words in 1990s, isn't it?",
)
QUERY = "who visited New York?"
ROUNDING = 1e-5

pytestmark = pytest.mark.slow


def _loaded(workshop: Workshop, name: str) -> tuple[Path, LoadedModel]:
    return workshop.checkpoint(name), load(workshop.exported(name, exporter="torchscript"), provider="cpu")


def _tokenized(checkpoint: Path, *texts: Any, **options: Any) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return tokenizer(*texts, return_tensors="pt", truncation=True, max_length=64, **options)


def test_entities_are_those_of_the_token_classification_pipeline(workshop: Workshop) -> None:
    """With the aggregation strategy `first`: places, labels and scores."""
    checkpoint, model = _loaded(workshop, "tiny-ner")
    pipeline = transformers.pipeline("token-classification", model=str(checkpoint), aggregation_strategy="first")
    for text, answer in zip(TEXTS, model.answer(TEXTS).answers, strict=True):
        wanted = pipeline(text)
        assert [(s.label, s.start, s.end) for s in answer.spans] == [
            (entity["entity_group"], entity["start"], entity["end"]) for entity in wanted
        ]
        scores = [float(entity["score"]) for entity in wanted]
        assert [span.score for span in answer.spans] == pytest.approx(scores, abs=ROUNDING)
        assert [span.text for span in answer.spans] == [text[span.start : span.end] for span in answer.spans]
    assert len(model.answer(TEXTS).answers[0].spans) > 5


def test_labels_are_those_of_the_text_classification_pipeline(workshop: Workshop) -> None:
    """All of them, best first, with their scores."""
    checkpoint, model = _loaded(workshop, "tiny-classifier")
    pipeline = transformers.pipeline("text-classification", model=str(checkpoint), top_k=10)
    for answer, wanted in zip(model.answer(TEXTS).answers, pipeline(list(TEXTS)), strict=True):
        assert list(answer.scores) == [label["label"] for label in wanted]
        assert list(answer.scores.values()) == pytest.approx([label["score"] for label in wanted], abs=ROUNDING)


def test_pairs_are_scored_as_the_model_scores_them(workshop: Workshop) -> None:
    """With their segments, cut by `longest_first`, and by a sigmoid, which is the default of CrossEncoder."""
    checkpoint, model = _loaded(workshop, "tiny-reranker")
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    long, longer = "red blue " * 30, "one two three " * 40
    pairs = [(QUERY, text) for text in TEXTS] + [(QUERY, longer), (longer, QUERY), (long, longer), (longer, long)]
    report = model.answer(pairs)
    for pair, answer in zip(pairs, report.answers, strict=True):
        with torch.no_grad():
            logit = reference(**_tokenized(checkpoint, *pair)).logits.item()
        assert answer.candidates[0].score == pytest.approx(1 / (1 + math.exp(-logit)), abs=ROUNDING)
    assert [answer.truncated for answer in report.answers] == [False] * 3 + [True] * 4
    assert "4 of 7 texts were cut to 64 tokens" in report.notes[0]


def test_a_long_document_is_as_relevant_as_its_best_window(workshop: Workshop) -> None:
    """Where the query is short, the tokenizers library parts the document alike, with a stride."""
    checkpoint, model = _loaded(workshop, "tiny-reranker")
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    document = " ".join(f"{word} of number {place}" for place, word in enumerate(["red", "blue", "cat"] * 15))
    windows = _tokenized(checkpoint, QUERY, document, stride=10, return_overflowing_tokens=True, padding=True)
    windows.pop("overflow_to_sample_mapping")
    with torch.no_grad():
        logits = reference(**windows).logits
    (answer,) = model.answer([(QUERY, document)], long=LongTexts("window", 10)).answers
    assert answer.num_windows == len(logits) > 3
    assert answer.candidates[0].score == pytest.approx(torch.sigmoid(logits).max().item(), abs=ROUNDING)


def test_the_answer_to_a_question_is_the_span_of_highest_probability(workshop: Workshop) -> None:
    """Worked out in a loop over all spans of up to 15 tokens, by the rules of transformers' former pipeline."""
    checkpoint, model = _loaded(workshop, "tiny-reader")
    reference = transformers.AutoModelForQuestionAnswering.from_pretrained(checkpoint).eval()
    for text, answer in zip(TEXTS, model.answer(TEXTS, query=QUERY, top_k=4).answers, strict=True):
        encoded = _tokenized(checkpoint, QUERY, text, return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            outputs = reference(**encoded)
        parts, words = encoded.sequence_ids(0), encoded.word_ids(0)
        possible = [part == 1 or place == 0 for place, part in enumerate(parts)]
        start, end = (
            torch.where(torch.tensor(possible), logits[0].double(), -torch.inf).softmax(0).tolist()
            for logits in (outputs.start_logits, outputs.end_logits)
        )
        wanted: dict[tuple[int, int], float] = {}
        for first in (place for place, part in enumerate(parts) if part == 1):
            for last in range(first, min(first + 15, len(parts))):
                if parts[last] != 1:
                    break
                begin = min(o[0] for o, w, p in zip(offsets, words, parts, strict=True) if p == 1 and w == words[first])
                stop = max(o[1] for o, w, p in zip(offsets, words, parts, strict=True) if p == 1 and w == words[last])
                wanted[begin, stop] = wanted.get((begin, stop), 0.0) + start[first] * end[last]
        best = sorted(wanted.items(), key=lambda item: -item[1])[:4]
        assert [(span.start, span.end) for span in answer.spans] == [place for place, _ in best]
        assert [span.score for span in answer.spans] == pytest.approx([score for _, score in best], abs=ROUNDING)


def test_an_answer_is_found_beyond_the_first_window(workshop: Workshop) -> None:
    """Texts for a question are read in windows where nothing else is asked for; the span is of the whole text."""
    _, model = _loaded(workshop, "tiny-reader")
    text = "word number one and two " * 40
    report = model.answer([text], query=QUERY)
    assert report.answers[0].num_windows > 3
    assert any(span.start > 300 for span in model.answer([text], query=QUERY, top_k=60).answers[0].spans)
    assert all(text[span.start : span.end] == span.text for span in report.answers[0].spans)
    assert model.answer([text], query=QUERY, long="truncate").answers[0].truncated


def test_the_next_tokens_are_those_of_the_language_model(workshop: Workshop) -> None:
    """Of texts of several lengths at once, and the end of a long text counts."""
    checkpoint, model = _loaded(workshop, "tiny-decoder")
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for text, answer in zip(TEXTS, model.answer(TEXTS, top_k=5).answers, strict=True):
        with torch.no_grad():
            logits = reference(input_ids=_tokenized(checkpoint, text)["input_ids"]).logits[0, -1]
        scores, ids = logits.softmax(0).topk(5)
        assert list(answer.scores) == [tokenizer.decode([token]).strip() for token in ids]
        assert list(answer.scores.values()) == pytest.approx(scores.tolist(), abs=ROUNDING)
    ends = [model.answer([f"{start} {'cat ' * 70}"]).answers[0].scores for start in ("dog", "mat " * 9)]
    assert ends[0] == ends[1]


def test_a_decoder_with_a_cache_starts_with_an_empty_one(workshop: Workshop) -> None:
    """The candidates are those of the language model all the same."""
    model, reference = load(generators.exported(workshop, "llama"), provider="cpu"), generators.make_model("llama")
    assert any("past" in name for name in model.session.input_names)
    for text, answer in zip(model.tokenize(WORDS), model.answer(WORDS, top_k=5).answers, strict=True):
        with torch.no_grad():
            scores, ids = reference(input_ids=torch.tensor([text.ids])).logits[0, -1].softmax(0).topk(5)
        assert list(answer.scores) == [model.tokenizer.word(token) for token in ids.tolist()]
        np.testing.assert_allclose(list(answer.scores.values()), scores.numpy(), atol=ROUNDING)
