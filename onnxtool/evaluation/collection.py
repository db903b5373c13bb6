"""A test collection: documents, queries, and relevance judgements.

Three layouts are supported; any of the names may end in `.gz`.

    BEIR   corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv (query-id, corpus-id, score)
    MTEB   the same with qrels/SPLIT.jsonl, or folders of Parquet: corpus/, queries/, qrels/SPLIT-*.parquet
    TREC   a corpus, topics.tsv (id and text with a tab between), qrels.txt (topic, 0, document, grade)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnxtool.checkpoint.text_files import CORPORA, LineError, iterate_texts
from onnxtool.encoding.parquet import read_rows
from onnxtool.encoding.sources import REPEATED_ID, Document, Reject, SourceReader, find_sources, id_digest
from onnxtool.errors import InputError, some
from onnxtool.evaluation.options import DEFAULT_SPLIT
from onnxtool.progress import tell
from onnxtool.reading import GZIP_ERRORS, MOST_LINE_BYTES, lines_of, open_lines, parse_json

_QUERIES = ("queries.jsonl", "queries.parquet", "queries.tsv", "queries", "topics.tsv")
_QRELS = (".tsv", ".jsonl", ".parquet", ".txt", ".qrels", "")
_JUDGED = ("query-id", "corpus-id", "score")  # columns of MTEB's judgements
_PART = re.compile(r"(.+)-[0-9]+-of-[0-9]+\.parquet")
_TOLD_LINES = 1 << 18  # half a second or more
_MAX_BYTES = 1 << 30  # of queries, or of judgements, in memory

Judgements = Mapping[str, Mapping[str, int]]
"""Grades by query and document."""


@dataclass(frozen=True)
class Collection:
    """Queries with their judgements; the documents stay on disk.

    Attributes:
        name: its folder.
        corpus: the file or folder of the documents.
        split: the split of the judgements.
        queries: texts of the judged queries by id, in file order.
        judgements: the judgements of these queries.
        files: the files that queries and judgements were read from.
        num_unjudged: number of queries without a judgement, which are left out.
        num_unknown: number of judged queries that are missing.
        num_repeated: number of lines that repeat an earlier one.
    """

    name: str
    corpus: Path
    split: str
    queries: Mapping[str, str]
    judgements: Judgements
    files: tuple[Path, ...]
    num_unjudged: int = 0
    num_unknown: int = 0
    num_repeated: int = 0

    @property
    def num_judgements(self) -> int:
        """The number of judged documents over all queries."""
        return sum(map(len, self.judgements.values()))

    @cached_property
    def relevant(self) -> Mapping[str, frozenset[str]]:
        """Relevant documents by query: those with a grade above 0."""
        return {
            query: frozenset(document for document, grade in grades.items() if grade > 0)
            for query, grades in self.judgements.items()
        }

    @property
    def num_without_relevant(self) -> int:
        """The number of queries whose judgements are all 0 or less."""
        return sum(not documents for documents in self.relevant.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems that do not prevent its use."""
        counts = (
            (self.num_unjudged, "queries have no judgement, and are left out"),
            (self.num_unknown, "judged queries are not among the queries, and are left out"),
            (self.num_repeated, "lines repeat an earlier query or judgement"),
            (self.num_without_relevant, "queries have no relevant document, and count as 0, as BEIR counts them"),
        )
        return tuple(f"{count} {text}" for count, text in counts if count)


def open_collection(data: Path, split: str = DEFAULT_SPLIT) -> Collection:
    """Read queries and judgements of the collection in a folder, and find its documents.

    Raises:
        InputError: it is no folder, a file is missing or malformed, an id stands for two queries, a document has two
            grades for a query, documents are of several splits, or no query is judged.
    """
    if not re.fullmatch(r"[\w.-]+", split) or split.startswith("."):
        raise InputError(f"{split!r} is not the name of a split", "pass the name of a file in qrels/, such as test")
    if not data.is_dir():
        raise InputError(
            f"the collection {data} {'is not a folder' if data.exists() else 'does not exist'}",
            "pass a folder with corpus, queries and qrels to --data; hf download fetches a dataset of the hub into one",
        )
    corpus = _find_file(data, CORPORA, "documents")
    topics = _find_file(data, _QUERIES, "queries")
    qrels = _find_judgements(data, split)
    splits = {match[1] for path in data.glob("corpus/*") if (match := _PART.fullmatch(path.name))}
    if len(splits) > 1:
        raise InputError(
            f"{data} has other documents for each split: {', '.join(sorted(splits))}", "leave those of one split there"
        )
    queries, repeated = _queries(topics, split)
    judgements, repeated_judgements = _judgements(qrels)
    judged = {name: text for name, text in queries.items() if name in judgements}
    if not judged:
        raise InputError(
            f"{qrels[0]} judges none of the {len(queries)} queries of {topics}",
            f"compare their ids: {some(judgements)} are judged, and {some(queries)} are queries",
        )
    return Collection(
        name=str(data),
        corpus=corpus,
        split=split,
        queries=judged,
        judgements={name: judgements[name] for name in judged},
        files=(*_query_files(topics, split), *qrels),
        num_unjudged=len(queries) - len(judged),
        num_unknown=len(judgements.keys() - judged.keys()),
        num_repeated=repeated + repeated_judgements,
    )


