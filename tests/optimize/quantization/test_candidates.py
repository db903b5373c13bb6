"""`--precision auto` tries what there is on this machine, and takes the fastest within the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import PassError, ProviderError, SessionError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.options import PRECISIONS
from onnxtool.optimize.quantization import candidates, conversion
from onnxtool.optimize.quantization.candidates import CANDIDATES, Judgement, timing_feeds
from onnxtool.optimize.report import Candidate, OptimizeReport
from onnxtool.optimize.verification import verification_feeds
from tests.optimize.passes.builders import build, normal

LABELS = ["fp32", "fp16", "int8 mixed", "int8 dynamic", "int8 static", "int4"]


def auto(model: Path, max_error: float = 0.2, *, verify: bool = False) -> OptimizeReport:
    """Optimize on a few texts."""
    texts = model.with_name("texts.txt")
    texts.write_text("a first text\nanother one, a little longer\nand a third\n", encoding="utf-8")
    options = OptimizeOptions(model, precision="auto", calibration=texts, max_error=max_error, verify=verify)
    return optimize_model(options)


def label(one: Candidate) -> str:
    return f"{one.precision} {one.activations}".strip()


def pretend(monkeypatch: pytest.MonkeyPatch, latencies_ms: Mapping[str, float]) -> None:
    """Let sessions take as long as their file's folder says."""

    def found(session: Any, *_: object, **__: object) -> list[float]:
        return [latencies_ms[session.model.path.parent.name.removeprefix("draft ")]] * 3

    monkeypatch.setattr(candidates, "_latencies_ms", found)


