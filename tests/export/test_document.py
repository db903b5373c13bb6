"""The code blocks of a document that converts SPLADE++ by scripts of its own run as they stand, but for imports.

Its first two blocks are the bodies of functions, which the document names; what it only mentions (the model, its
tokenizer, paths) is given. The files are then those of a user who changes to onnxtool.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import shutil
import textwrap
import unittest.mock
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray
from onnxruntime.transformers import optimizer

from onnxtool import ExportOptions, ModelFile, export_model
from onnxtool.errors import InputError
from onnxtool.optimize.quantization.calibration import make_calibration
from onnxtool.sentence_transformers import OnnxModel
from tests.cli.entry_point import json_of, run_onnxtool
from tests.workshop import Workshop

_OUTPUT_NAMES = """
with torch.no_grad():
    outputs = model(**test_input) # We provide the text test input and the model object.

if isinstance(outputs, torch.Tensor):
    return ['output']
elif hasattr(outputs, 'last_hidden_state'):
    return ['last_hidden_state']
elif hasattr(outputs, 'logits'):
    return ['logits']
else:
    return [f'output_{i}' for i in range(len(outputs))]
"""
_DYNAMIC_AXES = """
dynamic_axes = {}
for name in input_names:
    dynamic_axes[name] = {0: 'batch_size', 1: 'sequence'}
for name in output_names:
    dynamic_axes[name] = {0: 'batch_size', 1: 'sequence'}
return dynamic_axes
"""
_BLOCKS = """
test_input = tokenizer(text, return_tensors="pt")
input_names = list(test_input.keys())
test_input = {k: v.to(device) for k, v in test_input.items()}

output_names = get_model_output_names(model, test_input)
dynamic_axes = get_dynamic_axes(input_names, output_names)

torch.onnx.export(
    model,
    tuple(test_input.values()),
    onnx_path,
    input_names=input_names,
    output_names=output_names,
    dynamic_axes=dynamic_axes,
    do_constant_folding=True,
    opset_version=14
)

# First we begin by collecting the necessary infromation from the model's configuration
model_type = model.config.model_type
num_heads = model.config.num_attention_heads
hidden_size = model.config.hidden_size

# We then load the model to add the metadata
onnx_model = onnx.load(onnx_path)
meta = onnx_model.metadata_props.add()
meta.key, meta.value = 'model_type', model_type
meta = onnx_model.metadata_props.add()
meta.key, meta.value = 'num_heads', str(num_heads)
meta = onnx_model.metadata_props.add()
meta.key, meta.value = 'hidden_size', str(hidden_size)

# Lastly, we save the model again, which includes the metadata
onnx.save(onnx_model, onnx_path)

# Load the ONNX model
onnx_model = onnx.load(model_path)
model_metadata = onnx_model.metadata_props
print(model_metadata)

model_type = next((prop.value for prop in model_metadata if prop.key == 'model_type'), None)
num_heads = next((int(prop.value) for prop in model_metadata if prop.key == 'num_heads'), None)
hidden_size = next((int(prop.value) for prop in model_metadata if prop.key == 'hidden_size'), None)

# Optimize the model
optimized_model = optimizer.optimize_model(
    model_path,
    model_type=model_type,
    num_heads=num_heads,
    hidden_size=hidden_size
)

# Optionally, we can convert to FP16 as well (not done in the script):
optimized_model.convert_float_to_float16()

