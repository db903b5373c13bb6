"""A file states no longer texts than it was verified on, and is verified on both sides of every threshold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers

from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint.limits import Limit, graph_limit, text_limit
from onnxtool.errors import ExportError, InputError
from onnxtool.export import lengths
from onnxtool.export.decoding.step import PROMPTS, trace_with_cache
from onnxtool.export.lengths import Lengths, Work, config_thresholds
from onnxtool.export.report import ExportReport
from onnxtool.infer import load
from onnxtool.model_file import ModelFile
from onnxtool.runtime.machine import available_memory_bytes
from onnxtool.sentence_transformers import OnnxModel
from tests.infer.tiny_models import write_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 15, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other process on this machine decide how long texts are."""
    monkeypatch.setattr(lengths, "available_memory_bytes", lambda: None)


def bert(**sizes: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**{**SIZES, **sizes}))


def bigbird() -> Any:
    """Build a model that attends fully up to 11 blocks, and to some of them from there on."""
    return transformers.BigBirdModel(
        transformers.BigBirdConfig(
            **SIZES, max_position_embeddings=1536, block_size=128, num_random_blocks=3, sep_token_id=3
        )
    )


def modernbert() -> Any:
    """Build a model whose second layer sees so many tokens on either side."""
    sizes = {**SIZES, "num_hidden_layers": 2, "cls_token_id": 2, "sep_token_id": 3}
    return transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **sizes, max_position_embeddings=1200, local_attention=600, global_attn_every_n_layers=2
        )
    )


def dynamic_ntk() -> Any:
    """Build a model whose positions change their scale beyond those that it states, which nothing feeds."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return transformers.LlamaModel(
        transformers.LlamaConfig(**HEADS, max_position_embeddings=1100, rope_parameters=rope)
    )


def longrope() -> Any:
    """Build a model whose positions have one scale up to 700 tokens, and another one from there on."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 700,
        "short_factor": [1.0] * 8, "long_factor": [2.0 + step for step in range(8)],
    }  # fmt: skip
    return transformers.Phi3Model(
        transformers.Phi3Config(
            **SIZES, num_key_value_heads=2, max_position_embeddings=1100, original_max_position_embeddings=700,
            rope_parameters=rope,
        )
    )  # fmt: skip


def checkpoint(make: Callable[[], Any], folder: Path) -> Path:
    """Write a checkpoint whose weights are large enough for a wrong attention to show."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    write_checkpoint(folder, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    model.save_pretrained(folder)
    return folder


def exported(make: Callable[[], Any], folder: Path, **options: Any) -> tuple[Path, ExportReport]:
    """Return a checkpoint, and the report of its export."""
    source = checkpoint(make, folder / "checkpoint")
    return source, export_model(ExportOptions(str(source), output=folder / "m.onnx", **options))


def largest_difference(source: Path, report: ExportReport, length: int) -> float:
    """Return how far the file is from a model that was loaded for this text alone."""
    model = transformers.AutoModel.from_pretrained(source).eval()
    ids = np.random.default_rng(length).integers(4, 15, (1, length))
    with torch.no_grad():
        mask = torch.ones((1, length), dtype=torch.int64)
        expected = model(input_ids=torch.from_numpy(ids), attention_mask=mask).last_hidden_state.numpy()
    session = ort.InferenceSession(report.output, providers=["CPUExecutionProvider"])
    (found, *_) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask.numpy()})
    return float(np.abs(found - expected).max())


def verified_lengths(report: ExportReport) -> set[int]:
    """Return the lengths of the single texts on which a file was verified."""
    assert report.verification is not None
    shapes = (case.inputs["input_ids"] for case in report.verification.cases)
    return {length for rows, length in shapes if rows == 1}


def stated(report: ExportReport) -> tuple[str | None, str | None]:
    """Return what the file says of its maximum."""
    return report.metadata.get("onnxtool.max_length"), report.metadata.get("onnxtool.verified_length")


@pytest.mark.parametrize(
    ("make", "exporter", "longest", "sides"),
    [
        (modernbert, "torchscript", 1200, {300, 301, 600, 601}),
        (dynamic_ntk, "torchscript", 1100, set()),
        (longrope, "dynamo", 1100, {700, 701}),
    ],
)
def test_a_model_with_a_threshold_is_verified_on_both_sides_of_it_and_at_its_maximum(
    make: Callable[[], Any], exporter: str, longest: int, sides: set[int], tmp_path: Path
) -> None:
    """Windows, and positions whose scale changes: the graph follows them, and states the checkpoint's maximum."""
    source, report = exported(make, tmp_path, exporter=exporter)
    assert stated(report) == (str(longest), str(longest))
    assert verified_lengths(report) >= {longest, *sides}
    for length in (*sides, longest):
        assert largest_difference(source, report, length) < 1e-4
    assert not any("for texts of up to" in note for note in report.notes)
    assert any("right up to 1100 tokens only" in note for note in report.notes) == (make is dynamic_ntk)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_length_has_no_cache(kind: str) -> None:
    """Keys in a cache keep the scale of their step; the tracer's own message says nothing of that."""
    config = dynamic_ntk().config if kind == "dynamic" else longrope().config
    make = transformers.LlamaForCausalLM if kind == "dynamic" else transformers.Phi3ForCausalLM
    with pytest.raises(ExportError, match=rf"rope_type {kind}") as caught:
        trace_with_cache(make(config).eval(), prompts=PROMPTS[0], opset=None)
    assert "--task text-generation" in caught.value.hint
    assert ("up to 1100 tokens" in caught.value.hint) == (kind == "dynamic")


