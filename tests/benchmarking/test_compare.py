"""Two models are timed in turns on the same inputs, and nobody compares times of different answers unaware."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool import BenchmarkOptions, benchmark
from onnxtool.benchmarking.rounds import InterleavedRuns, RoundLimits
from onnxtool.errors import CheckpointError, GateError, InputError, OnnxtoolError, ProviderError
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.running import Session
from tests.infer.tiny_models import TinyModel, table

SMALL = BenchmarkOptions((2,), (5,), runs=30, warmup=1, provider="cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TinyModel(table(15, 4), "logits").write(tmp_path / "model.onnx")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same model with a small error, and an input less."""
    values = table(15, 4)
    values[3, 2] += 0.25
    return TinyModel(values, "logits", inputs=("input_ids",)).write(tmp_path / "other.onnx")


def test_both_run_the_same_inputs_in_turns(path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of each a round, and the other way round in every second round."""
    seen: list[tuple[str, int]] = []
    run = Session.run_unchecked

    def watched(session: Session, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        seen.append((session.model.path.stem, int(feeds["input_ids"].sum())))
        return run(session, feeds)

    monkeypatch.setattr(Session, "run_unchecked", watched)
    report = benchmark(path, replace(SMALL, runs=15, warmup=0, compare=str(other)))
    timed = [name for name, _ in seen[3:]]  # the first run and the outputs are apart
    a, b = ["model"] * 6, ["other"] * 6  # five runs, and one before them that does not count
    assert timed == [*a, *b, *b, *a, *a, *b]
    assert len({ids for _, ids in seen}) == 1
    assert report.comparison is not None
    (shape,) = report.comparison.results
    assert (shape.pairs, report.results[0].runs) == (3, 15)
    assert "3 pairs are few" in report.comparison.notes[-1]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run of the model take 30 ms, and every run of the other 40 ms, whatever the clock says."""

    def runs(_turns: InterleavedRuns, which: int, _stop: object) -> list[int]:
        return [(30_000_000, 40_000_000)[which]] * 5

    monkeypatch.setattr(InterleavedRuns, "_runs", runs)


def test_blocks_of_a_round_have_the_same_inputs() -> None:
    """Also where time ends a block, and the other is much slower; else ratios would compare lengths of texts."""
    seen: list[list[int]] = [[], []]

    def call(which: int, batch: int) -> Callable[[], None]:
        def run() -> None:
            seen[which].append(batch)
            time.sleep(0.01 * which)

        return run

    turns = InterleavedRuns([[call(which, batch) for batch in range(7)] for which in range(2)])
    turns.take(RoundLimits(float("inf"), 0.3))
    ours, theirs = turns.blocks
    assert list(map(len, ours)) == list(map(len, theirs))
    assert seen[0] == seen[1]


def test_a_block_goes_on_where_the_last_one_ended() -> None:
    """So that every text is run as often, in blocks of five."""
    seen: list[int] = []
    InterleavedRuns([[partial(seen.append, batch) for batch in range(7)]]).take(RoundLimits(14, 60.0))
    assert seen == [*range(7), *range(7)]


@pytest.mark.usefixtures("made_up")
def test_the_ratio_is_above_one_where_the_model_is_faster(path: Path, other: Path) -> None:
    """It is the other's latency over the model's."""
    comparison = benchmark(path, replace(SMALL, compare=str(other))).comparison
    assert comparison is not None
    (shape,) = comparison.results
    assert shape.pairs == 6
    assert shape.ratio == pytest.approx(4 / 3)
    assert shape.ratio_interval == pytest.approx((4 / 3, 4 / 3))
    assert shape.latency_ms.p50 == 40.0


def test_the_outputs_of_both_are_compared(path: Path, other: Path) -> None:
    """The error of the one row that differs, where the inputs have it; the model itself has none."""
    ids = BenchmarkOptions((8,), (16,), runs=6, provider="cpu")
    comparison = benchmark(path, replace(ids, compare=str(other))).comparison
    assert comparison is not None
    assert (comparison.kind, comparison.outputs) == ("onnx", ("logits",))
    assert comparison.results[0].max_abs_error == pytest.approx(0.25, abs=1e-6)  # float32 near 1
    same = benchmark(path, replace(ids, compare=str(path))).comparison
    assert same is not None
    assert same.results[0].max_abs_error == 0.0
    assert same.results[0].cosine_min == pytest.approx(1.0)


def test_outputs_that_do_not_match_are_said(path: Path, tmp_path: Path) -> None:
    """A pooled vector is no answer to compare with one for each token."""
    pooled = TinyModel(table(15, 4), "sentence_embedding", pooled=True).write(tmp_path / "pooled.onnx")
    comparison = benchmark(path, replace(SMALL, compare=str(pooled))).comparison
    assert comparison is not None
    assert comparison.outputs == ()
    assert comparison.results[0].max_abs_error is None
    assert any("whether their outputs agree is not known" in note for note in comparison.notes)


def test_memory_of_two_models_is_not_that_of_one(path: Path, other: Path) -> None:
    """What loading took is known, and no gate on memory is judged by both."""
    report = benchmark(path, replace(SMALL, runs=2, compare=str(other)))
    assert report.peak_rss_bytes == report.peak_rss_load_bytes
    assert report.results[0].peak_rss_bytes is None
    with pytest.raises(GateError, match="two models are in memory"):
        benchmark(path, replace(SMALL, compare=str(other), fail_if=("peak_rss_bytes>1GB",)))


def test_a_model_with_other_inputs_is_refused(path: Path, other: Path) -> None:
    """What it takes beyond the model's inputs is named; fewer inputs are no obstacle."""
    with pytest.raises(InputError, match="takes attention_mask, token_type_ids, which"):
        benchmark(other, replace(SMALL, compare=str(path)))


def test_a_provider_that_runs_already_or_cannot_run_is_refused(path: Path) -> None:
    """No figure of a provider against itself."""
    with pytest.raises(InputError, match="the model runs on cpu already"):
        benchmark(path, replace(SMALL, compare="cpu"))
    if cuda_problem():
        with pytest.raises(ProviderError, match="cuda cannot run here"):
            benchmark(path, replace(SMALL, compare="cuda"))


def _checkpoint(folder: Path, architecture: str = "BertForMaskedLM") -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=15, **sizes, architectures=[architecture])
    getattr(transformers, "BertForMaskedLM")(config).save_pretrained(folder)  # noqa: B009 - transformers is lazy
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    document["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_pytorch_runs_the_checkpoint_on_the_same_inputs(path: Path, tmp_path: Path) -> None:
    """The outputs of its class are compared under their names, and its answers are those of transformers."""
    import torch
    import transformers

    from onnxtool.benchmarking.comparison import load_eager

    folder = _checkpoint(tmp_path / "checkpoint")
    eager = load_eager(str(folder), provider="cpu", threads=1)
    feeds = {"input_ids": np.array([[2, 7, 3]]), "attention_mask": np.array([[1, 1, 0]])}
    model = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = model(**{name: torch.from_numpy(array) for name, array in feeds.items()}).logits.numpy()
    np.testing.assert_array_equal(eager.outputs(feeds)["logits"], wanted)
    vocabulary_wide = TinyModel(table(15, 15), "logits").write(tmp_path / "wide.onnx")
    comparison = benchmark(vocabulary_wide, replace(SMALL, runs=6, compare=str(folder))).comparison
    assert comparison is not None
    assert (comparison.kind, comparison.provider, comparison.outputs) == ("pytorch", "cpu", ("logits",))
    assert comparison.notes[0] == "PyTorch runs BertForMaskedLM eagerly, in float32"
    assert comparison.results[0].max_abs_error is not None
    assert comparison.results[0].max_abs_error > 1  # the table has a row of a thousand


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such-checkpoint", "cannot load no/such-checkpoint in PyTorch"), ("missing.onnx", "no such model file")],
)
def test_what_cannot_be_compared_with_is_said(
    path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what --compare takes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OnnxtoolError, match=message):
        benchmark(path, replace(SMALL, compare=name))


