"""The makers and judges behind docs/coverage.md."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxtool.runtime.quiet import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import survey.trials
from survey.decoding import judge_decoding
from survey.exports import export_with_transformers
from survey.judging import cases_for, difference, judge
from survey.optimizing import judge_optimized, optimize, record_cases, together
from survey.processes import BUG, Limits, Workers
from survey.tables import render
from survey.trials import Trial, _name_verdict, try_precisions, try_type, without_folders
from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.facts import Facts
from zoo.running import load_model
from zoo.shrinking import shrink
from zoo.tasks import TASKS, find_task, model_classes

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a masked-language-model head."""
    folder = tmp_path_factory.mktemp("zoo") / "bert"
    make_checkpoint(find_task("fill-mask"), "bert", folder)
    return folder


@pytest.fixture(scope="module")
def exported(bert: Path) -> Path:
    """An export of it."""
    from onnxtool.export import ExportOptions, export_model

    output = bert.parent / "bert.onnx"
    export_model(ExportOptions(str(bert), output=output, task="fill-mask", exporter="torchscript"))
    return output


def _saved(model: onnx.ModelProto, path: Path) -> dict[str, str]:
    onnx.save(model, path)
    return {"model": str(path)}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_has_types(task: Any) -> None:
    """The mappings that a task names are transformers' own, and have entries."""
    assert len(model_classes(task)) > 10


@pytest.mark.parametrize("model_type", ["bert", "llama", "t5", "vit", "mixtral"])
def test_a_shrunk_configuration_is_small(model_type: str) -> None:
    """Widths, depth and vocabulary are cut, and the special tokens stay in the vocabulary."""
    from transformers import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[model_type]())
    assert config.hidden_size <= 64
    assert config.num_hidden_layers == 2
    assert getattr(config, "vocab_size", 0) <= 1000
    for role in ("pad", "bos", "eos"):
        assert (getattr(config, f"{role}_token_id", None) or 0) < 1000


def test_every_kind_of_layer_stays() -> None:
    """A model that mixes layers still mixes them when it is small."""
    from transformers import CONFIG_MAPPING

    base = CONFIG_MAPPING["gemma3_text"]()
    assert set(shrink(base).layer_types) == set(base.layer_types)


def test_a_checkpoint_loads_with_its_tokenizer(bert: Path) -> None:
    """AutoTokenizer reads it offline; its ids are the configuration's, and all of them have an embedding."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config = AutoTokenizer.from_pretrained(bert), AutoConfig.from_pretrained(bert)
    assert tokenizer.pad_token_id == config.pad_token_id
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    assert len(tokenizer) < config.vocab_size
    tokens = tokenizer(["what is this?", "a text"], padding=True)
    assert set(tokens) == {"input_ids", "token_type_ids", "attention_mask"}
    assert tokenizer.unk_token_id not in tokens["input_ids"][0]
    assert tokens["attention_mask"][1][-1] == 0


def test_decoders_pad_on_the_left(tmp_path: Path) -> None:
    """Their tokenizer pads where generation needs it."""
    from transformers import AutoTokenizer

    facts = make_checkpoint(find_task("text-generation"), "gpt2", tmp_path / "gpt2")
    assert facts == Facts.read(tmp_path / "gpt2")
    assert AutoTokenizer.from_pretrained(tmp_path / "gpt2").padding_side == "left"


def test_images_have_the_size_of_the_model(tmp_path: Path) -> None:
    """The image processor's file names the type's own class and the size of the tiny configuration."""
    make_checkpoint(find_task("image-classification"), "vit", tmp_path / "vit")
    content = json.loads((tmp_path / "vit" / "preprocessor_config.json").read_text("utf-8"))
    config = json.loads((tmp_path / "vit" / "config.json").read_text("utf-8"))
    assert content["image_processor_type"] == "ViTImageProcessor"
    assert content["size"] == {"height": config["image_size"], "width": config["image_size"]}


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    """A type that needs more than its task gives is no checkpoint, and leaves none."""
    with pytest.raises(NotRunnableError, match="bbox"):
        make_checkpoint(find_task("token-classification"), "bros", tmp_path / "bros")
    assert not (tmp_path / "bros").exists()


def test_the_same_seed_gives_the_same_weights(bert: Path, tmp_path: Path) -> None:
    """A checkpoint can be made again, byte for byte."""
    make_checkpoint(find_task("fill-mask"), "bert", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (bert / "model.safetensors").read_bytes()


def test_a_right_export_is_judged_right(bert: Path, exported: Path) -> None:
    """All cases are asked, and none differs."""
    verdict = judge(str(bert), {"model": str(exported)})
    assert verdict["right"], verdict
    assert verdict["cases"] == 7
    assert verdict["error"] < 1


def test_what_is_optimized_is_judged_by_the_exported_file(bert: Path, exported: Path, tmp_path: Path) -> None:
    """It gives the same in fp32 on inputs of the judge's own; with a bias moved, or another precision, it does not."""
    cases, output = str(tmp_path / "cases"), tmp_path / "optimized.onnx"
    assert record_cases(str(bert), {"model": str(exported)}, cases) == {"cases": 7}
    tried = optimize(str(exported), str(output), "fp32")
    assert tried["attentions"] == [2, 2]
    right = judge_optimized({"model": str(output)}, cases, "fp32")
    assert (right["right"], right["cases"]) == (True, 7), right
    model = onnx.load(output)
    bias = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [3 * 64])
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 0.05, bias.name))
    wrong = judge_optimized(_saved(model, output), cases, "fp32")
    assert not wrong["right"]
    assert "differs by" in wrong["reason"]
    assert "is a ZIP archive" in optimize(str(tmp_path / "cases" / "0.npz"), str(output), "fp32")["error"]


