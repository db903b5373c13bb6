"""Exports of many architectures are read field by field as onnx.load reads them, with and without external data."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxtool.model_file.wire import read_nodes, read_structure
from onnxtool.summary import summarize_model
from tests.model_file.test_wire import assert_same_structure, graphs_of

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
# Architecture to what its configuration has beside or in place of the above.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": TINY,
    "ModernBertModel": {
        **TINY,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "T5EncoderModel": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 99},
    "ViTModel": {**TINY, "image_size": 32, "patch_size": 16},
}


def export(name: str, path: Path) -> None:
    import torch
    import transformers

    architecture = getattr(transformers, name)
    config = architecture.config_class(**ARCHITECTURES[name])
    config.use_cache = False
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = architecture(config).eval()
    inputs = torch.ones((2, 3, 32, 32)) if name == "ViTModel" else torch.ones((2, 8), dtype=torch.int64)

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: Any) -> Any:
            return self.model(given, return_dict=False)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            First(),
            (inputs,),
            path,
            dynamo=False,
            opset_version=17,
            input_names=["given"],
            dynamic_axes={"given": {0: "n"}},
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_export_reads_as_onnx_reads_it(name: str, tmp_path: Path) -> None:
    """Every field that both know, the bytes of every weight and every node, inside of the file and outside."""
    export(name, tmp_path / "inside.onnx")
    model = onnx.load(tmp_path / "inside.onnx")
    onnx.save(model, tmp_path / "outside.onnx", save_as_external_data=True, location="w.bin", size_threshold=512)
    model = onnx.load(tmp_path / "inside.onnx")
    for file in ("inside.onnx", "outside.onnx"):
        structure = read_structure(tmp_path / file)
        assert_same_structure(structure, model)
        assert structure.num_nodes > 20
        weights = [tensor for graph in graphs_of(model.graph) for tensor in graph.initializer]
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in weights}
        stats = summarize_model(tmp_path / file)
        constants = [
            np.asarray(onnx.helper.get_attribute_value(attribute)).size
            if attribute.type != onnx.AttributeProto.TENSOR
            else numpy_helper.to_array(attribute.t).size
            for graph in graphs_of(model.graph)
            for node in graph.node
            for attribute in node.attribute
            if node.op_type == "Constant"
        ]
        assert stats.num_parameters == sum(array.size for array in arrays.values()) + sum(constants)
        by_dtype: Counter[str] = Counter()
        for array in arrays.values():
            by_dtype[array.dtype.name] += array.nbytes
        assert stats.initializer_bytes == by_dtype
        for tensor in structure.initializers:
            assert bytes_of(tmp_path, file, tensor) == arrays[tensor.name].tobytes()
        assert [(node.op_type, node.name, list(node.inputs)) for node in read_nodes(tmp_path / file)] == [
            (node.op_type, node.name, list(node.input)) for node in model.graph.node
        ]
        attribute_bytes = sum(
            numpy_helper.to_array(attribute.t).nbytes
            for graph in graphs_of(model.graph)
            for node in graph.node
            for attribute in node.attribute
            if attribute.HasField("t")
        )
        assert stats.attribute_bytes == attribute_bytes
        assert sum(layer.num_nodes for layer in stats.layers.values()) in (0, stats.num_nodes)


def bytes_of(folder: Path, file: str, tensor: Any) -> bytes:
    """Read a weight from where the structure says that it lies."""
    path, (start, length) = folder / file, tensor.payload or (0, 0)
    if tensor.external is not None:
        path, start, length = folder / tensor.external.location, tensor.external.offset, tensor.external.length
    with path.open("rb") as opened:
        opened.seek(start)
        return opened.read(length)
