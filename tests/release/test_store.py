"""A step runs where something that it depends on has changed, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxtool.release.store import Store, Task, digest_of, files_in
from onnxtool.reports import Json


def task(value: Json, calls: list[Json]) -> Task:
    """A task that writes what it depends on."""

    def make(folder: Path) -> Json:
        calls.append(value)
        (folder / "sub").mkdir()
        (folder / "sub" / "out.txt").write_text(str(value))
        return {"value": value}

    return Task({"value": value, "pair": [1, 2]}, make)


def test_a_step_runs_once(tmp_path: Path) -> None:
    """Also for another process, which reads what the first has written."""
    calls: list[Json] = []
    first = Store(tmp_path).run("some step", task("a", calls))
    again = Store(tmp_path).run("some step", task("a", calls))
    assert calls == ["a"]
    assert (first.reason, again.reason) == ("it never ran", "")
    assert (again.folder / "sub" / "out.txt").read_text() == "a"
    assert again.result == {"value": "a"}
    assert again.files == first.files


def test_it_runs_again_where_something_changed(tmp_path: Path) -> None:
    """What it depends on, or what it made; the reason says which."""
    calls: list[Json] = []
    store = Store(tmp_path)
    made = store.run("some step", task("a", calls))
    assert store.reason("some step", task("b", calls)) == "value changed"
    store.run("some step", task("b", calls))
    (made.folder / "sub" / "out.txt").write_text("c")
    assert store.reason("some step", task("b", calls)) == "its files were changed"
    store.run("some step", task("b", calls))
    (made.folder.parent / "record.json").write_text("[" * 10_000)
    assert store.reason("some step", task("b", calls)) == "its record cannot be read"
    assert calls == ["a", "b", "b"]


def test_a_step_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """And is not taken for done."""
    store = Store(tmp_path)
    calls: list[Json] = []
    store.run("some step", task("a", calls))

    def fail(folder: Path) -> Json:
        (folder / "half").write_text("")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.run("some step", Task({"value": "b", "pair": [1, 2]}, fail))
    assert store.reason("some step", task("a", calls)) == ""
    assert store.reason("some step", task("b", calls)) == "value changed"


def test_a_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    """What is hidden belongs to others."""
    (tmp_path / "a").write_text("1")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b").write_text("2")
    before = digest_of(files_in(tmp_path))
    (tmp_path / ".cache" / "b").write_text("3")
    assert digest_of(files_in(tmp_path)) == before
    (tmp_path / "a").rename(tmp_path / "c")
    assert digest_of(files_in(tmp_path)) != before
