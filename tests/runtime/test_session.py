"""A session runs on the provider that was asked for, and its failures say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import InputError, ModelFileError, ProviderError, SessionError
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.session import open_session
from tests.infer.tiny_models import TinyModel, save_graph, table

IDS = np.array([[5, 6, 7]], dtype=np.int64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TinyModel(table(15, 4), "logits", inputs=("input_ids", "attention_mask")).write(tmp_path / "model.onnx")


def test_a_session_says_how_it_was_loaded(path: Path) -> None:
    """On which provider, with how many threads, in which time."""
    session = open_session(path, provider="cpu", threads=2)
    assert (session.provider, session.threads) == ("cpu", 2)
    assert 0 < session.load_ms < 1e4
    assert open_session(path, provider="cpu").threads >= 1


@pytest.mark.parametrize(
    ("threads", "usable", "asked_for", "reported"),
    [(0, 8, 0, 8), (0, 3, 3, 3), (0, 1, 1, 1), (2, 8, 2, 2), (2, 1, 2, 2)],
)
def test_fewer_cores_than_the_machine_has_are_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, usable: int, asked_for: int, reported: int
) -> None:
    """Of a machine of 8; where all may be used the choice is onnxruntime's, and what is asked for always holds."""
    given: list[int] = []
    load = ort.InferenceSession

    def watched(file: str, options: ort.SessionOptions, **settings: Any) -> ort.InferenceSession:
        given.append(options.intra_op_num_threads)
        options.intra_op_num_threads = 1
        return load(file, options, **settings)

    monkeypatch.setattr(ort, "InferenceSession", watched)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(usable)), raising=False)
    session = open_session(path, provider="cpu", threads=threads)
    assert (given, session.threads) == ([asked_for], reported)


_COUNT_THREADS = """
import os, sys
from pathlib import Path
import onnxruntime
from onnxtool.runtime.session import open_session
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = len(os.listdir("/proc/self/task"))
session = open_session(Path(sys.argv[1]), provider="cpu")
print(session.threads, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_process_of_one_core_runs_on_one_thread(path: Path) -> None:
    """The calling thread is the one; onnxruntime by itself starts more on a machine of more cores."""
    command = [sys.executable, "-c", _COUNT_THREADS, str(path)]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert process.stdout.split() == ["1", "0"]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("input_ids",), "missing: attention_mask, unknown: none"),
        (("input_ids", "attention_mask", "pixels"), "missing: none, unknown: pixels"),
    ],
)
def test_inputs_that_do_not_fit_are_named(path: Path, names: tuple[str, ...], reason: str) -> None:
    """Both those that are missing and those that the model does not have."""
    with pytest.raises(InputError, match=reason):
        open_session(path, provider="cpu").run(dict.fromkeys(names, IDS))


def test_a_run_that_fails_is_an_error_with_its_shapes(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An id beyond the table stops onnxruntime; nothing is logged besides."""
    session = open_session(path, provider="cpu")
    with pytest.raises(SessionError, match=r"cannot run .*model\.onnx on input_ids \[1, 3\].*: .") as caught:
        session.run({"input_ids": IDS + 15, "attention_mask": IDS})
    assert caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_a_model_that_onnxruntime_cannot_load_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An operator that does not exist, in one line."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("NoSuchOperator", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    with pytest.raises(SessionError, match=r"cannot load .*model\.onnx: .*NoSuchOperator") as caught:
        open_session(path, provider="cpu")
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_external_data_is_checked_before_onnxruntime_sees_the_file(tmp_path: Path) -> None:
    """A model that refers to a file outside its folder is never loaded."""
    weights = numpy_helper.from_array(np.ones((3, 4), np.float32), "w")
    save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Identity", ["w"], ["y"])],
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])],
        [weights],
    )
    model = onnx.load(str(tmp_path / "model.onnx"))
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "../secret.bin")
    tensor.ClearField("raw_data")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match="outside its folder"):
        open_session(tmp_path / "model.onnx", provider="cpu")


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    """By its path."""
    with pytest.raises(ModelFileError, match=r"no such model file: .*none\.onnx"):
        open_session(tmp_path / "none.onnx")


@pytest.mark.skipif(not cuda_problem(), reason="CUDA runs here")
def test_cuda_where_it_is_absent_is_an_error_and_auto_is_the_cpu(path: Path) -> None:
    """A session never runs on another provider than the one that was asked for."""
    with pytest.raises(ProviderError, match="cuda cannot run here"):
        open_session(path, provider="cuda")
    assert open_session(path, provider="auto").provider == "cpu"


@pytest.mark.skipif(not cuda_problem(), reason="CUDA runs here")
def test_a_session_that_fell_back_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts on the CPU where a library of CUDA is missing; whoever asked for CUDA gets an error."""
    monkeypatch.setattr("onnxtool.runtime.session.resolve_provider", lambda name: name)
    with pytest.raises(ProviderError, match="fell back to CPUExecutionProvider|could not start CUDA"):
        open_session(path, provider="cuda")


def test_a_frugal_session_reads_the_weights_where_they_lie_and_answers_the_same(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((64, 128)).astype(np.float32)  # large enough not to be parsed
    file = save_graph(
        tmp_path / "files" / "model.onnx",
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 128])],
        [numpy_helper.from_array(weight, "weight")],
    )
    link = tmp_path / "link.onnx"  # as in a hub's cache
    link.symlink_to(file)
    x = generator.standard_normal((3, 64)).astype(np.float32)
    plain, frugal = (open_session(link, provider="cpu", frugal=frugal).run({"x": x})["y"] for frugal in (False, True))
    np.testing.assert_allclose(plain, x @ weight, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(frugal, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_nodes", "reuses"), [(5000, True), (5001, False)])
def test_buffers_of_a_graph_of_many_nodes_are_not_planned(tmp_path: Path, num_nodes: int, *, reuses: bool) -> None:
    """Planning takes onnxruntime time that grows with the square of the nodes, which this graph alternately negates."""
    nodes = [helper.make_node("Neg", [f"v{number}"], [f"v{number + 1}"]) for number in range(num_nodes)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("v0", f"v{num_nodes}")]
    session = open_session(save_graph(tmp_path / "model.onnx", nodes, ends[:1], ends[1:], []), provider="cpu")
    assert session._inference.get_session_options().enable_mem_reuse is reuses
    x = np.array([1, -2], np.float32)
    np.testing.assert_array_equal(session.run({"v0": x})[f"v{num_nodes}"], -x if num_nodes % 2 else x)
