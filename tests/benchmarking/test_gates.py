"""Gates on figures and on the ratio of two models fail a benchmark, and are refused before timing if unusable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onnxtool import BenchmarkOptions, benchmark
from onnxtool.benchmarking.report import split_gate
from onnxtool.benchmarking.rounds import InterleavedRuns
from onnxtool.errors import GateError
from onnxtool.summary.gates import parse_gate
from tests.infer.tiny_models import TinyModel, table

TINY = BenchmarkOptions((2,), (5,), runs=30, warmup=1, provider="cpu", threads=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TinyModel(table(15, 4), "logits").write(tmp_path / "model.onnx")


def test_a_gate_names_a_shape_or_all_of_them() -> None:
    """A shape that is not timed is an error, as the gate would never be met."""
    assert split_gate(parse_gate("8x128.p95>20"), ["8x128"])[0] == "8x128"
    assert split_gate(parse_gate("8x128.p95>20"), ["8x128"])[1].figure == "p95"
    assert split_gate(parse_gate("latency_ms.p95>20"), ["8x128"])[0] == ""
    with pytest.raises(GateError, match=r"no shape 8x64 was timed .* there are 8x128"):
        split_gate(parse_gate("8x64.p95>20"), ["8x128"])


def test_gates_of_every_kind_have_their_outcome(path: Path) -> None:
    """On every shape, on one of them, and on the whole run."""
    gates = ("2x5.p50>0", "throughput_tokens_per_s<1", "latency_ms.p95>0", "count(warnings)<1", "load_ms>1000000")
    report = benchmark(path, replace(TINY, sequence_lengths=(5, 6), fail_if=gates))
    assert [(gate.expression, gate.shape, gate.met) for gate in report.gates] == [
        ("2x5.p50>0", "2x5", True),
        *((expression, "2x5", met) for expression, met in zip(gates[1:4], (False, True, False), strict=True)),
        *((expression, "2x6", met) for expression, met in zip(gates[1:4], (False, True, False), strict=True)),
        ("load_ms>1000000", "", False),
    ]
    p50 = report.results[0].latency_ms.p50
    assert (report.gates[0].value, report.gates[0].interval, report.gates[0].decided) == (p50, None, True)
    assert str(report.gates[0]) == f"p50 is {p50:.6g} at 2x5, fails if 2x5.p50>0"


@pytest.mark.parametrize(
    ("theirs_ms", "expected"),
    [
        ((40,), {"ratio<1.3": (False, True), "ratio<1.35": (True, True), "2x5.ratio>1.3": (True, True)}),
        ((30, 40), {"ratio<1.01": (False, False), "ratio<1.3": (True, False), "ratio<1.4": (True, True)}),
    ],
    ids=["steady", "noisy"],
)
def test_the_ratio_of_two_models_is_gated(
    path: Path,
    theirs_ms: tuple[int, ...],
    expected: dict[str, tuple[bool, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the best estimate; the outcome says so if the interval includes the threshold."""
    blocks = iter(theirs_ms * 20)

    def runs(_turns: InterleavedRuns, which: int, _stop: object) -> list[int]:
        return [(30 if which == 0 else next(blocks)) * 1_000_000] * 5

    monkeypatch.setattr(InterleavedRuns, "_runs", runs)
    report = benchmark(path, replace(TINY, compare=str(path), fail_if=tuple(expected)))
    assert {gate.expression: (gate.met, gate.decided) for gate in report.gates} == expected
    assert report.comparison is not None
    for gate in report.gates:
        assert gate.interval == report.comparison.results[0].ratio_interval
        assert ("includes the threshold, so the best estimate decides" in str(gate)) is not gate.decided
        assert " at 2x5 (95 %: 1" in str(gate)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (("p50>+10%",), "is relative, and a benchmark has no base"),
        (("p51>10",), "a benchmark has no figure 'p51'"),
        (("latency_ms.p96>1",), "a benchmark has no figure 'latency_ms.p96'"),
        (("latencies_ms.0>1",), "a benchmark has no figure 'latencies_ms.0'"),
        (("environment.cpu>1",), "a benchmark has no figure 'environment.cpu'"),
        (("p50_interval_ms.low>1",), "a benchmark has no figure 'p50_interval_ms.low'"),
        (("2x5.stages_ms.total.p50>1",), "is not measured"),
        (("comparison.load_ms>1",), "is not measured"),
        (("2x5.ratio<1",), "ratio is not measured"),
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
