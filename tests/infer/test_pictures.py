"""Images are encoded and ranked by the sides of a dual encoder as transformers computes them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from onnxtool import BenchmarkOptions, ExportOptions, benchmark, export_model
from onnxtool.checkpoint.limits import graph_limit
from onnxtool.checkpoint.tasks import LATE_INTERACTION, TASK_OF_PICTURES
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import CheckpointError, ExportError, InputError, OutputExistsError, TargetError
from onnxtool.export.modalities.pages import restrict_to_pages
from onnxtool.infer import InferOptions, load, run_texts
from onnxtool.infer.pictures import load_pictures
from onnxtool.infer.vectors import TokenVectors
from onnxtool.model_file import ModelFile
from tests.cli.entry_point import json_of, run_infer
from tests.export.test_modalities import TEXT, VISION, save, with_tokenizer
from tests.infer.tiny_models import CLS, PAD, SEP
from tests.retrieval.tiny_pages import colpali as save_colpali

SIZES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


class Clip:
    """A tiny CLIP with both sides exported.

    Attributes:
        model: the PyTorch model.
        images: files of several sizes.
    """

    def __init__(self, root: Path) -> None:
        config = transformers.CLIPConfig(
            text_config=TEXT | {"eos_token_id": SEP, "pad_token_id": PAD}, vision_config=VISION, projection_dim=16
        )
        self.root = root
        self.folder = with_tokenizer(save(transformers.CLIPModel(config).eval(), root / "clip", spread=0.15))
        write_processor(self.folder, "CLIPImageProcessor", SIZES)
        self.model = transformers.CLIPModel.from_pretrained(self.folder).eval()
        self.images, self.texts = root / "clip-images.onnx", root / "clip-texts.onnx"
        self.report = export_side(self.folder, self.images, TASK_OF_PICTURES)
        export_side(self.folder, self.texts, "sentence-similarity")
        (root / "pictures").mkdir()
        for number, (height, width) in enumerate([(60, 80), (90, 40), (33, 35), (32, 32)]):
            pixels = np.random.default_rng(number).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
            picture = Image.fromarray(pixels).resize((width, height))
            picture.save(root / "pictures" / f"{number}.png")
        self.pictures = sorted((root / "pictures").iterdir())

    def expected(self, query: str | None = None) -> Any:
        """Return what the model's own forward compares: images [N, D], or those of a text [1, D]."""
        processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        tokens = transformers.AutoTokenizer.from_pretrained(self.folder)([query or "a"], return_tensors="pt")
        pixels = processor([str(path) for path in self.pictures], return_tensors="pt")
        with torch.inference_mode():
            outputs = self.model(**tokens, **pixels)
        return (outputs.image_embeds if query is None else outputs.text_embeds).numpy()


def write_processor(folder: Path, name: str, settings: dict[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name, **settings}))


def export_side(folder: Path, output: Path, task: str, **options: Any) -> Any:
    return export_model(ExportOptions(str(folder), output=output, task=task, **options))


def encode(model: Path, pictures: Sequence[Path]) -> NDArray[np.float32]:
    vectors = load_pictures(model).encode(pictures)
    assert isinstance(vectors, np.ndarray)
    return vectors


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    """Exported once."""
    return Clip(tmp_path_factory.mktemp("dual"))


def test_the_picture_side_takes_pixels_alone(clip: Clip) -> None:
    """The file holds one encoder, and gives what the model's forward compares."""
    report = clip.report
    assert [(tensor.name, tensor.shape) for tensor in (*report.inputs, *report.outputs)] == [
        ("pixel_values", ("batch_size", 3, 32, 32)),
        ("image_embeds", ("batch_size", 16)),
    ]
    assert report.head == "embedding"
    assert any("as the model's own forward compares them" in note for note in report.notes)
    with pytest.raises(InputError, match="fixed to --sequence_length 1; 8 was asked for"):
        benchmark(clip.images, BenchmarkOptions(batch_sizes=(1,), sequence_lengths=(8,), runs=1))
    names = [weight.name for weight in onnx.load(clip.images).graph.initializer]
    assert not any("text" in name for name in names)


