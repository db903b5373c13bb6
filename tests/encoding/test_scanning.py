"""A collection is read in pieces, by any number of processes: its shards are those of one reader from first to last."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnxtool.encoding import pieces, repeated_ids, scanning, sources
from onnxtool.encoding.pieces import cut_pieces
from onnxtool.encoding.planned_shards import PlannedShard
from onnxtool.encoding.scanning import scan_corpus
from onnxtool.encoding.sources import Document, Position, SourceReader, find_sources
from onnxtool.encoding.windows import REPEATED_ID
from onnxtool.errors import InputError, OutputWriteError
from tests.encoding.corpora import dense_model, told

_IDS = st.sampled_from(["a", "b", "c", "d1", "d2", "d3", "1", "2", "x:3", "é"])
_WORDS = st.sampled_from(["one", "two words", "  ", "ü", "three\u2028lines", "long " * 30])
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r\n\n\n"])
_BROKEN = st.sampled_from(
    [b"{", b"\xff\xfea\x00", b"[1]", b'{"id": 1.5}', b'{"id": "a"}', b"\xef\xbb\xbf", b"\0", b"\t"]
)
_SUFFIXES = st.sampled_from([".jsonl", ".tsv", ".txt", ".jsonl.gz", ".txt.gz", ".parquet"])


@st.composite
def _files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of a collection: its suffix, and its bytes."""
    suffix = draw(_SUFFIXES)
    rows = draw(st.lists(st.tuples(_IDS, _WORDS), max_size=12))
    if suffix == ".parquet":
        return suffix, _parquet(rows, draw(st.integers(1, 5)))
    lines = [_line(suffix, *row) if draw(st.integers(0, 4)) else draw(_BROKEN) for row in rows]
    content = b"".join(line + draw(_ENDS) for line in lines)
    content = draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\n"])) + content
    content = content if draw(st.booleans()) else content.rstrip(b"\r\n")
    return suffix, gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def _line(suffix: str, name: str, words: str) -> bytes:
    if suffix.startswith(".jsonl"):
        return json.dumps({"id": name, "contents": words}).encode()
    return (f"{name}\t{words}" if suffix == ".tsv" else words).encode()


def _parquet(rows: list[tuple[str, str]], group: int) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    schema = pa.schema([("id", pa.string()), ("contents", pa.string())])
    table = pa.Table.from_pylist([{"id": name, "contents": words} for name, words in rows], schema)
    pq.write_table(table, sink, row_group_size=group)
    return bytes(sink.getvalue().to_pybytes())


def _one_after_the_other(folder: Path, shard_size: int) -> tuple[list[PlannedShard], dict[str, int]]:
    """Read all lines in order, with a set of all ids: what a plan has to say."""
    reader = SourceReader(find_sources(folder)[0])
    seen: set[str] = set()
    reasons: Counter[str] = Counter()
    begin, last = Position(), Position()
    found: list[tuple[Position, list[str], int, list[int], int]] = []
    texts: list[str] = []
    repeated: list[int] = []
    rejects = read = 0
    for line in reader:
        if isinstance(line, Document) and line.id not in seen:
            seen.add(line.id)
            name, contents = line.id.encode(), (line.sha256 or line.contents).encode()
            texts.append(blake2b(f"{len(name)}:".encode() + name + contents, digest_size=16).hexdigest())
            read += 1
            last = reader.position
            if len(texts) == shard_size:
                found.append((begin, texts, rejects, repeated, read))
                begin, texts, repeated, rejects, read = last, [], [], 0, 0
            continue
        rejects += 1
        reasons[REPEATED_ID if isinstance(line, Document) else line.kind] += 1
        if isinstance(line, Document):
            repeated.append(read)
            read += 1
    if texts:
        found.append((begin, texts, rejects, repeated, read))
    elif found:  # what follows the last text belongs to its shard
        place, names, before, earlier, count = found.pop()
        found.append((place, names, before + rejects, earlier + [count + number for number in repeated], 0))
    shards = []
    for place, names, count, numbers, _ in found:
        digest = blake2b(bytes.fromhex("".join(names)), digest_size=16).hexdigest()
        shards.append(PlannedShard(*place[1:], len(names), digest, count, _ranges(numbers)))
    return shards, dict(reasons)


