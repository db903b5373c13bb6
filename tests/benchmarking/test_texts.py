"""Texts are timed as they come: with their lengths, their padding, their tokenizer and their pooling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool import BenchmarkOptions, benchmark
from onnxtool.benchmarking.report import StageTimes
from onnxtool.errors import InputError
from onnxtool.infer import TextInput
from onnxtool.runtime.running import Session
from tests.infer.tiny_models import VOCABULARY, TinyModel, ids_of, model_for, table, write_model

V = len(VOCABULARY)
TEXTS = ("a cat", "the red cat sat on the blue mat", "a dog", "house", "the dog sat on a red mat", "cat dog")
OPTIONS = BenchmarkOptions((2,), runs=6, warmup=0, provider="cpu", texts=tuple(map(TextInput, TEXTS)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sentence encoder that pools outside of its graph."""
    model = model_for("sentence-similarity", table(V, 4), "last_hidden_state", positions=8)
    return write_model(tmp_path, model, modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}})


def test_lengths_and_padding_are_those_of_the_texts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a loop over what the session was given."""
    shapes: list[tuple[int, int]] = []
    run = Session.run_unchecked

    def watched(session: Session, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        shapes.append(feeds["attention_mask"].shape)
        return run(session, feeds)

    monkeypatch.setattr(Session, "run_unchecked", watched)
    (result,) = benchmark(path, OPTIONS).results
    lengths = [min(8, len(ids_of(text))) for text in TEXTS]
    tokens = result.tokens
    assert tokens is not None
    assert (tokens.num_texts, tokens.num_truncated) == (6, 2)
    assert (tokens.min, tokens.max, tokens.median) == (min(lengths), max(lengths), np.median(lengths))
    assert tokens.mean == pytest.approx(np.mean(lengths))
    computed = sum(rows * columns for rows, columns in shapes[1:4])  # the first run is apart
    assert tokens.padding_share == pytest.approx(1 - sum(lengths) / computed)
    assert result.sequence_length == 8
    # Two texts a run, and real tokens alone.
    assert result.throughput_samples_per_s == pytest.approx(2000 / result.latency_ms.mean)
    assert result.throughput_tokens_per_s == pytest.approx(1000 * sum(lengths) / 3 / result.latency_ms.mean)


def test_all_batches_are_run_as_often_as_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns."""
    counted: list[int] = []
    run = Session.run_unchecked

    def watched(session: Session, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        counted.append(int(feeds["input_ids"].sum()))
        return run(session, feeds)

    monkeypatch.setattr(Session, "run_unchecked", watched)
    benchmark(path, replace(OPTIONS, runs=15))
    timed = counted[1:-31]  # the first run, and the stages, are apart
    sums = [int(sum(counted[1:4]))]
    assert len(timed) == 15
    assert sums == [sum(timed[0:3])] == [sum(timed[3:6])] == [sum(timed[12:15])]


def test_tokenizing_and_pooling_are_timed_apart(path: Path) -> None:
    """Both have a latency of their own; a model that is not for vectors pools nothing."""
    (result,) = benchmark(path, OPTIONS).results
    assert result.stages_ms is not None
    assert result.stages_ms.tokenize.p50 > 0
    assert result.stages_ms.pool is not None
    assert result.stages_ms.pool.p50 > 0


def test_a_gate_may_be_on_a_stage(path: Path) -> None:
    """It names the figure as the report does."""
    gates = ("stages_ms.total.p50>=0", "2xtexts.stages_ms.tokenize.p95<0")
    outcomes = benchmark(path, replace(OPTIONS, fail_if=gates)).gates
    assert [(outcome.figure, outcome.met) for outcome in outcomes] == [
        ("stages_ms.total.p50", True),
        ("stages_ms.tokenize.p95", False),
    ]


def test_a_model_that_is_not_for_vectors_pools_nothing(tmp_path: Path) -> None:
    """A classifier of tokens, for one."""
    path = write_model(tmp_path, model_for("token-classification", table(V, 3), "logits"))
    (result,) = benchmark(path, OPTIONS).results
    assert result.stages_ms is not None
    assert result.stages_ms.pool is None


def test_the_total_is_the_sum_of_the_stages_of_each_batch() -> None:
    """Its percentiles are of the sums: a batch that is slow to tokenize may be quick to run."""
    batches = [{"tokenize": 1.0, "run": 9.0, "pool": 0.5}, {"tokenize": 6.0, "run": 2.0, "pool": 0.5}]
    stages = StageTimes.of(batches)
    assert (stages.total.min, stages.total.p50, stages.total.max) == (8.5, 9.5, 10.5)
    assert (stages.tokenize.max, stages.pool and stages.pool.p50) == (6.0, 0.5)
    without_pool = StageTimes.of([{"tokenize": 1.0, "run": 9.0}])
    assert (without_pool.pool, without_pool.total.p50) == (None, 10.0)


def test_a_batch_is_filled_up_from_the_first_texts(path: Path) -> None:
    """Six texts in batches of four are two batches, and each text counts once among the lengths."""
    report = benchmark(path, replace(OPTIONS, batch_sizes=(4,), runs=1))
    (result,) = report.results
    assert result.tokens is not None
    assert result.tokens.num_texts == 6
    assert report.inputs == "texts"
    assert report.notes == ("1 of 2 batches of 4 were timed, in an order drawn at random",)
    assert result.name == "4xtexts"


def test_a_text_without_tokens_is_refused(path: Path) -> None:
    """An error of ours, before anything is timed."""
    broken = TinyModel(table(V, 4), "last_hidden_state", fixed=(3, None)).write(path.parent / "fixed.onnx")
    with pytest.raises(InputError, match="is fixed to batches of 3; 2 was asked for"):
        benchmark(broken, replace(OPTIONS, model_name=str(path.with_suffix(""))))
