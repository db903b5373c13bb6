"""Files of another exporter are run, encoded and evaluated as what a user says they are.

The oracles are sentence-transformers and transformers on the checkpoints, which PyTorch's own exporter writes here.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import helper
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from onnxtool import EvaluateOptions, ExportOptions, evaluate_model, export_model
from onnxtool.checkpoint.module_forms import POOLING_MODES
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.errors import InputError, OptionError, OutputExistsError
from onnxtool.evaluation.report import EvaluationReport
from onnxtool.infer import FileDescription, SparseVectors, load
from onnxtool.infer.options import POOLING
from tests.cli.entry_point import run_onnxtool
from tests.evaluation.collections import Texts, write_beir
from tests.infer.tiny_models import VOCABULARY, TinyModel, rows_of, table, write_model
from tests.workshop import Workshop

V = len(VOCABULARY)
TEXTS = ("the weather is lovely today", "naïve café, Paris is the capital of France", "cats", "a cat sat on the mat")
QUERY = "where do cats sit?"
ROUNDING: dict[str, Any] = {"rtol": 0, "atol": 1e-5}  # float32 over two layers


def foreign(checkpoint: Path, folder: Path, outputs: tuple[str, ...]) -> Path:
    """Export a checkpoint by torch.onnx.export, under names of its own, with the tokenizer beside it and no stamp."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(checkpoint).eval()

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *arrays: torch.Tensor) -> Any:
            return self.model(**dict(zip(names, arrays, strict=True))).to_tuple()

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    inputs = tuple(torch.ones((2, 5), dtype=torch.int64) for _ in names)
    axes = {0: "batch", 1: "sequence"}
    of_outputs = {name: {0: "batch"} if name in ("logits", "pooled") else axes for name in outputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            Outputs(),
            inputs,
            str(folder / "model.onnx"),
            input_names=list(names),
            output_names=list(outputs),
            dynamic_axes={**dict.fromkeys(names, axes), **of_outputs},
            dynamo=False,
        )
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def embedder(workshop: Workshop) -> Path:
    """The states of an encoder, and what its pooler makes of them, which are no sentence vectors."""
    made = workshop.made(
        "foreign-embedder", lambda at: foreign(workshop.checkpoint("tiny-encoder"), at, ("states", "pooled"))
    )
    return made / "model.onnx"


@pytest.fixture(scope="module")
def reranker(workshop: Workshop) -> Path:
    made = workshop.made("foreign-reranker", lambda at: foreign(workshop.checkpoint("tiny-reranker"), at, ("logits",)))
    return made / "model.onnx"


@pytest.fixture(scope="module")
def masked(workshop: Workshop) -> Path:
    made = workshop.made("foreign-splade", lambda at: foreign(workshop.checkpoint("tiny-splade"), at, ("scores",)))
    return made / "model.onnx"


def sentence_transformer(checkpoint: Path, mode: str, *, normalize: bool) -> SentenceTransformer:
    """Make a model of a checkpoint without modules.json."""
    transformer = Transformer(str(checkpoint))
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), mode), *([Normalize()] * normalize)]
    return SentenceTransformer(modules=modules, device="cpu")


@pytest.mark.parametrize(
    ("pooling", "normalize"), [("cls", True), ("mean", False), ("mean", True), ("lasttoken", False)]
)
def test_an_embedder_gives_the_vectors_of_sentence_transformers(
    workshop: Workshop, embedder: Path, pooling: str, normalize: bool
) -> None:
    """From the states of tokens, pooled and scaled as it is told; what it is told, and what was assumed, is said."""
    said = FileDescription(pooling=pooling, normalize=normalize or None)
    model = load(embedder, description=said, provider="cpu")
    wanted = sentence_transformer(workshop.checkpoint("tiny-encoder"), pooling, normalize=normalize).encode(TEXTS)
    np.testing.assert_allclose(rows_of(model.encode(TEXTS)), wanted, **ROUNDING)
    notes = model.answer(TEXTS).notes
    assert f"pooling by {pooling} (--pooling {pooling})" in notes
    how = "scaled to length 1 (--normalize)" if normalize else "not scaled to length 1 (assumed, as no file says it)"
    assert f"vectors are {how}" in notes


def test_modules_of_the_checkpoint_tell_what_nobody_says(workshop: Workshop, embedder: Path, tmp_path: Path) -> None:
    """By --model_name; what is said stands above them."""
    theirs = sentence_transformer(workshop.checkpoint("tiny-encoder"), "cls", normalize=True)
    theirs.save(str(tmp_path / "saved"))
    said = FileDescription(task="sentence-similarity")
    model = load(embedder, model_name=tmp_path / "saved", description=said, provider="cpu")
    np.testing.assert_allclose(rows_of(model.encode(TEXTS)), theirs.encode(TEXTS), **ROUNDING)
    assert f"pooling by cls (modules.json of {tmp_path / 'saved'})" in model.answer(TEXTS).notes
    said = FileDescription(task="sentence-similarity", pooling="mean", normalize=False)
    other = load(embedder, model_name=tmp_path / "saved", description=said, provider="cpu")
    wanted = sentence_transformer(workshop.checkpoint("tiny-encoder"), "mean", normalize=False).encode(TEXTS)
    np.testing.assert_allclose(rows_of(other.encode(TEXTS)), wanted, **ROUNDING)


