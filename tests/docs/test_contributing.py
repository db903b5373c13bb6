"""The changes that CONTRIBUTING shows stay those of the code."""

from __future__ import annotations

import re

from tests.docs.documents import ROOT, SKIPPED, blocks

GUIDE = ROOT / "CONTRIBUTING.md"


def missing_lines(diff: str) -> list[str]:
    """Return the lines that `diff` adds and that their file has not, in this order. A file that is gone is history."""
    missing: list[str] = []
    for part in re.split(r"^--- .*\n\+\+\+ b/", diff, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        if not (ROOT / name).is_file():
            continue
        rest = iter((ROOT / name).read_text(encoding="utf-8").splitlines())
        for line in lines:
            assert line == SKIPPED or line[0] in "+-", f"{line!r} is no line of a diff"
            added = line.removeprefix("+")
            if line[0] == "+" and added and added not in rest:  # reads on to behind the line
                missing.append(f"{name}: {added}")
    return missing


def test_what_a_change_added_is_still_there() -> None:
    """A guide whose example is history misleads."""
    assert [line for block in blocks(GUIDE, "diff") for line in missing_lines(block.text)] == []


def test_a_line_that_is_gone_is_seen() -> None:
    """Also one that now stands before the others."""
    diff = "--- a/Makefile\n+++ b/Makefile\n+VENV := .venv\n+\n…\n-SOMETHING\n+clean: {}\n"
    assert missing_lines(diff.format("## Remove what the demo and the benchmarks made.")) == []
    assert missing_lines(diff.format("gone")) == ["Makefile: clean: gone"]
    assert missing_lines("--- a/Makefile\n+++ b/Makefile\n+READY := $(VENV)/.ready\n+VENV := .venv\n") == [
        "Makefile: VENV := .venv"
    ]
    assert missing_lines("--- /dev/null\n+++ b/onnxtool/gone.py\n+gone\n") == []


def test_each_row_of_the_costs_has_its_change() -> None:
    """In the section that it links to."""
    text = GUIDE.read_text(encoding="utf-8")
    table = text[text.index("## What an addition costs") : text.index("### ")]
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", table, re.MULTILINE)
    assert len(rows) == 7
    sections = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))
    anchors = {title.lower().replace(" ", "-"): content for title, content in sections.items()}
    assert [row for row, anchor in rows if "```diff" not in anchors[anchor]] == []
