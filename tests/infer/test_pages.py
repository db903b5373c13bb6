"""Pages of any size are encoded and ranked by ColModernVBERT and ColQwen2 as transformers computes them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from PIL import Image

from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint.tasks import LATE_INTERACTION, TASK_OF_PICTURES
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import ExportError, InputError
from onnxtool.export.modalities.pages import restrict_to_pages
from onnxtool.infer import InferOptions, run_texts
from onnxtool.infer.pictures import load_pictures
from onnxtool.infer.vectors import TokenVectors
from onnxtool.runtime.session import open_session
from tests.retrieval.tiny_pages import colmodernvbert, colqwen2, embed, write_pages

MAKERS: dict[str, Callable[[Path], Any]] = {"ColModernVBert": colmodernvbert, "ColQwen2": colqwen2}


@dataclass
class Retriever:
    """A retriever with both sides exported.

    Attributes:
        report: of the export of pages.
        vectors: those of `pages` by transformers.
    """

    folder: Path
    processor: Any
    model: Any
    report: Any
    pages: list[Path]
    vectors: list[Any]

    @property
    def path(self) -> Path:
        return self.folder.with_suffix(".onnx")


def make(name: str, root: Path) -> Retriever:
    """Make a retriever and export its side of pages."""
    folder = root / "checkpoint"
    processor = MAKERS[name](folder)
    model = getattr(transformers, f"{name}ForRetrieval").from_pretrained(folder).eval()
    report = export_model(ExportOptions(str(folder), output=folder.with_suffix(".onnx"), task=TASK_OF_PICTURES))
    pages = write_pages(root / "pages")
    return Retriever(folder, processor, model, report, pages, embed(model, processor, pages))


@pytest.fixture(scope="module")
def retrievers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Retriever]:
    """Each is made once."""
    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=MAKERS)
def retriever(request: pytest.FixtureRequest, retrievers: Callable[[str], Retriever]) -> Retriever:
    """One after the other."""
    return retrievers(request.param)


def test_a_file_of_pages_takes_what_the_processor_gives(retriever: Retriever) -> None:
    """In batches of pages of several sizes, which is how another consumer may feed it; metadata says whose it is."""
    assert retriever.report.verification.passed
    assert retriever.report.metadata["onnxtool.processor"] == type(retriever.processor).__name__
    assert int(retriever.report.metadata["onnxtool.image_token_id"]) == retriever.processor.image_token_id
    opened = [Image.open(page).convert("RGB") for page in retriever.pages]
    inputs = retriever.processor.process_images(images=opened)
    with torch.inference_mode():
        expected = retriever.model(**inputs).embeddings.numpy()
    feeds = {info.name: inputs[info.name].numpy() for info in retriever.report.inputs}
    found = open_session(retriever.path).run(feeds)["token_embeddings"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_vectors_are_those_of_transformers(retriever: Retriever) -> None:
    """Of every token of every page."""
    found = load_pictures(retriever.path).encode(retriever.pages)
    assert isinstance(found, TokenVectors)
    for number, expected in enumerate(retriever.vectors):
        np.testing.assert_allclose(found.row(number), expected.numpy(), atol=1e-5)


# The side of queries is made by one function for all of them.
@pytest.mark.parametrize("retriever", ["ColQwen2"], indirect=True)
def test_pages_are_ranked_for_a_query_as_the_processor_scores_them(retriever: Retriever, tmp_path: Path) -> None:
    """By the MaxSim of the tokens of a query, which is written as the processor does."""
    queries = ExportOptions(str(retriever.folder), output=tmp_path / "queries.onnx", task=LATE_INTERACTION)
    export_model(replace(queries, exporter="torchscript", verify=False))
    with torch.inference_mode():
        query = retriever.model(**retriever.processor.process_queries(text=["a cat sat"])).embeddings
    # One by one: of pages together, the padding of shorter ones is as similar as a vector of zeros.
    scores = np.array([float(retriever.processor.score_retrieval(query, [page])) for page in retriever.vectors])
    folder = retriever.pages[0].parent
    report = run_texts(InferOptions(retriever.path, query="a cat sat", text_model=queries.output, input_path=folder))
    assert list(report.rankings[0].order) == np.argsort(-scores).tolist()
    np.testing.assert_allclose([answer.candidates[0].score for answer in report.answers], scores, atol=1e-4)


def test_a_corpus_of_pages_counts_damaged_files(retriever: Retriever, tmp_path: Path) -> None:
    """And holds the vectors of all others, ragged."""
    pages = tmp_path / "pages"
    shutil.copytree(retriever.pages[0].parent, pages)
    (pages / "damaged.png").write_text("no image")
    report = encode_corpus(retriever.path, pages, tmp_path / "vectors", CorpusOptions())
    assert (report.num_texts, report.dimensions) == (len(retriever.pages), 8)
    assert report.rejects == {"is not a readable image": 1}
    vectors = np.load(tmp_path / "vectors" / "part-00000.npy")
    np.testing.assert_allclose(vectors, torch.cat(retriever.vectors).numpy(), atol=1e-5)
    ends = np.load(tmp_path / "vectors" / "part-00000.indptr.npy")
    assert np.diff(ends).tolist() == list(map(len, retriever.vectors))


@pytest.mark.parametrize(
    ("retriever", "change", "message"),
    [
        ("ColModernVBert", {"image_seq_len": 3}, "the processor writes 39 tokens for what is seen of"),
        ("ColModernVBert", {"image_processor.max_image_size": {"longest_edge": 8}}, "the image processor makes"),
        (
            "ColModernVBert",
            {"processor_class": "ColPaliProcessor", "image_seq_len": None},
            "has another processor than",
        ),
        ("ColModernVBert", {"visual_prompt_prefix": "no image"}, "the processor "),
        ("ColQwen2", {"image_processor.merge_size": 1}, "the processor writes"),
        ("ColQwen2", {"image_processor.patch_size": 2}, "the image processor makes pixel_values of"),
    ],
    indirect=["retriever"],
)
def test_a_processor_of_another_model_is_refused(
    retriever: Retriever, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Tokens would stand for the pixels of others."""
    folder = tmp_path / retriever.path.stem
    shutil.copytree(retriever.path.with_suffix(""), folder)
    shutil.copy(retriever.path, tmp_path)
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    for key, value in change.items():
        place = settings["image_processor"] if "." in key else settings
        place[key.rpartition(".")[2]] = value
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError) as raised:
        load_pictures(tmp_path / retriever.path.name).encode(retriever.pages[:1])
    assert message in raised.value.message