def test_vectors_are_those_of_transformers(clip: Clip) -> None:
    """Of image files of several sizes, and of texts."""
    np.testing.assert_allclose(encode(clip.images, clip.pictures), clip.expected(), atol=1e-5)
    texts = np.asarray(load(clip.texts).encode(["a cat"]))
    np.testing.assert_allclose(texts, clip.expected("a cat"), atol=1e-5)


def test_pictures_have_no_limit_of_tokens(clip: Clip) -> None:
    """The positions of patches are none: a benchmark would refuse lengths beyond them."""
    assert graph_limit(ModelFile.open(clip.images), None) is None
    assert graph_limit(ModelFile.open(clip.texts), None) is not None


def test_pictures_are_ranked_for_a_text(clip: Clip) -> None:
    """By the cosine of what both sides give, as logits_per_text sorts them."""
    options = InferOptions(
        clip.images, query="cat", text_model=clip.texts, input_path=clip.root / "pictures", provider="cpu"
    )
    report = run_texts(options)
    scores = clip.expected("cat") @ clip.expected().T
    assert report.kind == "scores"
    assert list(report.rankings[0].order) == np.argsort(-scores[0]).tolist()
    found = [answer.candidates[0].score for answer in report.answers]
    np.testing.assert_allclose(found, scores[0], atol=1e-5)
    assert [answer.id for answer in report.answers] == [path.name for path in clip.pictures]


def test_the_command_shows_pictures_and_how_similar_they_are(clip: Clip) -> None:
    """Without a query; JSON has the vectors."""
    images = [part for path in clip.pictures[:2] for part in ("--image", str(path))]
    shown = run_infer(clip.root, "--model_path", str(clip.images), *images, "--quiet")
    assert "Images:\n#  image\n" in shown.stdout
    printed = json_of(run_infer(clip.root, "--model_path", str(clip.images), *images, "--format", "json"))
    assert printed["similarities"][0][1] == pytest.approx(float(clip.expected()[0] @ clip.expected()[1]), abs=1e-5)
    assert printed["answers"][0]["vector"] == pytest.approx(clip.expected()[0].tolist(), abs=1e-5)


def test_a_corpus_of_pictures_is_encoded_and_resumed(clip: Clip, tmp_path: Path) -> None:
    """A damaged file is counted; an image of another size since is noticed, though its name is the same."""
    pages = tmp_path / "pages"
    shutil.copytree(clip.root / "pictures", pages)
    (pages / "0.5.png").write_text("no image")
    report = encode_corpus(clip.images, pages, tmp_path / "vectors", CorpusOptions(shard_size=2))
    assert (report.num_texts, report.dimensions) == (4, 16)
    assert report.rejects == {"is not a readable image": 1}
    files = [tmp_path / "vectors" / name for name in report.files if name.endswith(".npy")]
    vectors = np.concatenate([np.load(file) for file in sorted(files)])
    np.testing.assert_allclose(vectors, clip.expected(), atol=1e-5)
    again = encode_corpus(clip.images, pages, tmp_path / "vectors", CorpusOptions(shard_size=2))
    assert (again.resumed, again.num_encoded) == (True, 0)
    size = (pages / "0.png").stat().st_size
    (pages / "0.png").write_bytes(bytes(size + 1))
    with pytest.raises(OutputExistsError, match="was written by another command \\(--input, in bytes: "):
        encode_corpus(clip.images, pages, tmp_path / "vectors", CorpusOptions(shard_size=2))
    for options in (CorpusOptions(prompt="a"), CorpusOptions(calibration=tmp_path, vectors_as="int8")):
        with pytest.raises(InputError, match="texts, but the corpus consists of images"):
            encode_corpus(clip.images, pages, tmp_path / "others", options)


