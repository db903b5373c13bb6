"""Settings of sentence-transformers that change the answer are followed, or refused by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sentence_transformers.sentence_transformer.modules import WeightedLayerPooling

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.module_forms import PoolingModule
from onnxtool.checkpoint.module_settings import TokenStates, require_known_settings
from onnxtool.checkpoint.pooling_modules import LogitScore, Normalize, Pooling, Truncate, read_pooling_modules
from onnxtool.checkpoint.sparse_modules import LargestTerms, SpladePooling
from onnxtool.errors import CheckpointError, InputError
from onnxtool.export.modalities.finding import give_states
from onnxtool.reports import Json
from tests.module_files import write_modules

TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
# As sentence-transformers 6.2 writes it for an encoder of texts.
USUAL = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


def saved(
    folder: Path,
    transformer: dict[str, Any] | None = None,
    encoder: dict[str, Any] | None = None,
    *pooling: str,
    first: str = TRANSFORMER,
) -> CheckpointFolder:
    """Write the files of a checkpoint: the settings of its transformer and of its encoder, and modules behind it."""
    files: Any = {"sentence_bert_config": transformer or {}, "config_sentence_transformers": encoder or {}}
    return CheckpointFolder(write_modules(folder, *pooling, first=first, **files))


def refusal(folder: CheckpointFolder) -> str:
    """Return what the checkpoint is refused with."""
    with pytest.raises(InputError) as caught:
        require_known_settings(folder.sentence_modules, folder)
    return caught.value.message


@pytest.mark.parametrize(
    "settings",
    [
        {},
        USUAL,
        {**USUAL, "modality_config": {"text": {"method": "forward", "method_output_name": ["last_hidden_state"]}}},
        {"max_seq_length": 256, "do_lower_case": False},
        {"max_seq_length": None, "query_length": None, "query_expansion": None, "unpad_inputs": False},
        {"query_length": 8, "document_length": 20},
        {"processing_kwargs": {}, "model_args": {"attn_implementation": "sdpa"}, "config_kwargs": {}},
        {"processing_kwargs": {"text": {"max_length": 9, "truncation": True}}},
        {"processing_kwargs": {"text": {"add_special_tokens": False}}},
        {"modality_config": {"message": {**FORWARD, "format": "flat"}, "text": FORWARD}},
        {"modality_config": {"message": FORWARD}, "processing_kwargs": {"chat_template": {"enable_thinking": False}}},
        {"transformer_task": "fill-mask", "module_output_name": "token_embeddings"},
        {"transformer_task": "sequence-classification", "module_output_name": "scores"},
        {"transformer_task": "text-generation", "module_output_name": "causal_logits"},
    ],
)
def test_settings_that_are_followed_or_change_nothing_are_let_through(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Those of every version's files."""
    folder = saved(tmp_path, settings)
    require_known_settings(folder.sentence_modules, folder)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modality_config": {"text": {}, "message": {}}}, "modality_config"),
        ({"modality_config": {"message": {**FORWARD, "format": "xml"}}}, "modality_config"),
        ({"modality_config": {"message": FORWARD, "image": FORWARD}}, "modality_config"),
        (
            {"modality_config": {"message": FORWARD}, "processing_kwargs": {"text": {"add_special_tokens": False}}},
            "add",
        ),
        ({"processing_kwargs": {"chat_template": {"truncation": False}}}, "processing_kwargs"),
        ({"processing_kwargs": {"chat_template": {"chat_template": "{{ 1 }}"}}}, "processing_kwargs"),
        ({"processing_kwargs": {"text": ["max_length"]}}, "processing_kwargs"),
        ({"processing_kwargs": {"text": {"padding_side": "left"}}}, "processing_kwargs"),
        (
            {"modality_config": {"text": {"method": "forward", "method_output_name": ["hidden_states", "x"]}}},
            "modality",
        ),
        ({"modality_config": {"text": {"method": "get_text_features", "method_output_name": None}}}, "modality_config"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name 'sentence_embedding'"),
        ({"transformer_task": "any-to-any"}, "transformer_task 'any-to-any'"),
        ({"transformer_task": ["fill-mask"]}, "transformer_task"),
        ({"processing_kwargs": {"text": {"add_special_tokens": "no"}}}, "processing_kwargs"),
        ({"processing_kwargs": {"text": {"truncation": False}}}, "processing_kwargs"),
        ({"processing_kwargs": {"common": {"return_tensors": "np"}}}, "processing_kwargs"),
        ({"query_length": 0}, "query_length 0"),
        ({"document_length": "long"}, "document_length 'long'"),
        ({"query_expansion": {"length": 32}}, "query_expansion"),
        ({"tokenizer_name_or_path": "other/tokenizer"}, "tokenizer_name_or_path 'other/tokenizer'"),
        ({"config_args": {"num_hidden_layers": 2}}, "config_args"),
        ({"max_seq_length": "many"}, "max_seq_length 'many'"),
        ({"something_new": 1}, "something_new 1"),
    ],
)
def test_settings_that_are_not_followed_are_named(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    """With their value and their file: a vector computed without them would be another one."""
    message = refusal(saved(tmp_path, settings))
    assert reason in message
    assert "sentence_bert_config.json" in message


def test_settings_of_a_dual_encoder_are_those_of_its_sides(tmp_path: Path) -> None:
    """They are followed where each side is a file of its own."""
    features = {
        kind: {"method": f"get_{kind}_features", "method_output_name": "pooler_output"} for kind in ("text", "image")
    }
    folder = saved(tmp_path, {"modality_config": features, "module_output_name": "sentence_embedding"})
    require_known_settings(folder.sentence_modules, folder, of_sides=True)
    assert "modality_config" in refusal(folder)


def test_settings_without_modules_mean_nothing(tmp_path: Path) -> None:
    """sentence-transformers reads them for folders with modules.json alone."""
    (tmp_path / "sentence_bert_config.json").write_text('{"query_length": 8}')
    folder = CheckpointFolder(tmp_path)
    require_known_settings(folder.sentence_modules, folder)


def test_a_class_of_another_library_is_no_transformer_of_ours(tmp_path: Path) -> None:
    """It may compute anything, whatever its name."""
    folder = saved(tmp_path, {}, {}, "Pooling", first="custom_st.Transformer")
    assert folder.sentence_modules.kinds == ("custom_st.Transformer", "Pooling")
    with pytest.raises(InputError, match=r"modules custom_st\.Transformer, which onnxtool does not compute"):
        read_pooling_modules(folder.sentence_modules, Pooling)


def test_settings_of_the_encoder_are_modules_behind_all_others(tmp_path: Path) -> None:
    """A vector is cut after it was scaled, as sentence-transformers does it."""
    modules = saved(tmp_path, {}, {"truncate_dim": 3}, "Pooling", "Normalize").sentence_modules
    assert read_pooling_modules(modules, Pooling) == (Pooling(), Normalize(), Truncate(3))
    modules = saved(tmp_path, {}, {"max_active_dims": 8}, "SpladePooling").sentence_modules
    assert read_pooling_modules(modules, SpladePooling) == (SpladePooling(), LargestTerms(8))


@pytest.mark.parametrize(
    ("task", "first"), [("text-generation", Pooling), ("fill-mask", LogitScore), ("feature-extraction", LogitScore)]
)
def test_a_module_that_reads_what_its_transformer_does_not_give_is_refused(
    tmp_path: Path, task: str, first: type[PoolingModule]
) -> None:
    """sentence-transformers itself fails on such a checkpoint when it runs."""
    modules = saved(tmp_path, {"transformer_task": task}, {}, first.__name__).sentence_modules
    with pytest.raises(InputError, match=f"reads {first.reads}, and its transformer gives "):
        read_pooling_modules(modules, first)


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True])
def test_a_count_that_is_none_is_refused(tmp_path: Path, count: Json) -> None:
    """Rather than taken for the whole vector."""
    modules = saved(tmp_path, {}, {"truncate_dim": count}, "Pooling").sentence_modules
    with pytest.raises(InputError, match="truncate_dim is .*, which is not a number above zero"):
        read_pooling_modules(modules, Pooling)