def read_documents(collection: Collection, rejects: Counter[str] | None = None) -> Iterator[Document]:
    """Yield the documents that have a text and a unique id, as for `encode_corpus`.

    Args:
        collection: the collection.
        rejects: receives the counts of other lines by reason.

    Raises:
        InputError: a file cannot be read.
    """
    sources, _ = find_sources(collection.corpus)
    known: set[bytes] = set()
    for line in SourceReader(sources):
        is_repeated = isinstance(line, Document) and (digest := id_digest(line.id)) in known
        if isinstance(line, Document) and not is_repeated:
            known.add(digest)
            yield line
        elif rejects is not None:
            rejects[line.kind if isinstance(line, Reject) else REPEATED_ID] += 1


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and content of each nonblank line of a UTF-8 file; `.gz` is decompressed.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is too large.
    """
    number, size = 0, 0
    try:
        if not path.is_file():  # a pipe would wait for a writer
            raise InputError(f"{path} is not a file", "pass a file of text")
        with open_lines(path) as file:
            for raw, num_bytes in lines_of(file):
                number, size = number + 1, size + num_bytes
                if number % _TOLD_LINES == 0:
                    tell(f"reading {path}, line {number:,}")
                if raw is None or size > _MAX_BYTES:
                    subject = f":{number} has a line" if raw is None else " has text"
                    most = MOST_LINE_BYTES if raw is None else _MAX_BYTES
                    raise InputError(f"{path}{subject} of more than {most} bytes", "split it")
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number} is not UTF-8: {error.reason}", "convert the file to UTF-8") from None
    except GZIP_ERRORS as error:
        raise InputError(f"{path} is not a complete gzip file: {error}", "copy it again, or unpack it") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run in TREC format, `query Q0 document rank score name` per line: scores by query and document.

    Raises:
        InputError: a line is malformed, or a document is listed twice for a query.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in read_lines(path):
        cells = line.split()
        score = _number(cells[4]) if len(cells) == 6 else None
        if score is None:
            raise InputError(
                f"{path}:{number} is not a line of a run: {line[:80]!r}", "write `query Q0 document rank score name`"
            )
        documents = run.setdefault(cells[0], {})
        if cells[2] in documents:
            raise InputError(f"{path}:{number} has document {cells[2]!r} twice for query {cells[0]!r}", "remove one")
        documents[cells[2]] = score
    if not run:
        raise InputError(f"{path} has no line", "pass a run in TREC's format")
    return run


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _find_file(folder: Path, names: Sequence[str], content: str) -> Path:
    """Return the only file of `folder` with one of `names`.

    Raises:
        InputError: there is none, or there are several.
    """
    candidates = (folder / f"{name}{packed}" for name in names for packed in ("", ".gz"))
    paths = [path for path in candidates if path.exists()]
    if odd := [path for path in paths if not path.is_file() and not path.is_dir()]:  # a pipe would wait for a writer
        raise InputError(f"{odd[0]} is neither a file nor a folder", "put the texts into a file")
    if not paths:
        raise InputError(f"{folder} has no {content}", f"put them into one of {', '.join(names)}, .gz behind it or not")
    if len(paths) > 1:
        raise InputError(
            f"{folder} has its {content} twice: {', '.join(path.name for path in paths)}", "leave one of them there"
        )
    return paths[0]


def _find_judgements(folder: Path, split: str) -> tuple[Path, ...]:
    """Return the judgement file of `split`, or the parts of its table.

    Raises:
        InputError: there is none, or there are several.
    """
    stems = (f"qrels/{split}", f"qrels.{split}", *(("qrels",) if split == DEFAULT_SPLIT else ()))
    candidates = (folder / f"{stem}{suffix}{packed}" for stem in stems for suffix in _QRELS for packed in ("", ".gz"))
    tables: list[tuple[Path, ...]] = [(path,) for path in candidates if path.is_file()]
    tables += [parts for stem in stems if (parts := tuple(sorted(folder.glob(f"{stem}-[0-9]*-of-*.parquet"))))]
    if len(tables) == 1:
        return tables[0]
    if tables:
        names = ", ".join(str(path.relative_to(folder)) for path, *_ in tables)
        raise InputError(f"{folder} has judgements of {split} twice: {names}", "leave one of them there")
    inside = sorted(path.name for path in folder.glob("qrels*/*"))
    remedy = f"there are {', '.join(inside)}: pass --split" if inside else f"put them into qrels/{split}.tsv"
    raise InputError(f"{folder} has no judgements of the split {split!r}", remedy)


def _queries(path: Path, split: str) -> tuple[dict[str, str], int]:
    """Return texts by id, and the number of repeated lines."""
    queries: dict[str, str] = {}
    repeated = 0
    for name, text in _named_queries(path, split):
        if not text.strip():
            raise InputError(f"query {name!r} of {path} has no text", "write one, or remove it")
        if queries.setdefault(name, text) != text:
            raise InputError(f"{path} has two queries with the id {name!r}", "give one of them another id")
        repeated += 1
    if not queries:
        raise InputError(f"{path} has no queries", "write one a line")
    return queries, repeated - len(queries)


def _query_files(path: Path, split: str) -> tuple[Path, ...]:
    """Return the files of the queries; in a folder with a table for each split, the parts of that table."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple(file for file in files if file.name.startswith(f"{split}-")) or tuple(files)


