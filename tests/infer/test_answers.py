"""Answers are those that loops over the tokens of each text give."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import InputError, SessionError
from onnxtool.infer.report import Ranking
from tests.infer.tiny_models import (
    MASK,
    POOLED,
    TEXTS,
    VOCABULARY,
    TinyModel,
    ids_of,
    infer,
    model_for,
    save_graph,
    scores_of,
    splade_terms,
    table,
    write_checkpoint,
    write_model,
)

Table = NDArray[np.floating[Any]]

V = len(VOCABULARY)


def _softmax(logits: list[float]) -> list[float]:
    exponentials = [math.exp(value) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_sparse_encoder_is_answered_with_weighted_terms(tmp_path: Path, dtype: type) -> None:
    """All positive ones, where enough are asked for; each text as it would be by itself."""
    values: Table = table(V, V).astype(dtype)
    report = infer(write_model(tmp_path, model_for("sparse-encoding", values, "logits")), TEXTS, top_k=V)
    assert report.kind == "terms"
    assert report.task == "sparse-encoding"
    assert report.notes == ()
    for text, scores in zip(TEXTS, scores_of(report), strict=True):
        assert scores == pytest.approx(splade_terms(values, text), rel=1e-6)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)


def test_a_pooled_sparse_encoder_needs_no_pooling(tmp_path: Path) -> None:
    """The head splade computes the weights in the graph; they are read as they are."""
    values = np.abs(table(V, V))
    model = model_for("sparse-encoding", values, "sparse", pooled=True)
    report = infer(write_model(tmp_path, model), TEXTS, top_k=3)
    for text, scores in zip(TEXTS, scores_of(report), strict=True):
        sums = {VOCABULARY[t]: sum(float(values[i, t]) for i in ids_of(text)) for t in range(V) if t not in {0, 2, 3}}
        best = sorted(sums.items(), key=lambda item: -item[1])[:3]
        assert scores == pytest.approx(dict(best), rel=1e-5)


def test_outputs_of_anserini_are_read_as_terms(tmp_path: Path) -> None:
    """Ids and weights of one text at a time, without an axis for the batch."""
    nodes = [
        helper.make_node("Squeeze", ["input_ids", "first_axis"], ["output_idx"]),
        helper.make_node("Cast", ["output_idx"], ["output_weights"], to=TensorProto.FLOAT),
    ]
    path = save_graph(
        tmp_path / "model.onnx",
        nodes,
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "L"])],
        [
            helper.make_tensor_value_info("output_idx", TensorProto.INT64, ["N"]),
            helper.make_tensor_value_info("output_weights", TensorProto.FLOAT, ["N"]),
        ],
        [numpy_helper.from_array(np.array([0], np.int64), "first_axis")],
    )
    write_checkpoint(tmp_path / "model")
    report = infer(path, TEXTS[:2])
    assert report.kind == "terms"
    assert scores_of(report) == [{word: VOCABULARY.index(word) for word in text.split()} for text in TEXTS[:2]]


def test_an_encoder_is_answered_with_similarities(tmp_path: Path) -> None:
    """Cosines of the means over the tokens, as the checkpoint's pooling says, for every pair."""
    values = table(V, 6)
    report = infer(
        write_model(tmp_path, model_for("sentence-similarity", values, "last_hidden_state"), modules=POOLED), TEXTS
    )
    means = [np.mean([values[token] for token in ids_of(text)], axis=0).astype(float).tolist() for text in TEXTS]
    assert report.kind == "similarities"
    for i, a in enumerate(means):
        for j, b in enumerate(means):
            wanted = sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
            assert report.similarities[i][j] == pytest.approx(wanted, abs=1e-6)
    assert report.answers[0].outputs == {"sentence_embedding": (6,)}
    assert report.answers[0].candidates == ()
    assert report.notes == ()


def test_an_embedding_of_the_graph_is_taken_as_it_is(tmp_path: Path) -> None:
    """Whatever the checkpoint says of pooling: the graph has done it."""
    values = table(V, 6)
    model = model_for("sentence-similarity", values, "sentence_embedding", pooled=True)
    report = infer(write_model(tmp_path, model, modules={"Transformer": {}, "Dense": {}}), ["cat", "dog"])
    a, b = (np.sum([values[token] for token in ids_of(text)], axis=0).astype(float) for text in ("cat", "dog"))
    assert report.similarities[0][1] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-6)


def test_one_text_has_nothing_to_be_similar_to(tmp_path: Path) -> None:
    """The shape of its embedding is what there is to say."""
    model = model_for("sentence-similarity", table(V, 6), "last_hidden_state")
    report = infer(write_model(tmp_path, model, modules=POOLED), ["cat"])
    assert report.similarities == ()
    assert report.answers[0].outputs == {"sentence_embedding": (6,)}


