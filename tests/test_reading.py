"""Bounded readers: too large, too deep, too long or endless input is an error, and nothing is filled or waited for."""

from __future__ import annotations

import ast
import gzip
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onnxtool import reading
from onnxtool.checkpoint.text_files import LineError, iterate_texts
from onnxtool.encoding.manifest import read_manifest
from onnxtool.encoding.parquet import read_rows, require_pyarrow
from onnxtool.errors import InputError, OnnxtoolError
from onnxtool.evaluation.collection import read_lines
from onnxtool.export.sidecar_files import read_object
from onnxtool.export.source import Source
from onnxtool.reading import load_array
from onnxtool.release.config import read_config
from onnxtool.runtime import input_cases
from onnxtool.runtime.tokens import load_by_transformers


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)


CONTENTS: dict[str, Callable[[Path], object]] = {
    "sparse": sparse,
    "deep": lambda path: path.write_text("[" * 200 + "]" * 200),
    "deeper": lambda path: path.write_text("[" * 100_000),
    "digits": lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"),
    "pipe": os.mkfifo,
}
READERS: dict[str, Callable[[Path], object]] = {"manifest": read_manifest}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_json_from_outside_is_one_error(tmp_path: Path, reader: str, content: str) -> None:
    """The file is named, and neither read whole nor waited for."""
    path = tmp_path / "file.json"
    CONTENTS[content](path)
    with pytest.raises(OnnxtoolError, match="file.json"):
        READERS[reader](path)


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 100_000])
def test_toml_from_outside_is_one_error(tmp_path: Path, text: str) -> None:
    """Python's own error for too many digits is no error of the parser."""
    path = tmp_path / "release.toml"
    path.write_text(text)
    with pytest.raises(OnnxtoolError, match="release.toml is not valid TOML"):
        read_config(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
@pytest.mark.parametrize("reader", [iterate_texts, read_lines])
def test_a_line_without_an_end_is_one_error(
    tmp_path: Path, name: str, reader: Callable[[Path], Iterator[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never held whole."""
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 1000)
    (tmp_path / name).write_bytes(gzip.compress(b"x" * 5000) if name.endswith(".gz") else b"x" * 5000)
    with pytest.raises(OnnxtoolError, match="a.*:1 .*more than|a.*:1 is longer than"):
        list(reader(tmp_path / name))


def test_a_long_line_is_left_out_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size counts, so that places in the file stay right."""
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 4)
    file = io.BufferedReader(io.BytesIO(b"ab\n123456\ncd"))
    assert list(reading.lines_of(file, skips=True)) == [(b"ab\n", 3), (None, 7), (b"cd", 2)]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a file without an end")
def test_a_line_that_never_ends_is_one_error(tmp_path: Path) -> None:
    """What is refused for its length is not read to its end."""
    (tmp_path / "texts.txt").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is longer than 16777216 bytes"):
        next(iterate_texts(tmp_path / "texts.txt"))


def test_a_device_is_no_file() -> None:
    """It has no end."""
    with pytest.raises(OSError, match="no regular file"):
        reading.read_bytes(Path("/dev/zero"))


def test_json_within_the_limits_is_read() -> None:
    """Many brackets beside each other are not deep."""
    assert reading.parse_json("[" + ",".join(["[]"] * 1000) + "]") == [[]] * 1000


def test_an_object_of_a_checkpoint_has_a_bound(tmp_path: Path) -> None:
    """A sparse config.json is refused before it is read."""
    sparse(tmp_path / "config.json")
    with pytest.raises(OnnxtoolError, match="config.json .*more than"):
        read_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 129 + "]" * 129, "nested"), ("[" * 100_000, "nested"), ('{"a": -' + "9" * 5000 + "}", "digits")],
)
def test_json_beyond_a_limit_says_which_one(text: str, reason: str) -> None:
    """As text and as bytes."""
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=reason):
            reading.parse_json(content)


