"""Tensors are read with name, dtype, dims, size and place, wherever a model may have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.model_file.wire import DTYPE_NAMES, ExternalData, read_structure
from tests.graphs import external_tensor, identity, make_model, value
from tests.model_file.protobuf import field, read, varint

# Every dtype whose elements onnx can make from numbers.
DTYPES = [number for name, number in TensorProto.DataType.items() if name not in ("UNDEFINED", "STRING")]


@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
@pytest.mark.parametrize("data_type", DTYPES, ids=TensorProto.DataType.Name)
def test_every_dtype_has_its_name_and_size(tmp_path: Path, data_type: int, raw: bool) -> None:
    """Name, dims and bytes of every dtype agree with onnx, whether elements are raw or in a typed field."""
    tensor = helper.make_tensor("w", data_type, [3, 1], [1, 0, 1])
    raw_tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), "w")
    structure = read(make_model([identity("n")], [raw_tensor if raw else tensor]), tmp_path)
    (found,) = structure.initializers
    assert found.dtype == helper.tensor_dtype_to_np_dtype(data_type).name
    assert found.dtype in DTYPE_NAMES
    assert found.dims == (3, 1)
    assert found.num_elements == 3
    assert found.size_bytes == len(raw_tensor.raw_data)
    if raw:
        assert found.payload is not None
        start, length = found.payload
        assert (tmp_path / "model.onnx").read_bytes()[start : start + length] == raw_tensor.raw_data
    else:
        assert found.payload is None


def test_strings_count_as_stored(tmp_path: Path) -> None:
    """A tensor of strings has the bytes of its strings, and no payload."""
    tensor = helper.make_tensor("s", TensorProto.STRING, [2], ["ab", "cde"])
    (found,) = read(make_model([identity("n")], [tensor]), tmp_path).initializers
    assert (found.dtype, found.size_bytes, found.payload) == ("string", 5, None)


def test_dims_are_read_packed_and_unpacked(tmp_path: Path) -> None:
    """Both encodings of repeated dims, which protobuf allows, give the same shape."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT)
    unpacked = tensor.SerializeToString() + b"\x08\x02\x08\xac\x02"
    packed = tensor.SerializeToString() + b"\x0a\x03\x02\xac\x02"
    parsed = TensorProto.FromString(unpacked), TensorProto.FromString(packed)
    assert [list(item.dims) for item in parsed] == [[2, 300], [2, 300]]
    for encoded in (unpacked, packed):
        # A field of the graph that comes after the others: initializer is number 5, and the graph is merged.
        data = make_model([identity("n")]).SerializeToString() + field(7, field(5, encoded))
        (tmp_path / "model.onnx").write_bytes(data)
        (found,) = read_structure(tmp_path / "model.onnx").initializers
        assert found.dims == (2, 300)


def test_external_data_is_located_wherever_a_tensor_may_be(tmp_path: Path) -> None:
    """Data outside the file is found for initializers, attributes, subgraphs, functions and sparse indices."""

    def at(place: str) -> Any:
        return external_tensor(place, {"location": f"{place}.bin", "offset": "4", "length": "24"})

    body = helper.make_graph([identity("a")], "body", [], [value("a_out", [1])], [at("subgraph")])
    constant = helper.make_node("Constant", [], ["c"], value=at("attribute"))
    nested = helper.make_node("If", ["cond"], ["y"], then_branch=body, else_branch=body)
    function = helper.make_function(
        "local",
        "F",
        ["a"],
        ["b"],
        [helper.make_node("Constant", [], ["b"], value=at("function"))],
        [helper.make_opsetid("", 20)],
        attribute_protos=[helper.make_attribute("d", at("default"))],
    )
    values = numpy_helper.from_array(np.ones(6, np.float32), "sparse")
    sparse = helper.make_sparse_tensor(values, at("indices"), [10])
    constant.attribute.append(helper.make_attribute("sparse_value", helper.make_sparse_tensor(at("v"), at("i"), [9])))
    model = make_model([constant, nested], [at("initializer")], [sparse], [function])
    structure = read(model, tmp_path)
    places = ["attribute", "default", "function", "i", "indices", "initializer", "subgraph", "subgraph", "v"]
    assert sorted(data.location for data in structure.external) == [f"{place}.bin" for place in places]
    assert {(data.offset, data.length) for data in structure.external} == {(4, 24)}


def test_external_length_follows_from_the_dims_where_it_is_left_out(tmp_path: Path) -> None:
    """Offset and length are optional; a missing length or one of 0 is what the elements take."""
    for entries in ({"location": "w.bin"}, {"location": "w.bin", "length": "0"}):
        (tensor,) = read(make_model([identity("n")], [external_tensor("w", entries)]), tmp_path).initializers
        assert tensor.external == ExternalData("w.bin", 0, 24)
        assert tensor.size_bytes == 24


def test_a_file_beyond_the_limit_of_protobuf_is_read(tmp_path: Path) -> None:
    """Three gigabytes of weights, most of them a hole in the file, are skipped and not read."""
    size_bytes = 3 << 30
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[size_bytes]).SerializeToString()
    head = tensor + b"\x4a" + varint(size_bytes)
    lengths = [len(head) + size_bytes]
    lengths.append(1 + 5 + lengths[0])
    encoded = [varint(length) for length in lengths]
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.write(make_model([identity("n")]).SerializeToString())
        file.write(b"\x3a" + encoded[1] + b"\x2a" + encoded[0] + head)
        file.truncate(file.tell() + size_bytes)
    (tensor_read,) = read_structure(path).initializers
    assert (tensor_read.name, tensor_read.size_bytes) == ("w", size_bytes)