def test_only_right_exports_are_optimized(tmp_path: Path) -> None:
    """A refused one has nothing to optimize, and what has a verdict keeps it."""
    workers = Workers(Limits(), preloaded=())
    for known in ({"onnxtool": {"verdict": "refused"}}, {"onnxtool": {"verdict": "right"}, "optimized": {"fp32": {}}}):
        assert try_precisions(Trial("fill-mask", "bert"), ["fp32"], known, workers, tmp_path) == known


def test_the_script_optimizes_right_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone, the quickest first; what is to be redone forgets that precision and keeps the other."""
    with pytest.MonkeyPatch.context() as patch:  # importing the script sets the environment of its processes
        patch.setattr(os, "environ", os.environ.copy())
        spec = importlib.util.spec_from_file_location("survey_script", ROOT / "scripts" / "coverage.py")
        assert spec is not None
        assert spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
    exported = {"way": "dynamo", "reason": "", "fixed_axes": {}, "verdict": "right"}
    right = {"verdict": "right", "reason": "", "attentions": [2, 2], "notes": {}}
    known: dict[str, Any] = {
        "fill-mask/albert": {"runnable": {}, "onnxtool": {**exported, "seconds": 2.0}},
        "fill-mask/bart": {"runnable": {}, "onnxtool": {**exported, "seconds": 1.0, "verdict": "refused"}},
        "fill-mask/bert": {
            "runnable": {},
            "onnxtool": {**exported, "seconds": 1.0},
            "optimized": {"fp32": right, "int8": right},
        },
    }
    (tmp_path / "results.json").write_text(json.dumps(known), "utf-8")
    asked = []

    def fake(trial: Trial, precisions: list[str], known: dict[str, Any], *_args: Any, keep: bool) -> dict[str, Any]:
        asked.append((trial.key, precisions, sorted(known.get("optimized", {})), keep))
        return {**known, "optimized": {**known.get("optimized", {}), "fp32": {**right, "verdict": "wrong"}}}

    monkeypatch.setattr(script, "try_precisions", fake)
    paths = [f"--{name}={tmp_path / file}" for name, file in (("results", "results.json"), ("output", "page.md"))]
    asks = ["--optimize", "fp32", "--redo", "--keep", "--tasks", "fill-mask", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["coverage.py", *paths, f"--work_dir={tmp_path}", *asks])
    assert script.main() == 1
    assert asked == [("fill-mask/bert", ["fp32"], ["int8"], True), ("fill-mask/albert", ["fp32"], [], True)]
    saved = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert saved["fill-mask/bert"]["optimized"]["int8"] == right
    assert "| fill-mask | 2 | 2 | 0 | 0 | 2 | 0 | 0.0 | 1 | 1 |" in (tmp_path / "page.md").read_text("utf-8")


def test_two_graphs_of_one_export_are_one_row() -> None:
    """Encoder and decoder add up; the error is the larger one."""
    one = {
        "attentions": [2, 2],
        "fused": {"attention": 2},
        "nodes": [9, 5],
        "notes": {},
        "left_out": [],
        "has_heads": True,
    }
    both = together(
        [
            {**one, "quantized": {"layers": 3, "kept": 1, "embeddings": 1, "error": 0.002}},
            {**one, "notes": {"attention": "2 left alone"}, "left_out": ["gelu"], "quantized": None},
        ]
    )
    assert both["attentions"] == [4, 4]
    assert both["nodes"] == [18, 10]
    assert both["notes"] == {"attention": "2 left alone"}
    assert both["left_out"] == ["gelu"]
    assert both["quantized"] == {"layers": 3, "kept": 1, "embeddings": 1, "error": 0.002}


def test_a_mask_that_is_not_applied_is_judged_wrong(bert: Path, exported: Path, tmp_path: Path) -> None:
    """A graph that reads ones in place of its mask differs on padding, and there alone."""
    model = onnx.load(exported)
    ones = numpy_helper.from_array(np.ones((), dtype=np.int64), "one")
    model.graph.initializer.append(ones)
    shape = helper.make_node("Shape", ["attention_mask"], ["mask_shape"])
    everywhere = helper.make_node("Expand", ["one", "mask_shape"], ["all_ones"])
    for node in model.graph.node:
        node.input[:] = ["all_ones" if name == "attention_mask" else name for name in node.input]
    for node in (everywhere, shape):
        model.graph.node.insert(0, node)
    verdict = judge(str(bert), _saved(model, tmp_path / "mask.onnx"))
    assert not verdict["right"]
    assert "ragged" in verdict["reason"]


def test_an_output_that_is_off_is_judged_wrong(bert: Path, exported: Path, tmp_path: Path) -> None:
    """A thousandth of the largest value is too much."""
    model = onnx.load(exported)
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["before" if name == output.name else name for name in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1.001), "factor"))
    model.graph.node.append(helper.make_node("Mul", ["before", "factor"], [output.name]))
    verdict = judge(str(bert), _saved(model, tmp_path / "off.onnx"))
    assert "differs" in verdict["reason"]


def test_a_hidden_fixed_axis_is_judged_wrong(bert: Path, exported: Path, tmp_path: Path) -> None:
    """A graph that says that an axis is dynamic, and takes one size only, fails where PyTorch runs."""
    model = onnx.load(exported)
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 16]), "sizes"))
    for node in model.graph.node:
        node.input[:] = ["two_by_16" if name == "input_ids" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "sizes"], ["two_by_16"]))
    verdict = judge(str(bert), _saved(model, tmp_path / "fixed.onnx"))
    assert "onnxruntime raises" in verdict["reason"]


def test_a_single_row_is_asked_with_padding(bert: Path) -> None:
    """A file that is fixed to one row and a length has its mask tried as well, on either side."""
    fixed = {"input_ids": {0: 1, 1: 128}}
    cases = {case.name: case for case in cases_for(Facts.read(bert), load_model(Facts.read(bert), bert), bert, fixed)}
    assert [cases[name].feeds["attention_mask"].sum() for name in ("full", "ragged right", "ragged left")] == [
        128,
        42,
        42,
    ]
    assert cases["ragged left"].feeds["attention_mask"][0, 0] == 0


def test_a_file_that_takes_something_else_is_not_judged(bert: Path, exported: Path, tmp_path: Path) -> None:
    """Nobody who has a text has what it asks for, and an array of ids is no picture."""
    for name in ("xpath_tags_seq", "pixel_values"):
        model = onnx.load(exported)
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
        verdict = judge(str(bert), _saved(model, tmp_path / "other.onnx"))
        assert verdict["right"] is None
        assert f"an input called {name}" in verdict["reason"]


def test_only_onnxtool_is_blamed_for_what_cannot_be_judged() -> None:
    """A peer has no part in what the judge lacks."""
    assert [_name_verdict("optimum", right) for right in (True, False, None)] == ["right", "wrong", "unjudged"]
    assert _name_verdict("onnxtool", None) == "wrong"


def test_what_was_runnable_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks a package today says nothing about a type: its tools are not run, and that is all."""
    monkeypatch.setattr(survey.trials, "_make", lambda *_arguments: {"reason": "needs a package"})
    known = {"runnable": {"parameters": 1}, "onnxtool": {"verdict": "right"}}
    arguments = (["onnxtool", "optimum"], known, Workers(Limits(), preloaded=()), tmp_path, None)
    assert try_type(Trial("fill-mask", "bert"), *arguments) == known
    assert try_type(Trial("fill-mask", "bert"), [], {}, *arguments[2:]) == {"runnable": {"reason": "needs a package"}}