def test_a_corpus_of_pictures_is_stored_in_bits(clip: Clip, tmp_path: Path) -> None:
    """As one of texts is."""
    options = CorpusOptions(output_format="jsonl", vectors_as="ubinary")
    encode_corpus(clip.images, clip.root / "pictures", tmp_path / "bits", options)
    (file,) = (tmp_path / "bits").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["id"] for row in rows] == [path.name for path in clip.pictures]
    assert [row["vector"] for row in rows] == np.packbits(clip.expected() > 0, axis=1).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no images to run"),
        ({"texts": ("cat",)}, "takes images, and --text was passed"),
        ({"images": ("missing.png",)}, "no such image: missing.png"),
        ({"images": ("0.png",), "top_k": 3}, "--top_k was passed, which is for texts"),
        ({"images": ("0.png",), "representation": "sparse"}, "--representation was passed"),
        ({"images": ("0.png",), "normalize": False}, "--no_normalize was passed"),
        ({"images": ("0.png",), "text_model": Path("m.onnx")}, "--text_model was passed"),
        ({"images": ("0.png",), "query": "cat"}, "the model of texts is not named"),
    ],
)
def test_what_pictures_do_not_take_is_refused(clip: Clip, options: dict[str, Any], message: str) -> None:
    """By the name of the option."""
    with pytest.raises(InputError) as raised:
        run_texts(InferOptions(clip.images, **options))
    assert message in raised.value.message


def test_pictures_for_a_model_of_texts_are_refused(clip: Clip) -> None:
    """They would be left out."""
    with pytest.raises(InputError, match="takes no images, and --image"):
        run_texts(InferOptions(clip.texts, texts=("cat",), images=(str(clip.pictures[0]),)))


def test_sides_of_two_checkpoints_are_refused(clip: Clip, tmp_path: Path) -> None:
    """Their vectors have the same width, and no common space."""
    other = onnx.load(clip.texts)
    next(entry for entry in other.metadata_props if entry.key == "onnxtool.weights_sha256").value = "0" * 64
    onnx.save(other, tmp_path / "clip-texts.onnx")
    shutil.copytree(clip.root / "clip-texts", tmp_path / "clip-texts")
    options = InferOptions(clip.images, images=(str(clip.pictures[0]),), query="cat", text_model=clip.texts)
    run_texts(options)
    with pytest.raises(InputError, match="come from different weights"):
        run_texts(replace(options, text_model=tmp_path / "clip-texts.onnx"))


def test_an_image_processor_of_another_model_is_refused(clip: Clip, tmp_path: Path) -> None:
    """Its pixels are of another size."""
    write_processor(tmp_path, "CLIPImageProcessor", {**SIZES, "crop_size": 30})
    model = load_pictures(clip.images, model_name=str(tmp_path))
    with pytest.raises(InputError, match=r"makes pixel_values of \[3, 30, 30\] .* takes \[3, 32, 32\]"):
        model.encode(clip.pictures)


def test_a_side_of_sentence_transformers_ends_as_its_modules_say(clip: Clip, tmp_path: Path) -> None:
    """Its Transformer gives features as they are; a Normalize behind it scales them; another module is refused."""
    features = clip.expected()
    for path in clip.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    written = {
        "modality_config": {
            kind: {"method": f"get_{kind}_features", "method_output_name": "pooler_output"}
            for kind in ("text", "image")
        },
        "module_output_name": "sentence_embedding",
    }
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(written))

    def write_modules(*kinds: str) -> None:
        listed = [{"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" if n else ""}
                  for n, kind in enumerate(kinds)]  # fmt: skip
        (tmp_path / "modules.json").write_text(json.dumps(listed))

    write_modules("CLIPModel")
    export_side(tmp_path, tmp_path / "out" / "m.onnx", TASK_OF_PICTURES)
    vectors = encode(tmp_path / "out" / "m.onnx", clip.pictures)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).min() > 0.1
    np.testing.assert_allclose(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), features, atol=1e-5)
    with pytest.raises(CheckpointError, match="encodes texts and images separately"):
        export_model(ExportOptions(str(tmp_path), output=tmp_path / "out" / "both.onnx"))
    write_modules("Transformer", "Pooling")
    with pytest.raises(CheckpointError, match="computes Pooling after a model that gives one vector"):
        export_side(tmp_path, tmp_path / "out" / "n.onnx", TASK_OF_PICTURES)
    write_modules("Transformer")
    written["modality_config"]["image"]["method_output_name"] = "last_hidden_state"  # type: ignore[index]
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match="settings that onnxtool does not support: modality_config"):
        export_side(tmp_path, tmp_path / "out" / "n.onnx", TASK_OF_PICTURES)


