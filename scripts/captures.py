"""Record what a person sees on a terminal while commands work, and draw it: docs/captures/NAME.svg.

Each command runs on a pseudo-terminal, on the trained model of `make demo`. The line that rewrites itself is drawn at
several moments, one below the other, and what is printed at the end below them. Run `python scripts/captures.py` after
a change of the progress or of the results; POSIX alone has such terminals.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from make_models import ROOT, trained_model
from rich.console import Console
from rich.text import Text

FOLDER = ROOT / "docs" / "captures"
WIDTH, HEIGHT = 110, 50
NAME = "all-MiniLM-L6-v2"
NUM_TEXTS = 2000
MOST_MOMENTS = 7
LEAST_S = 0.15  # a shorter stage is seen by nobody
_CLEARED = re.compile(rb"\r\x1b\[2K")
_CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Zac-ln-z]|\r")  # all but colors
_NUMBERS = re.compile(r"\x1b\[[0-9;]*m|[\d:.,%]+|[⠀-⣿]|[━╸╺]+| left")

CAPTURES = {
    "export": ("export", "--model_name", NAME),
    "optimize": ("optimize", "--model_path", f"models/{NAME}.onnx", "--precision", "int8"),
    "corpus": ("infer", "--model_path", f"models/{NAME}.onnx", "--input", "passages.jsonl", "--output", "vectors/"),
}
_LAST_LINES = {"export": 1, "optimize": 1, "corpus": 12}  # of the result that are drawn


class Moment(NamedTuple):
    """The line at some time."""

    seconds: float
    line: str


def record(arguments: Sequence[str], folder: Path) -> list[tuple[float, bytes]]:
    """Run a command on a terminal, and return what it wrote, with the seconds since its start."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    command = [sys.executable, "-m", "onnxtool", *arguments]
    with subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = []
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written.append((time.monotonic() - start, part))
    os.close(ours)
    if process.returncode:
        raise SystemExit(b"".join(part for _, part in written).decode())
    return written


def moments(written: Sequence[tuple[float, bytes]]) -> tuple[list[Moment], str]:
    """Return the line each time that it was rewritten, and what was printed after it."""
    pieces = [(seconds, piece) for seconds, part in written for piece in _CLEARED.split(part)]
    lines = [Moment(seconds, _CONTROL.sub("", piece.decode()).strip("\n")) for seconds, piece in pieces]
    bars = [place for place, one in enumerate(lines) if "━" in one.line or "╸" in one.line]
    result = "".join(_CONTROL.sub("", piece.decode()) for _, piece in pieces[bars[-1] + 1 :])
    return [lines[place] for place in bars], result


def chosen(seen: Sequence[Moment]) -> list[Moment]:
    """Return a moment of each stage that lasts, with the time that is left where it says so: the longest stages."""
    starts = [0, *(place for place in range(1, len(seen)) if _stage(seen[place]) != _stage(seen[place - 1]))]
    stages = [seen[start:end] for start, end in pairwise([*starts, len(seen)])]
    lasting = [stage for stage in stages if stage[-1].seconds - stage[0].seconds >= LEAST_S]
    longest = sorted(lasting, key=lambda stage: stage[0].seconds - stage[-1].seconds)[:MOST_MOMENTS]
    found = []
    for stage in sorted(longest, key=lambda stage: stage[0].seconds):
        telling = [one for one in stage if " left" in one.line] or stage
        places = (1, 2) if len(longest) == 1 else (1,)  # a run of one stage is drawn twice
        found += [telling[len(telling) * place // (len(places) + 1)] for place in places]
    return found


def _stage(moment: Moment) -> str:
    return _NUMBERS.sub("", moment.line).split(": ")[0].strip()


def draw(arguments: Sequence[str], shown: Sequence[Moment], result: str, num_lines: int) -> str:
    """Return the drawing as SVG, which refers to no font of the network."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ onnxtool {' '.join(arguments)}", style="bold"), soft_wrap=False)
    for one in shown:
        console.print(Text(f"{one.seconds:4.0f} s  ", style="dim"), Text.from_ansi(one.line), sep="", end="\n")
    lines = result.rstrip().splitlines()
    console.print(Text("…" if len(lines) > num_lines else "", style="dim"))
    for line in lines[-num_lines:]:
        console.print(Text.from_ansi(line), soft_wrap=False)
    drawing = console.export_svg(title=f"onnxtool {arguments[0]}", unique_id=f"capture-{arguments[0]}")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawing, flags=re.DOTALL)


def main() -> None:
    """Record all commands, each after those whose files it reads."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(trained_model(), folder / NAME)
        passage = "a passage of text "
        texts = ({"id": str(number), "contents": passage * (1 + number % 20)} for number in range(NUM_TEXTS))
        (folder / "passages.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        for capture, arguments in CAPTURES.items():
            seen, result = moments(record(arguments, folder))
            drawing = draw(arguments, chosen(seen), result, _LAST_LINES[capture])
            (FOLDER / f"{capture}.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
