"""Texts are answered in their order and alike however they were batched, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError, ModelFileError
from onnxtool.infer import TextInput, answering
from onnxtool.infer.heads import head as heads
from onnxtool.progress import listening
from onnxtool.runtime.running import Session
from tests.infer.tiny_models import (
    POOLED,
    TEXTS,
    VOCABULARY,
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

V = len(VOCABULARY)


def test_similarities_of_a_corpus_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of all pairs grows with the square of the texts."""
    monkeypatch.setattr(answering, "MAX_SIMILARITIES", 2)
    model = model_for("sentence-similarity", table(V, 6), "last_hidden_state")
    path = write_model(tmp_path, model, modules=POOLED)
    report = infer(path, TEXTS)
    assert report.similarities == ()
    assert report.notes == ("no similarities: 5 texts, and pairs are compared up to 2 texts",)


@pytest.mark.parametrize(("stated", "is_said"), [("dot", True), ("cosine", False), (None, False)])
def test_cosines_are_named_where_the_checkpoint_compares_otherwise(
    tmp_path: Path, stated: str | None, is_said: bool
) -> None:
    """sentence-transformers' `similarity` would give other numbers."""
    path = write_model(tmp_path, model_for("sentence-similarity", table(V, 6), "last_hidden_state"), modules=POOLED)
    (path.with_suffix("") / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": stated}))
    notes = infer(path, TEXTS[:2]).notes
    assert any("the checkpoint compares vectors by dot" in note for note in notes) == is_said


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_texts_are_answered_alike_in_batches_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Many texts of mixed lengths come back in their order, also over the end of a chunk."""
    monkeypatch.setattr(heads, "_MAX_BATCH_SIZE", batch_size)
    monkeypatch.setattr(answering, "_TEXTS_AT_A_TIME", 7)
    values = table(V, V)
    generator = np.random.default_rng(5)
    texts = [" ".join(generator.choice(VOCABULARY[5:], generator.integers(1, 12))) for _ in range(20)]
    stages: list[str] = []
    path = write_model(tmp_path, model_for("sparse-encoding", values, "logits"))
    with listening(stages.append):
        report = infer(path, texts, top_k=V)
    assert [answer.text for answer in report.answers] == texts
    for text, scores in zip(texts, scores_of(report), strict=True):
        assert scores == pytest.approx(splade_terms(values, text), rel=1e-6)
    assert stages[1:] == [f"running text {first} of 20" for first in (1, 8, 15)]


def test_wide_outputs_bound_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many tokens run at once as their logits may take memory, and at least one text."""
    monkeypatch.setattr(heads, "_MAX_OUTPUT_ELEMENTS", 8 * V)
    shapes = _watch_shapes(monkeypatch)
    infer(write_model(tmp_path, model_for("sparse-encoding", table(V, V), "logits")), TEXTS)
    lengths = sorted(len(ids_of(text)) for text in TEXTS)
    assert lengths == [3, 4, 4, 8, 10]
    assert shapes == [(2, 4), (1, 4), (1, 8), (1, 10)]


def test_a_graph_of_fixed_shape_gets_that_shape(tmp_path: Path) -> None:
    """Batches are filled up, texts are padded or cut to its length, and the filling is not answered."""
    values = table(V, V)
    model = model_for("sparse-encoding", values, "logits", fixed=(4, 8))
    report = infer(write_model(tmp_path, model), TEXTS, top_k=V)
    assert [answer.truncated for answer in report.answers] == [False, False, False, True, False]
    assert [answer.num_tokens for answer in report.answers] == [8, 4, 4, 8, 3]
    assert report.notes == ("1 of 5 texts were cut to 8 tokens (the shape of the input input_ids)",)
    assert scores_of(report)[1] == pytest.approx(splade_terms(values, TEXTS[1]), rel=1e-6)


def test_a_text_that_is_too_long_is_cut_and_said_so(tmp_path: Path) -> None:
    """The graph would fail on it; the files say where it must end."""
    values = table(V, V)
    model = model_for("sparse-encoding", values, "logits", positions=6)
    path = write_model(tmp_path, model, config={"max_position_embeddings": 6})
    report = infer(path, TEXTS, top_k=V)
    assert [answer.truncated for answer in report.answers] == [True, False, False, True, False]
    assert scores_of(report)[0] == pytest.approx(splade_terms(values, "the cat sat on"), rel=1e-6)
    assert report.notes == ("2 of 5 texts were cut to 6 tokens (max_position_embeddings of config.json)",)


@pytest.mark.parametrize("inputs", [("input_ids",), ("token_type_ids", "input_ids")])
@pytest.mark.parametrize("dtype", [TensorProto.INT64, TensorProto.INT32])
def test_the_graph_gets_the_inputs_that_it_has_in_its_dtype(
    tmp_path: Path, inputs: tuple[str, ...], dtype: int
) -> None:
    """A model without segments is as common as one with 32-bit ids."""
    values = table(V, V)
    model = model_for("sparse-encoding", values, "logits", inputs=inputs, dtype=dtype)
    report = infer(write_model(tmp_path, model), ["red cat"], top_k=V)
    assert scores_of(report) == [pytest.approx(splade_terms(values, "red cat"), rel=1e-6)]


def test_without_a_mask_an_answer_does_not_depend_on_the_neighbours(tmp_path: Path) -> None:
    """The graph would read padding, so that only texts of equal length run together."""
    model = model_for("sparse-encoding", np.abs(table(V, V)), "sparse", pooled=True, inputs=("input_ids",))
    path = write_model(tmp_path, model)
    report = infer(path, TEXTS, top_k=V)
    assert report.notes == ()
    for text, scores in zip(TEXTS, scores_of(report), strict=True):
        assert scores_of(infer(path, [text], top_k=V)) == [pytest.approx(scores, rel=1e-6)]


def test_without_a_mask_texts_of_equal_length_still_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run for each text would cost time and change nothing."""
    shapes = _watch_shapes(monkeypatch)
    infer(write_model(tmp_path, model_for("fill-mask", table(V, V), "logits", inputs=("input_ids",))), TEXTS)
    assert shapes == [(1, 3), (2, 4), (1, 8), (1, 10)]


def test_padding_to_a_fixed_length_that_is_not_masked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph takes no other length; its answers depend on the padding, though not on the neighbours."""
    shapes = _watch_shapes(monkeypatch)
    model = model_for("sparse-encoding", table(V, V), "sparse", pooled=True, inputs=("input_ids",), fixed=(None, 8))
    path = write_model(tmp_path, model)
    assert infer(path, TEXTS[:2]).notes == (
        "1 of 2 texts are padded to 8 tokens, and the padding is not masked: the graph has no mask input",
    )
    assert shapes == [(2, 8)]
    assert infer(path, TEXTS[:1]).notes == ()


def _watch_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which every run adds the shape of its ids."""
    shapes: list[tuple[int, ...]] = []
    run = Session.run

    def watched(session: Session, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        shapes.append(feeds["input_ids"].shape)
        return run(session, feeds)

    monkeypatch.setattr(Session, "run", watched)
    return shapes


def test_an_input_of_text_is_refused(tmp_path: Path) -> None:
    """A graph with a tokenizer inside takes strings, which is another contract."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Identity", ["input_ids"], ["texts"])],
        [helper.make_tensor_value_info("input_ids", TensorProto.STRING, ["b", "s"])],
        [helper.make_tensor_value_info("texts", TensorProto.STRING, ["b", "s"])],
    )
    write_checkpoint(tmp_path / "model")
    with pytest.raises(InputError, match="input_ids is of dtype string"):
        infer(path, ["red cat"])


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Before onnxruntime reads beyond the end of the table."""
    path = write_model(tmp_path, model_for("sparse-encoding", table(V - 5, V), "logits"))
    with pytest.raises(InputError, match=f"gives token {V - 1}, and .* knows {V - 5} tokens") as caught:
        infer(path, ["cat", "a house"])
    assert "--model_name" in caught.value.hint


def test_ids_stay_with_their_texts(tmp_path: Path) -> None:
    """A text of a corpus is known by its id, one from the command line has none."""
    path = write_model(tmp_path, model_for("sparse-encoding", table(V, V), "logits"))
    report = infer(path, [TextInput("the cat sat", "d1"), "dog"])
    assert [(answer.id, answer.text) for answer in report.answers] == [("d1", "the cat sat"), (None, "dog")]


def test_nothing_to_run_is_an_error(tmp_path: Path) -> None:
    """No texts, no candidates, no model, no tokens."""
    path = write_model(tmp_path, model_for("sparse-encoding", table(V, V), "logits"))
    with pytest.raises(InputError, match="no texts to run"):
        infer(path, [])
    with pytest.raises(InputError, match="top_k: 0 is not"):
        infer(path, ["cat"], top_k=0)
    with pytest.raises(ModelFileError, match="no such model file"):
        infer(tmp_path / "missing.onnx", ["cat"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "text 1 has no tokens: ''"),
        (["", "cat"], "text 1 has no tokens: ''"),
        (["cat", "dog", TextInput("  ", "d7")], "text 3 has no tokens: '  '"),
    ],
)
def test_a_text_without_a_single_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str | TextInput], message: str
) -> None:
    """A tokenizer that adds no special tokens makes nothing of it; it is named, whatever runs beside it."""
    monkeypatch.setattr(answering, "_TEXTS_AT_A_TIME", 2)
    path = write_model(tmp_path, model_for("sparse-encoding", table(V, V), "logits"))
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = TextTokenizer(CheckpointFolder(tmp_path / "model"))
    tokenizer._tokenizer.post_processor = None
    tokenizer._tokenizer.save(str(file))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # which follows the file; BERT's own adds them
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message) as caught:
        infer(path, texts)
    assert "leave it out" in caught.value.hint
