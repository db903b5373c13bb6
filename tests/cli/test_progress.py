"""What is said on stderr while a command works."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.progress import Progress

from onnxtool.cli.progress import LINE_EVERY_S, Lines, bar, clock, progress, stage_bar
from onnxtool.progress import Stage, counted, listening, tell
from tests.workshop import Workshop


def test_whoever_listens_hears_how_far_it_is() -> None:
    """Only inside of the block; a stage is text, and numbers."""
    heard: list[str] = []
    tell("nobody hears this")
    with listening(heard.append):
        assert list(counted("ab", "reading letter")) == ["a", "b"]
        tell("done")
    tell("nor this")
    assert heard == ["reading letter 1 of 2", "reading letter 2 of 2", "done"]
    assert [(one.name, one.done, one.total) for one in heard if isinstance(one, Stage)] == [
        ("reading letter", 0, 2),
        ("reading letter", 1, 2),
    ]


def test_a_stage_of_unknown_length_does_not_keep_the_length_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bar moves, and does not stand at the start of one that has an end."""
    seen: list[Progress] = []

    @contextmanager
    def watched(*columns: object) -> Iterator[Progress]:
        with bar(*columns) as shown:
            seen.append(shown)
            yield shown

    monkeypatch.setattr("onnxtool.cli.progress.bar", watched)
    with stage_bar() as show:
        show(Stage("comparing case", 1, 3))
        assert (seen[0].tasks[0].completed, seen[0].tasks[0].total) == (1, 3)
        show("writing")
        assert (seen[0].tasks[0].completed, seen[0].tasks[0].total) == (0, None)
        show(Stage("running text", 512, 0))
        assert seen[0].tasks[0].total is None


def test_a_log_has_a_line_for_each_stage_and_few_more(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage that goes on is heard of every ten seconds, with the time that is left."""
    now = 0.0
    lines = Lines(lambda: now)
    lines("loading")
    for number in range(100):
        lines(Stage("measuring layer", number, 100))
        now += LINE_EVERY_S / 40
    lines(Stage("optimizing", 0, 3, "attention"))
    assert capsys.readouterr().err.splitlines() == [
        "loading …",
        "measuring layer 1 of 100 …",
        "measuring layer 41 of 100 … 0:00:15 left",
        "measuring layer 81 of 100 … 0:00:05 left",
        "optimizing 1 of 3: attention …",
    ]


def test_a_duration_is_written_as_a_clock_shows_it() -> None:
    """With hours, whatever there are."""
    assert [clock(seconds) for seconds in (0.4, 61, 3600 * 26)] == ["0:00:00", "0:01:01", "26:00:00"]


def test_on_a_terminal_one_line_is_rewritten(workshop: Workshop, tmp_path: Path) -> None:
    """With a bar for passes and cases, and nothing of it is left at the end but the result."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(workshop.exported("tiny-encoder").read_bytes())
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "onnxtool", "optimize", "--model_path", str(path), "--no_timing"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    stdout, _ = process.communicate()
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "comparing case" in text
    assert "━" in text
    assert stdout.splitlines()[-1] == f"Verified: {tmp_path / 'tiny-optimized.onnx'}"
    # The last thing that happens to the line is that it is cleared.
    assert re.search(r"\x1b\[2K(\x1b\[\?25h|\r|\x1b\[1A|\n)*$", text), repr(text[-80:])


def test_a_level_that_others_set_for_all_loggers_hides_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of onnxtool's would show these records."""
    before = logging.root.level
    logging.root.setLevel(logging.INFO)
    try:
        with progress(quiet=False):
            tell("loading a model")
    finally:
        logging.root.setLevel(before)
    assert capsys.readouterr().err == "loading a model …\n"