def test_a_file_beyond_its_limit_is_not_read(tmp_path: Path) -> None:
    """One of exactly that size is."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert reading.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        reading.read_bytes(path, 4)


def test_texts_of_parquet_that_no_memory_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a thousand to a page, and a page is read whole."""
    monkeypatch.setattr("onnxtool.encoding.parquet._MOST_PAGE_BYTES", 1 << 20)
    pyarrow, parquet = require_pyarrow()
    path = tmp_path / "corpus.parquet"
    for length in (900, 1100):
        parquet.write_table(pyarrow.table({"text": ["a" * length] * 2000}), path, use_dictionary=False)
        if length == 900:
            assert len(list(read_rows(path))) == 2000
    with pytest.raises(InputError, match="bytes in 2000 rows that are read at once"):
        list(read_rows(path))


def test_a_text_of_parquet_that_is_too_long_is_a_row_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a line of that length; those beside it are read, also where one text of a dictionary is that of many rows."""
    monkeypatch.setattr("onnxtool.encoding.parquet.MOST_LINE_BYTES", 1 << 10)
    pyarrow, parquet = require_pyarrow()
    path = tmp_path / "corpus.parquet"
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 0] * 9, pyarrow.int32()), ["x" * 1100, "short"])
    for is_stated in (True, False):  # whether it is a dictionary once it is read
        parquet.write_table(pyarrow.table({"text": column}), path, store_schema=is_stated)
        rows = [row for row, _ in read_rows(path)]
        assert [isinstance(row, LineError) for row in rows] == [True, False, True] * 9


@pytest.mark.parametrize("odd", [sparse, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_settings_that_a_library_would_read_without_a_bound_are_refused(
    tmp_path: Path, odd: Callable[[Path], object]
) -> None:
    """By export, and wherever transformers is asked; weights may be large."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    sparse(tmp_path / "model.safetensors")
    source = Source.find(str(tmp_path))
    assert source.arguments["local_files_only"]
    odd(tmp_path / "vocab.txt")
    with pytest.raises(OSError, match="vocab.txt"):
        _ = source.arguments
    with pytest.raises(InputError, match="vocab.txt"):
        load_by_transformers(tmp_path)


