"""What PyTorch's own onnxrt backend did, by its tests: names, instances, providers, dumps, transforms."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, dump_onnx, onnxtool_backend
from onnxtool.torch_backend.sessions import select_providers
from tests.torch_backend.oracle import require_same

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def test_the_backend_is_known_to_pytorch_by_name() -> None:
    """`torch.compile(backend="onnxtool")` finds it."""
    assert "onnxtool" in torch._dynamo.list_backends()
    compiled = torch.compile(lambda x: x.cos() + 1, backend="onnxtool", options={"rtol": 1e-3})
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).cos() + 1, atol=1e-6, rtol=1e-6)


def test_an_unknown_option_is_refused() -> None:
    """A misspelled option must not be ignored."""
    with pytest.raises(Exception, match="no option preallocate"):
        torch.compile(lambda x: x + 1, backend="onnxtool", options={"preallocate": True})(torch.ones(3))


def test_equal_options_share_an_instance_of_the_last_eight() -> None:
    """Options of another value get another one, and the ninth forgets the first."""
    instances = [OrtBackend.with_options(OrtBackendOptions(rtol=1e-3 * number)) for number in range(1, 10)]
    assert OrtBackend.with_options(OrtBackendOptions(rtol=2e-3)) is instances[1]
    assert OrtBackend.with_options(OrtBackendOptions(rtol=1e-3)) not in instances


def test_a_batch_of_one_makes_a_second_graph() -> None:
    """PyTorch treats the size 1 as a constant."""
    model, backend = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), OrtBackend()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for size in (3, 5, 1, 1):
            x = torch.rand(size, 2)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-6, rtol=1e-6)
    assert len(backend.graphs) == 2
    assert backend.execution_count == 4


def test_preferred_providers_come_before_inferred_and_default_ones() -> None:
    """Each provider stands where it comes first."""
    options = OrtBackendOptions(
        preferred_execution_providers=[("TensorrtExecutionProvider", {"device_id": "1"})],
        default_execution_providers=[CPU, "XnnpackExecutionProvider"],
    )
    chosen = select_providers(options, [torch.empty(1, device="meta"), torch.empty(1)], [])
    assert chosen == (("TensorrtExecutionProvider", {"device_id": "1"}), CPU, "XnnpackExecutionProvider")


def test_providers_are_inferred_from_all_devices_of_the_inputs_or_of_the_results_without_any() -> None:
    """A graphics card comes before the processor, on which sizes and scalars are; results are made somewhere."""
    with torch._subclasses.FakeTensorMode():
        mixed = [torch.empty(1), torch.empty(1, device="cuda")]
    assert select_providers(OrtBackendOptions(), mixed, []) == (CUDA, CPU)
    assert select_providers(OrtBackendOptions(), mixed[:1], mixed) == (CPU,)
    assert select_providers(OrtBackendOptions(), [], mixed[1:]) == (CUDA, CPU)
    assert select_providers(OrtBackendOptions(infer_execution_providers=False), [], mixed[1:]) == (CPU,)


def test_preallocated_results_are_the_same() -> None:
    """PyTorch allocates them, and every call has its own."""
    options = OrtBackendOptions(preallocate_output=True)
    require_same(lambda x: (x.T.exp().T, x > 0, x.argmax(-1)), torch.rand(3, 4, requires_grad=True), options=options)
    compiled = torch.compile(lambda x: x + 1, backend=OrtBackend(options))
    first = compiled(torch.zeros(2))
    compiled(torch.ones(2))
    assert first.tolist() == [1.0, 1.0]


def test_transforms_are_called_on_each_model_and_what_they_change_runs() -> None:
    """The classic: Relu becomes Sigmoid."""
    recorded: list[onnx.ModelProto] = []

    def sigmoid(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Relu":
                node.op_type = "Sigmoid"

    backend = OrtBackend(OrtBackendOptions(pre_ort_model_transforms=[recorded.append, sigmoid]))
    x = torch.linspace(-1, 1, 5)
    torch.testing.assert_close(torch.compile(torch.relu, backend=backend)(x), x.sigmoid(), atol=1e-6, rtol=1e-6)
    assert len(recorded) == 1


def test_ready_made_transforms_are_called_by_name() -> None:
    """The passes of `onnxtool optimize` keep results and gradients."""
    options = OrtBackendOptions(pre_ort_model_transforms=["tidy", "gelu"])
    require_same(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.rand(3, 4), options=options)


def test_a_difference_from_the_baseline_is_an_error() -> None:
    """Each call is compared with PyTorch's answer where that is asked for."""

    def spoil(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Cos":
                node.op_type = "Sin"

    options = OrtBackendOptions(assert_close_to_baseline=True, pre_ort_model_transforms=[spoil])
    with pytest.raises(Exception, match="result 0 of a graph differs from PyTorch's"):
        torch.compile(torch.cos, backend=OrtBackend(options))(torch.rand(3))


def test_the_baseline_draws_the_same_random_numbers() -> None:
    """A comparison neither fails because of dropout nor changes what is drawn next."""
    options = OrtBackendOptions(assert_close_to_baseline=True)
    require_same(lambda x: nn.functional.dropout(x * 2, 0.5), torch.rand(4, 4, requires_grad=True), options=options)


def test_session_options_of_the_user_are_used() -> None:
    """Among them where onnxruntime saves what it made of the model."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    backend = OrtBackend(OrtBackendOptions(ort_session_options=settings))
    torch.compile(lambda x: x * 2, backend=backend)(torch.rand(3))
    used = backend.graphs[0].sessions[0].session.get_session_options()
    assert used.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL


def test_a_partition_function_of_the_user_cuts_forward_from_backward() -> None:
    """The default partition saves more than the minimum cut."""
    from functorch.compile import default_partition

    calls = []

    def partition(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return default_partition(*arguments, **options)

    require_same(nn.Linear(3, 3), torch.rand(2, 3), options=OrtBackendOptions(partition_fn=partition))
    assert len(calls) == 1


def test_without_aot_autograd_it_is_a_compiler_for_aot_autograd() -> None:
    """As the original was used: `aot_autograd(fw_compiler=backend)`."""
    from torch._dynamo.backends.common import aot_autograd

    backend = OrtBackend(OrtBackendOptions(use_aot_autograd=False))
    compiled = torch.compile(nn.Linear(3, 2), backend=aot_autograd(fw_compiler=backend))
    compiled(torch.rand(4, 3)).sum().backward()
    assert backend.execution_count == 2


def test_every_graph_is_dumped_with_its_text(tmp_path: Path) -> None:
    """Numbers go on from what is there, and cleaning removes only dumps of that prefix."""
    (tmp_path / "other.onnx").write_bytes(b"")
    (tmp_path / "llama7.onnx").write_bytes(b"")
    with dump_onnx("llama", folder=tmp_path, clean=True):
        torch.compile(nn.Linear(3, 2), backend=OrtBackend())(torch.rand(4, 3)).sum().backward()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("llama0.onnx", "llama0.txt", "llama1.onnx", "llama1.txt", "other.onnx")
    ]
    onnx.checker.check_model(onnx.load(tmp_path / "llama0.onnx"))
    assert "addmm" in (tmp_path / "llama0.txt").read_text()


def test_no_dump_is_written_outside_of_the_block(tmp_path: Path) -> None:
    """The environment is as it was."""
    with dump_onnx("graph", folder=tmp_path):
        pass
    torch.compile(torch.cos, backend=OrtBackend())(torch.rand(3))
    assert list(tmp_path.iterdir()) == []


def test_types_of_a_dumped_graph_are_those_of_the_inputs(tmp_path: Path) -> None:
    """A boolean stays one, and a size is a scalar of 64 bits."""
    with dump_onnx("graph", folder=tmp_path):
        torch.compile(lambda x, m: x.masked_fill(m, 0.0) * x.shape[0], backend=OrtBackend(), dynamic=True)(
            torch.rand(3, 2), torch.ones(3, 2, dtype=torch.bool)
        )
    graph = onnx.load(tmp_path / "graph0.onnx").graph
    types = sorted(value.type.tensor_type.elem_type for value in graph.input)
    assert set(types) <= {TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL}
    assert TensorProto.BOOL in types


def test_the_entry_point_is_the_backend() -> None:
    """Installed, PyTorch loads it by its name."""
    from importlib.metadata import entry_points

    found = entry_points(group="torch_dynamo_backends")
    if "onnxtool" not in found.names:
        pytest.skip("the package is found but not installed")
    assert found["onnxtool"].load() is onnxtool_backend
