"""Drift tells whether an index that was built with an old model serves new queries, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool import DriftOptions, load, measure_drift
from onnxtool.errors import GateError, InputError, OptionError
from tests.cli.entry_point import run_onnxtool
from tests.evaluation.collections import random_texts, write_beir
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import POOLED, VOCABULARY, model_for, table, write_model

pytest.importorskip("pyarrow")
V, H = len(VOCABULARY), 6
TEXTS = random_texts(60, 15)
VALUES = table(V, H)
RANDOM = np.random.default_rng(0)
ROTATION = np.linalg.qr(RANDOM.standard_normal((H, H)))[0].astype(np.float32)
NOISE = RANDOM.standard_normal(VALUES.shape).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("data"), TEXTS)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS.documents.values()))
    return path


def dense(folder: Path, values: Any, **files: Any) -> Path:
    model = model_for("sentence-similarity", values.astype(np.float32), "last_hidden_state")
    return write_model(folder, model, modules={name: POOLED[name] for name in ("Transformer", "Pooling")}, **files)


def sparse(folder: Path, values: Any) -> Path:
    values = np.where(values > 0.4, values, -1).astype(np.float32)
    return write_model(folder, model_for("sparse-encoding", values, "logits"))


@pytest.mark.parametrize(
    ("values", "relation", "keeps"),
    [
        (VALUES, "the same", True),
        (VALUES * 3, "the same", True),  # cosines
        (VALUES @ ROTATION, "rotated", False),
        (VALUES[:, ::-1], "rotated", False),
        (VALUES + 0.01 * NOISE, "others", True),
        (VALUES + 3 * NOISE, "others", False),
    ],
)
def test_a_rotated_space_is_distinguished_from_a_trained_one(
    tmp_path: Path, texts: Path, values: Any, relation: str, keeps: bool
) -> None:
    old, new = dense(tmp_path / "old", VALUES), dense(tmp_path / "new", values)
    report = measure_drift(new, old, DriftOptions(texts=texts, provider="cpu"))
    assert (report.relation, report.keeps_index, report.passed) == (relation, keeps, keeps)
    assert report.own_neighbours_kept is not None
    if relation == "rotated":
        assert report.own_neighbours_kept > 0.99
        assert "rotated or permuted" in report.reason


def test_vectors_that_are_scaled_are_told_where_lengths_count(tmp_path: Path, texts: Path) -> None:
    """By the dot product, all rankings stay."""
    old, new = sparse(tmp_path / "old", table(V, V)), sparse(tmp_path / "new", table(V, V))
    assert measure_drift(new, old, DriftOptions(texts=texts)).relation == "the same"
    config = '{"similarity_fn_name": "dot"}'
    folders = []
    for name, values in (("a", VALUES), ("b", 2 * VALUES)):
        folders.append(dense(tmp_path / name, values))
        (tmp_path / name / "model" / "config_sentence_transformers.json").write_text(config)
    report = measure_drift(folders[1], folders[0], DriftOptions(texts=texts))
    assert (report.relation, report.keeps_index) == ("scaled", True)
    assert report.kendall_tau == pytest.approx(1)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_mixed_measures_are_those_of_brute_force(tmp_path: Path, data: Path, kind: str) -> None:
    """New queries over old documents; MRR@10 by a loop, and neighbours kept likewise."""
    size = (V, H) if kind == "dense" else (V, V)
    old_values, new_values = table(*size), table(*size) + 0.3 * np.random.default_rng(3).standard_normal(size)
    make = dense if kind == "dense" else sparse
    old, new = make(tmp_path / "old", old_values), make(tmp_path / "new", new_values)
    report = measure_drift(new, old, DriftOptions(data=data, cache=tmp_path / "cache", provider="cpu"))

    def vectors(path: Path, of: Any) -> Any:
        found: Any = load(path, provider="cpu").encode([*of.values()])
        rows = (found if kind == "dense" else found.to_dense()).astype(np.float64)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) if kind == "dense" else rows

    scores = (vectors(new, TEXTS.queries) @ vectors(old, TEXTS.documents).T).astype(np.float32)
    reciprocal = []
    for row, query in zip(scores, TEXTS.queries, strict=True):
        ranked = [name for _, name in sorted(zip(row, TEXTS.documents, strict=True), reverse=True)][:10]
        places = [rank for rank, name in enumerate(ranked, 1) if TEXTS.judgements[query].get(name, 0) > 0]
        reciprocal.append(1 / places[0] if places else 0)
    assert report.measures["MRR@10"].mixed.mean == pytest.approx(np.mean(reciprocal))
    documents = [vectors(path, TEXTS.documents) for path in (old, new)]
    kept = []
    for place in range(len(TEXTS.documents)):
        near = []
        for asking in documents:
            row = asking[place] @ documents[0].T
            row[place] = -9
            near.append({*np.argsort(-row.astype(np.float32), kind="stable")[:10].tolist()})
        kept.append(len(near[0] & near[1]) / 10)
    assert report.neighbours_kept == pytest.approx(np.mean(kept), abs=0.01)


def test_late_interaction_drifts_as_well(tmp_path: Path, texts: Path) -> None:
    path = encoder(tmp_path)
    report = measure_drift(path, path, DriftOptions(texts=texts))
    assert (report.kind, report.relation) == ("late interaction", "the same")
    assert report.cosine_min == pytest.approx(1)


def test_spaces_that_have_nothing_in_common_are_named(tmp_path: Path, texts: Path) -> None:
    old = dense(tmp_path / "old", VALUES)
    wide = dense(tmp_path / "wide", table(V, 9))
    assert measure_drift(wide, old, DriftOptions(texts=texts)).reason == (
        "vectors have 9 numbers, and those of the index 6"
    )
    report = measure_drift(sparse(tmp_path / "sparse", table(V, V)), old, DriftOptions(texts=texts))
    assert (report.relation, report.passed) == ("none", False)
    assert "the index has dense vectors, and the new model gives sparse ones" in report.reason


def test_gates_decide_where_there_are_any(tmp_path: Path, data: Path, texts: Path) -> None:
    old, new = dense(tmp_path / "old", VALUES), dense(tmp_path / "new", VALUES + 0.2 * NOISE)
    gates = ("ndcg@10<-90%", "kendall_tau<0.999")
    report = measure_drift(new, old, DriftOptions(data=data, cache=tmp_path / "cache", fail_if=gates))
    assert [gate.met for gate in report.gates] == [False, True]
    done = run_onnxtool(tmp_path, "verify", new, old, "--texts", texts, "--fail_if", "neighbours_kept<0.999")
    assert done.returncode == 1
    assert "gate failed: neighbours_kept" in done.stderr
    assert "The old index can be kept:" in done.stdout
    with pytest.raises(GateError, match="nothing called 'ndcg@10' is measured"):
        measure_drift(new, old, DriftOptions(texts=texts, fail_if=("ndcg@10<0.5",)))


def test_drift_refuses_options_that_have_no_effect(tmp_path: Path, texts: Path, data: Path) -> None:
    from onnxtool import VerifyOptions

    for options, message in (
        ({"texts": texts, "atol": 0.1}, "--atol has no effect on drift"),
        ({"texts": texts, "data": data}, "measured on --texts or on --data"),
        ({"fail_if": ("cosine_min<0.9",)}, "--fail_if is for drift"),
    ):
        with pytest.raises(OptionError, match=message):
            VerifyOptions(**options)
    few = tmp_path / "few.txt"
    few.write_text("a\ncat\n")
    with pytest.raises(InputError, match="2 texts have no 10 neighbours each"):
        measure_drift(dense(tmp_path, VALUES), dense(tmp_path, VALUES), DriftOptions(texts=few))
