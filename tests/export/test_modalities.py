"""Models of images, sound, translation and of two kinds of input are exported and verified as those of text are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint.tasks import TASK_WITH_CACHE
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.decoding.generation import GenerationPipeline
from onnxtool.export.decoding.step import PROMPTS
from onnxtool.export.modalities.audio import AudioInputs
from onnxtool.export.modalities.combined import WithDecoder
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.modalities.image import ImageInputs
from onnxtool.export.modalities.modality import usual_sizes
from onnxtool.export.modalities.text import TextInputs, longest_text
from onnxtool.export.report import ExportReport
from onnxtool.export.signature import Signature
from onnxtool.export.single_call import SingleCallPipeline
from onnxtool.export.tracing import EXPORTERS, ExportStrategy
from onnxtool.runtime.comparison import Case, run_reference, verify
from onnxtool.runtime.difference import TOLERANCES
from tests.infer.tiny_models import write_checkpoint
from tests.workshop import WORDS, Workshop

VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 48,
}  # fmt: skip


def save(model: Any, folder: Path, *processors: Any, spread: float = 0.3) -> Path:
    """Save `model` with weights that are large enough for errors to show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=spread)
    model.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path) -> Path:
    """Put a tokenizer of a few words beside a model whose config.json is already there."""
    config = (folder / "config.json").read_text()
    write_checkpoint(folder, tokenizer_config={"model_max_length": 40, "tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "config.json").write_text(config)
    return folder


def export(folder: Path, output: Path, **options: Any) -> ExportReport:
    return export_model(ExportOptions(str(folder), output=output, **options))


def shapes(report: ExportReport) -> dict[str, tuple[Any, ...]]:
    return {tensor.name: tensor.shape for tensor in (*report.inputs, *report.outputs)}


def image_processor(size: int = 32) -> Any:
    return transformers.ViTImageProcessor(size={"height": size, "width": size})


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision transformer, which takes one size of image."""
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3))
    return save(model, tmp_path_factory.mktemp("vit"), image_processor())


def test_a_model_that_takes_one_size_of_picture_keeps_it(vit: Path, tmp_path: Path) -> None:
    """The batch is dynamic; height and width are the model's own, which the report says."""
    report = export(vit, tmp_path / "vit.onnx")
    assert report.task == "image-classification"
    assert shapes(report) == {"pixel_values": ("batch_size", 3, 32, 32), "logits": ("batch_size", 3)}
    assert report.fixed_axes == {}
    assert any("itself takes one size only: height 32, width 32" in note for note in report.notes)
    assert report.verification is not None
    assert len(report.verification.cases) >= 6
    # Whoever runs the file has to prepare images as the model learned them.
    assert json.loads((tmp_path / "vit" / "preprocessor_config.json").read_text())["size"] == {
        "height": 32,
        "width": 32,
    }


def test_a_convolutional_network_takes_pictures_of_any_size(tmp_path: Path) -> None:
    """Height and width have names of their own, and the file gives PyTorch's answer on another size."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    model = transformers.ResNetForImageClassification(config).eval()
    folder = save(model, tmp_path / "resnet", image_processor())
    report = export(folder, tmp_path / "resnet.onnx")
    assert shapes(report)["pixel_values"] == ("batch_size", 3, "height", "width")
    pixels = np.random.default_rng(0).standard_normal((1, 3, 48, 80)).astype(np.float32)
    with torch.inference_mode():
        wanted = model(pixel_values=torch.from_numpy(pixels)).logits.numpy()
    (found,) = onnxruntime.InferenceSession(report.output).run(None, {"pixel_values": pixels})
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_model_of_colours_takes_pictures_as_the_numbers_of_their_pixels(tmp_path: Path) -> None:
    """Image GPT's ids are no text's: they come from its image processor, and it has no tokenizer."""
    colours = [[red, green, blue] for red in (-1.0, 1.0) for green in (-1.0, 1.0) for blue in (-1.0, 1.0)]
    config = transformers.ImageGPTConfig(vocab_size=9, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=3)
    processor = transformers.ImageGPTImageProcessor(clusters=colours, size={"height": 4, "width": 4})
    folder = save(transformers.ImageGPTForImageClassification(config), tmp_path / "imagegpt", processor)
    report = export(folder, tmp_path / "imagegpt.onnx")
    assert report.task == "image-classification"
    assert shapes(report) == {"input_ids": ("batch_size", 16), "logits": ("batch_size", 3)}


def test_an_encoder_decoder_takes_the_text_so_far(tmp_path: Path) -> None:
    """The decoder's length is an axis of its own."""
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    folder = with_tokenizer(save(transformers.T5ForConditionalGeneration(config), tmp_path / "t5", spread=0.2))
    report = export(folder, tmp_path / "t5.onnx", exporter="torchscript")
    assert report.task == "text2text-generation"
    assert shapes(report) == {
        "input_ids": ("batch_size", "sequence"),
        "attention_mask": ("batch_size", "sequence"),
        "decoder_input_ids": ("batch_size", "decoder_sequence"),
        "logits": ("batch_size", "decoder_sequence", 40),
    }


class Encoder:
    """Takes texts of eight tokens, so many at once, in these cases: their descriptions, with what they are like."""

    axes = ()

    def __init__(self, rows: int, **cases: str) -> None:
        self._rows, self._cases = rows, cases

    def sample(self, _fixed: Any) -> dict[str, Any]:
        return {"input_ids": np.zeros((self._rows, 8), np.int64)}

    def cases(self, fixed: Any) -> list[Case]:
        return [Case(name, self.sample(fixed), None, like=like) for name, like in self._cases.items()]


def with_decoder(encoder: Any, start: int, **options: Any) -> Any:
    """Return the inputs of an encoder with a decoder of 40 ids and 48 tokens."""
    return WithDecoder(encoder, 40, start, longest=48, **options)


def test_texts_of_a_decoder_reach_from_one_token_to_many() -> None:
    """A mask over the future, or positions that end early, show on a long text only."""
    modality = with_decoder(Encoder(2, **dict.fromkeys("abcdef", "")), 0)
    assert {case.feeds["decoder_input_ids"].shape[1] for case in modality.cases({})} == {1, 2, 5, 7, 9, 48}
    assert {case.feeds["decoder_input_ids"].shape[1] for case in modality.cases({"decoder_sequence": 32})} == {32}


def test_texts_of_a_decoder_end_in_padding_as_well() -> None:
    """Some rows are shorter than others, in what is traced and in some cases; the others have none."""
    modality = with_decoder(Encoder(3, **dict.fromkeys("abcdefgh", "")), 7, pad_id=3)
    padded = [case for case in modality.cases({}) if case.description.endswith("padding in the decoder")]
    assert {case.feeds["decoder_input_ids"].shape[1] for case in padded} == {2, 5, 7, 9, 48}
    for feeds in (modality.sample({}), *(case.feeds for case in padded)):
        ids = feeds["decoder_input_ids"]
        real = ids != 3
        assert (ids[:, 0] == 7).all()
        assert set(real.sum(axis=1)) > {ids.shape[1] - 1}
        assert (np.sort(real, axis=1)[:, ::-1] == real).all()
    others = [case for case in modality.cases({}) if not case.description.endswith("padding in the decoder")]
    assert all((case.feeds["decoder_input_ids"] != 3).all() for case in others)


def test_a_case_with_other_padding_has_the_same_text_in_the_decoder() -> None:
    """Or the two answers would differ for another reason than the padding."""
    modality = with_decoder(Encoder(2, a="", b="", c="a"), 7, pad_id=3)
    ids = {case.description: case.feeds["decoder_input_ids"] for case in modality.cases({})}
    np.testing.assert_array_equal(ids["a"], ids["c"])
    assert ids["a"].shape != ids["b"].shape


def test_a_decoder_that_looks_for_padding_among_its_ids_finds_it_in_the_file(tmp_path: Path) -> None:
    """FSMT masks what is behind a text's end; traced on a text without one, its graph would mask nothing."""
    config = transformers.FSMTConfig(
        langs=["en", "de"], src_vocab_size=40, tgt_vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=48, use_cache=False,
    )  # fmt: skip
    folder = with_tokenizer(save(transformers.FSMTForConditionalGeneration(config), tmp_path / "fsmt"))
    report = export(folder, tmp_path / "fsmt.onnx", task="text2text-generation", exporter="torchscript")
    ids = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    texts = np.array([[2, 7, 8, 9, 10], [2, 8, 1, 1, 11]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "decoder_input_ids": texts}
    model = transformers.FSMTForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        wanted = model(**{name: torch.from_numpy(array) for name, array in feeds.items()}).logits.numpy()
    (found,) = onnxruntime.InferenceSession(report.output).run(None, feeds)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_model_of_sound_takes_any_length(tmp_path: Path) -> None:
    """The frames of the output follow the samples and are not as many, so that axis has another name."""
    config = transformers.Wav2Vec2Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, feat_extract_norm="layer",
    )  # fmt: skip
    folder = save(transformers.Wav2Vec2ForCTC(config), tmp_path / "w", transformers.Wav2Vec2FeatureExtractor())
    report = export(folder, tmp_path / "w.onnx", exporter="torchscript")
    assert report.task == "automatic-speech-recognition"
    assert shapes(report)["input_values"] == ("batch_size", "num_samples")
    assert shapes(report)["logits"] == ("batch_size", "logits_num_samples", 16)


def test_a_dual_encoder_compares_any_number_of_texts_with_any_number_of_pictures(tmp_path: Path) -> None:
    """Equal names stand only where sizes are equal: texts and images are counted apart."""
    config = transformers.CLIPConfig(text_config=TEXT | {"eos_token_id": 3}, vision_config=VISION, projection_dim=16)
    folder = with_tokenizer(save(transformers.CLIPModel(config), tmp_path / "clip", image_processor()))
    report = export(folder, tmp_path / "clip.onnx")
    assert report.task == "zero-shot-image-classification"
    assert shapes(report)["logits_per_image"] == ("image_batch_size", "text_batch_size")
    assert shapes(report)["input_ids"] == ("text_batch_size", "sequence")


def test_a_model_of_pictures_without_a_processor_says_what_to_save(vit: Path, tmp_path: Path) -> None:
    """What prepares its images is part of a model."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((vit / name).read_bytes())
    with pytest.raises(CheckpointError, match="no image processor"):
        export(folder, tmp_path / "m.onnx")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(workshop: Workshop) -> None:
    """Its last ids would be read from beyond the embedding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.checkpoint("tiny-mlm"))
    small = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))
    with pytest.raises(ExportError, match=f"ids up to {WORDS - 1}, and BertForMaskedLM knows 40"):
        TextInputs.of(small, tokenizer, ["input_ids"])