def array_of(shape: str) -> bytes:
    """Write the header of an array of `shape`, and one number."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(4)


@pytest.mark.parametrize("shape", [f"({10**12},)", f"({10**30},)", "(-5,)", "(2,)", "1", "(" * 99])
def test_an_array_that_lies_about_its_size_gets_no_memory(tmp_path: Path, shape: str) -> None:
    """Alone, and in an archive."""
    alone, archive = tmp_path / "a.npy", tmp_path / "a.npz"
    alone.write_bytes(array_of("(1,)"))
    assert load_array(alone).shape == (1,)
    alone.write_bytes(array_of(shape))
    with pytest.raises(ValueError, match="."):
        load_array(alone)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x.npy", array_of(shape))
    with pytest.raises(InputError, match="a.npz cannot be read as .npz"):
        input_cases._load_arrays(archive)
    archive.unlink()
    os.mkfifo(archive)
    with pytest.raises(InputError, match="it is no regular file"):
        input_cases._load_arrays(archive)


# Calls by which a library or Python reads a file; `open` stands for one to read, and the two of Path have no argument.
READS = {
    *(
        "GzipFile",
        "InferenceSession",
        "ParquetFile",
        "ZipFile",
        "deserialize",
        "from_file",
        "from_pretrained",
    ),
    *("fromfile", "load_file", "memmap", "mmap", "parse_config", "read_table", "safe_load", "safe_open"),
    *("gzip.open", "np.load", "onnx.load", "torch.load", "json.load", "json.loads", "tomllib.load", "tomllib.loads"),
}
# Where else files are read, and why.
ELSEWHERE = {
    "settings, once reading.require_small_settings has seen them": {
        "benchmarking/comparison.py": {"from_pretrained"},
        "export/adapters.py": {"from_pretrained"},
        "export/checkpoint.py": {"from_pretrained", "open"},  # and the digest of weights
        "runtime/pictures.py": {"from_pretrained"},
        "runtime/tokens.py": {"from_pretrained"},
    },
    "safetensors, whose headers have 100 MB at most, and sizes that the library checks": {
        "checkpoint/files.py": {"deserialize"},
        "export/weights.py": {"safe_open"},
        "training/checkpoints/checkpoint.py": {"safe_open"},
    },
    "ONNX models, by the wire reader and once it has read them": {
        "model_file/wire/protobuf.py": {"open"},
        "runtime/environment.py": {"InferenceSession"},
        "runtime/probation.py": {"InferenceSession"},
        "runtime/session.py": {"InferenceSession"},
        "summary/duplicates.py": {"open"},
        "training/api/session.py": {"InferenceSession"},
        "training/artifacts/generation.py": {"onnx.load", "read_text"},  # and a report of onnxruntime's converter
    },
    "what onnxtool itself has written for a consumer": {
        "consumers/runners/exchange.py": {"read_text", "json.loads"},
    },
    "with bounds of its own": {
        "checkpoint/picture_files.py": {"open"},
        "encoding/parquet.py": {"ParquetFile"},
        "export/pickles.py": {"torch.load"},
        "runtime/input_cases.py": {"ZipFile", "np.load"},
        "training/checkpoints/odtc.py": {"memmap"},
    },
    "a stream, of which a line or a block is held at a time": {
        "model_file/metadata.py": {"open"},
        "encoding/sources.py": {"GzipFile"},
    },
    "shards of the corpus that a manifest names with their digests": {
        "encoding/reading.py": {"ParquetFile"},
        "encoding/merge.py": {"ParquetFile"},
    },
    "made by this process or its child, or by a library for it": {
        "checkpoint/tokenizer_guard.py": {"json.loads"},
        "checkpoint/vocabulary.py": {"json.loads"},
        "export/targets/opensearch.py": {"open"},
        "guarded.py": {"json.loads", "read_text"},
        "optimize/attention/slices.py": {"InferenceSession"},
        "export/in_graph.py": {"json.loads"},
        "export/tokenizer_rules.py": {"json.loads"},
        "release/bom.py": {"json.loads"},
        "release/signing.py": {"read_text"},
        "runtime/computed_modules.py": {"InferenceSession"},
        "runtime/providers.py": {"InferenceSession"},
        "runtime/text_graph.py": {"InferenceSession"},
        "torch_backend/sessions.py": {"InferenceSession"},
        "training/artifacts/verification.py": {"InferenceSession", "onnx.load"},
    },
    "the card of a checkpoint, of which reading.read_text has read the text": {"export/source.py": {"safe_load"}},
    "a cache that SECURITY.md says is trusted": {"torch_backend/cache.py": {"read_bytes"}},
    "what the build of this package wrote": {"version.py": {"read_text"}},
    "the system": {
        "runtime/machine.py": {"read_text"},
    },
}


def reads_of(module: Path) -> set[str]:
    """Return what of READS a module calls."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        said = {
            one.value for one in (*node.args, *(word.value for word in node.keywords)) if isinstance(one, ast.Constant)
        }
        if said & {"wb", "w", "xb", "ab"}:
            continue
        is_opened_to_read = last == "open" and (said & {"rb", "r", "rt", "r+b"} or "formats" in ast.unparse(node))
        is_of_path = last in ("read_text", "read_bytes") and "." in name and not node.args
        found |= {last} if is_opened_to_read or is_of_path else {last, ".".join(name.split(".")[-2:])} & READS
    return found


def test_no_other_module_reads_files_by_itself() -> None:
    """What comes from outside is read by `onnxtool.reading`; each exception has its reason, and none is stale."""
    package = Path(reading.__file__).parent
    found = {path.relative_to(package).as_posix(): reads_of(path) for path in package.rglob("*.py")}
    del found["reading.py"]
    known = {name: reads for modules in ELSEWHERE.values() for name, reads in modules.items()}
    assert {name: reads for name, reads in found.items() if reads} == known
