"""The comparison with sentence-transformers tells what is equal, what is refused, and what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import onnxtool
from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint import pooling_modules
from onnxtool.checkpoint.module_forms import POOLING_MASK
from onnxtool.errors import TargetError
from tests.retrieval.checkpoints import CASES, Case
from tests.retrieval.comparison import check


def case(name: str) -> Case:
    """Return the case called `name`."""
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("truncate_dim", "equal"),
        ("Pooling without the prompt and Dense of scores", "equal"),
        ("weights of a causal language model", "equal"),
        ("chat template of Qwen3-Reranker, prompts, long texts", "equal"),
        ("decoder without modules, template without pairs", "refused"),
        ("inference-free SPLADE", "equal"),
        ("Router of two encoders", "equal"),
        ("Router of a table and an encoder", "equal"),
        ("WeightedLayerPooling of all layers", "equal"),
        ("query expansion, fixed, attend False", "equal"),
        ("Stanford", "equal"),
        ("HierarchicalTokenPooling", "refused"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of other libraries; what is compared is files that one of them writes
def test_checkpoints_are_equal_to_sentence_transformers_or_refused(tmp_path: Path, name: str, outcome: str) -> None:
    """A few of all; `make retrieval` tries each."""
    assert check(case(name), tmp_path)[0] == outcome


@pytest.mark.filterwarnings("ignore")
def test_a_setting_that_is_ignored_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here, the vectors are not cut."""
    monkeypatch.setattr(
        pooling_modules, "_ENCODER_MODULES", dict.fromkeys(pooling_modules._ENCODER_MODULES, ("", None))
    )
    assert check(case("truncate_dim"), tmp_path)[0] == "WRONG"


@pytest.mark.filterwarnings("ignore")
def test_a_consumer_that_reads_texts_as_they_are_takes_no_chats(tmp_path: Path) -> None:
    """It would make other vectors of them, without a word."""
    folder = tmp_path / "checkpoint"
    (tmp_path / "base").mkdir()
    case("decoder with chat template").make(folder, tmp_path / "base")
    with pytest.raises(TargetError, match=r"puts texts into a chat template, and .* would run it on them as they are"):
        export_model(ExportOptions(str(folder), output=tmp_path / "out", target="tei"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def without_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose Pooling leaves prompts out, for the tests below."""
    root = tmp_path_factory.mktemp("pooled")
    (root / "base").mkdir()
    case("prompt left out, mean").make(root / "checkpoint", root / "base")
    return root / "checkpoint"


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_leaves_prompts_out_is_fed_and_optimized(without_prompts: Path, tmp_path: Path) -> None:
    """Its further input is named in its signature, and calibration, benchmarks and int8 follow it."""
    texts = ["a cat", "the weather is lovely today", "naïve café, Paris is the capital of France"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    report = export_model(ExportOptions(str(without_prompts), output=tmp_path / "m.onnx"))
    assert [info.name for info in report.inputs] == ["input_ids", "token_type_ids", "attention_mask", POOLING_MASK]
    quantized = onnxtool.optimize_model(
        onnxtool.OptimizeOptions(tmp_path / "m.onnx", precision="int8", calibration=tmp_path / "texts.txt")
    )
    expected = np.asarray(SentenceTransformer(str(without_prompts), device="cpu").encode(texts, prompt_name="query"))
    for path, least in ((tmp_path / "m.onnx", 1 - 1e-6), (Path(quantized.output), 0.98)):
        found = np.asarray(onnxtool.encode(path, texts, prompt="query"))
        assert (found * expected).sum(axis=1).min() > least
    pooled_whole = np.asarray(onnxtool.encode(tmp_path / "m.onnx", [f"query: {text}" for text in texts], prompt=""))
    assert (pooled_whole * expected).sum(axis=1).min() < 0.995


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["tei", "fastembed", "vespa"])
def test_a_consumer_that_tells_of_no_prompt_takes_no_such_checkpoint(
    without_prompts: Path, tmp_path: Path, target: str
) -> None:
    """It would pool over the prompt, without a word."""
    with pytest.raises(TargetError, match=f"leaves the prompt out when it pools, and .* feeds no {POOLING_MASK}"):
        export_model(ExportOptions(str(without_prompts), output=tmp_path / "out", target=target))