STATES = tuple(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4))


def with_states(
    folder: Path,
    *kinds: str,
    output: Json = "last_hidden_state",
    weights: Any = None,
    gives_all: bool = True,
    **config: Any,
) -> CheckpointFolder:
    """Write the files of an embedder: modules behind a transformer, and what that gives."""
    states = {"text": {"method": "forward", "method_output_name": output}}
    files: dict[str, Any] = {"sentence_bert_config": {"modality_config": states}}
    write_modules(folder, (kinds[0], config), *kinds[1:], config={"output_hidden_states": gives_all}, **files)
    if weights is not None:
        save_file({"layer_weights": np.asarray(weights, np.float32)}, folder / f"1_{kinds[0]}" / "model.safetensors")
    return CheckpointFolder(folder)


def states_of(folder: CheckpointFolder) -> TokenStates | None:
    """Read which are pooled."""
    return TokenStates.of(folder.sentence_modules, folder)


@pytest.mark.parametrize("start", [0, 2])
def test_layers_are_weighed_as_sentence_transformers_weighs_them(tmp_path: Path, start: int) -> None:
    """Their states, over the sum of their weights."""
    weights = torch.tensor([0.5, -1.0, 2.0, 0.25][start:])
    folder = with_states(tmp_path, "WeightedLayerPooling", "Pooling", weights=weights.numpy(), layer_start=start)
    found = states_of(folder)
    assert found is not None
    theirs = WeightedLayerPooling(4, 3, start, torch.nn.Parameter(weights))
    expected = theirs({"all_layer_embeddings": STATES})["token_embeddings"]
    torch.testing.assert_close(found.choose(torch, STATES), expected.detach())
    assert (found.fits(4), found.fits(5)) == (True, False)
    assert read_pooling_modules(folder.sentence_modules, Pooling) == (Pooling(),)