model_name = model_path.split(".")[0]
optimized_model_path = f'{model_name}-optimized.onnx'
optimized_model.save_model_to_file(optimized_model_path)
print(f"ONNX model optimization successful. Saved to {optimized_model_path}")
"""
_PROGRAM = (
    f"def get_model_output_names(model, test_input):{textwrap.indent(_OUTPUT_NAMES, '    ')}\n"
    f"def get_dynamic_axes(input_names, output_names):{textwrap.indent(_DYNAMIC_AXES, '    ')}\n"
    f"{_BLOCKS}"
)
# What the document calls its scripts.
_SCRIPTS = ("convert_hf_model_to_onnx.py", "optimize_onnx_model.py", "run_onnx_model_inference.py")
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "export_scripts.md"

_TEXTS = ["what is AI?", "a much longer text than the other one, and [MASK]"]


@dataclass(frozen=True)
class Conversion:
    """What the document's program made of a checkpoint, in a folder that must not be changed.

    Attributes:
        exported: the file of `torch.onnx.export` with its metadata.
        optimized: that of onnxruntime's optimizer, in float16.
        ours: what onnxtool made of the same checkpoint.
    """

    checkpoint: Path
    exported: Path
    optimized: Path
    ours: Path

    def load(self) -> tuple[Any, dict[str, NDArray[np.int64]]]:
        """Return the model of PyTorch, and two texts of different lengths, each of its inputs int64 [B, S]."""
        model, tokenizer = load(self.checkpoint)
        texts = tokenizer(_TEXTS, padding=True, return_tensors="pt")
        return model, {name: tensor.numpy() for name, tensor in texts.items()}


def load(checkpoint: Path) -> tuple[Any, Any]:
    """Load the model as the class that it was saved as, and its tokenizer, which gives what the model takes."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    taken = inspect.signature(model.forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in taken]
    return model, tokenizer


def convert(checkpoint: Path, folder: Path) -> None:
    """Run the document's program in `folder`, with the exporter of the document's time."""
    (folder / "models").mkdir(parents=True)
    path = f"models/{checkpoint.name}.onnx"
    model, tokenizer = load(checkpoint)
    given = {"model": model, "tokenizer": tokenizer, "text": "what is AI?", "device": "cpu"}
    export = functools.partial(torch.onnx.export, dynamo=False)
    with (
        contextlib.chdir(folder),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        unittest.mock.patch.object(torch.onnx, "export", export),
    ):
        warnings.simplefilter("ignore")
        imported = {"torch": torch, "onnx": onnx, "optimizer": optimizer}
        exec(_PROGRAM, {**imported, **given, "onnx_path": path, "model_path": path})  # noqa: S102  the document's code


@pytest.fixture(scope="module")
def converted(workshop: Workshop) -> Conversion:
    """A SPLADE-shaped model."""
    checkpoint = workshop.checkpoint("tiny-splade")
    folder = workshop.made("document", lambda path: convert(checkpoint, path))
    ours = workshop.made(
        "for the document",
        lambda path: export_model(
            ExportOptions(str(checkpoint), output=path / f"{checkpoint.name}.onnx", head="none", opset=14)
        ),
    )
    exported = folder / "models" / f"{checkpoint.name}.onnx"
    optimized = exported.with_name(f"{checkpoint.name}-optimized.onnx")
    return Conversion(checkpoint, exported, optimized, ours / exported.name)


def run_file(path: Path, feeds: Mapping[str, NDArray[np.int64]]) -> NDArray[np.float32]:
    """Return the first output of a file."""
    session = onnxruntime.InferenceSession(path)
    output: NDArray[np.float32] = session.run(None, dict(feeds))[0]
    return output