def test_padding_does_not_count() -> None:
    """Only real tokens are compared."""
    expected, found = np.zeros((1, 2, 3)), np.zeros((1, 2, 3))
    found[0, 1] = 7
    assert difference({"logits": expected}, {"logits": found}, np.array([[True, False]])) == 0
    assert difference({"logits": expected}, {"logits": found}, np.array([[True, True]])) > 1


def test_another_shape_or_no_number_never_passes() -> None:
    """A missing row and a NaN are infinitely far away."""
    expected = {"logits": np.zeros((2, 3))}
    assert difference(expected, {"logits": np.zeros((1, 3))}, None) == float("inf")
    assert difference(expected, {"logits": np.full((2, 3), np.nan)}, None) == float("inf")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Workers whose server has imported nothing."""
    # No empty part, which stands for the working folder: Python does not start in a folder that is gone.
    path = filter(None, [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        yield Workers(Limits(time_s=20, memory_gb=1), preloaded=())


def _takes_memory() -> int:
    return len(bytearray(4 << 30))


def _says_and_ends() -> None:
    sys.stdout.write("said\n")
    sys.exit(3)


@pytest.mark.usefixtures("workers")
def test_a_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """It has no exit code."""
    slow = Workers(Limits(time_s=1), preloaded=())
    assert slow.run(time.sleep, tmp_path, "slow", 60).exit_code is None


def test_a_step_that_takes_too_much_memory_fails(workers: Workers, tmp_path: Path) -> None:
    """The limit is the step's own, and the process that started it goes on."""
    outcome = workers.run(_takes_memory, tmp_path, "large")
    assert outcome.exit_code == BUG
    assert "MemoryError" in outcome.stderr


