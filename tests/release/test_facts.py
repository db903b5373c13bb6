"""The record of a release is written and read to the last byte, and refused where it was edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxtool.errors import InputError
from onnxtool.release.facts import ReleasedFile, facts_text, parse_facts, read_facts
from tests.release.samples import FACTS, FILES

Edit = Callable[[dict[str, Any]], Any]


def test_a_record_is_read_as_it_was_written() -> None:
    """Tuples, figures and names; and written again it is the same."""
    text = facts_text(FACTS)
    assert parse_facts(text) == FACTS
    assert facts_text(parse_facts(text)) == text


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda d: d.update(format=2), "its format is 2"),
        (lambda d: d.update(format=True), "its format is True"),
        (lambda d: d.update(extra=1), "has 'extra'"),
        (lambda d: d.pop("command"), "lacks 'command'"),
        (lambda d: d.update(name=3), r"record.name is '3', and no str"),
        (lambda d: d.update(name="a\x1b[2J"), "record.name is"),
        (lambda d: d["provenance"].update(date="2026-02-30"), "its date is '2026-02-30'"),
        (lambda d: d.update(provider="auto"), "its provider is 'auto'"),
        (lambda d: d.update(files={}), "record.files is no list"),
        (lambda d: d.update(versions=[]), "record.versions is no object"),
        (lambda d: d["license"].update(id=None), "record.license.id"),
        (lambda d: d["files"][0].update(size_bytes=-1), r"record.files\[0\].size_bytes is '-1'"),
        (lambda d: d["files"][0].update(size_bytes=True), "size_bytes is 'True'"),
        (lambda d: d["files"][0].update(path="../model.onnx"), "is not one of a file in the folder"),
        (lambda d: d["files"][0].update(path="./model.onnx"), "is not one of a file in the folder"),
        (lambda d: d["files"][0].update(path="a\nb"), "is not one of a file in the folder"),
        (lambda d: d["files"][0].update(sha256="A" * 64), "the sha256 of"),
        (lambda d: d["files"][0].update(role="code"), "the role of"),
        (lambda d: d["files"].append(d["files"][0]), "listed twice"),
        (lambda d: d["models"].append(d["models"][0]), "listed twice"),
        (lambda d: d["models"].pop(), "'model_int8.onnx' is among either"),
        (lambda d: d["models"][0]["verification"][0].update(atol="1"), "atol is '1'"),
        (lambda d: d["models"][0]["verification"][0].update(atol=10**400), "atol is"),
    ],
)
def test_a_record_of_another_form_is_refused(edit: Edit, reason: str) -> None:
    """Whoever wrote it: the place in it is named."""
    document = json.loads(facts_text(FACTS))
    edit(document)
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    with pytest.raises(InputError, match=reason):
        parse_facts(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\n",
        lambda text: text.replace('"format": 1', '"format":  1'),
        lambda text: text.replace("0.8125", "8.125e-1"),
        lambda text: text.replace("0.8125", "NaN"),
        lambda text: text.replace("0.8125", "1e999"),
        lambda text: text.replace('"format": 1', '"format": 1, "format": 1'),
        lambda text: text[:-3],
        lambda _: "[" * 100_000,
        lambda _: "[]",
    ],
)
def test_other_bytes_of_the_same_meaning_are_refused(change: Callable[[str], str]) -> None:
    """Each byte counts, so that an edit shows wherever it is."""
    with pytest.raises(InputError, match="malformed"):
        parse_facts(change(facts_text(FACTS)))


def test_a_folder_without_a_record_is_no_release(tmp_path: Path) -> None:
    """And bytes that are no text are no record."""
    with pytest.raises(InputError, match="is not a release"):
        read_facts(tmp_path)
    (tmp_path / "release.json").write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        read_facts(tmp_path)
    (tmp_path / "release.json").write_text(facts_text(FACTS), encoding="utf-8")
    assert read_facts(tmp_path) == FACTS


def test_facts_refuse_a_model_that_is_no_file() -> None:
    """What makes facts is held to the same rules as what reads them."""
    with pytest.raises(InputError, match="is among either"):
        replace(FACTS, files=(*FILES, ReleasedFile("b.onnx", "e" * 64, 1, "model")))
