"""Collections of BEIR and TREC are read, and what is wrong with one is said."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onnxtool.errors import InputError
from onnxtool.evaluation.collection import open_collection, read_documents, read_run
from tests.evaluation.collections import Texts, random_texts, write_beir, write_lines, write_trec

TEXTS = random_texts(20, 5)


def test_both_layouts_hold_the_same(tmp_path: Path) -> None:
    """Ids, texts and grades."""
    for folder in (write_beir(tmp_path / "beir", TEXTS), write_trec(tmp_path / "trec", TEXTS)):
        found = open_collection(folder)
        assert dict(found.queries) == dict(TEXTS.queries)
        assert found.judgements == TEXTS.judgements
        assert {one.id: one.contents for one in read_documents(found)} == dict(TEXTS.documents)
        assert found.notes == ()


def test_a_query_is_its_text_and_a_grade_may_have_a_point(tmp_path: Path) -> None:
    """Titles are of documents, as for beir's loader; `1.0` is 1 in a tsv file too."""
    folder = write_beir(tmp_path, TEXTS)
    for name, texts in (("queries", TEXTS.queries), ("corpus", TEXTS.documents)):
        write_lines(folder / f"{name}.jsonl", texts, title="of it")
    qrels = folder / "qrels" / "test.tsv"
    qrels.write_text(re.sub(r"([0-9])\n", r"\1.0\n", qrels.read_text()))
    found = open_collection(folder)
    assert (dict(found.queries), found.judgements) == (dict(TEXTS.queries), TEXTS.judgements)
    assert all(one.contents.startswith("of it ") for one in read_documents(found))
    (folder / "queries").mkdir()
    (folder / "queries.jsonl").rename(folder / "queries" / "test-00000-of-00001.jsonl")
    assert dict(open_collection(folder).queries) == dict(TEXTS.queries)


def test_files_may_be_packed(tmp_path: Path) -> None:
    """Each of the three."""
    folder = write_beir(tmp_path, TEXTS)
    for path in (folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / "test.tsv"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    found = open_collection(folder)
    assert found.judgements == TEXTS.judgements
    assert sum(1 for _ in read_documents(found)) == 20


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="of POSIX")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """It would wait for a writer."""
    folder = write_beir(tmp_path, TEXTS)
    (folder / "queries.jsonl").unlink()
    os.mkfifo(folder / "queries.jsonl")
    with pytest.raises(InputError, match="is neither a file nor a folder"):
        open_collection(folder)


def test_queries_of_another_split_are_left_out_and_counted(tmp_path: Path) -> None:
    """Their file holds those of all splits."""
    folder = write_beir(tmp_path, TEXTS)
    write_beir(tmp_path, Texts(TEXTS.documents, TEXTS.queries, {"q1": {"d0": 1}, "elsewhere": {"d0": 1}}), "dev")
    found = open_collection(folder, "dev")
    assert list(found.queries) == ["q1"]
    assert found.notes == (
        "4 queries have no judgement, and are left out",
        "1 judged queries are not among the queries, and are left out",
    )


def _break(folder: Path, name: str, content: str) -> None:
    path = folder / name
    if content:
        path.write_text(content)
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("corpus.jsonl", "", "has no documents"),
        ("collection.tsv", "1\ttext\n", "has its documents twice: corpus.jsonl, collection.tsv"),
        ("queries.jsonl", "", "has no queries"),
        ("queries.jsonl", '{"_id": "q0", "text": ""}\n', "query 'q0' of .* has no text"),
        ("queries.jsonl", '{"_id": "q0", "text": "a"}\n{"_id": "q0", "text": "b"}\n', "two queries with the id 'q0'"),
        ("queries.jsonl", '{"_id": "other", "text": "a"}\n', "judges none of the 1 queries"),
        ("queries.jsonl", "\n", "has no texts"),
        (
            "queries.jsonl",
            '{"_id": "q0", "text": "a"}\n{"_id": "\\ud800", "text": "b"}\n',
            ":2 contains an unpaired",
        ),
        ("qrels/test.tsv", "", "has no judgements of the split 'test'"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "has no judgements"),
        (
            "qrels/test.tsv",
            "q0\td0\t1\nq0\td0\t2\n",
            "judges document 'd0' for query 'q0' as 2, and an earlier line as 1",
        ),
        ("qrels/test.tsv", "q0\td0\thigh\n", ":1 is no judgement: 'q0"),
        ("qrels/test.tsv", "q0 d0\n", ":1 is no judgement: 'q0 d0'"),
        ("qrels/test.tsv", "q0\td0\t1e3\n", "is no judgement"),
        ("qrels/test.txt", "q0 0 d0 1\n", "has judgements of test twice: qrels/test.tsv, qrels/test.txt"),
    ],
)
def test_what_is_wrong_is_one_error(tmp_path: Path, name: str, content: str, message: str) -> None:
    """With the file and the line."""
    folder = write_beir(tmp_path, TEXTS)
    _break(folder, name, content)
    with pytest.raises(InputError, match=message):
        open_collection(folder)


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    """And a name that leaves the folder."""
    folder = write_beir(tmp_path, TEXTS)
    with pytest.raises(InputError) as caught:
        open_collection(folder, "dev")
    assert "there are test.tsv" in caught.value.hint
    with pytest.raises(InputError, match="not the name of a split"):
        open_collection(folder, "../../etc/passwd")


