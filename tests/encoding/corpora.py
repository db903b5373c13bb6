"""Corpora of a few words for tests, the models that encode them, and what their vectors have to be."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding import CorpusOptions, CorpusProgress, VectorOptions, encode_corpus
from onnxtool.progress import listening
from tests.infer.tiny_models import VOCABULARY, WORDS, ids_of, model_for, splade_terms, table, write_model

V = len(VOCABULARY)
SIZE = 16
SPLIT = 2000  # of 30 texts, about
OPTIONS = VectorOptions(provider="cpu", shard_size=SIZE, split_bytes=SPLIT)


@contextmanager
def told() -> Iterator[list[CorpusProgress]]:
    """Collect how far the runs inside of the block say that they are."""
    heard: list[CorpusProgress] = []
    with listening(lambda stage: heard.append(stage) if isinstance(stage, CorpusProgress) else None):
        yield heard


@contextmanager
def stopped_after(num_texts: int, by: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Stop the run inside of the block by an error once it has encoded so many texts."""

    def stop(stage: str) -> None:
        if isinstance(stage, CorpusProgress) and stage.num_texts >= num_texts:
            raise by

    with listening(stop):
        yield


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Make texts of 1 to 12 words."""
    chance = random.Random(seed)  # noqa: S311  no secret
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 12))) for _ in range(count)]


def write_corpus(path: Path, texts: Sequence[str]) -> Path:
    """Write `texts` with the ids d0, d1 and so on, packed where the name says so."""
    lines = "".join(json.dumps({"id": f"d{place}", "contents": text}) + "\n" for place, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def sparse_model(folder: Path) -> Path:
    """Write a sparse encoder with logits [B, S, V]."""
    return write_model(folder, model_for("sparse-encoding", table(V, V), "logits"))


def dense_model(folder: Path, **settings: Any) -> Path:
    """Write an embedder with hidden states [B, S, 4], whose checkpoint takes their mean."""
    model = model_for("sentence-similarity", table(V, 4), "last_hidden_state", **settings)
    return write_model(folder, model, modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}})


def expected_terms(text: str) -> dict[str, int]:
    """SPLADE's definition in a loop, in whole numbers as Anserini counts them."""
    weights = {term: int(weight / 5 * 256 + 0.5) for term, weight in splade_terms(table(V, V), text).items()}
    return {term: weight for term, weight in weights.items() if weight}


def expected_mean(text: str) -> NDArray[np.float64]:
    """The mean of the rows of a text's tokens: float64 [4]."""
    return np.asarray(table(V, 4).astype(np.float64)[ids_of(text)].mean(axis=0))


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return name to content of all files of an output, those beside the folder as well."""
    beside = [path for path in folder.parent.iterdir() if path.is_file() and path.name.startswith(f"{folder.name}.")]
    hidden = [path for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}.")]
    inside = {path.name: path.read_bytes() for path in folder.iterdir()}
    return inside | {
        path.name.removeprefix(folder.name): (path.is_file() and path.read_bytes()) or b""
        for path in (*beside, *hidden)
    }


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all shards, in order."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def lines_with_faults(count: int, seed: int) -> list[str]:
    """Return lines of JSON, among them repeated ids and faults, also before the first text and after the last."""
    chance = random.Random(seed)  # noqa: S311  no secret
    lines = ["{", "", '{"id": "none"}']
    for place, text in enumerate(make_texts(count, seed)):
        lines.append(json.dumps({"id": f"{seed}-{place}", "contents": text}))
        if chance.random() < 0.1:
            lines.append(json.dumps({"id": f"{seed}-{chance.randint(0, place)}", "contents": "again"}))
        if chance.random() < 0.05:
            lines.append(chance.choice(["[]", "", "\xff", '{"id": "x", "contents": " "}']))
    return [*lines, json.dumps({"id": f"{seed}-0", "contents": "again"}), "}"]


def write_lines(path: Path, lines: Sequence[str], rows_of_group: int = 7) -> None:
    """Write lines of JSON, compressed or not, or those that are objects as rows of Parquet, by the path's suffix."""
    if path.suffix != ".parquet":
        content = "\n".join(lines).encode("latin-1")
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"id": "", "contents": None, **json.loads(line)} for line in lines if line.startswith('{"')]
    pq.write_table(pa.Table.from_pylist(rows), path, rows_of_group)


def collection(folder: Path, kind: str, count: int = 150) -> Path:
    """Write so many texts as a collection of a kind, or as each file of a folder in which ids occur in several."""
    lines = lines_with_faults(count, 1)
    path = folder / f"corpus.{kind}"
    if kind == "folder":
        path = folder / "corpus"
        path.mkdir()
        for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt", "e.tsv", "z.jsonl"):
            written = collection(folder, name.partition(".")[2], count)
            written.rename(path / name)
        return path
    if kind == "txt":
        path.write_text("\n".join(["", *make_texts(count, 2), ""]))
    elif kind == "tsv":
        rows = "".join(f"t{place % (count - 10)}\t{text}\n" for place, text in enumerate(make_texts(count, 3)))
        path.write_text(rows + "none\n")
    else:
        write_lines(path, lines)
    return path


def whole(folder: Path, model: Path, corpus: Path, **options: Any) -> dict[str, bytes]:
    """Encode in one run, and return what that wrote."""
    chosen = {"provider": "cpu", "shard_size": SIZE, "split_bytes": SPLIT, **options}
    encode_corpus(model, corpus, folder / "whole", CorpusOptions(**chosen))
    return contents_of(folder / "whole")


_PART = """
import sys
from onnxtool.encoding import PartOptions, VectorOptions, encode_part
if __name__ == "__main__":
    sizes = dict(zip(("shard_size", "split_bytes"), map(int, sys.argv[4:6])))
    encode_part(*sys.argv[1:4], VectorOptions(provider="cpu", **sizes), PartOptions(processes=1))
"""


def part_command(folder: Path, options: VectorOptions, *places: str | Path) -> list[str]:
    """Return the command of a process that encodes all splits of a corpus: model, corpus and output are `places`."""
    (folder / "run.py").write_text(_PART)
    return [sys.executable, *map(str, (folder / "run.py", *places, options.shard_size, options.split_bytes))]


def kill_two(command: Sequence[str], chance: random.Random, has_begun: Callable[[], bool]) -> None:
    """Run a command in two processes at once, and kill both a moment after it has begun."""
    both = [subprocess.Popen(command) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not has_begun() and both[0].poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(chance.random() * 0.1)
    for process in both:
        process.kill()
        process.wait()
