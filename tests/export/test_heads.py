"""Heads are recognized, put on graphs of both exporters' opsets, and refused where the model cannot have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx.reference
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.pooling_modules import Dense, LogitScore, Normalize, Pooling
from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.tasks import TASK_NAMES
from onnxtool.checkpoint.vector_types import CODES, VECTOR_TYPES
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.heads.choice import check_head, read_head, recognize_head
from onnxtool.export.heads.head import Head, append_head, require_output
from onnxtool.export.sidecar_files import write_sidecar_files
from onnxtool.export.signature import Signature
from onnxtool.export.source import Source
from tests.checkpoint.test_pooling_modules import head_of, run_head, vectors


def test_the_raw_output_may_stay_beside_the_head() -> None:
    """After it, so that consumers of the first output find the head's."""
    values = np.random.default_rng(0).standard_normal((4, 5, 7)).astype(np.float32)
    names, (_, raw) = run_head(head_of(Pooling()), values, keep_raw=True)
    assert names == ["vector", "raw"]
    np.testing.assert_array_equal(raw, values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("name", VECTOR_TYPES)
@pytest.mark.parametrize("opset", [13, 18])
def test_a_graph_stores_vectors_as_numpy_does(name: str, opset: int, dtype: str) -> None:
    """Bit for bit, from what the head computes: in float32, also of a model in half precision."""
    values = np.random.default_rng(0).standard_normal((4, 5, 16)).astype(dtype)
    head = head_of(Pooling(), Normalize())
    floats = vectors(head, values.astype(np.float64 if dtype == "float64" else np.float32), opset)
    ranges = np.stack([floats.min(axis=0), floats.max(axis=0) * 0.9]).astype(np.float32)
    stored = VectorType.of(name, ranges if name in CODES else None)
    names, (found,) = run_head(replace(head, stored=stored), values, opset)
    assert names == ["vector"]
    assert found.dtype == stored.dtype
    np.testing.assert_array_equal(found, stored.apply(floats))


@pytest.mark.parametrize(
    "behind", ["Identity(product)", "Add(product, bias)", "Mul(bias, product)", "Div(product, bias)", "Tanh(product)"]
)
def test_a_score_is_computed_of_one_token_alone(behind: str) -> None:
    """The linear layer before it, and what a model makes of logits; but not the norm before that."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[b,s,3] states, int64[b,s] attention_mask) => (float[b,s,2] logits)
        <float[3,2] weight = {{1.5, 2, -3, 4, 5, 0.5}}, float[2] bias = {{3, -2}}, float[3] scale = {{2, 3, 4}}>
        {{ normal = Mul(states, scale)  product = MatMul(normal, weight)  logits = {behind} }}"""
    states = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    feeds = {"states": states, "attention_mask": np.array([[1, 1, 0, 0], [0, 1, 1, 1]])}
    (logits,) = onnx.reference.ReferenceEvaluator(onnx.parser.parse_model(text)).run(None, feeds)
    model = ir.from_proto(onnx.parser.parse_model(text))
    append_head(model, Head("reranker", "logits", "logits", "text-ranking", (LogitScore(0, 1),)))
    (found,) = onnx.reference.ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)
    last = logits[[0, 1], [1, 3]]
    np.testing.assert_allclose(found, last[:, :1] - last[:, 1:], rtol=1e-6)
    producers = {node.op_type: [value.producer() for value in node.inputs] for node in model.graph}
    assert producers["MatMul"][0].op_type == "GatherND"
    assert producers["GatherND"][0].op_type == "Mul"


def test_modules_that_do_not_fit_are_refused() -> None:
    """A projection from another width."""
    dense = Dense("2_Dense", np.zeros((3, 9), np.float32), None, "Tanh")
    with pytest.raises(CheckpointError, match="2_Dense takes vectors of 9 numbers, and is given 7"):
        head_of(Pooling(), dense).width(7)


SIGNATURE = Signature(
    {"input_ids": ("batch_size", "sequence"), "attention_mask": ("batch_size", "sequence")},
    {"last_hidden_state": ("batch_size", "sequence", 8)},
)


def test_a_head_that_the_model_cannot_have_names_the_output_it_needs() -> None:
    """A base model has no logits."""
    with pytest.raises(ExportError, match="needs the output logits; this model gives last_hidden_state"):
        require_output("splade", "logits", SIGNATURE)


def test_a_head_needs_an_attention_mask() -> None:
    """Without one, padding would be pooled."""
    head = Head("embedding", "last_hidden_state", "v", "", (Pooling(),))
    head.check(SIGNATURE)
    with pytest.raises(ExportError, match="attention mask"):
        head.check(Signature({"input_ids": ("batch_size", "sequence")}, SIGNATURE.outputs))


