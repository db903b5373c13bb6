"""An export holds what was asked for, says where it comes from, and is verified."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer

import onnxtool.export.run
import onnxtool.export.tracing
from onnxtool import ExportOptions, export_model, reading
from onnxtool.errors import ExportError, OnnxtoolError, OutputExistsError, OutputWriteError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import recognize_head
from onnxtool.export.preparation import Request, prepare
from onnxtool.export.report import ExportReport
from onnxtool.export.run import _figure
from onnxtool.export.sidecar_files import write_sidecar_files
from onnxtool.export.source import Source
from onnxtool.export.tracing import EXPORTERS, trace_torchscript
from onnxtool.infer import load
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import STEPS_KEY, VERIFIED_LENGTH_KEY, License
from onnxtool.progress import listening
from onnxtool.runtime.providers import highest_opset
from onnxtool.summary import summarize_model
from tests.workshop import WORDS, Workshop, make_shallow

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def report(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """An export of the SPLADE-shaped model as it is, without its head."""
    output = tmp_path_factory.mktemp("export") / "tiny-splade.onnx"
    return export_model(ExportOptions(str(workshop.checkpoint("tiny-splade")), output=output, head="logits"))


def unverified(checkpoint: Path, output: Path, **options: Any) -> ExportReport:
    """Export by the exporter that is quickest, and compare with nothing."""
    return export_model(ExportOptions(str(checkpoint), output=output, exporter="torchscript", verify=False, **options))


TEXTS = (
    "The weather is lovely today.",
    "Paris is the capital of France, and its largest city.",
    "How do I reset my password?",
    "A train leaves for Berlin at noon.",
)


@pytest.fixture(scope="module")
def shallow(workshop: Workshop, minilm: Path) -> Path:
    """The sentence encoder with trained weights: its first layer alone."""
    return workshop.made("shallow", lambda folder: make_shallow(minilm, folder, layers=1, words=WORDS))


@pytest.fixture(scope="module")
def embedder(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """An export of the sentence encoder with trained weights, whose vectors are cut."""
    output = tmp_path_factory.mktemp("export") / "m.onnx"
    return export_model(ExportOptions(str(shallow), output=output, dimensions=64, exporter="torchscript"))


def test_the_head_that_a_checkpoint_was_trained_with_is_put_on(workshop: Workshop, tmp_path: Path) -> None:
    """Its card's tags say SPLADE; the report says that this was the reason, and how to leave it out."""
    report = unverified(workshop.checkpoint("tiny-splade"), tmp_path / "m.onnx")
    assert [(tensor.name, tensor.shape) for tensor in report.outputs] == [("sparse", ("batch_size", WORDS))]
    assert report.head == "splade"
    assert any("tags name splade" in note and "--head logits" in note for note in report.notes)


def without_card(workshop: Workshop, folder: Path) -> Path:
    """Copy the SPLADE-shaped model as a script of training saves it."""
    return shutil.copytree(workshop.checkpoint("tiny-splade"), folder, ignore=shutil.ignore_patterns("README.md"))


@pytest.mark.parametrize(
    ("name", "options", "made", "note"),
    [
        ("splade-tiny", {}, ("splade", "sparse-encoding"), "it is called splade-tiny; --head logits leaves the logits"),
        ("splade-tiny", {"task": "fill-mask"}, ("logits", "fill-mask"), ""),
        ("tiny", {}, ("logits", "fill-mask"), "no head was added: .* if it is a SPLADE, pass --head splade"),
        ("tiny", {"task": "sparse-encoding"}, ("splade", "sparse-encoding"), ""),
        ("tiny", {"task": "fill-mask", "head": "splade"}, ("splade", "sparse-encoding"), ""),
    ],
)
def test_a_masked_language_model_without_a_card_is_what_its_name_or_a_user_says(
    workshop: Workshop, tmp_path: Path, name: str, options: dict[str, Any], made: tuple[str, str], note: str
) -> None:
    """What a user says needs no note; what was found out, or could not be, is said with the way out."""
    checkpoint = without_card(workshop, tmp_path / name)
    plan = prepare(Request.of(ExportOptions(str(checkpoint), output=tmp_path / "m.onnx", **options))).plan
    assert (plan.head_name, plan.task) == made
    assert len(plan.reasons) == bool(note)
    assert all(re.search(note, one) for one in plan.reasons)


