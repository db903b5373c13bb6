"""Read texts from a file: one per line, tab-separated ids and texts, or JSON Lines with `id`, `contents`, `query`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from onnxtool.errors import InputError, some
from onnxtool.options import StrPath, check
from onnxtool.reading import GZIP_ERRORS, MOST_LINE_BYTES, STDIN, lines_of, open_lines, open_regular, parse_json
from onnxtool.reports import Json

# File names of documents in test collections of BEIR, TREC and MS MARCO, with or without `.gz`.
CORPORA = ("corpus.jsonl", "corpus.parquet", "corpus.tsv", "collection.tsv", "corpus.txt", "corpus")
_COLUMNS = {"id", "_id", "docid", "pid", "qid", "title", "text", "contents", "passage", "query"}
FIELDS_PAGE = "docs/guide/corpus.md, Fields of a line"
_MAX_FIELDS = 8
_COMPANION_NAMES = ("queries", "topics", "qrels")


@dataclass(frozen=True, slots=True)
class TextInput:
    """A text to run.

    Attributes:
        id: the text's id in the file; None if it has none.
        query: the text it is paired with, such as a question; None for a single text.
    """

    contents: str
    id: str | None = None
    query: str | None = None

    def __post_init__(self) -> None:
        is_named = isinstance(self.id, str | None) and isinstance(self.query, str | None)
        if not isinstance(self.contents, str) or not is_named:  # cheap to create: a corpus has millions
            for name in ("contents", "id", "query"):
                check(name, getattr(self, name), str if name == "contents" else str | None)


Several = TypeVar("Several")
_Parsed = TypeVar("_Parsed")


def several(texts: str | TextInput | Iterable[Several]) -> Iterable[Several]:
    """Return the given texts, or the single one in a tuple."""
    entries: Any = (texts,) if isinstance(texts, str | TextInput) else texts
    return entries  # type: ignore[no-any-return]  # a text is one of what they are


class LineError(ValueError):
    """A line without a valid text.

    Attributes:
        reason: the problem, as the rest of a sentence that begins with the line number.
        hint: how to fix it.
        id: the text's id; None if it is missing or cannot be read.
    """

    def __init__(self, reason: str, hint: str, id: str | None = None) -> None:  # noqa: A002
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.id = id


def is_beside_documents(name: str) -> bool:
    """Whether a file or folder is named like the queries or judgements of a test collection."""
    return name.rstrip("/").partition(".")[0].lower() in _COMPANION_NAMES


def are_queries(path: Any) -> bool:
    """Whether the texts of a file are a test collection's queries, by its name or its folder's, here or in a store."""
    return "queries" in (path.name.partition(".")[0].lower(), path.parent.name.lower())


def documents_of_collection(folder: object, names: Collection[str]) -> str | None:
    """Return the file among `names`, the contents of `folder`, with the documents of a test collection.

    None if it is not a test collection: no file is named like documents, or none like queries or judgements.

    Raises:
        InputError: there are judgements, but no documents or several document files.
    """
    queries_or_judgements = [name for name in names if is_beside_documents(name)]
    documents = sorted(name for name in names if name.removesuffix(".gz") in CORPORA)
    if len(documents) > 1 and queries_or_judgements:
        raise InputError(f"{folder} has its documents twice: {', '.join(documents)}", "leave one of them there")
    if not documents and any(name.lower().startswith("qrels") for name in queries_or_judgements):
        raise InputError(
            f"{folder} is a test collection, with {', '.join(sorted(queries_or_judgements))}, and has no documents",
            f"pass one file of it, or call its documents {CORPORA[0]}",
        )
    return documents[0] if queries_or_judgements and documents else None


def read_texts(path: StrPath) -> tuple[TextInput, ...]:
    """Read all texts of the file at `path`; see `iterate_texts`."""
    return tuple(iterate_texts(Path(path)))


_MAX_COUNTED_BYTES = 1 << 30  # to show how many texts are left


def iterate_texts(path: Path) -> Iterator[TextInput]:
    """Yield the texts of the file at `path`, skipping blank lines; files ending in `.gz` are decompressed.

    `-` is stdin: JSON Lines if the first text begins with a brace, else one text per line. The folder of a test
    collection stands for its documents.

    Raises:
        InputError: the file cannot be read or is empty, its suffix is unknown, or a line is malformed.
    """
    if path != STDIN and path.is_dir():
        try:
            documents = documents_of_collection(path, [entry.name for entry in path.iterdir()])
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", "check its permissions") from error
        if documents is None:
            raise InputError(f"cannot read {path}: it is a folder, but not a test collection", "pass one file of it")
        path /= documents
    if path != STDIN and not path.exists():
        raise _missing(path)
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    parse = _Undecided() if path == STDIN else _FORMATS.get(suffix)
    if parse is parse_object:
        parse = partial(parse_object, is_query=are_queries(path))
    if parse is None:
        raise InputError(
            f"cannot tell the format of {path} from its suffix {path.suffix!r}",
            f"use {', '.join(_FORMATS)}, or these with .gz appended: a text a line, a JSON object with id and "
            "contents a line, or id and text with a tab between them",
        )
    is_empty = True
    for text in _texts(path, parse):
        is_empty = False
        yield text
    if is_empty:
        raise InputError(f"{'standard input' if path == STDIN else path} has no texts", "put one on each line")


def count_lines(path: Path) -> int:
    """Return the number of line feeds in the file at `path`; 0 if that takes seconds, or decoding (stdin, `.gz`)."""
    if path == STDIN or path.name.lower().endswith(".gz") or not path.is_file():
        return 0
    if path.stat().st_size > _MAX_COUNTED_BYTES:
        return 0
    with open_regular(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def parsed_lines(path: Path, parse: Callable[[str], _Parsed]) -> Iterator[_Parsed]:
    """Yield what `parse` makes of each nonblank line of the UTF-8 file at `path`; only a line feed ends a line.

    Raises:
        InputError: a line is malformed, by a LineError of `parse`.
        OSError: the file cannot be read.
    """
    with open_lines(path) as file:
        for number, (raw, _) in enumerate(lines_of(file), start=1):
            try:
                line = decode_line(raw)
                if line.strip():
                    yield parse(line)
            except LineError as error:
                raise InputError(f"{path}:{number} {error.reason}", error.hint) from None


def _texts(path: Path, parse: Callable[[str], TextInput]) -> Iterator[TextInput]:
    try:
        yield from parsed_lines(path, parse)
    except FileNotFoundError:
        raise _missing(path) from None
    except GZIP_ERRORS as error:
        raise InputError(f"{path} is not a complete gzip file: {error}", "copy it again, or unpack it") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def _missing(path: Path) -> InputError:
    return InputError(f"no such input file: {path}", "check the path")


class _Undecided:
    """Parse the lines of a file without a suffix, in the format of the first one."""

    def __init__(self) -> None:
        self._parse: Callable[[str], TextInput] | None = None

    def __call__(self, line: str) -> TextInput:
        if self._parse is None:
            self._parse = parse_object if line.lstrip().startswith("{") else TextInput
        return self._parse(line)


def decode_line(raw: bytes | None) -> str:
    """Return a line as text, without its line ending; None stands for a line that was too long.

    Raises:
        LineError: it is not UTF-8, or too long.
    """
    if raw is None:
        raise LineError(f"is longer than {MOST_LINE_BYTES} bytes", "split the text")
    try:
        # Editors on Windows put a byte order mark, which is not part of the first text, at the start of a file.
        return raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise LineError(
            f"is not UTF-8: {error.reason} at byte {error.start} of the line", "convert the file to UTF-8"
        ) from None


def parse_object(line: str, *, is_query: bool = False) -> TextInput:
    """Read the text of a JSON object: `id` and `contents`, or BEIR's `_id`, `text` and, except of a query, `title`.

    Raises:
        LineError: it is none.
    """
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise LineError(f"is not JSON: {error}", 'each line is an object such as {"id": "1", …}') from None
    if not isinstance(entry, dict):
        raise LineError(f"is not a JSON object: {line[:60]}", 'write {"id": "1", "contents": "a text"}')
    return named_text(entry, is_query=is_query)


def parse_tabbed(line: str) -> TextInput:
    """Read a line with id and text separated by a tab, the format of MS MARCO's passages and queries.

    Raises:
        LineError: it is none.
    """
    name, tab, contents = line.partition("\t")
    if not tab or not name.strip():
        raise LineError("has no id followed by a tab", "write `id<TAB>text`")
    if _COLUMNS.issuperset(cell.strip().lower() for cell in line.split("\t")):
        raise LineError("names columns, and is no text", "remove the line")
    return TextInput(contents.strip(), name.strip())


def named_text(entry: dict[str, Json], *, is_query: bool = False) -> TextInput:
    """Read id and text from the fields of an object or the columns of a row; BEIR reads queries without their titles.

    Raises:
        LineError: the id is not a string or an integer, or the text is not a string.
    """
    name = entry.get("id", entry.get("_id"))
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise _lacks("id that is a string or an integer", "its name is id or _id", entry)
    contents = entry["contents"] if "contents" in entry else entry.get("text") if is_query else _beir_text(entry)
    if not isinstance(contents, str):
        raise _lacks("contents that is a string", "its name is contents or text", entry, str(name))
    query = entry.get("query")
    if query is not None and not isinstance(query, str):
        raise LineError("has a query that is not a string", 'leave "query" out, or make it a text', str(name))
    try:
        f"{name}{contents}{query}".encode()
    except UnicodeEncodeError:  # JSON can escape half of a pair of UTF-16
        raise LineError("contains an unpaired surrogate", "remove it, or write both halves", str(name)) from None
    return TextInput(contents, str(name), query)


def _lacks(field: str, names: str, entry: dict[str, Json], name: str | None = None) -> LineError:
    """Make the error for a missing field; the fields that a line has follow a colon, as they differ by line."""
    fields = some(list(entry), _MAX_FIELDS) or "none"
    return LineError(f"has no {field}: {names}, and the line's fields are {fields}", f"see {FIELDS_PAGE}", name)


def _beir_text(entry: dict[str, Json]) -> Json:
    """Prepend the title to the text, like BEIR's own encoders."""
    title, text = entry.get("title"), entry.get("text")
    return f"{title} {text}".strip() if isinstance(title, str) and isinstance(text, str) else text


_FORMATS: dict[str, Callable[[str], TextInput]] = {
    ".txt": TextInput,
    ".jsonl": parse_object,
    ".tsv": parse_tabbed,
}
