"""Backend options: the ones of PyTorch's own `onnxrt` backend before 2.13, and newer ones."""

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
from onnxtool.torch_backend.lower.random import DROPOUT_MASKS
from onnxtool.torch_backend.own_translations import Translations, check_translations

Provider = str | tuple[str, Mapping[str, object]]
"""A provider as its name, or its name with provider options."""

Transform = Callable[[onnx.ModelProto], None]
"""Modifies a model in place."""

Converter = Callable[[torch.fx.GraphModule], ir.Model | onnx.ModelProto]
"""Translates a graph of ATen operators whose placeholders have fake values in `meta["val"]`.

The model has the graph's inputs and outputs in order; `SymInt` inputs are INT64 scalars.
"""

MATMUL_PLACEMENTS = ("measured", "onnxruntime")


class OrtBackendOptions(Options):
    """Options for partitioning, translating and running graphs. Equal instances share one backend.

    Attributes:
        preferred_execution_providers: the first providers, in order.
        infer_execution_providers: whether the devices of a graph's inputs (or of its outputs, if it has no inputs) add
            a provider.
        default_execution_providers: the last providers; by default the CPU.
        preallocate_output: whether PyTorch allocates the outputs of static graphs for onnxruntime to write to.
        use_aot_autograd: whether the backend takes TorchDynamo graphs and runs AOTAutograd on them. Otherwise, it
            takes graphs of ATen operators, and is itself the compiler to pass to AOTAutograd.
        ort_session_options: copied to every session; by default, a session has as many threads as PyTorch; they
            spin during a call but never between calls.
        pre_ort_model_transforms: functions that modify each model in place before its session is created, or names of
            built-in ones (onnxtool/torch_backend/lower/finishing.py).
        partition_fn: splits a joint graph into forward and backward; by default the minimum cut.
        assert_close_to_baseline: whether each call is compared with the same graph in PyTorch, at twice the cost.
        rtol: relative tolerance of that comparison.
        atol: absolute tolerance of that comparison.
        converter: translates a graph: a function, or a name in onnxtool/torch_backend/translator.py. The environment
            variable ONNXRT_CHANGE_REWRITER=1 selects the second name there.
        translations: own translations by operator, PyTorch's or the user's, as in the `custom_translation_table` of
            `torch.onnx.export`.
        optimize: whether constants are folded and functions inlined before the session is created.
        flush_denormals: whether numbers below 1.2e-38 (float32) count as zero in sessions. With user-provided session
            options, this applies only to the calling thread, unless these options request it.
        cache_folder: the folder that keeps translated graphs for later processes; none by default.
        dropout: `eager` draws the same masks as eager PyTorch, in one thread on most processors; `fast` draws
            different masks with the same distribution in all threads, also reproducible by PyTorch's seed. It covers
            dropout and, in float32 and float64, scaled_dot_product_attention, on the CPU; other random numbers always
            match eager PyTorch.
        matmuls: `measured` runs each large matmul and convolution on the CPU in onnxruntime or PyTorch, whichever a
            measurement at compile time finds faster (kept in `cache_folder`); `onnxruntime` leaves all of them in
            onnxruntime.

    Raises:
        OptionError: an option does not accept a value.
        CompilationError: `dropout` or `translations` has no effect.
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
    translations: Translations = dataclasses.field(default_factory=dict, hash=False)
    optimize: bool = True
    flush_denormals: bool = True
    cache_folder: OptionalPath = UNSET
    dropout: Annotated[str, Option(choices=tuple(DROPOUT_MASKS))] = "eager"
    matmuls: Annotated[str, Option(choices=MATMUL_PLACEMENTS)] = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_translations(self.translations)
        if self.translations and callable(self.converter):
            raise CompilationError("translations has no effect with a function as converter", "leave one out")
        if self.dropout != "eager" and not self.use_aot_autograd:
            raise CompilationError(
                f"dropout={self.dropout!r} has no effect without use_aot_autograd: the graph is traced already",
                "trace within onnxtool.torch_backend.capture.traceable_functions(dropout)",
            )

    @classmethod
    @checked
    def from_mapping(cls, options: Mapping[str, Any]) -> OrtBackendOptions:
        """Make options from the mapping passed to `torch.compile(options=...)`.

        Raises:
            CompilationError: there is no option of that name.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(sorted(set(options) - set(known)), known)
        return cls(**options)


_EXPORTERS_OPTIONS = {
    "target_opset": "graphs have the opset of PyTorch's exporter, and run in this process only",
    "patterns": "list passes in pre_ort_model_transforms",
    "constant_folding": "optimize=False switches it off",
    "remove_unused": "a graph has no unused nodes",
    "verbose": "explain() says what was compiled",
    "export_options": "converter is a function that exports as you like",
    "dispatcher": "translations takes a function for each operator",
    "custom_translation_table": "translations takes the same table",
}
"""Options of other onnxruntime exporters, and what to use instead."""


def refuse_unknown(unknown: Sequence[str], names: Sequence[str]) -> None:
    """Raise if there are unknown option names, and say what replaces them.

    Raises:
        CompilationError: `unknown` is not empty.
    """
    if unknown:
        instead = [f"{name}: {_EXPORTERS_OPTIONS[name]}" for name in unknown if name in _EXPORTERS_OPTIONS]
        raise CompilationError(
            f"the backend has no option {', '.join(unknown)}",
            "; ".join([*instead, f"the options are {', '.join(names)}"]),
        )
