"""The cache on disk: what one process translated, the next one only loads."""

from __future__ import annotations

import json
import operator
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from onnxtool.errors import OutputWriteError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, translator
from onnxtool.torch_backend.cache import Cache
from onnxtool.torch_backend.lower import torch_onnx
from onnxtool.torch_backend.lower.torch_onnx import decompositions
from onnxtool.torch_backend.nodes import called
from tests.torch_backend.oracle import require_same

_PROGRAM = """
import sys, torch
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
compiled = torch.compile(model, backend=OrtBackend(OrtBackendOptions(cache_folder=sys.argv[1])))
compiled(torch.ones(3, 4)).sum().backward()
print(model[0].weight.grad.sum().item())
print(*sorted({"onnxscript", "torch._inductor.lowering"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_second_process_translates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both graphs come from the disk, their gradients are the same, and no translator and no inductor loaded."""
    translator._SESSIONS.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["program", str(tmp_path)])
        exec(_PROGRAM, {"__name__": "__main__"})  # noqa: S102 - the program above
    kept = sorted(path.name for path in tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert len([name for name in kept if name.endswith(".onnx")]) == 2
    assert done.stdout.splitlines() == [capsys.readouterr().out.splitlines()[0], ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Every graph that is translated while the test runs."""
    seen: list[torch.fx.GraphModule] = []

    def record(graph_module: torch.fx.GraphModule) -> object:
        seen.append(graph_module)
        return torch_onnx.translate(graph_module)

    monkeypatch.setitem(translator.CONVERTERS, "fx", record)
    return seen


def compile_and_call(function: object, folder: Path, *inputs: torch.Tensor) -> OrtBackend:
    torch._dynamo.reset()
    translator._SESSIONS.clear()  # as if this was another process
    return require_same(function, *inputs, options=OrtBackendOptions(cache_folder=folder))  # type: ignore[arg-type]


def test_other_shapes_types_and_constants_are_other_graphs(
    tmp_path: Path, translated: list[torch.fx.GraphModule]
) -> None:
    """Each of them is translated once, and the same ones again not."""
    for _ in range(2):
        compile_and_call(lambda x: x * 2, tmp_path, torch.rand(3))
        compile_and_call(lambda x: x * 3, tmp_path, torch.rand(3))
        compile_and_call(lambda x: x * 2, tmp_path, torch.rand(4))
        compile_and_call(lambda x: x * 2, tmp_path, torch.rand(3).double())
    assert len(translated) == 4


def test_what_cannot_be_compiled_is_known_to_the_next_process(tmp_path: Path) -> None:
    """Reasons are kept as JSON, by the number of the node."""
    compile_and_call(lambda x: torch.erf(x * 2) + 1, tmp_path, torch.rand(3, dtype=torch.float64))
    (kept,) = (path for path in tmp_path.glob("*.json") if "real" not in path.read_text())
    assert all(node.isdigit() and "onnxruntime" in reason for node, reason in json.loads(kept.read_text()).items())


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a"])
def test_a_damaged_model_is_made_again(tmp_path: Path, content: bytes) -> None:
    """A cache may be lost at any time."""
    compile_and_call(nn.Linear(3, 2), tmp_path, torch.rand(2, 3))
    for path in tmp_path.glob("*.onnx"):
        path.write_bytes(content)
    compile_and_call(nn.Linear(3, 2), tmp_path, torch.rand(2, 3))
    assert all(path.read_bytes() != content for path in tmp_path.glob("*.onnx"))


def test_a_flipped_bit_in_a_cached_model_is_not_computed_with(
    tmp_path: Path, translated: list[torch.fx.GraphModule]
) -> None:
    """A constant of another value is still a model that loads."""
    compile_and_call(lambda x: x * 3.5, tmp_path, torch.rand(3))
    (kept,) = tmp_path.glob("*.onnx")
    content = kept.read_bytes()
    spoiled = content.replace(struct.pack("<f", 3.5), struct.pack("<f", 4.5))
    assert onnx.load_from_string(spoiled).graph.node
    assert spoiled != content
    kept.write_bytes(spoiled)
    compile_and_call(lambda x: x * 3.5, tmp_path, torch.rand(3))
    assert len(translated) == 2
    assert kept.read_bytes() != spoiled


def test_a_cached_model_under_the_name_of_another_graph_is_not_used(tmp_path: Path) -> None:
    """Its answers would be those of that graph."""
    compile_and_call(lambda x: x * 3.5, tmp_path, torch.rand(3))
    (kept,) = tmp_path.glob("*.onnx")
    other = kept.read_bytes()
    kept.unlink()
    compile_and_call(lambda x: x * 4.5, tmp_path, torch.rand(3))
    (kept,) = tmp_path.glob("*.onnx")
    kept.write_bytes(other)
    compile_and_call(lambda x: x * 4.5, tmp_path, torch.rand(3))


def test_a_cached_model_of_other_types_is_not_used(tmp_path: Path) -> None:
    """Not even where its checksum is right: outputs would be read as what they are not."""
    compile_and_call(lambda x: x * 3.5, tmp_path, torch.rand(3))
    (kept,) = tmp_path.glob("*.onnx")
    model = onnx.load(kept)
    changes: list[Callable[[onnx.ModelProto], object]] = [
        lambda copy: copy.graph.output.append(copy.graph.output[0]),
        lambda copy: copy.metadata_props.clear(),
        lambda copy: copy.graph.node[-1].CopyFrom(
            onnx.helper.make_node("IsNaN", *[[v.name] for v in (copy.graph.input[0], copy.graph.output[0])])
        ),
    ]
    for change in changes:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy)
        copy.graph.output[0].type.tensor_type.elem_type = 0
        Cache(tmp_path).write(kept.stem, copy.SerializeToString())
        compile_and_call(lambda x: x * 3.5, tmp_path, torch.rand(3))


def test_a_file_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    """Here it is a folder, which nothing can be written over: that is an error, and not an answer."""
    compile_and_call(nn.Linear(3, 2), tmp_path, torch.rand(2, 3))
    for path in tmp_path.glob("*.onnx"):
        path.unlink()
        path.mkdir()
    with pytest.raises(Exception, match="cannot write to"):
        compile_and_call(nn.Linear(3, 2), tmp_path, torch.rand(2, 3))


@pytest.mark.parametrize("target", [torch.sym_float, operator.truediv, torch.ops.aten.add.Tensor, "size"])
def test_fingerprints_hold_no_addresses(target: object) -> None:
    """What a node calls is called by its name, so that the next process finds the same graph."""
    assert "0x" not in called(target)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / f"{'a' * 64}.json")
    assert Cache(tmp_path).read_json("a" * 64) is None


def test_several_writers_fill_one_cache(tmp_path: Path) -> None:
    """Both at once: a file is there as a whole or not at all."""
    models = [bytes([number]) * 100_000 for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda model: Cache(tmp_path).write("0" * 64, model), models))
    assert Cache(tmp_path).read("0" * 64) in models
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"x": 1}', '{"999": "far"}', "[" * 100_000])
def test_damaged_reasons_are_found_out_again(tmp_path: Path, content: str) -> None:
    """They are data, and nothing of them is evaluated."""
    compile_and_call(lambda x: torch.erf(x * 2), tmp_path, torch.rand(3, dtype=torch.float64))
    for path in tmp_path.glob("*.json"):
        path.write_text(content)
    compile_and_call(lambda x: torch.erf(x * 2), tmp_path, torch.rand(3, dtype=torch.float64))


@pytest.mark.parametrize("content", ["", "[1]", '{"real": 1}', '{"real": ["aten::nothing"], "complex": []}'])
def test_a_damaged_record_of_translations_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """One that cannot be read is made again; one that lies leaves operators to PyTorch."""
    torch_onnx.recall_translations(Cache(tmp_path))
    (record,) = tmp_path.iterdir()
    good = record.read_text()
    record.write_text(content)
    monkeypatch.setattr(torch_onnx, "_known", [])
    decompositions.cache_clear()
    compile_and_call(lambda x: torch.erf(x * 2).sum(), tmp_path, torch.rand(3, requires_grad=True))
    assert record.read_text() in (good, '{"real": ["aten::nothing"], "complex": []}')
    decompositions.cache_clear()


def test_transforms_of_the_user_are_not_cached(tmp_path: Path) -> None:
    """What they do is not known, so no graph is kept."""
    options = OrtBackendOptions(cache_folder=tmp_path, pre_ort_model_transforms=[lambda _model: None])
    require_same(nn.Linear(3, 2), torch.rand(2, 3), options=options)
    assert list(tmp_path.glob("*.onnx")) == []


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
