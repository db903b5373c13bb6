"""The plan of a collection: deterministic, small, and read as what a stranger wrote."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from onnxtool.encoding import (
    CorpusOptions,
    PartOptions,
    VectorOptions,
    corpus_status,
    encode_corpus,
    encode_part,
    make_plan,
    merge_parts,
)
from onnxtool.encoding.plan import read_plan
from onnxtool.errors import InputError, OnnxtoolError
from tests.encoding.corpora import OPTIONS, dense_model, make_texts, planned, write_corpus

pytestmark = pytest.mark.usefixtures("workers_here")

WRONG: list[Any] = [None, True, -1, 1.5, 1 << 80, "", "x" * 99, "../../x\0", [], {}, [[-1]], [None]]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Of a hundred texts in three shards."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    return planned(tmp_path, dense_model(tmp_path), corpus)


def test_two_plans_are_the_same_bytes_and_name_no_place(tmp_path: Path, plan: Path) -> None:
    """Wherever it is called from, and however paths are written; nothing but the plan is written."""
    first = plan.read_bytes()
    again = Path(f"{tmp_path}/../{tmp_path.name}")
    make_plan(again / "model.onnx", again / "corpus.jsonl", again / "vectors", OPTIONS, force=True)
    assert plan.read_bytes() == first
    assert str(tmp_path) not in plan.read_text()
    assert [shard["texts"] for shard in json.loads(first)["shards"]] == [40, 40, 20]
    assert list((tmp_path / "vectors").iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "error"),
    [("", "has no texts"), ("\n\n", "has no texts"), ("{\n[]\n", r"no line of .* gave a text: .*\(1\)")],
)
def test_a_collection_without_texts_is_an_error(tmp_path: Path, lines: str, error: str) -> None:
    """The same as of one run; no plan is left."""
    (tmp_path / "corpus.jsonl").write_text(lines)
    with pytest.raises(InputError, match=error):
        make_plan(dense_model(tmp_path), tmp_path / "corpus.jsonl", tmp_path / "vectors", OPTIONS)
    assert not (tmp_path / "vectors.plan.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "1", "null", '{"format": 1}', '{"format": 9}', "[" * 100_000])
def test_a_file_that_is_no_plan_is_an_error(tmp_path: Path, content: str) -> None:
    """Whoever calls."""
    path = tmp_path / "vectors.plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"vectors\.plan\.json is not a plan of a corpus"):
        read_plan(path)


def test_a_plan_of_an_older_onnxtool_is_refused_by_its_format(plan: Path) -> None:
    """Its digests are of another kind, and so are those of a run that it began."""
    plan.write_text(plan.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(InputError, match="its format is 1, and this onnxtool reads 2") as caught:
        read_plan(plan)
    assert caught.value.hint == "make it again: onnxtool encode plan --force"


@pytest.mark.parametrize(
    "repeated",
    [[[0, 0]], [[3, 1]], [[0, 1, 2]], [[0]], [[0, 2], [1, 3]], [[4, 5], [0, 1]], [[0, 1 << 62]], [["0", "1"]]],
)
def test_repeated_places_of_a_plan_are_ranges_in_order(plan: Path, repeated: list[list[Any]]) -> None:
    """However long they are, they take no memory for each place."""
    whole = json.loads(plan.read_text())
    whole["shards"][1]["repeated"] = repeated
    plan.write_text(json.dumps(whole))
    with pytest.raises(InputError, match="is not a plan of a corpus"):
        read_plan(plan)
    whole["shards"][1]["repeated"] = [[0, (1 << 62) - 1]]
    plan.write_text(json.dumps(whole))
    with pytest.raises(InputError, match="the input has changed"):
        encode_part(plan, PartOptions(shards="1"))


def test_a_plan_of_too_many_shards_is_refused(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has written it."""
    monkeypatch.setattr("onnxtool.encoding.plan.MOST_SHARDS", 2)
    with pytest.raises(InputError, match="it has 3 shards, of at most 2"):
        read_plan(plan)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_is_no_collection(tmp_path: Path) -> None:
    """Nobody waits for who writes it: a part would read it a second time."""
    os.mkfifo(tmp_path / "corpus.jsonl")
    with pytest.raises(InputError, match="is no regular file"):
        make_plan(dense_model(tmp_path), tmp_path / "corpus.jsonl", tmp_path / "vectors", OPTIONS)


