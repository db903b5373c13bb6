"""Whatever a file holds, reading its structure ends in a structure or in a ModelFileError with a hint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.model_file.wire import read_nodes, read_structure
from onnxtool.reports import to_json
from onnxtool.stats import summarize_model


def make_model() -> Any:
    """Make a model with a little of everything that the reader understands."""
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "weight")
    body = helper.make_graph(
        [helper.make_node("Identity", ["weight"], ["inner"])],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [2, 3])],
        [numpy_helper.from_array(np.ones(2, np.int64), "inner_weight")],
    )
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "indices")
    graph = helper.make_graph(
        [
            helper.make_node("If", ["condition"], ["chosen"], name="if", then_branch=body, else_branch=body),
            helper.make_node("Gelu", ["chosen"], ["y"], domain="com.microsoft"),
        ],
        "graph",
        [helper.make_tensor_value_info("condition", TensorProto.BOOL, []), *_inputs()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
        [weight, helper.make_tensor("text", TensorProto.STRING, [1], ["hello"])],
        sparse_initializer=[helper.make_sparse_tensor(values, indices, [4])],
    )
    function = helper.make_function(
        "local", "F", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], functions=[function], ir_version=10)
    helper.set_model_props(model, {"key": "value"})
    return model


def _inputs() -> list[Any]:
    return [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, None])]


MODEL_BYTES: bytes = make_model().SerializeToString()


def field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field shorter than 16 kB."""
    length = bytes([len(content) & 0x7F | 0x80, len(content) >> 7])
    return bytes([number << 3 | 2]) + length + content


def with_initializer(content: bytes) -> bytes:
    """Return the model with one more initializer, whose encoding is `content`."""
    return MODEL_BYTES + field(7, field(5, content))


def assert_refused(path: Path, reason: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(reason)) as caught:
        read_structure(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def refused(folder: Path, data: bytes, reason: str) -> None:
    path = folder / "model.onnx"
    path.write_bytes(data)
    assert_refused(path, reason)


def test_the_model_of_these_tests_is_read(tmp_path: Path) -> None:
    """The bytes that the other tests break are whole."""
    (tmp_path / "model.onnx").write_bytes(MODEL_BYTES)
    structure = read_structure(tmp_path / "model.onnx")
    assert structure.ops == {"Identity": 2, "If": 1, "com.microsoft::Gelu": 1}
    assert len(structure.initializers) == 5


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """A model cut at any byte is refused, but for the few cuts between two whole fields after the opsets."""
    path = tmp_path / "model.onnx"
    read_at = []
    for length in range(len(MODEL_BYTES)):
        path.write_bytes(MODEL_BYTES[:length])
        try:
            read_structure(path)
            read_at.append(length)
        except ModelFileError:
            continue
    # Opsets, metadata and functions come last; without the last two, and with one of them, the file is a whole model.
    assert len(read_at) == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"hello, this is a text\n" * 9, "is not a complete ONNX model"),
        (b"PK\x03\x04" + bytes(100), "is a ZIP archive, and no ONNX model"),
        (b"\x08\x0a", "no graph"),
        (MODEL_BYTES + b"\x00\x01", "field number 0"),
        (MODEL_BYTES + b"\x0b\x0c", "wire type 3"),
        (MODEL_BYTES + b"\x80\x80\x80\x80\x80\x01\x01", "field number"),
        (MODEL_BYTES + b"\x08" + b"\x80" * 10 + b"\x01", "more than ten bytes"),
        (MODEL_BYTES + b"\x08\xff", "ends inside a number"),
        (MODEL_BYTES + b"\x3a\x7f\x00", "a field of 127 bytes where 1 are left"),
        (MODEL_BYTES + b"\x3a" + b"\xff" * 9 + b"\x01", "bytes where 0 are left"),
        (MODEL_BYTES + field(2, b"\xff\xfe"), "not UTF-8"),
        (MODEL_BYTES + field(7, field(1, field(4, b"\xc3"))), "not UTF-8"),
        (with_initializer(b"\x08\x02\x10\x01" + field(8, b"w") + field(9, bytes(7))), "needs 8 bytes and holds 7"),
        (with_initializer(b"\x08" + b"\xff" * 9 + b"\x01"), "negative dimension"),
        (with_initializer(b"\x08\x01" * 65), "65 dimensions"),
        (with_initializer(b"\x70\x01"), "where its external data lies"),
        (with_initializer(b"\x70\x01" + field(13, field(1, b"offset") + field(2, b"x"))), "no number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_bytes_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """Each way of being malformed is an error that says what is wrong, with the file's name and a hint."""
    refused(tmp_path, data, reason)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"location": "w.bin", "offset": "-1"}, "where its external data lies"),
        ({"location": "w.bin", "length": "-8"}, "where its external data lies"),
        ({"location": "w.bin", "length": "4"}, "needs 8 bytes and has 4 outside the file"),
        ({"location": "w.bin", "offset": "9" * 5000}, "no number"),
        ({"offset": "0"}, "where its external data lies"),
    ],
)
def test_malformed_external_data_is_named(tmp_path: Path, entries: dict[str, str], reason: str) -> None:
    """A reference to external data that makes no sense is refused."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    refused(tmp_path, with_initializer(tensor.SerializeToString()), reason)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    """Graphs nested a hundred deep are refused; they would otherwise use up the stack."""
    graph = b""
    for _ in range(100):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    refused(tmp_path, MODEL_BYTES + field(7, graph), "nested more than 64 deep")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe and a file below a file are errors with a hint."""
    (tmp_path / "file").write_bytes(MODEL_BYTES)
    assert_refused(tmp_path / "missing.onnx", "no such model file")
    assert_refused(tmp_path, "is a folder")
    assert_refused(tmp_path / "file" / "model.onnx", "cannot read")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """A named pipe without a writer would block for ever."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "pipe").open("r+b", buffering=0):  # a writer, so that this test fails where it would wait
        assert_refused(tmp_path / "pipe", "not a regular file")


def test_nodes_of_a_broken_file_are_refused(tmp_path: Path) -> None:
    """read_nodes raises the same error as read_structure."""
    (tmp_path / "model.onnx").write_bytes(MODEL_BYTES[:200])
    with pytest.raises(ModelFileError):
        list(read_nodes(tmp_path / "model.onnx"))


@pytest.fixture(scope="module")
def broken_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken") / "model.onnx"


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(MODEL_BYTES) - 1),
            st.integers(0, 255),
            st.sampled_from(["set", "set", "insert", "drop", "cut"]),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(deadline=None, max_examples=1000, derandomize=True, database=None)
def test_random_damage_is_read_or_refused(broken_path: Path, edits: list[tuple[int, int, str]]) -> None:
    """A damaged model gives a summary that can be written as JSON, or ModelFileError, and nothing else."""
    data = bytearray(MODEL_BYTES)
    for position, byte, kind in edits:
        if kind == "cut":
            del data[position:]
        elif kind == "drop":
            del data[position : position + 1]
        else:
            data[position : position + (kind == "set")] = bytes([byte])
    broken_path.write_bytes(data)
    try:
        assert json.dumps(to_json(summarize_model(broken_path)))
        assert len(list(read_nodes(broken_path))) < len(data)
    except ModelFileError:
        return