def test_a_checkpoint_without_pooling_is_averaged_with_a_note(tmp_path: Path) -> None:
    """The note is there once, however many texts there are."""
    model = model_for("sentence-similarity", table(V, 6), "last_hidden_state")
    report = infer(write_model(tmp_path, model), TEXTS)
    assert report.notes == ("the checkpoint does not say how to pool; these are means over the tokens",)


def test_layers_that_the_graph_lacks_are_not_skipped(tmp_path: Path) -> None:
    """An embedding without the checkpoint's last layer would be another embedding."""
    model = model_for("sentence-similarity", table(V, 6), "last_hidden_state")
    path = write_model(tmp_path, model, modules={**POOLED, "WordWeights": {}})
    with pytest.raises(InputError, match="has the modules WordWeights, which onnxtool does not compute") as caught:
        infer(path, TEXTS)
    assert "use sentence-transformers for this checkpoint" in caught.value.hint
    assert "it computes Pooling, SpladePooling, Dense, LayerNorm, Normalize" in caught.value.message


def test_a_masked_language_model_fills_in_masks(tmp_path: Path) -> None:
    """With the probabilities of the softmax over the vocabulary; two masks share a list, by their number."""
    values = table(V, V)
    path = write_model(tmp_path, model_for("fill-mask", values, "logits"))
    report = infer(path, ["the [MASK] sat", "no mask in a long text here", "[MASK] [MASK]"], top_k=2)
    wanted = _softmax([float(value) for value in values[MASK]])
    best = sorted(range(V), key=lambda token: -wanted[token])[:2]
    one, none, two = scores_of(report)
    assert report.kind == "tokens"
    assert one == pytest.approx({VOCABULARY[token]: wanted[token] for token in best}, rel=1e-6)
    assert none == {}
    assert list(two) == [f"{mask}: {VOCABULARY[token]}" for mask in (1, 2) for token in best]
    (note,) = report.notes
    assert note.startswith("a text without [MASK] has nothing to fill in; write [MASK] for a word, or export the check")
    assert note.endswith("with --head splade if it is a SPLADE")


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification", None])
def test_a_classifier_is_answered_with_labels(tmp_path: Path, problem_type: str | None) -> None:
    """Softmax over labels that exclude each other, a sigmoid for each where several may hold."""
    values = (table(V, 3) / 4).astype(np.float32)
    names = {"0": "no", "1": "yes", "2": "maybe"}
    model = model_for("text-classification", values, "logits", pooled=True)
    path = write_model(tmp_path, model, config={"id2label": names, "problem_type": problem_type})
    report = infer(path, TEXTS)
    assert report.kind == "labels"
    for text, scores in zip(TEXTS, scores_of(report), strict=True):
        logits = [sum(float(values[token, label]) for token in ids_of(text)) for label in range(3)]
        if problem_type == "multi_label_classification":
            wanted = [1 / (1 + math.exp(-logit)) for logit in logits]
        else:
            wanted = _softmax(logits)
        # float32 sums in the graph.
        assert scores == pytest.approx(dict(zip(names.values(), wanted, strict=True)), rel=1e-5)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, lambda logit: 1 / (1 + math.exp(-logit))),
        ({"problem_type": "regression"}, lambda logit: logit),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, math.tanh),
    ],
)
def test_a_single_label_is_a_score(
    tmp_path: Path, config: dict[str, Any], activation: Callable[[float], float]
) -> None:
    """By the activation that the checkpoint names, else a sigmoid, as CrossEncoder of sentence-transformers has it."""
    values = (table(V, 1) / 2).astype(np.float32)
    path = write_model(tmp_path, model_for("text-classification", values, "logits", pooled=True), config=config)
    report = infer(path, ["red cat", "dog"])
    assert report.kind == "scores"
    for text, scores in zip(("red cat", "dog"), scores_of(report), strict=True):
        logit = sum(float(values[token, 0]) for token in ids_of(text))
        # A label without a name gets transformers' placeholder.
        assert scores == pytest.approx({"LABEL_0": activation(logit)}, rel=1e-5)


def test_an_activation_that_is_not_computed_here_is_refused(tmp_path: Path) -> None:
    """A score by another function would be another score."""
    model = model_for("text-classification", table(V, 1), "logits", pooled=True)
    config = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmin"}}
    with pytest.raises(InputError, match="by torch.nn.modules.activation.Softmin, which is not computed"):
        infer(write_model(tmp_path, model, config=config), ["red cat"])


def test_texts_are_ranked_for_each_query(tmp_path: Path) -> None:
    """Best first, in the order in which the queries come; answers stay in the order of the texts."""
    values = np.zeros((V, 1), np.float32)
    values[VOCABULARY.index("cat")], values[VOCABULARY.index("dog")] = 2.0, 1.0
    path = write_model(tmp_path, model_for("text-classification", values, "logits", pooled=True))
    report = infer(path, [("a", "dog"), ("the", "mat"), ("a", "cat"), ("the", "cat"), ("a", "dog")])
    assert report.rankings == (Ranking("a", (2, 0, 4)), Ranking("the", (3, 1)))
    assert [answer.query for answer in report.answers] == ["a", "the", "a", "the", "a"]


