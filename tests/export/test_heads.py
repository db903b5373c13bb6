"""Heads are recognized, put on graphs of both exporters' opsets, and refused where the model cannot have them."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx.reference
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.numpy import save_file

import onnxtool
from onnxtool.checkpoint.files import M3_FILES
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.module_forms import PoolingModule
from onnxtool.checkpoint.pooling_modules import Dense, LogitScore, Normalize, Pooling
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.tasks import TASK_NAMES
from onnxtool.checkpoint.token_modules import LexicalWeights, ZeroPadding
from onnxtool.errors import CheckpointError, ExportError, InputError
from onnxtool.export.heads.choice import check_head, read_head, read_m3, recognize_head
from onnxtool.export.heads.head import GraphHead, append_head, keep_read_rows, require_output
from onnxtool.export.sidecar_files import write_sidecar_files
from onnxtool.export.signature import Signature
from onnxtool.export.source import Source
from onnxtool.infer import SparseVectors, TokenVectors, load
from onnxtool.runtime.computed_modules import compute
from tests.checkpoint.test_pooling_modules import MASK, head_of, run_head
from tests.module_files import write_modules
from tests.retrieval.checkpoints import m3


def test_the_raw_output_may_stay_beside_the_head() -> None:
    """After it, so that consumers of the first output find the head's."""
    values = np.random.default_rng(0).standard_normal((4, 5, 7)).astype(np.float32)
    names, (_, raw) = run_head(head_of(Pooling()), values, keep_raw=True)
    assert names == ["vector", "raw"]
    np.testing.assert_array_equal(raw, values)


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
    append_head(model, GraphHead("reranker", "logits", "logits", "text-ranking", (LogitScore(0, 1),)))
    (found,) = onnx.reference.ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)
    last = logits[[0, 1], [1, 3]]
    np.testing.assert_allclose(found, last[:, :1] - last[:, 1:], rtol=1e-6)
    producers = {node.op_type: [value.producer() for value in node.inputs] for node in model.graph}
    assert producers["MatMul"][0].op_type == "GatherND"
    assert producers["GatherND"][0].op_type == "Mul"


def test_modules_that_do_not_fit_are_refused() -> None:
    """A projection from another width."""
    dense = Dense("2_Dense", np.zeros((3, 9), np.float32), None, "Tanh")
    with pytest.raises(CheckpointError, match="2_Dense takes vectors of 9 numbers, but is given 7"):
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
    head = GraphHead("embedding", "last_hidden_state", "v", "", (Pooling(),))
    head.check(SIGNATURE)
    with pytest.raises(ExportError, match="attention mask"):
        head.check(Signature({"input_ids": ("batch_size", "sequence")}, SIGNATURE.outputs))


def test_a_head_over_tokens_is_refused_for_a_model_that_pooled_already() -> None:
    """A classifier's logits are [B, labels]."""
    head = GraphHead("splade", "logits", "sparse", "", (SpladePooling(),))
    with pytest.raises(ExportError, match="three axes"):
        head.check(Signature(SIGNATURE.inputs, {"logits": ("batch_size", 3)}))


def checkpoint(folder: Path, *modules: tuple[str, dict[str, Any]], tags: str = "") -> Source:
    """Write the module files of a checkpoint, and no model."""
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if modules:
        write_modules(folder, *modules)
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
    assert bool(choice.reason) == (tags != "not-splade")  # a card that says what it is needs no word
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
    assert ("it is called" in choice.reason) == says
    assert ("if it is a SPLADE, pass --head splade" in choice.reason) == (not says)


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
    assert why in choice.reason


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
    with pytest.raises(ExportError, match=f"--head {head} makes a file for {own}, but --task {task}") as caught:
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