def in_their_places(model: Any, feeds: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """Feed a file of the document what its inputs are, which is what PyTorch's forward takes in their places."""
    taken = [name for name in inspect.signature(model.forward).parameters if name in feeds]
    return {name: feeds[other] for name, other in zip(feeds, taken, strict=True)}


def num_nodes(path: Path) -> int:
    return len(onnx.load(path).graph.node)


def test_our_export_has_its_inputs_outputs_and_metadata(converted: Conversion) -> None:
    """In their order; the opset is the one that the document asks for, whatever the installed PyTorch makes of it."""
    theirs, ours = ModelFile.open(converted.exported), ModelFile.open(converted.ours)
    assert (ours.structure.inputs, ours.structure.outputs) == (theirs.structure.inputs, theirs.structure.outputs)
    assert theirs.metadata.items() <= ours.metadata.items()
    assert {opset.domain: opset.version for opset in onnx.load(converted.ours).opset_import} == {"": 14}


def test_the_answers_are_those_of_pytorch(converted: Conversion) -> None:
    """Of both files of the document, fed what its inputs are, and of ours, fed by name."""
    model, feeds = converted.load()
    with torch.no_grad():
        wanted = model(**{name: torch.from_numpy(array) for name, array in feeds.items()})[0].numpy()
    real = feeds["attention_mask"].astype(bool)
    by_place = in_their_places(model, feeds)
    np.testing.assert_allclose(run_file(converted.ours, feeds)[real], wanted[real], atol=1e-4, rtol=0)
    np.testing.assert_allclose(run_file(converted.exported, by_place)[real], wanted[real], atol=1e-4, rtol=0)
    # float16 keeps 11 bits
    np.testing.assert_allclose(
        run_file(converted.optimized, by_place)[real], wanted[real], atol=5e-3 + 1e-2 * np.abs(wanted).max(), rtol=0
    )


def test_inputs_that_have_each_others_names_are_refused(converted: Conversion, tmp_path: Path) -> None:
    """The document hands token types to where BERT takes its mask: fed by name, the file ignores what it is asked."""
    _, feeds = converted.load()
    wrong = run_file(converted.exported, feeds) - run_file(converted.ours, feeds)
    assert np.abs(wrong).max() > 0.5
    for file in (converted.exported, converted.optimized):
        with pytest.raises(InputError, match="under each other's names"):
            OnnxModel(file, transformers.AutoConfig.from_pretrained(converted.checkpoint))


def test_infer_says_that_inputs_have_each_others_names(converted: Conversion, tmp_path: Path) -> None:
    """With the way out."""
    done = run_onnxtool(
        tmp_path, "infer", "--model_path", converted.exported, "--model_name", converted.checkpoint, "--text", "a"
    )
    assert done.returncode == 1
    assert f"error: {converted.exported} takes its mask as token_type_ids and its token types as" in done.stderr
    assert "hint: export the checkpoint again with onnxtool export" in done.stderr


def test_int8_is_not_calibrated_on_texts_under_the_wrong_names(converted: Conversion, tmp_path: Path) -> None:
    """With a tokenizer beside the file, whose texts are refused where they were asked for."""
    shutil.copytree(converted.checkpoint, tmp_path / "model")
    path = Path(shutil.copy(converted.optimized, tmp_path / "model.onnx"))
    (tmp_path / "texts.txt").write_text("a cat")
    calibration = make_calibration(path)
    assert calibration.num_texts == 0
    assert "under each other's names" in calibration.note
    with pytest.raises(InputError, match="under each other's names"):
        make_calibration(path, tmp_path / "texts.txt")


@pytest.mark.parametrize("which", ["exported", "optimized"])
def test_optimize_takes_both_files(converted: Conversion, which: str, tmp_path: Path) -> None:
    """It fuses every attention, of which onnxruntime's optimizer fuses none, and the outputs stay the same."""
    source, output = getattr(converted, which), tmp_path / "optimized.onnx"
    report = json_of(run_onnxtool(tmp_path, "optimize", "--model_path", source, "--output", output, "--format", "json"))
    assert report["verification"]["passed"]
    assert {"kind": "attention", "expected": 2, "found": 2} in report["fusions"]
    assert report["before"]["num_nodes"] == num_nodes(source) > num_nodes(output) == report["after"]["num_nodes"]
    assert not any("Attention" in node.op_type for node in onnx.load(source).graph.node)


def test_the_documentation_says_what_to_write_for_each_of_its_names() -> None:
    """Scripts, options, functions, arguments and metadata."""
    page = _PAGE.read_text(encoding="utf-8")
    names = (
        *_SCRIPTS,
        *("--model_name", "--model_path", "--stats", "--text"),
        *("get_model_output_names", "get_dynamic_axes", "input_names", "opset_version=14", "do_constant_folding"),
        *("model_type", "num_heads", "hidden_size", "optimizer.optimize_model", "convert_float_to_float16"),
        *("save_model_to_file", "InferenceSession", "device"),
    )
    assert [name for name in names if name not in page] == []