def test_words_of_a_tagger_without_entities_have_their_label(tmp_path: Path) -> None:
    """In the order of the text, special tokens left out; parts of speech are no entities to put together."""
    values = table(V, 2)
    config = {"id2label": {"0": "VERB", "1": "NOUN"}}
    path = write_model(tmp_path, model_for("token-classification", values, "logits"), config=config)
    report = infer(path, TEXTS)
    for text, answer in zip(TEXTS, report.answers, strict=True):
        wanted, start = [], 0
        for word, token in zip(text.split(), ids_of(text)[1:-1], strict=True):
            probabilities = _softmax([float(value) for value in values[token]])
            label = max((0, 1), key=lambda index: probabilities[index])
            wanted.append((("VERB", "NOUN")[label], word, start, start + len(word)))
            start += len(word) + 1
        assert [(span.label, span.text, span.start, span.end) for span in answer.spans] == wanted


@pytest.mark.parametrize(
    ("labels", "entities"),
    [
        ("O B-PER I-PER O", [("PER", "cat dog")]),
        ("B-PER B-PER I-PER O", [("PER", "a"), ("PER", "cat dog")]),
        ("I-PER I-PER I-LOC O", [("PER", "a cat"), ("LOC", "dog")]),
        ("B-PER O I-PER I-PER", [("PER", "a"), ("PER", "dog sat")]),
        ("S-PER B-PER E-PER S-PER", [("PER", "a"), ("PER", "cat dog"), ("PER", "sat")]),
        ("PER PER LOC O", [("PER", "a cat"), ("LOC", "dog")]),
    ],
)
def test_words_of_an_entity_are_put_together(tmp_path: Path, labels: str, entities: list[tuple[str, str]]) -> None:
    """By the schemes BIO, BIOES and BILOU; what is outside is left out."""
    words, names = ("a", "cat", "dog", "sat"), sorted({*labels.split(), "O"})
    values = np.zeros((V, len(names)), np.float32)
    for word, label in zip(words, labels.split(), strict=True):
        values[VOCABULARY.index(word), names.index(label)] = 9.0
    config = {"id2label": {str(index): name for index, name in enumerate(names)}}
    path = write_model(tmp_path, model_for("token-classification", values, "logits"), config=config)
    (answer,) = infer(path, [" ".join(words)]).answers
    assert [(span.label, span.text) for span in answer.spans] == entities


def test_any_other_model_is_answered_with_the_shapes_of_its_outputs(tmp_path: Path) -> None:
    """Those that it gives for each text by itself, without the padding of the batch."""
    report = infer(write_model(tmp_path, model_for("object-detection", table(V, 6), "anything")), TEXTS)
    assert report.kind == "shapes"
    assert [a.outputs for a in report.answers] == [{"anything": (1, len(ids_of(text)), 6)} for text in TEXTS]


def test_a_model_without_metadata_says_how_it_was_read(tmp_path: Path) -> None:
    """The guess is a note, so that a wrong one is not taken for an answer."""
    report = infer(write_model(tmp_path, TinyModel(table(V, V), "logits")), ["a [MASK]"])
    assert report.task == "fill-mask"
    assert report.notes == ("the model does not say what it is for; read as fill-mask from its outputs",)


@pytest.mark.parametrize(
    ("task", "width", "output", "pooled"),
    [
        ("sparse-encoding", V, "logits", False),
        ("sparse-encoding", V, "sparse", True),
        ("sentence-similarity", 4, "last_hidden_state", False),
        ("fill-mask", V, "logits", False),
        ("text-classification", 3, "logits", True),
        ("text-classification", 1, "logits", True),
        ("token-classification", 3, "logits", False),
    ],
)
def test_a_model_that_gives_no_numbers_fails(tmp_path: Path, task: str, width: int, output: str, pooled: bool) -> None:
    """NaN, of fp16 that overflows for one, would sort among the scores like an answer."""
    values = table(V, width)
    values[MASK] = np.nan
    path = write_model(tmp_path, model_for(task, values, output, pooled=pooled))
    with pytest.raises(SessionError, match="not a finite number"):
        infer(path, ["cat", "a [MASK]"])


def test_metadata_that_does_not_fit_the_graph_is_refused(tmp_path: Path) -> None:
    """A task is stamped into the file, and the output it needs is not there."""
    path = write_model(tmp_path, model_for("fill-mask", table(V, V), "logits", pooled=True))
    with pytest.raises(InputError, match=f"no output logits of 3 axes; it has logits \\[1, {V}\\]"):
        infer(path, ["a [MASK]"])