def test_a_model_that_computes_otherwise_from_some_length_on_is_exported_up_to_there(tmp_path: Path) -> None:
    """Block-sparse attention: the last right length is found, stated, and where texts are cut."""
    threshold, maximum = 1408, 1536
    source, report = exported(bigbird, tmp_path, exporter="torchscript", require_dynamic=True)
    assert stated(report) == (str(threshold), str(threshold))
    assert any(
        f"for texts of up to {threshold} tokens, of the {maximum} that the checkpoint states" in note
        for note in report.notes
    )
    assert largest_difference(source, report, threshold) < 1e-4
    assert largest_difference(source, report, threshold + 1) > 0.1
    model = load(Path(report.output))
    assert model.limit is not None
    assert model.limit.tokens == threshold
    assert len(model.windows(["cat " * maximum])[0][0].ids) == threshold
    tokenizer = transformers.AutoTokenizer.from_pretrained(report.files)
    assert tokenizer.model_max_length == threshold
    with pytest.raises(InputError, match=f"for texts of up to {threshold} tokens .* one has {threshold + 1}"):
        OnnxModel(Path(report.output), None)(
            input_ids=torch.ones((1, threshold + 1), dtype=torch.int64),
            attention_mask=torch.ones((1, threshold + 1), dtype=torch.int64),
        )


def test_a_model_that_refuses_the_length_that_it_states_is_exported_up_to_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is not believed: the longest text that PyTorch takes is found."""
    forward = transformers.BertModel.forward

    def refusing(self: Any, input_ids: Any = None, **arguments: Any) -> Any:
        if input_ids.shape[1] > 301:
            raise IndexError("index out of range in self")
        return forward(self, input_ids=input_ids, **arguments)

    refusing.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(transformers.BertModel, "forward", refusing)
    _, report = exported(lambda: bert(max_position_embeddings=500), tmp_path, exporter="torchscript")
    assert stated(report) == ("301", "301")
    assert any("PyTorch itself does not run on 302" in note for note in report.notes)


def test_a_maximum_beyond_the_budget_is_cut_to_what_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note says why, and the sidecar files state the same; --max_length asks for more all the same."""
    monkeypatch.setattr(lengths, "WORK", 2e9)
    source, report = exported(lambda: bert(max_position_embeddings=5000), tmp_path, exporter="torchscript")
    assert stated(report) == ("3072", "3072")
    assert any("for texts of up to 3072 tokens, of the 5000" in n and "--max_length" in n for n in report.notes)
    again = export_model(
        ExportOptions(str(source), output=tmp_path / "more.onnx", exporter="torchscript", max_length=3500)
    )
    assert stated(again) == ("3500", "3500")
    assert 3500 in verified_lengths(again)


def test_a_file_that_is_not_verified_says_of_no_verified_length(tmp_path: Path) -> None:
    """It states what the checkpoint states."""
    _, report = exported(lambda: bert(max_position_embeddings=5000), tmp_path, exporter="torchscript", verify=False)
    assert stated(report) == ("5000", None)


def test_no_more_than_the_checkpoint_takes_can_be_asked_for(tmp_path: Path) -> None:
    """Its positions end there."""
    with pytest.raises(ExportError, match="--max_length 65 was passed, but BertModel takes 64 tokens"):
        exported(lambda: bert(max_position_embeddings=64), tmp_path, max_length=65)


def test_a_usual_encoder_has_no_further_cases(tmp_path: Path) -> None:
    """Its maximum is among the usual ones, and BERT's configuration names no threshold."""
    _, report = exported(lambda: bert(max_position_embeddings=512), tmp_path, exporter="torchscript")
    assert report.verification is not None
    assert not any("a text of" in case.description for case in report.verification.cases)
    assert stated(report) == ("512", "512")


def test_optimize_verifies_at_the_same_lengths(tmp_path: Path) -> None:
    """They are stamped, and the length that the optimized file states was compared again."""
    from onnxtool import OptimizeOptions, optimize_model

    _, report = exported(lambda: bert(max_position_embeddings=1200), tmp_path, exporter="torchscript")
    optimized = optimize_model(OptimizeOptions(Path(report.output)))
    assert optimized.verification is not None
    assert any(case.inputs["input_ids"] == (1, 1200) for case in optimized.verification.cases)
    assert ModelFile.open(Path(optimized.output)).metadata["onnxtool.verified_length"] == "1200"


