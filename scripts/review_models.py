"""Describe what changed in the ONNX files of a pull request: the step of action.yml, which sets its variables.

One comment has all models, within the length that GitHub takes, and is updated by the next run. Names of files and what
files contain are untrusted: nothing of them is run, or read as Markdown.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtool.cli import run_arguments
from onnxtool.errors import OnnxtoolError
from onnxtool.model_file import ModelFile
from onnxtool.reports import code_span
from onnxtool.summary.gates import parse_any_gate

MARKER = "<!-- onnxtool review -->"
MOST_CHARACTERS = 65_000  # of 65,536 in a comment
MOST_ROWS = 100
POINTER = b"version https://git-lfs"
FOLDED = "\n<details>"
WORDS = {"A": "added", "D": "deleted", "M": "changed", "R": "moved", "T": "changed"}
AUTHOR = "github-actions[bot]"


@dataclass(frozen=True)
class Change:
    """A model that differs; `old` is its path in the base, and `new` that of now, None where there is none."""

    kind: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class Review:
    """What is said of a model: its row, its text, and whether a gate was met or it could not be read."""

    row: str
    text: str = ""
    code: int = 0


def git(*words: str) -> bytes:
    """Return what git prints."""
    return subprocess.run(["git", *words], stdout=subprocess.PIPE, check=True).stdout  # noqa: S607  that of the runner


def changes(base: str, patterns: Sequence[str]) -> list[Change]:
    """Return the models that differ from the base, also if only their external data does."""
    words = os.fsdecode(git("diff", "--name-status", "--find-renames", "-z", base, "--", *patterns)).split("\0")
    models = []
    while len(words) > 1:
        kind, first = words.pop(0), words.pop(0)
        second = words.pop(0) if kind[0] in "RC" else first
        # A moved file whose bytes are the same has a likeness of 100 percent.
        word = "moved and changed" if kind[0] == "R" and kind != "R100" else WORDS.get(kind[0], "added")
        is_new = kind[0] in "AC"
        models.append(Change(word, None if is_new else first, None if kind[0] == "D" else second))
    known = {change.new for change in models}
    files = {*os.fsdecode(git("diff", "--name-only", "-z", base)).split("\0")}
    unchanged = {*os.fsdecode(git("ls-files", "-z", "--", *patterns)).split("\0")} - known - {""}
    models += [Change("changed", name, name) for name in unchanged if not files.isdisjoint(data_of(Path(name)))]
    return sorted(models, key=lambda change: change.new or change.old or "")


def data_of(path: Path) -> list[str]:
    """Return the files that hold a model's external data; none of a file that is no model."""
    try:
        return [(path.parent / location).as_posix() for location in ModelFile.open(path).external_locations]
    except OnnxtoolError:
        return []


@contextmanager
def checkout(base: str) -> Iterator[Path]:
    """Check the base out into a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "base"
        git("worktree", "add", "--quiet", "--detach", str(folder), base)
        try:
            if shutil.which("git-lfs"):
                subprocess.run(["git-lfs", "pull"], cwd=folder, capture_output=True, check=False)  # noqa: S607  likewise
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def review(change: Change, base: Path, gates: Sequence[str], pages: Path) -> Review:
    """Describe a model, check the gates, and draw it."""
    name = change.new or change.old or ""
    label = code_span(name) + ("" if change.old in (None, name) else f" from {code_span(change.old or '')}")
    if change.new is None:
        return Review(f"| {label} | deleted | |")
    if change.kind == "moved":
        return Review(f"| {label} | moved, the same bytes | |")
    files = [change.new, *([str(base / change.old)] if change.old else [])]
    for file in files:
        with Path(file).open("rb") as content:
            if content.read(len(POINTER)) == POINTER:
                return Review(
                    f"| {label} | {change.kind} | ❌ a pointer of Git LFS: check out with `lfs: true` |", code=2
                )
    fitting = [gate for gate in gates if change.old is not None or not needs_base(gate)]
    options = [word for gate in fitting for word in ("--fail_if", gate)]
    code, text, reason = onnxtool("stats", *options, "--format", "markdown", "--", *files)
    if not text:
        reason = code_span(" ".join(reason.split())[:300])
        return Review(f"| {label} | {change.kind} | ❌ {reason} |", code=2)
    pages.mkdir(parents=True, exist_ok=True)
    page = pages / f"{urllib.parse.quote(name, safe='')[:200]}.html"
    onnxtool("stats", *options, "--output", str(page), "--force", "--", *files)
    text = text.replace(f"{base}/", "")
    return Review(f"| {label} | {change.kind} | {'❌ met' if code else 'passed'} |", text, code)


def needs_base(expression: str) -> bool:
    """Whether a gate compares with a base, which an added model has not."""
    gate = parse_any_gate(expression)
    return bool(getattr(gate, "sign", 0)) or gate.figure.removeprefix("count(").startswith(("delta.", "edges."))


def onnxtool(*words: str) -> tuple[int, str, str]:
    """Run a command of onnxtool; return its exit code, and what it prints to stdout and stderr."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = run_arguments(words)
    return code, output.getvalue(), errors.getvalue()