def test_an_architecture_that_transformers_does_not_have_is_refused(path: Path, tmp_path: Path) -> None:
    """No code of a checkpoint runs, and no function of transformers is taken for a model."""
    for architecture in ("MyOwnModel", "pipeline", "BertConfig"):
        folder = _checkpoint(tmp_path / architecture, architecture)
        with pytest.raises(InputError, match=f"names the architecture '{architecture}'"):
            benchmark(path, replace(SMALL, compare=str(folder)))


def test_broken_weights_are_one_error(path: Path, tmp_path: Path) -> None:
    """Safetensors raises an error of its own, which is no ValueError."""
    folder = _checkpoint(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(OnnxtoolError, match="cannot load .*broken in PyTorch"):
        benchmark(path, replace(SMALL, compare=str(folder)))


def test_torch_is_loaded_for_a_checkpoint_alone(path: Path, other: Path) -> None:
    """Two ONNX files are compared without it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom onnxtool import BenchmarkOptions\n"
        "from onnxtool import benchmark\n"
        f"benchmark(Path({str(path)!r}), BenchmarkOptions((1,), (4,), runs=2, compare={str(other)!r}))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_checkpoint_that_needs_a_package_of_kernels_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration may name an attention that is fetched from the hub."""
    import transformers

    from onnxtool.benchmarking.comparison import load_eager

    def fail(*_arguments: object, **_options: object) -> None:
        raise ImportError("kernels is not installed")

    folder = _checkpoint(tmp_path / "checkpoint")
    monkeypatch.setattr(transformers.BertForMaskedLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match="cannot load .* in PyTorch: kernels is not installed"):
        load_eager(str(folder), provider="cpu", threads=1)
