"""A loaded model encodes texts as their definition says, from any number of threads, and on the provider asked for."""

from __future__ import annotations

import contextlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import onnxtool
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import InputError
from onnxtool.infer import LoadedModel, SparseVectors, load
from onnxtool.infer.heads.labels import LabelNames
from tests.infer.tiny_models import (
    POOLED,
    TEXTS,
    VOCABULARY,
    ids_of,
    model_for,
    rows_of,
    table,
    write_checkpoint,
    write_model,
)

V = len(VOCABULARY)


def _sparse(path: Path) -> Path:
    return write_model(path, model_for("sparse-encoding", table(V, V), "logits"))


def _dense(path: Path, modules: dict[str, dict[str, Any]] = POOLED, **files: Any) -> Path:
    return write_model(
        path, model_for("sentence-similarity", table(V, 6), "last_hidden_state"), modules=modules, **files
    )


def _mean(text: str) -> np.ndarray[Any, Any]:
    return np.asarray(np.mean([table(V, 6)[token] for token in ids_of(text)], axis=0))


def test_an_embedder_gives_an_array(tmp_path: Path) -> None:
    """float32, a row a text, in their order; from Python in one line."""
    vectors = onnxtool.encode(_dense(tmp_path), TEXTS, provider="cpu")
    assert isinstance(vectors, np.ndarray)
    assert vectors.dtype == np.float32
    for vector, text in zip(vectors, TEXTS, strict=True):
        np.testing.assert_allclose(vector, _mean(text) / np.linalg.norm(_mean(text)), atol=1e-6)


def test_answers_hold_the_vectors(tmp_path: Path) -> None:
    """As decimals that are the same float32."""
    model = load(_dense(tmp_path), provider="cpu")
    report = model.answer(TEXTS)
    for answer, vector in zip(report.answers, rows_of(model.encode(TEXTS)), strict=True):
        np.testing.assert_array_equal(np.array(answer.vector, np.float32), vector)
    assert len(str(report.answers[0].vector[0])) < 14