def test_a_task_that_the_checkpoint_was_not_trained_for_is_refused(minilm: Path, tmp_path: Path) -> None:
    """Rather than exported with the head of another one."""
    with pytest.raises(ExportError, match="--task late-interaction was passed, .* is for sentence-similarity"):
        unverified(minilm, tmp_path / "m.onnx", task="late-interaction")
    with pytest.raises(ExportError, match="--head splade makes a file for sparse-encoding, but --task text-class"):
        unverified(minilm, tmp_path / "m.onnx", task="text-classification", head="splade")


def test_a_snapshot_of_the_hubs_cache_is_the_model_of_its_id(workshop: Workshop, tmp_path: Path) -> None:
    """It is called by the id, and stamped with id and commit; a link to it gives the name, as of any folder."""
    snapshot = tmp_path / "hub" / "models--naver--splade-x" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    without_card(workshop, snapshot)
    (tmp_path / "linked").symlink_to(snapshot)
    for folder, name in ((snapshot, "splade-x"), (tmp_path / "linked", "linked")):
        source = Source.find(f"{folder}/")
        assert (source.name, source.origin) == (name, "naver/splade-x")
        assert Checkpoint.open(source).revision == "0123abc"
        assert recognize_head(source, "BertForMaskedLM").name == "splade"


def test_the_outputs_of_a_splade_checkpoint_are_logits(report: ExportReport) -> None:
    """Axes carry their names in the file, not only in the report."""
    model = onnx.load(report.output)
    (output,) = model.graph.output
    dims = [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim]
    assert (output.name, dims) == ("logits", ["batch_size", "sequence", WORDS])
    for value in model.graph.input:
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["batch_size", "sequence"]


def test_answers_equal_those_of_pytorch_on_text(report: ExportReport, workshop: Workshop) -> None:
    """An oracle of its own: transformers as its documentation uses it, and a plain session."""
    folder = workshop.checkpoint("tiny-splade")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokens = tokenizer(
        ["what is AI?", "a longer text about retrieval, with more tokens"], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**tokens).logits.numpy()
    feeds = {name: tensor.numpy() for name, tensor in tokens.items()}
    (logits,) = ort.InferenceSession(report.output, providers=["CPUExecutionProvider"]).run(None, feeds)
    real = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(logits[real], expected[real], atol=1e-4, rtol=0)


def test_verification_covers_shapes_and_masks(report: ExportReport) -> None:
    """At least six cases, ragged ones among them, within the tolerance."""
    assert report.verification is not None
    assert report.verification.passed
    assert report.verification.max_abs_error <= 1e-4
    assert len(report.verification.cases) >= 6
    assert sum("ragged" in case.description for case in report.verification.cases) >= 2
    assert {case.inputs["input_ids"] for case in report.verification.cases} >= {(1, 8), (2, 1), (1, 128)}
    # These weights would show a wrong mask: otherwise the ragged cases would show nothing.
    assert report.verification.mask_effect is not None
    assert report.verification.mask_effect > 100 * report.verification.atol


def test_metadata_says_what_the_model_is_and_where_it_comes_from(report: ExportReport, workshop: Workshop) -> None:
    """The names of the first three are those that onnxruntime's tutorials use."""
    metadata = ModelFile.open(Path(report.output)).metadata
    weights = (workshop.checkpoint("tiny-splade") / "model.safetensors").read_bytes()
    expected = {
        "model_type": "bert",
        "num_heads": "4",
        "hidden_size": "32",
        "num_layers": "2",
        "onnxtool.source": "tiny-splade",
        "onnxtool.task": "sparse-encoding",
        "onnxtool.head": "logits",
        "onnxtool.exporter": "torchscript",
        "onnxtool.files": "tiny-splade",
        "onnxtool.max_length": "128",
        "onnxtool.weights_sha256": hashlib.sha256(hashlib.sha256(weights).digest()).hexdigest(),
    }
    assert {key: metadata.get(key) for key in expected} == expected
    assert f"torch {torch.__version__}" in metadata["onnxtool.versions"]
    assert "onnxtool.date" not in metadata