def test_the_settings_of_splade_pooling_are_read(tmp_path: Path) -> None:
    """Of sentence-transformers' own names; others are refused."""
    source = checkpoint(tmp_path, ("SpladePooling", {"pooling_strategy": "sum", "activation_function": "log1p_relu"}))
    head = read_head("splade", source)
    assert head is not None
    assert head.modules == (SpladePooling("sum", "log1p_relu"),)
    (tmp_path / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": "median"}')
    with pytest.raises(CheckpointError, match="weighs terms by median of relu"):
        read_head("splade", Source.find(str(tmp_path)))


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


LINEAR = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
TEXTS = (
    "the weather in the city",
    "paris 東京",
    "a much longer text about the capital of france, and its largest city",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An M3 embedder."""
    folder = tmp_path_factory.mktemp("m3")
    (folder / "base").mkdir()
    m3(folder / "checkpoint", folder / "base")
    path = folder / "model.onnx"
    report = onnxtool.export_model(onnxtool.ExportOptions(model_name=str(folder / "checkpoint"), output=path))
    assert report.head == "m3"
    assert {info.name: info.shape for info in report.outputs} == {
        "sentence_embedding": ("batch_size", 32),
        "token_weights": ("batch_size", "sequence"),
        "token_embeddings": ("batch_size", "sequence", 32),
    }
    return path


def test_each_representation_is_chosen_by_its_name(exported: Path) -> None:
    """Dense where nothing is said; terms are in one vocabulary, tokens without the first."""
    sparse = onnxtool.encode(exported, TEXTS, representation="sparse")
    tokens = onnxtool.encode(exported, TEXTS, representation="colbert")
    dense = onnxtool.encode(exported, TEXTS)
    np.testing.assert_array_equal(np.asarray(onnxtool.encode(exported, TEXTS, representation="dense")), dense)
    assert isinstance(sparse, SparseVectors)
    assert isinstance(tokens, TokenVectors)
    model = load(exported, provider="cpu")
    read = model.tokenize(TEXTS)
    assert np.diff(tokens.indptr).tolist() == [len(text) - 1 for text in read]
    np.testing.assert_allclose(np.linalg.norm(tokens.vectors, axis=1), 1.0, rtol=1e-5)
    outputs = model.run(read).outputs
    for place, text in enumerate(read):
        expected: dict[int, float] = {}
        own = outputs["token_weights"][place].tolist()
        for token, weight, added in zip(text.ids, own, text.is_special, strict=False):
            if weight > 0 and not added and model.tokenizer.token(token) != "<unk>":
                expected[token] = max(weight, expected.get(token, 0.0))
        ids, weights = sparse.row(place)
        assert dict(zip(ids.tolist(), weights.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


def test_windows_of_a_long_text_make_its_terms(exported: Path) -> None:
    """The largest weight of each; vectors of tokens do not go with windows."""
    text = " ".join(TEXTS) * 4
    sparse = load(exported, provider="cpu", representation="sparse")
    vectors = sparse.encode([text, "paris"], long="window")
    assert isinstance(vectors, SparseVectors)
    parts = sparse.encode_windows([[window] for window in sparse.windows([text], long="window")[0]])
    assert isinstance(parts, SparseVectors)
    assert len(parts) > 1
    np.testing.assert_allclose(vectors.to_dense()[0], parts.to_dense().max(axis=0), rtol=1e-5)
    with pytest.raises(InputError, match="windows of a text"):
        load(exported, provider="cpu", representation="colbert").encode([text], long="window")


def test_texts_are_ranked_by_the_mean_over_tokens(exported: Path) -> None:
    """As colbert_score of FlagEmbedding."""
    model = load(exported, provider="cpu", representation="colbert")
    report = model.answer(TEXTS, query="the city")
    vectors, query = model.encode(TEXTS), model.encode(["the city"])
    assert isinstance(vectors, TokenVectors)
    assert isinstance(query, TokenVectors)
    expected = [(query.vectors @ vectors.row(place).T).max(axis=1).mean() for place in range(len(TEXTS))]
    assert [answer.candidates[0].score for answer in report.answers] == pytest.approx(expected, rel=1e-5)


def test_other_models_have_one_representation(tmp_path: Path, exported: Path) -> None:
    """And there is no fourth one."""
    with pytest.raises(InputError, match="'lexical' is not one of"):
        load(exported, representation="lexical")
    path = tmp_path / "dense.onnx"
    folder = exported.parent / "checkpoint"
    onnxtool.export_model(
        onnxtool.ExportOptions(str(folder), output=path, head="embedding", exporter="torchscript", verify=False)
    )
    with pytest.raises(InputError, match="gives no token_weights and no token_embeddings"):
        load(path, representation="sparse")


def test_the_heads_are_equal_in_all_forms() -> None:
    """In the graph and in PyTorch; padding is 0."""
    draw = np.random.default_rng(5)
    values = draw.standard_normal((4, 5, 7)).astype(np.float32)
    weight, bias = draw.standard_normal((1, 7)).astype(np.float32), np.array([0.1], np.float32)
    matrix = draw.standard_normal((3, 7)).astype(np.float32)
    projection = Dense("c", matrix, np.ones(3, np.float32), "Identity", on_tokens=True)
    chains: tuple[tuple[PoolingModule, ...], ...] = (
        (LexicalWeights(weight, bias),),
        (projection, ZeroPadding(), Normalize(on_tokens=True)),
    )
    heads = [
        GraphHead("m3", "raw", f"output{place}", "", chain, keeps_tokens=True) for place, chain in enumerate(chains)
    ]
    _, built = run_head(
        GraphHead("m3", "raw", "first", "", chains[1], keeps_tokens=True, extra_heads=tuple(heads)), values
    )
    for chain, head, found in zip(chains, heads, built[1:], strict=True):
        expected = head.reference(torch.from_numpy(values), torch.from_numpy(MASK)).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(compute(chain, values, MASK.astype(bool)), expected, atol=1e-6)
        assert not found[MASK == 0].any()


class Runs:
    """What a pickle may hold: a call of a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("a pickle ran code",))


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


_DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (lambda: _saved(LINEAR)[:300], "failed reading zip archive"),
    "cut inside": (lambda: _saved(LINEAR).replace(b"data.pkl", b"data.pkx"), "is not the state of a linear layer"),
    "empty": (lambda: b"", "EOFError"),
    "a pickle": (lambda: pickle.dumps(Runs()), "is not the state of a linear layer"),
    "code": (lambda: _saved(Runs()), "is not the state of a linear layer"),
    "code beside tensors": (lambda: _saved({**LINEAR, "bias": Runs()}), "is not the state of a linear layer"),
    "a module": (lambda: _saved(torch.nn.Linear(4, 1)), "is not the state of a linear layer"),
    "a list": (lambda: _saved([1, 2]), r"it holds \[''\]"),
    "other names": (lambda: _saved({"weight": torch.ones(1, 4)}), r"it holds \['weight'\]"),
    "numbers": (lambda: _saved({"weight": 1.0, "bias": 2.0}), "weight is not a plain floating-point tensor"),
    "integers": (lambda: _saved({**LINEAR, "weight": torch.ones(1, 4, dtype=torch.int64)}), "weight is not a plain"),
    "a huge view": (lambda: _saved({**LINEAR, "weight": torch.ones(1).expand(1 << 40, 4)}), "weight is not a plain"),
    "rows": (lambda: _saved({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}), "gives 2 numbers for a token"),
    "shapes": (lambda: _saved({"weight": torch.ones(4), "bias": torch.zeros(1)}), r"weight is \[4\]"),
    "bias": (lambda: _saved({"weight": torch.ones(1, 4), "bias": torch.zeros(3)}), r"its bias \[3\]"),
}