def test_one_layer_may_be_named(tmp_path: Path) -> None:
    """From the first or from the last."""
    found = states_of(with_states(tmp_path, "Pooling", output=["hidden_states", -2]))
    assert found is not None
    assert found.choose(torch, STATES) is STATES[2]
    assert [found.fits(count) for count in (1, 2)] == [False, True]
    read_pooling_modules(CheckpointFolder(tmp_path).sentence_modules, Pooling)


@pytest.mark.parametrize(
    ("kinds", "settings"),
    [
        (("Pooling",), {}),
        (("Pooling",), {"output": ["last_hidden_state"]}),
        # A model that is not told to give all states: sentence-transformers passes over the module.
        (("WeightedLayerPooling", "Pooling"), {"gives_all": False}),
    ],
)
def test_the_states_of_the_last_layer_are_the_usual_ones(
    tmp_path: Path, kinds: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """Nothing has to be chosen then."""
    assert states_of(with_states(tmp_path, *kinds, **settings)) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "has no weights"),
        ({"weights": [[1.0, 2.0]]}, r"of shape \[1, 2\]"),
        ({"weights": [1.0, np.nan]}, "not finite"),
        ({"weights": [1.0, -1.0]}, "of sum 0"),
        ({"weights": [1.0], "layer_start": -1}, "layer_start -1"),
        ({"weights": [1.0], "layer_start": "4"}, "layer_start '4'"),
        ({"weights": [1.0], "temperature": 2}, "temperature"),
    ],
)
def test_weights_of_layers_that_cannot_be_read_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """With the folder that they lie in."""
    with pytest.raises(InputError, match=reason):
        states_of(with_states(tmp_path, "WeightedLayerPooling", "Pooling", **settings))


def test_layers_are_weighed_before_all_else(tmp_path: Path) -> None:
    """Behind another module, it is one that is not computed."""
    folder = with_states(tmp_path, "Pooling", "WeightedLayerPooling")
    assert states_of(folder) is None
    with pytest.raises(InputError, match="the modules WeightedLayerPooling, which onnxtool does not compute"):
        read_pooling_modules(folder.sentence_modules, Pooling)


def test_a_model_without_the_layers_is_refused() -> None:
    """When it runs: only then does it show how many it has."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    model = BertModel(config).eval()
    give_states(model, TokenStates(0, np.ones(4, np.float32)))
    with pytest.raises(CheckpointError, match="from layer 0 on, with 4 weights, and its model has 3"):
        model(torch.tensor([[1, 2]]))
