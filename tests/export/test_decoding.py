"""Graphs with a cache generate what PyTorch generates, and broken ones are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool import ExportOptions, export_model
from onnxtool.errors import CheckpointError, ExportError, VerificationError
from onnxtool.export.decoding.generation import GenerationPipeline, choose, generate
from onnxtool.export.decoding.step import (
    cache_name,
    capture_step,
    choose_by_length,
    chunk_size,
    plain_generation,
    present_name,
    trace_with_cache,
)
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.tracing import EXPORTERS, ExportStrategy
from onnxtool.runtime.comparison import ReferenceOutputs
from onnxtool.runtime.difference import TOLERANCES
from onnxtool.runtime.session import open_session
from tests import generators
from tests.export.planting import (
    constant,
    fix_the_batch,
    ignore_the_mask,
    invert_the_mask,
    name_of,
    replace_value,
    round_to_half,
    swap_outputs,
)
from tests.export.test_modalities import TEXT, VISION, save, with_tokenizer
from tests.workshop import Workshop

SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
WINDOW = 8


llama = partial(generators.make_model, "llama")


def shallow_llama() -> Any:
    """One layer of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES, **HEADS, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=96))


def mamba() -> Any:
    """States of a recurrence in place of keys and values."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**SIZES, state_size=4, time_step_rank=4))


def xlm() -> Any:
    """A decoder that knows no cache."""
    from transformers import XLMConfig, XLMWithLMHeadModel

    return XLMWithLMHeadModel(XLMConfig(vocab_size=100, emb_dim=32, n_layers=1, n_heads=4, causal=True))


@dataclass(frozen=True)
class Exported:
    """A model, what it answers, and the file traced from it."""

    model: Any
    answers: ReferenceOutputs
    path: Path


def tiny(make: Callable[[], Any]) -> Any:
    import torch

    torch.manual_seed(0)
    return make().eval()


def pipeline(tokenizer: Any, longest: int) -> GenerationPipeline:
    return GenerationPipeline(TextInputs(tokenizer, {}, {}, longest, None))


def answers_of(model: Any, tokenizer: Any, longest: int) -> ReferenceOutputs:
    return pipeline(tokenizer, longest).reference_outputs(model, ExportStrategy(EXPORTERS[0], None))


verify_generation = pipeline(None, 96).verify


def export(make: Callable[[], Any], prompts: str, path: Path, tokenizer: Any = None) -> Exported:
    import onnx_ir as ir

    ir.save(trace_with_cache(tiny(make), prompts=prompts, opset=None), path)
    answers = answers_of(tiny(make), tokenizer, 96)
    return Exported(tiny(make), answers, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generation")


@pytest.fixture(scope="module")
def parallel(workshop: Workshop) -> Exported:
    """Keys and values: all tokens of a prompt at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(generators.checkpoint(workshop, "llama"))
    answers = answers_of(llama(), tokenizer, 96)
    return Exported(llama(), answers, generators.exported(workshop, "llama"))


@pytest.fixture(scope="module")
def looping(folder: Path) -> Exported:
    """A recurrence: one token after the other."""
    return export(mamba, "token by token", folder / "mamba.onnx")


def shapes(values: Any) -> dict[str, list[int | str]]:
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim] for value in values
    }


def test_inputs_and_outputs_are_those_that_other_tools_know(parallel: Exported) -> None:
    """The names and axes are optimum's and Transformers.js'; positions are counted inside."""
    graph = onnx.load(parallel.path).graph
    cache = ["batch_size", 2, "past_sequence", 8]
    grown = ["batch_size", 2, "past_sequence + sequence", 8]
    assert shapes(graph.input) == {
        "input_ids": ["batch_size", "sequence"],
        "attention_mask": ["batch_size", "past_sequence + sequence"],
        **{f"past_key_values.{layer}.{part}": cache for layer in range(2) for part in ("key", "value")},
    }
    assert shapes(graph.output) == {
        "logits": ["batch_size", "sequence", 100],
        **{f"present.{layer}.{part}": grown for layer in range(2) for part in ("key", "value")},
    }


def test_states_have_no_axis_of_the_past(looping: Exported) -> None:
    """A recurrence remembers in the same place whatever the length."""
    graph = onnx.load(looping.path).graph
    assert shapes(graph.input) == {
        "input_ids": ["batch_size", "sequence"],
        "attention_mask": ["batch_size", "past_sequence + sequence"],
        **{name: axes for layer in range(2) for name, axes in {
            f"past_conv.{layer}": ["batch_size", 64, 4], f"past_recurrent.{layer}": ["batch_size", 64, 4],
        }.items()},
    }  # fmt: skip
    assert list(shapes(graph.output))[:3] == ["logits", "present_conv.0", "present_recurrent.0"]


