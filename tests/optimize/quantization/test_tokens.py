"""A decoder in int4 or int8 generates the text of its float32 file, token by token, or is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import OptionError, PassError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize.pipeline import Context
from onnxtool.optimize.quantization.calibration import make_calibration
from onnxtool.optimize.quantization.int4 import quantize_int4
from onnxtool.optimize.quantization.tokens import promise_tokens
from onnxtool.optimize.report import Quantization
from tests.graphs import of_text
from tests.optimize.passes.builders import Arrays, normal
from tests.optimize.quantization import decoders
from tests.workshop import Workshop

NUM_STEPS = 32


@pytest.fixture(scope="module")
def planted(workshop: Workshop) -> Path:
    """An export with a cache and massive activations; its checkpoint and the texts that it knows are beside it."""

    def make(folder: Path) -> None:
        folder.mkdir()
        decoders.plant(decoders.checkpoint(workshop), folder / "checkpoint")
        decoders.export(folder / "checkpoint", folder / "m.onnx", with_cache=True)
        (folder / "texts.txt").write_text("\n".join(decoders.sentences()), encoding="utf-8")

    return workshop.made("planted-decoder", make) / "m.onnx"


@pytest.fixture(scope="module")
def plain(workshop: Workshop) -> Path:
    """An export without a cache and without massive activations."""

    def make(folder: Path) -> None:
        folder.mkdir()
        decoders.export(decoders.checkpoint(workshop), folder / "m.onnx", with_cache=False)
        (folder / "texts.txt").write_text("\n".join(decoders.sentences()), encoding="utf-8")

    return workshop.made("plain-decoder", make) / "m.onnx"


def quantized(path: Path, output: Path, precision: str = "int4", **options: Any) -> Quantization:
    """Optimize with a bound so loose that tokens decide."""
    texts = path.with_name("texts.txt")
    settings = {"max_error": 0.5, "timing": False, "calibration": texts, "output": output, "force": True, **options}
    found = optimize_model(OptimizeOptions(path, precision=precision, **settings)).quantization
    assert found is not None
    return found


def test_massive_activations_change_tokens_at_level_4_and_not_in_the_written_file(
    planted: Path, tmp_path: Path
) -> None:
    """By PyTorch's `generate` on the checkpoint, and onnxruntime alone on the files, through their cache."""
    found = quantized(planted, tmp_path / "o.onnx").tokens
    assert found is not None
    assert (found.num_prompts, found.num_steps, found.first_difference) == (12, NUM_STEPS, None)
    assert found.num_equal == found.num_counted > 0.98 * 12 * NUM_STEPS
    texts = make_calibration(planted, planted.with_name("texts.txt")).held_out
    prompts = [list(text[:16]) for text in texts][:12]
    wanted = decoders.generate(planted.with_name("checkpoint"), prompts, NUM_STEPS)
    assert (decoders.decode(tmp_path / "o.onnx", prompts, NUM_STEPS) == wanted).all()
    write_inline(quantize_int4().apply(load_model(planted), Context()).model, tmp_path / "level_4.onnx")
    assert (decoders.decode(tmp_path / "level_4.onnx", prompts, NUM_STEPS) != wanted).any(axis=1).sum() > 2


def test_layers_behind_them_keep_4_bits_with_float32_activations(planted: Path, tmp_path: Path) -> None:
    """If that is enough; they are those of the file."""
    found = quantized(planted, tmp_path / "o.onnx", equal_tokens=0.95)
    assert found.tokens is not None
    assert 0.95 <= found.tokens.share < 1
    nodes = [node for node in onnx.load(tmp_path / "o.onnx").graph.node if node.op_type == "MatMulNBits"]
    levels = {node.input[1]: [one.i for one in node.attribute if one.name == "accuracy_level"] for node in nodes}
    exact = {name.removesuffix("_int4_blocks") for name, level in levels.items() if level == [0]}
    assert exact == {layer.name for layer in found.finer}
    assert any("mlp" in name for name in exact)