@pytest.mark.parametrize("make", [_sparse, _dense])
def test_threads_share_a_model(tmp_path: Path, make: Any) -> None:
    """Nothing of it changes after loading: what each thread gets is what one gets alone."""
    model = load(make(tmp_path), provider="cpu", threads=1)
    generator = np.random.default_rng(3)
    jobs = [[" ".join(generator.choice(VOCABULARY[5:], n)) for n in generator.integers(1, 30, 8)] for _ in range(40)]

    def work(texts: list[str]) -> Any:
        read = model.tokenize(texts)
        vectors = model.pool(model.run(read))
        return vectors.to_dense() if isinstance(vectors, SparseVectors) else vectors

    alone = [work(texts) for texts in jobs]
    with ThreadPoolExecutor(8) as pool:
        for together, wanted in zip(pool.map(work, jobs), alone, strict=True):
            np.testing.assert_array_equal(together, wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_features": 6, "out_features": 4}, "of shape \\[5, 6\\], and its config.json says \\[4, 6\\]"),
        (
            {"activation_function": "torch.nn.PReLU"},
            "activated by torch.nn.PReLU, which onnxtool",
        ),
        ({"activation_function": "os.system"}, "activated by os.system, which onnxtool does not compute"),
        ({"module_input_name": "token_embeddings"}, "computes Dense after its Pooling, on token_embeddings"),
    ],
)
def test_a_layer_that_cannot_be_computed_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """When the model is loaded: without it, embeddings would be others than the checkpoint's."""
    path = _dense(tmp_path, {"Transformer": {}, "Pooling": {}, "Dense": settings})
    weights = {"linear.weight": np.zeros((5, 6), np.float32), "linear.bias": np.zeros(5, np.float32)}
    save_file(weights, str(tmp_path / "model" / "2_Dense" / "model.safetensors"))
    with pytest.raises(InputError, match=message):
        load(path, provider="cpu")


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    """They can run code; the hint says where else they may come from."""
    path = _dense(tmp_path, {"Transformer": {}, "Pooling": {}, "Dense": {"in_features": 6, "out_features": 4}})
    (tmp_path / "model" / "2_Dense" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(InputError, match="2_Dense of .* has its weights only in a pickle"):
        load(path, provider="cpu")
    (tmp_path / "model" / "2_Dense" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="cannot read .*2_Dense/model.safetensors"):
        load(path, provider="cpu")


def _with_prompts(path: Path, *, include_prompt: bool = True, default: str | None = None) -> LoadedModel:
    modules = {"Transformer": {}, "Pooling": {"pooling_mode": "mean", "include_prompt": include_prompt}}
    model = _dense(path, modules)
    config = '{"prompts": {"query": "the red ", "passage": "a "}, "default_prompt_name": %s}'
    text = config % ("null" if default is None else f'"{default}"')
    (path / "model" / "config_sentence_transformers.json").write_text(text)
    return load(model, provider="cpu")


@pytest.mark.parametrize(
    ("default", "prompt", "written"),
    [
        (None, None, ""),
        ("passage", None, "a "),
        ("passage", "query", "the red "),
        ("passage", "", ""),
        (None, "on the ", "on the "),
    ],
)
def test_a_prompt_stands_before_each_text(
    tmp_path: Path, default: str | None, prompt: str | None, written: str
) -> None:
    """The checkpoint's default, another of its own by name, or any text; said in the notes."""
    model = _with_prompts(tmp_path, default=default)
    vectors = rows_of(model.encode(TEXTS, prompt=prompt))
    np.testing.assert_allclose(vectors, [_mean(written + text) for text in TEXTS], atol=1e-6)
    notes = model.answer(TEXTS, prompt=prompt).notes
    assert notes == ((f"{written!r} stands before each text",) if written else ())


def test_a_prompt_may_be_left_out_of_the_pooling(tmp_path: Path) -> None:
    """With what the tokenizer puts before it, as sentence-transformers does; padding or not."""
    model = _with_prompts(tmp_path, include_prompt=False)
    values = table(V, 6)
    wanted = [np.mean([values[token] for token in ids_of(f"the red {text}")[3:]], axis=0) for text in TEXTS]
    np.testing.assert_allclose(rows_of(model.encode(TEXTS, prompt="query")), wanted, atol=1e-6)
    np.testing.assert_allclose(rows_of(model.encode(TEXTS)), [_mean(text) for text in TEXTS], atol=1e-6)


_NUMBERS = (10**400, 1e400, math.nan, True, "7", [10**400])
_PLACES = (
    *("config.json:max_position_embeddings", "config.json:pad_token_id", "config.json:model_type"),
    *("tokenizer_config.json:model_max_length", "tokenizer_config.json:pad_token_type_id"),
    *("sentence_bert_config.json:query_length", "sentence_bert_config.json:transformer_task"),
    *("config_sentence_transformers.json:truncate_dim", "1_Pooling/config.json:pooling_mode"),
)


@pytest.mark.parametrize("place", _PLACES)
def test_a_number_of_a_checkpoint_is_used_or_an_error(tmp_path: Path, place: str) -> None:
    """Whole numbers of any length, infinities, NaN, truths and texts where a number is expected."""
    path = _dense(tmp_path, {"Transformer": {}, "Pooling": {"pooling_mode": "mean"}})
    name, key = place.split(":")
    file = tmp_path / "model" / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    for number in _NUMBERS:
        file.write_text(json.dumps({"model_type": "roberta", **before, key: number}))
        with contextlib.suppress(InputError):
            vectors = rows_of(load(path, provider="cpu").encode(TEXTS, task="query"))
            assert np.isfinite(vectors).all(), number


@pytest.mark.parametrize("name", ["config.json", "modules.json", "1_Pooling/config.json", "tokenizer_config.json"])
def test_json_of_any_depth_is_one_error(tmp_path: Path, name: str) -> None:
    """It is named; what reads JSON follows lists by recursion."""
    path = _dense(tmp_path)
    (tmp_path / "model" / name).write_text("[" * 100_000)
    with pytest.raises(InputError, match=f"{name}.* is malformed: not JSON"):
        load(path, provider="cpu")


def test_the_index_of_a_label_is_a_short_number(tmp_path: Path) -> None:
    """Of others, int() makes numbers of any script, or a traceback."""
    write_checkpoint(tmp_path, config={"id2label": {"0": "no", "9" * 5000: "many", "\u0661": "one", "-1": "x", "2": 3}})
    assert LabelNames.of(CheckpointFolder(tmp_path)).names == {0: "no", 2: "3"}


def test_a_prompt_that_reads_like_a_name_must_be_one(tmp_path: Path) -> None:
    """A typing error would be written before all texts in silence."""
    with pytest.raises(InputError, match="no prompt called 'qeury'; it has query \\('the red '\\)") as caught:
        _with_prompts(tmp_path).encode(TEXTS, prompt="qeury")
    assert "end it with a space" in caught.value.hint


@pytest.mark.parametrize(
    "content", ['{"prompts": ["query: "]}', '{"prompts": {"query": 3}}', '{"default_prompt_name": "x"}']
)
def test_malformed_prompts_are_refused(tmp_path: Path, content: str) -> None:
    """The file is named."""
    path = _dense(tmp_path)
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(content)
    with pytest.raises(InputError, match="config_sentence_transformers.json is malformed"):
        load(path, provider="cpu")


def test_what_a_model_does_not_do_is_said(tmp_path: Path) -> None:
    """Vectors of a classifier, pairs for an embedder, a reader without a question; each with a way out."""
    classifier = load(
        write_model(tmp_path / "c", model_for("text-classification", table(V, 3), "logits", pooled=True)),
        provider="cpu",
    )
    with pytest.raises(InputError, match="is for text-classification, and gives no vector"):
        classifier.encode(TEXTS)
    embedder = load(_dense(tmp_path / "e"), provider="cpu")
    with pytest.raises(InputError, match="takes no pairs of a query and a text") as caught:
        embedder.answer(["cat"], query="dog")
    assert "pairs are for rerankers" in caught.value.hint
    with pytest.raises(InputError, match="no texts to encode"):
        embedder.encode([])
    with pytest.raises(InputError, match="text 2 has half of a surrogate pair, U\\+DFFF"):
        embedder.encode(["fine", "\udfff"])


def test_an_empty_text_is_answered_and_said_to_be_empty(tmp_path: Path) -> None:
    """Of the tokens that frame a text, as the checkpoint's own library does."""
    model = load(_dense(tmp_path), provider="cpu")
    np.testing.assert_allclose(rows_of(model.encode(["", "cat"]))[0], _mean("") / np.linalg.norm(_mean("")), atol=1e-6)
    assert "1 of 2 texts are empty" in model.answer(["", "cat"]).notes[0]


@pytest.mark.parametrize(
    ("name", "what", "way"),
    [
        ("decoder_input_ids", "the tokens of a decoder", "--task text2text-generation-with-past"),
        ("pixel_values", "an image", "onnxtool.open_session"),
        ("input_features", "sound", "onnxtool.open_session"),
    ],
)
def test_inputs_that_are_no_texts_are_named(tmp_path: Path, name: str, what: str, way: str) -> None:
    """With what they are, and how such a model can be run."""
    graph = model_for("other", table(V, 3), "logits", inputs=("input_ids", name))
    with pytest.raises(InputError, match=f"has the input {name}, .*: {what}") as caught:
        load(write_model(tmp_path, graph), provider="cpu").answer(["cat"])
    assert way in caught.value.hint
