"""Measures are those of pytrec_eval, and the test of a difference is the one of its definition."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import pytrec_eval

from onnxtool.errors import InputError
from onnxtool.evaluation.measures import compute, difference_of, mean_of, parse_measures
from onnxtool.evaluation.options import DEFAULT_MEASURES
from tests.evaluation.collections import random_texts


def random_run(seed: int, num_documents: int, num_queries: int) -> dict[str, dict[str, float]]:
    """Scores with many ties; the last query has no result."""
    random = np.random.default_rng(seed)
    return {
        f"q{query}": {f"d{number}": float(random.integers(0, 30)) for number in random.permutation(num_documents)[:40]}
        for query in range(num_queries - 1)
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_measures_equal_those_of_pytrec_eval(seed: int) -> None:
    """On three collections, query by query; a query without a result counts 0."""
    judgements = {query: dict(found) for query, found in random_texts(60, 30, seed).judgements.items()}
    run = random_run(seed, 60, 30)
    found = compute(parse_measures([*DEFAULT_MEASURES, "P@5"]), judgements, run)
    names = {"nDCG@10": "ndcg_cut_10", "Recall@100": "recall_100", "MAP": "map", "P@5": "P_5"}
    expected = pytrec_eval.RelevanceEvaluator(judgements, set(names.values())).evaluate(run)
    for query in judgements:
        for ours, theirs in names.items():
            assert found[ours][query] == pytest.approx(expected.get(query, {}).get(theirs, 0.0), abs=1e-6)
    # recip_rank has no cutoff: it is given the ten best alone, in trec_eval's order of ties.
    ten = {
        query: dict(sorted(scores.items(), key=lambda entry: (entry[1], entry[0]), reverse=True)[:10])
        for query, scores in run.items()
    }
    expected = pytrec_eval.RelevanceEvaluator(judgements, {"recip_rank"}).evaluate(ten)
    for query in judgements:
        assert found["MRR@10"][query] == pytest.approx(expected.get(query, {}).get("recip_rank", 0.0), abs=1e-6)


def test_measures_of_a_script_have_any_ids_of_queries() -> None:
    """It cuts ids at a hyphen, and refuses words; what it cannot compute is an error."""
    measures = parse_measures(["nDCG(dcg='exp-log2')@10"])
    run = {"PLAIN-3": {"a": 2.0, "b": 1.0}, "train": {"c": 1.0}}
    found = compute(measures, {"PLAIN-3": {"b": 1}, "train": {"c": 2}}, run)
    assert found == {"nDCG(dcg='exp-log2')@10": {"PLAIN-3": pytest.approx(np.log(2) / np.log(3), abs=1e-5), "train": 1}}
    with pytest.raises(InputError, match=r"cannot compute nDCG\(dcg='exp-log2'\)@10 of these judgements"):
        compute(measures, {"train": {"c": 9}}, run)


@pytest.mark.parametrize("ids", [("a\0x", "a\0y"), ("a b", "a c"), ("a\ud800", "a\ud801")])
@pytest.mark.parametrize("name", ["nDCG@10", "nDCG(dcg='exp-log2')@10"])
def test_ids_of_documents_do_not_reach_the_libraries(ids: tuple[str, str], name: str) -> None:
    """They cut ids at NUL and spaces, and one dies of half a surrogate pair."""
    found = compute(parse_measures([name]), {"q": {ids[0]: 1, ids[1]: 0}}, {"q": {ids[0]: 1.0, ids[1]: 2.0}})
    assert found == {name: {"q": pytest.approx(1 / np.log2(3), abs=1e-5)}}


def test_names_of_measures_are_read_in_any_case() -> None:
    """And printed in one spelling."""
    assert list(parse_measures(["ndcg@10", "mrr@10", "rr@5", "RECALL@100", "map", "p(rel=2)@5", "mrr(rel=2)@9"])) == [
        *("nDCG@10", "MRR@10", "MRR@5", "Recall@100", "MAP", "P(rel=2)@5", "MRR(rel=2)@9"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("ndgc@10", "nDCG@", "nDCG@x", "", "nDCG@10; import os", "__import__('os')", "(" * 500),
        *("P@0", "Success@0", "P@True", "P@9" + "9" * 30, "nDCG@1.5", "Judged@1e9", "Rprec@10", "infAP@3", "IPrec@2"),
        *("P(rel=0)@5", "AP(rel=1000000000000)", "RBP(p=2)", "nDCG(dcg='x')@10", "ERR(max_rel=0)@10", "SetF(beta=-1)"),
    ],
)
def test_an_unknown_measure_is_refused(name: str) -> None:
    """With the way out; nothing of it is run, and what a library only finds out later is tried on one query."""
    with pytest.raises(InputError, match="no measure"):
        parse_measures([name])


def test_the_randomization_test_is_that_of_all_sign_changes() -> None:
    """Of ten queries there are 1,024, which can be counted."""
    random = np.random.default_rng(0)
    ours, theirs = random.random(10), random.random(10)
    changes = ours - theirs
    sums = [abs(np.dot(signs, changes)) for signs in itertools.product((-1, 1), repeat=10)]
    exact = np.mean(np.array(sums) >= abs(changes.sum()) - 1e-12)
    found = difference_of(
        {str(n): float(value) for n, value in enumerate(ours)}, {str(n): float(value) for n, value in enumerate(theirs)}
    )
    assert found.p_value == pytest.approx(exact, abs=0.01)
    assert found.change == pytest.approx(changes.mean())
    assert (found.num_better, found.num_worse) == (int((changes > 0).sum()), int((changes < 0).sum()))


def test_a_model_does_not_differ_from_itself() -> None:
    """Neither the interval nor the test says that it might."""
    values = {str(number): number / 10 for number in range(10)}
    found = difference_of(values, values)
    assert (found.change, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    """For many queries of which none is far from the others."""
    values = np.random.default_rng(0).random(400)
    found = mean_of({str(number): float(value) for number, value in enumerate(values)})
    error = values.std() / np.sqrt(400)
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    assert mean_of({"a": 0.5, "b": 0.5}).low == 0.5


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the reason that Python gives."""
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(
        InputError, match="measures of retrieval need ir_measures, which cannot be imported: "
    ) as caught:
        parse_measures(("nDCG@10",))
    assert caught.value.hint == "pip install 'onnxtool-cli[evaluate]'"
