"""Of a checkpoint with two encoders, each text is encoded by the file that is for it, or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtool
from onnxtool import EvaluateOptions, evaluate_model
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.encoding.reading import read_shards
from onnxtool.errors import InputError, ModelFileError
from onnxtool.infer import InferOptions, load, run_texts
from onnxtool.model_file import ModelFile
from tests.evaluation.collections import random_texts, write_beir
from tests.infer.tiny_models import POOLED, TEXTS, VOCABULARY, TinyModel, table, write_checkpoint

WIDTH = 4


def side(
    folder: Path, name: str, reads: str, partner: str, *, seed: int = 0, stamps: dict[str, str] | None = None
) -> Path:
    """Write the file of a route with its checkpoint beside it; its vectors depend on `seed`."""
    write_checkpoint(folder / name, modules=POOLED)
    metadata = {"onnxtool.task": "sentence-similarity", "onnxtool.files": name, "onnxtool.route": f"the {reads}"}
    metadata |= {"onnxtool.reads": reads, "onnxtool.partner": partner, "onnxtool.pair_sha256": "ab", **(stamps or {})}
    return TinyModel(table(len(VOCABULARY), WIDTH, seed), "last_hidden_state", metadata=metadata).write(
        folder / f"{name}.onnx"
    )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The file of documents, and that of queries."""
    return side(tmp_path, "m", "document", "m-query.onnx"), side(tmp_path, "m-query", "query", "m.onnx", seed=1)


def alone(path: Path) -> Any:
    """Encode by a file for texts of no task, which no other file reads."""
    return load(path).encode(TEXTS)


@pytest.mark.parametrize("first", [0, 1])
def test_each_text_is_encoded_by_the_file_that_is_for_it(pair: tuple[Path, Path], first: int) -> None:
    """From Python and from the command's own call, whichever of the two is passed."""
    path, (document, query) = pair[first], pair
    assert not np.allclose(alone(document), alone(query))
    for task, own in (("document", document), ("query", query)):
        np.testing.assert_array_equal(load(path).encode(TEXTS, task=task), alone(own))
        np.testing.assert_array_equal(onnxtool.encode(path, TEXTS, task=task), alone(own))
        report = run_texts(InferOptions(path, texts=TEXTS, task=task))
        assert report.model == str(own)
        assert report.answers == load(path).answer(TEXTS, task=task).answers
    assert run_texts(InferOptions(path, texts=TEXTS)).model == str(path)