def test_a_head_over_tokens_is_refused_for_a_model_that_pooled_already() -> None:
    """A classifier's logits are [B, labels]."""
    head = Head("splade", "logits", "sparse", "", (SpladePooling(),))
    with pytest.raises(ExportError, match="three axes"):
        head.check(Signature(SIGNATURE.inputs, {"logits": ("batch_size", 3)}))


def checkpoint(folder: Path, *modules: tuple[str, dict[str, Any]], tags: str = "") -> Source:
    """Write the module files of a checkpoint, and no model."""
    (folder / "config.json").write_text('{"model_type": "bert"}')
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, (kind, settings) in enumerate(modules, start=1):
        path = folder / f"{place}_{kind}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(settings))
        listed.append({"idx": place, "path": path.name, "type": f"sentence_transformers.models.{kind}"})
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    if tags:
        (folder / "README.md").write_text(f"---\ntags: [{tags}]\n---\n")
    return Source.find(str(folder))


@pytest.mark.parametrize(
    ("modules", "tags", "architecture", "head"),
    [
        ([("SpladePooling", {})], "", "BertForMaskedLM", "splade"),
        ([("Pooling", {"pooling_mode_cls_token": True})], "", "BertModel", "embedding"),
        ([], "splade, other", "BertForMaskedLM", "splade"),
        ([], "sparse-encoder", "BertForMaskedLM", "splade"),
        ([], "naver-splade-v3", "BertForMaskedLM", "splade"),
        ([], "not-splade", "BertForMaskedLM", "none"),
        ([], "splade", "XLMWithLMHeadModel", "splade"),
        ([], "splade", "BertModel", "none"),
        ([], "", "BertForMaskedLM", "none"),
    ],
)
def test_the_head_is_recognized(
    tmp_path: Path, modules: list[tuple[str, dict[str, Any]]], tags: str, architecture: str, head: str
) -> None:
    """By modules.json, else by the card's tags of a model with the vocabulary's logits."""
    choice = recognize_head(checkpoint(tmp_path, *modules, tags=tags), architecture)
    assert choice.name == head
    assert bool(choice.why) == (tags != "not-splade")  # a card that says what it is needs no word
    assert (choice.head is None) == (head == "none")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, True) for name in ("splade-v3", "distilsplade_max", "Splade_PP_en_v1", "my.SPLADE", "spladev2")),
        *((name, True) for name in ("splade-negation", "bert-no-1-splade", "efficient-splade-V-large-doc")),
        *((name, True) for name in ("splade-x/checkpoint-500", "splade/final", "splade_a/best/pytorch", "splade/")),
        *((name, False) for name in ("not-splade", "Not_a_SPLADE", "bert-for-splade", "no.splade", "nosplade")),
        *((name, False) for name in ("splade-free-bert", "bert-splade-negatives", "blade", "splayed", "spl-ade")),
        *((name, False) for name in ("splade-experiments/bert-base", "splade/baseline/checkpoint-5")),
    ],
)
def test_a_name_says_that_a_masked_language_model_is_a_splade(tmp_path: Path, name: str, says: bool) -> None:
    """Its last part does, above folders that are called after a step or after nothing; names that deny it do not."""
    (tmp_path / name).mkdir(parents=True)
    choice = recognize_head(checkpoint(tmp_path / name), "BertForMaskedLM")
    assert choice.name == ("splade" if says else "none")
    assert ("it is called" in choice.why) == says
    assert ("if it is a SPLADE, pass --head splade" in choice.why) == (not says)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("README.md", "---\nbase_model: naver/splade-v3\n---\n", "the model card's base_model says naver/splade-v3"),
        ("README.md", "---\nbase_model: [a/b, naver/splade-v3]\n---\n", "card's base_model says naver/splade-v3"),
        ("README.md", "---\nmodel_name: My SPLADE\n---\n", "the model card's model_name says My SPLADE"),
        ("config.json", '{"_name_or_path": "naver/splade-v3"}', "_name_or_path of config.json says naver/splade-v3"),
        ("training_args.json", '{"output_dir": "out/splade-1/"}', "training_args.json says out/splade-1/"),
        ("trainer_state.json", '{"best_model_checkpoint": "out/splade/checkpoint-5"}', "says out/splade/checkpoint-5"),
        ("trainer_state.json", '{"log_history": [{"loss": 1}, {"query_regularizer_loss": 1}]}', "query_regularizer_"),
        ("training_args.json", '[{"loss": ["SpladeLoss"]}]', "training_args.json says SpladeLoss"),
        ("README.md", "---\ndatasets: [a/splade-scores]\n---\nNot unlike SPLADE.\n", ""),
        ("README.md", "---\ntags: []\nbase_model: 3\n---\n", ""),
        ("config.json", '{"_name_or_path": "/splade-experiments/bert", "vocab": "splade"}', ""),
        ("training_args.json", '{"teacher": "naver/splade-v3", "train_data": "splade.jsonl", "to": "splade/a"}', ""),
        ("training_args.json", '{"output_dir": "splade', ""),
        ("training_args.bin", "splade", ""),
    ],
)
def test_a_card_and_training_files_say_splade(tmp_path: Path, file: str, content: str, why: str) -> None:
    """Of the model itself; what they say of a teacher or of data is of another one, and pickles are never read."""
    source = checkpoint(tmp_path)
    (tmp_path / file).write_text(content)
    choice = recognize_head(source, "BertForMaskedLM")
    assert choice.name == ("splade" if why else "none")
    assert why in choice.why


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification", "Qwen3ForCausalLM"])
def test_the_name_of_a_model_that_weighs_no_vocabulary_is_not_asked(tmp_path: Path, architecture: str) -> None:
    """A cross-encoder or an embedder may be called after the SPLADE that it belongs to."""
    (tmp_path / "splade-reranker").mkdir()
    assert recognize_head(checkpoint(tmp_path / "splade-reranker"), architecture).name == "none"


