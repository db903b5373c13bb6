"""Texts that are longer than the model takes: cut, refused, or read in windows that are put together exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool.checkpoint.limits import EncodedText, ReadOptions, TokenOffsets
from onnxtool.errors import InputError
from onnxtool.infer import LoadedModel, LongTexts, SparseVectors, load
from onnxtool.infer.heads.labels import LabelNames
from onnxtool.infer.heads.spans import Entities, TaggedToken
from tests.infer.tiny_models import (
    CLS,
    SEP,
    VOCABULARY,
    ids_of,
    model_for,
    rows_of,
    splade_terms,
    table,
    write_model,
)

V = len(VOCABULARY)
LONG = "the cat sat on the mat a dog red house the red dog sat on a blue mat"
TEXTS = ("a dog", LONG, "red house", f"{LONG} {LONG} cat")
# A lookup knows no context, so that the windows of a text are the text.
LIMIT = {"max_position_embeddings": 8}


def _loaded(path: Path, task: str, width: int, output: str, **files: Any) -> LoadedModel:
    model = model_for(task, table(V, width), output)
    return load(write_model(path, model, config=LIMIT, **files), provider="cpu")


@pytest.mark.parametrize("overlap", [None, 0, 3])
def test_terms_of_windows_are_the_terms_of_the_whole_text(tmp_path: Path, overlap: int | None) -> None:
    """The largest over the tokens is the largest over windows of them."""
    model = _loaded(tmp_path, "sparse-encoding", V, "logits")
    vectors = model.encode(TEXTS, long=LongTexts("window", overlap))
    assert isinstance(vectors, SparseVectors)
    for text, terms in zip(TEXTS, vectors.terms(), strict=True):
        assert terms == pytest.approx(splade_terms(table(V, V), text), rel=1e-6)
    report = model.answer(TEXTS, long=LongTexts("window", overlap))
    assert [answer.num_windows > 1 for answer in report.answers] == [False, True, False, True]
    assert not any(answer.truncated for answer in report.answers)
    assert report.notes == (
        "2 of 4 texts were read in windows of at most 8 tokens (max_position_embeddings of config.json)",
    )


@pytest.mark.parametrize("mode", ["mean", "max", "mean_sqrt_len_tokens"])
def test_embeddings_of_windows_are_pooled_over_all_their_tokens(tmp_path: Path, mode: str) -> None:
    """By the definition over the tokens of all windows together; the layers behind the pooling come after."""
    modules = {"Transformer": {}, "Pooling": {"pooling_mode": mode}, "Normalize": {}}
    model = _loaded(tmp_path, "sentence-similarity", 6, "last_hidden_state", modules=modules)
    vectors = rows_of(model.encode(TEXTS, long=LongTexts("window", 2)))
    values = table(V, 6)
    for text, vector in zip(TEXTS, vectors, strict=True):
        body = ids_of(text)[1:-1]
        starts = range(0, max(len(body) - 2, 1), 4) if len(body) > 6 else [0]
        states = np.array([values[token] for at in starts for token in (CLS, *body[at : at + 6], SEP)])
        wanted = {"mean": states.mean(axis=0), "max": states.max(axis=0)}.get(mode, states.sum(axis=0))
        np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-6)


def test_vectors_that_the_graph_has_scaled_are_averaged_by_tokens(tmp_path: Path) -> None:
    """And scaled again, as the checkpoint says."""
    modules = {"Transformer": {}, "Pooling": {"pooling_mode": "mean"}, "Normalize": {}}
    graph = model_for("sentence-similarity", table(V, 6), "sentence_embedding", pooled=True)
    model = load(write_model(tmp_path, graph, config=LIMIT, modules=modules), provider="cpu")
    windows = model.windows([LONG], long=LongTexts("window", 0))[0]
    rows = np.array([np.sum([table(V, 6)[token] for token in window.ids], axis=0) for window in windows])
    wanted = np.average(rows, axis=0, weights=[len(window) for window in windows])
    (vector,) = rows_of(model.encode([LONG], long=LongTexts("window", 0)))
    np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-6)


@pytest.mark.parametrize(
    ("task", "width", "output", "modules", "message"),
    [
        ("sentence-similarity", 6, "last_hidden_state", {"pooling_mode": "cls"}, "pools by cls"),
        ("sentence-similarity", 6, "last_hidden_state", {"pooling_mode": ["mean", "lasttoken"]}, "pools by lasttoken"),
        ("fill-mask", V, "logits", None, "does not make tokens of the whole"),
        ("text-generation", V, "logits", None, "does not make tokens of the whole"),
        ("text-classification", 3, "logits", None, "does not make labels of the whole"),
        ("other", 3, "logits", None, "does not make shapes of the whole"),
    ],
)
def test_windows_that_make_no_whole_are_refused(
    tmp_path: Path, task: str, width: int, output: str, modules: dict[str, Any] | None, message: str
) -> None:
    """Before anything runs, and whether or not a text is long."""
    files = {} if modules is None else {"modules": {"Transformer": {}, "Pooling": modules}}
    model = _loaded(tmp_path, task, width, output, **files)
    with pytest.raises(InputError, match=message) as caught:
        model.answer(["cat"], long="window")
    assert "--long truncate" in caught.value.hint


def test_a_sparse_encoder_that_sums_is_refused_windows(tmp_path: Path) -> None:
    """What two windows share would count twice."""
    modules = {"MLMTransformer": {}, "SpladePooling": {"pooling_strategy": "sum"}}
    model = _loaded(tmp_path, "sparse-encoding", V, "logits", modules=modules)
    with pytest.raises(InputError, match="sums over the tokens"):
        model.encode(TEXTS, long="window")


def test_each_token_is_labelled_where_it_has_most_context(tmp_path: Path) -> None:
    """Every word once, in its order, with its place in the whole text."""
    model = _loaded(
        tmp_path,
        "token-classification",
        2,
        "logits",
    )
    (answer,) = model.answer([LONG], long=LongTexts("window", 3)).answers
    assert [span.text for span in answer.spans] == LONG.split()
    assert all(LONG[span.start : span.end] == span.text for span in answer.spans)


def test_the_window_with_more_context_on_its_shorter_side_counts() -> None:
    """Of two windows of five tokens that share three, the second has the last of these; of equals the first counts."""
    head = Entities(LabelNames({0: "X"}))
    windows = [
        EncodedText((), (), (), truncated=False, offsets=TokenOffsets((), (), (), first=first)) for first in (0, 2)
    ]
    readings = [[TaggedToken(0, (0, 0), label=window, score=1.0) for _ in range(5)] for window in (0, 1)]
    assert [token.label for token in head.join(readings, windows)] == [0, 0, 0, 0, 1, 1, 1]


def test_a_long_text_may_be_refused(tmp_path: Path) -> None:
    """By its number, with the limit and where it stands."""
    model = _loaded(tmp_path, "sparse-encoding", V, "logits")
    with pytest.raises(InputError, match="text 2 has more than 8 tokens \\(max_position_embeddings") as caught:
        model.answer(TEXTS, long="fail")
    assert "--long window" in caught.value.hint
    assert len(model.answer(TEXTS[:1], long="fail").answers) == 1


@pytest.mark.parametrize(
    ("way", "overlap", "message"),
    [("windows", None, "way: 'windows' is not"), ("window", -1, "overlap: -1 is not"), ("truncate", 3, "no windows")],
)
def test_ways_that_are_none_are_refused(way: str, overlap: int | None, message: str) -> None:
    """With those that there are."""
    with pytest.raises(InputError, match=message):
        LongTexts(way, overlap)


def test_windows_need_room_beside_what_they_share(tmp_path: Path) -> None:
    """The overlap is part of each window, and the query of a pair is."""
    model = _loaded(tmp_path, "sparse-encoding", V, "logits")
    with pytest.raises(InputError, match="leaves 6 for the text next to the other tokens: fewer than 7"):
        model.encode(TEXTS, long=LongTexts("window", 6))


def test_a_huge_text_is_not_read_whole_to_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is the same; the tokenizer sees a part of it."""
    model = _loaded(tmp_path, "sparse-encoding", V, "logits")
    seen: list[int] = []
    read = model.tokenizer._encode_whole

    def watched(texts: list[Any], options: ReadOptions) -> Any:
        seen.extend(len(text) for text in texts)
        return read(texts, options)

    monkeypatch.setattr(model.tokenizer, "_encode_whole", watched)
    (encoded,) = model.tokenize(["the cat sat on a mat " * 100_000])
    assert max(seen) < 20_000
    assert encoded.truncated
    assert encoded.ids == tuple(ids_of("the cat sat on a mat"))
    # Nothing but spaces at first: the part has too few tokens, and the text is read whole.
    (encoded,) = model.tokenize([" " * 50_000 + "the cat sat on a mat the red dog"])
    assert max(seen) > 50_000
    assert encoded.ids == tuple(ids_of("the cat sat on a mat"))