def test_a_reranker_gives_the_scores_of_a_cross_encoder(workshop: Workshop, reranker: Path) -> None:
    """Without being told it prints shapes, and says which option is missing."""
    wanted = CrossEncoder(str(workshop.checkpoint("tiny-reranker")), device="cpu").predict([(QUERY, t) for t in TEXTS])
    for said in (FileDescription(task="text-ranking"), FileDescription(head="reranker")):
        report = load(reranker, description=said, provider="cpu").answer(TEXTS, query=QUERY)
        np.testing.assert_allclose([answer.candidates[0].score for answer in report.answers], wanted, **ROUNDING)
    untold = load(reranker, provider="cpu").answer(TEXTS, query=QUERY)
    assert untold.answers[0].outputs == {"logits": (1, 1)}
    assert untold.notes[0].startswith("the model does not say what it is for; pass --task with one of ")


def test_a_masked_language_model_is_run_as_a_sparse_encoder(workshop: Workshop, masked: Path) -> None:
    """With max or sum over the tokens."""
    from sentence_transformers.sparse_encoder.modules import MLMTransformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling as TheirPooling

    strategies: tuple[Literal["max", "sum"], ...] = ("max", "sum")
    for strategy in strategies:
        said = FileDescription(head="splade", pooling=None if strategy == "max" else strategy)
        modules = [MLMTransformer(str(workshop.checkpoint("tiny-splade"))), TheirPooling(pooling_strategy=strategy)]
        theirs = SparseEncoder(modules=modules, device="cpu")
        wanted = theirs.encode(list(TEXTS), convert_to_sparse_tensor=False).numpy()
        found = load(masked, description=said, provider="cpu").encode(TEXTS, keep_special=True)
        assert isinstance(found, SparseVectors)
        np.testing.assert_allclose(found.to_dense(), wanted, rtol=1e-5, atol=1e-5)  # sums of up to 12 tokens


@pytest.mark.parametrize("operator", ["", "Softmax"])
def test_a_classifier_gives_probabilities_of_its_logits(workshop: Workshop, tmp_path: Path, operator: str) -> None:
    """Also where the graph makes probabilities of the logits itself: once, and not twice."""
    path = write_model(tmp_path, TinyModel(table(V, 3), "logits", pooled=True))
    plain = load(path, description=FileDescription(task="text-classification"), provider="cpu")
    logits = plain.session.run(plain.feeds(plain.tokenize(["red cat"])))["logits"]
    if operator:
        model = onnx.load(path)
        model.graph.node[-1].output[0] = "before"
        model.graph.node.append(helper.make_node(operator, ["before"], ["logits"]))
        onnx.save(model, path)
    report = load(path, description=FileDescription(task="text-classification"), provider="cpu").answer("red cat")
    wanted = torch.softmax(torch.from_numpy(logits), -1)[0].sort(descending=True).values
    np.testing.assert_allclose([label.score for label in report.answers[0].candidates], wanted, **ROUNDING)
    assert any("ends in a Softmax" in note for note in report.notes) == bool(operator)


COLLECTION = Texts(
    {f"d{number}": text for number, text in enumerate(TEXTS)},
    {"q0": QUERY, "q1": "what is the weather like?", "q2": "the capital of France"},
    {"q0": {"d3": 2, "d2": 1}, "q1": {"d0": 1}, "q2": {"d1": 1}},
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "data", COLLECTION)


@pytest.mark.parametrize(
    ("name", "told", "modules"),
    [
        ("embedder", {"pooling": "cls", "normalize": True}, True),
        ("reranker", {"task": "text-ranking"}, False),
        ("masked", {"task": "sparse-encoding"}, False),
    ],
)
def test_its_figures_are_those_of_our_export(
    workshop: Workshop, request: pytest.FixtureRequest, data: Path, tmp_path: Path, name: str, told: Any, modules: bool
) -> None:
    """Of the same checkpoint; `--against` our file, which says itself what it is, nothing differs."""
    pytest.importorskip("pyarrow")
    checkpoint = workshop.checkpoint(
        {"embedder": "tiny-encoder", "reranker": "tiny-reranker", "masked": "tiny-splade"}[name]
    )
    if modules:
        sentence_transformer(checkpoint, "cls", normalize=True).save(str(tmp_path / "saved"))
        checkpoint = tmp_path / "saved"
    ours = tmp_path / "ours" / "m.onnx"
    export_model(ExportOptions(str(checkpoint), output=ours, exporter="torchscript", verify=False))

    def evaluate(path: Path, **options: Any) -> EvaluationReport:
        return evaluate_model(path, data, EvaluateOptions(cache=data / "cache", provider="cpu", **options))

    found = evaluate(request.getfixturevalue(name), against=str(ours), **told)
    assert found.measures == evaluate(ours).measures
    assert found.against is not None
    assert found.against.num_equal_top_10 == len(COLLECTION.queries)
    assert any("does not say what it is for; read as " in note for note in found.notes)