def test_a_step_gives_back_what_it_returned_and_said(workers: Workers, tmp_path: Path) -> None:
    """The value, or the exit code and the output."""
    assert workers.run(len, tmp_path, "length", "four").value == 4
    outcome = workers.run(_says_and_ends, tmp_path, "ends")
    assert (outcome.exit_code, outcome.stdout, outcome.value) == (3, "said\n", None)


def test_the_summary_counts_each_verdict() -> None:
    """Percentages are of the runnable types, and a fixed axis is marked."""
    facts = {"architecture": "X", "parameters": 1}
    tried = {"way": "dynamo", "seconds": 1.0, "reason": "", "fixed_axes": {}}
    page = render(
        {
            "fill-mask/a": {"runnable": facts, "onnxtool": {**tried, "verdict": "right"}},
            "fill-mask/b": {
                "runnable": facts,
                "onnxtool": {**tried, "verdict": "right", "fixed_axes": {"batch": 1}},
            },
            "fill-mask/c": {
                "runnable": facts,
                "onnxtool": {**tried, "verdict": "wrong", "reason": "far | /a/b/c.onnx"},
            },
            "fill-mask/d": {"runnable": {"reason": "needs boxes"}},
        }
    )
    assert "| 4 | 3 | 2 | 1 | 0 | 1 | 0 | 66.7 |" in page
    assert "| b | right* | dynamo, batch 1 |" in page
    assert "| far \\| c.onnx |" in page
    assert "| d | not runnable |" in page


def test_what_was_optimized_is_counted_and_told() -> None:
    """Percentages are of what was tried; each attention that is left, and each file that is not right, has a reason."""
    tried = {"verdict": "right", "way": "dynamo", "seconds": 1.0, "reason": "", "fixed_axes": {}}
    right = {"verdict": "right", "reason": "", "attentions": [2, 2], "notes": {}, "left_out": []}
    capped = {**right, "attentions": [0, 2], "notes": {"attention": "2 left alone: a Tanh"}, "left_out": ["gelu"]}
    unseen = {**right, "attentions": [0, 0], "has_heads": True}
    half = {**right, "attentions": [1, 2], "notes": {"attention": "1 left alone: of rank 5"}}
    refused = {"verdict": "refused", "reason": "it cannot hold 0.01"}
    pairs = {
        "a": {"fp32": right, "int8": right},
        "b": {"fp32": capped, "int8": refused},
        "c": {"fp32": unseen},
        "d": {"fp32": {**unseen, "has_heads": False}},
        "e": {"fp32": {"verdict": "not exported", "reason": "no memory"}},
        "g": {"fp32": half},
    }
    results: dict[str, Any] = {
        f"fill-mask/{name}": {"runnable": {}, "onnxtool": tried, "optimized": optimized}
        for name, optimized in pairs.items()
    }
    results["fill-mask/f"] = {"runnable": {}, "onnxtool": tried}
    page = render(results)
    assert "| fill-mask | 7 | 5 | 5 | 0 | 0 | 0 | 100.0 | 2 | 1 | 1 | 0 | 0 | 50.0 |" in page
    assert "| fill-mask/b | fp32 | right | gelu |  |" in page
    assert "| fill-mask/b | int8 | refused |  | it cannot hold 0.01 |" in page
    assert "Of 3 model types with softmax attention, 1 (33.3 %) have all of it fused. c: attention without" in page
    assert "| g | fill-mask | 1 of 2 | 1 left alone: of rank 5 |" in page
    assert "| b | fill-mask | 0 of 2 | 2 left alone: a Tanh |" in page
    assert "| c | fill-mask | 0 of 0 | no Softmax of the graph weights values |" in page
    assert "| b | right | dynamo | 1.0 |  | right | refused | 0 of 2 |" in page
    assert "| f | right | dynamo | 1.0 |  | not tried | not tried |  |" in page