def test_texts_whose_padding_counts_are_padded_to_one_length(clip: Clip, tmp_path: Path) -> None:
    """SigLIP reads the last token, and was trained on texts of one length."""
    config = transformers.SiglipConfig(
        text_config=TEXT | {"max_position_embeddings": 24, "bos_token_id": CLS, "eos_token_id": SEP},
        vision_config=VISION,
    )
    folder = with_tokenizer(save(transformers.SiglipModel(config).eval(), tmp_path / "siglip", spread=0.15))
    write_processor(folder, "SiglipImageProcessor", {"size": {"height": 32, "width": 32}})
    report = export_side(folder, tmp_path / "texts.onnx", "sentence-similarity")
    assert report.inputs[0].shape == ("batch_size", 24)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(["cat", "a cat"], padding="max_length", max_length=24, return_tensors="pt")
    with torch.inference_mode():
        features = transformers.SiglipModel.from_pretrained(folder).get_text_features(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        )
    expected = torch.nn.functional.normalize(features.pooler_output).numpy()
    np.testing.assert_allclose(np.asarray(load(tmp_path / "texts.onnx").encode(["cat", "a cat"])), expected, atol=1e-5)


def test_what_has_no_such_side_is_refused(clip: Clip, tmp_path: Path) -> None:
    """A model of texts has no images; a target or a head of texts takes no side."""
    bert = with_tokenizer(save(transformers.BertModel(transformers.BertConfig(**TEXT)), tmp_path / "bert"))
    with pytest.raises(ExportError, match="BertModel takes no images"):
        export_side(bert, tmp_path / "m.onnx", TASK_OF_PICTURES)
    with pytest.raises(ExportError, match="--head splade makes a file for sparse-encoding"):
        export_side(clip.folder, tmp_path / "m.onnx", TASK_OF_PICTURES, head="splade")
    with pytest.raises(TargetError, match="takes no side of an encoder of images"):
        export_side(clip.folder, tmp_path / "m", "sentence-similarity", target="fastembed")


def test_pictures_that_infer_would_not_prepare_are_refused_at_export(clip: Clip, tmp_path: Path) -> None:
    """No file is written that the tool itself cannot run, unless it is asked for."""
    folder = Path(shutil.copytree(clip.folder, tmp_path / "clip"))
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_processor_type": "ConvNextImageProcessor"}))
    with pytest.raises(CheckpointError, match="names the image processor ConvNextImageProcessor") as caught:
        export_side(folder, tmp_path / "m.onnx", TASK_OF_PICTURES)
    assert "--head embedding" in caught.value.hint


