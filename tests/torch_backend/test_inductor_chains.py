"""Chains of operators that stay in PyTorch become one kernel of inductor where that pays; numbers stay the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtool.errors import CompilationError, OptionError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, inductor_chains, measurement
from onnxtool.torch_backend.compiler import compile_graph
from tests.torch_backend.oracle import require_same

HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")
INDUCTOR, PYTORCH = (1.0, 9.0), (9.0, 1.0)
BFLOAT16 = 1e-2
"""Of one operator; in bfloat16 everything stays in PyTorch on the CPU."""
GRADIENTS = 1e-3
"""Of a net whose largest gradients are several hundred."""

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")


class Compiler:
    """Stands for inductor: a chain runs as it is, and is kept here."""

    def __init__(self) -> None:
        self.times: Sequence[float] = INDUCTOR
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda result: result
        self.compiled: list[list[str]] = []

    def compile(self, module: torch.fx.GraphModule, _inputs: object, options: dict[str, Any]) -> Callable[..., Any]:
        assert options["fx_graph_cache"] is False
        self.compiled.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return lambda *inputs: tuple(self.change(result) for result in module(*inputs))

    def shortest_ms(self, calls: Sequence[Callable[[], Any]]) -> Sequence[float]:
        for call in calls:
            call()
        return self.times


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_measured", {})
    monkeypatch.setattr(inductor_chains, "_kernels", {})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(torch._inductor, "compile", compiler.compile)
    monkeypatch.setattr(measurement, "_shortest_ms", compiler.shortest_ms)
    return compiler


def options(**others: Any) -> OrtBackendOptions:
    return OrtBackendOptions(elementwise="inductor", **others)


def large(seed: int = 0, rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_kernels(backend: OrtBackend) -> list[str]:
    """Return the operators of which the explanation says that they run in a kernel of inductor."""
    nodes = (node for graph in backend.explain().graphs for node in graph.eager)
    return [node.operator.split(".")[1] for node in nodes if node.reason.startswith("in one kernel of inductor")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_computes_what_follows_a_convolution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forward, gradients and running statistics; without anything that stands for inductor but its clock."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)  # too few kernels for them
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)  # no program that tries it
    monkeypatch.setattr(measurement, "_shortest_ms", lambda _calls: INDUCTOR)
    # The gradient of a bias before a batch normalization is zero, and what is computed is rounding alone.
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    pictures = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    backend = require_same(net, pictures, options=options(matmuls="onnxruntime"), atol=4 * GRADIENTS)
    assert in_kernels(backend) == [
        *("_native_batch_norm_legit_functional", "relu", "max_pool2d_with_indices"),
        *("clone", "clone", "max_pool2d_with_indices_backward", "threshold_backward", "native_batch_norm_backward"),
    ]
    assert list(tmp_path.rglob("*.so"))
    assert not {"fxgraph", "aotautograd"} & {path.name for path in tmp_path.iterdir()}  # which hold pickles


def test_a_chain_ends_at_what_inductor_does_not_fuse(compiler: Compiler) -> None:
    """A matmul between two chains reads the one and is read by the other; what it does not touch is not cut."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = (x * 0.5).sin()
        product = before @ w
        return (product.cos() + before).tanh(), x.exp().neg().abs()

    backend = require_same(function, large(), large(1) * 0.1, options=options(), atol=BFLOAT16)
    assert sorted(map(len, compiler.compiled)) == [2, 3, 3]
    assert len(in_kernels(backend)) == 8


def test_a_chain_that_reads_both_sides_of_a_matmul_waits_for_it(compiler: Compiler) -> None:
    """A chain whose end needs its own beginning by way of a matmul is two."""
    require_same(
        lambda x, w: ((x.sin().cos() @ w) + x.sin().cos()).exp().sigmoid(),
        large(),
        large(1) * 0.1,
        options=options(),
        atol=BFLOAT16,
    )
    assert compiler.compiled == [["sin", "cos"], ["add", "exp", "sigmoid"]]


def test_what_is_changed_in_place_keeps_its_order(compiler: Compiler) -> None:
    """In a graph that is not functional: the chain reads the tensor before the change."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.sin().cos()
        return before, x.mul_(2.0)

    graph = make_fx(function, tracing_mode="fake")(large())
    call, _ = compile_graph(graph, "inference", options(use_aot_autograd=False))
    (before, after), (expected, changed) = call(large()), function(large())
    torch.testing.assert_close(before, expected)
    torch.testing.assert_close(after, changed)


def test_random_numbers_are_drawn_in_their_order(compiler: Compiler) -> None:
    """Also where the first draw has to wait for a chain, and the second for nothing."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        late = torch.bernoulli(x.sin().sigmoid())
        return (late * 2).cos(), nn.functional.dropout(x, 0.5).cos().sin()

    require_same(function, large(), options=options(), atol=BFLOAT16)
    assert compiler.compiled


