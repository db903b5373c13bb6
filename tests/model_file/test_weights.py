"""Models are loaded and saved without their weights passing through memory, and lose nothing on the way."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.model_file.weights import detached_weights, load_model, release_weights, write_inline
from onnxtool.model_file.wire import read_structure
from tests.graphs import save_external, save_text
from tests.workshop import Workshop

GENERATOR = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "float32": GENERATOR.standard_normal((40, 30)).astype(np.float32),
    "float16": GENERATOR.standard_normal((40, 30)).astype(np.float16),
    "int64": GENERATOR.integers(-5, 5, (40, 30)),
    "uint8": GENERATOR.integers(0, 9, (40, 30)).astype(np.uint8),
    "bool": GENERATOR.integers(0, 2, (40, 30)).astype(bool),
    "small": np.arange(3.0),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 7), np.float32),
}


def model_of_every_storage() -> onnx.ModelProto:
    """Raw data, typed fields, strings, packed nibbles; a subgraph; metadata on model, graph and tensors."""
    tensors = [numpy_helper.from_array(array, name) for name, array in ARRAYS.items()]
    typed = ARRAYS["float32"] * 3
    tensors.append(helper.make_tensor("typed", TensorProto.FLOAT, typed.shape, typed.flatten().tolist()))
    tensors.append(helper.make_tensor("words", TensorProto.STRING, (300,), [f"word {i}".encode() for i in range(300)]))
    tensors.append(helper.make_tensor("nibbles", TensorProto.INT4, (61, 61), [i % 16 - 8 for i in range(61 * 61)]))
    inner = helper.make_graph(
        [helper.make_node("Identity", ["inside"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [40, 30])],
        [numpy_helper.from_array(ARRAYS["float32"] + 1, "inside")],
    )
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(ARRAYS["float32"] - 1)),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [40, 30])],
        tensors,
        doc_string="a graph",
    )
    model = helper.make_model(graph, producer_name="us", opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(model, {"key": "value"})
    return model


def contents(path: Path) -> dict[str, tuple[str, bytes]]:
    """Name to type and bytes of every initializer, as onnx itself reads them."""
    return {
        tensor.name: (f"{tensor.data_type}{list(tensor.dims)}", numpy_helper.to_array(tensor).tobytes())
        for tensor in onnx.load(path).graph.initializer
        if tensor.data_type != TensorProto.STRING
    }


def test_a_model_survives_loading_and_saving(tmp_path: Path) -> None:
    """By onnx's own reader and checker, for every way to store a tensor."""
    onnx.save(model_of_every_storage(), tmp_path / "in.onnx")
    write_inline(load_model(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    assert contents(tmp_path / "out.onnx") == contents(tmp_path / "in.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    before, after = onnx.load(tmp_path / "in.onnx"), onnx.load(tmp_path / "out.onnx")
    assert [(node.op_type, node.input, node.output) for node in before.graph.node] == [
        (node.op_type, node.input, node.output) for node in after.graph.node
    ]
    first, second = (model.graph.node[0].attribute[0].g.initializer[0] for model in (before, after))
    np.testing.assert_array_equal(numpy_helper.to_array(first), numpy_helper.to_array(second))
    assert before.metadata_props == after.metadata_props
    assert (after.producer_name, after.graph.doc_string, after.ir_version) == ("us", "a graph", 10)


def test_saving_is_deterministic_and_idempotent(tmp_path: Path) -> None:
    """What was saved, loaded and saved again is the same file."""
    onnx.save(model_of_every_storage(), tmp_path / "0.onnx")
    for number in range(2):
        write_inline(load_model(tmp_path / f"{number}.onnx"), tmp_path / f"{number + 1}.onnx")
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()


def test_external_data_is_gathered_into_one_file(tmp_path: Path) -> None:
    """A model whose weights lie in another file becomes one that needs no other file."""
    model = model_of_every_storage()
    onnx.save(model, tmp_path / "in.onnx")
    (tmp_path / "ext").mkdir()
    onnx.save(model, tmp_path / "ext" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    write_inline(load_model(tmp_path / "ext" / "m.onnx"), tmp_path / "out.onnx")
    assert contents(tmp_path / "out.onnx") == contents(tmp_path / "in.onnx")
    assert read_structure(tmp_path / "out.onnx").external == ()


def test_weights_do_not_pass_through_python(tmp_path: Path) -> None:
    """Loading and saving allocates a small part of what the file holds."""
    body = "g (float[2, 999] x) => (float[2, 999] y) { y = MatMul(x, w) }"
    path = save_text(tmp_path / "m.onnx", body, {"w": np.ones((999, 999), np.float32)})
    write_inline(load_model(path), tmp_path / "warm.onnx")  # imports allocate as well
    tracemalloc.start()
    write_inline(load_model(path), tmp_path / "out.onnx")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * path.stat().st_size


def test_detached_weights_come_back_in_their_order(workshop: Workshop) -> None:
    """Also where the block fails."""
    model = load_model(workshop.exported("tiny-encoder"))
    before = list(model.graph.initializers)

    def use() -> None:
        with detached_weights(model) as weights:
            assert weights
            assert not set(weights) & set(model.graph.initializers)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert list(model.graph.initializers) == before


def test_a_weight_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    """Every length is written before its bytes, so a tensor that lies about its size would corrupt the file."""
    model = ir.from_proto(model_of_every_storage())

    class Short(ir.Tensor[Any]):
        def tofile(self, file: Any) -> None:
            file.write(b"short")

    model.graph.initializers["float32"].const_value = Short(ARRAYS["float32"], name="float32")
    with pytest.raises(ModelFileError, match="float32 has 5 bytes where its shape needs 4800"):
        write_inline(model, tmp_path / "out.onnx")


def test_a_file_that_only_looks_like_a_model_is_an_error(tmp_path: Path) -> None:
    """Well-formed protobuf with a node that reads what nobody made."""
    model = model_of_every_storage()
    model.graph.node[0].output[0] = "c"
    onnx.save(model, tmp_path / "in.onnx")
    with pytest.raises(ModelFileError, match="is not a valid ONNX model"):
        load_model(tmp_path / "in.onnx")


def test_a_hard_link_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """onnx_ir would refuse to read its weights, in the middle of something else."""
    save_external(tmp_path / "in.onnx", 1.0, "in.data")
    (tmp_path / "other.data").hardlink_to(tmp_path / "in.data")
    with pytest.raises(ModelFileError, match="in.data is a hard link: 2 names share its content") as failure:
        load_model(tmp_path / "in.onnx")
    assert "make a copy" in failure.value.hint


def test_weights_that_were_looked_at_are_let_go_and_can_be_read_again(tmp_path: Path) -> None:
    """A weight of which somebody holds an array stays as it is."""
    path = tmp_path / "model.onnx"
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    onnx.save(
        helper.make_model(
            helper.make_graph(
                [helper.make_node("MatMul", ["x", "w"], ["y"])],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
                [numpy_helper.from_array(weight, "w")],
            )
        ),
        path,
    )
    model = load_model(path)
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    held = tensor.numpy()
    release_weights(model)
    np.testing.assert_array_equal(held, weight)
    del held
    release_weights(model)
    assert tensor.raw is None
    np.testing.assert_array_equal(tensor.numpy(), weight)


@pytest.mark.skipif(sys.platform == "win32", reason="files there have no such limit")
def test_weights_may_outnumber_the_files_that_a_process_may_open(tmp_path: Path) -> None:
    """A thousand by default; each weight that is read holds the file open."""
    import resource

    weights = [numpy_helper.from_array(np.full(300, number, np.float32), f"w{number}") for number in range(600)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [300])
    nodes = [helper.make_node("Sum", [weight.name for weight in weights], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [output], weights)), tmp_path / "m.onnx")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    try:
        model = load_model(tmp_path / "m.onnx")
        arrays = [value.const_value.numpy() for value in model.graph.initializers.values() if value.const_value]
        assert len(arrays) == 600
        release_weights(model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
