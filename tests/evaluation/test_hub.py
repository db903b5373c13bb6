"""Test collections are fetched from a stand-in of the hub, in the layouts of BeIR and mteb."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from onnxtool.errors import InputError
from onnxtool.evaluation.collection import open_collection, read_documents
from tests.evaluation.collections import random_texts, write_beir
from tests.evaluation.hub import COMMIT, Hub, reached

TEXTS = random_texts(20, 5)
ROWS: list[dict[str, object]] = [
    {"query-id": query, "corpus-id": document, "score": float(grade)}
    for query, grades in TEXTS.judgements.items()
    for document, grade in grades.items()
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with reached(Hub(), monkeypatch, tmp_path) as found:
        yield found


def beir(tmp_path: Path) -> dict[str, bytes]:
    """Return the files of the layout that both organizations extend, by their paths."""
    folder = write_beir(tmp_path / "beir", TEXTS)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def table(rows: list[dict[str, object]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def parts(name: str, split: str, rows: list[dict[str, object]]) -> dict[str, bytes]:
    """Return the rows as a table of two parts."""
    halves = (rows[::2], rows[1::2])
    return {f"{name}/{split}-0000{n}-of-00002.parquet": table(half) for n, half in enumerate(halves)}


def lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def publish(hub: Hub, layout: str, tmp_path: Path) -> None:
    """Publish the collection as `org/name`, in one of the layouts, with files that nobody asks for."""
    files = beir(tmp_path)
    qrels = files.pop("qrels/test.tsv")
    others = {"README.md": b"---\nlicense: mit\n---\n", "name.py": b"raise SystemExit"}
    if layout == "beir":
        packed = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
        hub.datasets["org/name"] = {**packed, **others}
        hub.datasets["org/name-qrels"] = {"test.tsv": qrels, "train.tsv": b"never fetched", **others}
    elif layout == "mteb":
        hub.datasets["org/name"] = {**files, "qrels/test.jsonl": lines(ROWS), "qrels/dev.jsonl": b"", **others}
    else:
        documents: list[dict[str, object]] = [
            {"id": name, "title": "", "text": text} for name, text in TEXTS.documents.items()
        ]
        queries: list[dict[str, object]] = [{"id": name, "text": text} for name, text in TEXTS.queries.items()]
        hub.datasets["org/name"] = {
            **parts("corpus", "corpus", documents),
            **parts("queries", "test", queries),
            **parts("queries", "dev", [{"id": "q0", "text": "another query"}]),
            **parts("qrels", "test", ROWS),
            **others,
        }


@pytest.mark.parametrize("layout", ["beir", "mteb", "parquet"])
def test_each_layout_of_the_hub_holds_the_same(hub: Hub, tmp_path: Path, layout: str) -> None:
    """Ids, texts and grades; reports name the commits, and nothing else of the dataset is fetched."""
    publish(hub, layout, tmp_path)
    found = open_collection(Path("org/name"))
    assert dict(found.queries) == dict(TEXTS.queries)
    assert found.judgements == TEXTS.judgements
    assert {one.id: one.contents for one in read_documents(found)} == dict(TEXTS.documents)
    separate = f" with org/name-qrels@{COMMIT}" if layout == "beir" else ""
    assert found.name == f"org/name@{COMMIT}{separate}"
    fetched = {path.name for path in (tmp_path / "cache").glob("*/snapshots/*/**/*.*")}
    assert not fetched & {"README.md", "name.py", "train.tsv", "dev.jsonl"}
    assert all(path.is_file() for path in found.files)


def test_what_was_fetched_is_read_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not is an error that says so."""
    publish(hub, "mteb", tmp_path)
    open_collection(Path("org/name"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert open_collection(Path("org/name")).judgements == TEXTS.judgements
    with pytest.raises(InputError, match="org/other' is neither .* traffic has been disabled"):
        open_collection(Path("org/other"))
    assert len(hub.requests) == asked


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "'org/absent' is neither a folder here nor a dataset .*: 404 .* Not Found"),
        ("org/name@v2", "'org/name' is neither a folder here nor a dataset .*: 404 .* Not Found"),
        ("name", "the collection name does not exist"),
        ("../org/name", "the collection ../org/name does not exist"),
        ("https://huggingface.co/datasets/org/name", "the collection https:/huggingface.co/.* does not exist"),
    ],
)
def test_what_is_neither_folder_nor_dataset_is_refused(hub: Hub, tmp_path: Path, name: str, message: str) -> None:
    """With both as the way out; a path is never looked up on the hub."""
    publish(hub, "mteb", tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        open_collection(Path(name))
    assert "such as BeIR/scifact" in caught.value.hint
    assert bool(hub.requests) == name.startswith("org/")


def test_a_revision_is_asked_for_by_name(hub: Hub, tmp_path: Path) -> None:
    """Behind an at sign."""
    publish(hub, "mteb", tmp_path)
    open_collection(Path("org/name@v1"))
    assert hub.requests[0] == "GET /api/datasets/org/name/revision/v1"


def test_a_split_that_a_dataset_has_not_is_an_error(hub: Hub, tmp_path: Path) -> None:
    """It names both datasets that could have it."""
    publish(hub, "mteb", tmp_path)
    with pytest.raises(InputError, match="'org/name-qrels' is neither"):
        open_collection(Path("org/name"), "train")


def test_documents_of_several_splits_are_not_mixed(hub: Hub, tmp_path: Path) -> None:
    """Measures over both would be wrong."""
    publish(hub, "parquet", tmp_path)
    hub.datasets["org/name"] |= parts("corpus", "dev", [{"id": "d0", "text": "another"}])
    with pytest.raises(InputError, match="other documents for each split: corpus, dev"):
        open_collection(Path("org/name"))


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
    folder = write_beir(tmp_path, TEXTS)
    (folder / "qrels" / "test.tsv").unlink()
    (folder / "qrels" / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(InputError, match=message):
        open_collection(folder)
