"""A file with its tokenizer in the graph: texts in, the checkpoint's answers out, or no file."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnxruntime_extensions import get_library_path
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import BertForSequenceClassification

import onnxtool
from onnxtool import ExportOptions, OptimizeOptions, agreement, export_model, optimize_model
from onnxtool.errors import CheckpointError, InputError, ModelFileError, OnnxtoolError, OptionError, ProviderError
from onnxtool.export import in_graph, tokenizer_rules
from onnxtool.export.report import ExportReport
from onnxtool.graph.text_input import NAMES, build_front
from onnxtool.graph.tokenizers import GraphTokenizer
from onnxtool.model_file import ModelFile
from onnxtool.runtime import probation
from onnxtool.runtime.providers import find_library
from tests.retrieval.checkpoints import CASES
from tests.workshop import Workshop, make_shallow

TEXTS = ["", "a", "Zürich déjà-vu 北京 \u200b x", "[SEP] typed [MASK]", "word " * 400, "🦜 \t\x01 e\u0301"]
PROMPTS = {"prompts": {"query": "search: ", "none": ""}, "default_prompt_name": "query"}


@pytest.fixture(scope="module", autouse=True)
def rules_read_once() -> Iterator[None]:
    """Read the rules of a tokenizer once: the library is asked for each character that there is, in two seconds."""
    read, known = tokenizer_rules._rules, dict[str, GraphTokenizer]()

    def read_once(tokenizer: Any, content: dict[str, Any]) -> GraphTokenizer:
        key = json.dumps({**content, "truncation": None, "padding": None})
        if key not in known:
            known[key] = read(tokenizer, content)
        return known[key]

    with mock.patch.object(tokenizer_rules, "_rules", read_once):
        yield


@pytest.fixture(scope="module")
def checkpoint(workshop: Workshop, minilm: Path) -> Path:
    """One layer of MiniLM, with prompts that are not pooled."""

    def make(folder: Path) -> None:
        make_shallow(minilm, folder, layers=1, words=4000)
        (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
        pooling = folder / "1_Pooling" / "config.json"
        pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))

    return workshop.made("in_graph_checkpoint", make)


def export(checkpoint: Path, output: Path, **options: Any) -> ExportReport:
    """Export by the exporter that is quickest."""
    chosen = {"tokenizer": "in_graph", "exporter": "torchscript", **options}
    return export_model(ExportOptions(str(checkpoint), output=output, **chosen))


@pytest.fixture(scope="module")
def exported(workshop: Workshop, checkpoint: Path) -> Path:
    """The file of it that writes the default prompt, and nothing beside."""

    def make(folder: Path) -> None:
        export(checkpoint, folder / "m.onnx")
        shutil.rmtree(folder / "m")

    return workshop.made("in_graph", make) / "m.onnx"


@pytest.fixture
def brief_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a tokenizer that other tests compare on every character with a tenth of the texts."""
    for name, value in {"_characters": lambda: (), "_WORDS": 20, "_MIXED": 30}.items():
        monkeypatch.setattr(in_graph, name, value)


