"""Where a result differs from the input file, the faulty pass is found, left out and named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtool.optimize.attempt
import onnxtool.optimize.verification
from onnxtool import OptimizeOptions, optimize_model
from onnxtool.cli.render import Facts, Note
from onnxtool.cli.verify import verification_blocks
from onnxtool.errors import PassError, SessionError, VerificationError
from onnxtool.model_file import ModelFile, Staging, save_model
from onnxtool.model_file.metadata import DISABLED_OPTIMIZERS_KEY, stamp
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.presets import PRESETS
from onnxtool.optimize.verification import FaultyPassError, Original, Reference, Verifier
from onnxtool.runtime.comparison import Case, Runner, run_reference
from onnxtool.runtime.difference import TOLERANCES
from onnxtool.runtime.providers import CPU, ExecutionProvider
from onnxtool.runtime.session import disabled_optimizers
from onnxtool.verification import Verification
from tests.graphs import save_text
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
    monkeypatch.setitem(PRESETS, "cpu", passes)
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


def _rename(model: ir.Model, _context: Context) -> Outcome:
    """Use an operator that nobody has."""
    node = model.graph[-1]
    changed, node.op_type = node.op_type != "Nobody", "Nobody"
    return Outcome(model, int(changed))


def test_each_faulty_pass_is_left_out_for_what_it_did(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for what a later one did to the same file."""
    passes = (Pass("spoil", spoil), Pass("rename", _rename))
    monkeypatch.setitem(PRESETS, "cpu", passes)
    notes = {result.name: result.note for result in optimize_model(OptimizeOptions(exported)).passes if result.left_out}
    assert re.fullmatch(r"left out: .* differs by [0-9.]+", notes["spoil"])
    assert re.fullmatch(r"left out: .*Nobody.*", notes["rename"])


