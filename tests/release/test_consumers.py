"""A folder is opened in its consumer, file by file, and what is wrong with one is seen there."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxtool import ExportOptions, VerifyOptions, export_variants, verify_in_consumer
from onnxtool.consumers import ConsumerReport
from onnxtool.errors import InputError, OptionError, TargetError
from tests.cli.entry_point import run_onnxtool
from tests.docs.documents import ROOT, blocks
from tests.training.web.javascript import HERE, NODE, has_package, run_node
from tests.workshop import Workshop

IN_NODE = pytest.mark.skipif(
    NODE is None or not has_package("@huggingface/transformers"),
    reason="no node with @huggingface/transformers here; npm ci in tests/training/web installs the latter",
)
FILES = ("model.onnx", "model_fp16.onnx", "model_quantized.onnx", "model_int8.onnx", "model_q4.onnx")

Fault = Callable[[onnx.ModelProto], None]


def folder_of(workshop: Workshop, checkpoint: str, target: str, precisions: str) -> Path:
    def make(folder: Path) -> None:
        settings: dict[str, Any] = {"exporter": "torchscript", "target": target, "precisions": precisions}
        export_variants(ExportOptions(workshop.checkpoint(checkpoint), output=folder, **settings))

    return workshop.made(f"{checkpoint}-for-{target}", make)


def verified(folder: Path, checkpoint: Path, consumer: str, **options: Any) -> ConsumerReport:
    return verify_in_consumer(folder, checkpoint, VerifyOptions(consumer=consumer, **options))


@pytest.fixture
def browser(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a folder for Transformers.js, which node finds."""
    monkeypatch.chdir(HERE)
    made = folder_of(workshop, "tiny-encoder", "transformers.js", "fp16,int8,int4")
    return Path(shutil.copytree(made, tmp_path / "browser"))


@IN_NODE
def test_every_file_answers_as_the_checkpoint_alone_and_in_batches(browser: Path, workshop: Workshop) -> None:
    """By the default, and by each dtype; a text beyond the limit is among them."""
    report = verified(browser, workshop.checkpoint("tiny-encoder"), "transformers.js")
    assert report.passed, report.results
    assert [one.file for one in report.results[::2]] == ["", *(f"onnx/{name}" for name in FILES)]
    assert {one.batch_size for one in report.results} == {1, 4}
    assert report.consumer == "@huggingface/transformers 4.3.2"
    exact = [one.error for one in report.results if one.precision == "fp32"]
    rounded = [one.error for one in report.results if one.precision != "fp32"]
    assert max(filter(None, exact)) < 1e-9 < min(filter(None, rounded))


@IN_NODE
@pytest.mark.parametrize("name", ["tiny-splade", "tiny-reranker", "tiny-tagger"])
def test_weights_scores_and_tags_are_compared_too(
    name: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    folder = folder_of(workshop, name, "transformers.js", "")
    report = verified(folder, workshop.checkpoint(name), "transformers.js")
    assert report.passed, report.results
    assert all(one.error is not None and one.error > 0 for one in report.results)


@IN_NODE
def test_the_program_of_the_documentation_runs_in_node(browser: Path, tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs" / "consumers" / "transformers_js.md", "js")
    place = tmp_path / "place"
    place.mkdir()
    browser.rename(place / "minilm-js")
    (place / "node_modules").symlink_to(HERE / "node_modules", target_is_directory=True)
    (place / "program.mjs").write_text(block.text, encoding="utf-8")
    width = json.loads((place / "minilm-js" / "config.json").read_text())["hidden_size"]
    assert run_node(place, "program.mjs").strip() == f"[ 2, {width} ]"


def tensors(model: onnx.ModelProto, least: int = 512) -> dict[str, onnx.TensorProto]:
    """Return the weights by name, largest first."""
    found = [one for one in model.graph.initializer if np.prod(one.dims) >= least]
    return {one.name: one for one in sorted(found, key=lambda one: -np.prod(one.dims))}


def change(tensor: onnx.TensorProto, how: Callable[[Any], Any]) -> None:
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(how(array.copy()).astype(array.dtype), tensor.name))


def change_input(model: onnx.ModelProto, operators: Mapping[str, int], how: Callable[[Any], Any]) -> None:
    """Change the constant that the first node of one of these operators has at this place."""
    by_name = {one.name: one for one in model.graph.initializer}
    for node in model.graph.node:
        place = operators.get(node.op_type)
        if place is not None and place < len(node.input) and node.input[place] in by_name:
            change(by_name[node.input[place]], how)
            return
    raise AssertionError(sorted({node.op_type for node in model.graph.node}))


def times_four(array: Any) -> Any:
    columns = array if array.shape[-1] > 1 else array.reshape(-1)
    columns[..., 3] *= 4
    return array


def rolled(array: Any) -> Any:
    return np.roll(array, 1)


def a_column_times_four(model: onnx.ModelProto) -> None:
    change(list(tensors(model).values())[1], times_four)


def rows_moved_by_one(model: onnx.ModelProto) -> None:
    change(next(iter(tensors(model).values())), lambda array: np.roll(array, 1, axis=0))


def infinite(model: onnx.ModelProto) -> None:
    change(list(tensors(model).values())[1], lambda array: np.full_like(array, np.inf))


def all_tokens_attended(model: onnx.ModelProto) -> None:
    """The mask is ignored, so that padding counts."""
    model.graph.node.insert(0, onnx.helper.make_node("Shape", ["attention_mask"], ["onnxtool.shape"]))
    one = onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1])
    model.graph.node.insert(
        1, onnx.helper.make_node("ConstantOfShape", ["onnxtool.shape"], ["onnxtool.ones"], value=one)
    )
    for node in model.graph.node[2:]:
        node.input[:] = ["onnxtool.ones" if name == "attention_mask" else name for name in node.input]