def _named_queries(path: Path, split: str) -> Iterator[tuple[str, str]]:
    if path.name.lower().removesuffix(".gz").endswith((".jsonl", ".tsv")):
        for text in iterate_texts(path):
            assert text.id is not None  # noqa: S101  both have one
            yield text.id, text.contents
        return
    sources = (source for file in _query_files(path, split) for source in find_sources(file)[0])
    for line in SourceReader(tuple(sources)):
        if isinstance(line, Reject):
            raise InputError(f"row {line.line} of {line.file} in {path} {line.reason}", "repair it, or remove it")
        yield line.id, line.contents


def _judgements(paths: Sequence[Path]) -> tuple[dict[str, dict[str, int]], int]:
    """Return grades by query and document, and the number of repeated lines."""
    judgements: dict[str, dict[str, int]] = {}
    repeated = 0
    for place, cells in (line for path in paths for line in _judgement_lines(path)):
        if len(cells) not in (3, 4) or not re.fullmatch(r"[+-]?[0-9]{1,9}(\.0+)?", cells[-1].strip()):
            raise InputError(
                f"{place} is no judgement: {' '.join(cells)[:80]!r}",
                "write `query-id<TAB>corpus-id<TAB>score`, or as TREC does `query 0 document grade`",
            )
        query, document, grade = cells[0].strip(), cells[-2].strip(), int(float(cells[-1]))
        grades = judgements.setdefault(query, {})
        if grades.setdefault(document, grade) != grade:
            raise InputError(
                f"{place} judges document {document!r} for query {query!r} as {grade}, and an earlier line as "
                f"{grades[document]}",
                "remove one of the lines",
            )
        repeated += 1
    if not judgements:
        raise InputError(f"{paths[0]} has no judgements", "write one a line")
    return judgements, repeated - sum(map(len, judgements.values()))


def _judgement_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the position and the cells of each line or row, with the grade last."""
    if path.suffix == ".parquet":
        for number, (row, _) in enumerate(read_rows(path), start=1):
            yield f"{path}:{number}", [row.reason] if isinstance(row, LineError) else _cells(row)
        return
    is_json = path.name.removesuffix(".gz").endswith(".jsonl")
    for number, line in read_lines(path):
        cells = line.split("\t") if "\t" in line else line.split()
        if is_json:
            try:
                cells = _cells(parse_json(line))
                "".join(cells).encode()  # JSON can escape half of a pair of UTF-16
            except ValueError as error:
                raise InputError(f"{path}:{number} is not JSON: {error}", "repair the line") from None
        elif number == 1 and cells[-1].strip().lower() in ("score", "relevance", "rel"):
            continue
        yield f"{path}:{number}", cells


def _cells(row: object) -> list[str]:
    """Return ids and grade of an MTEB row, as far as present; 1.0 is the grade 1."""
    values = [row[name] for name in _JUDGED if row.get(name) is not None] if isinstance(row, dict) else [row]
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
