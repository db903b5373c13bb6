"""Where a result differs from the input file, the faulty pass is found, left out and named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtool.optimize.run
from onnxtool.cli.render import Note
from onnxtool.cli.verification import verification_blocks
from onnxtool.errors import PassError, VerificationError
from onnxtool.model_file import ModelFile, Staging, save_model
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.presets import PRESETS
from onnxtool.runtime.session import disabled_optimizers
from tests.workshop import Workshop


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A TorchScript export to optimize in a folder of its own."""
    return Path(shutil.copy(workshop.exported("tiny-encoder", exporter="torchscript"), tmp_path / "tiny.onnx"))


def spoil(model: ir.Model, _context: Context) -> Outcome:
    """Turn the first normalization around, once."""
    graph = model.graph
    weight = next(v for name, v in graph.initializers.items() if name.endswith("LayerNorm.weight"))
    if "spoiled" in model.metadata_props or weight.const_value is None:
        return Outcome(model, 0)
    model.metadata_props["spoiled"] = "yes"
    weight.const_value = ir.tensor(-np.asarray(weight.const_value.numpy()), name=weight.name)
    return Outcome(model, 1)


def _fail(model: ir.Model, _context: Context) -> Outcome:
    """Fail as a library does, after a change of the graph."""
    model.graph.remove(model.graph[-1], safe=False)
    raise ZeroDivisionError("a size of 0")


@pytest.mark.parametrize("place", [0, 4])
def test_a_faulty_pass_is_left_out(exported: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Wherever it stands among the others, which run; a note names it, and the case that shows it."""
    others = PRESETS["cpu"][:4]  # bisection runs them again and again
    passes = (*others[:place], Pass("spoil", spoil), *others[place:])
    monkeypatch.setattr(onnxtool.optimize.run, "passes_for", lambda _provider, _precision: passes)
    report = optimize_model(OptimizeOptions(exported))
    (spoiled,) = [result for result in report.passes if result.left_out]
    assert spoiled.name == "spoil"
    assert re.fullmatch(r"left out: .* differs by [0-9.]+", spoiled.note)
    assert [result.name for result in report.passes[: len(others)]] == [step.name for step in others]
    assert sum(result.num_changes for result in report.passes) > 0
    assert report.verification is not None
    assert report.verification.max_abs_error < 1e-5
    step = ModelFile.open(Path(report.output)).steps[-1]
    assert step["left_out"] == ["spoil"]
    assert "spoil" not in str(step["passes"])


def test_a_pass_that_fails_is_left_out(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did to the graph before is not in the file."""
    passes = (PRESETS["cpu"][0], Pass("fail", _fail))
    monkeypatch.setattr(onnxtool.optimize.run, "passes_for", lambda _provider, _precision: passes)
    report = optimize_model(OptimizeOptions(exported))
    assert [result.note for result in report.passes if result.left_out] == [
        "left out: it failed: ZeroDivisionError: a size of 0"
    ]


@pytest.mark.parametrize("asked", ["require_fusion", "too many"])
def test_a_faulty_pass_is_an_error(asked: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all fusions are asked for, and where more are faulty than one may leave out; no file is left."""
    faulty = [Pass(f"fail {number}", _fail) for number in range(1 if asked == "require_fusion" else 4)]
    monkeypatch.setattr(onnxtool.optimize.run, "passes_for", lambda _provider, _precision: faulty)
    with pytest.raises(PassError, match="fail .* failed: ZeroDivisionError"):
        optimize_model(OptimizeOptions(exported, require_fusion=asked == "require_fusion"))
    assert sorted(path.name for path in exported.parent.iterdir()) == ["tiny.onnx"]


def _mark(model: ir.Model, _context: Context) -> Outcome:
    """Spoil in the second round alone."""
    rounds = model.metadata_props.get("rounds", "")
    model.metadata_props["rounds"] = f"{rounds}."
    return spoil(model, _context) if len(rounds) == 1 else Outcome(model, int(not rounds))


def test_a_pass_that_is_faulty_in_a_later_round_is_left_out(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (PRESETS["cpu"][0], Pass("mark", _mark))
    monkeypatch.setattr(onnxtool.optimize.run, "passes_for", lambda _provider, _precision: passes)
    report = optimize_model(OptimizeOptions(exported))
    assert [result.name for result in report.passes if result.left_out] == ["mark"]


def test_a_file_that_differs_by_no_pass_is_an_error(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was written wrongly: there is nothing to leave out, and nobody to blame."""

    def save(model: ir.Model, staging: Staging) -> Path:
        return save_model(spoil(model, Context()).model, staging)

    monkeypatch.setattr(onnxtool.optimize.run, "save_model", save)
    monkeypatch.setattr(onnxtool.optimize.run, "passes_for", lambda _provider, _precision: PRESETS["cpu"][:1])
    with pytest.raises(VerificationError, match="differs from tiny.onnx") as failure:
        optimize_model(OptimizeOptions(exported))
    assert "no pass is the cause" in failure.value.hint
    assert sorted(path.name for path in exported.parent.iterdir()) == ["tiny.onnx"]


def test_a_file_says_how_its_session_is_to_be_set(exported: Path) -> None:
    """On the CPU onnxruntime would fuse by itself what is slower there; for CUDA nothing is held back."""
    tuned = optimize_model(OptimizeOptions(exported))
    assert disabled_optimizers(ModelFile.open(Path(tuned.output))) == ["SkipLayerNormFusion"]
    again = OptimizeOptions(Path(tuned.output), output=exported.parent / "cuda.onnx", provider="cuda", verify=False)
    assert disabled_optimizers(ModelFile.open(Path(optimize_model(again).output))) == []


def _constant(folder: Path, node: Any, *initializers: Any) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 4])
    graph = helper.make_graph([node], "g", [x], [y], list(initializers))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    return folder / "m.onnx"


def test_a_file_that_gives_the_same_for_all_inputs_is_not_verified_without_a_word(tmp_path: Path) -> None:
    """It may be meant so, and is optimized; that all cases pass shows little."""
    zero = numpy_helper.from_array(np.float32(0), "zero")
    report = optimize_model(OptimizeOptions(_constant(tmp_path, helper.make_node("Mul", ["x", "zero"], ["y"]), zero)))
    assert report.verification is not None
    assert report.verification.constant_outputs == ("y",)
    notes = [block.text for block in verification_blocks(report.verification) if isinstance(block, Note)]
    assert notes == ["m.onnx gives the same for all inputs, which shows little of this file: y"]


def test_no_pass_is_blamed_for_random_numbers(tmp_path: Path) -> None:
    """Dropout in training mode."""
    ratio, training = numpy_helper.from_array(np.float32(0.5), "r"), numpy_helper.from_array(np.array(True), "t")
    path = _constant(tmp_path, helper.make_node("Dropout", ["x", "r", "t"], ["y"]), ratio, training)
    with pytest.raises(VerificationError, match="differs from itself: it draws random numbers"):
        optimize_model(OptimizeOptions(path))


def test_no_pass_is_blamed_for_nan(tmp_path: Path) -> None:
    """NaN equals nothing, the same NaN included."""
    path = _constant(tmp_path, helper.make_node("Sqrt", ["x"], ["y"]))
    with pytest.raises(VerificationError, match="differs from itself: it gives NaN"):
        optimize_model(OptimizeOptions(path))