@pytest.mark.parametrize("way", ["parallel", "looping"])
def test_it_generates_what_pytorch_generates(way: str, request: pytest.FixtureRequest) -> None:
    """At each step of each case: alone and together, ragged, one token, as long as the model takes."""
    exported: Exported = request.getfixturevalue(way)
    verification = verify_generation(exported.path, exported.answers, TOLERANCES["fp32"])
    assert verification.passed
    assert verification.max_abs_error < 1e-4
    descriptions = {case.description for case in verification.cases}
    assert {"a long prompt, 87 tokens", "a prompt of one token", "ragged, padded left"} <= descriptions
    # A chat goes on where it was: several tokens onto a cache.
    assert {"ragged, padded left, in two pieces", "ragged, four long rows, in two pieces"} <= descriptions
    assert ("real text" in descriptions) == (way == "parallel")
    # Weights by which padding shows: the mask is worth a check.
    assert verification.mask_effect is not None
    assert verification.mask_effect > 0.1


@pytest.mark.parametrize("way", ["parallel", "looping"])
def test_the_tokens_are_those_of_generate(way: str, request: pytest.FixtureRequest) -> None:
    """The graph chooses for itself here, for more tokens than verification looks at, and however a prompt is cut."""
    import torch

    pieces: tuple[tuple[int, ...], ...] = ((), (7, 4), (3, 1, 5, 2))
    exported: Exported = request.getfixturevalue(way)
    ids = np.random.default_rng(7).integers(1, 100, (3, 11))
    mask = (np.arange(11)[None, :] >= np.array([[0], [4], [10]])).astype(np.int64)
    session = open_session(exported.path, provider="cpu")
    with torch.inference_mode(), plain_generation(exported.model):
        wanted = exported.model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), max_new_tokens=20
        )
    for given in pieces:
        feeds = {"input_ids": ids, "attention_mask": mask, **({"pieces": np.array(given)} if given else {})}
        _, tokens = generate(session, feeds, new_tokens=20)
        assert tokens.tolist() == wanted[:, 11:].tolist()


def test_keys_and_values_grow_in_the_loop_as_well(folder: Path) -> None:
    """The loop is for any model whose step for one token can be traced, attention included."""
    exported = export(shallow_llama, "token by token", folder / "looping-llama.onnx")
    assert verify_generation(exported.path, exported.answers, TOLERANCES["fp32"]).passed


@pytest.mark.parametrize("way", ["parallel", "looping"])
def test_the_file_follows_the_specification(way: str, request: pytest.FixtureRequest) -> None:
    """Types and shapes are consistent, inside the loop too, and no path of this machine is left."""
    exported: Exported = request.getfixturevalue(way)
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    assert way == "parallel" or not model.metadata_props
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)


def test_a_decoder_without_a_cache_is_refused() -> None:
    """It would be exported as if it had one."""
    with pytest.raises(ExportError, match="XLMWithLMHeadModel"):
        trace_with_cache(tiny(xlm), prompts="parallel", opset=None)


def test_a_model_that_takes_too_few_tokens_is_refused() -> None:
    """There must be room for what verification generates."""
    with pytest.raises(ExportError, match="takes 9 tokens"):
        answers_of(tiny(llama), None, 9)


@pytest.mark.parametrize(
    ("path", "past", "present"),
    [
        ("past_key_values.layers.3.keys", "past_key_values.3.key", "present.3.key"),
        ("cache_params.layers.0.conv_states.0", "past_conv.0", "present_conv.0"),
        ("past_key_values.layers.2.recurrent_states.1", "past_recurrent.2.1", "present_recurrent.2.1"),
        ("past_key_values.self_attention_cache.layers.1.values", "past_key_values.self_attention_cache.1.value",
         "present.self_attention_cache.1.value"),
        ("state.4", "past_state.4", "present_state.4"),
    ],
)  # fmt: skip
def test_caches_are_named(path: str, past: str, present: str) -> None:
    """By layer and by what they hold."""
    assert cache_name(path) == past
    assert present_name(past) == present


def swap_keys_and_values(model: onnx.ModelProto) -> None:
    swap_outputs(model, "present.0.key", "present.0.value")


def swap_layers(model: onnx.ModelProto) -> None:
    swap_outputs(model, "present.0.key", "present.1.key")