def test_the_step_is_stamped_with_its_figures(report: ExportReport) -> None:
    """Whoever gets the file can see that it was verified."""
    (step,) = ModelFile.open(Path(report.output)).steps
    assert report.verification is not None
    assert step["step"] == "export"
    assert step["verified"] is True
    assert step["max_abs_error"] == report.verification.max_abs_error
    assert step["cases"] == len(report.verification.cases)


def test_tokenizer_and_config_lie_beside_the_file(report: ExportReport, workshop: Workshop) -> None:
    """Byte for byte those of the checkpoint."""
    folder, checkpoint = Path(report.files), workshop.checkpoint("tiny-splade")
    assert folder == Path(report.output).with_suffix("")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()


def test_the_file_is_valid_and_its_nodes_are_named_by_their_modules(report: ExportReport, workshop: Workshop) -> None:
    """Profiles can be read by layer; exporters write stack traces with paths of the machine on every node."""
    onnx.checker.check_model(report.output, full_check=True)
    content = Path(report.output).read_bytes()
    assert b"site-packages" not in content
    assert str(workshop.folder).encode() not in content
    names = [node.name for node in onnx.load(report.output, load_external_data=False).graph.node]
    assert "bert.encoder.layer.1.attention.self.query/MatMul" in names
    assert len(set(names)) == len(names)


EXPORT_ALL = """
import gc, sys
gc.disable()  # as `onnxtool export` does
from onnxtool import ExportOptions, export_model
for exporter in ("dynamo", "torchscript"):
    output = f"{exporter}/tiny-encoder.onnx"
    export_model(ExportOptions(sys.argv[1], output=output, exporter=exporter, verify=False))
"""


def test_the_same_export_is_the_same_file(workshop: Workshop, tmp_path: Path) -> None:
    """No time, no path and no order of a process's own goes into it: two processes, two folders, two hash seeds.

    But for the figures of the verification: what a process ran before moves the last digits of measured errors.
    """
    checkpoint = str(workshop.checkpoint("tiny-encoder"))
    variables = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", EXPORT_ALL, checkpoint], cwd=tmp_path, env=variables, check=True)
    for exporter in ("dynamo", "torchscript"):
        written = (tmp_path / exporter / "tiny-encoder.onnx", workshop.exported("tiny-encoder", exporter=exporter))
        ours, theirs = (onnx.load(path) for path in written)
        for model in (ours, theirs):
            kept = [one for one in model.metadata_props if one.key not in (STEPS_KEY, VERIFIED_LENGTH_KEY)]
            del model.metadata_props[:]
            model.metadata_props.extend(kept)
        assert ours.SerializeToString() == theirs.SerializeToString()


