"""The options of the backend: those of PyTorch's own `onnxrt` backend before 2.13, and newer ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from onnxtool.errors import CompilationError
from onnxtool.options import UNSET, Option, OptionalPath, Options, checked
from onnxtool.torch_backend.lower.decompositions.random import DROPOUT_MASKS

Provider = str | tuple[str, Mapping[str, object]]
"""A provider by its name, or by its name and its own options."""

Transform = Callable[[onnx.ModelProto], None]
"""Changes a model in place."""

Converter = Callable[[torch.fx.GraphModule], ir.Model | onnx.ModelProto]
"""Translates a graph of ATen operators, whose placeholders have their fake value as `meta["val"]`.

The model has the inputs and outputs of the graph in their order; `SymInt` inputs are INT64 scalars.
"""

MATMUL_PLACEMENTS = ("measured", "onnxruntime")
ELEMENTWISE_KERNELS = ("pytorch", "inductor")


class OrtBackendOptions(Options):
    """How graphs are cut, translated and run. Instances that are equal share one backend.

    Attributes:
        preferred_execution_providers: the first providers, in their order.
        infer_execution_providers: whether the devices of a graph's inputs add a provider; of its outputs if
            it has no inputs.
        default_execution_providers: the last providers; by default the CPU.
        preallocate_output: whether PyTorch allocates the outputs of static graphs, and onnxruntime writes into them.
        use_aot_autograd: whether the backend takes graphs of TorchDynamo, and runs AOTAutograd on them. Otherwise it
            takes graphs of ATen operators, and is itself the compiler to pass to AOTAutograd.
        ort_session_options: copied into every session; by default a session has as many threads as PyTorch, which wait
            busily during a call and never between two calls.
        pre_ort_model_transforms: functions that change each model in place before its session is made, or names of
            built-in ones (onnxtool/torch_backend/lower/finishing.py).
        partition_fn: cuts a joint graph into forward and backward; by default the minimum cut.
        assert_close_to_baseline: whether each call is compared with the same graph in PyTorch, at twice the cost.
        rtol: relative tolerance of that comparison.
        atol: absolute tolerance of that comparison.
        converter: translates a graph: a function, or a name in onnxtool/torch_backend/translator.py. The environment
            variable ONNXRT_CHANGE_REWRITER=1 selects the second name there.
        optimize: whether constants are folded and functions inlined before the session is made.
        flush_denormals: whether numbers below 1.2e-38 (float32) count as zero in sessions. With session options of the
            user, that holds in the calling thread alone, unless these options ask for it.
        cache_folder: the folder that keeps translated graphs for the next process; none by default.
        dropout: `eager` draws the masks that eager PyTorch draws, in one thread on most processors; `fast` draws others
            with the same distribution in all threads, reproducible by PyTorch's seed as well. It is for dropout
            and, in float32 and float64, for scaled_dot_product_attention, on the CPU; other random numbers are always
            eager PyTorch's.
        matmuls: `measured` runs each large matmul and convolution of the CPU where it is faster, in onnxruntime or in
            PyTorch, by a measurement when the graph is compiled, which `cache_folder` keeps; `onnxruntime` leaves all
            of them in onnxruntime.
        elementwise: how chains of elementwise operators and reductions run that stay in PyTorch on the CPU: `pytorch`
            calls one kernel after another; `inductor` compiles each chain into one, where a measurement finds that
            faster. It needs a C++ compiler.

    Raises:
        OptionError: a value is none that the option takes.
        CompilationError: `dropout` has no effect, or inductor has no C++ compiler.
    """

    preferred_execution_providers: Sequence[Provider] = ()
    infer_execution_providers: bool = True
    default_execution_providers: Sequence[Provider] = ("CPUExecutionProvider",)
    preallocate_output: bool = False
    use_aot_autograd: bool = True
    ort_session_options: ort.SessionOptions | None = None
    pre_ort_model_transforms: Sequence[Transform | str] = ()
    partition_fn: Callable[..., Any] | None = None
    assert_close_to_baseline: bool = False
    rtol: Annotated[float, Option(minimum=0)] = 1e-4
    atol: Annotated[float, Option(minimum=0)] = 1e-4
    converter: Converter | str = "fx"
    optimize: bool = True
    flush_denormals: bool = True
    cache_folder: OptionalPath = UNSET
    dropout: Annotated[str, Option(choices=tuple(DROPOUT_MASKS))] = "eager"
    matmuls: Annotated[str, Option(choices=MATMUL_PLACEMENTS)] = "measured"
    elementwise: Annotated[str, Option(choices=ELEMENTWISE_KERNELS)] = "pytorch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elementwise == "inductor":
            _require_compiler()
        if self.dropout != "eager" and not self.use_aot_autograd:
            raise CompilationError(
                f"dropout={self.dropout!r} has no effect without use_aot_autograd: the graph is traced already",
                "trace within onnxtool.torch_backend.capture.traceable_functions(dropout)",
            )

    @classmethod
    @checked
    def from_mapping(cls, options: Mapping[str, Any]) -> OrtBackendOptions:
        """Make options from those of `torch.compile(options=...)`.

        Raises:
            CompilationError: there is no option of that name.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(sorted(set(options) - set(known)), known)
        return cls(**options)


def _require_compiler() -> None:
    """Raise where inductor would fail at the first kernel."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise CompilationError(
            f'elementwise="inductor" needs a C++ compiler: {error}',
            'install one, such as g++, name it in the environment variable CXX, or leave elementwise at "pytorch"',
        ) from error


_EXPORTERS_OPTIONS = {
    "target_opset": "graphs have the opset of PyTorch's exporter, and run in this process only",
    "patterns": "list passes in pre_ort_model_transforms",
    "constant_folding": "optimize=False switches it off",
    "remove_unused": "a graph has no unused nodes",
    "verbose": "make_aot_ort(verbose=1) and explain() say what was compiled",
    "export_options": "converter is a function that exports as you like",
    "dispatcher": "converter is a function that exports as you like",
}
"""Options that other exporters for onnxruntime have, and what to write here."""


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise if there are names of options that are not known, and say what stands for them.

    Raises:
        CompilationError: `unknown` is not empty.
    """
    if unknown:
        instead = [f"{name}: {_EXPORTERS_OPTIONS[name]}" for name in unknown if name in _EXPORTERS_OPTIONS]
        raise CompilationError(
            f"the backend has no option {', '.join(unknown)}",
            "; ".join([*instead, f"the options are {', '.join(known)}"]),
        )
