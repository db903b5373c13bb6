"""Gates judge the model, not the machine: on samples that are made up, where the truth is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtool.benchmarking.measurement as measurement
from onnxtool.benchmarking import BenchmarkOptions, benchmark
from onnxtool.benchmarking.gates import Gates, check_shape, split_gate
from onnxtool.benchmarking.report import GateOutcome
from onnxtool.benchmarking.rounds import Limits
from onnxtool.benchmarking.samples import TimedShape
from onnxtool.errors import GateError
from onnxtool.progress import listening
from onnxtool.reports import to_json
from onnxtool.summary.gates import parse_gate
from tests.infer.tiny_models import TinyModel, table

TINY = BenchmarkOptions((2,), (5,), runs=60, warmup=1, provider="cpu", threads=1)


def _timed(factor: float, seed: int, *, count: int = 20) -> TimedShape:
    """Make blocks of ten runs of 10 ms that are a few percent apart, as on a quiet machine."""
    generator = np.random.default_rng(seed)
    blocks = [10.0 * factor * generator.lognormal(0, 0.02) * generator.lognormal(0, 0.03, 10) for _ in range(count)]
    mean = float(np.mean(blocks))
    figures: Any = {"latency_ms": {"mean": mean}, "throughput_samples_per_s": 1000 * 4 / mean}
    return TimedShape(figures, tuple(blocks))


def _check(expression: str, timed: TimedShape, base: TimedShape, *, in_turns: bool = False) -> GateOutcome:
    return check_shape(parse_gate(expression), timed, base, in_turns=in_turns)


@pytest.mark.parametrize("figure", ["p50", "p95", "mean", "min", "latency_ms.p90"])
def test_an_unchanged_model_passes_and_a_slower_one_does_not(figure: str) -> None:
    """Twenty times of twenty, 15 % against a gate of 10 %."""
    for seed in range(20):
        base = _timed(1.0, 1000 + seed)
        assert not _check(f"{figure}>+10%", _timed(1.0, seed), base).met
        assert _check(f"{figure}>+10%", _timed(1.15, seed), base).met


def test_throughput_is_gated_downwards() -> None:
    """A model that takes 15 % longer gives 13 % less."""
    base = _timed(1.0, 1)
    slower = _check("throughput_samples_per_s<-10%", _timed(1.15, 2), base)
    assert slower.met
    assert slower.change == pytest.approx(1 / 1.15 - 1, abs=0.02)  # two samples of 200 runs, each known to 1 %
    assert not _check("throughput_samples_per_s<-10%", _timed(1.0, 2), base).met


def test_the_interval_holds_the_true_change() -> None:
    """In nearly all of forty pairs of samples."""
    held = 0
    for seed in range(40):
        outcome = _check("p50>+50%", _timed(1.07, seed), _timed(1.0, 1000 + seed))
        assert outcome.change_interval is not None
        low, high = outcome.change_interval
        held += low <= 0.07 <= high
    assert held >= 35  # 38 of 40 at 95 %


def test_what_the_interval_does_not_exclude_is_not_decided() -> None:
    """The best estimate is given all the same, and said to be one."""
    outcome = _check("p50>+10%", _timed(1.10, 0, count=8), _timed(1.0, 1, count=8))
    assert not outcome.decided
    assert "the interval does not exclude the threshold, so the best estimate decides" in str(outcome)
    assert _check("p50>+10%", _timed(1.3, 0), _timed(1.0, 1)).decided


def test_another_session_is_compared_as_measured_and_that_is_said() -> None:
    """Nothing is scaled, and a baseline in turns has no such note."""
    base, timed = _timed(1.0, 1), _timed(1.2, 2)
    outcome = _check("p50>+10%", timed, base)
    medians = [float(np.median(np.concatenate(one.blocks))) for one in (timed, base)]
    assert (outcome.value, outcome.base_value) == tuple(medians)
    assert "the baseline is of another session, and is compared as measured" in str(outcome)
    assert _check("p50>+10%", timed, base, in_turns=True).note == ""


def test_what_moves_both_in_turns_moves_no_change() -> None:
    """Blocks of a round are drawn together."""
    base = _timed(1.0, 1)
    slowed = tuple(factor * block for factor, block in zip(np.linspace(1, 3, 20), base.blocks, strict=True))
    ours = TimedShape(base.figures, tuple(1.15 * block for block in slowed))
    outcome = _check("p50>+10%", ours, TimedShape(base.figures, slowed), in_turns=True)
    assert outcome.change_interval == pytest.approx((0.15, 0.15))


def test_a_gate_names_a_shape_or_all_of_them() -> None:
    """A shape that is not timed is an error, as the gate would never be met."""
    assert split_gate(parse_gate("8x128.p95>+10%"), ["8x128"])[0] == "8x128"
    assert split_gate(parse_gate("8x128.p95>+10%"), ["8x128"])[1].figure == "p95"
    assert split_gate(parse_gate("latency_ms.p95>20"), ["8x128"])[0] == ""
    with pytest.raises(GateError, match=r"no shape 8x64 was timed .* there are 8x128"):
        split_gate(parse_gate("8x64.p95>+10%"), ["8x128"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TinyModel(table(15, 4), "logits").write(tmp_path / "model.onnx")


@pytest.fixture
def baseline(path: Path, tmp_path: Path) -> Path:
    """A baseline of the tiny model."""
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps(to_json(benchmark(path, TINY))), encoding="utf-8")
    return file


def _edit(baseline: Path, **changes: Any) -> None:
    """Change values of the baseline; a name with a double underscore leads into an object."""
    document = json.loads(baseline.read_text(encoding="utf-8"))
    for name, value in changes.items():
        place = document
        *folders, last = name.split("__")
        for folder in folders:
            place = place[int(folder)] if isinstance(place, list) else place[folder]
        place[last] = value
    baseline.write_text(json.dumps(document), encoding="utf-8")


def test_gates_of_every_kind_have_their_outcome(path: Path, baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shape by its samples, absolute as printed, and on the whole run."""
    monkeypatch.setattr(measurement, "_MAX_UNDECIDED_S", 0.0)
    gates = ("p50>+1000%", "2x5.p50>0", "throughput_tokens_per_s<1", "load_ms>+100000%", "runs<60", "max>1e6")
    with pytest.raises(GateError, match="threshold"):
        benchmark(path, replace(TINY, baseline=baseline, fail_if=gates))
    report = benchmark(path, replace(TINY, baseline=baseline, fail_if=gates[:-1]))
    assert [(gate.expression, gate.shape, gate.met) for gate in report.gates] == [
        ("p50>+1000%", "2x5", False),
        ("2x5.p50>0", "2x5", True),
        ("throughput_tokens_per_s<1", "2x5", False),
        ("runs<60", "2x5", False),
        ("load_ms>+100000%", "", False),
    ]
    assert report.baseline == str(baseline)
    assert report.gates[0].change_interval is not None
    assert str(report.gates[1]).startswith("p50 is ")