def read_the_past_in_another_layout(model: onnx.ModelProto) -> None:
    """[B, H, P, D] read as if it were [B, P, H, D]."""
    name = "past_key_values.1.value"
    replace_value(
        model,
        name,
        helper.make_node("Shape", [name], ["planted_shape"]),
        helper.make_node("Transpose", [name], ["planted_turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["planted_turned", "planted_shape"], ["planted"]),
    )


def forget_the_past(model: onnx.ModelProto) -> None:
    name = "past_key_values.0.key"
    replace_value(model, name, helper.make_node("Mul", [name, constant(model, np.array(0, np.float32))], ["planted"]))


def give_back_the_cache_of_the_step_before(model: onnx.ModelProto) -> None:
    """The newest token overwritten by the one before it."""
    name = "present.1.key"
    producer = next(node for node in model.graph.node if name in node.output)
    producer.output[list(producer.output).index(name)] = "planted_full"
    for node in model.graph.node:
        node.input[:] = ["planted_full" if value == name else value for value in node.input]
    start, end, axis, one = (constant(model, np.array([value], np.int64)) for value in (0, -1, 2, 1))
    model.graph.node.extend(
        [
            helper.make_node("Slice", ["planted_full", start, end, axis], ["planted_old"]),
            helper.make_node("Slice", ["planted_full", start, one, axis], ["planted_first"]),
            helper.make_node("Concat", ["planted_old", "planted_first"], [name], axis=2),
        ]
    )


def spoil_where(model: onnx.ModelProto, rows: int, tokens: int, past: int) -> None:
    """Add a half to all logits where there are more rows, tokens and past tokens than these."""
    node = next(node for node in model.graph.node if "logits" in node.output)
    node.output[list(node.output).index("logits")] = "planted_right"
    bounds = constant(model, np.array([rows, tokens, past]))
    half = constant(model, np.array(0.5, np.float32))
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["input_ids"], ["planted_given"]),
            helper.make_node("Shape", ["attention_mask"], ["planted_total"], start=1),
            helper.make_node("Shape", ["input_ids"], ["planted_tokens"], start=1),
            helper.make_node("Sub", ["planted_total", "planted_tokens"], ["planted_past"]),
            helper.make_node("Concat", ["planted_given", "planted_past"], ["planted_sizes"], axis=0),
            helper.make_node("Greater", ["planted_sizes", bounds], ["planted_more"]),
            helper.make_node("Cast", ["planted_more"], ["planted_as_numbers"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMin", ["planted_as_numbers"], ["planted_met"], keepdims=0),
            helper.make_node("Mul", ["planted_met", half], ["planted_error"]),
            helper.make_node("Add", ["planted_right", "planted_error"], ["logits"]),
        ]
    )


PLANTED = (
    ignore_the_mask,
    invert_the_mask,
    swap_keys_and_values,
    swap_layers,
    read_the_past_in_another_layout,
    forget_the_past,
    give_back_the_cache_of_the_step_before,
    partial(fix_the_batch, size=3),
    round_to_half,
)


@pytest.mark.parametrize("plant", PLANTED, ids=name_of)
def test_a_planted_error_is_caught(
    parallel: Exported, tmp_path: Path, plant: Callable[[onnx.ModelProto], None]
) -> None:
    """The file loads and generates, but not what the model does."""
    model = onnx.load(parallel.path)
    plant(model)
    onnx.save(model, tmp_path / "broken.onnx")
    open_session(tmp_path / "broken.onnx", provider="cpu")
    with pytest.raises(VerificationError):
        verify_generation(tmp_path / "broken.onnx", parallel.answers, TOLERANCES["fp32"])


def test_a_state_that_padding_changes_is_caught(looping: Exported, tmp_path: Path) -> None:
    """The loop keeps a row's state through its padding; without that, a shorter prompt would begin with noise."""
    model = onnx.load(looping.path)
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    body = loop.attribute[0].g
    kept = [node for node in body.node if node.op_type == "Where" and node.name.startswith("token/")]
    assert len(kept) == 4
    for node in kept:
        node.op_type = "Identity"
        node.input[:] = [node.input[1]]
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(VerificationError, match="ragged"):
        verify_generation(tmp_path / "broken.onnx", looping.answers, TOLERANCES["fp32"])


@pytest.mark.parametrize("way", ["parallel", "looping"])
@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"rows": 0, "tokens": 1, "past": 0}, "in two pieces"),
        ({"rows": 3, "tokens": 0, "past": -1}, "four long rows"),
        ({"rows": 1, "tokens": 0, "past": 70}, "four long rows"),
    ],
    ids=["several tokens onto a cache", "more than three rows", "a long past of several rows"],
)
def test_an_error_for_some_sizes_is_caught(
    way: str, sizes: dict[str, int], found: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Prompts that go on, batches and long pasts are sizes that are run, and the cases without them still pass."""
    exported: Exported = request.getfixturevalue(way)
    model = onnx.load(exported.path)
    spoil_where(model, **sizes)
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(VerificationError) as raised:
        verify_generation(tmp_path / "broken.onnx", exported.answers, TOLERANCES["fp32"])
    assert raised.value.verification is not None
    failed = [case.description for case in raised.value.verification.cases if not case.passed]
    assert failed
    assert all(found in description for description in failed)


WITH_CACHE = "text-generation-with-past"


def test_a_window_shorter_than_the_samples_does_not_fix_its_cache() -> None:
    """It is cut to three tokens in PyTorch, whatever the prompt, and keeps all of them in the graph."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.cache_utils import DynamicSlidingWindowLayer

    from onnxtool.export.decoding.step import capture_step

    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**TEXT, head_dim=8, num_key_value_heads=2, sliding_window=4, layer_types=layers)
    update = DynamicSlidingWindowLayer.update
    step = capture_step(Gemma3ForCausalLM(config).eval(), parallel=True)
    assert len(step.cache) == 4
    assert set(step.cache.values()) == {("batch_size", 2, "past_sequence", 8)}
    assert DynamicSlidingWindowLayer.update is update