def run(path: Path, *columns: list[str]) -> NDArray[Any]:
    """Run a file with nothing but onnxruntime and onnxruntime-extensions."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {name: np.array(column, dtype=object) for name, column in zip(NAMES, columns, strict=False)}
    (found,) = session.run(None, feeds)
    return np.asarray(found)


def test_texts_give_the_vectors_of_sentence_transformers(checkpoint: Path, exported: Path) -> None:
    """With the prompt, which is not pooled; long texts are cut as there."""
    expected = SentenceTransformer(str(checkpoint), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(run(exported, TEXTS), expected, atol=2e-6)


def test_a_text_has_the_same_vector_alone_and_in_any_batch(exported: Path) -> None:
    """Up to rounding of other shapes; no texts give no vectors."""
    whole = run(exported, TEXTS)
    for place, text in enumerate(TEXTS):
        np.testing.assert_allclose(run(exported, [text])[0], whole[place], atol=1e-6)
    np.testing.assert_allclose(run(exported, TEXTS[::-1]), whole[::-1], atol=1e-6)
    assert run(exported, []).shape == (0, 384)


def test_the_file_answers_without_any_other(exported: Path, checkpoint: Path) -> None:
    """In onnxtool as well; it refuses another prompt than its own, and windows, which it cannot read."""
    model = onnxtool.load(exported)
    np.testing.assert_array_equal(model.encode(TEXTS), run(exported, TEXTS))
    named = onnxtool.load(exported, model_name=str(checkpoint))
    np.testing.assert_array_equal(named.encode(TEXTS, prompt="query"), run(exported, TEXTS))
    with pytest.raises(InputError, match="writes 'search: ' before each text itself, and no prompt was asked for"):
        named.encode(TEXTS, prompt="none")
    with pytest.raises(InputError, match="cuts a long text itself"):
        model.encode(TEXTS, long="window")
    with pytest.raises(InputError, match="text 2 has the character NUL"):
        model.encode(["a", "b\0c"])
    assert [one.truncated for one in model.tokenize(["word " * 250, "word " * 253])] == [False, True]  # and "search:"


def test_the_report_says_what_was_compared(exported: Path) -> None:
    """Of each kind of text, and in the stamp as well; the tokenizer itself is no entry that anybody reads."""
    file = ModelFile.open(exported)
    stated = file.text_input
    assert stated is not None
    assert stated.differences == {in_graph.NUL: 7}
    assert stated.texts > 8_000
    assert (stated.names, stated.prompt, stated.most_tokens) == (("text",), "search: ", 256)
    assert not any("vocab" in value for value in file.metadata.values())
    assert json.loads(str(file.embedded_tokenizer))["model"]["type"] == "WordPiece"


def without_accent(rules: Any, frame: Any) -> tuple[Any, Any]:
    """Leave a letter as it is."""
    return replace(rules, table={key: text for key, text in rules.table.items() if key != "é"}), frame


def pooling_too_little(rules: Any, frame: Any) -> tuple[Any, Any]:
    """Leave one token more than the prompt out."""
    return rules, replace(frame, num_prompt=frame.num_prompt + 1)


@pytest.mark.parametrize("fault", [without_accent, pooling_too_little])
def test_a_tokenizer_that_differs_gives_no_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """Whichever of its outputs differs; the text is named."""
    build = build_front
    monkeypatch.setattr(in_graph, "build_front", lambda rules, frame, *given: build(*fault(rules, frame), *given))
    with pytest.raises(InputError, match="the graph reads '.*' alone otherwise than the tokenizer does"):
        export(checkpoint, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_optimized_files_keep_their_tokenizer(exported: Path, tmp_path: Path, precision: str) -> None:
    """And what reads ids gets its own proof: the same figures as for a file without."""
    report = optimize_model(OptimizeOptions(exported, output=tmp_path / "o.onnx", precision=precision, timing=False))
    assert report.precision == precision
    assert report.verification is not None
    assert report.verification.passed
    assert report.after.num_attentions == 1
    if precision == "int8":
        assert report.quantization is not None
        assert report.quantization.num_texts > 0
    before, after = ModelFile.open(exported), ModelFile.open(tmp_path / "o.onnx")
    assert after.text_input == before.text_input
    assert after.embedded_tokenizer == before.embedded_tokenizer
    assert [step["step"] for step in after.steps] == ["export", "optimize"]
    wanted, found = run(exported, TEXTS), run(tmp_path / "o.onnx", TEXTS)
    assert (wanted * found).sum(axis=1).min() > {"fp16": 0.99999, "int8": 0.97}[precision]


@pytest.mark.usefixtures("brief_proof")
def test_files_with_and_without_tokenizer_can_be_compared(exported: Path, checkpoint: Path, tmp_path: Path) -> None:
    """With each other, and with the checkpoint; a graph that reads texts otherwise than its part reads ids is found."""
    export(checkpoint, tmp_path / "ids.onnx", tokenizer="beside", verify=False)
    assert agreement.verify(exported, tmp_path / "ids.onnx").passed
    assert agreement.verify(exported, str(checkpoint)).passed
    other = shutil.copytree(checkpoint, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["normalizer"]["lowercase"] = False
    (other / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "do_lower_case": False}))
    with pytest.raises(CheckpointError, match="the file's tokenizer"):
        agreement.verify(exported, str(other))
    model = onnx.load(exported)
    (cut,) = (node for node in model.graph.node if node.output[0] == "sentence_embedding")
    whole = cut.input[0]
    model.graph.node.insert(-1, onnx.helper.make_node("Add", [whole, whole], ["twice"]))
    cut.input[0] = "twice"
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(InputError, match="sentence_embedding of 1 texts differs from that of the graph which reads"):
        agreement.verify(tmp_path / "changed.onnx", tmp_path / "ids.onnx")
    model = onnx.load(exported)
    (pieces,) = (node for node in model.graph.node if node.op_type == "WordpieceTokenizer")
    (longest,) = (one for one in pieces.attribute if one.name == "max_input_chars_per_word")
    longest.i = 9
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(InputError, match="otherwise than the tokenizer does"):
        agreement.verify(tmp_path / "changed.onnx", tmp_path / "ids.onnx")


@pytest.fixture(scope="module")
def reranker(workshop: Workshop, checkpoint: Path) -> Path:
    """A score of pairs over the same encoder."""

    def make(folder: Path) -> None:
        model = BertForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
        model.classifier.weight.data *= 20
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
            if (checkpoint / name).is_file():
                shutil.copy(checkpoint / name, folder)

    return workshop.made("in_graph_reranker", make)


@pytest.mark.usefixtures("brief_proof")
def test_pairs_are_two_inputs(reranker: Path, tmp_path: Path) -> None:
    """The longer text is cut first, as everywhere."""
    export(reranker, tmp_path / "r.onnx", tokenizer="pairs_in_graph")
    library = CrossEncoder(str(reranker), device="cpu")
    pairs = [(text, other) for text in TEXTS for other in TEXTS]
    long = [pair for pair in pairs if len(pair[0] + pair[1]) > 1000]
    for batch in (long, [pair for pair in pairs if pair not in long]):  # or all are padded
        expected = library.predict(batch, activation_fn=lambda logits: logits)
        found = run(tmp_path / "r.onnx", *([*column] for column in zip(*batch, strict=True)))
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)
    model = onnxtool.load(tmp_path / "r.onnx")
    with pytest.raises(InputError, match="takes pairs of texts"):
        model.run(model.tokenize(TEXTS))


@pytest.mark.usefixtures("brief_proof")
@pytest.mark.slow
def test_a_table_of_vectors_alone_knows_that_it_takes_no_special_tokens(tmp_path: Path) -> None:
    """Which the files beside it said: the metadata has to."""
    next(case for case in CASES if case.name == "StaticEmbedding").make(tmp_path / "c", tmp_path / "base")
    export(tmp_path / "c", tmp_path / "m.onnx", exporter="auto")
    expected = SentenceTransformer(str(tmp_path / "c"), device="cpu").encode(["a cat", "two dogs"])
    lengths = [len(text) for text in onnxtool.load(tmp_path / "m.onnx").tokenize(["a cat", "two dogs"])]
    shutil.rmtree(tmp_path / "m")
    model = onnxtool.load(tmp_path / "m.onnx")
    np.testing.assert_allclose(np.asarray(model.encode(["a cat", "two dogs"])), expected, atol=1e-6)
    assert [len(text) for text in model.tokenize(["a cat", "two dogs"])] == lengths
    assert agreement.verify(tmp_path / "m.onnx", tmp_path / "m.onnx").passed


def test_the_trial_run_of_a_file_has_the_operators(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that cannot be loaded there would never be tried out."""
    arguments: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(probation, "attempt", lambda _child, argument, **_limits: arguments.append(argument))
    assert probation.death_on(ModelFile.open(exported)) == ""
    (argument,) = arguments
    probation.load_and_run(argument)
    with pytest.raises(Exception, match=r"ai\.onnx\.contrib"):
        probation.load_and_run((argument[0], []))