def test_all_cases_of_a_fixed_length_have_that_length(workshop: Workshop) -> None:
    """And there is still padding among them, without which no mask is verified."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.checkpoint("tiny-mlm"))
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT | {"vocab_size": WORDS}))
    text = TextInputs.of(model, tokenizer, ["input_ids", "attention_mask"])
    for fixed in ({"sequence": 32}, {"sequence": 32, "batch_size": 1}):
        cases = text.cases(fixed)
        assert {case.feeds["input_ids"].shape[1] for case in cases} == {32}
        assert any(case.valid is not None and not case.valid.all() for case in cases)
    assert {len(case.feeds["input_ids"]) for case in text.cases({"sequence": 32, "batch_size": 1})} == {1}


def test_every_modality_makes_what_it_is_asked_for(vit: Path) -> None:
    """Sizes along every axis are followed, and the same seed gives the same values."""
    processor = transformers.AutoImageProcessor.from_pretrained(vit)
    extractor = transformers.Wav2Vec2FeatureExtractor()
    for modality, name, wanted in (
        (ImageInputs.of(None, processor, ["pixel_values"]), "pixel_values", (2, 3, 32, 32)),
        (AudioInputs.of(None, extractor, ["input_values"]), "input_values", (2, 16000)),
    ):
        feeds = modality.feeds(usual_sizes(modality))
        assert feeds[name].shape == wanted
        np.testing.assert_array_equal(feeds[name], modality.feeds(usual_sizes(modality))[name])


class Seeing(transformers.BertForMaskedLM):
    """A model that takes images beside text."""

    def forward(self, input_ids: Any = None, pixel_values: Any = None) -> Any:
        raise NotImplementedError


class Hearing(transformers.BertForMaskedLM):
    """A model that takes sound beside text."""

    def forward(self, input_ids: Any = None, audio_input_features: Any = None) -> Any:
        raise NotImplementedError


class Perceiving(transformers.BertForMaskedLM):
    """A model that takes both beside text."""

    def forward(self, input_ids: Any = None, pixel_values: Any = None, input_features: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("task", ["text-generation", TASK_WITH_CACHE])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Seeing, ("takes text alone, though M takes images as well",)),
        (Hearing, ("takes text alone, though M takes sound as well",)),
        (Perceiving, ("takes text alone, though M takes images and sound as well",)),
        (transformers.BertForMaskedLM, ()),
    ],
)
def test_the_report_says_what_a_file_of_text_leaves_out(
    workshop: Workshop, kind: type[Any], said: tuple[str, ...], task: str
) -> None:
    """A user who wants images described must not find out from a missing input."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.checkpoint("tiny-mlm"))
    checkpoint: Any = SimpleNamespace(task=task, architecture="M", load_tokenizer=lambda: tokenizer)
    model = kind(transformers.BertConfig(**TEXT | {"vocab_size": WORDS}))
    modality = find_modality(model, checkpoint)
    pipeline: GenerationPipeline | SingleCallPipeline
    if task == TASK_WITH_CACHE:
        pipeline = GenerationPipeline(modality)
    else:
        pipeline = SingleCallPipeline(
            modality, Signature({}, {}), None, keep_raw=False, specification=None, default_attention=None
        )
    assert pipeline.notes("M", ExportStrategy(EXPORTERS[0], None, prompts=PROMPTS[0])) == said