def test_the_model_of_the_baseline_is_timed_again_where_it_is_still_there(path: Path, baseline: Path) -> None:
    """In turns, so that the machine of another day is not in the comparison."""
    options = replace(TINY, baseline=baseline, fail_if=("p50>+1000%",))
    comparison = benchmark(path, options).comparison
    assert comparison is not None
    assert (comparison.kind, comparison.other) == ("baseline", str(path))
    assert "the model of the baseline is still there" in comparison.notes[0]


@pytest.mark.parametrize("what", ["model", "versions", "gate on memory", "absolute gate"])
def test_the_figures_of_the_baseline_count_where_its_model_is_another(path: Path, baseline: Path, what: str) -> None:
    """A new file under its name, other packages, or a gate for which two models at once would be wrong."""
    gate = {"gate on memory": "peak_rss_bytes>+900%", "absolute gate": "p50>100000"}.get(what, "p50>+100000%")
    if what == "model":
        TinyModel(table(15, 4, seed=1), "logits").write(path)
    if what == "versions":
        _edit(baseline, environment__versions__numpy="1.0")
    report = benchmark(path, replace(TINY, baseline=baseline, fail_if=(gate,)))
    assert report.comparison is None
    assert [outcome.met for outcome in report.gates] == [False]


def test_a_baseline_cannot_name_a_file_that_it_does_not_know(path: Path, baseline: Path, tmp_path: Path) -> None:
    """It is untrusted: whatever it names is loaded only where its content is what was measured."""
    TinyModel(table(15, 4, seed=1), "logits").write(tmp_path / "other.onnx")
    for name in ("other.onnx", "missing.onnx", ".", "/dev/null", 3):
        _edit(baseline, model=name if name == 3 else str(tmp_path / str(name)))
        report = benchmark(path, replace(TINY, baseline=baseline, fail_if=("p50>+100000%",)))
        assert report.comparison is None