def test_who_says_nothing_of_the_task_is_told_of_the_route(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Texts of no task are read by the file that is passed, as those of a collection are."""
    (note,) = run_texts(InferOptions(pair[1], texts=TEXTS)).notes
    assert note == "the route the query reads the texts; the task document has an encoder of its own"
    (tmp_path / "c.txt").write_text("\n".join(TEXTS))
    assert note in encode_corpus(pair[1], tmp_path / "c.txt", tmp_path / "v").notes
    assert run_texts(InferOptions(pair[1], texts=TEXTS, task="query")).notes == ()


def test_tokens_are_none_of_the_other_file(pair: tuple[Path, Path]) -> None:
    """Its tokenizer may be another one."""
    model = load(pair[0])
    with pytest.raises(InputError, match=r"m\.onnx does not read texts of the task query: .*m-query\.onnx does"):
        model.tokenize(TEXTS, task="query")
    assert [text.ids for text in model.of_task("query").tokenize(TEXTS, task="query")]
    assert model.of_task("document") is model.of_task(None) is model


@pytest.mark.parametrize("passed", [0, 1])
def test_a_corpus_is_encoded_by_the_file_of_its_task(pair: tuple[Path, Path], tmp_path: Path, passed: int) -> None:
    """So that a collection of documents needs no second thought."""
    (tmp_path / "c.txt").write_text("\n".join(TEXTS))
    encode_corpus(pair[passed], tmp_path / "c.txt", tmp_path / "v", CorpusOptions(task="document"))
    (shard,) = read_shards(tmp_path / "v", ())
    vectors: Any = shard.vectors
    np.testing.assert_allclose(vectors, alone(pair[0]), atol=1e-6)


@pytest.mark.parametrize("passed", [0, 1])
def test_an_evaluation_takes_both(pair: tuple[Path, Path], tmp_path: Path, passed: int) -> None:
    """Queries by one, documents by the other; what is compared is the same whichever is passed."""
    data = write_beir(tmp_path / "data", random_texts(20, 5))
    cache = EvaluateOptions(cache=tmp_path / "cache")
    reports = [evaluate_model(pair[place], data, cache) for place in (passed, 0)]
    assert reports[0].queries == reports[1].queries
    moved = pair[1].rename(tmp_path / "elsewhere.onnx")
    pair[1].with_suffix("").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="the file for query is not there"):
        evaluate_model(pair[0], data, cache)
    named = EvaluateOptions(cache=tmp_path / "cache", partner=moved, model_name=str(tmp_path / "m"))
    assert evaluate_model(pair[0], data, named).queries == reports[0].queries


@pytest.mark.parametrize("passed", [0, 1])
def test_each_rule_is_for_the_file_of_its_texts(tmp_path: Path, passed: int) -> None:
    """Terms that the graph for queries has left out are not pruned again, and say nothing of documents."""
    stamps = {"onnxtool.task": "sparse-encoding", "onnxtool.prune": "top_k:3"}
    files = (
        side(tmp_path, "m", "document", "m-query.onnx", stamps={"onnxtool.task": "sparse-encoding"}),
        side(tmp_path, "m-query", "query", "m.onnx", seed=1, stamps=stamps),
    )
    for path in files:
        write_checkpoint(path.with_suffix(""))
        (path.with_suffix("") / "modules.json").unlink()
    data = write_beir(tmp_path / "data", random_texts(20, 5))

    def evaluate(rule: str) -> Any:
        return evaluate_model(files[passed], data, EvaluateOptions(cache=tmp_path / "cache", prune=(rule,)))

    assert evaluate("top_k:2").pruned[1].sizes.document_terms <= 2
    with pytest.raises(InputError, match="the graph itself is pruned by top_k:3"):
        evaluate("/top_k:2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"onnxtool.pair_sha256": "cd"}, "is not the partner of .*: they were written by two runs"),
        ({"onnxtool.reads": "document"}, "it is not for texts of the task query"),
        ({"onnxtool.reads": ""}, "it is not for texts of the task query"),
    ],
)
def test_a_file_that_is_no_partner_is_refused(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    """By the digest of the weights of both, and by what it reads."""
    path = side(tmp_path, "m", "document", "m-query.onnx")
    side(tmp_path, "m-query", "query", "m.onnx", stamps=change)
    with pytest.raises(InputError, match=reason):
        load(path).encode(TEXTS, task="query")


def test_a_partner_that_is_missing_is_named(tmp_path: Path) -> None:
    """Rather than read by the file that is there."""
    path = side(tmp_path, "m", "document", "m-query.onnx")
    with pytest.raises(InputError, match=r"the file for query is not there: .*m-query\.onnx"):
        onnxtool.encode(path, TEXTS, task="query")


def test_a_route_that_was_exported_alone_reads_its_own_texts_only(tmp_path: Path) -> None:
    """It names no other file."""
    path = side(tmp_path, "m", "document", "")
    with pytest.raises(InputError, match=r"which is for texts of the task document, and not query") as caught:
        run_texts(InferOptions(path, texts=TEXTS, task="query"))
    assert "without --route" in caught.value.hint
    assert len(load(path).encode(TEXTS, task="document")) == len(TEXTS)


@pytest.mark.parametrize("name", ["../m-query.onnx", "/etc/m.onnx", "a\\b", ".."])
def test_a_partner_lies_beside_the_file(tmp_path: Path, name: str) -> None:
    """Metadata is untrusted."""
    model = ModelFile.open(side(tmp_path, "m", "document", name))
    with pytest.raises(ModelFileError, match="not the name of a file beside it"):
        model.for_task("query")


def test_files_of_one_encoder_read_all_texts(tmp_path: Path) -> None:
    """Nothing is looked for."""
    write_checkpoint(tmp_path / "m", modules=POOLED)
    path = TinyModel(table(len(VOCABULARY), WIDTH), "last_hidden_state").write(tmp_path / "m.onnx")
    model = ModelFile.open(path)
    assert {model.for_task(task) for task in ("query", "document", None)} == {model}


def test_a_folder_of_one_route_says_nothing_of_the_partner(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The partner has files of its own beside it."""
    own = write_checkpoint(tmp_path / "own", modules={**POOLED, "Pooling": {"pooling_mode": "max"}})
    for found in (
        load(pair[0], model_name=str(own)).encode(TEXTS, task="query"),
        onnxtool.encode(pair[0], TEXTS, task="query", model_name=str(own)),
    ):
        np.testing.assert_array_equal(found, alone(pair[1]))
