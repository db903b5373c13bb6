"""Files for Oracle AI Database: text in, vector out, in one file, with the metadata that names both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from transformers import AutoModel, AutoTokenizer

from onnxtool import ExportOptions, export_model
from onnxtool.errors import OptionError, TargetError
from onnxtool.export import in_graph
from onnxtool.export.in_graph import TextProof
from onnxtool.export.source import Source
from onnxtool.export.target_specification import class_of
from onnxtool.export.targets import TARGETS
from onnxtool.runtime.providers import find_library
from tests.module_files import write_modules
from tests.workshop import Workshop

TEXTS = ["a cat", "Où est le café ? 東京", "", "very " * 300]


def oracle_folder(workshop: Workshop) -> Path:
    """Return a folder with a small encoder, `checkpoint`, and its export, `m`; its tokenizer is not compared anew."""

    def make(folder: Path) -> None:
        checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), folder / "checkpoint"))
        write_modules(checkpoint, ("Pooling", {"pooling_mode": "mean"}), "Normalize")
        options = ExportOptions(checkpoint, target="oracle", output=folder / "m", exporter="torchscript")
        with (
            mock.patch.object(TextProof, "check", return_value=(0, {})),
            mock.patch.object(in_graph, "check_same_outputs"),
        ):
            (folder / "note.txt").write_text(" ".join(export_model(options).notes))

    return workshop.made("oracle", make)


def test_the_database_gets_one_file_and_the_metadata_that_names_its_input_and_output(workshop: Workshop) -> None:
    """The oracle of its vectors is transformers; one axis of each tensor is of any size, and that of vectors fixed."""
    folder = oracle_folder(workshop)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(find_library())
    session = onnxruntime.InferenceSession(folder / "m" / "checkpoint.onnx", options)
    metadata = json.loads((folder / "m" / "metadata.json").read_text())
    (text,), (output,) = session.get_inputs(), session.get_outputs()
    assert metadata == {"function": "embedding", "embeddingOutput": output.name, "input": {text.name: ["DATA"]}}
    assert (output.name, text.type, text.shape) == ("embedding", "tensor(string)", ["batch_size"])
    assert (output.type, output.shape) == ("tensor(float)", ["batch_size", 32])
    assert (
        f"file_name => 'checkpoint.onnx', model_name => 'MODEL', metadata => JSON('{json.dumps(metadata)}'))"
        in (folder / "note.txt").read_text()
    )
    proto = onnx.load(folder / "m" / "checkpoint.onnx")
    assert proto.ir_version <= 8
    assert proto.opset_import[0].version <= 18
    alone = np.concatenate([session.run(None, {text.name: np.array([one], dtype=object)})[0] for one in TEXTS])
    assert alone.dtype == np.float32
    np.testing.assert_allclose(alone, _vectors(folder / "checkpoint"), atol=1e-5)


def _vectors(checkpoint: Path) -> Any:
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModel.from_pretrained(checkpoint)
    feeds = tokenizer(TEXTS, padding=True, truncation=True, max_length=64, return_tensors="pt")
    mask = feeds["attention_mask"][:, :, None]
    with torch.no_grad():
        pooled = (model(**feeds).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled).numpy()


@pytest.mark.parametrize(
    ("name", "options", "reason", "hint"),
    [
        (
            "tiny-encoder",
            {"tokenizer": "beside"},
            "takes files with --tokenizer in_graph",
            "--target plain",
        ),
        ("tiny-encoder", {}, "does not say how it pools", "save the model with sentence-transformers"),
        ("tiny-splade", {}, "takes text encoders; this model's task is sparse-encoding", "--target plain"),
        ("tiny-classifier", {}, "takes text encoders; this model's task is text-classification", "--target plain"),
    ],
)
def test_what_the_database_does_not_run_is_refused(
    workshop: Workshop, tmp_path: Path, name: str, options: dict[str, Any], reason: str, hint: str
) -> None:
    """By name, before a model is traced, with the way out."""
    with pytest.raises((OptionError, TargetError), match=reason) as caught:
        export_model(ExportOptions(workshop.checkpoint(name), target="oracle", output=tmp_path / "m", **options))
    assert hint in caught.value.hint
    assert not (tmp_path / "m").exists()


def test_weights_outside_the_file_are_refused(tmp_path: Path) -> None:
    """As of graphs above the limit of 2 GB, which the database would look for in another format."""
    weights = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    value = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [4, 4])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["embedding"])], "g", [], [value], [weights])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    row = TARGETS["oracle"]
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    specification = class_of(row)(row, row.usages[0], Source.find(str(tmp_path)), None, None)
    with pytest.raises(TargetError, match="loads one file of at most 2 GB") as caught:
        specification.pack(tmp_path, tmp_path / "m.onnx")
    assert "--dtype float16" in caught.value.hint
    assert not (tmp_path / "metadata.json").exists()