def test_a_plan_is_the_same_by_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its bytes; a number below 0 is none."""
    monkeypatch.setattr("onnxtool.encoding.pieces.PIECE_BYTES", 1000)
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    plans = set()
    for workers in (1, 2, 3):
        report = make_plan(model, corpus, tmp_path / "vectors", OPTIONS, workers=workers, force=True)
        plans.add(Path(report.plan).read_bytes())
    assert len(plans) == 1
    with pytest.raises(InputError, match="workers: -1 is not in the range"):
        make_plan(model, corpus, tmp_path / "vectors", OPTIONS, workers=-1, force=True)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names of files are text")
def test_a_file_whose_name_is_no_utf_8_is_read_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plan, its processes and one run; nor does a line feed in a name matter."""
    monkeypatch.setattr("onnxtool.encoding.pieces.PIECE_BYTES", 20)
    (tmp_path / "corpus").mkdir()
    for number, name in enumerate((b"caf\xe9.jsonl", b"two\nlines.jsonl")):
        line = json.dumps({"id": str(number), "contents": "a cat"})
        (tmp_path / "corpus" / os.fsdecode(name)).write_text(f"{line}\n{{\n")
    model = dense_model(tmp_path)
    plan = make_plan(model, tmp_path / "corpus", tmp_path / "vectors", OPTIONS, workers=2).plan
    encode_part(plan)
    assert (merge_parts(plan).num_texts, merge_parts(plan).num_rejects) == (2, 2)
    encode_corpus(model, tmp_path / "corpus", tmp_path / "run", CorpusOptions(provider="cpu", shard_size=40))
    assert (tmp_path / "run.manifest.json").read_bytes() == (tmp_path / "vectors.manifest.json").read_bytes()


def test_a_plan_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """Nor one of another name, from which no folder follows."""
    with pytest.raises(InputError, match="cannot read the plan"):
        read_plan(tmp_path / "vectors.plan.json")
    with pytest.raises(InputError, match="is not called as a plan is"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_a_plan_with_a_wrong_value_is_one_error(plan: Path, value: Any) -> None:
    """Each field in turn; what is still a plan is none for this model and collection."""
    whole = json.loads(plan.read_text())
    hostile = [{**whole, key: value} for key in whole if key != "format"]
    no_less = ("model_name", "prompt") if value == "" else ()  # an empty one says the same as none
    hostile += [
        {**whole, "options": {**whole["options"], key: value}} for key in whole["options"] if key not in no_less
    ]
    first, *rest = whole["shards"]
    hostile += [{**whole, "shards": [{**first, key: value}, *rest]} for key in first]
    hostile += [{**whole, "shards": [first, {**rest[0], key: value}, rest[1]]} for key in first]
    hostile += [{**whole, "more": value, "identity": {**whole["identity"], "more": value}}]
    for one in hostile:
        if one == whole:  # a value that was so before
            continue
        plan.write_text(json.dumps(one))
        with pytest.raises(OnnxtoolError):
            encode_part(plan, PartOptions(shards="0-1"))
        assert not list((plan.parent / "vectors").iterdir()), one


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"input": "\ud800"}, "its input is '"),
        ({"model": "a\0b"}, "its model is 'a"),
        ({"format": "9" * 5000}, r"its format is 9{40}, and"),
        ({"options": {"prompt": "\ud800"}}, "its option prompt is '"),
        ({"options": {"threads": 1 << 20}}, "its option threads is 1048576, of at most 1024"),
        ({"options": {"x" * 5000: 1}}, "'x{40}' is none of its options"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_plan_is_refused_before_anything_is_done_by_it(plan: Path, change: dict[str, Any], error: str) -> None:
    """A million threads would be started, and a name that no file can have ends a worker; what is said is short."""
    whole = json.loads(plan.read_text())
    plan.write_text(json.dumps({**whole, **change, "options": {**whole["options"], **change.get("options", {})}}))
    with pytest.raises(InputError, match=f"is not a plan of a corpus: {error}"):
        read_plan(plan)


def test_places_of_a_plan_that_lead_elsewhere_are_an_error(plan: Path) -> None:
    """Into the middle of a line, behind the end, or to the texts of another shard."""
    whole = json.loads(plan.read_text())
    first, second, last = whole["shards"]
    for change in ({"offset": second["offset"] + 3}, {"offset": 1 << 61}, {"offset": last["offset"]}, {"source": 5}):
        changed = {**second, **change}
        shards = [first, changed, {**last, "source": changed["source"]}]
        plan.write_text(json.dumps({**whole, "shards": shards}))
        with pytest.raises(OnnxtoolError):
            encode_part(plan, PartOptions(shards="1"))
        assert merge_parts(plan).to_do == "0-2"


@pytest.mark.slow
def test_ten_thousand_shards_are_planned_and_looked_at_at_once(tmp_path: Path) -> None:
    """The plan has two hundred bytes for each; what is to do is one range."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_texts(10_000))
    report = make_plan(dense_model(tmp_path), corpus, tmp_path / "vectors", VectorOptions(provider="cpu", shard_size=1))
    assert report.num_shards == 10_000
    assert report.size_bytes < 200 * 10_000
    assert corpus_status(report.plan).to_do == merge_parts(report.plan).to_do == "0-9999"
