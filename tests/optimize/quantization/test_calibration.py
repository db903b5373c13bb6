"""Calibration inputs come from texts where the model has a tokenizer, and the note says where not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer

from onnxtool.checkpoint.text_files import read_texts
from onnxtool.errors import InputError, PassError
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.quantization.activations import record
from onnxtool.optimize.quantization.calibration import OWN_TEXTS, make_calibration
from tests.optimize.passes.builders import build, normal
from tests.workshop import Workshop


def test_without_a_file_there_are_texts_of_our_own(workshop: Workshop) -> None:
    """All of them, those of similar length together, padded to the longest."""
    calibration = make_calibration(workshop.exported("tiny-encoder"))
    assert calibration.num_texts == len(list(read_texts(OWN_TEXTS))) == 48
    assert calibration.note == ""
    assert sum(len(feeds["input_ids"]) for feeds in calibration.feeds) == 48
    for feeds in calibration.feeds:
        assert feeds["attention_mask"].sum(axis=1).max() == feeds["input_ids"].shape[1]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_texts_come_from_a_file(workshop: Workshop, tmp_path: Path, suffix: str) -> None:
    """Of either format."""
    path = tmp_path / f"texts{suffix}"
    lines = ["a cat", "a dog on a bed"]
    rows = [json.dumps({"id": str(i), "contents": line}) for i, line in enumerate(lines)]
    path.write_text("\n".join(rows if suffix == ".jsonl" else lines))
    calibration = make_calibration(workshop.exported("tiny-encoder"), path)
    assert calibration.num_texts == 2
    assert [feeds["attention_mask"].sum(axis=1).tolist() for feeds in calibration.feeds] == [[4, 7]]


def test_of_many_texts_a_part_is_taken(workshop: Workshop, tmp_path: Path) -> None:
    """From the whole file, which may be sorted."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"text number {number}" for number in range(600)))
    calibration = make_calibration(workshop.exported("tiny-encoder"), path)
    assert calibration.num_texts == 200
    assert calibration.note == "calibrated on 200 of 600 texts"


def test_a_model_without_a_tokenizer_gets_random_ids(workshop: Workshop, tmp_path: Path) -> None:
    """And the note says what that is worth."""
    path = Path(shutil.copy(workshop.exported("tiny-encoder"), tmp_path / "alone.onnx"))
    calibration = make_calibration(path)
    assert calibration.num_texts == 0
    assert "random inputs, which says little" in calibration.note
    assert "no tokenizer.json" in calibration.note
    assert all(np.issubdtype(feeds["input_ids"].dtype, np.integer) for feeds in calibration.feeds)


def test_a_file_of_texts_needs_a_tokenizer(workshop: Workshop, tmp_path: Path) -> None:
    """Random ids are not what was asked for."""
    path = Path(shutil.copy(workshop.exported("tiny-encoder"), tmp_path / "alone.onnx"))
    (tmp_path / "texts.txt").write_text("a cat")
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        make_calibration(path, tmp_path / "texts.txt")


def test_a_model_with_a_cache_is_calibrated_on_steps_as_well(tmp_path: Path) -> None:
    """Prompts alone have no past, and most of what such a model computes has one. What is empty is passed over."""
    inputs = "int64[batch_size, sequence] input_ids, float[batch_size, past_sequence, 8] past"
    body = "e = Gather(t, input_ids) a = Concat<axis=1>(past, e) y = MatMul(a, w) z = MatMul(past, u)"
    graph = f"g ({inputs}) => (float[batch_size, T, 8] y, float[batch_size, P, 8] z) {{ {body} }}"
    model = build(graph, {"t": normal(30, 8), "w": normal(8, 8), "u": normal(8, 8)})
    write_inline(model, tmp_path / "m.onnx")
    feeds = make_calibration(tmp_path / "m.onnx").feeds
    assert {feed["past"].shape[1] for feed in feeds} == {0, 11}
    recorded = record(model, feeds, tmp_path).activations["past"]
    assert len(recorded.lows) == len(recorded.rows) == sum(feed["past"].shape[1] > 0 for feed in feeds)


def test_texts_are_put_into_the_chat_template_of_a_checkpoint(workshop: Workshop, tmp_path: Path) -> None:
    """As `infer` reads them: what is promised of the error holds for what the model is given."""
    exported = workshop.exported("tiny-encoder")
    path = Path(shutil.copy(exported, tmp_path / "model.onnx"))
    stamped = onnx.load(path)
    metadata = {entry.key: entry for entry in stamped.metadata_props}
    metadata["onnxtool.task"].value, metadata["onnxtool.files"].value = "sentence-similarity", "model"
    onnx.save(stamped, path)
    folder = Path(shutil.copytree(exported.with_suffix(""), tmp_path / "model"))
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {"modality_config": {"text": forward, "message": {**forward, "format": "flat"}}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
    (folder / "chat_template.jinja").write_text("on a mat {% for m in messages %}{{ m.content }}{% endfor %}")
    texts = tmp_path / "texts.txt"
    texts.write_text("a cat\na dog")
    (feeds,) = make_calibration(path, texts).feeds
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    chats = tokenizer.encode_batch([f"on a mat {text}" for text in ("a cat", "a dog")], add_special_tokens=False)
    assert feeds["input_ids"].tolist() == [chat.ids for chat in chats]


def test_activations_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Weights of NaN, or a sum that overflows, have no grid; the value is named."""
    model = build(
        "g (float[B, 8] x) => (float[B, 8] y) { n = Mul(x, s) y = MatMul(n, w) }",
        {"s": np.full(8, np.nan, np.float32), "w": normal(8, 8)},
    )
    with pytest.raises(PassError, match="n, the input of a layer, is not finite"):
        record(model, [{"x": normal(3, 8)}], tmp_path)