SCALES = {"MatMulIntegerToFloat": 3, "DynamicQuantizeMatMul": 2, "MatMulNBits": 2}
ZERO_POINTS = {"MatMulIntegerToFloat": 5, "DynamicQuantizeMatMul": 3, "MatMulNBits": 3, "MatMulInteger": 3}


def scales_moved_by_one(model: onnx.ModelProto) -> None:
    change_input(model, SCALES, rolled)


def scales_times_four(model: onnx.ModelProto) -> None:
    change_input(model, SCALES, times_four)


# Each in a file of its own, all in one folder.
PLANTED: tuple[dict[str, Fault], ...] = (
    {
        "model.onnx": a_column_times_four,
        "model_fp16.onnx": rows_moved_by_one,
        "model_quantized.onnx": scales_moved_by_one,
        "model_int8.onnx": scales_times_four,
        "model_q4.onnx": scales_moved_by_one,
    },
    {
        "model.onnx": all_tokens_attended,
        "model_fp16.onnx": infinite,
        "model_quantized.onnx": all_tokens_attended,
        "model_int8.onnx": rows_moved_by_one,
        "model_q4.onnx": scales_times_four,
    },
)


@IN_NODE
@pytest.mark.parametrize("faults", PLANTED)
def test_a_fault_in_a_file_is_seen_by_its_consumer(
    faults: Mapping[str, Fault], browser: Path, workshop: Workshop
) -> None:
    for name, plant in faults.items():
        path = browser / "onnx" / name
        model = onnx.load(path)
        plant(model)
        onnx.save(model, path)
    report = verified(browser, workshop.checkpoint("tiny-encoder"), "transformers.js")
    seen = {one.file.removeprefix("onnx/") for one in report.results if not one.passed}
    assert seen == {"", *faults}, report.results
    assert not report.passed


def edited(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def a_limit_one_larger(folder: Path) -> None:
    limit = json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]
    edited(folder / "tokenizer_config.json", model_max_length=limit + 1)


def padded_on_the_other_side(folder: Path) -> None:
    edited(folder / "tokenizer_config.json", padding_side="left")


def case_kept(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer.json").read_text())
    edited(folder / "tokenizer.json", normalizer={**settings["normalizer"], "lowercase": False})


def no_special_tokens(folder: Path) -> None:
    edited(folder / "tokenizer.json", post_processor=None)


def two_words_exchanged(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer.json").read_text())
    words = settings["model"]["vocab"]
    words["a"], words["the"] = words["the"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(settings))


def the_wrong_precision(folder: Path) -> None:
    shutil.copyfile(folder / "onnx" / "model_q4.onnx", folder / "onnx" / "model_fp16.onnx")


@IN_NODE
@pytest.mark.parametrize(
    "plant",
    [
        a_limit_one_larger,
        padded_on_the_other_side,
        case_kept,
        no_special_tokens,
        two_words_exchanged,
        the_wrong_precision,
    ],
)
def test_a_fault_beside_the_graphs_is_seen_too(
    plant: Callable[[Path], None], browser: Path, workshop: Workshop
) -> None:
    plant(browser)
    assert not verified(browser, workshop.checkpoint("tiny-encoder"), "transformers.js").passed


def other_pooling(folder: Path) -> None:
    path = folder / "1_Pooling" / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "pooling_mode": "cls"}))


