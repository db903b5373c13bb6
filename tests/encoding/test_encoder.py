"""Batches of a pipeline get vectors: those of `encode`, in Spark as well; of Ray Data see test_ray."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtool
from onnxtool.encoding import VectorOptions
from onnxtool.encoding.ray import Encoder
from onnxtool.errors import InputError
from tests.encoding.corpora import dense_model, expected_mean, make_texts, sparse_model
from tests.infer.tiny_models import VOCABULARY, model_for, splade_terms, table, write_model

TEXTS = make_texts(30)
EXAMPLES = Path(onnxtool.__file__).parents[1] / "examples" / "pipelines"
CPU = VectorOptions(provider="cpu")


def batch(texts: list[Any]) -> dict[str, Any]:
    """Return a batch as Ray Data gives it."""
    return {"id": np.arange(len(texts)), "contents": np.array(texts, object)}


def test_a_batch_gets_a_column_of_vectors(tmp_path: Path) -> None:
    """All other columns stay; an empty batch has columns as well."""
    encoder = Encoder(dense_model(tmp_path), CPU)
    given = batch(TEXTS)
    found = encoder(given)
    assert [*found] == ["id", "contents", "vector"]
    assert [*given] == ["id", "contents"]
    np.testing.assert_allclose(found["vector"], [expected_mean(text) for text in TEXTS], atol=1e-5)
    empty = encoder(batch([]))["vector"]
    assert (empty.shape, empty.dtype) == ((0, 4), np.float32)


def test_terms_are_two_columns(tmp_path: Path) -> None:
    """Ids and weights, an array for each text; also where all texts have as many."""
    found = Encoder(sparse_model(tmp_path), CPU)(batch(TEXTS))
    for text, indices, values in zip(TEXTS, found["indices"], found["values"], strict=True):
        terms = splade_terms(table(len(VOCABULARY), len(VOCABULARY)), text)
        assert {VOCABULARY[place]: value for place, value in zip(indices, values, strict=True)} == pytest.approx(terms)
    same = Encoder(tmp_path / "model.onnx", CPU)(batch(["a cat"] * 3))
    assert (same["indices"].dtype, same["indices"].shape) == (object, (3,))


def test_options_are_those_of_a_corpus(tmp_path: Path) -> None:
    """As far as they are of vectors."""
    encoder = Encoder(dense_model(tmp_path), VectorOptions(provider="cpu", vectors_as="float16"), column="text")
    found = encoder({"text": np.array(TEXTS)})["vector"]
    expected = onnxtool.load(tmp_path / "model.onnx", provider="cpu").encode(TEXTS, vectors_as="float16")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contents": True, "shard_size": 5}, "contents and shard_size was passed"),
        ({"output_format": "npy"}, "output_format was passed"),
        ({"long": "window"}, "long is window"),
    ],
)
def test_an_encoder_of_batches_refuses_options_of_files(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Encoder(dense_model(tmp_path), VectorOptions(**options))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": ["a"]}, "a batch has no column 'contents': it has text"),
        (batch(["a", None]), "row 1 of a batch has 'None' in contents"),
        (batch(["a", b"b"]), "row 1 of a batch has"),
        ({**batch(["a"]), "vector": [1]}, "a batch has a column vector already"),
    ],
)
def test_batches_that_are_none_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """With the row or the column at fault."""
    with pytest.raises(InputError, match=message):
        Encoder(dense_model(tmp_path), CPU)(given)


def test_a_model_without_vectors_is_refused_before_a_batch(tmp_path: Path) -> None:
    model = write_model(tmp_path, model_for("fill-mask", table(len(VOCABULARY), len(VOCABULARY)), "logits"))
    with pytest.raises(InputError, match="gives no vector"):
        Encoder(model, CPU)


def test_cores_of_an_actor_are_those_that_its_pipeline_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else actors of one machine would each take all of it."""
    seen: list[int] = []
    load = onnxtool.load

    def watched(*args: Any, **given: Any) -> Any:
        seen.append(given["threads"])
        return load(*args, **given)

    monkeypatch.setattr("onnxtool.infer.loading.load", watched)
    model = dense_model(tmp_path)
    for variable in ("3", "2,1"):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        Encoder(model, CPU)
    Encoder(model, VectorOptions(provider="cpu", threads=1))
    monkeypatch.delenv("OMP_NUM_THREADS")
    Encoder(model, CPU)
    assert seen == [3, 2, 1, 0]
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    with pytest.raises(InputError, match="OMP_NUM_THREADS is 'all', and no number"):
        Encoder(model, CPU)


def write_texts(folder: Path) -> Path:
    """Write TEXTS with their places as ids."""
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "contents": text}) + "\n" for n, text in enumerate(TEXTS)))
    return path


def require_means(folder: Path) -> None:
    """Compare a table, whose rows may be in any order, with the mean of each text."""
    parquet = pytest.importorskip("pyarrow.parquet")
    found = {int(row["id"]): row["vector"] for row in parquet.read_table(folder).to_pylist()}
    np.testing.assert_allclose(
        [found[place] for place in range(len(TEXTS))], [expected_mean(text) for text in TEXTS], atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning")
def test_a_pandas_udf_of_spark_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the script of the recipe: an iterator of batches, and a model for each partition."""
    sql = pytest.importorskip("pyspark.sql", reason="needs pyspark")
    pytest.importorskip("pandas", reason="needs pandas")
    if shutil.which("java") is None:
        pytest.skip("needs java")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    script = runpy.run_path(str(EXAMPLES / "spark_encode.py"))
    session = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        script["encode"](session, str(dense_model(tmp_path)), str(write_texts(tmp_path)), str(tmp_path / "vectors"))
    finally:
        session.stop()
    require_means(tmp_path / "vectors")
