"""`evaluate --prune`: one encoding, a point of the curve for each rule, and the smallest index that passes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool import EvaluateOptions, evaluate_model, load
from onnxtool.errors import GateError, InputError, OptionError
from onnxtool.evaluation import systems
from onnxtool.evaluation.report import EvaluationReport
from tests.cli.entry_point import run_onnxtool
from tests.evaluation.collections import random_texts, write_beir
from tests.infer.test_late_interaction import encoder
from tests.infer.tiny_models import VOCABULARY, model_for, table, write_model

pytest.importorskip("pyarrow")
V = len(VOCABULARY)
TEXTS = random_texts(50, 12)
RULES = ("top_k:1", "top_k:2/top_k:1", "max_ratio:0.8", "alpha_mass:0.5", "abs_value:0.9", "/top_k:1")
MEASURES = ("P@3", "MRR@10")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("data"), TEXTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = np.where(table(V, V) > 0.6, table(V, V), -1).astype(np.float32)
    return write_model(tmp_path_factory.mktemp("model"), model_for("sparse-encoding", values, "logits"))


def evaluate(path: Path, data: Path, *rules: str, **options: Any) -> EvaluationReport:
    cache = data / "cache"
    return evaluate_model(
        path, data, EvaluateOptions(cache=cache, provider="cpu", measures=MEASURES, prune=rules, **options)
    )


def precision_at_3(path: Path, rule: str) -> tuple[float, float, int]:
    """Return P@3, the terms of a document and the bytes of an index, by loops over what `encode` gives."""
    documents, _, queries = rule.partition("/")
    loaded = load(path, provider="cpu")

    def encode(texts: list[str], prune: str) -> Any:
        vectors: Any = loaded.encode(texts, prune=prune or None)
        return vectors.to_dense().astype(np.float64)

    found, asked = encode([*TEXTS.documents.values()], documents), encode([*TEXTS.queries.values()], queries)
    scores, hits = (asked @ found.T).astype(np.float32), 0
    for row, query in zip(scores, TEXTS.queries, strict=True):
        ranked = sorted(zip(row, TEXTS.documents, strict=True), reverse=True)
        hits += sum(TEXTS.judgements[query].get(name, 0) > 0 for score, name in ranked[:3] if score > 0)
    num, used = int(np.count_nonzero(found)), int(found.any(axis=0).sum())
    return hits / 3 / len(asked), num / len(found), 8 * num + 8 * (used + 1)


def test_each_point_is_what_brute_force_finds(model: Path, data: Path) -> None:
    report = evaluate(model, data, ",".join(RULES[:3]), *RULES[3:])
    assert [one.prune for one in report.pruned] == ["none", *RULES]
    for one in report.pruned:
        value, terms, size = precision_at_3(model, "" if one.prune == "none" else one.prune)
        assert one.measures["P@3"].mean == pytest.approx(value)
        assert one.sizes.document_terms == pytest.approx(terms)
        assert one.sizes.index_bytes == size
    whole, *others = report.pruned
    assert whole.measures == report.measures
    for one in others:
        change = one.changes["MRR@10"]
        assert change.change == pytest.approx(one.measures["MRR@10"].mean - whole.measures["MRR@10"].mean)
        assert change.low <= change.change <= change.high


@pytest.mark.parametrize("gate", ["P@3<-5%", "P@3<0.1", "index_bytes>-60%", "overlap@10<0.5", "document_terms>2"])
def test_the_smallest_index_that_passes_is_chosen(model: Path, data: Path, gate: str) -> None:
    """By exhaustive search over the points of a report without gates."""
    points = evaluate(model, data, *RULES).pruned
    report = evaluate(model, data, *RULES, fail_if=(gate,))
    passing = [one.prune for one in report.pruned if one.gates and not any(check.met for check in one.gates)]
    assert 0 < len(passing) < len(RULES)
    smallest = min((one for one in points if one.prune in passing), key=lambda one: one.sizes.index_bytes)
    assert [one.prune for one in report.pruned if one.chosen] == [smallest.prune]
    assert report.passed
    if gate == "P@3<-5%":
        least = 0.95 * points[0].measures["P@3"].mean
        assert passing == [one.prune for one in points[1:] if one.measures["P@3"].mean >= least]


def test_where_no_index_passes_each_reason_is_given(model: Path, data: Path) -> None:
    report = evaluate(model, data, "top_k:1", "top_k:2", fail_if=("P@3<2",))
    assert not report.passed
    assert [gate.text.partition(": ")[0] for gate in report.gates] == ["top_k:1", "top_k:2"]
    assert not any(one.chosen for one in report.pruned)


def test_documents_are_encoded_once(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    encode = vars(systems)["encode_corpus"]

    def counted(*given: Any) -> Any:
        calls.append(given)
        return encode(*given)

    monkeypatch.setattr(systems, "encode_corpus", counted)
    evaluate(model, data, *RULES)
    assert len(calls) == 1


def test_token_vectors_of_documents_are_merged(tmp_path: Path, data: Path) -> None:
    path = encoder(tmp_path)
    report = evaluate(path, data, "pool_factor:2,pool_factor:4")
    sizes = [one.sizes for one in report.pruned]
    assert sizes[0].document_terms > sizes[1].document_terms > sizes[2].document_terms >= 1
    assert len({one.query_terms for one in sizes}) == 1
    width = load(path).encode("a cat").shape[-1]
    assert sizes[1].index_bytes == 4 * width * round(50 * sizes[1].document_terms) + 8 * 51


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("top_k:1,top_k:1", "--prune top_k:1 is stated twice"),
        ("top_k:1/", "'top_k:1/' says nothing"),
        ("top_k:1,", "'' says nothing"),
        ("top_k:1/pool_factor:2", "merges tokens of documents alone"),
        ("top:1", "no rule of pruning"),
        ("pool_factor:2", "is for vectors of tokens"),
    ],
)
def test_a_rule_that_is_not_for_the_model_is_refused(model: Path, data: Path, rule: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(model, data, rule)


def test_a_run_of_several_searches_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a run has the results of one search"):
        evaluate_model(model, data, EvaluateOptions(prune=("top_k:1",)), run_path=tmp_path / "a.run")
    asked = ("--prune", "top_k:1", "--save_run", tmp_path / "a.run", "--dry_run")
    assert run_onnxtool(tmp_path, "evaluate", model, "--data", data, *asked).returncode != 0


def test_an_index_is_compared_with_that_of_another_file(model: Path, data: Path) -> None:
    """The gate is known to be possible, or not, before anything is encoded."""
    report = evaluate(model, data, "top_k:1", against=str(model), fail_if=("index_bytes>-1%",))
    assert [gate.met for gate in report.gates] == [False]
    whole, smaller = (one.sizes.index_bytes for one in report.pruned)
    assert f"index_bytes is {smaller}, {whole} in the base" in report.gates[0].text
    with pytest.raises(GateError, match="the base has no figure 'index_bytes'"):
        evaluate(model, data, "top_k:1", against="bm25", fail_if=("index_bytes>-1%",), depth=1001)


@pytest.mark.parametrize("suffix", ["txt", "md", "json", "html"])
def test_every_form_of_the_report_has_each_point(model: Path, data: Path, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"report.{suffix}"
    rules = "top_k:1,max_ratio:0.8,top_k:2"
    asked = ("--prune", rules, "--fail_if", "P@3<0.1", "--measure", "P@3", "--cache", data / "cache")
    done = run_onnxtool(tmp_path, "evaluate", model, "--data", data, *asked, "--output", output)
    assert done.returncode == 0, done.stderr
    text = output.read_text()
    values = [one.measures["P@3"].mean for one in evaluate(model, data, rules).pruned]
    if suffix == "json":
        found = json.loads(text)["pruned"]
        assert [one["measures"]["P@3"]["mean"] for one in found] == pytest.approx(values)
        assert sum(one["chosen"] for one in found) == 1
        return
    for name, value in zip(("none", "top_k:1", "max_ratio:0.8", "top_k:2"), values, strict=True):
        assert name in text.replace("\\", "").replace("<wbr>", "")
        assert f"{value:.4f}" in text
    assert "chosen" in text
    if suffix == "html":
        assert text.count("<circle") == 4
        assert text.count('class="rule"') == 2
        labels = re.findall(r"</title></circle>\s*<text [^>]*>([^<]*)</text>", text)
        assert labels == ["none", "top_k:1", "max_ratio:0.8", "2"]
