"""Which states of a transformer are pooled: those of its last layer, of another one, or of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sentence_transformers.sentence_transformer.modules import WeightedLayerPooling

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.module_settings import TokenStates
from onnxtool.checkpoint.pooling_modules import Pooling, read_pooling_modules
from onnxtool.errors import CheckpointError, InputError
from onnxtool.export.modalities.finding import give_states
from onnxtool.reports import Json

STATES = tuple(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4))


def saved(
    folder: Path,
    *kinds: str,
    output: Json = "last_hidden_state",
    weights: Any = None,
    gives_all: bool = True,
    **config: Any,
) -> CheckpointFolder:
    """Write the files of an embedder: modules behind a transformer, and what that gives."""
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, kind in enumerate(kinds, start=1):
        listed.append({"path": f"{place}_{kind}", "type": f"sentence_transformers.models.{kind}"})
        (folder / f"{place}_{kind}").mkdir()
        (folder / f"{place}_{kind}" / "config.json").write_text(json.dumps(config if place == 1 else {}))
    if weights is not None:
        save_file({"layer_weights": np.asarray(weights, np.float32)}, folder / f"1_{kinds[0]}" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    entry = {"method": "forward", "method_output_name": output}
    (folder / "sentence_bert_config.json").write_text(json.dumps({"modality_config": {"text": entry}}))
    (folder / "config.json").write_text(json.dumps({"output_hidden_states": gives_all}))
    return CheckpointFolder(folder)


def states_of(folder: CheckpointFolder) -> TokenStates | None:
    """Read which are pooled."""
    return TokenStates.of(folder.sentence_modules, folder)


@pytest.mark.parametrize("start", [0, 2])
def test_layers_are_weighed_as_sentence_transformers_weighs_them(tmp_path: Path, start: int) -> None:
    """Their states, over the sum of their weights."""
    weights = torch.tensor([0.5, -1.0, 2.0, 0.25][start:])
    folder = saved(tmp_path, "WeightedLayerPooling", "Pooling", weights=weights.numpy(), layer_start=start)
    found = states_of(folder)
    assert found is not None
    theirs = WeightedLayerPooling(4, 3, start, torch.nn.Parameter(weights))
    expected = theirs({"all_layer_embeddings": STATES})["token_embeddings"]
    torch.testing.assert_close(found.choose(torch, STATES), expected.detach())
    assert (found.fits(4), found.fits(5)) == (True, False)
    assert read_pooling_modules(folder.sentence_modules, Pooling) == (Pooling(),)


def test_one_layer_may_be_named(tmp_path: Path) -> None:
    """From the first or from the last."""
    found = states_of(saved(tmp_path, "Pooling", output=["hidden_states", -2]))
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
    assert states_of(saved(tmp_path, *kinds, **settings)) is None


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
        states_of(saved(tmp_path, "WeightedLayerPooling", "Pooling", **settings))


def test_layers_are_weighed_before_all_else(tmp_path: Path) -> None:
    """Behind another module, it is one that is not computed."""
    folder = saved(tmp_path, "Pooling", "WeightedLayerPooling")
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