def test_a_repeated_line_is_counted(tmp_path: Path) -> None:
    """It says nothing new."""
    folder = write_beir(tmp_path, TEXTS)
    path = folder / "qrels" / "test.tsv"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    write_lines(folder / "queries.jsonl", TEXTS.queries)
    assert open_collection(folder).notes == ("1 lines repeat an earlier query or judgement",)


@pytest.mark.parametrize("line", ["q0 Q0 d1 1 high me", "q0 Q0 d1 1 nan me", "q0 d1 1.0", "q0 Q0 d0 2 0.5 me"])
def test_a_run_that_is_none_is_refused(tmp_path: Path, line: str) -> None:
    """A score is a finite number, and a document stands once."""
    path = tmp_path / "run.txt"
    path.write_text(f"q0 Q0 d0 1 1.5 me\n{line}\n")
    with pytest.raises(InputError, match="run.txt:2 "):
        read_run(path)


ROWS: list[dict[str, object]] = [
    {"query-id": query, "corpus-id": document, "score": float(grade)}
    for query, grades in TEXTS.judgements.items()
    for document, grade in grades.items()
]


def write_parts(folder: Path, split: str, rows: list[dict[str, object]]) -> None:
    """Write the rows as a table of two parts."""
    folder.mkdir(exist_ok=True)
    for number, half in enumerate((rows[::2], rows[1::2])):
        pq.write_table(pa.Table.from_pylist(half), folder / f"{split}-0000{number}-of-00002.parquet")


def write_mteb(folder: Path, layout: str) -> Path:
    """Write the collection as MTEB has it on the hub, with judgements or all of it as tables."""
    write_beir(folder, TEXTS)
    (folder / "qrels" / "test.tsv").unlink()
    if layout == "jsonl":
        (folder / "qrels" / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        return folder
    for name, texts in (("corpus", TEXTS.documents), ("queries", TEXTS.queries)):
        (folder / f"{name}.jsonl").unlink()
        rows: list[dict[str, object]] = [{"id": key, "title": "", "text": text} for key, text in texts.items()]
        write_parts(folder / name, "test" if name == "queries" else name, rows)
    write_parts(folder / "queries", "dev", [{"id": "q0", "text": "another query"}])
    write_parts(folder / "qrels", "test", ROWS)
    return folder


@pytest.mark.parametrize("layout", ["jsonl", "parquet"])
def test_layouts_of_mteb_hold_the_same(tmp_path: Path, layout: str) -> None:
    """Ids, texts and grades."""
    found = open_collection(write_mteb(tmp_path / "data", layout))
    assert dict(found.queries) == dict(TEXTS.queries)
    assert found.judgements == TEXTS.judgements
    assert {one.id: one.contents for one in read_documents(found)} == dict(TEXTS.documents)
    assert all(path.is_file() for path in found.files)


def test_judgements_that_are_fetched_apart_are_found(tmp_path: Path) -> None:
    """BeIR has them in a dataset of their own, whose files end up in `qrels`, packed texts beside it."""
    folder = write_beir(tmp_path / "data", TEXTS)
    for name in ("corpus", "queries"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress((folder / f"{name}.jsonl").read_bytes()))
        (folder / f"{name}.jsonl").unlink()
    (folder / "qrels" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert open_collection(folder).judgements == TEXTS.judgements


def test_documents_of_several_splits_are_not_mixed(tmp_path: Path) -> None:
    """Measures over both would be wrong."""
    folder = write_mteb(tmp_path / "data", "parquet")
    write_parts(folder / "corpus", "dev", [{"id": "d0", "text": "another"}])
    with pytest.raises(InputError, match="other documents for each split: corpus, dev"):
        open_collection(folder)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    """With the way to a dataset of the hub."""
    for path, reason in (
        (Path("org/name"), "does not exist"),
        (write_beir(tmp_path, TEXTS) / "corpus.jsonl", "is not"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            open_collection(path)
        assert "hf download" in caught.value.hint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query-id": "q0", "corpus-id": "d0"}, "test.jsonl:1 is no judgement: 'q0 d0'"),
        ({"query-id": "q0", "corpus-id": "d0", "score": 0.5}, "is no judgement: 'q0 d0 0.5'"),
        (["q0"], "is no judgement"),
    ],
)
def test_a_judgement_that_is_none_is_refused(tmp_path: Path, row: object, message: str) -> None:
    """A grade is a whole number."""
    folder = write_mteb(tmp_path / "data", "jsonl")
    (folder / "qrels" / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(InputError, match=message):
        open_collection(folder)