def test_a_model_that_compares_something_else_is_refused(
    clip: Clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its forward compares is found by running it."""
    own = transformers.CLIPModel.get_image_features

    @functools.wraps(own)
    def other(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        outputs.pooler_output = outputs.pooler_output.abs()
        return outputs

    forward = transformers.CLIPModel.forward

    @functools.wraps(forward)
    def whole(self: Any, **inputs: Any) -> Any:
        monkeypatch.setattr(transformers.CLIPModel, "get_image_features", own)
        return forward(self, **inputs)

    monkeypatch.setattr(transformers.CLIPModel, "get_image_features", other)
    monkeypatch.setattr(transformers.CLIPModel, "forward", whole)
    with pytest.raises(ExportError, match="does not compare what its get_image_features gives"):
        export_side(clip.folder, tmp_path / "m.onnx", TASK_OF_PICTURES)


class ColPali:
    """A tiny retriever of pages with both sides exported.

    Attributes:
        model: the PyTorch model.
        processor: the one of transformers, which makes pages and queries.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / "colpali"
        self.processor = save_colpali(self.folder)
        self.model = transformers.ColPaliForRetrieval.from_pretrained(self.folder).eval()
        self.pages, self.queries = root / "pages.onnx", root / "queries.onnx"
        self.report = export_side(self.folder, self.pages, TASK_OF_PICTURES)
        export_side(self.folder, self.queries, LATE_INTERACTION)

    def embed(self, **inputs: Any) -> Any:
        """Return what the model makes of what the processor makes."""
        with torch.inference_mode():
            return self.model(**self.processor(**inputs, return_tensors="pt")).embeddings


@pytest.fixture(scope="module")
def colpali(tmp_path_factory: pytest.TempPathFactory) -> ColPali:
    """Exported once."""
    return ColPali(tmp_path_factory.mktemp("pages"))


def test_pages_are_ranked_for_a_query_as_the_processor_scores_them(colpali: ColPali, clip: Clip) -> None:
    """A page is pixels alone; a query is written as the processor does; the score is MaxSim."""
    assert [(tensor.name, tensor.shape) for tensor in (*colpali.report.inputs, *colpali.report.outputs)] == [
        ("pixel_values", ("batch_size", 3, 32, 32)),
        ("token_embeddings", ("batch_size", 37, 8)),
    ]
    opened = [Image.open(path).convert("RGB") for path in clip.pictures]
    pages, query = colpali.embed(images=opened), colpali.embed(text=["a cat sat"])
    found = load_pictures(colpali.pages).encode(clip.pictures)
    assert isinstance(found, TokenVectors)
    np.testing.assert_allclose(found.vectors.reshape(pages.shape), pages.numpy(), atol=1e-5)
    scores = colpali.processor.score_retrieval(list(query), list(pages))[0].numpy()
    options = InferOptions(
        colpali.pages, query="a cat sat", text_model=colpali.queries, images=tuple(map(str, clip.pictures))
    )
    report = run_texts(options)
    assert list(report.rankings[0].order) == np.argsort(-scores).tolist()
    np.testing.assert_allclose([answer.candidates[0].score for answer in report.answers], scores, atol=1e-4)
    assert report.answers[0].candidates[0].label == "maxsim"
    with pytest.raises(InputError, match="leave --prompt out|written as the checkpoint's processor does"):
        run_texts(replace(options, prompt="a"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "encodes pages and queries separately"),
        ({"task": TASK_OF_PICTURES, "head": "embedding"}, "the head embedding does not apply to a page retriever"),
        ({"task": TASK_OF_PICTURES, "target": "fastembed"}, "takes no side of an encoder of images"),
    ],
)
def test_what_a_retriever_of_pages_does_not_have_is_refused(
    colpali: ColPali, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    """A graph of both sides, another head, a target."""
    output = tmp_path / ("m" if "target" in options else "m.onnx")
    with pytest.raises((ExportError, TargetError), match=message):
        export_model(ExportOptions(str(colpali.folder), output=output, **options))  # type: ignore[arg-type]


def test_a_retriever_of_pages_with_modules_is_refused(colpali: ColPali, tmp_path: Path) -> None:
    """What sentence-transformers computes with it is not followed."""
    shutil.copytree(colpali.folder, tmp_path / "colpali")
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    (tmp_path / "colpali" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        CheckpointError, match="names Transformer, and of a retriever of pages onnxtool follows Transformer and Multi"
    ):
        export_side(tmp_path / "colpali", tmp_path / "m.onnx", TASK_OF_PICTURES)


def test_retrievers_whose_pages_are_not_prepared_are_refused_by_name(colpali: ColPali) -> None:
    """With the reason."""
    checkpoint: Any = SimpleNamespace(architecture="NeoMMEForRetrieval", task=TASK_OF_PICTURES)
    with pytest.raises(ExportError, match="NeoMMEForRetrieval is a page retriever .* only with torchvision"):
        restrict_to_pages(colpali.model, checkpoint)


def test_queries_of_another_processor_are_refused(colpali: ColPali, clip: Clip, tmp_path: Path) -> None:
    """They would be written otherwise."""
    for path in (colpali.queries, colpali.pages):
        shutil.copy(path, tmp_path)
        shutil.copytree(path.with_suffix(""), tmp_path / path.stem)
    file = tmp_path / "queries" / "processor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": "NeoMMEProcessor"}))
    options = InferOptions(
        tmp_path / "pages.onnx", query="a", text_model=tmp_path / "queries.onnx", images=(str(clip.pictures[0]),)
    )
    with pytest.raises(InputError, match="names the processor 'NeoMMEProcessor'"):
        run_texts(options)
    with pytest.raises(InputError, match="are a page retriever's, whose texts are queries for images"):
        load(colpali.queries)