REFUSED: list[tuple[dict[str, Any], type[OnnxtoolError], str]] = [
    ({"head": "none"}, InputError, "gives last_hidden_state for each token"),
    ({"max_length": 64, "prompt": "nobody's", "tokenizer": "beside"}, OptionError, "is for a tokenizer in the graph"),
    ({"opset": 15}, InputError, "need opset 16, and the graph has 15"),
    ({"tokenizer": "pairs_in_graph"}, InputError, "is a task of single texts"),
    ({"precisions": "int8"}, OptionError, "for consumers that tokenize themselves"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_no_graph_can_do_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], error: type[OnnxtoolError], message: str
) -> None:
    """And nothing is written."""
    with pytest.raises(error, match=message):
        export(checkpoint, tmp_path / "m.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_without_the_operators_nothing_is_done(
    checkpoint: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is named, before the model is traced."""
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    monkeypatch.setattr(in_graph, "TextProof", None)
    for use in (lambda: export(checkpoint, tmp_path / "m.onnx"), lambda: onnxtool.load(exported)):
        with pytest.raises(ProviderError, match="onnxruntime-extensions, which is not installed") as raised:
            use()
        assert raised.value.hint == "pip install 'onnxtool-cli[text]'"


def test_the_operators_are_found_without_importing_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports PyTorch and transformers, which take seconds in each process that reads texts."""
    monkeypatch.delitem(sys.modules, "onnxruntime_extensions")
    assert find_library() == get_library_path()
    assert "onnxruntime_extensions" not in sys.modules


def test_a_changed_stamp_is_an_error(exported: Path, tmp_path: Path) -> None:
    """Of inputs that the graph does not have, and of a tokenizer that is damaged."""
    model = onnx.load(exported)
    entries = {entry.key: entry for entry in model.metadata_props}
    entries["onnxtool.text_input"].value = entries["onnxtool.text_input"].value.replace('"text"]', '"words"]')
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="does not describe its inputs"):
        onnxtool.load(tmp_path / "m.onnx")
    entries["onnxtool.text_input"].value = entries["onnxtool.text_input"].value.replace('"words"]', '"text"]')
    entries["onnxtool.tokenizer_json"].value = entries["onnxtool.tokenizer_json"].value[:-8]
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="is damaged"):
        onnxtool.load(tmp_path / "m.onnx")


def test_a_graph_that_was_changed_cannot_be_optimized(exported: Path, tmp_path: Path) -> None:
    """Because what reads ids is no longer known."""
    model = onnx.load(exported)
    for node in model.graph.node:
        node.input[:] = ["ids" if name == "input_ids" else name for name in node.input]
        node.output[:] = ["ids" if name == "input_ids" else name for name in node.output]
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="does not show where its tokenizer ends"):
        optimize_model(OptimizeOptions(tmp_path / "m.onnx"))