PIXELS = ("pixel_values", "pixel_mask")


def masked(size: int = 64) -> ImageInputs:
    """Images as DETR's processor prepares them, with a mask."""
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
    assert not cases["images of several sizes"]["pixel_mask"].all()


@pytest.mark.parametrize("fixed", [{"batch_size": 1}, {"height": 64, "width": 96}, {"batch_size": 2, "height": 64}])
def test_a_fixed_axis_leaves_padding_among_the_cases(fixed: dict[str, int]) -> None:
    """A file for one image at a time is given smaller images as well."""
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
    "prepare",
    [
        lambda: ImageInputs.of(None, transformers.ViTImageProcessor(size={"height": 0, "width": 0}), PIXELS),
        lambda: ImageInputs.of(None, transformers.ViTImageProcessor(image_mean=[0.5]), PIXELS),
        lambda: AudioInputs.of(None, transformers.WhisperFeatureExtractor(feature_size=0), ("input_features",)),
    ],
    ids=["size", "mean", "features"],
)
def test_a_processor_that_does_not_run_names_its_file(prepare: Callable[[], Any]) -> None:
    """Its settings load, and make no sense."""
    with pytest.raises(CheckpointError, match="does not run") as error:
        prepare()
    assert "preprocessor_config.json" in error.value.hint


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


@pytest.mark.parametrize("limit", [int(1e30), 0.5, 0, -1, True])
def test_a_limit_of_no_number_of_tokens_is_none(limit: object) -> None:
    """Transformers writes 1e30, XLNet -1; half a token would be cut to no token at all."""
    model = type("Model", (), {"config": transformers.XLNetConfig()})()
    assert longest_text(model, type("Tokenizer", (), {"model_max_length": limit})()) is None
