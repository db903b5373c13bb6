"""How many tokens a model takes follows from the smallest of what its files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit, graph_limit, text_limit
from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from tests.infer.tiny_models import TinyModel, save_graph, table, write_checkpoint

ROBERTA = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 20}


def _limit(
    path: Path,
    task: str = "fill-mask",
    *,
    stamp: str | None = None,
    length: int | None = None,
    **files: dict[str, Any],
) -> Limit | None:
    folder = CheckpointFolder(write_checkpoint(path / "files", **files))
    metadata = {} if stamp is None else {"onnxtool.max_length": stamp}
    tiny = TinyModel(table(15, 2), "logits", fixed=(None, length), metadata=metadata)
    return text_limit(ModelFile.open(tiny.write(path / "model.onnx")), folder, task)


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": 20}, {"max_position_embeddings": 60}])
def test_the_stamp_of_the_export_comes_before_what_is_deduced(tmp_path: Path, config: dict[str, Any]) -> None:
    """It was worked out with the model at hand, whatever names and files suggest."""
    limit = _limit(tmp_path, stamp="50", config=config, tokenizer_config={"model_max_length": 30})
    assert limit == Limit(50, "onnxtool.max_length of the model's metadata")


@pytest.mark.parametrize(
    ("task", "tokens"),
    [("sentence-similarity", 8), ("sparse-encoding", 8), ("text-classification", 8), ("fill-mask", 50)],
)
def test_the_limit_of_sentence_transformers_lowers_the_stamp(tmp_path: Path, task: str, tokens: int) -> None:
    """It is how the checkpoint is used for vectors and scores, not what its model takes."""
    limit = _limit(tmp_path, task, stamp="50", sentence_bert={"max_seq_length": 8})
    assert limit is not None
    assert limit.tokens == tokens


def test_a_fixed_sequence_axis_lowers_the_stamp(tmp_path: Path) -> None:
    """A graph that was fixed to a shape after its export takes no other."""
    assert _limit(tmp_path, stamp="50", length=7) == Limit(7, "the shape of the input input_ids")


@pytest.mark.parametrize("stamp", ["", "0", "-1", "+5", " 5", "1e3", "5.0", "٣", "²", "many", "9" * 5000])
def test_a_stamp_that_is_no_number_of_tokens_is_refused(tmp_path: Path, stamp: str) -> None:
    """Metadata is untrusted."""
    with pytest.raises(ModelFileError, match="metadata onnxtool.max_length of .* not a number") as caught:
        _limit(tmp_path, stamp=stamp)
    assert len(caught.value.message) < 1000
    assert "export the model again" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "tokens", "source"),
    [
        ({"tokenizer_config": {"model_max_length": 30}}, 30, "model_max_length of tokenizer_config.json"),
        ({"config": {"max_position_embeddings": 20}}, 20, "max_position_embeddings of config.json"),
        ({"config": {"n_positions": 20}}, 20, "n_positions of config.json"),
        ({"config": ROBERTA}, 18, "max_position_embeddings of config.json"),
        ({"config": {**ROBERTA, "pad_token_id": 0}}, 19, "max_position_embeddings of config.json"),
        ({"config": {**ROBERTA, "model_type": "bert"}}, 20, "max_position_embeddings of config.json"),
        (
            {"config": {"max_position_embeddings": 20}, "tokenizer_config": {"model_max_length": 19}},
            19,
            "model_max_length of tokenizer_config.json",
        ),
    ],
)
def test_the_smallest_limit_holds(tmp_path: Path, files: dict[str, Any], tokens: int, source: str) -> None:
    """And it is named by the file that sets it."""
    assert _limit(tmp_path, **files) == Limit(tokens, source)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"model_max_length": 10**30}},
        {"tokenizer_config": {"model_max_length": 1e30}},
        {"tokenizer_config": {"model_max_length": None}},
        {"config": {"max_position_embeddings": -1}},
    ],
)
def test_a_limit_that_is_none_is_not_one(tmp_path: Path, files: dict[str, Any]) -> None:
    """Tokenizers without a limit write 1e30, and XLNet writes -1."""
    assert _limit(tmp_path, **files) is None


@pytest.mark.parametrize(("task", "tokens"), [("sentence-similarity", 8), ("fill-mask", 20)])
def test_the_limit_of_sentence_transformers_holds_for_embeddings_only(tmp_path: Path, task: str, tokens: int) -> None:
    """A masked language model that was made from such a checkpoint takes longer texts."""
    limit = _limit(tmp_path, task, config={"max_position_embeddings": 20}, sentence_bert={"max_seq_length": 8})
    assert limit is not None
    assert limit.tokens == tokens


def test_a_fixed_sequence_axis_is_a_limit(tmp_path: Path) -> None:
    """A graph that was exported for one length takes no other."""
    model = ModelFile.open(TinyModel(table(15, 2), "logits", fixed=(None, 7)).write(tmp_path / "model.onnx"))
    assert graph_limit(model, None) == Limit(7, "the shape of the input input_ids")


def test_the_position_table_of_the_graph_is_a_limit(tmp_path: Path) -> None:
    """It shows by the name of the parameter; RoBERTa never uses its first rows."""
    model = ModelFile.open(TinyModel(table(15, 2), "logits", positions=12).write(tmp_path / "model.onnx"))
    assert graph_limit(model, None) == Limit(12, "the rows of position_embeddings.weight")
    folder = CheckpointFolder(write_checkpoint(tmp_path / "files", config=ROBERTA))
    assert graph_limit(model, folder) == Limit(10, "the rows of position_embeddings.weight")


def test_a_fused_position_table_is_a_limit(tmp_path: Path) -> None:
    """The optimizer puts the tables of words and positions into one node; names may be lost there."""
    names = ("words", "places", "gamma", "beta")
    shapes = ((15, 4), (9, 4), (4,), (4,))
    tables = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in zip(names, shapes, strict=True)]
    node = helper.make_node(
        "EmbedLayerNormalization",
        ["input_ids", "", "words", "places", "", "gamma", "beta"],
        ["states", "unused"],
        domain="com.microsoft",
    )
    path = save_graph(
        tmp_path / "model.onnx",
        [node],
        [helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["b", "s"])],
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["b", "s", 4])],
        tables,
    )
    assert graph_limit(ModelFile.open(path), None) == Limit(9, "the rows of places")


@pytest.mark.parametrize(
    "name", ["token_type_embeddings.weight", "relative_position_embeddings.weight", "weights.wpe2"]
)
def test_other_tables_are_no_limit(tmp_path: Path, name: str) -> None:
    """Two segments do not mean two tokens."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Gather", [name, "input_ids"], ["states"])],
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["b", "s", 4])],
        [numpy_helper.from_array(np.ones((2, 4), np.float32), name)],
    )
    assert graph_limit(ModelFile.open(path), None) is None
