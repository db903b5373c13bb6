"""Texts of uneven length that every machine has: sentences and paragraphs of Python's own documentation strings."""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Parts of the library that not every installation has.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "__pycache__"})
_FEWEST_WORDS = 3
_LONG_PARAGRAPH = 200


def documentation_texts(count: int) -> list[str]:
    """Return `count` different texts, evenly picked: paragraphs, and of long ones the sentences as well."""
    found = list(dict.fromkeys(text for text in _texts() if len(text.split()) >= _FEWEST_WORDS))
    return [found[place * len(found) // count] for place in range(min(count, len(found)))]


def write_corpus(path: Path, texts: list[str]) -> Path:
    """Write `texts` as JSON Lines with the ids d0, d1, … to `path`."""
    lines = (json.dumps({"id": f"d{place}", "contents": text}) for place, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _texts() -> Iterator[str]:
    for docstring in _docstrings():
        for paragraph in re.split(r"\n\s*\n", docstring):
            text = " ".join(paragraph.split())
            yield text
            if len(text) > _LONG_PARAGRAPH:
                yield from re.split(r"(?<=[.!?]) (?=[A-Z])", text)


def _docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file for another version
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