def test_what_a_file_is_told_is_part_of_what_its_vectors_are(embedder: Path, tmp_path: Path) -> None:
    """A run resumes with the same options, and is refused with others."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXTS))
    options = CorpusOptions(provider="cpu", pooling="cls", normalize=True)
    report = encode_corpus(embedder, corpus, tmp_path / "vectors", options)
    assert "pooling by cls (--pooling cls)" in report.notes
    found = np.load(tmp_path / "vectors" / "part-00000.npy")
    np.testing.assert_allclose(
        found, rows_of(load(embedder, description=options.description).encode(TEXTS)), **ROUNDING
    )
    assert encode_corpus(embedder, corpus, tmp_path / "vectors", options).num_encoded == 0
    for other in (CorpusOptions(provider="cpu", pooling="mean"), CorpusOptions(provider="cpu", pooling="cls")):
        with pytest.raises(OutputExistsError):
            encode_corpus(embedder, corpus, tmp_path / "vectors", other)


def _states(path: Path) -> Path:
    return write_model(path, TinyModel(table(V, 4), "last_hidden_state"))


def _pooled(path: Path, **metadata: str) -> Path:
    return write_model(path, TinyModel(table(V, 4), "sentence_embedding", pooled=True, metadata=metadata))


def _stamped(path: Path) -> Path:
    return _pooled(path, **{"onnxtool.task": "sentence-similarity", "onnxtool.head": "embedding"})


@pytest.mark.parametrize(
    ("make", "told", "message"),
    [
        (
            _stamped,
            {"task": "text-ranking"},
            r"--task text-ranking was passed, but .* onnxtool.task sentence-similarity",
        ),
        (_stamped, {"head": "splade"}, r"--head splade was passed, but .* onnxtool.head embedding"),
        (_stamped, {"pooling": "cls"}, r"--pooling cls was passed, .* it gives sentence_embedding \['batch_size', 4\]"),
        (_stamped, {"normalize": True}, r"--normalize was passed, .* checkpoint that says otherwise"),
        (_pooled, {"pooling": "mean"}, r"--pooling mean was passed, .* leaves nothing to pool"),
        (_pooled, {"task": "fill-mask"}, r"--task fill-mask was passed, .* gives nothing for fill-mask"),
        (
            _states,
            {"head": "reranker"},
            r"--head reranker was passed, .* gives nothing for text-ranking: it gives last_h",
        ),
        (_states, {"normalize": True}, r"--normalize was passed, .* is read for shapes"),
        (_states, {"head": "splade", "normalize": False}, r"--no_normalize was passed, .* is read for terms"),
    ],
)
def test_what_contradicts_a_file_is_refused_by_name(tmp_path: Path, make: Any, told: Any, message: str) -> None:
    """With what the file gives, or says of itself."""
    with pytest.raises(OptionError, match=message):
        load(make(tmp_path), description=FileDescription(**told))


def test_what_is_equal_to_the_stamp_changes_nothing(tmp_path: Path) -> None:
    """And vectors that another graph has pooled are scaled where that is asked for."""
    said = FileDescription(task="sentence-similarity", head="embedding", normalize=False)
    stamped = load(_stamped(tmp_path / "a"), description=said, provider="cpu").encode(["red cat"])
    bare = load(_pooled(tmp_path / "b"), description=FileDescription(normalize=True), provider="cpu").encode(
        ["red cat"]
    )
    np.testing.assert_allclose(rows_of(bare), rows_of(stamped) / np.linalg.norm(rows_of(stamped)), **ROUNDING)


def test_head_and_task_are_of_one_kind() -> None:
    """They say the same twice, or one is left out."""
    assert FileDescription(head="splade", task="sparse-encoding").purpose == "sparse-encoding"
    with pytest.raises(OptionError, match="--head splade is for sparse-encoding, and --task text-ranking was passed"):
        FileDescription(head="splade", task="text-ranking")


def test_the_modes_of_the_option_are_those_of_the_tables() -> None:
    """Which need numpy, and help does not."""
    assert set(POOLING) == {*POOLING_MODES, *SpladePooling.STRATEGIES}


def test_commands_take_the_options_and_name_what_is_missing(tmp_path: Path) -> None:
    """Exit code 2 for what contradicts the file; a corpus of a file of unknown purpose names the options."""
    path = str(_states(tmp_path))
    told = run_onnxtool(
        tmp_path, "infer", "--model_path", path, "--text", "red cat", "--pooling", "mean", "--normalize"
    )
    assert "pooling by mean (--pooling mean)" in told.stdout
    refused = run_onnxtool(tmp_path, "infer", "--model_path", path, "--text", "red cat", "--task", "text-ranking")
    assert refused.returncode == 2
    assert "gives nothing for text-ranking" in refused.stderr
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("red cat\n")
    with pytest.raises(InputError) as caught:
        encode_corpus(path, corpus, tmp_path / "vectors", CorpusOptions(provider="cpu"))
    assert "--task, --head or --pooling" in caught.value.hint