def test_metadata_that_says_no_numbers_is_refused(retriever: Retriever, tmp_path: Path) -> None:
    """It is untrusted."""
    shutil.copytree(retriever.path.with_suffix(""), tmp_path / retriever.path.stem)
    model = onnx.load(retriever.path)
    next(entry for entry in model.metadata_props if entry.key == "onnxtool.image_tokens").value = "1/0"
    onnx.save(model, tmp_path / retriever.path.name)
    with pytest.raises(InputError, match="and no numbers"):
        load_pictures(tmp_path / retriever.path.name)


@pytest.mark.parametrize("retriever", ["ColModernVBert"], indirect=True)
@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        ("attention_mask", "takes image_grid_thw, and its image processor gives input_ids, attention_mask, pixel_"),
        ("input_ids", "is no image side of a dual encoder or of a retriever of pages"),
    ],
)
def test_a_graph_that_takes_what_its_processor_does_not_give_is_refused(
    retriever: Retriever, renamed: str, message: str, tmp_path: Path
) -> None:
    """Its metadata says something else."""
    shutil.copytree(retriever.path.with_suffix(""), tmp_path / retriever.path.stem)
    model = onnx.load(retriever.path)
    for node in model.graph.node:
        node.input[:] = ["image_grid_thw" if name == renamed else name for name in node.input]
    next(value for value in model.graph.input if value.name == renamed).name = "image_grid_thw"
    onnx.save(model, tmp_path / retriever.path.name)
    with pytest.raises(InputError) as raised:
        load_pictures(tmp_path / retriever.path.name).encode(retriever.pages[:1])
    assert message in raised.value.message


def test_another_vision_tower_is_refused_by_name() -> None:
    """That of Qwen2.5-VL attends within windows."""
    model: Any = torch.nn.Sequential()
    model.vlm = SimpleNamespace(visual=torch.nn.Identity())
    checkpoint: Any = SimpleNamespace(architecture="ColQwen2ForRetrieval", task=TASK_OF_PICTURES)
    with pytest.raises(ExportError, match="the vision tower of this Sequential is Identity"):
        restrict_to_pages(model, checkpoint)


def test_a_forward_that_differs_from_the_models_own_is_refused(
    retriever: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later transformers may compute something else."""
    model = type(retriever.model)
    whole = model.forward

    def other(self: Any, **inputs: Any) -> Any:
        outputs = whole(self, **inputs)
        outputs.embeddings = outputs.embeddings * (1.0 if "pixel_values" in inputs else 2.0)
        return outputs

    monkeypatch.setattr(model, "forward", other)
    with pytest.raises(ExportError, match="computes other vectors of pages"):
        export_model(ExportOptions(str(retriever.folder), output=tmp_path / "m.onnx", task=TASK_OF_PICTURES))