def test_views_and_reductions_belong_to_the_chain(compiler: Compiler) -> None:
    require_same(
        lambda x: x.sin().view(128, 2, 256).sum(2, keepdim=True).neg().squeeze(2),
        large(),
        options=options(),
        atol=BFLOAT16,
    )
    assert compiler.compiled == [["sin", "view_1", "sum_1", "neg"]]  # the last view is made at the end


def test_a_view_that_others_read_is_made_by_pytorch(compiler: Compiler) -> None:
    """A kernel would copy it."""
    require_same(
        lambda x, w: x.sin().cos().transpose(0, 1)[:128] @ w, large(), large(1) * 0.1, options=options(), atol=BFLOAT16
    )
    assert compiler.compiled == [["sin", "cos"]]


def test_results_have_the_layouts_that_others_expect(compiler: Compiler) -> None:
    """Whatever layout the kernel gives them."""
    compiler.change = lambda result: result.t().clone(memory_format=torch.contiguous_format).t()
    backend = require_same(lambda x: x.sin().cos(), large(), options=options(), atol=BFLOAT16)
    assert in_kernels(backend) == ["sin", "cos"]


def test_booleans_are_compared_too(compiler: Compiler) -> None:
    require_same(lambda x: (x.sin() > 0.5).logical_not(), large(), options=options(), atol=BFLOAT16)
    assert len(compiler.compiled) == 1


def test_a_chain_that_gains_nothing_stays_as_it_is(compiler: Compiler) -> None:
    compiler.times = PYTORCH
    backend = require_same(lambda x: x.sin().cos(), large(), options=options(), atol=BFLOAT16)
    assert (len(compiler.compiled), in_kernels(backend)) == (1, [])


def test_what_runs_where_is_reported_with_its_times(compiler: Compiler) -> None:
    backend = require_same(lambda x: x.sin().cos(), large(), options=options(), atol=BFLOAT16)
    text = "aten.sin.default in PyTorch: in one kernel of inductor: measured: 1.00 ms, 9.00 ms one after another"
    assert text in str(backend.explain())


def test_equal_chains_are_compiled_once(compiler: Compiler) -> None:
    backend = require_same(
        lambda x, w: (x.sin().cos() @ w).sin().cos(), large(), large(1) * 0.1, options=options(), atol=BFLOAT16
    )
    assert (len(compiler.compiled), len(in_kernels(backend))) == (1, 4)


def test_a_later_process_decides_by_the_record_of_the_first(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And compiles nothing where PyTorch was as fast."""
    compiler.times = PYTORCH
    for _process in range(2):
        torch._dynamo.reset()
        monkeypatch.setattr(measurement, "_measured", {})
        monkeypatch.setattr(inductor_chains, "_kernels", {})
        require_same(lambda x: x.sin().cos(), large(), options=options(cache_folder=tmp_path), atol=BFLOAT16)
    assert len(compiler.compiled) == 1


@pytest.mark.parametrize(
    ("function", "settings", "arguments"),
    [
        (lambda x: x[:8].sin().cos(), {"elementwise": "inductor"}, {}),
        (lambda x: x.sin().cos(), {"elementwise": "inductor"}, {"dynamic": True}),
        (lambda x: x.sin(), {"elementwise": "inductor"}, {}),
        (lambda x: x.sin().cos(), {}, {}),
    ],
    ids=["small", "of unknown size", "one operator", "switched off"],
)
def test_what_is_no_chain_is_not_compiled(
    compiler: Compiler, function: Any, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    require_same(function, large(), options=OrtBackendOptions(**settings), atol=BFLOAT16, **arguments)
    assert compiler.compiled == []


def test_a_kernel_with_other_numbers_is_refused(compiler: Compiler) -> None:
    compiler.change = lambda result: result + 0.25
    with pytest.raises(
        BackendCompilerFailed, match=r"inductor's kernel for aten.sin.default, aten.cos.default gives other"
    ):
        require_same(lambda x: x.sin().cos(), large(), options=options())


def test_a_chain_that_inductor_cannot_compile_is_refused_by_name(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    with pytest.raises(
        BackendCompilerFailed, match=r"cannot compile aten.sin.default, aten.cos.default: no space left"
    ):
        require_same(lambda x: x.sin().cos(), large(), options=options())


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("a-compiler-that-is-not-there",))
    with pytest.raises(CompilationError, match=r"needs a C\+\+ compiler: .*a-compiler-that-is-not-there"):
        options()


def test_a_way_of_another_name_is_refused() -> None:
    with pytest.raises(OptionError, match="'triton' is not one of"):
        OrtBackendOptions(elementwise="triton")