def test_a_file_that_does_not_keep_its_tokens_is_refused(tmp_path: Path) -> None:
    """With the number of those that it keeps; fewer may be asked for, and without a tokenizer, ids are random."""
    graph = "g (int64[batch_size, sequence] input_ids) => (float[batch_size, sequence, 300] logits)"
    body = "e = Gather(t, input_ids) logits = MatMul(e, w)"
    write_inline(
        load_of(f"{graph} {{ {body} }}", {"t": normal(300, 32), "w": normal(32, 300, seed=1)}), tmp_path / "m.onnx"
    )
    options = OptimizeOptions(
        tmp_path / "m.onnx", output=tmp_path / "o.onnx", precision="int4", max_error=0.5, timing=False
    )
    with pytest.raises(PassError, match=r"greedy tokens in int4: \d+ of 384 equal .* prompt \d+, step \d+") as caught:
        optimize_model(options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    share = float(caught.value.hint.split()[2])
    found = optimize_model(dataclasses.replace(options, equal_tokens=share)).quantization
    assert found is not None
    assert found.tokens is not None
    assert share <= found.tokens.share < 1


def test_the_share_of_tokens_is_in_the_report_and_in_the_file(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.onnx"
    found = quantized(plain, output, equal_tokens=0.9).tokens
    assert found is not None
    assert 0.9 <= found.share < 1
    (step,) = [step for step in ModelFile.open(output).steps if step["step"] == "optimize"]
    figures = {"num_prompts": 12, "num_steps": NUM_STEPS, "num_equal": found.num_equal, "num_undecided": 0}
    assert step["tokens"] == figures
    assert str(found) == f"{found.num_equal} of 384 equal to float32's (12 prompts of 32 steps)"
    free = quantized(plain, output, equal_tokens=0)
    assert free.tokens is None
    assert "greedy tokens are not compared" in free.note


def test_int8_keeps_them_as_well(plain: Path, tmp_path: Path) -> None:
    """With layers in float32 where it has to."""
    found = quantized(plain, tmp_path / "o.onnx", "int8")
    assert found.tokens is not None
    assert found.tokens.share == 1
    assert 0 < len(found.kept) < found.num_layers


def test_prompts_are_texts_that_weights_are_not_rounded_on(planted: Path) -> None:
    """Every other one of each batch, whose rows `record` leaves out."""
    calibration = make_calibration(planted, planted.with_name("texts.txt"))
    fitted = [
        row[mask == 1].tolist()
        for one in calibration.feeds
        for row, mask in zip(one["input_ids"][::2], one["attention_mask"][::2], strict=True)
    ]
    assert len(calibration.held_out) > 12
    assert not [ids for ids in calibration.held_out if list(ids) in fitted]


def tokens_of(body: str, weights: Arrays, folder: Path) -> Any:
    """Return the promise of a graph from ids to logits of 20 tokens, without a tokenizer."""
    graph = f"g (int64[batch_size, sequence] input_ids) => (float[batch_size, sequence, 20] logits) {{ {body} }}"
    write_inline(load_of(graph, weights), folder / "m.onnx")
    return promise_tokens(ModelFile.open(folder / "m.onnx"), (), 1.0)


def load_of(graph: str, weights: Arrays) -> ir.Model:
    model: ir.Model = ir.from_proto(of_text(graph, weights, 17))
    return model


def test_a_step_that_float32_does_not_decide_is_counted_apart(tmp_path: Path) -> None:
    """Two equal columns are a tie of the best two wherever one of them is best."""
    table = normal(20, 20)
    table[:, 7] = table[:, 3] = np.where(np.arange(20) % 2, 9.0, -9.0)
    promise = tokens_of("logits = Gather(t, input_ids)", {"t": table}, tmp_path)
    found = promise.count(lambda feeds: {"logits": table[feeds["input_ids"]]})
    ids = np.concatenate([one.ids for one in promise.continuations])
    assert found.num_undecided == (ids[:, -NUM_STEPS - 1 : -1] % 2).sum() > 0
    assert found.num_equal == found.num_counted == 12 * NUM_STEPS - found.num_undecided
    assert "more undecided in float32" in str(found)
    other = promise.count(lambda feeds: {"logits": -table[feeds["input_ids"]]})
    assert other.num_equal == 0
    assert other.first_difference is not None


def test_a_file_that_reads_ahead_promises_no_tokens(tmp_path: Path) -> None:
    """As masked language models do, whose outputs have the same name."""
    body = "e = Gather(t, input_ids) m = ReduceMean<axes=[1], keepdims=1>(e) logits = Add(e, m)"
    assert tokens_of(body, {"t": normal(20, 20)}, tmp_path) is None


def test_equal_tokens_applies_to_quantized_files_only(planted: Path) -> None:
    with pytest.raises(OptionError, match="--equal_tokens is for int8, int4 and auto, and the precision is fp16"):
        OptimizeOptions(planted, precision="fp16", equal_tokens=1.0)


def test_a_share_of_tokens_is_refused_for_a_model_that_writes_none(workshop: Workshop, tmp_path: Path) -> None:
    encoder, output = workshop.exported("tiny-encoder", exporter="torchscript"), tmp_path / "o.onnx"
    options = OptimizeOptions(encoder, output=output, precision="int8", equal_tokens=0.9, verify=False, timing=False)
    with pytest.raises(PassError, match="--equal_tokens is for decoders of text"):
        optimize_model(options)
    assert not output.exists()