def compose(reviews: Sequence[Review]) -> str:
    """Put all models into one comment: first a row of each, then the figures, then details, as far as they fit."""
    rows = [review.row for review in reviews[:MOST_ROWS]]
    if more := len(reviews) - len(rows):
        rows.append(f"| and {more} more | | |")
    head = "\n".join([MARKER, "", "| model | which is | gates |", "|---|---|---|", *rows, "", ""])
    left = MOST_CHARACTERS - len(head) - 200
    parts: list[list[str]] = []
    for review in filter(lambda review: review.text, reviews):
        top, _, details = review.text.partition(FOLDED)
        if len(top) + 2 > left:
            break
        left -= len(top) + 2
        parts.append([top, details])
    body = []
    for top, details in parts:
        fits = bool(details) and len(FOLDED) + len(details) <= left
        left -= len(FOLDED) + len(details) if fits else 0
        body.append(top + (f"{FOLDED}{details}" if fits else ""))
    num_texts = sum(bool(review.text) for review in reviews)
    cut = num_texts - len(parts) or sum(bool(details) for _, details in parts) - sum(FOLDED in text for text in body)
    note = (
        f"\n\nDetails of {cut} models are left out for their length; the artifact of this run has them.\n"
        if cut
        else ""
    )
    return head + "\n\n".join(body) + note


def post(text: str, number: str, *, is_new: bool) -> None:
    """Update the comment of an earlier run, or write one if `is_new`; a token that may not is said, and no error."""
    place = f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    try:
        comment = next((answer["id"] for answer in comments(f"{place}/{number}/comments")), None)
        if comment is not None:
            call("PATCH", f"{place}/comments/{comment}", {"body": text})
        elif is_new:
            call("POST", f"{place}/{number}/comments", {"body": text})
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404):
            raise
        print(f"no comment: the token may not write one ({error.code}), as for forks; the summary has it")


def comments(place: str) -> Iterator[dict[str, Any]]:
    """Yield our comments of a pull request."""
    page = 1
    while listed := call("GET", f"{place}?per_page=100&page={page}"):
        yield from (
            comment for comment in listed if comment["body"].startswith(MARKER) and comment["user"]["login"] == AUTHOR
        )
        page += 1


def call(method: str, place: str, content: dict[str, str] | None = None) -> Any:
    """Call GitHub's interface."""
    url = os.environ["GITHUB_API_URL"] + place
    headers = {"Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}", "Accept": "application/vnd.github+json"}
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310  of the runner
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  likewise
        return json.load(answer)


def main() -> int:
    """Review, and return 1 if a gate was met, or 2 if a model cannot be read."""
    variables = os.environ
    patterns, gates = (variables.get(name, "").split("\n") for name in ("REVIEW_PATHS", "REVIEW_FAIL_IF"))
    patterns, gates = ([line.strip() for line in lines if line.strip()] for lines in (patterns, gates))
    base, pages = variables["REVIEW_BASE"], Path(variables["REVIEW_PAGES"])
    with checkout(base) as folder:
        reviews = [review(change, folder, gates, pages) for change in changes(base, patterns or ["*.onnx"])]
    text = compose(reviews) if reviews else f"{MARKER}\n\nNo ONNX file differs from the base.\n"
    if summary := variables.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(text)
    if variables.get("REVIEW_COMMENT") == "true" and variables.get("REVIEW_NUMBER"):
        post(text, variables["REVIEW_NUMBER"], is_new=bool(reviews))
    return max((result.code for result in reviews), default=0)


if __name__ == "__main__":
    sys.exit(main())
