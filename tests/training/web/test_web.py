"""Artifacts train in node and in browsers as they do in Python, and checkpoints go both ways."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtool.training.api import CheckpointState, LinearLRScheduler, Progress, fit
from tests.training.small_models import load
from tests.training.web.cases import CASES, Case, make_case
from tests.training.web.javascript import (
    BROWSER,
    EXAMPLE,
    HERE,
    NODE,
    has_package,
    run_node,
    show,
    train_in_browser,
    train_in_node,
    workplace,
)

# Each kernel's sums are in another order, and a hundred steps go on from each difference.
TOLERANCE = 1e-4


def needs(program: str | None, package: str) -> pytest.MarkDecorator:
    name = "node" if program is NODE else "chromium"
    return pytest.mark.skipif(
        program is None or not has_package(package),
        reason=f"no {name} with {package} here; npm ci in tests/training/web installs the latter",
    )


NEEDS_NODE = needs(NODE, "onnxruntime-node")
_CLASSES = "the loss has 3 classes, from 0 to 2; no ignore_index is set; pass classes alone"
RUNTIMES = (
    pytest.param("onnxruntime-node", marks=NEEDS_NODE),
    pytest.param("chromium", marks=needs(BROWSER, "onnxruntime-web")),
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("artifacts")
    return [make_case(name, folder / name) for name in CASES]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_hundred_steps_have_the_losses_of_python(cases: list[Case], tmp_path: Path, runtime: str) -> None:
    """Also from the checkpoint between them, Python's in JavaScript and JavaScript's in Python; no byte is lost."""
    place, folders = workplace(tmp_path / "place"), [case.folder for case in cases]
    found = train_in_browser(place, folders) if runtime == "chromium" else train_in_node(place, runtime, folders)
    for case, result in zip(cases, found, strict=True):
        compare(case, result)
    provider = "wasm" if runtime == "chromium" else "cpu"
    assert {result["executionProvider"] for result in found} == {provider}


@needs(BROWSER, "onnxruntime-web")
def test_the_page_trains_as_it_was_written(cases: list[Case], tmp_path: Path) -> None:
    """A hundred steps on the example's batch; only the runtime is from this machine and not from the network."""
    folder = tmp_path / "page"
    shutil.copytree(EXAMPLE, folder)
    shutil.copytree(cases[0].folder, folder, dirs_exist_ok=True)
    page = show(folder, HERE, "--dump-dom")
    status = re.search(r'<p id="status">(.*?)</p>', page)
    assert status is not None
    done = re.fullmatch(r"Step 100 of 100 on wasm: loss ([\d.]+), ([\d.]+) at first\.", status[1])
    assert done is not None, status[1]
    assert float(done[1]) < float(done[2])
    assert page.count(",") > page.count('points="0,0') == 1
    assert 'href="blob:http' in page


@NEEDS_NODE
def test_what_does_not_fit_is_refused_by_name(cases: list[Case], tmp_path: Path) -> None:
    """A batch, a checkpoint of another model, a schedule, a second step at once; the state stays as it was."""
    place = workplace(tmp_path / "place")
    found = json.loads(run_node(place, "mistakes.mjs", cases[0].folder, cases[1].folder))
    assert found == {
        "unknown input": "there is no input y; a batch has x, labels",
        "missing input": "the batch lacks labels; a batch has x, labels",
        "other dtype": "the input labels is Float32Array, not int64; pass BigInt64Array, or an array of numbers",
        "other dtype of a tensor": "the input x is int64, not float32; pass Float32Array, or an array of numbers",
        "fraction": "the input labels is int64, and has 0.5",
        "no class": f"the input labels has the label -1, and {_CLASSES}",
        "no class of a tensor": f"the input labels has the label 3, and {_CLASSES}",
        "text": "the input x is float32, and has 1",
        "other shape": "the input x is [N, 5], not [2, 4]; reshape it",
        "other length": "the input x, [2, 5], has 9 values",
        "no tensor": "the input x is no tensor; pass {data, dims} or an ort.Tensor",
        "no gradients": "there are no gradients; call accumulate first",
        "two at once": "a step is running; await it first",
        "other checkpoint": "the checkpoint is of another model: conv, head, mean, scale, shift unknown to this one",
        "unknown schedule": "there is no schedule cosine; write one of constant, linear",
        "lacking schedule": "the schedule linear needs a number as learning_rate",
        "unknown option": "Trainer.create knows no provider",
        "no files": "Trainer.create needs either url or files",
        "no ort": "Trainer.create needs ort, the module of onnxruntime-web, -node or -react-native",
        "after all of them": [True, 1],
    }