def test_a_date_is_stamped_only_where_it_is_given(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the convention of reproducible builds."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    report = unverified(workshop.checkpoint("tiny-mlm"), tmp_path / "m.onnx")
    assert report.metadata["onnxtool.date"] == "2023-11-14"
    assert report.verification is None
    assert ModelFile.open(tmp_path / "m.onnx").steps[0]["verified"] is False


@pytest.mark.parametrize("missing", ["vocab.txt", "tokenizer.json"])
def test_files_of_the_tokenizer_are_written_where_the_checkpoint_has_none(
    workshop: Workshop, tmp_path: Path, missing: str
) -> None:
    """Anserini reads a plain vocab.txt, and the tokenizers library a tokenizer.json, which neither cuts nor pads."""
    folder = Path(shutil.copytree(workshop.checkpoint("tiny-mlm"), tmp_path / "checkpoint"))
    original = (folder / missing).read_text()
    (folder / missing).unlink()
    tokenizer = Checkpoint.open(Source.find(str(folder))).load_tokenizer()
    write_sidecar_files(Source.find(str(folder)), tokenizer, tmp_path / "m", tmp_path / "existing")
    written = (tmp_path / "m" / missing).read_text()
    if missing == "vocab.txt":
        assert written == original
    else:
        assert (json.loads(written)["truncation"], json.loads(written)["padding"]) == (None, None)


def test_an_export_beside_its_own_checkpoint_leaves_the_checkpoint_alone(workshop: Workshop, tmp_path: Path) -> None:
    """models/NAME may be both the source and the folder of sidecar files."""
    folder = Path(shutil.copytree(workshop.checkpoint("tiny-mlm"), tmp_path / "tiny-mlm"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    unverified(folder, tmp_path / "tiny-mlm.onnx")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_splade_head_gives_the_published_weights(workshop: Workshop, exporter: str) -> None:
    """log(1 + relu(logits)), largest over real tokens, as [B, V]."""
    path = workshop.exported("tiny-splade", exporter=exporter, head="splade")
    folder = workshop.checkpoint("tiny-splade")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokens = tokenizer(["one", "rather more words than that"], padding=True, return_tensors="pt")
    with torch.no_grad():
        weights = torch.log1p(torch.relu(model(**tokens).logits)) * tokens["attention_mask"].unsqueeze(-1)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (sparse,) = session.run(["sparse"], {name: tensor.numpy() for name, tensor in tokens.items()})
    np.testing.assert_allclose(sparse, weights.max(dim=1).values.numpy(), atol=1e-4, rtol=0)


def test_where_one_exporter_fails_the_next_is_used_and_said(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing falls back in silence. The folder in which files are staged, which is gone then, is not named."""

    def fail(*_arguments: Any) -> Any:
        raise RuntimeError(f"data-dependent guard in {tmp_path}/.m.onnx.0123abcd.partial/m.onnx")

    # The next one traces as the first does, in a tenth of its time.
    rows = tuple(replace(row, trace=fail if row.name == "torchscript" else trace_torchscript) for row in EXPORTERS)
    monkeypatch.setattr(onnxtool.export.tracing, "EXPORTERS", rows)
    options = ExportOptions(str(workshop.checkpoint("tiny-encoder")), output=tmp_path / "m.onnx")
    report = export_model(options)
    assert report.exporter == "dynamo"
    (note,) = (note for note in report.notes if "instead" in note)
    assert "data-dependent guard in m.onnx" in note
    with pytest.raises(ExportError, match="data-dependent guard"):
        export_model(replace(options, output=tmp_path / "n.onnx", exporter="torchscript"))


def test_an_exporter_that_took_too_long_is_not_asked_again_until_axes_are_fixed(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attention leaves it as many sizes to think about, and its user waits as long once more."""

    def fail(model: Any, *_arguments: Any) -> Any:
        raise TimeoutError("not done after 180 s")

    monkeypatch.setattr(onnxtool.export.tracing, "EXPORTERS", tuple(replace(row, trace=fail) for row in EXPORTERS))
    said: list[str] = []
    with pytest.raises(ExportError, match="not done after 180 s"), listening(said.append):
        export_model(ExportOptions(str(workshop.checkpoint("tiny-mlm")), tmp_path / "m.onnx"))
    tried = [line.removeprefix("tracing BertForMaskedLM by ") for line in said if line.startswith("tracing")]
    assert tried[:3] == [
        "torchscript with eager attention",
        "dynamo",
        "torchscript with eager attention, sequence fixed to 64",
    ]


def test_options_that_would_do_nothing_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    """An option that is ignored lets its user believe that it was not."""
    options = ExportOptions(str(workshop.checkpoint("tiny-encoder")), output=tmp_path / "m.onnx", keep_raw=True)
    with pytest.raises(ExportError, match="--keep_raw.*no head"):
        export_model(options)
    options = ExportOptions(str(workshop.checkpoint("tiny-splade")), output=tmp_path / "m.onnx", dimensions=3)
    with pytest.raises(ExportError, match="--dimensions keeps a part of an embedding, but this graph computes none"):
        export_model(options)


def test_an_embedding_may_be_cut(shallow: Path, embedder: ExportReport) -> None:
    """Its first numbers have length 1 again, as sentence-transformers gives them."""
    theirs = SentenceTransformer(str(shallow), device="cpu", truncate_dim=64).encode(
        list(TEXTS), normalize_embeddings=True
    )
    report, path = embedder, Path(embedder.output)
    assert (report.task, [tensor.name for tensor in report.outputs]) == ("sentence-similarity", ["sentence_embedding"])
    assert (Path(report.files) / "1_Pooling" / "config.json").exists()
    (output,) = report.outputs
    assert (output.dtype, output.shape) == ("float32", ("batch_size", 64))
    assert json.loads(report.metadata["onnxtool.options"]) == {"dimensions": 64}
    np.testing.assert_allclose(np.asarray(load(path).encode(TEXTS)), theirs, rtol=0, atol=1e-6)
    graph = onnx.load(path).graph  # without the pooler, which only the replaced outputs used
    assert not any("pooler" in tensor.name for tensor in graph.initializer)
    assert not any(node.op_type == "Tanh" for node in graph.node)


def test_vectors_that_cannot_be_cut_so_are_refused(shallow: Path, tmp_path: Path) -> None:
    """Before anything is traced, with the way out."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"dimensions": 384}, "--dimensions 384 was passed, but the vectors of this model have 384"),
        ({"verify": False, "min_cosine": 0.9}, "--min_cosine bounds a comparison that --no_verify leaves out"),
        ({"dimensions": 64, "target": "tei"}, "the target tei decides on what the graph gives"),
    ]
    for settings, reason in rows:
        with pytest.raises(OnnxtoolError, match=reason) as caught:
            export_model(ExportOptions(str(shallow), output=tmp_path / "n.onnx", **settings))
        assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_what_was_chosen_is_in_the_metadata(workshop: Workshop, tmp_path: Path) -> None:
    """Only what differs from the defaults, so that the defaults stay short."""
    options = ExportOptions(
        str(workshop.checkpoint("tiny-splade")), output=tmp_path / "m.onnx", keep_raw=True, text="a text", atol=2e-4,
        exporter="torchscript",
    )  # fmt: skip
    report = export_model(options)
    assert json.loads(report.metadata["onnxtool.options"]) == {"atol": 2e-4, "keep_raw": True, "text": "a text"}
    assert [tensor.name for tensor in report.outputs] == ["sparse", "logits"]


def test_an_opset_that_nothing_here_reads_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """The folder is no checkpoint, which is not found out any more; the error says what can be asked for."""
    with pytest.raises(ExportError, match=f"no opset 99: .*onnxruntime .* reads, 13 to {highest_opset()}"):
        export_model(ExportOptions(str(tmp_path / "nothing"), output=tmp_path / "m.onnx", opset=99))


@pytest.mark.parametrize("target", ["plain", "tei"])
def test_a_sidecar_file_in_the_way_is_found_before_anything_is_traced(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A trace may take an hour; what is in the way stays as it is."""
    monkeypatch.setattr(onnxtool.export.run, "_export_by", lambda *_arguments: pytest.fail("traced"))
    output = tmp_path / ("m.onnx" if target == "plain" else "m")
    blocking = tmp_path / "m" / "config.json"
    blocking.parent.mkdir()
    blocking.write_text("mine")
    with pytest.raises(OutputExistsError, match=r"config\.json exists already"):
        export_model(ExportOptions(str(workshop.checkpoint("tiny-classifier")), output=output, target=target))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [blocking]
    assert blocking.read_text() == "mine"


def test_float16_weights_are_exported_as_such(workshop: Workshop, tmp_path: Path) -> None:
    """And verified against the same weights in PyTorch, which computes in float32."""
    checkpoint = workshop.checkpoint("tiny-encoder")
    report = export_model(
        ExportOptions(str(checkpoint), output=tmp_path / "m.onnx", exporter="torchscript", dtype="float16")
    )
    assert {output.dtype for output in report.outputs} == {"float16"}
    assert report.verification is not None
    assert report.verification.cosine_min > 0.9999


def test_a_model_that_its_own_runs_change_is_compared_with_a_fresh_copy(workshop: Workshop, tmp_path: Path) -> None:
    """BigBird takes a short text as the reason to attend fully for good; a changed one would be right beyond 112."""
    import transformers

    folder = Path(shutil.copytree(workshop.checkpoint("tiny-mlm"), tmp_path / "bigbird"))
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=512, block_size=16, num_random_blocks=1, initializer_range=0.3,
        pad_token_id=0, bos_token_id=101, eos_token_id=102, sep_token_id=102, architectures=["BigBirdModel"],
    )  # fmt: skip
    transformers.BigBirdModel(config).save_pretrained(folder)
    options = ExportOptions(str(folder), output=tmp_path / "m.onnx", exporter="torchscript", require_dynamic=True)
    report = export_model(options)
    assert report.metadata["onnxtool.max_length"] == "112"  # (5 + 2 random blocks) * 16 tokens
    assert any("for texts of up to 112 tokens, of the 512" in note for note in report.notes)


def test_files_of_a_replaced_checkpoint_do_not_stay(workshop: Workshop, shallow: Path, tmp_path: Path) -> None:
    """Its pooling would be applied to a model that has none."""
    output = tmp_path / "m.onnx"
    for checkpoint in (shallow, workshop.checkpoint("tiny-encoder")):
        export_model(ExportOptions(str(checkpoint), output=output, exporter="torchscript", verify=False, force=True))
    found = {str(path.relative_to(tmp_path / "m")) for path in (tmp_path / "m").rglob("*") if path.is_file()}
    assert found == {"config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}


@pytest.mark.parametrize("name", ["nosuffix", "m.bin", ".onnx"])
def test_an_output_must_be_called_as_a_model(workshop: Workshop, tmp_path: Path, name: str) -> None:
    """The sidecar files go to the folder of its stem."""
    with pytest.raises(OutputWriteError, match=r"not called NAME\.onnx"):
        export_model(ExportOptions(str(workshop.checkpoint("tiny-mlm")), output=tmp_path / name))


def test_the_name_of_a_relative_folder_is_its_own(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`..` would be a place outside models/."""
    shutil.copytree(workshop.checkpoint("tiny-mlm"), tmp_path / "mine")
    (tmp_path / "mine" / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "mine" / "inner")
    Path("../README.md").write_text("---\nlicense: Apache-2.0\n---\n# Mine\n", encoding="utf-8-sig")
    report = export_model(ExportOptions("..", exporter="torchscript", verify=False))
    assert (Path(report.output), report.metadata["onnxtool.source"]) == (Path("models/mine.onnx"), "mine")
    assert summarize_model(Path(report.output)).license == report.metadata["onnxtool.license"] == "apache-2.0"


@pytest.mark.parametrize(
    ("card", "found"),
    [
        ("---\nlicense: other\nlicense_name: mine --- alone\n---\n", License("other", "mine --- alone")),
        ("---\nlicense: [\n---\n", License("mit")),
        ("---\n- license\n---\n", License("mit")),
        ("---\nlicense: 2026-01-01\n---\n", License("mit")),
        (f"---\na: {'[' * 5000}\n---\n", License("mit")),
        ("# license: apache-2.0\n", License("mit")),
        (None, License("mit")),
    ],
)
def test_a_card_without_a_license_leaves_it_to_the_configuration(
    tmp_path: Path, card: str | None, found: License
) -> None:
    """A card is prose for people, and may be anything."""
    (tmp_path / "config.json").write_text('{"model_type": "bert", "license": "MIT"}')
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert Source.find(str(tmp_path)).license == found


def test_a_figure_that_layers_do_not_share_is_left_out() -> None:
    """Transformers raises where one asks for it."""

    class Config:
        hidden_size = 8

        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("'num_attention_heads' is a per-layer attribute")

    assert _figure(Config(), "hidden_size") == 8
    assert _figure(Config(), "num_attention_heads") is None
    assert _figure(Config(), "num_hidden_layers") is None


@pytest.mark.parametrize("target", ["plain", "fastembed"])
def test_each_small_file_is_read_once(
    workshop: Workshop, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Modules, their settings, limits, tokenizer and card; transformers reads some of them for itself."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint"))
    for name in ("modules.json", "sentence_bert_config.json"):
        shutil.copyfile(minilm / name, checkpoint / name)
    shutil.copytree(minilm / "1_Pooling", checkpoint / "1_Pooling")
    reads: Counter[str] = Counter()
    open_regular = reading.open_regular

    def counted(path: Path) -> io.BufferedReader:
        if path.is_relative_to(checkpoint):
            reads[path.relative_to(checkpoint).as_posix()] += 1
        return open_regular(path)

    monkeypatch.setattr(reading, "open_regular", counted)
    options = ExportOptions(
        str(checkpoint), output=tmp_path / ("m.onnx" if target == "plain" else "m"), target=target, verify=False,
        exporter="torchscript",
    )  # fmt: skip
    export_model(options)
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"} <= reads.keys()
    # Of vocab.txt, whether it is stale is seen twice: where tokens are compared, and where files are written. The
    # tokenizer is tried, compared with that of transformers, and read.
    few = {"vocab.txt": 2, "tokenizer.json": 3}
    assert {name: count for name, count in reads.items() if count > few.get(name, 1)} == {}