def _ranges(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return tuple(found)


def _write(folder: Path, files: list[tuple[str, bytes]]) -> Path:
    for number, (suffix, content) in enumerate(files):
        (folder / f"f{number}{suffix}").write_bytes(content)
    return folder


def _scan(folder: Path, shard_size: int, workers: int = 1) -> tuple[list[PlannedShard], dict[str, int]]:
    shards, reasons = scan_corpus(find_sources(folder)[0], shard_size, workers)
    return list(shards), dict(reasons)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Blocks of three texts, and five digests at once: what only large collections have."""
    for module in (pieces, scanning):
        monkeypatch.setattr(module, "BLOCK_TEXTS", 3)
    monkeypatch.setattr(repeated_ids, "_MOST_AT_ONCE", 5)
    return monkeypatch


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(_files(), min_size=1, max_size=4), size=st.integers(1, 6), piece=st.integers(1, 200))
def test_shards_are_those_of_one_reader(
    files: list[tuple[str, bytes]], size: int, piece: int, small: pytest.MonkeyPatch
) -> None:
    """Wherever pieces begin, and whatever lines are: blank, broken, repeated, behind the last text, or without end."""
    small.setattr(pieces, "PIECE_BYTES", piece)
    with tempfile.TemporaryDirectory() as name:
        folder = _write(Path(name), files)
        expected = _one_after_the_other(folder, size)
        if expected[0]:
            assert _scan(folder, size) == expected
        else:
            with pytest.raises(InputError, match=r"has no texts|gave a text"):
                _scan(folder, size)


def test_an_id_that_many_texts_have_is_kept_once(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    """The others are a range of the last shard, and not a number each."""
    small.setattr(pieces, "PIECE_BYTES", 500)
    lines = [{"id": "once", "contents": "a"}, *({"id": "often", "contents": str(place)} for place in range(1000))]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shards, reasons = _scan(tmp_path, 2)
    assert [(shard.texts, shard.rejects, shard.repeated) for shard in shards] == [(2, 999, ((2, 1001),))]
    assert reasons == {REPEATED_ID: 999}


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv", ".txt", ".parquet"])
def test_a_large_file_is_read_in_parts(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is packed is not, and small ones are read together."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    chance = random.Random(0)  # noqa: S311  no secret
    rows = [(str(place), f"text {chance.getrandbits(100)}") for place in range(200)]
    content = _parquet(rows, 10) if suffix == ".parquet" else b"".join(_line(suffix, *row) + b"\n" for row in rows)
    folder = _write(
        tmp_path, [(".jsonl", b""), (".txt", b"one\n"), (suffix, content), (".txt.gz", gzip.compress(content))]
    )
    assert len(gzip.compress(content)) > 500
    found = cut_pieces(find_sources(folder)[0])
    assert [len(piece.sources) for piece in (found[0], found[-1])] == [2, 1]
    assert len(found) > 3
    assert {piece.first for piece in found[1:-1]} == {2}
    assert sum(piece.size_bytes for piece in found) == pytest.approx(
        sum(path.stat().st_size for path in folder.iterdir()), abs=len(found)
    )


def test_a_line_that_is_longer_than_a_piece_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by each of the pieces that it goes through: a file without line feeds would be read a thousand times."""
    read: list[int] = []

    class Counted(io.BufferedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            read.append(len(line))
            return line

    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "_READ_BYTES", 100)
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(sources, "open_file", lambda path: Counted(io.FileIO(path)))
    (tmp_path / "a.tsv").write_bytes(b"1\tone\n" + b"x" * 40_000 + b"\n2\ttwo\n")
    shards, reasons = _scan(tmp_path, 10)
    assert (shards[0].texts, reasons) == (2, {"is longer than 100 bytes": 1})
    assert sum(read) < 3 * 40_000


def test_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All formats at once, with ids that are repeated across files, and lines that are called by their numbers."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 700)
    rows = [(str(place % 150), f"text {place}") for place in range(200)]
    files = [(suffix, b"\n{\n".join(_line(suffix, *row) for row in rows)) for suffix in (".jsonl", ".tsv", ".txt")]
    files += [(".jsonl.gz", gzip.compress(files[0][1])), (".parquet", _parquet(rows, 7))]
    folder = _write(tmp_path, files)
    expected = _one_after_the_other(folder, 30)
    assert sum(expected[1].values()) > 900
    for workers in (1, 2, 3):
        assert _scan(folder, 30, workers) == expected


def _numbered(count: int) -> bytes:
    return b"".join(_line(".jsonl", str(place), f"text {place}") + b"\n" for place in range(count))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_file_that_cannot_be_read_is_the_error(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are cut, and the later one fails sooner; the line is the one that a single reader says."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 3000)
    packed = gzip.compress(_numbered(3000))[:-2000]
    _write(tmp_path, [(".jsonl", _numbered(300)), (".jsonl.gz", packed), (".jsonl.gz", b"no gzip"), (".jsonl", b"")])
    with pytest.raises(InputError, match="is damaged after line") as expected:
        _one_after_the_other(tmp_path, 10)
    with pytest.raises(InputError) as caught:
        _scan(tmp_path, 10, workers)
    assert (caught.value.message, caught.value.hint) == (expected.value.message, expected.value.hint)
    assert "f1.jsonl.gz" in caught.value.message


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_without_a_text_are_named_by_their_place_in_the_file(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the part that has the first one does not begin the file."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10)
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 40 + b"[]\n")
    with pytest.raises(InputError, match="gave a text") as caught:
        _scan(tmp_path, 10, workers)
    assert caught.value.hint == "the first is a.jsonl:41, which is not a JSON object: []"


_DIES = """
import os, signal
from onnxtool.encoding import sources

def document(source, number, line, read=sources._document):
    if b"poison" in (line if isinstance(line, bytes) else b""):
        os.kill(os.getpid(), signal.SIGKILL)
    return read(source, number, line)

if "plan_worker" in " ".join(os.sys.orig_argv):
    sources._document = document
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("size", [100, 10_000])
def test_a_process_that_dies_is_an_error_that_names_the_file(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it read one file or several."""
    corpus, code = tmp_path / "corpus", tmp_path / "code"
    corpus.mkdir()
    code.mkdir()
    (code / "sitecustomize.py").write_text(_DIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    poison = _line(".jsonl", "x", "poison")
    _write(
        corpus, [(".jsonl", _numbered(30)), (".jsonl", poison), (".jsonl", _numbered(3)), (".jsonl", _numbered(400))]
    )
    with pytest.raises(InputError, match=r"cannot read .*f1\.jsonl: the process that reads it ended \(SIGKILL\)"):
        _scan(corpus, 10, 2)


_WAITS = """
import os, time
from onnxtool.encoding import sources

def document(source, number, line, read=sources._document):
    time.sleep(0.05)
    return read(source, number, line)

if "plan_worker" in " ".join(os.sys.orig_argv):
    sources._document = document
    open(f"worker-{os.getpid()}", "w").close()
"""
_PLANS = """
import runpy, sys
from onnxtool.encoding import pieces

pieces.PIECE_BYTES = 1000
sys.argv[:1] = ["onnxtool", "encode", "plan", "--workers", "2", "--quiet", "--provider", "cpu"]
runpy.run_module("onnxtool", run_name="__main__")
"""


def _is_alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked at")
@pytest.mark.parametrize("sent", ["SIGINT", "SIGKILL"])
def test_an_interruption_ends_all_processes(tmp_path: Path, sent: str) -> None:
    """No plan is left, nor a folder of temporary files after Ctrl-C."""
    model = dense_model(tmp_path)
    (tmp_path / "corpus.jsonl").write_bytes(_numbered(2000))
    (tmp_path / "sitecustomize.py").write_text(_WAITS)
    (tmp_path / "temporary").mkdir()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        sys.executable,
        "-c",
        _PLANS,
        "--model_path",
        str(model),
        "--input",
        "corpus.jsonl",
        "--output",
        "vectors/",
    ]
    variables = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(started := [int(one.name.removeprefix("worker-")) for one in tmp_path.glob("worker-*")]) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(getattr(signal, sent))
    error = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if sent == "SIGINT" else -signal.SIGKILL), error
    assert "Traceback" not in error
    while any(_is_alive(worker) for worker in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "vectors.plan.json").exists()
    if sent == "SIGINT":
        assert not list((tmp_path / "temporary").glob("onnxtool-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the folder for temporary files."""
    monkeypatch.setattr(pieces, "texts_file", lambda _folder, _piece: Path("/dev/full"))
    (tmp_path / "a.jsonl").write_bytes(_numbered(1000))
    with pytest.raises(OutputWriteError, match="cannot keep digests of texts in the temporary folder") as caught:
        _scan(tmp_path, 10)
    assert "TMPDIR" in caught.value.hint


def test_more_shards_than_a_plan_may_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the size that is large enough."""
    monkeypatch.setattr(scanning, "MOST_SHARDS", 7)
    (tmp_path / "a.jsonl").write_bytes(_numbered(20))
    with pytest.raises(InputError, match="more than 7 shards") as caught:
        _scan(tmp_path, 2)
    assert caught.value.hint == "pass --shard_size 3 or more"
    assert len(_scan(tmp_path, 3)[0]) == 7


def test_progress_is_told_of_large_files_as_well(tmp_path: Path) -> None:
    """Of few lines, and so that an interruption is not waited for while thousands of them are read."""
    lines = [json.dumps({"id": str(place), "contents": "x" * (3 << 20)}) for place in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with told() as heard:
        scan_corpus(find_sources(tmp_path)[0], 10, 1)
    assert len({one.num_texts for one in heard}) > 4


def test_progress_ends_with_all_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all processes together."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100_000)
    (tmp_path / "a.jsonl").write_bytes(_numbered(20_000))
    with told() as heard:
        scan_corpus(find_sources(tmp_path)[0], 10, 2)
    assert (heard[-1].num_texts, heard[-1].share, heard[-1].seconds_left) == (20_000, 1.0, 0.0)
    assert sorted(one.share for one in heard) == [one.share for one in heard]
