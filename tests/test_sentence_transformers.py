"""Inside sentence-transformers, an exported file gives what PyTorch gives, and refuses what no ONNX file can do."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel

import onnxtool
from onnxtool import sentence_transformers
from onnxtool.errors import (
    InputError,
    ModelFileError,
    OnnxtoolError,
    OutputExistsError,
    TargetError,
    TrainingError,
)
from onnxtool.export.targets.sentence_transformers import CLASS
from onnxtool.runtime.session import open_session
from tests.retrieval.checkpoints import CASES
from tests.workshop import Workshop

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, which these tests run as their users do
TEXTS = ["", "the weather is lovely today", "naïve café", "a text " * 70, "東京 is in Japan"]
ENCODERS = {
    "dense": SentenceTransformer,
    "sparse": SparseEncoder,
    "reranker": CrossEncoder,
    "late interaction": MultiVectorEncoder,
}


def export(checkpoint: Path, output: Path) -> Path:
    """Export for sentence-transformers."""
    settings: dict[str, Any] = {"target": "sentence-transformers", "exporter": "torchscript"}
    onnxtool.export_model(onnxtool.ExportOptions(str(checkpoint), output=output, **settings))
    return output


def answers(folder: Path, kind: str, **arguments: Any) -> list[np.ndarray[Any, Any]]:
    """Return what the encoder of this kind gives for the texts, in every way that it is asked."""
    encoder = ENCODERS[kind](str(folder), device="cpu", **arguments)
    if isinstance(encoder, CrossEncoder):
        return [np.asarray(encoder.predict([("a query", text) for text in TEXTS]))]
    if isinstance(encoder, MultiVectorEncoder):
        return [np.concatenate(part) for part in (encoder.encode_query(TEXTS), encoder.encode_document(TEXTS))]
    found = [encoder.encode(TEXTS), encoder.encode_query(TEXTS), encoder.encode_document(TEXTS)]
    return [part.to_dense().numpy() if isinstance(part, torch.Tensor) else part for part in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder whose vectors depend on its Dense module, exported, with its checkpoint beside it."""
    root = tmp_path_factory.mktemp("dense")
    make(root / "checkpoint", "Dense, Tanh")
    return export(root / "checkpoint", root / "exported")


def make(output: Path, name: str) -> str:
    """Save the checkpoint of tests/retrieval that is called `name`, and return its kind."""
    case = next(case for case in CASES if case.name == name)
    base = output.with_name("base")
    for place in (output, base):
        place.mkdir()
    case.make(output, base)
    return case.kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tiny-encoder", "dense"),  # these three have no modules.json: sentence-transformers decides on modules
        ("tiny-splade", "sparse"),
        ("tiny-reranker", "reranker"),
        ("inference-free SPLADE", ""),
        ("PyLate", ""),
        ("decoder", ""),
    ],
)
def test_an_exported_file_gives_what_pytorch_gives(workshop: Workshop, tmp_path: Path, name: str, kind: str) -> None:
    """Through the classes of sentence-transformers, without trust_remote_code."""
    checkpoint = workshop.checkpoint(name) if kind else tmp_path / "checkpoint"
    kind = kind or make(checkpoint, name)
    found = answers(export(checkpoint, tmp_path / "m"), kind)
    for ours, theirs in zip(found, answers(checkpoint, kind), strict=True):
        assert theirs.std() > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)  # float32, another order of sums


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_file_in_the_hubs_cache_is_loaded_with_its_data(folder: Path, tmp_path: Path) -> None:
    """Both are links into the blobs; the name of the data is in the file alone."""
    repository = tmp_path / "models--org--dense"
    snapshot, blobs = repository / "snapshots" / "ab12", repository / "blobs"
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("ab12")
    path = snapshot / "onnx" / "model.onnx"
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    blobs.mkdir()
    for file in list(path.parent.iterdir()):
        file.rename(blobs / f"hash of {file.name}")
        file.symlink_to(blobs / f"hash of {file.name}")
    where = {"cache_dir": str(tmp_path), "local_files_only": True}
    found = sentence_transformers._find_file("org/dense", where)
    assert found.samefile(blobs / "hash of model.onnx")
    assert open_session(found, provider="cpu").model.external_locations == ("model.onnx_data",)


