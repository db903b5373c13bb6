"""Files made to harm: one clear error each or a result, in little time and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from onnxtool.errors import ModelFileError
from onnxtool.model_file.wire import read_structure
from tests.graphs import external_tensor, identity, make_model, value
from tests.model_file.protobuf import field

MODEL: bytes = make_model([identity("n")]).SerializeToString()
MAX_MIB = 100
MAX_CPU_S = 20

# What `onnxtool stats` prints, and how much memory and time it took.
PROGRAM = """
import json, pathlib, sys, time
from onnxtool.cli import run_arguments
code = run_arguments(["stats", *sys.argv[1:]])
# Not ru_maxrss, which starts at that of the parent.
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
(peak,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
print(json.dumps([code, peak, time.process_time()]), file=sys.stderr)
"""


def nested(depth: int) -> bytes:
    """Graphs in attributes of nodes of graphs."""
    graph = b""
    for _ in range(depth):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    return graph


def many(number: int, make: Callable[[int], bytes], count: int) -> bytes:
    """A field again and again in one graph."""
    return field(7, b"".join(field(number, make(index)) for index in range(count)))


# Makers of a file, and what the error says; None where the file is read.
FILES: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "a million empty nodes": (lambda: MODEL + field(7, field(1, b"") * 300_000), None),
    "a million nodes of a name each": (lambda: MODEL + many(1, lambda i: field(3, b"/a/%d/n" % i), 300_000), None),
    "too many operators": (lambda: MODEL + many(1, lambda i: field(4, b"Op%d" % i), 110_000), "more than 100000"),
    "too many initializers": (lambda: MODEL + many(5, lambda i: field(8, b"%d" % i), 110_000), "more than 100000"),
    "too many inputs": (lambda: MODEL + many(11, lambda i: field(1, b"%d" % i), 110_000), "more than 100000"),
    "a million functions": (lambda: MODEL + field(25, b"") * 1_000_000, "more than"),
    "a million metadata": (lambda: MODEL + b"".join(field(14, field(1, b"%d" % i)) for i in range(300_000)), "more "),
    "a million opsets": (lambda: MODEL + b"".join(field(8, field(1, b"%d" % i)) for i in range(300_000)), "more "),
    "metadata of 50 MB": (lambda: MODEL + field(14, field(1, b"k") + field(2, b"x" * 50_000_000)), "50000000 bytes"),
    "a name of 50 MB": (lambda: MODEL + field(7, field(5, field(8, b"x" * 50_000_000))), "a text of 50000000 bytes"),
    "a name of a node of 50 MB": (lambda: MODEL + field(7, field(1, field(3, b"x" * 50_000_000))), "50000000 bytes"),
    "dims of 50 MB": (lambda: MODEL + field(7, field(5, field(1, b"\x01" * 50_000_000))), "bytes of dimensions"),
    "dims without end": (lambda: MODEL + field(7, field(5, b"\x08\x01" * 5_000_000)), "65 dimensions or more"),
    "axes without end": (
        lambda: MODEL + field(7, field(11, field(2, field(1, field(2, b"\x0a\x00" * 500_000))))),
        "65",
    ),
    "dims that overflow": (
        lambda: MODEL + field(7, field(5, field(1, b"\xff\xff\xff\xff\x0f" * 3) + field(8, b"w"))),
        "more elements than a number of 64 bits can say",
    ),
    "nesting without end": (lambda: MODEL + field(7, nested(5000)), "nested more than 64 deep"),
    "a name that is no text": (lambda: MODEL + field(7, field(1, field(3, b"\xff/\xfe"))), "not UTF-8"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("name", list(FILES))
def test_a_hostile_file_costs_little(tmp_path: Path, name: str) -> None:
    """It is read, or refused with one error and a hint, in less than 100 MiB and a few seconds, without a traceback."""
    make, reason = FILES[name]
    (tmp_path / "model.onnx").write_bytes(make())
    command = [sys.executable, "-c", PROGRAM, "model.onnx", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    *said, last = done.stderr.splitlines()
    code, peak_bytes, cpu_s = json.loads(last)
    assert peak_bytes < MAX_MIB << 20, f"{peak_bytes >> 20} MiB"
    assert cpu_s < MAX_CPU_S
    if reason is None:
        assert (code, said) == (0, [])
        assert json.loads(done.stdout)["num_nodes"] > 100_000
    else:
        assert code == 1
        assert [line.partition(":")[0] for line in said] == ["error", "hint"]
        assert reason in said[0]
        assert done.stdout == ""


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="links are POSIX")
def test_links_to_a_model_are_followed_and_loops_refused(tmp_path: Path) -> None:
    """A link to a model is that model; one to itself, or to a device, is an error."""
    (tmp_path / "model.onnx").write_bytes(MODEL)
    (tmp_path / "link.onnx").symlink_to("model.onnx")
    assert read_structure(tmp_path / "link.onnx").num_nodes == 1
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    (tmp_path / "zero.onnx").symlink_to("/dev/zero")
    for name in ("loop.onnx", "zero.onnx"):
        with pytest.raises(ModelFileError):
            read_structure(tmp_path / name)


def test_a_hundred_thousand_references_to_data_are_checked_fast(tmp_path: Path) -> None:
    """Each file of external data is looked at once, however many tensors refer to it."""
    tensors = [external_tensor(f"w{index}", {"location": "w.bin"}) for index in range(20_000)]
    (tmp_path / "w.bin").write_bytes(bytes(24))
    onnx.save(make_model([identity("n")], tensors), tmp_path / "model.onnx")
    start = time.process_time()
    assert len(read_structure(tmp_path / "model.onnx").external) == 20_000
    assert time.process_time() - start < MAX_CPU_S


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes over the file meanwhile: no index error, but one that says so."""
    weight = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[200_000], raw_data=bytes(200_000))
    path = tmp_path / "model.onnx"
    onnx.save(make_model([identity("n")], [weight], inputs=[value("x", [1])]), path)
    whole = path.stat().st_size
    sized = os.fstat

    def shrunk(file: int) -> os.stat_result:
        found = sized(file)
        if found.st_size == whole:
            os.truncate(path, whole // 2)
        return found

    monkeypatch.setattr(os, "fstat", shrunk)
    with pytest.raises(ModelFileError, match="became shorter"):
        read_structure(path)
