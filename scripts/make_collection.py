"""Make a known-item collection from text that every machine has, in BEIR's layout.

A document is what a manual page or a documentation string says at length, and the query for it is what the same one
says in a line: `python scripts/make_collection.py --output models/collection`. The same Python and the same pages give
the same bytes; `collection.json` names them, with a digest. The line is not a part of its document, documents that
share most of their text with an earlier one are left out, and a line that fits several documents is no query.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from documentation_texts import Documented, documented_objects, manual_pages

MANUAL = Path("/usr/share/man")
_QUERY_WORDS = (4, 30)
_FEWEST_WORDS, _MOST_WORDS = 12, 200  # of a document: what most encoders read
_MOST_OF_A_PROGRAM = 60  # pages whose names begin alike: one program does not make the collection
_SHINGLE, _KEPT_SHINGLES = 5, 4  # words, and of so many hashes one is kept
_SHARED = 0.5  # of the shingles of a document, with one earlier document
_STOP_WORDS = frozenset(
    ("a", "an", "the", "of", "to", "in", "for", "and", "or", "with", "on", "is", "this", "by", "as")
)


def make_collection(output: Path, *, num_documents: int = 0, num_queries: int = 500) -> dict[str, Any]:
    """Write a collection into the folder `output`, which is replaced, and return its record.

    Args:
        output: the folder.
        num_documents: at most so many, spread evenly; 0 for all.
        num_queries: of the split `test`; the others are of the split `train`.
    """
    items = list(distinct(documented()))
    if num_documents:
        items = sorted(sorted(items, key=lambda item: _hash(item.name))[:num_documents])
    counts = Counter(_key(item.summary) for item in items)
    fitting = [item for item in items if _is_query(item) and counts[_key(item.summary)] == 1]
    fitting.sort(key=lambda item: _hash(f"query {item.name}"))
    splits = {"test": sorted(fitting[:num_queries]), "train": sorted(fitting[num_queries:])}
    corpus = ({"_id": item.name, "title": "", "text": item.text} for item in items)
    queries = ({"_id": f"q:{item.name}", "text": item.summary} for split in splits.values() for item in split)
    judged = {name: [(f"q:{item.name}", item.name, 1) for item in split] for name, split in splits.items()}
    shutil.rmtree(output, ignore_errors=True)
    (output / "qrels").mkdir(parents=True)
    for name, entries in (("corpus", corpus), ("queries", queries)):
        (output / f"{name}.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    for name, grades in judged.items():
        lines = ["\t".join(map(str, row)) for row in (("query-id", "corpus-id", "score"), *grades)]
        (output / "qrels" / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    digest = hashlib.sha256()
    for path in sorted(output.rglob("*.[jt]s*")):
        digest.update(path.read_bytes())
    record = {
        "documents": len(items),
        "manual_pages": sum(item.name.startswith("man:") for item in items),
        **{f"queries_{name}": len(split) for name, split in splits.items()},
        "python": platform.python_version(),
        "sha256": digest.hexdigest(),
    }
    (output / "collection.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def documented() -> Iterator[Documented]:
    """Yield what can be a document; of manual pages of one program, some."""
    yield from (_cut(item) for item in documented_objects())
    yield from (_cut(item) for item in manual_pages(MANUAL, _MOST_OF_A_PROGRAM))


def distinct(items: Iterable[Documented]) -> Iterator[Documented]:
    """Yield items whose document is long enough and shares less than half of its text with any earlier one."""
    owners: dict[int, int] = {}
    names: set[str] = set()
    for number, item in enumerate(items):
        if len(item.text.split()) < _FEWEST_WORDS or item.name in names or _repeats(item):
            continue
        marks = _marks(item.text)
        shared = Counter(owners[mark] for mark in marks if mark in owners)
        if shared and max(shared.values()) >= _SHARED * len(marks):
            continue
        for mark in marks:
            owners.setdefault(mark, number)
        names.add(item.name)
        yield item


def _repeats(item: Documented) -> bool:
    """Whether the document holds its own query."""
    return bool(item.summary) and item.summary.casefold() in item.text.casefold()


def _is_query(item: Documented) -> bool:
    return _QUERY_WORDS[0] <= len(item.summary.split()) <= _QUERY_WORDS[1] and item.summary.isascii()


def _key(summary: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", summary.casefold())) - _STOP_WORDS


def _marks(text: str) -> set[int]:
    """Return hashes of runs of words; of long documents some, always the same ones (Broder, 1997)."""
    words = re.findall(r"\w+", text.casefold())
    runs = (" ".join(words[start : start + _SHINGLE]) for start in range(max(1, len(words) - _SHINGLE + 1)))
    hashes = {zlib.crc32(run.encode()) for run in runs}
    return {value for value in hashes if value % _KEPT_SHINGLES == 0} or {min(hashes)}


def _cut(item: Documented) -> Documented:
    return item._replace(text=" ".join(item.text.split()[:_MOST_WORDS]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder, which is replaced")
    parser.add_argument("--documents", type=int, default=0, help="at most so many; all by default")
    parser.add_argument("--queries", type=int, default=500, help="of the split test; the others are of train")
    options = parser.parse_args()
    record = make_collection(options.output, num_documents=options.documents, num_queries=options.queries)
    if not record["manual_pages"]:
        print(f"{MANUAL} has no manual pages: documentation strings alone", file=sys.stderr)
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