def test_a_peer_that_was_not_run_has_not_failed() -> None:
    """Its counts are of what it was run on, and say so where that is not everything."""
    tried = {"way": "", "seconds": 1.0, "reason": "", "fixed_axes": {}, "verdict": "right"}
    both = {"runnable": {}, "onnxtool": tried, "optimum": {**tried, "verdict": "refused"}}
    unjudged = {"runnable": {}, "onnxtool": tried, "optimum": {**tried, "verdict": "unjudged"}}
    page = render({"fill-mask/a": both, "fill-mask/b": {"runnable": {}, "onnxtool": tried}, "text-generation/a": both})
    assert "| 100.0 | 0, 0, 1 (of 1) |" in page
    assert "| 100.0 | 0, 0, 1 |" in page
    assert "| b | right |  | 1.0 |  | not run |" in page
    assert "| 100.0 | 0, 0, 1 (of 1) |" in render({"fill-mask/a": both, "fill-mask/b": unjudged})
    alone = render({"fill-mask/a": both, "text-generation/a": {"runnable": {}, "onnxtool": tried}})
    assert "| 100.0 | not run |" in alone


@pytest.mark.slow
def test_a_cache_is_judged_token_by_token(tmp_path: Path) -> None:
    """Prefill and decode are right; a decode step that reads keys for values is not."""
    folder = tmp_path / "gpt2"
    make_checkpoint(find_task("text-generation-with-past"), "gpt2", folder)
    with quiet():
        export_with_transformers(str(folder), "text-generation-with-past", str(tmp_path / "model.onnx"))
    files = {role: str(tmp_path / f"model-{role}.onnx") for role in ("prefill", "decode")}
    verdict = judge_decoding(str(folder), files)
    assert verdict["right"], verdict
    assert verdict["cases"] == 5
    model = onnx.load(files["decode"])
    keys, values = (f"input.past_key_values.layers.0.{kind}" for kind in ("keys", "values"))
    for node in model.graph.node:
        node.input[:] = [{keys: values, values: keys}.get(name, name) for name in node.input]
    onnx.save(model, files["decode"])
    assert "differs" in judge_decoding(str(folder), files)["reason"]


@pytest.mark.slow
def test_hashes_under_a_seed_are_exported(tmp_path: Path) -> None:
    """Reformer draws its rotations in every run, inside of an autograd function that holds all of its layers."""
    from onnxtool.export import ExportOptions, export_model

    make_checkpoint(find_task("fill-mask"), "reformer", tmp_path / "reformer")
    output = tmp_path / "reformer.onnx"
    report = export_model(
        ExportOptions(str(tmp_path / "reformer"), output=output, task="fill-mask", exporter="torchscript")
    )
    assert report.fixed_axes == {"sequence": 128, "batch_size": 1}
    verdict = judge(str(tmp_path / "reformer"), {"model": str(output)})
    assert verdict["right"], verdict


@pytest.mark.slow
def test_the_script_tries_exports_and_judges(tmp_path: Path) -> None:
    """The command line, from the making of a checkpoint to the page; what is known is not tried again."""
    command = [
        *(sys.executable, str(ROOT / "scripts" / "coverage.py"), "--tasks", "fill-mask", "--types", "bert"),
        *(
            "--work_dir",
            str(tmp_path / "work"),
            "--output",
            str(tmp_path / "coverage.md"),
            "--results",
            str(tmp_path / "results.json"),
            "--resume",
        ),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "fill-mask/bert: onnxtool right" in first.stderr
    page = (tmp_path / "coverage.md").read_text("utf-8")
    assert "| bert | right | torchscript" in page
    shutil.rmtree(tmp_path / "work")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert not (tmp_path / "work").exists()
    assert (tmp_path / "coverage.md").read_text("utf-8") == page


def test_what_is_kept_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    """The results stand in the repository, and where they were made is nobody's business."""
    trials = tmp_path / "trials"
    reason = f"{trials / 'fill-mask' / 'bert' / 'checkpoint'} has no tokenizer; see {trials / 'a'}"
    kept = without_folders({"onnxtool": {"reason": reason}}, trials, tmp_path)
    assert kept == {"onnxtool": {"reason": "fill-mask/bert/checkpoint has no tokenizer; see a"}}