def test_modules_before_and_behind_the_transformer_stay_those_of_the_checkpoint(folder: Path) -> None:
    """And so do lengths; onnxtool reads the folder as well."""
    model = SentenceTransformer(str(folder), truncate_dim=8)
    theirs = SentenceTransformer(str(folder.with_name("checkpoint")), device="cpu", truncate_dim=8)
    assert [type(module).__name__ for module in model] == [type(module).__name__ for module in theirs]
    assert model.max_seq_length == theirs.max_seq_length
    assert model.get_backend() == "onnx"
    assert model.device == torch.device("cpu")
    np.testing.assert_allclose(model.encode(TEXTS), theirs.encode(TEXTS), rtol=0, atol=1e-5)
    read = np.asarray(onnxtool.load(folder / "onnx" / "model.onnx").encode(TEXTS))
    np.testing.assert_allclose(read[:, :8], theirs.encode(TEXTS), rtol=0, atol=1e-5)
    model.max_seq_length = 4
    assert not np.allclose(model.encode(TEXTS[3:4]), theirs.encode(TEXTS[3:4]), atol=1e-3)


def test_a_model_is_saved_pickled_and_loaded_again(folder: Path, tmp_path: Path) -> None:
    """A process of a pool gets it as a pickle, and opens a session of its own."""
    model = SentenceTransformer(
        str(folder), backend="onnx", model_kwargs={"provider": "CPUExecutionProvider", "threads": 1}
    )
    expected = model.encode(TEXTS)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).encode(TEXTS), expected)  # noqa: S301  our own
    model.save_pretrained(str(tmp_path / "saved"))
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path / "saved")).encode(TEXTS), expected)
    assert json.loads((tmp_path / "saved" / "modules.json").read_text())[0]["type"] == CLASS
    read = np.asarray(onnxtool.load(tmp_path / "saved" / "onnx" / "model.onnx").encode(TEXTS))
    np.testing.assert_allclose(read, expected, rtol=0, atol=1e-5)


def test_a_file_that_was_replaced_is_not_taken_for_the_loaded_one(folder: Path, tmp_path: Path) -> None:
    """A copy, a process of a pool and a saved folder would compute something else than the session in memory."""
    copied = Path(shutil.copytree(folder, tmp_path / "m"))
    model = SentenceTransformer(str(copied))
    pickled = pickle.dumps(model)
    copy.deepcopy(model)
    graph = copied / "onnx" / "model.onnx"
    other = onnx.load(graph)
    other.doc_string = "another"
    onnx.save(other, graph)
    ways: tuple[Callable[[], object], ...] = (
        lambda: copy.deepcopy(model),
        lambda: pickle.loads(pickled),  # noqa: S301  our own
        lambda: model.save_pretrained(str(tmp_path / "saved")),
    )
    for take in ways:
        with pytest.raises(InputError, match=r"model\.onnx was replaced or removed since it was loaded"):
            take()


@pytest.mark.parametrize("encoder", [SparseEncoder, MultiVectorEncoder])
def test_a_folder_of_another_class_is_refused(folder: Path, encoder: Any) -> None:
    """sentence-transformers would add modules with random weights."""
    with pytest.raises(InputError, match=f"is for SentenceTransformer, and {encoder.__name__} would add modules"):
        encoder(str(folder))


def test_another_file_of_the_folder_is_loaded_by_its_name(folder: Path, tmp_path: Path) -> None:
    """As in sentence-transformers' own ONNX backend; it does not replace the one that it lies beside."""
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    options = onnxtool.OptimizeOptions(copy / "onnx" / "model.onnx", precision="fp16")
    name = Path(onnxtool.optimize_model(options).output).name
    for file_name in (name, f"onnx/{name}"):
        model = SentenceTransformer(str(copy), model_kwargs={"file_name": file_name})
        found = model.encode(TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, SentenceTransformer(str(copy)).encode(TEXTS), rtol=0, atol=2e-3)
    with pytest.raises(OutputExistsError, match=r"model\.onnx is beside"):
        model.save_pretrained(str(copy))


