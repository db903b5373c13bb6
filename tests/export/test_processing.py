"""What prepares inputs may fail, and pictures smaller than their batch are padded: both are seen before any export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from onnxtool.errors import CheckpointError
from onnxtool.export.modalities.audio import AudioInputs
from onnxtool.export.modalities.image import ImageInputs
from onnxtool.export.modalities.sizes import usual_sizes
from onnxtool.export.modalities.text import TextInputs, longest_text
from onnxtool.runtime.comparison import TOLERANCES, run_reference, verify
from tests.workshop import Workshop

PIXELS = ("pixel_values", "pixel_mask")


def masked(size: int = 64) -> ImageInputs:
    """Pictures as DETR's processor prepares them, with a mask."""
    processor = transformers.DetrImageProcessor(size={"shortest_edge": size, "longest_edge": 2 * size})
    return ImageInputs.of(None, processor, PIXELS)


def test_pictures_smaller_than_their_batch_are_among_the_cases() -> None:
    """Each has a mask cut on both axes, and noise below the padding."""
    cases = {case.description: case.feeds for case in masked().cases({})}
    ragged = cases["ragged"]
    assert [bool(mask.all()) for mask in ragged["pixel_mask"]] == [False, True, False]
    for mask, pixels in zip(ragged["pixel_mask"], ragged["pixel_values"], strict=True):
        height, width = mask.any(axis=1).sum(), mask.any(axis=0).sum()
        assert mask[:height, :width].all()
        assert mask.sum() == height * width
        assert (pixels[:, mask == 0] != 0).all()
    np.testing.assert_array_equal(cases["ragged, padding attended"]["pixel_values"], ragged["pixel_values"])
    assert cases["ragged, padding attended"]["pixel_mask"].all()
    assert not cases["pictures of several sizes"]["pixel_mask"].all()


@pytest.mark.parametrize("fixed", [{"batch_size": 1}, {"height": 64, "width": 96}, {"batch_size": 2, "height": 64}])
def test_a_fixed_axis_leaves_padding_among_the_cases(fixed: dict[str, int]) -> None:
    """A file for one picture at a time is given smaller pictures as well."""
    cases = masked().cases(fixed)
    assert any(not case.feeds["pixel_mask"].all() for case in cases)
    for name, position in (("batch_size", 0), ("height", 1), ("width", 2)):
        if name in fixed:
            assert {case.feeds["pixel_mask"].shape[position] for case in cases} == {fixed[name]}


def test_what_is_traced_has_padding_and_what_is_measured_has_none() -> None:
    """As with texts: a mask of ones might be traced as a constant."""
    modality = masked()
    assert not modality.sample({})["pixel_mask"].all()
    assert modality.feeds(usual_sizes(modality))["pixel_mask"].all()


def test_a_model_without_a_mask_has_no_ragged_pictures() -> None:
    """There is nothing to tell it with."""
    processor = transformers.DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})
    cases = ImageInputs.of(None, processor, ("pixel_values",)).cases({})
    assert not any("ragged" in case.description or "several sizes" in case.description for case in cases)


def test_an_answer_that_ignores_the_mask_is_not_accepted() -> None:
    """DETR attends to what the mask marks; the same with a mask of ones is another answer."""
    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_attention_heads=2, num_queries=3, num_labels=3,
    )  # fmt: skip
    model = transformers.DetrForObjectDetection(config).eval()
    cases = [case for case in masked().cases({}) if "picture" not in case.description]

    def run(feeds: Any) -> Any:
        with torch.inference_mode():
            answer = model(**{name: torch.from_numpy(array) for name, array in feeds.items()})
        return {"logits": answer.logits.numpy(), "pred_boxes": answer.pred_boxes.numpy()}

    def careless(feeds: Any) -> Any:
        return run({**feeds, "pixel_mask": np.ones_like(feeds["pixel_mask"])})

    answers = run_reference(run, cases, name="PyTorch")
    assert verify(run, answers, TOLERANCES["fp32"]).passed
    assert not verify(careless, answers, TOLERANCES["fp32"]).passed


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        (
            lambda: ImageInputs.of(None, transformers.ViTImageProcessor(size={"height": 0, "width": 0}), PIXELS),
            "preprocessor_config.json",
        ),
        (
            lambda: ImageInputs.of(None, transformers.ViTImageProcessor(image_mean=[0.5]), PIXELS),
            "preprocessor_config.json",
        ),
        (
            lambda: AudioInputs.of(None, transformers.WhisperFeatureExtractor(feature_size=0), ("input_features",)),
            "preprocessor_config.json",
        ),
    ],
    ids=["size", "mean", "features"],
)
def test_a_processor_that_does_not_run_names_its_file(prepare: Callable[[], Any], name: str) -> None:
    """Its settings load, and make no sense."""
    with pytest.raises(CheckpointError, match="does not run") as error:
        prepare()
    assert name in error.value.hint


@pytest.mark.parametrize("rate", ["fast", 0, -1, True])
def test_a_sampling_rate_that_is_none_is_said_so(rate: object) -> None:
    """No sound can be made of it."""
    extractor = transformers.Wav2Vec2FeatureExtractor()
    extractor.sampling_rate = rate
    with pytest.raises(CheckpointError, match="sampling_rate"):
        AudioInputs.of(None, extractor, ("input_values",))


def test_a_tokenizer_that_does_not_run_names_its_file(workshop: Workshop) -> None:
    """A length that is no number is found when it is compared with one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.checkpoint("tiny-mlm"))
    tokenizer.model_max_length = "x"
    model = transformers.BertModel(transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(CheckpointError, match=r"tokenizer does not run: .*'str'") as error:
        TextInputs.of(model, tokenizer, ["input_ids", "attention_mask"])
    assert "tokenizer_config.json" in error.value.hint


@pytest.mark.parametrize("limit", [0.5, 0, -1, True])
def test_a_limit_below_one_token_is_none(limit: object) -> None:
    """Half a token would be cut to no token at all."""
    model = type("Model", (), {"config": transformers.XLNetConfig()})()
    assert longest_text(model, type("Tokenizer", (), {"model_max_length": limit})()) is None