@pytest.mark.parametrize("name", _DAMAGED)
def test_a_damaged_layer_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """No code of it runs, and nothing of it is taken."""
    make, message = _DAMAGED[name]
    (tmp_path / M3_FILES[0]).write_bytes(make())
    (tmp_path / M3_FILES[1]).write_bytes(_saved(OrderedDict(LINEAR)))
    source = Source.find(str(tmp_path))
    assert source.is_m3
    with pytest.raises(CheckpointError, match=message):
        read_m3(source)
    assert "ran code" not in capsys.readouterr().out


def test_a_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    """By its width; one layer alone is none of M3."""
    for name in M3_FILES:
        assert not Source.find(str(tmp_path)).is_m3
        (tmp_path / name).write_bytes(_saved(LINEAR))
    head = read_m3(Source.find(str(tmp_path)))
    for one in head.extra_heads:
        with pytest.raises(CheckpointError, match="takes vectors of 4 numbers, but is given 7"):
            one.width(7)


SIZES = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
LOGITS_SIGNATURE = Signature({"input_ids": ("batch_size", "sequence")}, {"logits": ("batch_size", "sequence", 40)})
IDS = torch.tensor([[3, 7, 30, 12]])


def reranker_of(module: Any) -> GraphHead:
    """Make a head of one module over logits."""
    return GraphHead("reranker", "logits", "logits", "text-ranking", (module,))


def make(name: str, **settings: Any) -> Any:
    """Make a small causal language model by the name of its architecture."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, intermediate_size=16, num_key_value_heads=1, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Gemma2", {"final_logit_softcapping": 0.5}),  # a bound on each logit
        ("Granite", {"logits_scaling": 3.0}),
    ],
)
def test_the_score_is_that_of_the_whole_output_head(name: str, settings: dict[str, Any]) -> None:
    """Whatever the architecture makes of logits behind it; embeddings keep all of their rows."""
    model, head = make(name, **settings), reranker_of(LogitScore(12, 5))
    expected = head.reference(model(IDS).logits, torch.ones_like(IDS))
    narrow, signature = keep_read_rows(model, head, LOGITS_SIGNATURE)
    logits = model(IDS).logits
    assert tuple(logits.shape) == (1, 4, 2)
    assert signature.outputs == {"logits": ("batch_size", "sequence", 2)}
    torch.testing.assert_close(narrow.reference(logits, torch.ones_like(IDS)), expected)
    assert model.get_input_embeddings().weight.shape == (40, 8)


def test_other_heads_leave_the_model_alone() -> None:
    """A pooling reads all of its input."""
    model, head = make("Qwen3"), reranker_of(Pooling())
    assert keep_read_rows(model, head, LOGITS_SIGNATURE) == (head, LOGITS_SIGNATURE)
    assert model.get_output_embeddings().weight.shape == (40, 8)


def test_an_output_head_that_is_no_linear_layer_is_refused() -> None:
    """Its rows cannot be told apart."""
    model = make("Qwen3")
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ExportError, match="are made by Identity, and a reranker needs a linear layer"):
        keep_read_rows(model, reranker_of(LogitScore(12, 5)), LOGITS_SIGNATURE)