def test_saving_a_model_whose_file_is_gone_is_one_error(folder: Path, tmp_path: Path) -> None:
    """And nothing half-written is left where it was to go."""
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    model = SentenceTransformer(str(copy))
    shutil.rmtree(copy / "onnx")
    with pytest.raises(OnnxtoolError, match=r"model\.onnx"):
        model.save_pretrained(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "also"),
    [
        ({"backend": "openvino"}, "openvino was asked for", ValueError),
        ({"backend": "no_such_backend"}, "no_such_backend was asked for", ValueError),
        (
            {"model_kwargs": {"dtype": "float16", "attn_implementation": "sdpa"}},
            "has attn_implementation, dtype, which",
            TypeError,
        ),
        ({"model_kwargs": {"export": True}}, "has export, which means nothing", TypeError),
        ({"model_kwargs": {"provider": "npu"}}, "'npu' is not one of", ValueError),
        ({"model_kwargs": {"threads": -1}}, "threads is -1", ValueError),
        ({"model_kwargs": {"file_name": "model_O2.onnx"}}, r"no onnx/model_O2\.onnx and no model_O2\.onnx", OSError),
    ],
)
def test_what_an_onnx_file_cannot_be_told_is_refused(
    folder: Path, arguments: dict[str, Any], message: str, also: type[Exception]
) -> None:
    """With a way out, which a traceback shows; callers of sentence-transformers catch what it raises itself."""
    with pytest.raises(InputError, match=message) as caught:
        SentenceTransformer(str(folder), **arguments)
    assert isinstance(caught.value, also)
    assert "hint: " in str(caught.value)


def test_training_and_another_precision_are_refused(folder: Path) -> None:
    """Moving to a device changes nothing."""
    model = SentenceTransformer(str(folder))
    expected = model.encode(TEXTS)
    with pytest.raises(TrainingError, match="cannot train"):
        model.train()
    with pytest.raises(InputError, match=r"does not become torch\.float16"):
        model.half()
    np.testing.assert_array_equal(model.float().to("cpu").encode(TEXTS), expected)


def test_without_this_module_sentence_transformers_asks_for_trust(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And says what to install where onnxtool is not there or too old."""
    assert sentence_transformers.CLASS == CLASS
    monkeypatch.setattr(BaseModel, "_module_classes", {})
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(folder))
    assert type(SentenceTransformer(str(folder), trust_remote_code=True)[0]) is sentence_transformers.Transformer
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    path = copy / "config_sentence_transformers.json"
    path.write_text(path.read_text().replace(f">={onnxtool.__version__}", ">=99"))
    with pytest.raises(ImportError, match="onnxtool-cli>=99, but onnxtool-cli=="):
        SentenceTransformer(str(copy))


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("onnx/model.onnx", b"", ModelFileError),
        ("onnx/model.onnx", None, InputError),
        ("sentence_bert_config.json", b'{"model_kwargs": {"file_name": "../../model.onnx"}}', ValueError),
        ("sentence_bert_config.json", b'{"model_kwargs": {"provider": ["cpu"]}}', InputError),
        ("sentence_bert_config.json", b'{"model_kwargs": {"threads": "all"}}', InputError),
    ],
)
def test_a_damaged_or_hostile_folder_is_one_error(
    folder: Path, tmp_path: Path, file: str, content: bytes | None, error: type[Exception]
) -> None:
    """Nothing outside the folder is read, whatever its files say."""
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    shutil.copyfile(folder / "onnx" / "model.onnx", tmp_path / "model.onnx")
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_bytes(content)
    with pytest.raises(error):
        SentenceTransformer(str(copy))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WeightedLayerPooling", "has the modules WeightedLayerPooling"),
        ("states of the last layer but one", r"reads \['hidden_states', -2\] for text"),
        ("decoder, padding left, fixed, attend False", "pads on the left and expands queries"),
        ("Stanford", "has the layout of Stanford's ColBERT"),
        ("decoder without modules", "has no modules, by which sentence-transformers would know"),
        ("StaticEmbedding", "takes no table of vectors"),
    ],
)
def test_a_checkpoint_that_it_would_compute_otherwise_is_refused(tmp_path: Path, name: str, message: str) -> None:
    """By name; so is one whose own folder would be changed."""
    make(tmp_path / "checkpoint", name)
    with pytest.raises(OnnxtoolError, match=message):
        export(tmp_path / "checkpoint", tmp_path / "m")


def test_the_checkpoints_own_folder_is_not_changed(workshop: Workshop, tmp_path: Path) -> None:
    """Its modules.json would name the class of onnxtool, and PyTorch's weights would lie there unused."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint"))
    before = sorted(checkpoint.rglob("*"))
    with pytest.raises(TargetError, match="files of .* itself would change"):
        export(checkpoint, checkpoint)
    assert sorted(checkpoint.rglob("*")) == before
