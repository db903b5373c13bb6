"""Measure planning: texts a second by formats and processes, many ids, and a plan of ten thousand shards.

Collections are made in a temporary folder (`--folder` for another one), one at a time. Every figure is of `onnxtool
encode plan` as `make_plan` does it, in a process of its own, with loading a model of some kilobytes. Memory is the
largest resident set of this process, and that of the largest of its workers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("jsonl", "jsonl in 16 files", "jsonl.gz in 16 files", "jsonl.gz", "parquet", "txt")
_BATCH = 10_000


def lines(count: int, words: int) -> Iterator[list[dict[str, str]]]:
    """Yield batches of texts of so many words."""
    chance = random.Random(0)  # noqa: S311  no secret
    vocabulary = [f"word{number}" for number in range(3000)]
    texts = [" ".join(chance.choices(vocabulary, k=words)) for _ in range(997)]
    for begin in range(0, count, _BATCH):
        places = range(begin, min(count, begin + _BATCH))
        yield [{"id": f"doc-{place}", "contents": f"{place} {texts[place % 997]}"} for place in places]


def write(folder: Path, kind: str, count: int, words: int) -> Path:
    """Write a collection of a kind."""
    format_name, _, files = kind.partition(" in ")
    num_files = int(files.partition(" ")[0] or 1)
    folder.mkdir()
    for number in range(num_files):
        path = folder / f"corpus-{number:02d}.{format_name}"
        batches = lines(count // num_files, words)
        if format_name == "parquet":
            _write_table(path, batches)
            continue
        with gzip.open(path, "wt", compresslevel=6) if path.suffix == ".gz" else path.open("w") as file:
            for batch in batches:
                for line in batch:
                    line["id"] += f"-{number}"
                    file.write(f"{line['contents'] if format_name == 'txt' else json.dumps(line)}\n")
    return folder


def _write_table(path: Path, batches: Iterator[list[dict[str, str]]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, pa.schema([("id", pa.string()), ("contents", pa.string())])) as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_pylist(batch))


def measure(what: str, corpus: Path, output: Path, workers: int, shard_size: int) -> dict[str, float]:
    """Do one thing in a process of its own; return its seconds, texts a second, and memory in MB."""
    order = (what, str(corpus), str(output), str(workers), str(shard_size))
    command = [sys.executable, str(Path(__file__).resolve()), "--one", *order]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def measure_here(what: str, corpus: str, output: str, workers: str, shard_size: str) -> dict[str, float]:
    """Do it in this process."""
    sys.path.insert(0, str(ROOT))
    from onnxtool.encoding import PartOptions, VectorOptions, corpus_status, encode_part, make_plan, merge_parts
    from tests.encoding.corpora import dense_model

    workers_seen = [0.0]
    threading.Thread(target=_watch, args=(workers_seen,), daemon=True).start()
    opened = time.perf_counter()
    found = 0
    if what == "plan":
        options = VectorOptions(provider="cpu", shard_size=int(shard_size))
        model = dense_model(Path(output).parent)
        found = make_plan(model, corpus, output, options, workers=int(workers), force=True).num_texts
    elif what == "part":
        found = encode_part(f"{output}.plan.json", PartOptions()).num_texts
    elif what == "status":
        found = corpus_status(f"{output}.plan.json").num_done
    else:
        found = merge_parts(f"{output}.plan.json").num_texts
    seconds = time.perf_counter() - opened
    return {"seconds": seconds, "rate": found / seconds, "here": _peak(os.getpid()), "worker": max(workers_seen)}


def _peak(process: int) -> float:
    """Return the largest resident set of a process in MB; 0 where it is gone. What `exec` inherits is not counted."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1000
    return 0.0


def _watch(peaks: list[float]) -> None:
    """Note the peaks of the children of this process for as long as it lives."""
    while True:
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                peaks += [_peak(int(child)) for child in (task / "children").read_text().split()]
        time.sleep(0.1)


def compare_formats(folder: Path, count: int, words: int) -> None:
    """Print texts a second of each format, by one process and by two."""
    print(f"\n{count} texts of {words} words:\n")
    print("| collection | MB | 1 process, texts/s | 2 processes, texts/s | MB of memory, a worker |")
    print("|---|---:|---:|---:|---:|", flush=True)
    for kind in KINDS:
        corpus = write(folder / "corpus", kind, count, words)
        size = sum(path.stat().st_size for path in corpus.iterdir())
        found = [measure("plan", corpus, folder / "vectors", workers, 4096) for workers in (1, 2)]
        rates = " | ".join(f"{one['rate']:,.0f}" for one in found)
        memory = " | ".join(f"{max(one[name] for one in found):.0f}" for name in ("here", "worker"))
        print(f"| {kind} | {size / 1e6:.0f} | {rates} | {memory.replace(' | ', ', ')} |", flush=True)
        _remove(corpus)


def compare_counts(folder: Path, counts: list[int]) -> None:
    """Print texts a second of short texts, of which there are many."""
    print("\nShort texts, by 2 processes:\n")
    print("| ids, million | seconds | texts/s | MB of memory, a worker |\n|---:|---:|---:|---:|", flush=True)
    for millions in counts:
        corpus = write(folder / "corpus", "jsonl in 16 files", millions * 1_000_000, 2)
        one = measure("plan", corpus, folder / "vectors", 2, 4096)
        memory = f"{one['here']:.0f}, {one['worker']:.0f}"
        print(f"| {millions} | {one['seconds']:.0f} | {one['rate']:,.0f} | {memory} |", flush=True)
        _remove(corpus)


def measure_shards(folder: Path, count: int) -> None:
    """Print what a plan of many shards of one text takes."""
    print(f"\n{count} shards:\n\n| | seconds | MB of memory |\n|---|---:|---:|", flush=True)
    corpus = write(folder / "corpus", "jsonl", count, 5)
    for what in ("plan", "part", "status", "merge"):
        one = measure(what, corpus, folder / "vectors", 2, 1)
        print(f"| {what} | {one['seconds']:.1f} | {one['here']:.0f} |", flush=True)


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def main() -> int:
    """Print the tables; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2_000_000, help="of the first table")
    parser.add_argument("--words", type=int, default=45, help="of each of these texts")
    parser.add_argument("--ids", type=int, nargs="*", default=[1, 10, 50], help="of the second table, in millions")
    parser.add_argument("--shards", type=int, default=10_000, help="of the third table")
    parser.add_argument("--only", choices=("formats", "ids", "shards"))
    parser.add_argument("--folder", type=Path, help="for collections")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure_here(*arguments.one)))
        return 0
    print(f"On {describe_machine()}:")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.only in (None, "formats"):
            compare_formats(Path(name), arguments.texts, arguments.words)
        if arguments.only in (None, "ids"):
            compare_counts(Path(name), arguments.ids)
        if arguments.only in (None, "shards"):
            measure_shards(Path(name), arguments.shards)
    return 0


if __name__ == "__main__":
    sys.exit(main())
