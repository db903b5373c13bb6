"""scripts/make_collection.py: what is a document, what is a query, and that the bytes are the same again."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxtool.evaluation.collection import open_collection

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LONG = "It reads the whole of the file, line by line, and writes what it finds into a table of names and values."

MAN = r""".\" a comment
.TH LS 1
.SH NAME
ls \- list the contents of directories
.SH SYNOPSIS
.B ls
[\fIOPTION\fR]
.SH DESCRIPTION
.PP
List information about the \fBFILE\fPs (the current directory by default\(em
sorted alphabetically if none of
.B \-cftuvSUX
nor \-\-sort is given).
.nf
a picture of code
.fi
.SH AUTHOR
Somebody.
"""
MDOC = """.Dd today
.Sh NAME
.Nm cat
.Nd concatenate and print the given files
.Sh DESCRIPTION
The
.Nm cat
utility reads files sequentially, writing them to the standard output, and so on and on.
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the script."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import make_collection

    yield make_collection
    for name in ("make_collection", "documentation_texts"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one module, and a manual of two pages, of which one has another name as well."""
    library = tmp_path / "lib"
    library.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(library))
    (library / "reader.py").write_text(
        f'"""Read tables from plain files.\n\n{LONG}"""\n\n'
        f'def again():\n    """Read the tables once more.\n\n    {LONG} Really."""\n\n'
        'def short():\n    """Return a value of it.\n\n    Too short."""\n\n'
        f'def alone():\n    """A paragraph that {LONG.lower().replace("table", "list").replace("file", "page")}"""\n\n'
        'def itself():\n    """Say what it says.\n\n    Say what it says. ' + "And then more. " * 9 + '"""\n'
    )
    manual = tmp_path / "man" / "man1"
    manual.mkdir(parents=True)
    (manual / "ls.1.gz").write_bytes(gzip.compress(MAN.encode()))
    (manual / "cat.1").write_text(MDOC)
    (manual / "dir.1.gz").symlink_to("ls.1.gz")
    return tmp_path


def make(scripts: Any, folder: Path, **more: Any) -> dict[str, str]:
    """Make the collection, and return the texts of its documents and queries."""
    scripts.make_collection(folder / "out", manual=folder / "man", **more)
    content = "".join((folder / "out" / name).read_text() for name in ("corpus.jsonl", "queries.jsonl"))
    return {entry["_id"]: entry["text"] for entry in map(json.loads, content.splitlines())}


def test_a_line_is_the_query_for_the_rest(scripts: Any, folder: Path) -> None:
    """Of documentation strings, and of pages with either kind of macros; fonts and code stay out."""
    texts = make(scripts, folder)
    assert texts["py:reader"] == LONG
    assert texts["q:py:reader"] == "Read tables from plain files."
    assert texts["q:man:ls.1"] == "list the contents of directories"
    assert texts["man:ls.1"] == (
        "List information about the FILEs (the current directory by default- sorted alphabetically if none of "
        "-cftuvSUX nor --sort is given)."
    )
    assert texts["q:man:cat.1"] == "concatenate and print the given files"
    assert texts["man:cat.1"].startswith("The cat utility reads files sequentially")


def test_repetitions_are_no_documents(scripts: Any, folder: Path) -> None:
    """A text that shares its words with an earlier one, one that holds its query, one that is short, another name."""
    texts = make(scripts, folder)
    assert texts.keys().isdisjoint({"py:reader.again", "py:reader.itself", "py:reader.short", "man:dir.1"})
    assert "py:reader.alone" in texts
    assert "q:py:reader.alone" not in texts


def test_a_line_that_fits_two_documents_is_no_query(scripts: Any, folder: Path) -> None:
    """Nobody could say which of them is meant."""
    path = folder / "man" / "man1" / "list.1"
    path.write_text(MDOC.replace("concatenate and print the given files", "List contents of the directories").replace(
        "reads files sequentially, writing", "does something else entirely here, not writing",
    ).replace("standard output, and so on and on", "usual place but to another one of its own"))  # fmt: skip
    texts = make(scripts, folder)
    assert "man:list.1" in texts
    assert texts.keys().isdisjoint({"q:man:list.1", "q:man:ls.1"})


def test_the_same_texts_give_the_same_bytes(scripts: Any, folder: Path) -> None:
    """And splits whose queries are different, which `onnxtool evaluate` reads."""
    first = scripts.make_collection(folder / "a", num_queries=1, manual=folder / "man")
    assert scripts.make_collection(folder / "b", num_queries=1, manual=folder / "man") == first
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv", "collection.json"):
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    test, train = open_collection(folder / "a"), open_collection(folder / "a", "train")
    assert len(test.queries) == 1
    assert test.queries.keys().isdisjoint(train.queries)
    assert first["documents"] == len((folder / "a/corpus.jsonl").read_text().splitlines())


def test_without_a_manual_there_are_documentation_strings(scripts: Any, folder: Path) -> None:
    """As in most containers."""
    assert scripts.make_collection(folder / "a", manual=folder / "none")["manual_pages"] == 0
