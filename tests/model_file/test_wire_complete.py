"""Whatever ONNX lets a model hold is read as onnx reads it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.model_file import ModelFile
from onnxtool.model_file.wire import read_nodes, read_structure
from tests.graphs import external_tensor, identity, make_addition, make_model, value
from tests.model_file.protobuf import field, read


def test_functions_have_their_own_opsets_and_nodes(tmp_path: Path) -> None:
    """Name, domain, opsets and operators of each function."""
    body = [identity("f", "a"), helper.make_node("Gelu", ["f_out"], ["b"], domain="com.microsoft")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    function = helper.make_function("local", "F", ["a", "c"], ["b"], body, opsets, ["alpha"])
    function.attribute_proto.append(helper.make_attribute("beta", 2.0))
    other = helper.make_function("local", "G", ["a"], ["b"], [identity("g", "a")], [helper.make_opsetid("", 20)])
    model = make_model([helper.make_node("F", ["x"], ["y"], domain="local", alpha=1)], functions=[function, other])
    found = read(model, tmp_path)
    assert len(found.functions) == 2
    for ours, theirs in zip(found.functions, model.functions, strict=True):
        assert (ours.domain, ours.name) == (theirs.domain, theirs.name)
        assert ours.opsets == {item.domain or "ai.onnx": item.version for item in theirs.opset_import}
        assert sum(ours.ops.values()) == len(theirs.node)


def test_annotations_are_passed_over(tmp_path: Path) -> None:
    """Of values that are quantized, and of what dimensions denote."""
    model = make_model([identity("n")], inputs=[value("image", ["N", 3, None]), value("plain", [1])])
    for axis, meaning in enumerate(("DATA_BATCH", "DATA_CHANNEL")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].denotation = meaning
    annotation = model.graph.quantization_annotation.add(tensor_name="n_out")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")
    annotation.quant_parameter_tensor_names.add(key="ZERO_POINT_TENSOR", value="z")
    assert read(model, tmp_path).inputs[0].shape == ("N", 3, None)


def test_values_of_a_sparse_tensor_are_an_initializer(tmp_path: Path) -> None:
    """It has no payload of its own."""
    values = numpy_helper.from_array(np.ones(2, np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([3, 7], np.int64), "indices")
    found = read(make_model([identity("n")], sparse=[helper.make_sparse_tensor(values, indices, [10, 300])]), tmp_path)
    (tensor,) = found.initializers
    assert (tensor.name, tensor.dtype, tensor.dims, tensor.size_bytes) == ("sparse", "float32", (2,), 8)
    assert tensor.payload is None


def test_attributes_hold_tensors_of_every_kind(tmp_path: Path) -> None:
    """A tensor, a list of tensors, a sparse tensor and those in bodies of bodies add to the bytes of attributes."""
    dense = numpy_helper.from_array(np.ones(3, np.float32), "t")
    values = numpy_helper.from_array(np.ones(2, np.float64), "v")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 2], np.int64), "i"), [5])
    inner = helper.make_node("Constant", [], ["c"], value=dense)
    body = helper.make_graph([inner], "body", [], [value("c", [3])])
    node = helper.make_node(
        "Local", ["x"], ["y"], domain="local", one=dense, many=[dense, dense], few=sparse, body=body
    )
    assert read(make_model([node]), tmp_path).attribute_bytes == 12 + 24 + 16 + 12


def test_dims_of_a_sparse_initializer_may_be_packed(tmp_path: Path) -> None:
    """Both encodings that protobuf allows."""
    values = numpy_helper.from_array(np.ones(2, np.float32), "sparse")
    packed = field(1, values.SerializeToString()) + field(3, b"\x0a\xac\x02")
    data = make_model([identity("n")]).SerializeToString() + field(7, field(15, packed))
    (tmp_path / "model.onnx").write_bytes(data)
    assert list(onnx.load(tmp_path / "model.onnx").graph.sparse_initializer[0].dims) == [10, 300]
    assert [tensor.name for tensor in read_structure(tmp_path / "model.onnx").initializers] == ["sparse"]


@pytest.mark.parametrize("shift", range(10))
def test_headers_may_lie_across_the_end_of_what_is_read_at_once(tmp_path: Path, shift: int) -> None:
    """Small nodes, moved byte by byte, so that each byte of a header is the last one of a window once."""
    node = onnx.NodeProto(op_type="Relu", input=["x"])
    data = make_model([identity("n")]).SerializeToString() + field(3, b"v" * shift)
    path = tmp_path / "model.onnx"
    path.write_bytes(data + field(7, field(1, node.SerializeToString()) * 15_000))
    assert read_structure(path).ops == {"Relu": 15_000, "Identity": 1}
    assert sum(node.op_type == "Relu" for node in read_nodes(path)) == 15_000


LAYOUTS = {
    "one file": {"all_tensors_to_one_file": True, "location": "weights.bin"},
    "a file a tensor": {"all_tensors_to_one_file": False},
    "small ones inside": {"all_tensors_to_one_file": True, "location": "weights.bin", "size_threshold": 2000},
    "attributes as well": {"all_tensors_to_one_file": True, "location": "w", "convert_attribute": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_external_data_of_every_layout_is_the_same_model(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Dtype, dims and bytes do not depend on where the data lies, and the sizes of the files add up."""
    weights = [numpy_helper.from_array(np.full((100, index + 1), index, np.float32), f"w{index}") for index in range(8)]
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(999, np.float32), "k"))
    model = make_model([constant], weights)
    onnx.save(model, tmp_path / "inside.onnx")
    (tmp_path / "out").mkdir()
    onnx.save(model, tmp_path / "out" / "model.onnx", save_as_external_data=True, **{"size_threshold": 0, **layout})
    inside, outside = (ModelFile.open(tmp_path / name) for name in ("inside.onnx", "out/model.onnx"))
    told = [
        Counter((tensor.name, tensor.dtype, tensor.dims, tensor.size_bytes) for tensor in file.structure.initializers)
        for file in (inside, outside)
    ]
    assert told[0] == told[1]
    assert inside.structure.attribute_bytes == outside.structure.attribute_bytes
    assert outside.size_bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("far", [1 << 12, 1 << 16, (1 << 16) + 7, 1 << 20])
