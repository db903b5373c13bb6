"""The cache on disk: what one process translated, the next one only loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtool.errors import OutputWriteError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, conversion, converters, translation
from tests.torch_backend.oracle import require_same

_PROGRAM = """
import sys, torch
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, conversion, converters
def translate(graph):
    print("translated")
    return conversion.translate(graph)
converters.CONVERTERS["fx"] = translate
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
compiled = torch.compile(model, backend=OrtBackend(OrtBackendOptions(cache_folder=sys.argv[1])))
compiled(torch.ones(3, 4)).sum().backward()
print(model[0].weight.grad.sum().item())
"""


def run(folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_second_process_translates_nothing(tmp_path: Path) -> None:
    """Both graphs come from the disk, and their gradients are the same."""
    first, second = run(tmp_path), run(tmp_path)
    assert first.count("translated") == 2
    assert second == first[2:]


@pytest.fixture
def translations(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Every graph that is translated while the test runs."""
    seen: list[torch.fx.GraphModule] = []

    def record(graph_module: torch.fx.GraphModule) -> object:
        seen.append(graph_module)
        return conversion.translate(graph_module)

    monkeypatch.setitem(converters.CONVERTERS, "fx", record)
    return seen


def compile_and_call(function: object, folder: Path, *inputs: torch.Tensor) -> OrtBackend:
    torch._dynamo.reset()
    translation._SESSIONS.clear()  # as if this was another process
    return require_same(function, *inputs, options=OrtBackendOptions(cache_folder=folder))  # type: ignore[arg-type]


def test_other_shapes_types_and_constants_are_other_graphs(
    tmp_path: Path, translations: list[torch.fx.GraphModule]
) -> None:
    """Each of them is translated once, and the same ones again not."""
    for _ in range(2):
        compile_and_call(lambda x: x * 2, tmp_path, torch.rand(3))
        compile_and_call(lambda x: x * 3, tmp_path, torch.rand(3))
        compile_and_call(lambda x: x * 2, tmp_path, torch.rand(4))
        compile_and_call(lambda x: x * 2, tmp_path, torch.rand(3).double())
    assert len(translations) == 4


def test_what_cannot_be_compiled_is_known_to_the_next_process(tmp_path: Path) -> None:
    """Reasons are kept as JSON, by the number of the node."""
    compile_and_call(lambda x: torch.erf(x * 2) + 1, tmp_path, torch.rand(3, dtype=torch.float64))
    (kept,) = tmp_path.glob("*.json")
    assert all(node.isdigit() and "onnxruntime" in reason for node, reason in json.loads(kept.read_text()).items())


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a"])
def test_a_damaged_model_is_made_again(tmp_path: Path, content: bytes) -> None:
    """A cache may be lost at any time."""
    compile_and_call(nn.Linear(3, 2), tmp_path, torch.rand(2, 3))
    for path in tmp_path.glob("*.onnx"):
        path.write_bytes(content)
    compile_and_call(nn.Linear(3, 2), tmp_path, torch.rand(2, 3))
    assert all(path.read_bytes() != content for path in tmp_path.glob("*.onnx"))


@pytest.mark.parametrize("content", ["", "[1]", '{"x": 1}', '{"999": "far"}', "[" * 100_000])
def test_damaged_reasons_are_found_out_again(tmp_path: Path, content: str) -> None:
    """They are data, and nothing of them is evaluated."""
    compile_and_call(lambda x: torch.erf(x * 2), tmp_path, torch.rand(3, dtype=torch.float64))
    for path in tmp_path.glob("*.json"):
        path.write_text(content)
    compile_and_call(lambda x: torch.erf(x * 2), tmp_path, torch.rand(3, dtype=torch.float64))


def test_transforms_of_the_user_are_not_cached(tmp_path: Path) -> None:
    """What they do is not known, so nothing is kept."""
    options = OrtBackendOptions(cache_folder=tmp_path, pre_ort_model_transforms=[lambda _model: None])
    require_same(nn.Linear(3, 2), torch.rand(2, 3), options=options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    """Whoever asks for a cache gets one."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot write to") as caught:
        torch.compile(torch.cos, backend=OrtBackend(OrtBackendOptions(cache_folder=tmp_path / "file")))(torch.rand(2))
    assert isinstance(caught.value.inner_exception, OutputWriteError)  # type: ignore[attr-defined]


def test_equal_graphs_share_a_session() -> None:
    """Two layers of the same sizes are compiled once while one of them is alive."""
    backend = OrtBackend()
    layers = [torch.compile(nn.Linear(3, 3), backend=backend) for _ in range(2)]
    for layer in layers:
        layer(torch.rand(2, 3)).sum().backward()
    sessions = [graph.sessions[0].session for graph in backend.graphs if graph.report.kind == "forward"]
    assert len({id(session) for session in sessions}) == 1