def compare_with_float32(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave no candidates but float32 and those of these names: each takes a second to make."""
    rows = tuple(row for row in CANDIDATES["cpu"] if " ".join(row).strip() in ("fp32", *names))
    monkeypatch.setitem(CANDIDATES, "cpu", rows)


def test_every_precision_of_a_provider_is_a_candidate() -> None:
    """But auto itself, and what is for browsers."""
    for provider, names in PRECISIONS.items():
        assert {precision for precision, _ in CANDIDATES[provider]} == set(names) - {"auto", "uint8", "int4_fp16"}


@pytest.mark.usefixtures("brief_timings")
def test_all_that_may_win_are_timed_and_the_fastest_is_the_output(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its size and its error, which is measured for float16 as well; no other file is left."""
    monkeypatch.setattr(candidates, "_DRAFT_MARGIN", 0.0)
    report = auto(exported, verify=True)
    assert [label(one) for one in report.candidates] == LABELS
    (chosen,) = [one for one in report.candidates if one.chosen]
    for one in report.candidates:
        assert one.reason == ""
        assert set(one.latency_ms) == {"1x16", "8x64"}  # the model takes 64 tokens
        assert one.size_bytes is not None
        assert one.error is not None
        assert one.error <= 0.2
    by_label = {label(one): one for one in report.candidates}
    assert by_label["fp32"].error == 0
    assert 0 < (by_label["fp16"].error or 0) < 1e-3
    sizes = [by_label[name].size_bytes or 0 for name in ("fp32", "fp16", "int8 dynamic", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    means = {label(one): float(np.prod(list(one.latency_ms.values()))) for one in report.candidates}
    assert label(chosen) == min(means, key=means.__getitem__)
    assert report.precision == chosen.precision
    # But for the record of this step, which is longer than that of none.
    assert abs(report.after.size_bytes - (chosen.size_bytes or 0)) < 3000
    assert sorted(path.name for path in exported.parent.iterdir()) == [
        "texts.txt",
        "tiny",
        "tiny-optimized.onnx",
        "tiny.onnx",
    ]


def test_what_is_slower_as_a_draft_than_a_finished_file_is_not_made(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are made from the fastest on; one that may be a tenth faster when calibrated is still made."""
    compare_with_float32(monkeypatch, "fp16", "int8 dynamic", "int4")
    pretend(monkeypatch, {"fp32": 10.0, "int8 dynamic": 4.0, "fp16": 4.4, "int4": 4.5})
    by_label = {label(one): one for one in auto(exported).candidates}
    assert by_label["int8 dynamic"].chosen
    assert by_label["fp16"].latency_ms != {}
    assert by_label["int4"].latency_ms == {}
    assert by_label["int4"].reason == (
        "not made, because it cannot win: with every layer in int4, before its calibration, it takes 1.12 times the "
        "time of int8 dynamic"
    )


def test_a_skipped_candidate_is_made_if_the_judge_refuses_all_others(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_with_float32(monkeypatch, "int8 dynamic", "int4")
    pretend(monkeypatch, {"fp32": 10.0, "int8 dynamic": 4.0, "int4": 8.0})
    texts = exported.with_name("texts.txt")
    texts.write_text("a first text\nand another\n", encoding="utf-8")
    options = OptimizeOptions(exported, precision="auto", calibration=texts, max_error=0.2, verify=False)
    judged: list[str] = []

    def judge(path: Path) -> Judgement:
        judged.append(path.parent.name)
        return Judgement({}, "" if path.parent.name == "int4" else "too far from float32")

    report = optimize_model(options, judge=judge)
    assert judged == ["int8 dynamic", "fp32", "int4"]
    assert [label(one) for one in report.candidates if one.chosen] == ["int4"]


@pytest.mark.parametrize("fastest", ["fp16", "int8 dynamic", "int4"])
def test_the_chosen_one_is_what_the_file_holds(exported: Path, monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    """It is verified, stamped, and described by the report as if its precision had been asked for."""
    compare_with_float32(monkeypatch, fastest)
    pretend(monkeypatch, {name: 1.0 if name == fastest else 2.0 for name in LABELS})
    report = auto(exported, verify=True)
    precision, _, activations = fastest.partition(" ")
    assert [label(one) for one in report.candidates if one.chosen] == [fastest]
    assert report.precision == precision
    quantization = report.quantization
    found = ("", "") if quantization is None else (quantization.precision, quantization.activations)
    assert found == ((precision, activations) if precision.startswith("int") else ("", ""))
    operators = {
        "int8 mixed": "ReduceMax",
        "int8 dynamic": "DynamicQuantizeLinear",
        "int8 static": "QuantizeLinear",
        "int4": "com.microsoft::MatMulNBits",
    }
    present = next((name for name, operator in operators.items() if operator in report.after.ops), "fp32 or fp16")
    assert present == (fastest if fastest in operators else "fp32 or fp16")
    dtypes = {"fp16": "float16", "int8": "int8", "int4": "int4"}
    stamped = ModelFile.open(Path(report.output)).metadata
    assert stamped["onnxtool.dtype"] == dtypes.get(precision, "float32")
    assert report.verification is not None
    assert report.verification.passed


def test_a_candidate_that_is_not_possible_is_a_row_with_its_reason(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others stay in the running."""

    def fail(*_: object, **__: object) -> None:
        raise PassError("no such operator", "wait for it")

    monkeypatch.setattr(conversion, "to_int4", fail)
    compare_with_float32(monkeypatch, "int4")
    pretend(monkeypatch, {"fp32": 2.0, "int4": 1.0})
    report = auto(exported)
    by_label = {label(one): one for one in report.candidates}
    assert by_label["int4"].reason == "no such operator"
    assert by_label["int4"].latency_ms == {}
    assert (by_label["int4"].size_bytes, by_label["int4"].error) == (None, None)
    assert sum(one.chosen for one in report.candidates) == 1


def test_a_judge_refuses_the_fastest(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measured and why it refuses stand in the row, and the next in speed is shown to it."""
    compare_with_float32(monkeypatch, "int4")
    pretend(monkeypatch, {"fp32": 2.0, "int4": 1.0})
    judged: list[str] = []

    def judge(path: Path) -> Judgement:
        judged.append(path.parent.name)
        return Judgement({"nDCG@10": 0.5}, "too bad" if path.parent.name == "int4" else "")

    texts = exported.with_name("texts.txt")
    texts.write_text("a first text\nanother one, a little longer\n", encoding="utf-8")
    options = OptimizeOptions(exported, precision="auto", calibration=texts, max_error=0.2, verify=False)
    report = optimize_model(options, judge=judge)
    assert judged == ["int4", "fp32"]
    assert [(one.reason, one.chosen, one.quality) for one in report.candidates] == [
        ("", True, {"nDCG@10": 0.5}),
        ("too bad", False, {"nDCG@10": 0.5}),
    ]
    with pytest.raises(PassError, match="judged for the precision auto, and it is int8"):
        optimize_model(replace(options, precision="int8", force=True), judge=judge)


def test_a_candidate_slower_than_one_that_passed_is_not_judged(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing speaks against it, so that it has no reason; nor is one above the bound judged, however fast."""
    compare_with_float32(monkeypatch, "fp16")
    texts = exported.with_name("texts.txt")
    texts.write_text("a first text\nanother one, a little longer\n", encoding="utf-8")
    options = OptimizeOptions(exported, precision="auto", calibration=texts, max_error=0.2, verify=False, force=True)
    judged: list[str] = []

    def judge(path: Path) -> Judgement:
        judged.append(path.parent.name)
        return Judgement({"nDCG@10": 0.5})

    pretend(monkeypatch, {"fp32": 2.0, "fp16": 1.0})
    first, second = optimize_model(options, judge=judge).candidates
    assert (first.chosen, first.reason, first.not_judged) == (False, "", "slower than fp16, which passed")
    assert (second.chosen, second.reason, second.not_judged) == (True, "", "")
    first, second = optimize_model(replace(options, max_error=1e-12), judge=judge).candidates
    assert (first.chosen, second.reason, second.not_judged) == (True, "its error is above 1e-12", "")
    assert judged == ["fp16", "fp32"]


def test_without_float32_there_is_nothing_to_measure_the_others_against(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast one of them is, nobody could say that it is within the bound."""

    def fail(*_: object, **__: object) -> None:
        raise PassError("the disk is odd", "")

    monkeypatch.setattr(candidates, "save_model", fail)
    with pytest.raises(PassError, match="the model in float32 is not possible: the disk is odd"):
        auto(exported)
    assert sorted(path.name for path in exported.parent.iterdir()) == ["texts.txt", "tiny", "tiny.onnx"]


def test_a_candidate_that_does_not_run_is_a_row_with_its_reason(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the name of its file, which is gone."""

    def fail(session: Any, *_: object, **__: object) -> list[float]:
        path = session.model.path
        if path.parent.name == "int8 static":
            raise SessionError(f"onnxruntime cannot run {path}", "")
        return [1.0]

    monkeypatch.setattr(candidates, "_latencies_ms", fail)
    compare_with_float32(monkeypatch, "int8 static")
    by_label = {label(one): one for one in auto(exported).candidates}
    assert by_label["int8 static"].reason == "onnxruntime cannot run the file"
    assert by_label["int8 static"].size_bytes is not None


def test_where_nothing_runs_the_first_reason_is_given(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to choose from, and no file."""

    def fail(*_: object, **__: object) -> list[float]:
        raise SessionError("out of luck", "")

    monkeypatch.setattr(candidates, "_latencies_ms", fail)
    compare_with_float32(monkeypatch, "fp16")
    with pytest.raises(PassError, match="the model in float32 is not possible: out of luck"):
        auto(exported)
    assert not exported.with_name("tiny-optimized.onnx").exists()


def test_what_is_too_far_off_is_not_chosen(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is: what is quantized cannot hold a bound of nothing, and float16 is measured against it."""
    compare_with_float32(monkeypatch, "fp16", "int8 dynamic")
    pretend(monkeypatch, {"fp32": 9.0, "fp16": 0.1, "int8 dynamic": 0.1})
    report = auto(exported, 1e-12)
    reasons = {label(one): one.reason for one in report.candidates}
    assert reasons.pop("fp32") == ""
    assert reasons.pop("fp16") == "its error is above 1e-12"
    assert all("cannot hold an error of 1e-12" in reason for reason in reasons.values())
    assert report.precision == "fp32"


def test_shapes_fit_the_model(exported: Path, tmp_path: Path) -> None:
    """Its longest text, its fixed axes; a model that reads no text has inputs of its own."""
    assert list(timing_feeds(ModelFile.open(exported), ())) == ["1x16", "8x64"]
    graph = "g (int64[2, 12] input_ids) => (float[2, 12, 8] y) { y = Gather(t, input_ids) }"
    write_inline(build(graph, {"t": normal(30, 8)}), tmp_path / "fixed.onnx")
    fixed = timing_feeds(ModelFile.open(tmp_path / "fixed.onnx"), ())
    assert {name: array["input_ids"].shape for name, array in fixed.items()} == {"2x12": (2, 12)}
    write_inline(build("g (float[B, 3, 8] x) => (float[B, 3, 8] y) { y = Relu(x) }"), tmp_path / "other.onnx")
    other = ModelFile.open(tmp_path / "other.onnx")
    assert list(timing_feeds(other, verification_feeds(other))) == ["1x3x8", "6x3x8"]


def test_a_provider_that_cannot_run_here_is_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to measure."""
    monkeypatch.setattr("onnxtool.runtime.providers.cuda_problem", lambda: "no device")
    with pytest.raises(ProviderError, match="cannot run here: no device"):
        optimize_model(OptimizeOptions(exported, precision="auto", provider="cuda"))