def test_an_undecided_gate_is_measured_longer(path: Path, baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is decided, here in the third attempt; the report has all of the runs."""
    monkeypatch.setattr(measurement, "_MORE_RUNS", Limits(10, 60.0))
    undecided = GateOutcome("p50>+1%", "2x5", "p50", met=False, value=1, threshold=1, decided=False)
    outcomes = iter([[undecided], [undecided], [replace(undecided, decided=True)]])
    monkeypatch.setattr(Gates, "outcomes", lambda *_: next(outcomes))
    stages: list[str] = []
    options = replace(TINY, baseline=baseline, fail_if=("p50>+1%",), runs=5)
    with listening(stages.append):
        report = benchmark(path, options)
    assert report.results[0].runs == 25
    assert stages.count("timing 2 x 5 longer, as p50>+1% is not decided") == 2
    assert report.gates[0].decided


def test_patience_ends(path: Path, baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is never decided takes no more than its time."""
    monkeypatch.setattr(measurement, "_MAX_UNDECIDED_S", 0.0)
    undecided = GateOutcome("p50>+1%", "2x5", "p50", met=False, value=1, threshold=1, decided=False)
    monkeypatch.setattr(Gates, "outcomes", lambda *_: [undecided])
    options = replace(TINY, baseline=baseline, fail_if=("p50>+1%",), runs=5)
    assert benchmark(path, options).results[0].runs == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provider": "cuda"}, "another provider: 'cuda', and this is 'cpu'"),
        ({"threads": 7}, "another number of threads"),
        ({"environment__cpu": "another"}, "another machine: 'another'"),
        ({"environment__io_binding": True}, "another use of IOBinding"),
        ({"inputs": "texts"}, "another kind of inputs"),
        ({"identity__inputs": {"pixels": "float32 [?, 3]"}}, "another model, by its inputs"),
        ({"identity__outputs": {"logits": "float32 [?, 9]"}}, "another model, by its outputs"),
        ({"results__0__batch_size": 4}, "has no shape 2x5; it has 4x5"),
        ({"results__0__latencies_ms": [1.0]}, "its raw latencies are not whole"),
        ({"results__0__latencies_ms": ["x"]}, r"latencies_ms\[0\] is 'x'"),
        ({"results__0__latencies_ms": [True]}, r"latencies_ms\[0\] is 'True'"),
        ({"results": {}}, "results is no list"),
        ({"environment": []}, "environment is no object"),
        ({"identity": 3}, "does not say what it was measured on"),
    ],
)
def test_a_baseline_that_does_not_compare_is_refused(
    path: Path, baseline: Path, changes: dict[str, Any], message: str
) -> None:
    """Before anything is timed, with what differs."""
    _edit(baseline, **changes)
    with pytest.raises(GateError, match=message):
        benchmark(path, replace(TINY, baseline=baseline, fail_if=("p50>+10%",)))


def test_other_sizes_of_a_model_are_another_model(tmp_path: Path) -> None:
    """By what the export stamped; a file without a stamp is believed."""
    small = TinyModel(table(15, 4), "logits", metadata={"num_layers": "6"}).write(tmp_path / "small.onnx")
    large = TinyModel(table(15, 4), "logits", metadata={"num_layers": "12"}).write(tmp_path / "large.onnx")
    plain = TinyModel(table(15, 4), "logits").write(tmp_path / "plain.onnx")
    file = tmp_path / "base.json"
    file.write_text(json.dumps(to_json(benchmark(small, TINY))), encoding="utf-8")
    options = replace(TINY, baseline=file)
    with pytest.raises(GateError, match="another model, by its num_layers: '6', and this is '12'"):
        benchmark(large, options)
    assert benchmark(plain, options).baseline == str(file)


def test_medians_are_compared_without_a_gate_as_well(path: Path, baseline: Path) -> None:
    """As both were measured, by the baseline's own raw latencies."""
    _edit(baseline, results__0__latencies_ms=[5.0] * 60)
    (note,) = benchmark(path, replace(TINY, baseline=baseline)).notes
    assert note.startswith("2x5: p50 is 0.")
    assert "and was 5.00 ms in the baseline (-9" in note


def test_other_versions_are_named(path: Path, baseline: Path) -> None:
    """A gate is there to judge them."""
    _edit(baseline, environment__versions={"numpy": "1.0"})
    notes = benchmark(path, replace(TINY, baseline=baseline)).notes
    assert any(note.startswith("numpy is ") and note.endswith("was 1.0 in the baseline") for note in notes)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (("p50>+10%",), "is relative, and there is no base"),
        (("p51>10",), "a benchmark has no figure 'p51'"),
        (("latency_ms.p96>1",), "a benchmark has no figure 'latency_ms.p96'"),
        (("environment.cpu>1",), "a benchmark has no figure 'environment.cpu'"),
        (("2x5.stages_ms.total.p50>1",), "is not measured"),
        (("comparison.load_ms>1",), "is not measured"),
        (("p50",), "no comparison after"),
        (("9x9.p50>1",), "no shape 9x9 was timed"),
    ],
)
def test_a_gate_that_cannot_be_used_is_refused_before_timing(
    path: Path, gates: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a minute of it."""
    monkeypatch.setattr("onnxtool.benchmarking.measurement.open_session", None)
    with pytest.raises(GateError, match=message):
        benchmark(path, replace(TINY, fail_if=gates))


def test_a_baseline_that_is_no_report_is_refused(path: Path, tmp_path: Path) -> None:
    """Missing, not JSON, or of something else."""
    file = tmp_path / "b.json"
    with pytest.raises(GateError, match="cannot read the baseline"):
        benchmark(path, replace(TINY, baseline=file))
    for content, message in (("{", "is not JSON"), ("[]", "is not a benchmark report"), ("[" * 100_000, "is not JSON")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(GateError, match=message):
            benchmark(path, replace(TINY, baseline=file))
