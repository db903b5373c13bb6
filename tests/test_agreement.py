"""`onnxtool.verify` compares a file with what it was made from, and says by how much it differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from onnxtool import ExportOptions, OptimizeOptions, VerifyOptions, optimize_model, verify
from onnxtool.errors import CheckpointError, ExportError, InputError, ModelFileError, OptionError
from onnxtool.export.verification import compare_with_checkpoint
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY, stamp
from onnxtool.runtime.comparison import Case
from tests import generators
from tests.cli.entry_point import run_onnxtool
from tests.workshop import Workshop


@pytest.fixture(scope="module")
def exported(workshop: Workshop) -> Path:
    return workshop.exported("tiny-encoder", exporter="torchscript")


def damage(source: Path, output: Path) -> Path:
    """Write the same file with one weight of a normalization that is a little off."""
    model = onnx.load(source)
    weight = next(one for one in model.graph.initializer if "norm" in one.name.lower() and one.name.endswith(".weight"))
    array = numpy_helper.to_array(weight).copy()
    array[3] *= 1.01
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, output)
    return output


@pytest.fixture(scope="module")
def damaged(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage(exported, tmp_path_factory.mktemp("damaged") / "damaged.onnx")


def test_an_optimized_file_agrees_with_its_input(exported: Path, tmp_path: Path) -> None:
    """The figures are those that `optimize` has found for it."""
    output = tmp_path / "optimized.onnx"
    report = optimize_model(OptimizeOptions(exported, output=output, timing=False))
    verification = verify(output, exported)
    assert verification.passed
    assert verification == report.verification


def test_a_file_that_differs_is_told_by_its_figures(exported: Path, damaged: Path) -> None:
    verification = verify(damaged, exported)
    assert not verification.passed
    assert verification.max_abs_error > verification.atol
    assert verify(damaged, exported, VerifyOptions(precision="int8")).passed


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    ids = np.arange(10, dtype=np.int64).reshape(2, 5)
    np.savez(tmp_path / "sample.npz", input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=ids % 2)
    return tmp_path / "sample.npz"


def test_given_inputs_are_all_that_is_compared(exported: Path, damaged: Path, sample: Path) -> None:
    """Both files run on a sample; what it shows is measured by onnxruntime alone."""
    (case,) = verify(damaged, exported, VerifyOptions(sample_inputs=sample)).cases
    feeds = dict(np.load(sample))
    outputs = [ort.InferenceSession(path).run(None, feeds) for path in (damaged, exported)]
    error = max(float(np.abs(one - other).max()) for one, other in zip(*outputs, strict=True))
    assert case.inputs["input_ids"] == (2, 5)
    assert case.max_abs_error == pytest.approx(error, rel=1e-3)


def test_a_file_is_compared_with_its_checkpoint(exported: Path, damaged: Path, workshop: Workshop) -> None:
    """What the file computes of it is read from its stamps; PyTorch is the reference."""
    checkpoint = workshop.checkpoint("tiny-encoder")
    right, wrong = verify(exported, checkpoint), verify(damaged, checkpoint)
    assert (right.passed, right.reference) == (True, "PyTorch")
    assert not wrong.passed
    assert [case.description for case in wrong.cases] == [case.description for case in right.cases]


def test_sample_inputs_run_in_pytorch_too(exported: Path, damaged: Path, workshop: Workshop, sample: Path) -> None:
    options = VerifyOptions(sample_inputs=sample)
    (case,) = verify(exported, workshop.checkpoint("tiny-encoder"), options).cases
    assert case.passed
    assert case.inputs["input_ids"] == (2, 5)
    assert not verify(damaged, workshop.checkpoint("tiny-encoder"), options).passed


def test_an_int8_file_is_compared_with_its_checkpoint(exported: Path, workshop: Workshop, tmp_path: Path) -> None:
    """PyTorch runs the weights that were quantized: no checkpoint has int8's."""
    output = tmp_path / "int8.onnx"
    optimize_model(OptimizeOptions(exported, output=output, precision="int8", max_error=0.5, timing=False))
    checkpoint = workshop.checkpoint("tiny-encoder")
    assert verify(output, checkpoint, VerifyOptions(precision="int8")).passed
    assert not verify(output, checkpoint).passed