@pytest.mark.slow
def test_a_decoder_of_pictures_and_text_gives_its_text_with_a_cache(tmp_path: Path) -> None:
    """Its graph takes ids, mask and cache, and generates what the whole model generates from text alone.

    A layer has a sliding window, beside one without: past the window too, though the cache keeps all tokens.
    """
    import transformers

    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": WINDOW, "layer_types": layers},
        vision_config={**VISION, "num_hidden_layers": 1, "vocab_size": 40},
        mm_tokens_per_image=4, image_token_index=39, boi_token_index=38, eoi_token_index=37,
    )  # fmt: skip
    folder = with_tokenizer(save(transformers.Gemma3ForConditionalGeneration(config), tmp_path / "gemma3"))
    report = export_model(ExportOptions(str(folder), output=tmp_path / "gemma3.onnx", task=WITH_CACHE))
    names = [value.name for value in onnx.load(report.output).graph.input]
    assert names[:2] == ["input_ids", "attention_mask"]
    assert all(name.startswith("past_key_values.") for name in names[2:])
    assert report.verification is not None
    assert report.verification.passed
    descriptions = {case.description for case in report.verification.cases}
    assert {f"past the window of {WINDOW}", f"past the window of {WINDOW}, in two pieces"} <= descriptions


class Hearing:
    """A model that reads and hears; `logit_scale` where it compares the two."""

    def __init__(self, *parameters: str) -> None:
        from transformers import BertConfig

        self.config = BertConfig(vocab_size=40)
        self._parameters = parameters

    def forward(self, input_ids: Any, attention_mask: Any, input_features: Any) -> None:
        """Take both."""

    def named_parameters(self, *, recurse: bool) -> list[tuple[str, None]]:
        """Name those of the model itself."""
        assert not recurse
        return [(name, None) for name in self._parameters]

    def get_input_embeddings(self) -> Any:
        """Say how many ids there are."""
        import torch

        return torch.nn.Embedding(40, 4)


class Place:
    """A checkpoint with a tokenizer alone."""

    architecture = "Hearing"

    def __init__(self, task: str, folder: Path) -> None:
        self.task, self._folder = task, folder

    def load_tokenizer(self) -> Any:
        """Load it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    def load_processor(self, _kind: str) -> Any:
        """Refuse, as a checkpoint without one does."""
        raise CheckpointError("there is no feature extractor", "save it")


@pytest.mark.parametrize("task", ["text-generation", WITH_CACHE, "feature-extraction"])
def test_a_model_that_hears_as_well_is_one_of_text_for_tasks_of_text(task: str, tmp_path: Path) -> None:
    """No feature extractor is asked for."""
    from tests.infer.tiny_models import write_checkpoint

    place: Any = Place(task, write_checkpoint(tmp_path / "text"))
    modality = find_modality(Hearing(), place)
    assert isinstance(modality, TextInputs)
    assert set(modality.names) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("task", "parameters"), [("automatic-speech-recognition", ()), ("feature-extraction", ("logit_scale_a",))]
)
def test_a_model_that_hears_takes_sound_for_other_tasks(task: str, parameters: tuple[str, ...], tmp_path: Path) -> None:
    """As it does where it compares sound with text."""
    place: Any = Place(task, tmp_path)
    with pytest.raises(CheckpointError, match="feature extractor"):
        find_modality(Hearing(*parameters), place)


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
    return path, answers_of(nemotron_h(), None, 96)


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


@pytest.mark.parametrize("suppressed", [-np.inf, -1e9, np.finfo(np.float32).min])
def test_suppressed_tokens_do_not_make_all_others_equally_good(suppressed: float) -> None:
    """Only tokens that are equal apart from rounding may replace each other."""
    logits = np.array([[suppressed, 0.0, 1.0, suppressed, 0.9999999]], np.float32)
    assert choose(logits, np.array([1]), TOLERANCES["fp32"]) == [2]
    assert choose(logits, np.array([4]), TOLERANCES["fp32"]) == [4]