@NEEDS_NODE
def test_a_checkpoint_of_any_numbers_stays_the_same_file(cases: list[Case], tmp_path: Path) -> None:
    """Python and JavaScript write numbers differently, and properties may look like the rest of the document."""
    rates = (0.0, 1.0, 0.1 + 0.2, 1e-4, 1e-5, 2.5e-7, 123456.75, 1e16, 1e22, 5e-324)
    state = CheckpointState.load_checkpoint(cases[0].folder / "halfway")
    state.properties["epochs"] = 1.0
    state.properties["seed"] = 2**60 + 1
    state.properties["text"] = '"moments": {}, "step": 7, "learning_rate": 1.0, "properties": ä😀\x7f\n'
    files = []
    for place, rate in enumerate(rates):
        state.checkpoint.learning_rate, state.checkpoint.step = rate, place
        files.append(tmp_path / str(place))
        CheckpointState.save_checkpoint(state, files[-1], include_optimizer_state=True)
    run_node(workplace(tmp_path / "place"), "again.mjs", cases[0].folder, *files)
    for file in files:
        assert file.with_name(f"{file.name}.again").read_bytes() == file.read_bytes()


@NEEDS_NODE
def test_the_schedule_and_accumulation_are_those_of_python(cases: list[Case], tmp_path: Path) -> None:
    """Warm-up and decay set each rate, and two batches make one step with their sum."""
    found = json.loads(run_node(workplace(tmp_path / "place"), "schedule.mjs", cases[0].folder))
    _, module, optimizer = load(cases[0].folder)
    scheduler = LinearLRScheduler(optimizer, 2, 6, 1e-2)
    steps: list[Progress] = []
    batches = [(batch["x"], batch["labels"]) for batch in cases[0].batches[:14]]
    fit(module, optimizer, batches, scheduler=scheduler, accumulate=2, on_step=steps.append)
    assert [row["step"] for row in found] == [step.step for step in steps]
    np.testing.assert_array_equal([row["learningRate"] for row in found], [step.learning_rate for step in steps])
    np.testing.assert_allclose([row["loss"] for row in found], [step.loss for step in steps], atol=TOLERANCE, rtol=0)


@NEEDS_NODE
def test_hostile_safetensors_are_refused(tmp_path: Path) -> None:
    """Sizes, places, dtypes and text that do not fit the file; what safetensors of Python accepts is read."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"a": entry}).encode()
    files = {
        "empty": b"",
        "huge header": (2**63).to_bytes(8, "little") + text,
        "long header": (len(text) + 9).to_bytes(8, "little") + text + bytes(8),
        "no JSON": _safetensors(b"{", 0),
        "no UTF-8": _safetensors(b'{"\xff": 1}', 0),
        "no object": _safetensors(b"[1]", 0),
        "null entry": _safetensors(b'{"a": null}', 0),
        "unknown dtype": _safetensors({"a": {**entry, "dtype": "__proto__"}}, 8),
        "negative size": _safetensors({"a": {**entry, "shape": [-1, -2]}}, 8),
        "huge size": _safetensors({"a": {**entry, "shape": [2**60]}}, 8),
        "other size": _safetensors({"a": {**entry, "shape": [3]}}, 8),
        "behind the end": _safetensors({"a": {**entry, "data_offsets": [8, 16]}}, 8),
        "backwards": _safetensors({"a": {**entry, "data_offsets": [8, 0]}}, 8),
        "overlap": _safetensors({"a": entry, "b": {**entry, "data_offsets": [4, 12]}}, 12),
        "hole": _safetensors({"a": entry, "b": {**entry, "data_offsets": [12, 20]}}, 20),
        "rest": _safetensors({"a": entry}, 12),
        "good": _safetensors({"a": entry, "__proto__": {**entry, "data_offsets": [8, 16]}}, 16),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = json.loads(run_node(workplace(tmp_path / "place"), "safetensors.mjs", *map(tmp_path.joinpath, files)))
    assert found.pop() == "a,__proto__"
    for name, message in zip(files, found, strict=False):
        assert message.startswith("TrainingError: this safetensors file is truncated or damaged: "), name


def _safetensors(header: Any, size: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def compare(case: Case, result: dict[str, Any]) -> None:
    half = len(case.losses) // 2
    assert case.losses[-1] < case.losses[0]
    np.testing.assert_allclose(result["losses"], case.losses, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(result["continued"], case.losses[half:], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(result["loss"], case.loss, atol=TOLERANCE, rtol=0)
    assert result["isStable"]
    saved = case.folder / "saved"
    saved.write_bytes(base64.b64decode(result["saved"]))
    state = CheckpointState.load_checkpoint(saved)
    assert state.checkpoint.step == half
    CheckpointState.save_checkpoint(state, case.folder / "again", include_optimizer_state=True)
    assert (case.folder / "again").read_bytes() == saved.read_bytes()
    np.testing.assert_allclose(case.go_on(saved), case.losses[half:], atol=TOLERANCE, rtol=0)