def test_a_pass_that_fails_is_left_out(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did to the graph before is not in the file."""
    passes = (PRESETS["cpu"][0], Pass("fail", _fail))
    monkeypatch.setitem(PRESETS, "cpu", passes)
    report = optimize_model(OptimizeOptions(exported))
    assert [result.note for result in report.passes if result.left_out] == [
        "left out: it failed: ZeroDivisionError: a size of 0"
    ]


@pytest.mark.parametrize("asked", ["require_fusion", "too many"])
def test_a_faulty_pass_is_an_error(asked: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all fusions are asked for, and where more are faulty than one may leave out; no file is left."""
    faulty = [Pass(f"fail {number}", _fail) for number in range(1 if asked == "require_fusion" else 4)]
    monkeypatch.setitem(PRESETS, "cpu", faulty)
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
    monkeypatch.setitem(PRESETS, "cpu", passes)
    report = optimize_model(OptimizeOptions(exported))
    assert [result.name for result in report.passes if result.left_out] == ["mark"]


@pytest.mark.parametrize("when", ["after all passes", "before all passes"])
def test_a_file_that_differs_by_no_pass_is_an_error(when: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was read or written wrongly: there is nothing to leave out, and nobody to blame."""

    def save(model: ir.Model, staging: Staging, **options: Any) -> Path:
        return save_model(spoil(model, Context()).model, staging, **options)

    def load(path: Path) -> ir.Model:
        return spoil(load_model(path), Context()).model

    monkeypatch.setattr(onnxtool.optimize.attempt, "save_model", save)
    if when == "before all passes":
        monkeypatch.setattr(onnxtool.optimize.verification, "load_model", load)
    monkeypatch.setitem(PRESETS, "cpu", PRESETS["cpu"][:1])
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


def _model(folder: Path, body: str, weights: Mapping[str, Any] | None = None) -> Path:
    """Write a graph from x to y, float32 [b, 4]."""
    return save_text(folder / "m.onnx", f"g (float[b, 4] x) => (float[b, 4] y) {{ {body} }}", weights, 17)


def test_a_file_that_gives_the_same_for_all_inputs_is_not_verified_without_a_word(tmp_path: Path) -> None:
    """It may be meant so, and is optimized; that all cases pass shows little."""
    report = optimize_model(OptimizeOptions(_model(tmp_path, "y = Mul(x, zero)", {"zero": np.float32(0)})))
    assert report.verification is not None
    assert report.verification.constant_outputs == ("y",)
    notes = [block.text for block in verification_blocks(report.verification) if isinstance(block, Note)]
    assert notes == ["m.onnx gives the same for all inputs, which shows little of this file: y"]


@pytest.mark.parametrize("operator", ["Dropout", "RandomUniformLike"])
def test_a_file_that_draws_random_numbers_is_refused_before_any_pass(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws in training mode alone; a session on its own draws as the next one does, so two runs are needed."""
    weights = {"r": np.float32(0.5), "t": True} if operator == "Dropout" else {}
    path = _model(tmp_path, f"y = {operator}({', '.join(['x', *weights])})", weights)
    monkeypatch.setattr(onnxtool.optimize.attempt, "run_passes", None)
    with pytest.raises(
        VerificationError, match=rf"draws random numbers \({operator}\) and gives other outputs"
    ) as error:
        optimize_model(OptimizeOptions(path))
    assert "training mode" in error.value.hint
    assert not isinstance(error.value, FaultyPassError)


def test_a_file_that_draws_by_a_seed_of_its_own_is_compared_draw_by_draw(tmp_path: Path) -> None:
    """Each time it is loaded it draws the same, so that a result may not differ."""
    path = _model(tmp_path, "y = RandomUniformLike <seed=3.0> (x)")
    report = optimize_model(OptimizeOptions(path))
    assert report.verification is not None
    assert report.verification.max_abs_error == 0.0


def test_dropout_that_drops_nothing_is_no_random_number(tmp_path: Path) -> None:
    """Old exports are full of it."""
    path = _model(tmp_path, "y = Dropout(x)")
    assert optimize_model(OptimizeOptions(path)).verification is not None


def test_nan_of_both_is_equal_and_said(tmp_path: Path) -> None:
    """A root of what is negative is NaN in the file and in the result, which is no pass's fault."""
    report = optimize_model(OptimizeOptions(_model(tmp_path, "y = Sqrt(x)")))
    notes = [block.text for block in verification_blocks(report.verification) if isinstance(block, Note)]
    assert re.fullmatch(
        r"y: \d+ values in \d+ of \d+ cases are the same NaN, infinity or fill as in m.onnx; they count as equal.*",
        notes[0],
    )


def test_a_file_of_nothing_but_nan_is_not_verified(tmp_path: Path) -> None:
    """Every file of NaN would be equal to it."""
    with pytest.raises(VerificationError, match="gives nothing but NaN and infinities"):
        optimize_model(OptimizeOptions(_model(tmp_path, "y = Add(x, nan)", {"nan": np.float32(np.nan)})))


def test_a_file_that_does_not_run_is_told_in_the_words_of_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any pass: what the file does by itself is the fault of none."""
    path = _model(tmp_path, "y = MatMul(table, x)", {"table": np.zeros((3, 5), np.float32)})
    monkeypatch.setattr(onnxtool.optimize.attempt, "run_passes", None)
    with pytest.raises(SessionError, match="itself runs on none of .*MatMul"):
        optimize_model(OptimizeOptions(path))


def _compared(path: Path, monkeypatch: pytest.MonkeyPatch, operator: str, moves: float, by: float) -> Verification:
    """Compare a result that is off `by` so much with a file that `moves` so much between optimization levels."""
    x = np.ones((1, 4), np.float32)
    y = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)

    def opened(_original: Original, opened: Path | ModelFile, level: str = "ENABLE_ALL") -> Runner:
        off = np.float32(by if opened is result else moves if level == "DISABLE_ALL" else 0)
        return lambda _feeds: {"y": y + off}

    monkeypatch.setattr(Original, "open", opened)
    source, result = ModelFile.open(path), ModelFile.open(path)
    original = Original(source, path, ExecutionProvider(CPU), {operator: 1})
    expected = run_reference(original.open(path), [Case("a case", {"x": x}, None)], name="m.onnx")
    verifier = Verifier(Reference(original, expected), (), Context(), TOLERANCES["fp32"])
    return verifier.verify(result)


def test_a_file_that_quantizes_as_it_runs_may_differ_as_much_as_it_does_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure is reported with the tolerance that it makes; where the usual one is enough, nothing is widened."""
    path = _model(tmp_path, "y = Neg(x)")
    verification = _compared(path, monkeypatch, "DynamicQuantizeLinear", moves=0.3, by=0.2)
    assert verification.passed
    assert verification.own_variation == pytest.approx(0.3, rel=1e-5)
    assert verification.atol == pytest.approx(0.3 + TOLERANCES["fp32"].atol, rel=1e-5)
    facts = [row for block in verification_blocks(verification) if isinstance(block, Facts) for row in block.rows]
    assert ("It moves by itself, between optimization levels, by", "0.3") in facts
    usual = _compared(path, monkeypatch, "DynamicQuantizeLinear", moves=0.3, by=0.0)
    assert (usual.own_variation, usual.atol) == (None, TOLERANCES["fp32"].atol)


@pytest.mark.parametrize(
    ("operator", "moves", "by", "message"),
    [
        ("DynamicQuantizeLinear", 0.3, 0.5, "differs from m.onnx"),
        ("DynamicQuantizeLinear", 4.0, 0.5, "between onnxruntime's optimization levels: more than int8 may change"),
        ("MatMul", 0.3, 0.2, "differs from m.onnx"),
    ],
)
def test_own_variation_excuses_no_more_than_itself(
    operator: str, moves: float, by: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a difference beyond it, not one in a file of other operators; and there is a bound to it."""
    path = _model(tmp_path, "y = Neg(x)")
    with pytest.raises(VerificationError, match=message):
        _compared(path, monkeypatch, operator, moves, by)


def test_both_files_run_with_the_same_session_options(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is stamped to run without an optimizer that would change what its input gives as well."""
    given: list[Any] = []

    def session(*arguments: Any, **options: Any) -> Any:
        given.append((options["disabled_optimizers"], arguments[1].graph_optimization_level))
        return real(*arguments, **options)

    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    path = exported.with_name("m.onnx")
    original = Original(ModelFile.open(exported), exported, ExecutionProvider(CPU), {}, ["SkipLayerNormFusion"])
    shutil.copy(exported, path)
    stamp(path, {DISABLED_OPTIMIZERS_KEY: "GeluFusion"})
    assert original.run().compare(ModelFile.open(path), TOLERANCES["fp32"]).passed
    assert given == 2 * [(["SkipLayerNormFusion"], onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)]


def test_answers_of_a_fixed_length_that_are_not_the_checkpoints_are_said(tmp_path: Path) -> None:
    """By how much padding moves them, if it is more than rounding."""
    report = optimize_model(OptimizeOptions(_model(tmp_path, "y = Neg(x)")))
    assert report.verification is not None
    for effect, is_said in ((1e-6, False), (0.25, True)):
        blocks = verification_blocks(replace(report.verification, length_effect=effect))
        assert any("moves the outputs for a short one by 0.25" in str(block) for block in blocks) is is_said