def test_another_checkpoint_is_told_by_what_the_file_states(exported: Path, workshop: Workshop, tmp_path: Path) -> None:
    """No option is blamed that only the file's stamps set."""
    path = Path(shutil.copy(exported, tmp_path))
    onnx_model = onnx.load(path)
    next(one for one in onnx_model.metadata_props if one.key == MAX_LENGTH_KEY).value = "100000"
    onnx.save(onnx_model, path)
    with pytest.raises(ExportError, match="states .*max_length 100000, which .*tiny-encoder does not give") as caught:
        verify(path, workshop.checkpoint("tiny-encoder"))
    assert caught.value.hint == "compare it with the checkpoint that it was made from"


def test_an_output_that_a_file_lacks_is_named(exported: Path, workshop: Workshop, sample: Path, tmp_path: Path) -> None:
    model = onnx.load(exported)
    del model.graph.output[1]
    onnx.save(model, tmp_path / "one.onnx")
    done = run_onnxtool(
        tmp_path, "verify", "one.onnx", workshop.checkpoint("tiny-encoder"), "--sample_inputs", str(sample)
    )
    assert done.returncode == 1
    assert "in 1 of 1 cases; worst: sample, it has no output pooler_output" in done.stderr


def test_a_checkpoint_in_a_pickle_is_read_if_allowed(exported: Path, workshop: Workshop, tmp_path: Path) -> None:
    checkpoint = tmp_path / "pickle"
    shutil.copytree(workshop.checkpoint("tiny-encoder"), checkpoint)
    weights = checkpoint / "model.safetensors"
    torch.save(load_file(weights), checkpoint / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(CheckpointError, match="has its weights in a pickle"):
        verify(exported, checkpoint)
    assert verify(exported, checkpoint, VerifyOptions(allow_pickle=True)).passed


def test_a_decoder_is_compared_token_by_token(workshop: Workshop, tmp_path: Path) -> None:
    """One of other weights is told apart, and samples of a step are refused."""
    model, checkpoint = generators.exported(workshop, "llama"), generators.checkpoint(workshop, "llama")
    assert verify(model, checkpoint).passed
    assert not verify(damage(model, tmp_path / "damaged.onnx"), checkpoint).passed
    with pytest.raises(ExportError, match="on its own prompts"):
        compare_with_checkpoint(ModelFile.open(model), ExportOptions(checkpoint), [Case("a step", {}, None)])
    with pytest.raises(OptionError, match="is for two files"):
        verify(model, checkpoint, VerifyOptions(input_shapes="input_ids:1,8"))


def test_a_stamp_that_asks_for_more_is_refused(exported: Path, workshop: Workshop, tmp_path: Path) -> None:
    """A file cannot let code of a checkpoint run."""
    path = Path(shutil.copy(exported, tmp_path))
    stamp(path, {"onnxtool.options": '{"trust_remote_code": true}'})
    with pytest.raises(ModelFileError, match="trust_remote_code, which no export has"):
        verify(path, workshop.checkpoint("tiny-encoder"))


def test_a_file_with_other_inputs_is_not_compared(exported: Path, workshop: Workshop) -> None:
    with pytest.raises(InputError, match="has the inputs attention_mask, input_ids, and"):
        verify(workshop.exported("tiny-classifier", exporter="torchscript"), exported)
    with pytest.raises(ModelFileError, match="no such model file"):
        verify(exported, exported.with_name("typo.onnx"))
    with pytest.raises(OptionError, match="--revision is for a checkpoint, and .*tiny-encoder.onnx is an ONNX file"):
        verify(exported, exported, VerifyOptions(revision="main"))
    with pytest.raises(OptionError, match="not the shape of an input"):
        VerifyOptions(input_shapes="input_ids")


def test_the_command_exits_by_the_result(exported: Path, damaged: Path, tmp_path: Path) -> None:
    """0 where the files agree, 1 where they do not; the report is the one of the API."""
    done = run_onnxtool(tmp_path, "verify", damaged, exported, "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert "verification failed: the result differs from tiny-encoder.onnx in " in done.stderr
    assert report["passed"] is False
    assert report["max_abs_error"] == verify(damaged, exported).max_abs_error
    assert run_onnxtool(tmp_path, "verify", exported, exported, "--quiet").returncode == 0
