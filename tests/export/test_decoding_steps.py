"""What a step of a decoder takes: caches with windows, and models that see or hear as well as read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxtool.errors import CheckpointError
from onnxtool.export import ExportOptions, export_model
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.modalities.text import TextInputs
from tests.export.test_modalities import TEXT, VISION, save, with_tokenizer

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
    """Its graph takes ids, mask and cache, and generates what the whole model generates from text alone."""
    import transformers

    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8},
        vision_config={**VISION, "vocab_size": 40},
        mm_tokens_per_image=4, image_token_index=39, boi_token_index=38, eoi_token_index=37,
    )  # fmt: skip
    folder = with_tokenizer(save(transformers.Gemma3ForConditionalGeneration(config), tmp_path / "gemma3"))
    report = export_model(ExportOptions(str(folder), output=tmp_path / "gemma3.onnx", task=WITH_CACHE))
    names = [value.name for value in onnx.load(report.output).graph.input]
    assert names[:2] == ["input_ids", "attention_mask"]
    assert all(name.startswith("past_key_values.") for name in names[2:])
    assert report.verification is not None
    assert report.verification.passed


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