def test_modules_come_before_a_name(tmp_path: Path) -> None:
    """An embedder that was trained from a masked language model keeps that class in its config."""
    (tmp_path / "splade-v3-dense").mkdir()
    source = checkpoint(tmp_path / "splade-v3-dense", ("Pooling", {"pooling_mode_cls_token": True}))
    assert recognize_head(source, "BertForMaskedLM").name == "embedding"


@pytest.mark.parametrize(
    ("head", "task", "own"),
    [
        ("splade", "sentence-similarity", "sparse-encoding"),
        ("splade", "text-classification", "sparse-encoding"),
        ("embedding", "sparse-encoding", "sentence-similarity"),
        ("embedding", "late-interaction", "sentence-similarity"),
        ("m3", "late-interaction", "sentence-similarity"),
        ("late-interaction", "sentence-similarity", "late-interaction"),
        ("reranker", "sentence-similarity", "text-ranking"),
    ],
)
def test_a_head_and_a_task_that_contradict_each_other_are_refused(head: str, task: str, own: str) -> None:
    """By name, with the task that goes with the head."""
    with pytest.raises(ExportError, match=f"--head {head} makes a file for {own}, and --task {task}") as caught:
        check_head(head, task)
    assert f"pass --task {own}" in caught.value.hint


@pytest.mark.parametrize(
    ("head", "tasks"),
    [
        ("splade", ("auto", "sparse-encoding", "fill-mask", "text-generation")),
        ("embedding", ("auto", "sentence-similarity", "feature-extraction", "image-feature-extraction")),
        ("m3", ("auto", "sentence-similarity", "feature-extraction")),
        ("late-interaction", ("auto", "late-interaction", "feature-extraction")),
        ("reranker", ("auto", "text-ranking", "text-generation", "text-classification")),
        ("none", TASK_NAMES),
        ("logits", TASK_NAMES),
        ("auto", TASK_NAMES),
    ],
)
def test_a_head_goes_with_its_task_and_with_what_it_is_put_on(head: str, tasks: tuple[str, ...]) -> None:
    """The task of the architecture whose outputs it reads, as the hub tags such models."""
    for task in tasks:
        check_head(head, task)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Pooling", {})], "whose last module, Pooling, makes no scores"),
        ([("Pooling", {}), ("Dense", {})], "whose last module, Dense, makes no scores"),
        ([("Pooling", {}), ("Dense", {"module_output_name": "scores", "module_input_name": "logits"})], "of logits"),
        ([("Pooling", {"include_prompt": False}), ("Dense", {"module_output_name": "scores"})], "has no weights"),
        ([("Pooling", {}), ("LSTM", {}), ("Dense", {"module_output_name": "scores"})], "the modules LSTM"),
    ],
)
def test_a_reranker_that_pools_makes_scores_of_a_vector(
    tmp_path: Path, modules: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    """By its last module; what that reads and makes is checked before its weights are."""
    source = checkpoint(tmp_path, *modules)
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(CheckpointError, match=reason):
        recognize_head(source, "BertModel")


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Pooling", {}), ("WordWeights", {})], "modules WordWeights"),
        ([("CNN", {}), ("Pooling", {})], "modules CNN"),
        ([("Dense", {}), ("Pooling", {})], "computes Dense before its Pooling, on sentence_e"),
        ([("LSTM", {})], "names Transformer, LSTM, and onnxtool computes no pooling but"),
        ([("Pooling", {"pooling_mode": "median"})], "pools with median"),
        ([("Pooling", {"weights": [1, 2]})], r"1_Pooling/config.json of .* has the settings weights"),
    ],
)
def test_a_checkpoint_that_no_head_computes_is_refused(
    tmp_path: Path, modules: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    """With the way out, rather than exported without its head and a note."""
    with pytest.raises(CheckpointError, match=reason) as caught:
        recognize_head(checkpoint(tmp_path, *modules), "BertModel")
    assert "--head none" in caught.value.hint


def test_a_sparse_encoder_without_modules_is_recognized(tmp_path: Path) -> None:
    """By the class that sentence-transformers says it is."""
    source = checkpoint(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    assert recognize_head(source, "BertForMaskedLM").name == "splade"


def test_unknown_modules_are_named(tmp_path: Path) -> None:
    """Leaving one out would give other vectors."""
    source = checkpoint(tmp_path, ("Pooling", {}), ("WordWeights", {}), ("LSTM", {}))
    with pytest.raises(CheckpointError, match="modules LSTM, WordWeights, which onnxtool does not compute"):
        read_head("embedding", source)


def test_the_settings_of_splade_pooling_are_read(tmp_path: Path) -> None:
    """Of sentence-transformers' own names; others are refused."""
    source = checkpoint(tmp_path, ("SpladePooling", {"pooling_strategy": "sum", "activation_function": "log1p_relu"}))
    head = read_head("splade", source)
    assert head is not None
    assert head.modules == (SpladePooling("sum", "log1p_relu"),)
    (tmp_path / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": "median"}')
    with pytest.raises(CheckpointError, match="weighs terms by median of relu"):
        read_head("splade", Source.find(str(tmp_path)))


def test_what_follows_splade_pooling_is_part_of_the_head(tmp_path: Path) -> None:
    """sentence-transformers computes the modules in their order."""
    head = read_head("splade", checkpoint(tmp_path, ("SpladePooling", {}), ("Normalize", {})))
    assert head is not None
    assert head.modules == (SpladePooling(), Normalize())


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a head can be recognized is found out by reading it."""
    source = dense_checkpoint(tmp_path)
    tensors = {"linear.weight": np.zeros((2, 4), np.float32), "linear.bias": np.ones(2, np.float32)}
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    read: list[str] = []
    original = Source.read_tensors

    def counted(self: Source, folder: str) -> Any:
        read.append(folder)
        return original(self, folder)

    monkeypatch.setattr(Source, "read_tensors", counted)
    assert recognize_head(source, "BertModel").head is not None
    assert read == ["2_Dense"]


def dense_checkpoint(folder: Path, **settings: Any) -> Source:
    return checkpoint(
        folder,
        ("Pooling", {"pooling_mode": "weightedmean"}),
        ("Dense", {"in_features": 4, "out_features": 2, "bias": True, **settings}),
        ("Normalize", {}),
    )


def test_a_projection_is_read_with_its_weights(tmp_path: Path) -> None:
    """From the module's own folder; the default activation is Tanh."""
    weight = np.arange(8, dtype=np.float32).reshape(2, 4)
    source = dense_checkpoint(tmp_path)
    save_file({"linear.weight": weight, "linear.bias": np.ones(2, np.float32)}, tmp_path / "2_Dense/model.safetensors")
    head = read_head("embedding", source)
    assert head is not None
    pool, dense, normalize = head.modules
    assert (pool, normalize) == (Pooling(("weightedmean",)), Normalize())
    assert isinstance(dense, Dense)
    np.testing.assert_array_equal(dense.weight, weight)
    assert (dense.activation, head.width(4)) == ("Tanh", 2)


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    """They could run code."""
    source = dense_checkpoint(tmp_path)
    (tmp_path / "2_Dense/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="in a pickle"):
        read_head("embedding", source)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "activated by torch.nn.*PReLU"),
        ({"activation_function": "mine.Tanh"}, "activated by mine.Tanh"),
        ({"module_input_name": "token_embeddings"}, "computes Dense behind its Pooling, on token_emb"),
        ({"in_features": 5}, r"of shape \[2, 4\], and its config.json says \[2, 5\]"),
    ],
)
def test_a_projection_that_cannot_be_computed_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    """By its activation, its input or its weights."""
    source = dense_checkpoint(tmp_path, **settings)
    tensors = {"linear.weight": np.zeros((2, 4), np.float32), "linear.bias": np.ones(2, np.float32)}
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        read_head("embedding", source)


def test_instructors_leave_the_prompt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their ids on the hub, as sentence-transformers does; copies of them say it in their files."""
    source = checkpoint(tmp_path, ("Pooling", {"pooling_mode": "mean"}))
    monkeypatch.setattr(Source, "label", "hkunlp/instructor-base")
    head = read_head("embedding", source)
    assert head is not None
    assert head.leaves_prompt_out
    write_sidecar_files(source, None, tmp_path / "copy", tmp_path / "existing")
    monkeypatch.undo()
    copied = Pooling.read(CheckpointFolder(tmp_path / "copy").sentence_modules.modules[1])
    assert copied == Pooling(("mean",), includes_prompt=False)
