"""Prompts and the tokens after them are two graphs in one, where a model computes them by two formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import VerificationError
from onnxtool.export.decoding.branches import choose_by_length
from onnxtool.export.decoding.step import capture_step, chunk_size
from onnxtool.export.decoding.tracing import trace_with_cache
from onnxtool.export.decoding.verification import GenerationReference, verify_generation
from onnxtool.runtime.comparison import TOLERANCES, ReferenceOutputs

CHUNK = 4


def nemotron_h() -> Any:
    """A recurrence whose prompts, in chunks, bound its time steps, and whose single tokens do not; then attention."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=60, hidden_size=32, layers_block_type=["mamba", "attention"], num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, intermediate_size=32, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
        chunk_size=CHUNK, max_position_embeddings=96, initializer_range=0.3, time_step_min=0.05,
    )  # fmt: skip
    return NemotronHForCausalLM(config).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceOutputs]:
    """The file of such a model, and what PyTorch answers."""
    path = tmp_path_factory.mktemp("branches") / "model.onnx"
    ir.save(trace_with_cache(nemotron_h(), prompts="parallel", opset=None), path)
    return path, GenerationReference(nemotron_h(), None, 96).reference_outputs()


@pytest.mark.slow
def test_prompts_in_chunks_and_steps_are_those_of_pytorch(exported: tuple[Path, ReferenceOutputs]) -> None:
    """Of one chunk and of many, in one piece and in two, and each token after them; no loop is left over the prompt."""
    verification = verify_generation(*exported, TOLERANCES["fp32"])
    descriptions = {case.description for case in verification.cases}
    assert {"a prompt of one token", "a long prompt, 87 tokens", "ragged, padded left, in two pieces"} <= descriptions
    model = onnx.load(exported[0])
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node if node.op_type in ("If", "Loop")] == ["If"]


@pytest.mark.slow
def test_the_weights_of_both_graphs_are_there_once(exported: tuple[Path, ReferenceOutputs]) -> None:
    """Under the name of the parameter or, where a trace transposed them, under whatever name it gave them."""
    weights = sum(array.numel() * array.element_size() for array in nemotron_h().parameters())
    held = sum(len(tensor.raw_data) for tensor in onnx.load(exported[0]).graph.initializer)
    assert held < 1.2 * weights


@pytest.mark.slow
@pytest.mark.parametrize("branch", ["then_branch", "else_branch"])
def test_either_branch_alone_is_caught(exported: tuple[Path, ReferenceOutputs], branch: str, tmp_path: Path) -> None:
    """The step gives a prompt one token for all, and the prompt's formula bounds what a step does not."""
    model = onnx.load(exported[0])
    (choice,) = [node for node in model.graph.node if node.op_type == "If"]
    model.graph.initializer.append(numpy_helper.from_array(np.array(branch == "then_branch"), "always"))
    choice.input[0] = "always"
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(VerificationError):
        verify_generation(tmp_path / "broken.onnx", exported[1], TOLERANCES["fp32"])


def test_a_prompt_is_traced_over_more_than_two_chunks() -> None:
    """Of a single one, or of as many as the sample has, the tracer would make a constant."""
    step = capture_step(nemotron_h(), parallel=True)
    batch, tokens = step.arguments["input_ids"].shape
    assert tokens > 2 * CHUNK
    assert tokens % CHUNK
    past = next(leaf.keys.shape[2] for leaf in step.arguments["past_key_values"].layers if hasattr(leaf, "keys"))
    assert step.arguments["attention_mask"].shape == (batch, past + tokens)
    assert not step.arguments["attention_mask"].all()
    assert capture_step(nemotron_h(), parallel=False).arguments["input_ids"].shape[1] == 1


def test_models_without_chunks_have_one_graph() -> None:
    """Attention needs no second one; sizes that cannot be those of chunks are none."""
    from transformers import LlamaConfig, NemotronHConfig

    class Model:
        def __init__(self, config: Any) -> None:
            self.config = config

    assert chunk_size(Model(LlamaConfig())) is None
    assert chunk_size(Model(NemotronHConfig(chunk_size=256))) == 256
    assert chunk_size(Model(LlamaConfig(chunk_size=-1))) is None


def tiny_graph(added: float, weight_name: str, *, rank: int = 1) -> ir.Model:
    """`logits = input_ids * weight + added`, and a state to which as much is added."""
    ids, mask, past, present = "input_ids", "attention_mask", "past_state.0", "present_state.0"
    nodes = [
        helper.make_node("Cast", [ids], ["numbers"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Mul", ["numbers", weight_name], ["scaled"], name="scale"),
        helper.make_node("Add", ["scaled", "added"], ["logits"], name="add"),
        helper.make_node("Add", [past, "added"], [present], name="carry"),
    ]
    weight = np.full((1,) * rank, 3, np.float32)
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", None]) for name in (ids, mask)]
        + [helper.make_tensor_value_info(past, TensorProto.FLOAT, ["b"])],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", None]),
            helper.make_tensor_value_info(present, TensorProto.FLOAT, ["b"]),
        ],
        [numpy_helper.from_array(weight, weight_name), numpy_helper.from_array(np.array([added], np.float32), "added")],
    )
    made: ir.Model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    return made


@pytest.mark.parametrize(("tokens", "past", "added"), [(1, 0, 1), (1, 3, 2), (2, 0, 1), (2, 3, 1)])
def test_only_one_token_after_others_is_a_step(tokens: int, past: int, added: int, tmp_path: Path) -> None:
    """A prompt of one token is a prompt: nothing has been carried to it yet."""
    joined = choose_by_length(tiny_graph(1, "weight"), tiny_graph(2, "val_7"))
    for value in joined.graph.inputs:
        value.shape = ir.Shape(["b"] if value.name == "past_state.0" else ["b", None])
    ir.save(joined, tmp_path / "joined.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "joined.onnx"), full_check=True)
    ids, state = np.arange(2 * tokens).reshape(2, tokens), np.array([5, 7], np.float32)
    feeds = {"input_ids": ids, "attention_mask": np.ones((2, past + tokens), np.int64), "past_state.0": state}
    logits, present = onnxruntime.InferenceSession(tmp_path / "joined.onnx").run(None, feeds)
    np.testing.assert_array_equal(logits, 3 * ids + added)
    np.testing.assert_array_equal(present, state + added)


def test_what_differs_in_anything_stays_apart() -> None:
    """Weights are told by dtype, shape and content, not by name."""
    joined = choose_by_length(tiny_graph(1, "weight"), tiny_graph(2, "val_7"))
    assert {"weight", "added", "step/added"} == {name for name in joined.graph.initializers if "tokens/" not in name}
    joined = choose_by_length(tiny_graph(1, "weight"), tiny_graph(1, "weight", rank=2))
    assert {"weight", "added", "step/weight"} == {name for name in joined.graph.initializers if "tokens/" not in name}