def test_what_follows_a_payload_of_any_size_is_read(tmp_path: Path, far: int) -> None:
    """Names, dims and further nodes behind a payload are found, wherever the window of the reader ends."""
    model = make_addition(1.0)
    tensor = model.graph.initializer[0]
    graph = TensorProto(data_type=TensorProto.UINT8, dims=[far], raw_data=bytes(far)).SerializeToString()
    # The name behind the payload, as a writer may order fields.
    graph += TensorProto(name="behind").SerializeToString()
    data = model.SerializeToString()
    encoded = field(7, field(5, graph) + field(1, identity("last").SerializeToString()))
    (tmp_path / "model.onnx").write_bytes(data + encoded)
    found = read_structure(tmp_path / "model.onnx")
    assert [item.name for item in found.initializers] == [tensor.name, "behind"]
    assert found.initializers[1].size_bytes == far
    assert found.ops == {"Add": 1, "Identity": 1}


def test_texts_that_are_not_kept_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Models of many experts have 40,000 weights outside the file; dynamo notes hundreds of bytes on every node.

    Here are fewer of both, which say more.
    """
    place = {"location": "model.onnx.data", "offset": "0", "length": "24", "checksum": "0" * 8000}
    tensors = [external_tensor(f"experts.{index}.weight", place) for index in range(2000)]
    nodes = [identity("n") for _ in range(2000)]
    scopes = ["", "model.layers.0", *(["model.layers.0.part"] * 400), "identity"]
    for node in nodes:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
    onnx.save(make_model(nodes, tensors), tmp_path / "model.onnx")
    structure = read_structure(tmp_path / "model.onnx")
    assert len(structure.external) == 2000
    assert structure.scopes == {"model.layers.0": 2000}