@pytest.mark.parametrize("kind", ["sliding window", "no maximum"])
def test_a_decoder_with_a_cache_generates_across_thresholds_and_up_to_its_maximum(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of prompt and answer are those of the maximum; without one, that of the budget."""
    monkeypatch.setattr(lengths, "_UNLIMITED", 1100)

    def make() -> Any:
        if kind == "no maximum":
            return transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=15, hidden_size=32, n_layer=1, n_head=2)
            )
        return transformers.MistralForCausalLM(
            transformers.MistralConfig(**HEADS, max_position_embeddings=1100, sliding_window=1030)
        )

    _, report = exported(make, tmp_path, task="text-generation-with-past")
    assert stated(report) == ("1100", "1100")
    assert report.verification is not None
    names = {case.description for case in report.verification.cases}
    assert names >= {"up to 1100 tokens"} | ({"up to 1035 tokens", "up to 1040 tokens"} if "window" in kind else set())


def test_thresholds_are_the_numbers_of_windows_blocks_and_positions() -> None:
    """Of lists and of parts of a configuration as well; what is no length is not among them."""
    content = {
        "attention_window": [512, 256], "sliding_window": None, "use_sliding_window": True, "vocab_size": 30000,
        "rope_parameters": {"original_max_position_embeddings": 4096, "factor": 32.0}, "hidden_size": 768,
        "block_size": 64, "num_random_blocks": 3, "chunk_size_feed_forward": 0,
    }  # fmt: skip
    assert {*config_thresholds(content)} == {512, 256, 4096, 64, 704}


def test_thresholds_of_a_graph_are_the_numbers_that_it_compares_with() -> None:
    """With a size, with the distance of two positions, with a position in blocks, and with contents as well."""
    graph = ir.from_onnx_text("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[B, S] ids) => (bool a, bool[S, S] b, bool[B, S] c, int64[S] d, float[S] e) <
            int64 one = {1}, int64 zero = {0}, int64 limit = {1408}, int64 window = {-65}, int64 word = {30000},
            int64 block = {48}, float scale = {32.0}, int64[1] last = {1} > {
            shape = Shape (ids)
            size = Gather (shape, one)
            a = LessOrEqual (size, limit)
            positions = Range (zero, size, one)
            column = Unsqueeze (positions, last)
            distance = Sub (positions, column)
            b = Greater (distance, window)
            c = Equal (ids, word)
            d = Div (positions, block)
            floats = Cast <to = 1> (positions)
            e = Div (floats, scale)
        }
    """)
    lengths = Lengths(8000, 4000, Work(parameters=1, layers=1, width=1, heads=1, outputs=1), (512,))
    assert lengths.seen_in(graph).thresholds == (512, 48, 65, 1408, 30000)


def test_the_maximum_comes_before_thresholds_and_low_ones_before_high_ones() -> None:
    """A window of 512 and blocks of 1000 under a budget that the second does not fit."""
    work = Work(parameters=10**9, layers=1, width=1, heads=1, outputs=1)  # 2e9 operations a token
    assert Lengths(8000, 4000, work, (1000, 512)).beyond(1024) == (4000, 1001, 1000, 513, 512)
    assert Lengths(8000, 4000, work, (1000, 512, 3900)).beyond(1024) == (4000, 1001, 1000, 513, 512)
    assert Lengths(8000, 1000, work, ()).beyond(1024) == ()
    assert Lengths(8000, 2000, work, (1000,)).beyond(1024, steps=9) == (2000, 1010, 1005)


def test_a_text_takes_no_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of an attention grow with the square of the length."""
    assert (available_memory_bytes() or 1) > 0
    monkeypatch.setattr(lengths, "available_memory_bytes", lambda: 10**9)
    found = Lengths.of(bert(max_position_embeddings=8192, num_attention_heads=16), 8192, requested=None, verified=True)
    assert found.longest == 1024
    assert "takes about 20 GiB, more than there is" in found.reason


@pytest.mark.parametrize("task", ["fill-mask", "feature-extraction"])
def test_the_length_that_was_verified_is_a_limit(task: str, tmp_path: Path) -> None:
    """Of texts, and of generated inputs, whatever else is stated."""
    _, report = exported(lambda: bert(max_position_embeddings=64), tmp_path, exporter="torchscript", max_length=50)
    model = ModelFile.open(Path(report.output))
    model.metadata["onnxtool.max_length"] = "60"
    limit = Limit(50, "onnxtool.verified_length of the model's metadata")
    folder = load(Path(report.output)).folder
    assert text_limit(model, folder, task) == graph_limit(model, folder) == limit
