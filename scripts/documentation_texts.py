"""Texts that every machine has: documentation strings of Python's library, and manual pages of Debian."""

from __future__ import annotations

import ast
import gzip
import json
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Parts of the library that not every installation has.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
_FEWEST_WORDS = 3
_LONG_PARAGRAPH = 200

_REQUEST = re.compile(r"^[.'][ \t]*([A-Za-z][A-Za-z0-9]?|\\\")[ \t]*(.*)$")
_SECTIONS = ("SH", "Sh")
# Requests whose arguments are text; those of all others are sizes, tabs, macros, …
_SPOKEN = frozenset(
    (
        *("B", "I", "BR", "RB", "IR", "RI", "BI", "IB", "SM", "SB", "TP"),  # of man
        *("Nm", "Nd", "Ar", "Fl", "Pa", "Em", "Sy", "Dv", "Xr", "Li", "Ql", "Cm", "Op", "Va", "Fn", "Ic", "Dq", "Sq"),
    )
)
_ESCAPES = (
    (re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)|\\s[+-]?\d|\\[&|^/,:%c]|\\m\[[^\]]*\]|\\[hvwk]'[^']*'"), ""),
    (re.compile(r"\\\((?:aq|cq)|\\'|\\\*\(Aq"), "'"),
    (re.compile(r"\\\((?:lq|rq|dq)|\\\*\([lr]q|\\\[(?:lq|rq|dq)\]"), '"'),
    (re.compile(r"\\\((?:en|em|hy|mi)|\\\[(?:en|em|hy|mi)\]|\\-"), "-"),
    (re.compile(r"\\\(bu|\\\[bu\]"), "*"),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\(?:e|\(rs)"), "\\\\"),
    (re.compile(r"\\\[[^\]]*\]|\\\(..|\\\*\[[^\]]*\]|\\\*\(..|\\\*."), ""),
    (re.compile(r'\\".*$'), ""),
)


class Documented(NamedTuple):
    """Something with a documentation: its name, what it is in a line, and the rest."""

    name: str
    summary: str
    text: str


def documentation_texts(count: int) -> list[str]:
    """Return `count` different texts, evenly picked: paragraphs, and of long ones the sentences as well."""
    texts = list(dict.fromkeys(text for text in _texts() if len(text.split()) >= _FEWEST_WORDS))
    return [texts[place * len(texts) // count] for place in range(min(count, len(texts)))]


def write_corpus(path: Path, texts: list[str]) -> Path:
    """Write `texts` as JSON Lines with the ids d0, d1, … to `path`."""
    lines = (json.dumps({"id": f"d{place}", "contents": text}) for place, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def documented_objects() -> Iterator[Documented]:
    """Yield what the library documents: the first paragraph, and the others.

    A single paragraph is a text without a summary.
    """
    for name, text in _docstrings():
        summary, _, body = (" ".join(part.split()) for part in re.sub(r"\n\s*\n", "\0", text, count=1).partition("\0"))
        yield Documented(f"py:{name}", summary, body) if body else Documented(f"py:{name}", "", summary)


def manual_pages(folder: Path, most_of_a_program: int) -> Iterator[Documented]:
    """Yield the pages of all sections below `folder`: what NAME says of it, and DESCRIPTION.

    Of pages whose names begin alike, as those of one program do, the first ones are read.
    """
    of_programs: Counter[str] = Counter()
    for path in sorted(folder.glob("man[1-9]*/*.*")):
        program = re.split(r"[-_.]", path.name)[0]
        if path.is_symlink() or of_programs[program] >= most_of_a_program:  # a link is another name of a page
            continue
        try:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError):
            continue
        sections = _sections(raw.decode("utf-8", errors="replace"))
        _, dash, summary = sections.get("NAME", "").partition(" - ")
        if dash:
            of_programs[program] += 1
            name = path.name.removesuffix(".gz")
            yield Documented(f"man:{name}", summary.strip(), sections.get("DESCRIPTION", ""))


def _sections(page: str) -> dict[str, str]:
    """Return title to text of the sections of a page in roff, with macros of man or mdoc; tables and code stay out."""
    sections: dict[str, list[str]] = {}
    title, hidden = "", False
    for line in page.splitlines():
        request = _REQUEST.match(line)
        if request is None:
            if title and not hidden and not line.startswith((".", "'")):
                sections[title].append(_plain(line))
            continue
        name, arguments = request[1], request[2]
        if name in ("nf", "TS", "EX", "Bd", "fi", "TE", "EE", "Ed"):
            hidden = name in ("nf", "TS", "EX", "Bd")
        elif name in _SECTIONS:
            title, hidden = _plain(arguments).strip().strip('"').upper(), False
            sections.setdefault(title, [])
        elif title and not hidden and name in _SPOKEN:
            text = _plain(arguments).replace('"', "")
            sections[title].append(f"- {text}" if name == "Nd" else text)
    return {title: " ".join(" ".join(lines).split()) for title, lines in sections.items()}


def _plain(text: str) -> str:
    """Return a line without fonts and with its characters."""
    if "\\" not in text:  # all escapes begin with it
        return text
    for pattern, replacement in _ESCAPES:
        text = pattern.sub(replacement, text)
    return text


def _texts() -> Iterator[str]:
    for _, docstring in _docstrings():
        for paragraph in re.split(r"\n\s*\n", docstring):
            text = " ".join(paragraph.split())
            yield text
            if len(text) > _LONG_PARAGRAPH:
                yield from re.split(r"(?<=[.!?]) (?=[A-Z])", text)


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield name and documentation of modules, classes and functions, in the order of their files."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if _LEFT_OUT & set(inside.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # a file for another version
            continue
        yield from _documented(tree, ".".join(inside.with_suffix("").parts))


def _documented(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    waiting: deque[tuple[ast.AST, str]] = deque([(tree, module)])
    while waiting:  # in breadth, as ast.walk
        node, name = waiting.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node is not tree:
                name = f"{name}.{getattr(node, 'name', '')}"
            yield name, ast.get_docstring(node) or ""
        # No definition is inside of an expression, and most nodes are.
        waiting += [(child, name) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
