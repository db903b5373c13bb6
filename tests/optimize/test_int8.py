"""int8 from the command's own entry point: the promise, what is named, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import InputError, OptionError
from onnxtool.infer import load
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization.calibration import make_calibration
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.report import OptimizeReport

INT8_PRODUCTS = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")


def test_the_report_says_what_is_in_int8_and_how_far_it_is_off(exported: Path) -> None:
    """On as many texts as there are in the file, by weights a quarter as large."""
    texts = exported.with_name("texts.txt")
    texts.write_text("a first text\nanother one, a little longer\nand a third\n")
    report = optimize_model(OptimizeOptions(exported, precision="int8", max_error=0.2, calibration=texts))
    found = report.quantization
    assert found is not None
    assert found.num_texts == 3
    assert found.note.startswith("ranges of activations behind normalizations are fixed at 1.35 times those")
    assert 0 < found.mean_error <= found.error <= 0.2
    assert found.num_layers > len(found.kept)
    products = sum(report.after.ops.get(f"com.microsoft::{name}", 0) for name in INT8_PRODUCTS)
    assert products == found.num_layers - len(found.kept)
    assert report.after.size_bytes < 0.4 * report.before.size_bytes
    assert dict(found.arithmetic) == {"exact": found.error, "saturating": found.error, "per_row": found.error}
    written = ModelFile.open(Path(report.output))
    assert written.metadata["onnxtool.dtype"] == "int8"
    assert {key: written.steps[-1][key] for key in ("error", "arithmetic")} == {
        "error": found.error,
        "arithmetic": found.arithmetic,
    }
    assert report.verification is not None
    assert report.verification.passed


def test_fixed_ranges_come_with_a_note_of_what_they_do_not_promise(exported: Path) -> None:
    """Those of each run depend on the batch instead, by what is measured."""
    for activations, told in (("static", True), ("dynamic", False)):
        options = OptimizeOptions(exported, precision="int8", activations=activations, verify=False, force=True)
        found = optimize_model(replace(options, max_error=0.5)).quantization
        assert found is not None
        assert ("a text whose activations exceed them has a larger error" in found.note) == told
        assert ("an answer depends on the texts beside it: by 1 - cosine " in found.note) != told


def test_the_error_is_that_of_this_cpus_kernels(exported: Path) -> None:
    """A session of onnxruntime's own has it as well: nothing is measured with other products than users run."""
    texts = exported.with_name("texts.txt")
    texts.write_text("a first text\nanother one, a little longer\nand a third\n")
    report = optimize_model(OptimizeOptions(exported, precision="int8", max_error=0.9, calibration=texts, verify=False))
    assert report.quantization is not None
    source, result = (
        ort.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (exported, report.output)
    )
    names = [output.name for output in source.get_outputs()]
    errors = []
    for feeds in make_calibration(exported, texts).feeds:
        expected, found = (dict(zip(names, one.run(names, feeds), strict=True)) for one in (source, result))
        errors.append(output_errors(found, expected, padding_mask(feeds), {}).max())
    # Graph optimizations differ, and a number between two steps of the activations may go the other way.
    assert report.quantization.error == pytest.approx(max(errors), rel=0.05)


def test_layers_that_cannot_afford_it_are_named(exported: Path) -> None:
    """Their weights are still there in float32."""
    report = optimize_model(OptimizeOptions(exported, precision="int8", max_error=2e-4))
    assert report.quantization is not None
    assert report.quantization.error <= 2e-4
    names = {layer.name for layer in report.quantization.kept}
    assert names
    # Queries, keys and values that all stay are packed in one weight still.
    held = {tensor.name for tensor in ModelFile.open(Path(report.output)).structure.initializers}
    assert {name if name in held else name.rpartition("_")[0] for name in names} <= held


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_bound_that_nobody_checks_is_refused(exported: Path, precision: str) -> None:
    """Without calibration, the comparison is all that holds it."""
    with pytest.raises(OptionError, match=f"--max_error of {precision} is checked by the comparison"):
        OptimizeOptions(exported, precision=precision, max_error=0.001, verify=False)


def test_inputs_that_nothing_runs_on_are_refused(exported: Path) -> None:
    """Without comparison and timing, a file in float32 is written without a run."""
    shapes = ("input_ids:1,8",)
    with pytest.raises(OptionError, match="which --no_verify and --no_timing leave out"):
        OptimizeOptions(exported, input_shapes=shapes, verify=False, timing=False)
    assert OptimizeOptions(exported, input_shapes=shapes, verify=False, timing=False, precision="int8").given


def test_texts_without_int8_are_refused(exported: Path) -> None:
    """They would do nothing."""
    with pytest.raises(OptionError, match="--calibration is for int8, int4 and auto, and the precision is fp16"):
        OptimizeOptions(exported, precision="fp16", calibration=Path("texts.txt"))


def test_a_missing_file_of_texts_is_an_error(exported: Path) -> None:
    """It is not replaced by texts of our own."""
    with pytest.raises(InputError, match="no-such-file"):
        optimize_model(OptimizeOptions(exported, precision="int8", calibration=Path("no-such-file.txt")))


@pytest.mark.slow
def test_the_promise_holds_for_trained_weights(trained_int8: tuple[Path, OptimizeReport]) -> None:
    """On sentences that it was not calibrated on, pooled in the graph."""
    source, report = trained_int8
    subjects = ("the train", "a letter", "our cat", "this parser", "the third chapter")
    texts = [
        f"{subject} arrives late before {time}" for subject in subjects for time in ("noon", "the deadline", "rain")
    ]
    wanted, found = (np.array(load(path).answer(texts).similarities) for path in (source, report.output))
    # Unit vectors that are 0.01 off move a cosine by at most 2 * sqrt(2 * 0.01); ranks decide less. The cosines of
    # two layers are close together, and kernels without VNNI add to the error.
    np.testing.assert_allclose(found, wanted, atol=0.03, rtol=0)
    assert np.corrcoef(found.reshape(-1), wanted.reshape(-1))[0, 1] > 0.995