def test_another_pooling_is_seen_in_each_file_that_sentence_transformers_opens(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A sound folder passes in docs/consumers/sentence_transformers.md, which tests/docs/test_commands.py runs."""
    checkpoint = workshop.checkpoint("tiny-encoder")
    folder = folder_of(workshop, "tiny-encoder", "sentence-transformers", "fp32,int8")
    wrong = Path(shutil.copytree(folder, tmp_path / "wrong"))
    other_pooling(wrong)
    result = run_onnxtool(tmp_path, "verify", wrong, checkpoint, "--consumer", "sentence-transformers")
    assert result.returncode == 1
    for name in ("(default)", "onnx/model.onnx", "onnx/model_O2.onnx", "onnx/model_qint8_avx512_vnni.onnx"):
        assert name in result.stdout
    assert "8 of 8 answers differ from PyTorch's in sentence-transformers" in result.stderr


def test_a_consumer_that_cannot_be_opened_is_an_error_with_the_reason(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = workshop.checkpoint("tiny-encoder")
    folder = folder_of(workshop, "tiny-encoder", "sentence-transformers", "fp32,int8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="Vespa is no package") as mistake:
        verified(folder, checkpoint, "vespa")
    assert "sentence-transformers" in str(mistake.value.hint)
    with pytest.raises(InputError, match="Transformers.js opens no file called model_O2.onnx"):
        verified(folder, checkpoint, "transformers.js")
    with pytest.raises(InputError, match=r"has no model\.onnx, which fastembed opens"):
        verified(folder, checkpoint, "fastembed")
    with pytest.raises(InputError, match=r"model\.onnx is no folder"):
        verified(folder / "onnx" / "model.onnx", checkpoint, "sentence-transformers")
    with pytest.raises(OptionError, match="--precision has no effect on --consumer"):
        verified(folder, checkpoint, "fastembed", precision="int8")
    with pytest.raises(OptionError, match="--interpreter is for --consumer"):
        VerifyOptions(interpreter="python")
    shutil.copyfile(folder / "onnx" / "model.onnx", folder.parent / "model.onnx")
    with pytest.raises(InputError, match=r"no-python cannot be started to run fastembed.*"):
        verified(flat(folder, tmp_path), checkpoint, "fastembed", interpreter="no-python")
    with pytest.raises(InputError, match="fastembed is not installed: .* has no fastembed") as missing:
        verified(flat(folder, tmp_path), checkpoint, "fastembed", interpreter=sys.executable)
    assert "pip install fastembed" in str(missing.value.hint)
    with pytest.raises(TargetError, match="infinity"):
        verified(folder, workshop.checkpoint("tiny-splade"), "infinity")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("rows[1:]", "11 answers to 12 texts"),
        ("[row[1:] for row in rows]", r"12 texts have answers [31], and [32] in PyTorch"),
        ("[{40: 1.0} for row in rows]", r"12 texts have answers [41], and [32] in PyTorch"),
    ],
)
def test_answers_of_another_form_are_not_compared(rows: str, reason: str, workshop: Workshop, tmp_path: Path) -> None:
    """As a consumer would give them that a folder of another tool misleads; here a stand-in for node does."""
    folder = folder_of(workshop, "tiny-encoder", "sentence-transformers", "fp32,int8")
    js = tmp_path / "js"
    (js / "onnx").mkdir(parents=True)
    model = onnx.load(folder / "onnx" / "model.onnx")
    for entry in model.metadata_props:
        entry.value = "float16" if entry.key == "onnxtool.dtype" else entry.value
    onnx.save(model, js / "onnx" / "model.onnx")
    node = tmp_path / "node"
    node.write_text(
        f"#!{sys.executable}\nimport json, sys\njob = json.load(open(sys.argv[2]))\n"
        f"rows = [[1.0] * 32 for _ in job['texts']['']]\nanswer = {{'rows': {rows}, 'seconds': 1.0}}\n"
        "json.dump({'version': 'a', 'answers': [answer] * len(job['calls'])}, open(sys.argv[3], 'w'))\n"
    )
    node.chmod(0o755)
    report = verified(js, workshop.checkpoint("tiny-encoder"), "transformers.js", interpreter=str(node))
    assert not report.passed
    assert {one.reason for one in report.results} == {reason}
    assert {one.precision for one in report.results} == {"fp16"}


def flat(folder: Path, place: Path) -> Path:
    """Return a folder with the graph where other consumers look for it."""
    (place / "flat").mkdir(exist_ok=True)
    shutil.copyfile(folder / "onnx" / "model.onnx", place / "flat" / "model.onnx")
    return place / "flat"
